"""Queues in the hands of somebody in a hurry: jobs ended when it is too late, odd payloads, signals of others."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dibs
from tests.test_queue import counts
from tests.waits import eventually


@pytest.fixture
def client(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


# -- ends that come too late ------------------------------------------------------------------------------------------


def test_what_the_end_of_a_block_gave_back_is_not_done(client: dibs.Client) -> None:
    """Saying so afterwards is refused, like a late done of any other worker; the job is there for others."""
    queue = client.queue("a")
    queue.put_many(range(2))
    with queue.take(2) as batch:
        pass
    for late in (batch.won[0].done, batch.won[1].fail, batch.done):
        with pytest.raises(dibs.LeaseLost, match="given back"):
            late()
    assert counts(queue) == (2, 0, 0, 0)
    assert [job.tries for job in queue.jobs()] == [0, 0]


def test_what_a_closed_client_gave_back_is_not_done(sqlite_url: str, client: dibs.Client) -> None:
    """close() gives back what is held; whoever still has a job of it is told so."""
    with dibs.connect(sqlite_url) as other:
        queue = other.queue("a")
        queue.put_many(range(2))
        batch = queue.take(2)
    for late in (batch.won[0].done, batch.won[0].fail, batch.won[0].check, batch.done):
        with pytest.raises(dibs.LeaseLost, match="given back"):
            late()
    batch.release()
    assert counts(client.queue("a")) == (2, 0, 0, 0)


def test_what_was_left_is_ended_by_its_token(client: dibs.Client) -> None:
    """After leave() the job object ends nothing, and says who does."""
    queue = client.queue("a")
    id_ = queue.put(1)
    with queue.take() as batch:
        (job,) = batch.won
        batch.leave()
        with pytest.raises(dibs.LeaseLost, match=r"queue\.finish"):
            job.done()
    queue.finish(id_, job.fencing_token)
    assert counts(queue) == (0, 0, 0, 0)


def test_a_batch_is_done_when_each_was_ended(client: dibs.Client) -> None:
    """What was skipped or has failed is no loss of the batch."""
    queue = client.queue("a")
    queue.put_many(range(3))
    with queue.take(3) as batch:
        batch.won[0].skip()
        batch.won[1].fail("no")
        batch.done()
    assert counts(queue) == (1, 1, 0, 0)


# -- streams that are left ------------------------------------------------------------------------------------------


def leave_by_break() -> bool:
    return True


def leave_by_error() -> bool:
    raise ValueError("no")


def leave_by_ctrl_c() -> bool:
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("Ctrl-C came to nothing")


def in_thread(queue: dibs.Queue, leave: Callable[[], bool]) -> None:
    for _ in queue.stream(3):
        if leave():
            break


async def in_task(queue: dibs.AsyncQueue, leave: Callable[[], bool]) -> None:
    async with contextlib.aclosing(queue.stream(3)) as jobs:
        async for _ in jobs:
            if leave():
                break


@pytest.mark.parametrize("face", ["thread", "task"])
@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_ctrl_c])
def test_who_leaves_a_stream_pays_for_the_job_at_hand_alone(
    leave: Callable[[], bool], face: str, client: dibs.Client, sqlite_url: str
) -> None:
    """Whatever ends the loop: the job at hand may have cost a try, and others are ready at once, as if never taken."""
    queue = client.queue("a")
    queue.put_many(range(3))

    async def tasks() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as other:
            await in_task(other.queue("a"), leave)

    with contextlib.suppress(ValueError, KeyboardInterrupt):
        if face == "thread":
            in_thread(queue, leave)
        else:
            asyncio.run(tasks())
    assert [(job.payload, job.tries, job.crashes) for job in queue.jobs() if job.payload] == [(1, 0, 0), (2, 0, 0)]
    found = [job for state in ("ready", "later") for job in queue.jobs(state)]
    assert {job.payload: job.tries for job in found}[0] <= 1
    assert counts(queue)[2:] == (0, 0)


def test_streams_are_closed_by_closing(client: dibs.Client) -> None:
    """For type checkers, too, a stream can be closed: ``contextlib.closing`` gives back what was not begun."""
    queue = client.queue("a")
    queue.put_many(range(3))
    with contextlib.closing(queue.stream()) as jobs:
        for job in jobs:
            job.done()
            break
    assert counts(queue) == (2, 0, 0, 0)
    claims = client.claims("b")
    with contextlib.closing(claims.stream(lambda: [1, 2, 3])) as items:
        for item in items:
            item.done()
            break
    with claims.take([1, 2, 3]) as batch:
        assert batch.won == [1, 2, 3]


def test_a_stream_that_ctrl_c_ends_while_it_waits_takes_nothing(client: dibs.Client) -> None:
    """What comes a moment later is there for others, and nothing was tried."""
    queue = client.queue("a")
    ctrl_c = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(queue.stream()))
    queue.put(1)
    with queue.take() as batch:
        assert [job.tries for job in batch.won] == [1]


# -- other processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_cannot_be_pickled_says_what_to_do(client: dibs.Client, twin: Callable[[object], object]) -> None:
    """Clients, queues, jobs and items stay where they are; multiprocessing is told so in words, and who copies them."""
    queue = client.queue("a")
    queue.put(1)
    for thing in (client, queue, client.lock("a"), client.rwlock("a"), client.rwlock("a").read()):
        with pytest.raises(TypeError, match=r"dibs\.connect\(\) in the other process"):
            pickle.dumps(thing)
    with queue.take() as batch:
        for claimed in (batch, batch.won[0]):
            with pytest.raises(TypeError, match="a claimed job cannot be pickled or copied"):
                twin(claimed)
    with (
        client.claims("a").take([1]) as items,
        pytest.raises(TypeError, match="claimed items cannot be pickled or copied"),
    ):
        twin(items)


# -- takers who wait --------------------------------------------------------------------------------------------------


def test_who_waits_for_a_group_keeps_nobody_else_waiting(client: dibs.Client) -> None:
    """Takers with another limit, or none, have what they may, whoever of this process waited before them."""
    strict, free = client.queue("a", group_limit=1), client.queue("a")
    strict.put_many(range(3), group="g")
    with strict.take() as first:
        taken: list[int] = []
        waiting = threading.Thread(target=lambda: taken.extend(job.payload for job in strict.take(timeout=30)))
        waiting.start()
        eventually(lambda: client._desk.session().waiting._asleep, "somebody waits")
        with free.take(timeout=30) as batch:
            assert [job.payload for job in batch.won] == [1]
            batch.done()
        assert waiting.is_alive()
        first.done()
    waiting.join(30)
    assert taken == [2]


# -- what is put ------------------------------------------------------------------------------------------------------


def test_a_new_job_is_no_payload(client: dibs.Client) -> None:
    """A NewJob where a payload belongs is refused, by ``put`` and within another: its key would be lost in a list."""
    queue = client.queue("a")
    for payload in (dibs.NewJob(1, key="k"), dibs.NewJob(dibs.NewJob(1))):
        with pytest.raises(dibs.InvalidOption, match="a NewJob is no payload: put_many takes it"):
            queue.put(payload)
    with pytest.raises(dibs.InvalidOption, match="a NewJob is no payload"):
        queue.put_many([1, dibs.NewJob(dibs.NewJob(2))])
    assert counts(queue) == (0, 0, 0, 0)


@pytest.mark.parametrize("payloads", ["abc", b"abc", {"a": 1}, dibs.NewJob(1), None, 5])
def test_put_many_wants_a_list(client: dibs.Client, payloads: Any) -> None:
    """A text, bytes or an object of JSON are one payload, and not one for each of their parts."""
    queue = client.queue("a")
    with pytest.raises(dibs.InvalidOption, match="put_many takes a list of payloads"):
        queue.put_many(payloads)
    assert counts(queue) == (0, 0, 0, 0)


def test_ids_are_given_one_by_one(client: dibs.Client) -> None:
    queue = client.queue("a")
    ids = queue.put_many([1, 2])
    for act in (queue.cancel, queue.requeue, queue.purge):
        with pytest.raises(dibs.InvalidOption, match=r"write a \* in front of several"):
            act(ids)  # type: ignore[arg-type]
    assert queue.cancel(*ids) == ids


# -- signals ----------------------------------------------------------------------------------------------------------


def test_run_leaves_the_signal_handlers_of_the_event_loop(sqlite_url: str) -> None:
    """What the program does about SIGTERM on its loop is done as well, and is in place afterwards."""
    heard: list[str] = []
    again = asyncio.Event()

    def hear() -> None:
        heard.append("loop")
        if len(heard) == 2:
            again.set()

    async def handle(job: dibs.AsyncJob) -> None:
        signal.raise_signal(signal.SIGTERM)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, hear)
        try:
            async with dibs.connect_async(sqlite_url) as client:
                queue = client.queue("a")
                await queue.put_many(range(2))
                assert await queue.run(handle, workers=1) == 1
                signal.raise_signal(signal.SIGTERM)
                await again.wait()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert heard == ["loop"] * 2


def test_a_signal_that_is_ignored_stays_so(client: dibs.Client) -> None:
    """A program that a shell has put in the background is not ended by the Ctrl-C for another."""
    queue = client.queue("a")
    queue.put_many(range(2))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert queue.run(lambda job: signal.raise_signal(signal.SIGINT), workers=1, idle=0) == 2
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# -- handlers of all kinds --------------------------------------------------------------------------------------------


async def never_run(*args: object) -> None:
    raise AssertionError("nobody awaits it")


def of_threads(handler: Callable[[Any], Any], url: str) -> int:
    with dibs.connect(url) as client:
        return client.queue("a").run(handler, workers=1, idle=0.01)


def of_tasks(handler: Callable[[Any], Any], url: str) -> int:
    async def main() -> int:
        async def work(job: dibs.AsyncJob) -> Any:
            return handler(job)

        async with dibs.connect_async(url) as client:
            return await client.queue("a").run(work, workers=1, idle=0.01)

    return asyncio.run(main())


@pytest.mark.parametrize("work", [of_threads, of_tasks])
@pytest.mark.filterwarnings("ignore:coroutine 'never_run' was never awaited")
def test_a_handler_that_returns_what_has_not_run_has_failed(
    work: Callable[[Callable[[Any], Any], str], int], client: dibs.Client, sqlite_url: str
) -> None:
    """A lambda around an async function, or a forgotten await: the job is not done, since nothing of it has begun."""
    queue = client.queue("a")
    for returned in (lambda job: never_run(job.payload), lambda job: (number for number in [job.id])):
        id_ = queue.put(1, max_tries=1)
        assert work(returned, sqlite_url) == 0
        record = queue.job(id_)
        assert record is not None
        assert record.state == "dead"
        assert record.error is not None
        assert "whose body has not run" in record.error


@pytest.mark.parametrize("work", [of_threads, of_tasks])
def test_an_error_without_words_does_not_end_its_worker(
    work: Callable[[Callable[[Any], Any], str], int], client: dibs.Client, sqlite_url: str
) -> None:
    """A __repr__ that raises is a failure of the job like any other; the worker goes on to the next."""

    class Mute(Exception):
        def __repr__(self) -> str:
            raise RuntimeError("no words")

        __str__ = __repr__

    def handler(job: Any) -> None:
        if job.payload == 1:
            raise Mute

    queue = client.queue("a")
    first, second = queue.put_many([1, 2], max_tries=1)
    assert work(handler, sqlite_url) == 1
    assert queue.job(second) is None
    assert [job.id for job in queue.dead()] == [first]
    assert (queue.dead()[0].error or "").endswith("Mute: <exception str() failed>")


def test_what_is_wrong_with_an_end_is_said_of_that_end(client: dibs.Client) -> None:
    """A result is JSON, and never bytes. A time must be one, also where it does not matter: what is dead is not due."""
    queue = client.queue("a", keep_results=60)
    queue.put(1)
    with queue.take() as batch:
        (job,) = batch.won
        with pytest.raises(dibs.InvalidOption, match="a result is JSON: "):
            job.done(b"bytes")
        with pytest.raises(dibs.InvalidOption, match="retry_in"):
            job.fail("no", retry_in=-5, dead=True)
        assert job.held
        job.fail("no", retry_in=5, dead=True)
    assert [dead.error for dead in queue.dead()] == ["no"]
