"""Where CPython keeps the attributes of an instance, for classes of which a process has many at once.

The instances of a class share one list of names, and each has an array of values beside it. The names are learned from
the first thirty instances alone: each that is made lets the list grow by one name less (``init_inline_values`` in
CPython's Objects/dictobject.c). What is set for the first time later than that, as the answer to a request is when a
thousand tasks ask before the first is answered, gives its instance a dictionary instead, and each one that follows,
until the process ends: slower to make and to read, and one more object for the garbage collector to look through.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C", bound="type[Any]")

# The thirtieth would be one of the late ones.
NAMES_MAX = 29


def laid_out(names: str) -> Callable[[C], C]:
    """Have the class know these attributes, at most NAMES_MAX, from the start. Others can be set all the same."""
    known = names.split()
    assert len(known) <= NAMES_MAX

    def lay_out(cls: C) -> C:
        first = object.__new__(cls)
        for name in known:
            setattr(first, name, None)
        return cls

    return lay_out
