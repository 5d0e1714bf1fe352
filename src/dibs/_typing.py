"""Stands in for ``typing`` while nobody checks types; type checkers see nothing here but an import of it.

``typing`` takes 3 ms to load, and its ``NamedTuple`` twice as long to make a class as ``collections.namedtuple``. Both
would be paid for by every ``dibs run`` in every crontab: 5 ms of 47, where ``python -c pass`` takes 11 (medians of 60
starts). So no module of dibs imports ``typing`` when it runs (``tests/test_layering.py``). What programs do with dibs's
classes while they run (annotations that are evaluated, ``typing.get_type_hints``, ``Batch[int]``) works all the same
(``tests/test_typing.py``).
"""

from __future__ import annotations

# Type checkers take this for true.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, Generic, Literal, NamedTuple, NoReturn, Protocol, TypeVar, cast, overload
else:
    from collections import namedtuple

    # They stand in annotations, which are strings; who evaluates one gets a class, which combines with ``| None``.
    Any = NoReturn = object

    class Generic:
        __slots__ = ()
        # As that of list: Batch[int] tells what it is of.
        __class_getitem__ = classmethod(type(list[int]))

    Protocol = Generic

    class Literal:
        __slots__ = ()

        def __class_getitem__(cls, values: object) -> type:
            return str  # of which alone there are any

    class _Fields(type):
        """Makes a named tuple of the annotations and defaults in the body of a class."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, body)
            types = body.pop("__annotations__")
            defaults = [body.pop(field) for field in types if field in body]
            made = namedtuple(name, types, defaults=defaults)
            made.__annotations__ = made.__new__.__annotations__ = types
            for key, value in body.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_Fields):
        pass

    def TypeVar(name: str, bound: object = None) -> str:  # noqa: N802
        return name

    def cast(types: object, value: object) -> object:
        return value

    def overload(function: object) -> object:
        return function


__all__ = (
    "TYPE_CHECKING",
    "Any",
    "Generic",
    "Literal",
    "NamedTuple",
    "NoReturn",
    "Protocol",
    "TypeVar",
    "cast",
    "overload",
)
