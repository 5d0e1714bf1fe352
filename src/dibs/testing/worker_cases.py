"""Conformance cases on those who work a queue: streams and ``run``, on both faces."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption, LeaseLost
from dibs.testing.case import PATIENCE_S, equal
from dibs.testing.claims_cases import LONG_S, closed, following
from dibs.testing.client_bench import raises, task, until
from dibs.testing.queue_cases import case, counts, taken
from dibs.testing.queue_waiting_cases import waiting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.testing.faces import Face


SHORT_S = 0.3


def handler(face: Face, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """A handler of the face's own kind that does this."""
    if face.name == "threads":
        return lambda job: asyncio.run(work(job))  # type: ignore[arg-type]

    async def handle(job: Any) -> Any:
        return await work(job)

    return handle


async def started(flag: threading.Event) -> None:
    await until(flag.is_set, "a handler has begun")


@case("queue streams")
async def a_stream_goes_on_until_it_is_told_to_stop(face: Face) -> None:
    """A stream yields one job after the other, waits for more, ends when idle or told to, and gives back the rest."""
    ours, theirs = face.client(), face.client()
    queue, others = ours.queue("stream", ttl=LONG_S), theirs.queue("stream", ttl=LONG_S)
    await face.do(others.put_many, range(3))
    stop = threading.Event()
    stream = queue.stream(2, stop=stop)
    equal([(await following(face, stream)).payload for _ in range(3)], [0, 1, 2], "what was there")
    waiter = task(following(face, stream))
    await waiting(queue, 1)
    await face.do(others.put_many, [3, 4])
    equal((await waiter).payload, 3, "what came")
    stop.set()
    equal(await following(face, stream), None, "after it was stopped")
    equal(await counts(face, others), (1, 0, 0, 0), "ready, later, claimed, dead: the job at hand is done")
    stream = queue.stream(idle=0)
    equal([(await following(face, stream)).payload, await following(face, stream)], [4, None], "until it is idle")
    equal(await counts(face, others), (0, 0, 0, 0), "ready, later, claimed, dead")
    await face.do(others.put_many, [5, 6])
    stream = queue.stream(idle=0)
    job = await following(face, stream)
    await closed(face, stream)
    equal((job.payload, job.held, await counts(face, others)), (5, False, (1, 1, 0, 0)), "left in the middle")
    for how in ({"n": 0}, {"idle": -1}, {"stop": 1}):
        with raises(InvalidOption):
            queue.stream(**how)


@case("queue workers")
async def run_works_until_it_is_idle(face: Face) -> None:
    """``run`` works what is there, keeps results, tries failures again, and counts what was done."""
    queue = face.client().queue("run", ttl=LONG_S, keep_results=LONG_S, max_tries=2)
    ids = await face.do(queue.put_many, range(40))
    tries: Counter[int] = Counter()

    async def work(job: Any) -> Any:
        tries[job.payload] += 1
        if job.payload == 7:
            raise ValueError("never")
        if job.payload == 8:
            await face_free(job.skip if tries[8] == 1 else job.done)
        if job.payload == 9:
            await face_free(job.fail, "by hand", dead=True)
        return {"is": job.payload}

    equal(await face.do(queue.run, handler(face, work), workers=3, idle=2.5), 38, "how many were done")
    equal(sorted(payload for payload, n in tries.items() if n > 1), [7, 8], "what was tried more than once")
    equal(await counts(face, queue), (0, 0, 0, 2), "ready, later, claimed, dead")
    equal(await face.do(queue.wait, ids[3]), {"is": 3}, "a result")
    dead = {job.payload: job for job in await face.do(queue.dead)}
    assert "ValueError: never" in dead[7].error, dead[7].error
    equal((dead[7].tries, dead[9].error), (2, "by hand"), "tries, and the other's error")
    equal(await face.do(queue.run, handler(face, work), idle=0), 0, "done when there is nothing")


async def face_free(verb: Any, *args: Any, **options: Any) -> None:
    """Call a verb from a handler, of either kind."""
    outcome = verb(*args, **options)
    if hasattr(outcome, "__await__"):
        await outcome


@case("queue workers")
async def run_works_as_many_at_once_as_told(face: Face) -> None:
    """No more handlers run at a time than there are workers; what one worker does not get to is left for others."""
    ours, theirs = face.client(), face.client()
    queue = ours.queue("width", ttl=LONG_S)
    await face.do(queue.put_many, range(12))
    at_once, most, release, stop = [0], [0], threading.Event(), threading.Event()

    async def work(job: Any) -> None:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        await until(release.is_set, "the case lets it go")
        at_once[0] -= 1

    running = task(face.do(queue.run, handler(face, work), workers=4, stop=stop))
    await until(lambda: at_once[0] == 4, "four are worked")
    equal(
        await counts(face, theirs.queue("width")), (8, 0, 4, 0), "ready, later, claimed, dead: slow ones take no more"
    )
    stop.set()
    release.set()
    done = await running
    equal((most[0], done), (4, 4), "most at once, and done")
    equal(await counts(face, theirs.queue("width")), (8, 0, 0, 0), "ready, later, claimed, dead")


@case("queue workers, P22")
async def run_drains_when_it_is_stopped(face: Face) -> None:
    """Told to stop, ``run`` finishes what is in hand within ``drain_timeout``, and gives the rest back."""
    queue = face.client().queue("drain", ttl=LONG_S)
    ids = await face.do(queue.put_many, ["quick", "slow", "waiting"])
    stop, release = threading.Event(), threading.Event()
    begun: list[str] = []
    refused: list[str] = []

    async def work(job: Any) -> None:
        begun.append(job.payload)
        if job.payload == "quick":
            await until(stop.is_set, "the case stops it")
            return
        try:
            await until(lambda: job.lost.is_set() or release.is_set(), "it is lost", 4 * PATIENCE_S)
        finally:
            try:
                if face.name == "threads":  # a task's handler has been cancelled, and its job would really be done
                    await face_free(job.done)
            except LeaseLost:
                refused.append(job.payload)

    running = task(face.do(queue.run, handler(face, work), workers=2, prefetch=0, stop=stop, drain_timeout=SHORT_S))
    await until(lambda: len(begun) == 2, "two have begun")
    stop.set()
    try:
        equal(await running, 1, "how many were done")
        records = [await face.do(queue.job, id_) for id_ in ids]
        equal([None if record is None else (record.state, record.tries) for record in records],
              [None, ("ready", 0), ("ready", 0)], "states and tries")  # fmt: skip
        await until(lambda: refused == ["slow"] or face.name == "tasks", "the late done is refused")
    finally:
        release.set()


@case("queue workers, P22")
async def what_was_not_begun_is_given_back(face: Face) -> None:
    """What was claimed ahead, and not begun when ``run`` is stopped, is given back: it costs no try, nor a crash."""
    queue = face.client().queue("ahead", ttl=LONG_S)
    await face.do(queue.put_many, range(300))
    stop = threading.Event()
    begun = []

    async def claimed() -> Any:
        depth = queue.depth()
        return (await depth if hasattr(depth, "__await__") else depth).claimed

    async def only_this() -> bool:
        return bool(await claimed() == 1)

    async def work(job: Any) -> None:
        begun.append(job.id)
        if await claimed() > 1:
            stop.set()
            await until(only_this, "the others are given back")

    done = await face.do(queue.run, handler(face, work), workers=1, prefetch=20, stop=stop, idle=0)
    equal((stop.is_set(), done, len(set(begun))), (True, len(begun), len(begun)), "jobs were claimed ahead; done")
    left = await face.do(queue.jobs, "ready", 300)
    equal(
        (len(left) + done, await counts(face, queue)), (300, (len(left), 0, 0, 0)), "all; ready, later, claimed, dead"
    )
    equal({job.id for job in left} & set(begun), set(), "what was done and is there still")
    equal({(job.tries, job.crashes) for job in left}, {(0, 0)}, "tries and crashes of what is left")


@case("queue workers, P4")
async def a_lost_job_is_not_worked_on(face: Face) -> None:
    """A handler whose job is lost is told so (a task is cancelled); ``run`` goes on, and does not count it done."""
    ours, theirs = face.client(), face.client()
    queue = ours.queue("lost", ttl=face.short_ttl * 2)
    (id_,) = await face.do(queue.put_many, ["lost"])
    begun, told = threading.Event(), threading.Event()

    async def work(job: Any) -> None:
        if job.payload == "lost":
            begun.set()
            try:
                await until(job.lost.is_set, "the loss is told", 3 * PATIENCE_S)
                if face.name == "tasks":
                    await asyncio.sleep(LONG_S)  # until it is cancelled
            finally:
                if job.lost.is_set():
                    told.set()

    stop = threading.Event()
    running = task(face.do(queue.run, handler(face, work), workers=1, stop=stop))
    await started(begun)
    equal(await face.do(theirs.queue("lost").cancel, id_), [id_], "cancelled by an operator")
    await until(told.is_set, "the handler is told")
    next_id = await face.do(theirs.queue("lost").put, "next")
    await face.do(theirs.queue("lost").wait, next_id, timeout=PATIENCE_S)
    stop.set()
    equal(await running, 1, "how many were done")


@case("queue workers, P19")
async def a_job_that_crashed_twice_is_worked_alone(face: Face) -> None:
    """A job that ended its worker twice is worked while nothing else is, and dead when it was the last try."""
    queue = face.client().queue("alone", ttl=LONG_S, max_tries=4)
    await face.do(queue.put, "poison", priority=1)
    await _crash_twice(face, queue)
    await face.do(queue.put_many, range(20))
    at_once: set[Any] = set()
    beside: list[Any] = []

    async def work(job: Any) -> None:
        at_once.add(job.payload)
        if job.payload == "poison":
            equal((job.crashes, job.tries), (2, 3), "its crashes and tries")
        await asyncio.sleep(0.02)  # so that others would run beside it
        if "poison" in at_once:
            beside.append(set(at_once))
        at_once.discard(job.payload)

    equal(await face.do(queue.run, handler(face, work), workers=4, idle=0.2), 21, "how many were done")
    equal(beside, [{"poison"}], "what ran beside it")


@case("queue workers, P19")
async def a_job_that_crashed_twice_waits_until_nothing_runs(face: Face) -> None:
    """A job that ended its worker twice is not begun beside one that is being worked when it is claimed."""
    queue = face.client().queue("beside", ttl=LONG_S)
    await face.do(queue.put, "poison")
    await _crash_twice(face, queue)
    await face.do(queue.put, "slow", priority=1)
    release, begun, work = _slow_work()
    running = task(face.do(queue.run, handler(face, work), workers=4, idle=0.2))
    try:
        await until(lambda: _all_claimed(face, queue), "the other is claimed, too")
        await asyncio.sleep(0.2)  # in which it would be begun
    finally:
        release.set()
    equal((await running, begun), (2, ["slow", "slow has ended", "poison"]), "how many were done, and what happened")


@case("queue workers, P19")
async def what_was_to_be_worked_alone_and_is_lost_keeps_nobody(face: Face) -> None:
    """A job that ended its worker twice, and is lost before it could be begun, is waited for no more: others go on."""
    client = face.client()
    queue = client.queue("lost", ttl=face.short_ttl * 2)
    poison_id = await face.do(queue.put, "poison")
    await _crash_twice(face, queue)
    await face.do(queue.put, "slow", priority=1)
    release, begun, work = _slow_work()
    running = task(face.do(queue.run, handler(face, work), workers=4, idle=1))
    try:
        await until(lambda: _all_claimed(face, queue), "the other is claimed, too")
        equal(await face.do(face.client().queue("lost").cancel, poison_id), [poison_id], "cancelled by an operator")
        await asyncio.sleep(face.short_ttl * 2)  # until a renewal has found that
        await face.do(queue.put, "next")
    finally:
        release.set()
    equal((await running, begun), (2, ["slow", "slow has ended", "next"]), "how many were done, and what happened")


def _slow_work() -> tuple[threading.Event, list[Any], Callable[[Any], Awaitable[None]]]:
    """A handler that notes what happens, and ends "slow" when this event is set."""
    release = threading.Event()
    happened: list[Any] = []

    async def work(job: Any) -> None:
        happened.append(job.payload)
        if job.payload == "slow":
            await until(release.is_set, "the case lets it go", 3 * PATIENCE_S)
            happened.append("slow has ended")

    return release, happened, work


async def _crash_twice(face: Face, queue: Any) -> None:
    """Take the one job of a queue as workers do who say nothing more, as the store sees it."""
    for _ in range(2):
        await taken(face, face.client().queue(queue.name, ttl=face.short_ttl, renew=False))
        await until(lambda: _ready(face, queue), "its claim has expired", face.short_ttl + PATIENCE_S)


async def _all_claimed(face: Face, queue: Any) -> bool:
    return await counts(face, queue) == (0, 0, 2, 0)


async def _ready(face: Face, queue: Any) -> bool:
    return (await counts(face, queue))[0] == 1


@case("P25")
async def bad_workers_are_refused_at_once(face: Face) -> None:
    """Handlers of the other kind and options that cannot be are refused before anything is sent."""
    queue = face.idle_client().queue("a")

    async def task_handler(job: Any) -> None: ...

    good: Any = task_handler if face.name == "tasks" else print
    with raises(InvalidOption):
        await face.do(queue.run, print if face.name == "tasks" else 17)
    for how in ({"workers": 0}, {"workers": 1.5}, {"prefetch": -1}, {"drain_timeout": -1}, {"idle": -1}, {"stop": 7}):
        with raises(InvalidOption):
            await face.do(queue.run, good, **how)
