"""Mistakes to be planted into a client process: a chaos that does not find them proves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def _trust_for_ever() -> None:
    """A holder that never notices by its clock that its time is over."""
    from dibs import terms

    terms.local_deadline = lambda t0, ttl, margin: t0 + 3 * ttl  # type: ignore[attr-defined]


def _revived() -> None:
    """A lease that was lost is held again."""
    from dibs.lease import LeaseFacts

    real: Callable[[Any], bool] = vars(LeaseFacts)["held"].fget
    looks: dict[int, int] = {}

    def held(self: Any) -> bool:
        looks[id(self)] = looks.get(id(self), 0) + 1
        return real(self) or looks[id(self)] % 5 == 0

    LeaseFacts.held = property(held)  # type: ignore[assignment,method-assign]


def _leaked() -> None:
    """What is granted to a caller that was cancelled stays with it, and is renewed."""
    from dibs.session import Session

    Session.withdraw = lambda self, *asks: None  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "trust that never ends": _trust_for_ever,
    "a lost lease is revived": _revived,
    "a cancelled acquire is not withdrawn": _leaked,
}


def plant(bug: str) -> None:
    BUGS[bug]()
