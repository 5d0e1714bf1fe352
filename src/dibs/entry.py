"""``with`` what is a block itself: an ``__enter__`` that returns its object, and lets no Ctrl-C in on the way.

Python looks for signals where a function that is written in Python begins, so one of those could lose what has just
been taken in ``with claims.take(…)``: it is not in its block yet, and nothing would be left of it but its ttl. This one
is written in C.
"""

from __future__ import annotations

from functools import lru_cache, partial, update_wrapper

from dibs._typing import TypeVar

T = TypeVar("T")


def _enter(self: T) -> T:
    """What ``itself`` looks like to those who ask."""
    return self


# Of an iterator that has ended, ``next`` returns what it is given for that case. A cache that keeps nothing is here for
# what no other callable in C does: it is bound to its object, as a method.
itself = update_wrapper(lru_cache(maxsize=0)(partial(next, iter(()))), _enter)
