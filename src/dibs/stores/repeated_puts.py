"""What a put is told that is repeated, since the answer to the first was lost: which jobs stand for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.jobs import PutDone

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dibs.jobs import Put


def told_again(request: Put, plain: Sequence[int], live: Mapping[str | None, int]) -> PutDone:
    """The ids of its jobs, from those without keys that it has put, in their order, and from the live ones with keys.

    Those with keys are told by these: they may be of an earlier put, which was kept. When some have left meanwhile,
    only the ids of the others are told: nobody knows any more which of those without keys these are.
    """
    keys = [job.key for job in request.jobs]
    if len(plain) < keys.count(None):
        return PutDone((*plain, *(live[key] for key in keys if key in live)))
    rest = iter(plain)
    return PutDone(tuple(next(rest) if key is None else live[key] for key in keys if key is None or key in live))
