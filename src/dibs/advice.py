"""How many workers a queue needs, and why.

By Little's law as many workers are busy as jobs arrive in the time that one takes: arrival rate × time of work. They
should be busy for ``TARGET_USE`` of their time, so that a burst finds some of them free; what that needs is the advice.
All of it is measured over the last minute and over all processes (``dibs.load``), so it is smoothed by so much.

Jobs arrive as fast as they are taken and do not come back, plus what the queue grows by meanwhile: so a queue with too
few workers is told as many as would keep up, not as many as there are. Work off what has piled up with more.
"""

from __future__ import annotations

from math import ceil

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.load import COUNTED, load_key, read
from dibs.steps import acting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.desk import Desk
    from dibs.queue_records import QueueDepth
    from dibs.steps import Steps

# For how much of their time workers should be busy.
TARGET_USE = 0.8
# Less than this part of the window says too little.
ENOUGH_PART = 1 / 6
# The store binds when takes wait for it for more than this part of the workers' time, and claims when more than this
# part of the takes that were called came too late.
BINDS_PART = 0.5
# Nobody is told to change anything for less than this part of a worker.
SLACK = 0.05

WORK, DATABASE, CLAIMS, NOTHING = "work", "database", "claims", "nothing"


class Advice(NamedTuple):
    """How many workers a queue needs.

    ``needed`` is None while too little is known. ``workers`` have taken jobs in the last minute; ``arrival_rate`` is in
    jobs a second, ``held_s`` the seconds of work on one, tries that failed included. ``use`` is the part of their time
    for which the workers there are would be busy if they kept up (over 1: they cannot). ``depth`` is how many jobs are
    ready or due later. ``binds`` says what limits the queue: work, database, claims, or nothing. ``late`` ends came
    after their claim was lost.
    """

    queue: str
    needed: int | None
    workers: int
    arrival_rate: float
    held_s: float
    use: float
    depth: int
    late: int
    binds: str
    why: str


class QueueStats(NamedTuple):
    """What all processes that take jobs of a queue have counted in the last ``seconds``: about a minute.

    ``taken``, ``returned`` and ``ended`` are jobs that were claimed, that went back to be taken again, and that left;
    ``held_s`` is the work on them in seconds. ``asked``, ``won``, ``empty`` and ``short`` are takes: all of them, those
    that were granted something, nothing, and less than they asked for; ``raced`` calls by a hint that found the jobs
    taken; ``take_s`` the seconds that takes waited for the store. ``late`` ends came after their claim was lost.
    """

    queue: str
    processes: int
    workers: int
    seconds: float
    taken: int
    returned: int
    ended: int
    held_s: float
    asked: int
    won: int
    empty: int
    short: int
    raced: int
    late: int
    take_s: float


def counting(desk: Desk, queue: str) -> Steps[QueueStats]:
    """Read what the takers of the queue have told, and add it up."""
    told = yield from acting(desk.session(), lambda store, by: read(store, load_key(desk.namespace, queue), by))
    sums: dict[str, Any] = {
        field: _sum(told, field) if field.endswith("_s") else round(_sum(told, field)) for field in COUNTED
    }
    seconds = max((one["seconds"] for one in told), default=0.0)
    return QueueStats(queue, len(told), sum(one["workers"] for one in told), seconds, **sums)


def advising(desk: Desk, queue: str, window_s: float, depth: Callable[[], Steps[QueueDepth]]) -> Steps[Advice]:
    """Read what the takers of the queue have told, and make sense of it. ``depth`` asks how deep the queue is."""
    told = yield from acting(desk.session(), lambda store, by: read(store, load_key(desk.namespace, queue), by))
    advice = advise(queue, told, window_s)
    if any(one["depths"] for one in told):
        return advice
    # No worker has told how deep the queue is: it may be deep for that very reason.
    found = yield from depth()
    return advice._replace(depth=found.ready + found.later)


def advise(queue: str, told: Sequence[dict[str, Any]], window_s: float) -> Advice:
    """What follows from what the takers have told."""
    workers = sum(one["workers"] for one in told)
    seconds = max((one["seconds"] for one in told), default=0.0)
    depths = sorted({(at, depth) for one in told for at, depth in one["depths"]})
    depth = depths[-1][1] if depths else 0
    late = round(_sum(told, "late"))
    if seconds < window_s * ENOUGH_PART or not depths:
        what = "nobody has taken jobs lately" if not told else f"only {seconds:.0f} s of it are known yet"
        return Advice(queue, None, workers, 0.0, 0.0, 0.0, depth, late, NOTHING, f"{what}: ask again in a while")
    # Jobs that came back are taken again: what is taken for good has arrived, or had piled up.
    rate = sum((one["taken"] - one["returned"]) / max(one["seconds"], 1e-9) for one in told) + _slope(depths)
    rate = max(0.0, rate)
    left = _sum(told, "taken") - _sum(told, "returned")
    held_s = _sum(told, "held_s") / left if left > 0 else 0.0
    busy = rate * held_s
    needed = max(1, ceil(busy / TARGET_USE - SLACK)) if busy else 1
    use = busy / workers if workers else 0.0
    binds = _binding(told, workers, seconds, use)
    why = (
        f"{rate:.3g} jobs arrive a second, and each takes {_span(held_s)} of work: {busy:.1f} workers are busy all the "
        f"time, and {'1 is' if needed == 1 else f'{needed} are'} busy for {busy / needed:.0%} of it"
    )
    return Advice(queue, needed, workers, rate, held_s, use, depth, late, binds, why + _more(needed, workers, binds))


def _sum(told: Sequence[dict[str, Any]], what: str) -> float:
    return float(sum(one[what] for one in told))


def _slope(depths: Sequence[tuple[float, int]]) -> float:
    """By how many jobs a second the queue grows: the line through what was seen, by least squares."""
    if len(depths) < 2:
        return 0.0
    mean_at = sum(at for at, _ in depths) / len(depths)
    mean_depth = sum(depth for _, depth in depths) / len(depths)
    spread = sum((at - mean_at) ** 2 for at, _ in depths)
    return sum((at - mean_at) * (depth - mean_depth) for at, depth in depths) / spread if spread else 0.0


def _binding(told: Sequence[dict[str, Any]], workers: int, seconds: float, use: float) -> str:
    if use > TARGET_USE:
        return WORK
    called = _sum(told, "won") + _sum(told, "raced")
    if called and _sum(told, "raced") / called > BINDS_PART:
        return CLAIMS
    if workers and _sum(told, "take_s") / (workers * seconds) > BINDS_PART:
        return DATABASE
    return NOTHING


def _more(needed: int, workers: int, binds: str) -> str:
    if workers < needed:
        return f". There are {workers}: add {needed - workers}"
    if binds == CLAIMS:
        could_go = f": {workers - needed} could go" if workers > needed else ""
        return f". There are {workers}, and most calls find the work taken by others{could_go}"
    if binds == DATABASE:
        return ". They spend most of their time waiting for the store: more of them will not help; take more at a time"
    if workers > needed:
        return f". There are {workers}: {workers - needed} could go"
    return ". So many there are"


def _span(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
