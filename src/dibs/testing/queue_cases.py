"""Conformance cases on queues: what becomes of a job from its put to its end, run through both faces.

What becomes of several that were taken together is in ``queue_batch_cases``, how jobs are worked by ``run`` and
``stream`` in ``worker_cases``.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import partial

from dibs import NewJob
from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, JobExists, JobFailed, LeaseLost, Unsupported
from dibs.jobs import ERROR_CHARS_MAX, PAYLOAD_BYTES_MAX
from dibs.new_jobs import PUT_BYTES_MAX, RESULT_BYTES_MAX
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, queues, rising
from dibs.testing.claims_cases import LONG_S, following
from dibs.testing.client_bench import raises

if TYPE_CHECKING:
    from dibs.testing.faces import Face


case = partial(CLIENT_CASES.case, promised=queues)


async def taken(face: Face, queue: Any, n: int = 1, timeout: float = PATIENCE_S) -> Any:
    """A batch of so many jobs; fail when there are not so many."""
    batch = await face.do(queue.take, n, timeout=timeout)
    equal(len(batch), n, f"jobs that {queue!r} gave")
    return batch


async def one(face: Face, queue: Any, timeout: float = PATIENCE_S) -> Any:
    """The one job that is to be had."""
    return (await taken(face, queue, 1, timeout)).won[0]


async def counts(face: Face, queue: Any) -> tuple[int, int, int, int]:
    """How many are ready, later, claimed, dead."""
    depth = await face.do(queue.depth)
    return depth.ready, depth.later, depth.claimed, depth.dead


async def rest(face: Face, queue: Any, n: int = 100) -> list[Any]:
    """The payloads of what is ready, in their order; all of it is done then."""
    async with face.holding(await face.do(queue.take, n)) as batch:
        payloads = [job.payload for job in batch.won]
        await face.do(batch.done)
    return payloads


# -- puts -------------------------------------------------------------------------------------------------------------


@case("P17")
async def what_is_put_is_taken_and_done(face: Face) -> None:
    """A job that was put is taken by anybody, once, with its payload as it was; done, it has left."""
    ours, theirs = face.client(), face.client()
    queue, workers = ours.queue("mails", ttl=LONG_S), theirs.queue("mails", ttl=LONG_S)
    equal(len(await face.do(workers.take, 5)), 0, "of an empty queue")
    payloads = [{"to": "ada", "n": [1, 2.5, None, True]}, "é ☃ \0", 2**53 + 1, None, [], b"\0\xff", b""]
    ids = [await face.do(queue.put, payload) for payload in payloads]
    rising(ids, "the ids of one put after the other")
    equal(await face.do(queue.put_many, iter([])), [], "the ids of nothing")
    equal(await counts(face, queue), (7, 0, 0, 0), "ready, later, claimed, dead")
    batch = await taken(face, workers, 7)
    equal([(job.id, job.payload) for job in batch.won], list(zip(ids, payloads, strict=True)), "ids and payloads")
    job = batch.won[0]
    equal((job.queue, job.tries, job.max_tries, job.crashes, job.key, job.group), ("mails", 1, 10, 0, None, None), "it")
    equal((job.held, job.fencing_token, job.lost.is_set()), (True, batch.token, False), "held, token, lost")
    assert abs(job.created_at - datetime.now(timezone.utc)) < timedelta(minutes=5), job.created_at
    equal(await counts(face, queue), (0, 0, 7, 0), "ready, later, claimed, dead")
    equal(len(await face.do(queue.take, 5)), 0, "for others meanwhile")
    for job in batch.won[1:]:
        await face.do(job.done)
        await face.do(job.done)
        equal((job.held, job.remaining(), job.lost.is_set()), (False, 0.0, False), "held, remaining, lost, when done")
    equal([left.id for left in batch.left], ids[:1], "left")
    await face.do(batch.done)
    equal((batch.left, batch.lost, len(batch.won)), ([], [], 7), "left, lost, won")
    equal(await counts(face, queue), (0, 0, 0, 0), "ready, later, claimed, dead")


@case("P17")
async def puts_have_an_order_and_a_time(face: Face) -> None:
    """Jobs are taken by priority, then by when they are due, then as they were put; none before it is due."""
    queue = face.client().queue("order", ttl=LONG_S, priority=1)
    soon = datetime.now(timezone.utc) + timedelta(hours=1)
    jobs = ["a", NewJob("b", priority=-5), NewJob("c", priority=100), NewJob("late", delay=600), NewJob("at", at=soon)]
    await face.do(queue.put_many, jobs)
    await face.do(queue.put_many, ["d", NewJob("e", priority=2)], priority=3)
    await face.do(queue.put, "past", at=datetime.now(timezone.utc) - timedelta(hours=1), priority=100)
    equal(await counts(face, queue), (6, 2, 0, 0), "ready, later, claimed, dead")
    equal(await rest(face, queue), ["past", "c", "d", "e", "a", "b"], "in their order")
    equal([job.payload for job in await face.do(queue.jobs, "later")], ["late", "at"], "what is due later")
    await face.do(queue.put, "soon", delay=1.2)
    equal(len(await face.do(queue.take)), 0, "before it is due")
    job = await one(face, queue)
    equal(job.payload, "soon", "when it is due, to whoever waits")
    await face.do(job.done)


@case("unique keys")
async def keys_are_unique_while_their_jobs_live(face: Face) -> None:
    """A key is unique among the jobs that have not ended: the next with it is refused, left out, or replaces."""
    queue = face.client().queue("keys", ttl=LONG_S)
    first = await face.do(queue.put, "1", key=7)
    with raises(JobExists) as caught:
        await face.do(queue.put, "2", key="7")
    equal((caught.error.key, caught.error.id, caught.error.claimed), ("7", first, False), "what JobExists says")
    with raises(JobExists):
        await face.do(queue.put_many, ["other", NewJob("2", key=7)])
    equal(await counts(face, queue), (1, 0, 0, 0), "ready, later, claimed, dead: a put is all or nothing")
    equal(await face.do(queue.put, "2", key=7, on_conflict="keep"), first, "the id of the one that is kept")
    equal((await face.do(queue.job, first)).payload, "1", "its payload")
    equal(await face.do(queue.put, "3", key=7, on_conflict="replace", delay=0), first, "the id of the one replaced")
    job = await one(face, queue)
    equal((job.id, job.payload, job.key), (first, "3", "7"), "what is taken")
    equal(await face.do(queue.put, "4", key=7, on_conflict="keep"), first, "the id of the one being worked")
    for how in ("raise", "replace"):
        with raises(JobExists) as caught:
            await face.do(queue.put, "4", key=7, on_conflict=how)
        equal(caught.error.claimed, True, "that it is being worked")
    await face.do(job.done)
    second = await face.do(queue.put, "5", key=7)
    assert second > first, f"{second} after {first}"
    ids = await face.do(queue.put_many, [NewJob("a", key=7), "b", NewJob("c", key=8), NewJob("d", key=8)],
                        on_conflict="keep")  # fmt: skip
    equal((len(ids), ids[0], ids[3] == ids[2]), (4, second, True), "the ids of a put that keeps, one for each payload")
    equal(await rest(face, queue), ["5", "b", "c"], "what is there then")
    jobs = [NewJob("e", key=9), "f", NewJob("g", key=9)]
    ids = await face.do(queue.put_many, jobs, on_conflict="replace")
    equal((len(ids), ids[0] == ids[2]), (3, True), "the ids of a put that replaces a job of its own")
    equal(await rest(face, queue), ["g", "f"], "what is there then: the last of those with one key")


@case("P20, P25")
async def bad_jobs_are_refused_at_once(face: Face) -> None:
    """What cannot be kept or is no sensible wish is refused before anything is sent."""
    client = face.idle_client()
    for name in ("", "a\n", "x" * 256):
        with raises(InvalidName):
            client.queue(name)
    for options in ({"ttl": 0}, {"max_tries": 0}, {"max_tries": 1.5}, {"priority": 101}, {"group_limit": 0},
                    {"keep_results": -1}, {"max_hold": 0}):  # fmt: skip
        with raises(InvalidOption):
            client.queue("a", **options)
    queue = client.queue("a")
    now = datetime.now(timezone.utc)
    bad: list[dict[str, Any]] = [
        {"payload": object()},
        {"payload": float("nan")},
        {"payload": {1, 2}},
        {"payload": b"x" * (PAYLOAD_BYTES_MAX + 1)},
        {"payload": "é" * (PAYLOAD_BYTES_MAX // 2)},
        {"payload": 1, "delay": -1},
        {"payload": 1, "delay": float("nan")},
        {"payload": 1, "delay": 1, "at": now},
        {"payload": 1, "at": now.replace(tzinfo=None)},
        {"payload": 1, "at": 17},
        {"payload": 1, "priority": -101},
        {"payload": 1, "priority": True},
        {"payload": 1, "max_tries": 0},
        {"payload": 1, "on_conflict": "ignore"},
    ]
    for how in bad:
        with raises(InvalidOption):
            await face.do(queue.put, **how)
    for how in ({"key": ""}, {"key": "a\0"}, {"key": 1.5}, {"group": "x" * 256}):
        with raises(InvalidName):
            await face.do(queue.put, 1, **how)
    with raises(InvalidOption):
        await face.do(queue.put_many, [NewJob(1, key="a"), NewJob(2, key="a")])
    for many in ((0 for _ in range(10_001)), [b"x" * PAYLOAD_BYTES_MAX] * (PUT_BYTES_MAX // PAYLOAD_BYTES_MAX + 1)):
        with raises(InvalidOption):
            await face.do(queue.put_many, many)
    for n in (0, -1, 1001, 1.5, True):
        with raises(InvalidOption):
            await face.do(queue.take, n)
    for timeout in (-1, float("nan")):
        with raises(InvalidOption):
            await face.do(queue.take, timeout=timeout)
    for verb in (queue.cancel, queue.requeue, queue.purge, queue.job):
        for bad_id in ("1", 0, -1, 1.5, 2**63):
            with raises(InvalidOption):
                await face.do(verb, bad_id)
    with raises(InvalidOption):
        await face.do(queue.jobs, "waiting")


@case("P25", promised=lambda capabilities: not capabilities.queue)
async def where_there_are_no_queues_that_is_said(face: Face) -> None:
    """A store that keeps no queues says so before any I/O, and lists none."""
    client = face.idle_client()
    with raises(Unsupported):
        client.queue("a")
    equal(await face.do(client.queues), [], "its queues")


# -- ends -------------------------------------------------------------------------------------------------------------


@case("P18")
async def a_late_done_is_refused(face: Face) -> None:
    """Whoever comes late with the end of a job hears LeaseLost, whichever end it is; the new claim is untouched."""
    ours, theirs = face.client(), face.client()
    late = ours.queue("late", ttl=face.short_ttl, renew=False, keep_results=LONG_S)
    await face.do(late.put_many, [*"abcde"])
    batch = await taken(face, late, 5)
    first = await following(face, batch)
    # A job that has expired is handed out again, and that says how long the first worker may have believed in it.
    queue = theirs.queue("late", ttl=LONG_S, keep_results=LONG_S)
    others = [await one(face, queue, face.short_ttl + PATIENCE_S) for _ in range(5)]
    for job, other in zip(batch.won, others, strict=True):
        equal((job.held, job.remaining(), job.lost.is_set()), (False, 0.0, True), "held, remaining, lost")
        equal((other.id, other.payload, other.tries, other.crashes), (job.id, job.payload, 2, 1), "handed out again")
        assert other.fencing_token > job.fencing_token, (other, job)
    ends = (first.done, batch.won[1].fail, batch.won[2].skip, batch.won[3].extend, batch.won[4].check, batch.done)
    for end in ends:
        with raises(LeaseLost):
            await face.do(end)
    equal(await following(face, batch), None, "the next job of the late batch")
    await face.do(batch.release)
    equal((len(batch.left), len(batch.lost)), (0, 5), "left and lost")
    equal(await counts(face, late), (0, 0, 5, 0), "ready, later, claimed, dead")
    for other in others:
        await face.do(other.done, "theirs")
    equal([job.result for job in await face.do(late.jobs, "done")], ["theirs"] * 5, "the results that were kept")


@case("P18")
async def a_job_is_finished_once(face: Face) -> None:
    """The first end of a job counts, another is not sent; what was given back is not done by saying so afterwards."""
    queue = face.client().queue("once", ttl=LONG_S, keep_results=LONG_S)
    await face.do(queue.put_many, [*"abc"])
    batch = await taken(face, queue, 3)
    a, b, c = batch.won
    await face.do(a.done, {"n": 1})
    await face.do(b.fail, "no", dead=True)
    await face.do(c.skip)
    for job in (a, b):
        await face.do(job.done, "again")
        await face.do(job.fail, "again", retry_in=0)
    for late in (c.done, partial(c.fail, "again")):
        with raises(LeaseLost):
            await face.do(late)
    for job in batch.won:
        await face.do(job.skip)
        with raises(LeaseLost):
            await face.do(job.extend)
    states = [(await face.do(queue.job, job.id)).state for job in batch.won]
    equal(states, ["done", "dead", "ready"], "the states")
    equal(await face.do(queue.wait, a.id), {"n": 1}, "the result")
    with raises(JobFailed) as caught:
        await face.do(queue.wait, b.id)
    equal((caught.error.state, caught.error.error), ("dead", "no"), "what JobFailed says")


@case("P18")
async def a_result_that_is_none_is_refused(face: Face) -> None:
    """A result that is no JSON, or too large, is refused where results are kept; the job is held still."""
    queue = face.client().queue("results", ttl=LONG_S, keep_results=LONG_S)
    await face.do(queue.put, 1)
    job = await one(face, queue)
    for result in (object(), "x" * RESULT_BYTES_MAX):
        with raises(InvalidOption):
            await face.do(job.done, result)
    with raises(InvalidOption):
        await face.do(lambda: job.fail(17))
    equal(job.held, True, "held")
    await face.do(job.done, [1])


@case("P19")
async def a_failed_job_is_tried_again(face: Face) -> None:
    """A failed job is due again later, with its error; after its last try it is dead, until it is requeued."""
    queue = face.client().queue("failing", ttl=LONG_S, max_tries=3)
    id_ = await face.do(queue.put, "x")
    job = await one(face, queue)
    await face.do(job.fail, ValueError("first"))
    record = await face.do(queue.job, id_)
    equal((record.state, record.tries, record.crashes), ("later", 1, 0), "after the first try")
    assert "ValueError: first" in record.error, record.error
    delay = (record.due_at - datetime.now(timezone.utc)).total_seconds()
    assert 0 < delay <= 1.25 + 1, f"by default it is due in about a second, not in {delay} s"
    job = await one(face, queue)
    equal(job.tries, 2, "the second try")
    await face.do(job.fail, "second", retry_in=0)
    job = await one(face, queue, 0)
    equal((job.tries, job.max_tries), (3, 3), "the last try")
    await face.do(job.fail, "third", retry_in=0)
    equal(await counts(face, queue), (0, 0, 0, 1), "ready, later, claimed, dead")
    (dead,) = await face.do(queue.dead)
    equal((dead.id, dead.error, dead.tries), (id_, "third", 3), "the dead one")
    equal(await face.do(queue.requeue), 1, "requeued")
    job = await one(face, queue, 0)
    equal((job.id, job.tries), (id_, 1), "of a new life")
    await face.do(job.fail, dead=True)
    equal(await face.do(queue.requeue, id_ + 1), 0, "requeued of another id")
    equal(await face.do(queue.purge), 1, "purged")
    equal(await face.do(queue.job, id_), None, "what is left of it")


@case("P19")
async def of_a_long_error_the_last_words_are_kept(face: Face) -> None:
    """Of an exception with a long text the end is kept, of a text the beginning: up to the limit of an error."""
    queue = face.client().queue("errors", ttl=LONG_S)
    await face.do(queue.put_many, [1, 2])
    batch = await taken(face, queue, 2)
    text = "the first words " + "x" * ERROR_CHARS_MAX + " the last words"
    await face.do(batch.won[0].fail, ValueError(text), dead=True)
    await face.do(batch.won[1].fail, text, dead=True)
    errors = [(await face.do(queue.job, job.id)).error for job in batch.won]
    equal([len(error) for error in errors], [ERROR_CHARS_MAX] * 2, "how much is kept")
    equal((errors[0].endswith("the last words"), errors[1].startswith("the first words")), (True, True), "what of it")


@case("P19")
async def giving_back_costs_no_try(face: Face) -> None:
    """A job that is skipped is at once ready for others, as it was."""
    queue = face.client().queue("skipped", ttl=LONG_S, max_tries=1)
    await face.do(queue.put, 1)
    for _ in range(4):
        job = await one(face, queue, 0)
        equal((job.tries, job.crashes), (1, 0), "tries and crashes")
        await face.do(job.skip)


@case("P18")
async def a_cancelled_job_is_lost(face: Face) -> None:
    """A job that is cancelled while it is worked is lost to its worker at the next extension; its done is refused."""
    ours, theirs = face.client(), face.client()
    queue = ours.queue("cancelled", ttl=face.short_ttl * 5, keep_results=LONG_S)
    ids = await face.do(queue.put_many, [*"abc"])
    batch = await taken(face, queue, 3)
    equal(await face.do(theirs.queue("cancelled", keep_results=LONG_S).cancel, ids[0], ids[0]), ids[:1], "cancelled")
    equal(await face.do(theirs.queue("cancelled").cancel, ids[0]), [], "cancelled again")
    # Nobody has told the worker yet, or the renewal has: in either case its done is refused.
    with raises(LeaseLost):
        await face.do(batch.won[0].done)
    equal(await face.do(theirs.queue("cancelled", keep_results=LONG_S).cancel, ids[1]), ids[1:2], "cancelled")
    equal(await face.do(batch.won[1].lost.wait, PATIENCE_S), True, "that it is lost is told")
    equal([job.held for job in batch.won], [False, False, True], "held")
    with raises(LeaseLost):
        await face.do(batch.won[1].fail)
    await face.do(batch.won[2].done)
    await face.do(batch.release)
    equal([job.id for job in batch.lost], ids[:2], "lost")
    equal([(await face.do(queue.job, id_)).state for id_ in ids], ["cancelled", "cancelled", "done"], "states")
    with raises(JobFailed):
        await face.do(queue.wait, ids[0])


@case("claims on jobs last")
async def claims_are_extended(face: Face) -> None:
    """A claim is extended while somebody has a job of it; ``extend`` does so at once, and for another time."""
    ours, theirs = face.client(), face.client()
    await face.do(ours.queue("long").put_many, [*"ab"])
    renewed = await one(face, ours.queue("long", ttl=face.short_ttl))
    fixed = await one(face, ours.queue("long", ttl=face.short_ttl, renew=False))
    await face.do(fixed.extend, LONG_S)
    assert fixed.remaining() > LONG_S / 2, fixed
    equal(len(await face.do(theirs.queue("long").take, timeout=2.5 * face.short_ttl)), 0, "had by others meanwhile")
    equal((renewed.held, fixed.held), (True, True), "held")
    with raises(InvalidOption):
        await face.do(lambda: fixed.extend(-1))
    for job in (renewed, fixed):
        await face.do(job.done)


@case("P18")
async def what_is_found_lost_is_not_left(face: Face) -> None:
    """A job that ended elsewhere counts as lost, and not as given back, once the store has been told of its end."""
    queue = face.client().queue("left", ttl=LONG_S)
    await face.do(queue.put_many, [1, 2])
    batch = await taken(face, queue, 2)
    first = batch.won[0]
    await face.do(face.client().queue("left").finish, first.id, first.fencing_token)
    equal((len(batch.left), batch.lost), (2, []), "left and lost, as nobody has told")
    await face.do(batch.release)
    equal(([job.payload for job in batch.left], [job.payload for job in batch.lost]), ([2], [1]), "left and lost")
