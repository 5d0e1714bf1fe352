"""What a call on jobs that failed had put, and ended, before it did: the same call is likely to come again.

A put that is repeated is known by its id as long as its jobs have not ended. Those of a call that failed at something
else may have been worked before it comes again, and must not be put a second time. Who ended jobs is told so once more,
and not that they are gone. Nothing else is kept: whoever was told now of an extension that was made some time ago would
trust it for too long.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.jobs import Finish, Put
from dibs.store import RowBusy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.jobs import JobOutcome, JobRequest


class Told:
    """The outcomes of one store object's last call, if that has failed."""

    def __init__(self) -> None:
        self._outcomes: dict[JobRequest, JobOutcome] = {}

    def begin(self, requests: Sequence[JobRequest]) -> list[Any]:
        """The outcomes of a new call as far as they are known, each in its place; None for the others."""
        told, self._outcomes = self._outcomes, {}
        return [told.get(request) for request in requests] if told else [None] * len(requests)

    def failed(self, requests: Sequence[JobRequest], outcomes: Sequence[Any]) -> None:
        """The call has failed: keep what it had put and ended."""
        self._outcomes = {
            request: outcome
            for request, outcome in zip(requests, outcomes, strict=True)
            if isinstance(request, (Put, Finish)) and outcome is not None and not isinstance(outcome, RowBusy)
        }


def left(kind: type[Any], requests: Sequence[JobRequest], outcomes: Sequence[Any]) -> list[tuple[int, Any]]:
    """The requests of a kind that have no outcome yet, with their places."""
    return [(i, r) for i, r in enumerate(requests) if type(r) is kind and outcomes[i] is None]
