"""Stands in for ``typing`` while nobody checks types; type checkers see nothing here but an import of it.

``typing`` takes 3 ms to load, and its ``NamedTuple`` twice as long to make a class as ``collections.namedtuple``. Both
would be paid for by every ``dibs run`` in every crontab: 6 ms of 50, where ``python -c pass`` takes 12 (medians of 40
starts). So no module of dibs imports ``typing`` when it runs (``tests/test_layering.py``).
"""

from __future__ import annotations

# Type checkers take this for true.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar, Union, cast, overload
else:
    from collections import namedtuple

    class _Form:
        """What stands in annotations, which nobody evaluates."""

        def __getitem__(self, types: object) -> _Form:
            return self

    Any = NoReturn = Union = _Form()

    class Generic:
        __slots__ = ()

        def __class_getitem__(cls, types: object) -> type:
            return cls

    Protocol = Generic

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
    "NamedTuple",
    "NoReturn",
    "Protocol",
    "TypeVar",
    "Union",
    "cast",
    "overload",
)
