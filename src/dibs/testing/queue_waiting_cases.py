"""Conformance cases on those who wait for a job, or for what became of one, run through both faces."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from dibs import NewJob
from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import JobFailed
from dibs.testing.case import PATIENCE_S, equal
from dibs.testing.claims_cases import LONG_S
from dibs.testing.client_bench import raises, task, until
from dibs.testing.queue_cases import case, counts, one, rest, taken

if TYPE_CHECKING:
    from dibs.testing.faces import Face


# Who waits in vain does so for this long.
SHORT_S = 0.3


async def waiting(queue: Any, takers: int) -> None:
    """Until so many takers of a client wait, and the store has told the first that there is nothing."""
    line = queue._core.desk.session().waiting
    await until(lambda: line._asleep and len(line.everybody()) == takers, "they wait")


@case("P11, P12")
async def a_take_waits_for_a_job(face: Face) -> None:
    """A take with a time-out waits, is had by a put of anybody, and ends empty when nothing comes."""
    ours, theirs = face.client(), face.client()
    queue = ours.queue("waited", ttl=LONG_S)
    before = time.monotonic()
    equal(len(await face.do(queue.take, timeout=SHORT_S)), 0, "in time")
    assert time.monotonic() - before >= SHORT_S - 0.01, "it has waited"
    waiter = task(face.do(queue.take, 5, timeout=None))
    await waiting(queue, 1)
    await face.do(theirs.queue("waited").put_many, [1, 2])
    batch = await asyncio.wait_for(waiter, PATIENCE_S)
    assert 1 <= len(batch) <= 2, batch
    await face.do(batch.done)
    await rest(face, queue)
    for how in ("fail", "skip", "release"):
        await face.do(queue.put, how)
        batch = await taken(face, queue)
        waiter = task(one(face, queue))
        await waiting(queue, 1)
        if how == "fail":
            await face.do(batch.won[0].fail, "x", retry_in=0)
        else:
            await face.do(batch.won[0].skip if how == "skip" else batch.release)
        job = await waiter
        equal(job.payload, how, "what came back")
        await face.do(job.done)


@case("P12")
async def every_waiting_taker_is_served(face: Face) -> None:
    """Takers that wait at once, of one client and of several, all get a job of a put that has one for each."""
    clients = [face.client() for _ in range(3)]
    takers = [task(one(face, client.queue("served", ttl=LONG_S))) for client in clients for _ in range(3)]
    for client in clients:
        await waiting(client.queue("served"), 3)
    ids = await face.do(face.client().queue("served").put_many, range(len(takers)))
    jobs = await asyncio.gather(*takers)
    equal(sorted(job.id for job in jobs), ids, "who got what")
    for job in jobs:
        await face.do(job.done)


@case("the order of jobs")
async def takers_of_a_client_are_served_in_turn(face: Face) -> None:
    """Of several takers of one client that wait, the first to wait is the first to be served."""
    queue = face.client().queue("turns", ttl=LONG_S)
    served: list[int] = []

    async def wait(number: int) -> None:
        job = await one(face, queue)
        served.append(number)
        await face.do(job.done)

    takers = []
    for number in range(4):
        takers.append(task(wait(number)))
        await waiting(queue, number + 1)
    for number in range(4):
        await face.do(queue.put, number)
        await until(partial(_so_many, served, number + 1), "one more is served")
    await asyncio.gather(*takers)
    equal(served, [0, 1, 2, 3], "the order in which they were served")


def _so_many(served: list[int], many: int) -> bool:
    return len(served) == many


@case("P12")
async def a_job_whose_worker_died_is_waited_for(face: Face) -> None:
    """Who waits is given a job when it is due, and when the claim of one who died with it has expired."""
    queue, theirs = face.client().queue("dead", ttl=LONG_S), face.client().queue("dead", ttl=1.0, renew=False)
    await face.do(queue.put, "a")
    await taken(face, theirs)
    job = await one(face, queue)
    equal((job.tries, job.crashes), (2, 1), "tries and crashes")
    await face.do(job.done)


@case("P9, P22")
async def a_taker_that_went_away_has_nothing(face: Face) -> None:
    """A take that is given up, by time-out or cancellation, at whatever moment, leaves no job claimed."""
    ours, theirs = face.client(), face.client()
    queue, others = ours.queue("gone", ttl=LONG_S), theirs.queue("gone", ttl=LONG_S)
    for pause in (0.0, 0.0005, 0.001, 0.002, 0.005, 0.05):
        await face.do(others.put, pause)
        if face.name == "tasks":
            taker = task(queue.take(timeout=None))
            await asyncio.sleep(pause)  # at which moment it is given up is what the case is about
            taker.cancel()
            await asyncio.wait([taker])
            if not taker.cancelled():
                await face.do(taker.result().release)
        else:
            await face.do((await face.do(queue.take, timeout=pause)).release)
        job = await one(face, others)
        equal((job.tries, job.crashes), (1, 0), f"tries and crashes after {pause} s")
        await face.do(job.done)


@case("pause")
async def a_paused_queue_gives_nothing(face: Face) -> None:
    """A paused queue gives no jobs, but takes them; who works goes on, and who waits goes on waiting."""
    ours, theirs = face.client(), face.client()
    queue, others = ours.queue("paused", ttl=LONG_S), theirs.queue("paused", ttl=LONG_S)
    await face.do(queue.put_many, [*"ab"])
    job = await one(face, others)
    pause = await face.do(queue.pause, "OPS-7", by="ada")
    equal((pause.name, pause.note, pause.by), ("queue/paused", "OPS-7", "ada"), "the pause")
    await face.do(job.done)
    await face.do(others.put, "c")
    waiter = task(one(face, others))
    for each in (queue, others):
        equal(len(await face.do(each.take, 5)), 0, "while it is paused")
    equal(await counts(face, queue), (2, 0, 0, 0), "ready, later, claimed, dead")
    other = ours.queue("paused2")
    await face.do(other.put, 1)
    equal(await rest(face, other), [1], "of another queue")
    equal((waiter.done(), await face.do(queue.resume), await face.do(queue.resume)), (False, True, False), "resumed")
    equal((await waiter).payload, "b", "what the waiter is given then")


@case("the order of jobs")
async def groups_are_worked_in_order(face: Face) -> None:
    """With ``group_limit=1`` a group's jobs are worked one after the other, also while one waits for its next try."""
    clients = [face.client() for _ in range(2)]
    queues = [client.queue("groups", ttl=LONG_S, group_limit=1) for client in clients]
    await face.do(queues[0].put_many, ["a1", "a2", NewJob("b1", group="b"), NewJob("a3", priority=9)], group="a")
    await face.do(queues[0].put, "free")
    batch = await taken(face, queues[0], 3)
    equal([job.payload for job in batch.won], ["a1", "b1", "free"], "the first of each group, and what has none")
    equal(len(await face.do(queues[1].take, 9)), 0, "for others meanwhile")
    a1, b1, free = batch.won
    await face.do(a1.fail, "again", retry_in=2 * SHORT_S)
    equal(len(await face.do(queues[1].take, 9)), 0, "while the first waits for its next try")
    await face.do(free.done)
    a1 = await one(face, queues[1])
    equal((a1.payload, a1.group, a1.tries), ("a1", "a", 2), "its next try")
    for want in ("a2", "a3"):
        waiter = task(one(face, queues[1]))
        await waiting(queues[1], 1)
        await face.do(a1.done)
        a1 = await waiter
        equal(a1.payload, want, "the next of the group")
    for job in (a1, b1):
        await face.do(job.done)
    equal(await counts(face, queues[0]), (0, 0, 0, 0), "ready, later, claimed, dead")


@case("queue results")
async def who_waits_for_a_job_has_its_result(face: Face) -> None:
    """``wait`` returns what a job was done with, raises when it is dead or cancelled, and when the time is over."""
    ours, theirs = face.client(), face.client()
    queue, workers = ours.queue("awaited", ttl=LONG_S), theirs.queue("awaited", ttl=LONG_S, keep_results=LONG_S)
    ids = await face.do(queue.put_many, [*"abc"])
    with raises(TimeoutError):
        await face.do(queue.wait, ids[0], timeout=0)
    waiters = [task(face.do(queue.wait, id_)) for id_ in ids]
    batch = await taken(face, workers, 3)
    await face.do(batch.won[0].done, {"sum": [1, None]})
    await face.do(batch.won[1].fail, ValueError("no such customer"), dead=True)
    await face.do(workers.cancel, ids[2])
    equal(await waiters[0], {"sum": [1, None]}, "the result")
    for waiter, state in zip(waiters[1:], ("dead", "cancelled"), strict=True):
        with raises(JobFailed) as caught:
            await waiter
        equal(caught.error.state, state, "how it failed")
    dropped = await face.do(queue.put, "c")
    equal(await face.do(queue.cancel, dropped), [dropped], "cancelled, where no results are kept")
    with raises(JobFailed) as caught:
        await face.do(queue.wait, dropped, timeout=0)
    equal(caught.error.state, "cancelled", "how it failed")
    unkept = await face.do(queue.put, "d")
    await face.do((await taken(face, queue)).done)
    equal(await face.do(queue.wait, unkept, timeout=0), None, "of a job that left without a trace")
