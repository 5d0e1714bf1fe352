"""What a put is told that is repeated, since the answer to the first was lost: which jobs stand for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.jobs import PutDone

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dibs.jobs import Put


def told_again(request: Put, plain: Sequence[int], live: Mapping[str | None, int]) -> PutDone:
    """The ids of its jobs, from those without keys that it has put, in their order, and from the live ones with keys.

    Those with keys are told by these: they may be of an earlier put, which was kept. When some without keys have left,
    nobody knows which; then no id of such a job is told.
    """
    keyless = sum(job.key is None for job in request.jobs)
    rest = iter(plain if len(plain) == keyless else [0] * keyless)
    return PutDone(tuple(next(rest) if job.key is None else live.get(job.key, 0) for job in request.jobs))
