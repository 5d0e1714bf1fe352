"""Conformance cases on batches of jobs, run through both faces."""

from __future__ import annotations

import time
from functools import partial

from dibs._typing import TYPE_CHECKING, Any
from dibs.testing.case import PATIENCE_S, equal
from dibs.testing.claims_cases import LONG_S, following
from dibs.testing.client_bench import raises, until
from dibs.testing.queue_cases import case, taken

if TYPE_CHECKING:
    from dibs.testing.faces import Face


@case("queue batches")
async def going_on_finishes_a_job(face: Face) -> None:
    """Going on to the next job finishes the one before, unless that was done by hand."""
    queue = face.client().queue("loop", ttl=LONG_S, keep_results=LONG_S)
    ids = await face.do(queue.put_many, [*"abcd"])
    async with face.holding(await face.do(queue.take, 10)) as batch:
        while (job := await following(face, batch)) is not None:
            if job.payload == "b":
                await face.do(job.fail, "no", dead=True)
            if job.payload == "c":
                await face.do(job.skip)
    equal([(await face.do(queue.job, id_)).state for id_ in ids], ["done", "dead", "ready", "done"], "states")
    equal((len(batch), batch.left, batch.lost), (4, [], []), "of the batch")


@case("queue batches, P9")
async def an_error_fails_the_job_at_hand_alone(face: Face) -> None:
    """An exception in the block fails the job at hand; the rest is given back, and costs no try."""
    queue = face.client().queue("block", ttl=LONG_S)
    ids = await face.do(queue.put_many, [*"abcd"])
    with raises(ZeroDivisionError):
        async with face.holding(await face.do(queue.take, 10)) as batch:
            await following(face, batch)
            await following(face, batch)
            raise ZeroDivisionError("at b")
    equal([job.id for job in batch.left], ids[2:], "what was given back")
    records = [await face.do(queue.job, id_) for id_ in ids]
    equal([None if record is None else (record.state, record.tries) for record in records],
          [None, ("later", 1), ("ready", 0), ("ready", 0)], "states and tries")  # fmt: skip
    assert "ZeroDivisionError: at b" in records[1].error, records[1].error


@case("queue batches, P9")
async def a_block_that_is_left_gives_back(face: Face) -> None:
    """Left early, the block gives back what is not finished, the job at hand too; an empty batch is no special case."""
    ours, theirs = face.client(), face.client()
    queue = ours.queue("left", ttl=LONG_S)
    await face.do(queue.put_many, [*"abcd"])
    async with face.holding(await face.do(queue.take, 4)) as batch:
        await following(face, batch)
        await following(face, batch)
    equal([job.payload for job in batch.left], ["b", "c", "d"], "what was given back")
    again = await taken(face, theirs.queue("left", ttl=LONG_S), 3)
    equal([(job.payload, job.tries) for job in again.won], [("b", 1), ("c", 1), ("d", 1)], "what others take then")
    await face.do(again.done)
    async with face.holding(await face.do(queue.take, 4)) as empty:
        equal((await following(face, empty), len(empty), empty.won, empty.left, empty.token, empty.deadline,
               empty.remaining()), (None, 0, [], [], None, None, 0.0), "of nothing")  # fmt: skip
        await face.do(empty.done)


def _nearly_over(job: Any, ttl: float) -> bool:
    remaining: float = job.remaining()
    return remaining <= ttl * 0.09


@case("queue batches, P4")
async def a_batch_that_is_not_renewed_ends_in_time(face: Face) -> None:
    """The loop over a batch that is not renewed stops a margin before its deadline; what is left is given back."""
    client = face.client()
    for ttl in (3 * face.short_ttl, 6 * face.short_ttl, 12 * face.short_ttl):
        queue = client.queue(f"deadline {ttl}", ttl=ttl, renew=False)
        await face.do(queue.put_many, range(3))
        async with face.holding(await taken(face, queue, 3)) as batch:
            job = await following(face, batch)
            equal((job.payload, batch.deadline is not None, batch.remaining() > 0), (0, True, True), "the first job")
            await until(partial(_nearly_over, job, ttl), "most of the ttl has gone by", ttl + PATIENCE_S)
            ends = time.monotonic() + job.remaining()
            equal(await following(face, batch), None, "the next job")
        if time.monotonic() < ends:
            break  # else this machine was too busy to leave the block in what was left of its time
    equal(([left.payload for left in batch.left], batch.lost), ([1, 2], []), "given back; lost")
    equal([job.tries for job in await face.do(queue.jobs)], [0, 0], "tries of what was given back")


@case("P9, P22")
async def closing_a_client_gives_everything_back(face: Face) -> None:
    """A client that is closed gives back the jobs it has, with no try counted, and refuses who waits for more."""
    ours, theirs = face.client(), face.client()
    queue = ours.queue("closing", ttl=LONG_S)
    await face.do(queue.put_many, [*"abc"])
    batch = await taken(face, queue, 3)
    await face.do(ours.close)
    equal([job.held for job in batch.won], [False] * 3, "held")
    again = await taken(face, theirs.queue("closing"), 3, 0)
    equal([(job.payload, job.tries) for job in again.won], [("a", 1), ("b", 1), ("c", 1)], "had by others then")
    await face.do(again.done)
