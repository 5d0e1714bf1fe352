"""Queues: lost answers, lost hints, forks, dropped batches, handlers that misbehave, payloads that others put."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import re
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Literal
from unittest import mock

import pytest

import dibs
import dibs.crew
from dibs.clock import boot_now
from dibs.crew import Crew
from dibs.jobs import HINT_EVERY_S, Extend, Finish, Put, Take
from dibs.store import StoreBusy
from dibs.taking import TakeAsk
from dibs.testing.case import within
from dibs.testing.client_bench import until
from dibs.waiting import LOOK_GROWTH_MAX, Waiting
from tests.between import Between, Holdup
from tests.test_api import in_a_fork, logged
from tests.waits import eventually


@pytest.fixture
def client(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


def counts(queue: dibs.Queue) -> tuple[int, int, int, int]:
    """How many are ready, later, claimed, dead."""
    depth = queue.depth()
    return depth.ready, depth.later, depth.claimed, depth.dead


def one(queue: dibs.Queue, timeout: float = 10) -> dibs.Job:
    (job,) = queue.take(timeout=timeout).won
    return job


# -- lost answers -----------------------------------------------------------------------------------------------------


class Loses:
    """Put in the place of ``before`` or ``after``: the first calls with such a request fail."""

    def __init__(self, kind: type, times: int = 1, error: Callable[[], Exception] | None = None) -> None:
        self._kind = kind
        self.left = times
        self._error = error or (lambda: dibs.StoreUnavailable("the answer was lost"))
        #: What happens before the request is repeated.
        self.meanwhile: Callable[[], object] = bool

    def __call__(self, requests: Sequence[Any]) -> None:
        if self.left and any(type(request) is self._kind for request in requests):
            self.left -= 1
            self.meanwhile()
            raise self._error()


@pytest.fixture
def between(sqlite_url: str) -> Between:
    return Between(sqlite_url)


@pytest.mark.parametrize("times", [1, 3])
def test_a_put_whose_answer_is_lost_is_one_put(between: Between, times: int) -> None:
    """It is repeated, and the jobs are there once, with their ids."""
    with between.client() as client:
        queue = client.queue("a")
        assert counts(queue) == (0, 0, 0, 0)
        between.after = Loses(Put, times)
        ids = queue.put_many([1, dibs.NewJob(2, key="k"), 3])
        assert counts(queue) == (3, 0, 0, 0)
        assert [(job.id, job.payload) for job in queue.jobs()] == list(zip(ids, [1, 2, 3], strict=True))


@pytest.mark.parametrize("how", ["keep", "replace"])
def test_a_put_with_keys_whose_answer_is_lost_is_one_put(between: Between, how: Literal["keep", "replace"]) -> None:
    """Repeated, it tells the ids of what it kept or replaced in their places, also if that is being worked by then."""
    with between.client() as client, between.client() as other:
        queue = client.queue("a", ttl=20)
        first = queue.put(1, key="k", priority=9)
        between.after = lose = Loses(Put)
        at_work: list[dibs.JobBatch] = []
        lose.meanwhile = lambda: at_work.append(other.queue("a").take())
        jobs = [2, dibs.NewJob(3, key="k", priority=9), 4]
        ids = queue.put_many(jobs, on_conflict=how)
        assert (ids[1], ids[0] < ids[2]) == (first, True)
        assert [(job.id, job.payload) for job in at_work[0].won] == [(first, 1 if how == "keep" else 3)]
        assert [(job.id, job.payload) for job in queue.jobs()] == [(ids[0], 2), (ids[2], 4)]


def test_an_answer_with_ids_that_is_lost_is_not_guessed(between: Between) -> None:
    """Where a repeated put cannot tell which id is whose, since some jobs are done, that is said, and nothing else."""
    with between.client() as client, between.client() as other:
        queue = client.queue("a")
        assert counts(queue) == (0, 0, 0, 0)
        between.after = lose = Loses(Put)
        lose.meanwhile = lambda: other.queue("a").take().done()
        with pytest.raises(dibs.StoreUnavailable, match="2 jobs were put"):
            queue.put_many([1, 2])
        assert [job.payload for job in queue.jobs()] == [2]


@pytest.mark.parametrize("times", [1, 3])
def test_a_take_whose_answer_is_lost_is_one_take(between: Between, times: int) -> None:
    """It is repeated under its claim: the same jobs, their tries counted once, and no others claimed."""
    with between.client() as client:
        queue = client.queue("a")
        queue.put_many(range(5))
        between.after = Loses(Take, times)
        with queue.take(2) as batch:
            assert [(job.payload, job.tries, job.crashes) for job in batch.won] == [(0, 1, 0), (1, 1, 0)]
            assert counts(queue) == (3, 0, 2, 0)
            batch.done()
        assert counts(queue) == (3, 0, 0, 0)


def test_a_take_that_was_given_up_gives_back(between: Between) -> None:
    """A caller that heard nothing for all its patience has nothing, and what it was granted is soon given back."""
    with between.client(patience=0.3, ttl=20) as client:
        queue = client.queue("a")
        queue.put(1)
        between.after = lost = Loses(Take, 10**9)
        with pytest.raises(dibs.StoreUnavailable):
            queue.take()
        lost.left = 0
        job = one(queue)
        assert (job.tries, job.crashes) == (1, 0)
        job.done()


def test_what_takes_back_a_take_claims_nothing(between: Between) -> None:
    """A take that never reached the store is taken back by asking what it has: also if that answer is lost."""
    with between.client(patience=0.3, ttl=20) as client:
        queue = client.queue("a")
        queue.put(1)
        between.before = lost = Loses(Take, 10**9)
        asked = len(between.calls)
        with pytest.raises(dibs.StoreUnavailable):
            queue.take()
        between.after = Loses(Take, 1)
        lost.left = 0
        takes = [request for call in between.calls[asked:] for request in call if type(request) is Take]
        eventually(lambda: type(between.calls[-1][0]) is Take and not between.calls[-1][0].n, "it is taken back")
        assert counts(queue) == (1, 0, 0, 0)
        assert {take.n for take in takes} == {1}


@pytest.mark.parametrize("end", ["done", "fail", "skip"])
def test_an_end_whose_answer_is_lost_was_an_end(between: Between, end: str) -> None:
    """While the claim was in force nobody else can have ended the job: it is as it was said to be, and no error."""
    with between.client(ttl=20) as client:
        queue = client.queue("a", keep_results=60)
        id_ = queue.put(1)
        batch = queue.take()
        (job,) = batch.won
        between.after = lost = Loses(Finish)
        getattr(job, end)()
        assert not lost.left
        getattr(job, end)()
        assert not job.lost.is_set()
        assert not batch.lost
        record = queue.job(id_)
        assert record is not None
        assert record.state == {"done": "done", "fail": "later", "skip": "ready"}[end]


def test_ends_whose_answers_are_lost_are_no_losses_of_a_batch(between: Between) -> None:
    """Neither in the loop, nor of what is given back at its end."""
    with between.client(ttl=20) as client:
        queue = client.queue("a")
        queue.put_many(range(4))
        between.after = Loses(Finish, 2)
        with queue.take(4) as batch:
            for job in batch:
                if job.payload == 2:
                    break
        assert not batch.lost
        assert counts(queue) == (2, 0, 0, 0)


def test_an_end_of_which_nothing_is_known_is_never_a_success(between: Between) -> None:
    """When the store did not answer until the claim was over, done() says so, however often it is called."""
    with between.client(patience=0.2) as client:
        queue = client.queue("a", ttl=1)
        queue.put(1)
        with queue.take() as batch:
            (job,) = batch.won
            between.after = lost = Loses(Finish, 10**9)
            for _ in range(2):
                with pytest.raises(dibs.StoreUnavailable):
                    job.done()
            lost.left = 0
            with pytest.raises(dibs.StoreUnavailable):
                job.done()
        assert not job.held


def test_a_late_answer_that_it_is_gone_is_unknown(between: Between) -> None:
    """The first answer was lost, and by the second others may have had the job: neither done nor refused is known."""
    with between.client(patience=5) as client:
        queue = client.queue("a", ttl=1)
        queue.put(1)
        job = one(queue)

        def lose(requests: Sequence[Any]) -> None:
            if any(type(request) is Finish for request in requests):
                between.after = lambda requests: None
                time.sleep(1.2)  # until the claim is over
                raise dibs.StoreUnavailable("the answer was lost")

        between.after = lose
        with pytest.raises(dibs.StoreUnavailable):
            job.done()


def test_a_batch_of_which_nothing_is_known_is_never_a_success(between: Between) -> None:
    """Who went on from job to job hears at the end of the block when it is unknown whether they are done."""
    with between.client(patience=0.1, ttl=1) as client:
        queue = client.queue("a")
        queue.put_many([1, 2])
        worked = []
        between.before = Loses(Finish, 10**9)
        with pytest.raises(dibs.StoreUnavailable), queue.take(2) as batch:
            worked += [job.payload for job in batch]
        assert worked == [1, 2]


def test_an_end_by_id_whose_answer_was_lost_is_unknown(between: Between) -> None:
    """Repeated, it finds no claim in force: that may be its own doing, so it is not called lost."""
    with between.client(ttl=20) as client:
        queue = client.queue("a")
        queue.put(1)
        batch = queue.take()
        (job,) = batch.won
        batch.leave()
        between.after = Loses(Finish)
        with pytest.raises(dibs.StoreUnavailable, match="answer was lost"):
            queue.finish(job.id, job.fencing_token)
        assert counts(queue) == (0, 0, 0, 0)
        with pytest.raises(dibs.LeaseLost):
            queue.finish(job.id, job.fencing_token)


def test_an_end_is_repeated_until_the_claim_is_over(between: Between) -> None:
    """What was done is not to be done again for a store that is away longer than callers are patient."""
    with between.client(patience=0.1, ttl=20) as client:
        queue = client.queue("a")
        queue.put(1)
        job = one(queue)
        between.before = away = Loses(Finish, 10**9)
        back = threading.Timer(1.0, lambda: setattr(away, "left", 0))
        back.start()
        job.done()
        back.join()
        assert counts(queue) == (0, 0, 0, 0)


def test_a_take_that_was_answered_too_late_has_nothing(between: Between) -> None:
    """An answer that took as long as the claim lasts hands out nothing that others may have by then."""
    with between.client(ttl=0.5, patience=5) as client, between.client() as other:
        queue = client.queue("a")
        queue.put(1)

        def late(requests: Sequence[Any]) -> None:
            if any(type(request) is Take for request in requests):
                between.after = lambda requests: None
                assert one(other.queue("a")).tries == 2

        between.after = late
        with pytest.raises(dibs.StoreUnavailable, match="longer than the ttl"):
            queue.take()


def test_a_busy_store_does_not_hide_a_cancellation(between: Between) -> None:
    """An attempt that certainly did nothing leaves no doubt about the next: a cancelled job is refused."""
    with between.client(ttl=20) as client, dibs.connect(between.address.shown) as operator:
        queue = client.queue("a")
        id_ = queue.put(1)
        job = one(queue)
        assert operator.queue("a").cancel(id_) == [id_]
        between.before = Loses(Finish, 2, lambda: StoreBusy("another is writing"))
        with pytest.raises(dibs.LeaseLost, match="cancelled"):
            job.done()
        assert job.lost.is_set()


def test_run_counts_what_was_done_whatever_became_of_the_answers(between: Between) -> None:
    """Of lost answers to takes and ends nothing is left but the count of what was done."""
    with between.client(ttl=20) as client:
        queue = client.queue("a", keep_results=60)
        ids = queue.put_many(range(50))
        losses = [Loses(Take, 3), Loses(Finish, 3), Loses(Extend, 1)]

        def lose(requests: Sequence[Any]) -> None:
            for loses in losses:
                loses(requests)

        between.after = lose
        worked: list[int] = []
        assert queue.run(lambda job: worked.append(job.payload), workers=3, idle=0.2) == 50
        assert sorted(worked) == list(range(50))
        assert [job.tries for job in queue.jobs("done")] == [1] * len(ids)


def test_a_take_that_is_answered_as_its_time_ends_has_its_jobs(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While what it was granted is being noted down, nobody says that there was nothing."""
    claimed = TakeAsk._claimed

    def slowly(ask: TakeAsk, taken: Any) -> None:
        time.sleep(0.3)  # past the end of the wait
        claimed(ask, taken)

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            queue = client.queue("a")
            await queue.put(1)
            monkeypatch.setattr(TakeAsk, "_claimed", slowly)
            batch = await queue.take(timeout=0.1)
            assert [job.payload for job in batch.won] == [1]
            await batch.done()

    asyncio.run(main())


# -- lost hints -------------------------------------------------------------------------------------------------------


class _Silent:
    """A watch that never tells anything."""

    interval_s: float | None = None

    def fileno(self) -> int | None:
        return None

    def changed(self, names: Sequence[str]) -> list[str]:
        return []

    def close(self) -> None:
        pass


def test_with_all_hints_lost_a_taker_polls(between: Between, client: dibs.Client) -> None:
    """A put is noticed within a poll, by one that waits and by one that runs."""
    between.watch = _Silent  # type: ignore[assignment]
    with between.client(ttl=20) as deaf:
        queue, theirs = deaf.queue("a"), client.queue("a")
        for _ in range(2):
            timer = threading.Timer(0.1, theirs.put, [1])
            timer.start()
            with within(0.1 + 1.0 + 1.0, "the put was noticed late"):
                job = one(queue)
            job.done()
            timer.join()
        stop = threading.Event()
        thread = threading.Thread(target=queue.run, args=(lambda job: None,), kwargs={"stop": stop})
        thread.start()
        eventually(lambda: deaf._desk.session().waiting._asleep, "the worker waits")
        assert theirs.wait(theirs.put(2), timeout=3) is None
        stop.set()
        thread.join(10)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who waits looks by themselves for as long as a test lasts."""
    monkeypatch.setattr("dibs.waiting.POLL_MIN_S", 60.0)
    monkeypatch.setattr("dibs.waiting.POLL_MAX_S", 60.0)


class _Told(_Silent):
    """A watch that tells what the test says, once."""

    def __init__(self) -> None:
        self._news: list[str] = []
        self._ours, self._theirs = socket.socketpair()

    def tell(self, queue: dibs.Queue) -> None:
        self._news.append(queue._core._key)
        self._theirs.send(b"!")

    def fileno(self) -> int:
        return self._ours.fileno()

    def changed(self, names: Sequence[str]) -> list[str]:
        self._ours.setblocking(False)
        try:
            self._ours.recv(100)
        except BlockingIOError:
            return []
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a job in hand"])
def test_a_worker_without_news_gets_used_to_waiting(
    busy: bool, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where changes are looked for, a worker that finds nothing looks less and less often, until it has a job."""
    pauses: list[float] = []
    pause_of = Waiting._look_pause

    def noted(waiting: Waiting, interval_s: float, now: float) -> float:
        pauses.append(pause_of(waiting, interval_s, now))
        return pauses[-1]

    monkeypatch.setattr(Waiting, "_look_pause", noted)
    watch = _Silent()
    watch.interval_s = interval_s = 0.002
    between.watch = lambda: watch  # type: ignore[assignment]
    stop, go_on = threading.Event(), threading.Event()
    with between.client(ttl=20) as client, ThreadPoolExecutor(1) as worker:
        queue = client.queue("a")
        if busy:
            queue.put("long")
        worker.submit(queue.run, lambda job: go_on.wait(10), workers=2, stop=stop)
        try:
            eventually(lambda: LOOK_GROWTH_MAX * interval_s in pauses, "it goes on looking")
            go_on.set()
            seen = len(pauses)
            queue.put("short")  # which it finds by its next poll
            eventually(lambda: interval_s in pauses[seen:], "after a job it looks often again")
        finally:
            stop.set()
            go_on.set()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("called", [True, False], ids=["whom it called", "whom it found busy"])
def test_a_take_soon_after_a_hint_looks_again(
    called: bool, between: Between, client: dibs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put right after what was told of is told to nobody: it is found although no other hint comes."""
    monkeypatch.setattr("dibs.taking.HINT_EVERY_S", 60.0)  # as if all of this took no time
    watch = _Told()
    between.watch = lambda: watch  # type: ignore[assignment]
    with between.client(ttl=20) as deaf, ThreadPoolExecutor(1) as taker:
        queue, theirs = deaf.queue("a"), client.queue("a")
        waiting = deaf._desk.session().waiting
        if called:
            first = taker.submit(one, queue)
            eventually(lambda: waiting._asleep and waiting._bell is not None, "somebody waits")
            theirs.put("told of")
            watch.tell(queue)
            assert first.result(10).payload == "told of"
        else:
            assert not queue.take(timeout=1)  # so that there is a watch
            watch.tell(queue)
            eventually(lambda: waiting.hinted_at(queue._core._key) > 0, "the hint was heard")
        second = taker.submit(one, queue)
        eventually(lambda: waiting._asleep, "it found nothing")
        theirs.put("not told of")
        assert second.result(10).payload == "not told of"


@pytest.mark.usefixtures("patient")
def test_who_waits_in_peace_does_not_look_again(between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no hint came lately, a take asks once, and then waits for one."""
    watch = _Told()
    between.watch = lambda: watch  # type: ignore[assignment]
    with between.client(ttl=20) as client:
        queue = client.queue("a")
        waiting = client._desk.session().waiting
        # When the watch begins, whoever waits is told so, and that is no peace yet.
        eventually(lambda: not queue.take(timeout=0.1) and waiting.hinted_at(queue._core._key) > 0, "a watch")
        eventually(lambda: boot_now() > waiting.hinted_at(queue._core._key) + HINT_EVERY_S, "peace")
        between.calls.clear()
        assert not queue.take(timeout=0.5)
        # (What takes back the take before may come late.)
        assert len([call for call in between.calls if type(call[0]) is Take and call[0].n]) == 1


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("server", ["postgres_url", "redis_url"])
def test_a_put_whose_hint_was_left_out_is_noticed(
    server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has just been called and served waits for the next job, too, which nobody was told of so soon after."""
    for module in ("stores.postgres_jobs", "stores.redis_job_runs", "taking"):
        monkeypatch.setattr(f"dibs.{module}.HINT_EVERY_S", 2.0)
    monkeypatch.setattr("dibs.waiting.LOOK_AGAIN_S", 4.0)
    url = request.getfixturevalue(server)

    async def main() -> None:
        async with dibs.connect_async(url) as ours, dibs.connect_async(url) as theirs:
            queue, line = ours.queue("a", ttl=20), ours._desk.session().waiting
            await queue.take(timeout=0.1)  # so that there is a watch
            for payload in ("told of", "not told of"):
                taker = asyncio.ensure_future(queue.take(timeout=20))
                await until(lambda: line._asleep, "it found nothing")
                await theirs.queue("a").put(payload)
                assert [job.payload for job in (await taker).won] == [payload]
                await taker.result().done()

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("face", ["threads", "tasks", "a stream"])
def test_a_job_that_was_ready_all_the_time_is_not_left(face: str, between: Between, client: dibs.Client) -> None:
    """Who ends because nothing came takes once more: also a job that it was not told of is worked."""
    between.watch = _Silent  # type: ignore[assignment]
    late = [1]

    def put(requests: Sequence[Any]) -> None:
        if late and type(requests[0]) is Take:  # it found nothing
            client.queue("a").put(late.pop())

    async def main() -> int:
        async with between.async_client(ttl=20) as tasks:
            await tasks.queue("a").take(timeout=0.5)  # so that there is a watch: who opens one looks again
            between.after = put
            return await tasks.queue("a").run(handle, idle=0.2)

    async def handle(job: dibs.AsyncJob) -> None:
        pass

    if face == "tasks":
        assert asyncio.run(main()) == 1
        return
    with between.client(ttl=20) as threads:
        queue = threads.queue("a")
        queue.take(timeout=0.5)
        between.after = put
        if face == "threads":
            assert queue.run(lambda job: None, idle=0.2) == 1
        else:
            assert [job.payload for job in queue.stream(idle=0.2)] == [1]


# -- who asks for nothing ---------------------------------------------------------------------------------------------


def test_one_slow_job_is_no_reason_to_ask_without_a_pause(between: Between) -> None:
    """With the shortest idle time, too, a worker whose job takes its time asks the store seldom."""
    with between.client(ttl=20) as client:
        queue = client.queue("a")
        queue.put(1)
        assert queue.run(lambda job: time.sleep(1), workers=4, idle=0) == 1  # the slow job
        assert len([call for call in between.calls if type(call[0]) is Take]) < 10


def test_a_first_answer_that_comes_too_late_ends_no_worker(between: Between) -> None:
    """A store that has answered at all is at the right address: what it gave is given back, and taken once more."""
    with between.client(ttl=20) as client:
        queue = client.queue("a", ttl=1)
        queue.put(1)
        late = [1.2]

        def answer(requests: Sequence[Any]) -> None:
            if late and type(requests[0]) is Take:
                time.sleep(late.pop())  # for longer than the ttl

        between.after = answer
        assert queue.run(lambda job: None, workers=1, idle=3) == 1


def test_a_paused_process_begins_no_job_it_has_lost(client: dibs.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited for a worker until its claim was over is left to others."""
    monkeypatch.setattr("dibs.crew.PACE_S", 60.0)  # three were quick, however slow the machine is just now
    queue, others = client.queue("a", ttl=5), client.queue("a", ttl=20)
    begun: list[Any] = []

    def work(job: dibs.Job) -> None:
        begun.append(job.payload)
        if job.payload == "slow":
            eventually(waiting, "it waits for a worker")
            others.cancel(waiting()[0].id)
            eventually(lambda: not [held for held in waiting() if held.held], "the loss is noticed")

    def waiting() -> list[dibs.Job]:
        return [thing for thing in gc.get_objects() if type(thing) is dibs.Job and thing.payload == "cancelled"]

    queue.put_many(["quick", "quick", "quick"])

    def feed(job: dibs.Job) -> None:
        if job.payload == "quick":
            begun.append("quick")
            if begun.count("quick") == 3:
                queue.put_many(["slow", "cancelled", "last"])
        else:
            work(job)

    queue.run(feed, workers=1, prefetch=10, idle=0.3)
    assert begun == ["quick"] * 3 + ["slow", "last"]


@pytest.mark.parametrize("by_id", [False, True])
def test_the_pause_before_a_try_doubles(client: dibs.Client, by_id: bool) -> None:
    """From a second up to an hour, give or take a quarter, whoever says that it failed; and not the same for all."""
    queue = client.queue("a", max_tries=None)
    for tries, usual in ((1, 1.0), (2, 2.0), (4, 8.0), (12, 2048.0), (13, 3600.0)):
        ids = queue.put_many(range(4), max_tries=100)
        for _ in range(1, tries):
            for job in queue.take(4).won:
                job.fail(retry_in=0)
        pauses = []
        batch = queue.take(4)
        for job in batch.won:
            assert job.tries == tries
            if by_id:
                queue.finish(job.id, job.fencing_token, outcome="failed")
            else:
                job.fail()
            record = queue.job(job.id)
            assert record is not None
            pauses.append(record.due_at.timestamp() - time.time())
        batch.leave()
        assert all(0.75 * usual - 1 <= pause <= 1.25 * usual for pause in pauses), (tries, pauses)
        queue.cancel(*ids)
    assert max(pauses) - min(pauses) > 10


# -- drops, forks, closing --------------------------------------------------------------------------------------------


def test_a_dropped_batch_is_not_renewed_for_ever(client: dibs.Client) -> None:
    """Its jobs are handed out again by the ttl, and their worker counts as one that ended without a word."""
    queue = client.queue("a", ttl=1)
    queue.put(1)
    batch = queue.take()
    assert len(batch) == 1
    del batch
    gc.collect()
    job = one(queue)
    assert (job.tries, job.crashes) == (2, 1)
    time.sleep(1.5)  # longer than the ttl
    assert job.held  # whoever has a job of it has the batch
    job.done()


@pytest.mark.parametrize("face", ["threads", "tasks"])
def test_what_a_thread_left_behind_is_given_back_at_the_end(face: str, sqlite_url: str, client: dibs.Client) -> None:
    """A client that is closed gives back also what a thread or a task has taken that has ended since."""
    client.queue("a").put(1)
    kept: list[Any] = []

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as tasks:
            kept.append(await asyncio.ensure_future(tasks.queue("a").take()))
            gc.collect()

    if face == "tasks":
        asyncio.run(main())
    else:
        with dibs.connect(sqlite_url, ttl=20) as threads:
            thread = threading.Thread(target=lambda: kept.append(threads.queue("a").take()))
            thread.start()
            thread.join()
    assert (len(kept[0]), counts(client.queue("a"))) == (1, (1, 0, 0, 0))


def test_a_forked_child_holds_nothing(client: dibs.Client) -> None:
    """In a forked child a job is not held, its ends are refused, and nothing of it is given back or done."""
    queue = client.queue("a")
    ids = queue.put_many(range(3))
    batch = queue.take(3)
    first = next(batch)

    def child() -> None:
        assert [job.held for job in batch.won] == [False] * 3
        for end in (first.done, first.fail, first.skip, first.extend, first.check, batch.done):
            with pytest.raises(dibs.LeaseLost, match="fork"):
                end()
        with batch:
            assert list(batch) == []
        batch.release()
        assert not first.lost.is_set()
        assert not first.lost.wait(0.01)
        assert counts(queue) == (0, 0, 3, 0)  # the child's own connection
        queue.put(4)
        assert len(queue.take(5)) == 1

    in_a_fork(child)
    assert [job.held for job in batch.won] == [True] * 3
    assert [job.id for job in batch.left] == ids
    batch.done()
    assert not batch.lost


def test_a_closed_client_gives_back_what_is_on_its_way(between: Between) -> None:
    """A take that is under way when its client is closed leaves nothing claimed."""
    client = between.client(ttl=20)
    queue = client.queue("a")
    queue.put(1)
    between.after = holdup = Holdup(lambda requests: type(requests[0]) is Take)
    failed: list[BaseException] = []

    def take() -> None:
        try:
            queue.take(timeout=5)
        except dibs.StoreUnavailable as error:
            failed.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    assert holdup.reached.wait(10)
    closer = threading.Thread(target=client.close)
    closer.start()
    eventually(lambda: client._desk.session().closed, "the client is closing")
    holdup.go_on()
    for thread in (taker, closer):
        thread.join(10)
        assert not thread.is_alive()
    assert len(failed) == 1
    with dibs.connect(between.address.shown) as other:
        assert counts(other.queue("a")) == (1, 0, 0, 0)


# -- handlers ---------------------------------------------------------------------------------------------------------


def test_a_handler_that_never_returns_loses_its_job(client: dibs.Client) -> None:
    """After max_hold the claim is extended no more: the handler is told, and the job is handed out again."""
    queue = client.queue("a", ttl=1, max_hold=1.5, max_tries=2)
    queue.put(1)
    told, stop = threading.Event(), threading.Event()

    def stuck(job: dibs.Job) -> None:
        assert job.lost.wait(20)
        told.set()
        stop.wait(20)

    thread = threading.Thread(target=queue.run, args=(stuck,), kwargs={"workers": 1, "stop": stop})
    thread.start()
    try:
        assert told.wait(10)
        job = one(client.queue("a", ttl=20))
        assert (job.tries, job.crashes) == (2, 1)
        job.done()
    finally:
        stop.set()
        thread.join(10)
    assert counts(queue) == (0, 0, 0, 0)


def test_a_cancellation_of_the_handlers_own_is_a_failure(sqlite_url: str) -> None:
    """A task that awaits something cancelled fails its job: given back, it would be tried for ever without a pause."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            queue = client.queue("a", max_tries=1)
            await queue.put(1)

            async def handle(job: dibs.AsyncJob) -> None:
                future = asyncio.get_running_loop().create_future()
                future.cancel()
                await future

            assert await queue.run(handle, idle=0.1) == 0
            (dead,) = await queue.dead()
            assert "CancelledError" in (dead.error or "")

    asyncio.run(main())


def test_what_a_handler_was_ending_as_it_is_cut_off_is_counted(between: Between) -> None:
    """A job is done that its handler had just ended by itself when ``run`` stopped waiting for it."""
    between.before = holdup = Holdup(lambda requests: type(requests[0]) is Finish)

    async def main() -> None:
        async with between.async_client() as client:
            queue = client.queue("a")
            await queue.put(1)
            stop = threading.Event()
            cut_off: list[int] = []

            async def handle(job: dibs.AsyncJob) -> None:
                try:
                    await job.done()
                finally:
                    cut_off.append(job.id)
                    holdup.go_on()

            running = asyncio.create_task(queue.run(handle, workers=1, stop=stop, drain_timeout=0))
            assert await asyncio.to_thread(holdup.reached.wait, 10)
            stop.set()
            assert await running == 1
            assert cut_off
            assert (await queue.depth()).ready == 0

    asyncio.run(main())


def test_a_lost_job_counts_until_its_handler_has_ended(sqlite_url: str) -> None:
    """When the same workers take it again meanwhile, no more handlers run than there are workers, and run() waits."""
    running: list[int] = []
    most = [0]

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            queue = client.queue("a", ttl=1, renew=False)
            await queue.put("slow")

            async def handle(job: dibs.AsyncJob) -> None:
                running.append(job.tries)
                most[0] = max(most[0], len(running))
                try:
                    if job.tries == 1 and job.payload == "slow":
                        await queue.put_many(range(2), delay=1)
                        await asyncio.sleep(60)  # until it is cancelled
                    await asyncio.sleep(0.3)  # so that several run at a time
                except asyncio.CancelledError:
                    await asyncio.sleep(1)  # a handler that takes its time to clean up
                finally:
                    running.remove(job.tries)

            await queue.run(handle, workers=2, idle=0.5)
            assert running == []

    asyncio.run(main())
    assert most == [2]


def test_a_cancelled_run_gives_everything_back(sqlite_url: str) -> None:
    """Cancelling run() cancels its handlers, and no try of what they did not finish is counted."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            queue = client.queue("a")
            await queue.put_many(range(6))
            cancelled = [0]
            begun = asyncio.Semaphore(0)

            async def handle(job: dibs.AsyncJob) -> None:
                begun.release()
                try:
                    await asyncio.sleep(60)  # until it is cancelled
                except asyncio.CancelledError:
                    cancelled[0] += 1
                    raise

            running = asyncio.create_task(queue.run(handle, workers=3))
            for _ in range(3):
                await begun.acquire()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert cancelled[0] == 3
            assert [job.tries for job in await queue.jobs()] == [0] * 6

    asyncio.run(main())


def test_a_job_whose_task_never_began_is_given_back(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is told to stop in the very moment in which it begins a job keeps nothing of it."""
    add = dibs.crew.Crew.add

    def add_and_stop(self: dibs.crew.Crew, jobs: list[Any]) -> None:
        add(self, jobs)
        self.stopping = bool(jobs)

    monkeypatch.setattr(dibs.crew.Crew, "add", add_and_stop)

    async def handler(job: dibs.aio.AsyncJob) -> None:
        raise AssertionError("it is cancelled before that")

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client:
            queue = client.queue("q")
            await queue.put("x")
            assert await queue.run(handler, drain_timeout=0) == 0
            (job,) = await queue.jobs()
            assert (job.state, job.tries) == ("ready", 0)

    asyncio.run(main())


def test_a_job_that_the_end_of_the_client_gave_back_is_not_done(sqlite_url: str, client: dibs.Client) -> None:
    """Whatever its handler returns: it was given back to be worked by others."""
    mine = dibs.connect(sqlite_url)
    queue = mine.queue("q")
    queue.put("x")
    assert queue.run(lambda job: mine.close(), workers=1) == 0
    eventually(lambda: counts(client.queue("q")) == (1, 0, 0, 0), "given back")


@pytest.mark.parametrize("where", ["drop_waiting", "_send_back", "abandon", "settling"])
def test_a_ctrl_c_at_the_end_of_a_run_leaves_nothing_behind(
    client: dibs.Client, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a second one interrupts is done all the same: no thread waits for work, and no job for its ttl."""
    queue = client.queue("a")
    queue.put_many(range(40))
    at_work, go_on = threading.Event(), threading.Event()

    def handler(job: dibs.Job) -> None:
        if job.payload >= 20:
            at_work.set()
            go_on.wait(60)

    def stop() -> bool:
        if at_work.is_set():
            monkeypatch.setattr(Crew, where, interrupted)
            raise KeyboardInterrupt
        return False

    shipped = getattr(Crew, where)

    def interrupted(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Crew, where, shipped)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.run(handler, workers=2, prefetch=10, stop=stop)
    assert getattr(Crew, where) is shipped
    go_on.set()
    eventually(lambda: counts(queue)[2] == 0, "given back")
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("dibs-worker")], "ended")


def test_a_result_that_cannot_be_kept_ends_no_worker(client: dibs.Client, caplog: pytest.LogCaptureFixture) -> None:
    """The job is done all the same, and the log says what was dropped."""
    queue = client.queue("a", keep_results=60)
    ids = queue.put_many(range(3))
    assert queue.run(lambda job: object(), workers=1, idle=0) == 3
    assert [queue.wait(id_) for id_ in ids] == [None] * 3
    assert "its result is not kept" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handler_that_ends_its_thread_ends_the_run(client: dibs.Client) -> None:
    """SystemExit in a handler fails its job, drains the others, and is raised: who watches the program hears of it."""
    queue = client.queue("a")
    queue.put_many(range(3))

    def leave(job: dibs.Job) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as ended:
        queue.run(leave, workers=1)
    assert ended.value.code == 3
    assert counts(queue) == (2, 1, 0, 0)


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_signals_are_the_programs_own_again_after_a_run(how: str, sqlite_url: str) -> None:
    """What SIGTERM and Ctrl-C did before ``run`` they do after it."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    during: list[Any] = []

    async def work(job: dibs.AsyncJob) -> None:
        during.append(signal.getsignal(signal.SIGTERM))

    async def tasks() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            await client.queue("a").put(1)
            assert await client.queue("a").run(work, workers=1, idle=0) == 1
            assert signal.getsignal(signal.SIGTERM) == before[0]

    if how == "tasks":
        asyncio.run(tasks())
    else:
        with dibs.connect(sqlite_url) as client:
            client.queue("a").put(1)
            seen = client.queue("a").run(lambda job: during.append(signal.getsignal(signal.SIGTERM)), workers=1, idle=0)
            assert seen == 1
    assert during
    assert during[0] != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_handler_that_ends_the_event_loop_has_failed(sqlite_url: str) -> None:
    """SystemExit in a task ends the program, and costs the job a try: it does not end every worker for ever."""

    async def leave(job: dibs.AsyncJob) -> None:
        raise SystemExit(3)

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            await client.queue("a").run(leave, workers=1)

    with dibs.connect(sqlite_url) as client:
        queue = client.queue("a", max_tries=1)
        queue.put_many(range(2))
        with pytest.raises(SystemExit) as ended:
            asyncio.run(main())
        assert ended.value.code == 3
        assert counts(queue) == (1, 0, 0, 1)


class Abort(BaseException):
    """What some frameworks end a worker with."""


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_an_abort_in_a_handler_ends_the_run(how: str, sqlite_url: str) -> None:
    """Whatever is not an Exception fails the job, ends the run in order, and is raised by it."""
    idle: list[int] = []

    def leave(job: dibs.Job) -> None:
        raise Abort(job.payload)

    async def leave_later(job: dibs.AsyncJob) -> None:
        if job.payload:
            await asyncio.sleep(0.1)
            raise Abort(job.payload)
        await asyncio.sleep(0.5)
        idle.append(job.id)

    async def tasks() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client:
            await client.queue("a").run(leave_later, workers=2)

    with dibs.connect(sqlite_url, ttl=20) as client:
        queue = client.queue("a", max_tries=1)
        if how == "threads":
            queue.put(1)
            with pytest.raises(Abort):
                queue.run(leave, workers=1)
            assert counts(queue) == (0, 0, 0, 1)
        else:
            queue.put_many([1, 0])
            with pytest.raises(Abort):
                asyncio.run(tasks())
            assert counts(queue) == (0, 0, 0, 1)
            assert len(idle) == 1
        assert "Abort" in (queue.dead()[0].error or "")


def test_what_would_not_run_in_the_call_is_no_handler(client: dibs.Client, sqlite_url: str) -> None:
    """A function that is awaited or iterated returns before its body has run: its jobs would be done at once."""
    queue = client.queue("a")
    queue.put(1)

    async def later(job: Any) -> None: ...

    def each(job: Any) -> Iterator[int]:
        yield 1

    class Later:
        async def __call__(self, job: Any) -> None: ...

    for wrong, why in ((later, "async"), (Later(), "async"), (functools.partial(later), "async"), (each, "generator")):
        with pytest.raises(TypeError, match=why):
            queue.run(wrong, idle=0)
    assert counts(queue) == (1, 0, 0, 0)
    handler = mock.MagicMock()
    assert queue.run(handler, idle=0) == 1
    assert handler.call_count == 1

    async def main() -> int:
        async with dibs.connect_async(sqlite_url) as client:
            await client.queue("a").put(1)
            with pytest.raises(dibs.InvalidOption, match="async"):
                await client.queue("a").run(lambda job: None, idle=0)  # type: ignore[arg-type, return-value]
            return await client.queue("a").run(Later(), idle=0)

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("end", ["done", "skip", "fail"])
def test_a_handler_that_raises_after_the_end_of_its_job(
    end: str, client: dibs.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that the job had ended already, not that it has failed; one that was done counts as done."""
    queue = client.queue("a")
    queue.put(1)
    stop = threading.Event()

    def work(job: dibs.Job) -> None:
        stop.set()
        getattr(job, end)()
        raise ValueError("too late")

    assert queue.run(work, workers=1, stop=stop) == (end == "done")
    (line,) = logged(caplog)
    assert "ValueError('too late') when its job had ended already" in line
    assert "tried again" not in line


def test_a_handler_that_goes_on_without_its_job_is_told_of(
    client: dibs.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps a worker from other jobs, so the log says so, and once more when it ends; neither is a failed try."""
    queue = client.queue("a", ttl=1)
    id_ = queue.put(1)

    def cancelled(job: dibs.Job) -> None:
        queue.cancel(job.id)
        assert job.lost.wait(20)
        eventually(lambda: "keeps one of 1 workers busy" in caplog.text, "the log says so")
        job.check()

    queue.run(cancelled, workers=1, idle=0)
    _, line = logged(caplog)
    assert f"a try has come to nothing: the claim on job {id_} of 'a'" in line


def test_a_store_that_is_away_is_told_of_once(
    between: Between, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every look: when it is missed, once a minute from then on, and when it is back."""
    monkeypatch.setattr(dibs.crew, "AWAY_S", 0.01)
    with between.client(patience=0) as client:
        queue = client.queue("a")
        queue.put(1)
        between.before = lost = Loses(Take, 5)
        assert queue.run(lambda job: None, workers=1, idle=0.1) == 1
        assert lost.left == 0
        lines = logged(caplog)
        assert [("is away" in line, "is back" in line) for line in lines] == [(True, False), (False, True)], lines
        caplog.clear()
        monkeypatch.setattr(dibs.absence, "AWAY_TOLD_EVERY_S", 0.0)
        queue.put(2)
        lost.left = 6
        assert queue.run(lambda job: None, workers=1, idle=0.1) == 1
        _, *between_them, _ = logged(caplog)
        assert between_them
        assert all("is still away, for 0 s now" in line for line in between_them)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_store_that_was_never_reached_is_given_its_patience(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker says at once that it is away, asks again, and in the end takes the address for wrong."""
    monkeypatch.setattr(dibs.crew, "AWAY_S", 0.05)
    monkeypatch.setattr(dibs.absence, "AWAY_TOLD_EVERY_S", 0.0)
    nowhere = "redis://127.0.0.1:1"

    def run() -> None:
        with dibs.connect(nowhere, patience=0.4) as client:
            client.queue("a").run(lambda job: None)

    async def run_async() -> None:
        async def handler(job: dibs.AsyncJob) -> None: ...

        async with dibs.connect_async(nowhere, patience=0.4) as client:
            await client.queue("a").run(handler)

    with pytest.raises(dibs.StoreUnavailable, match=r"127\.0\.0\.1:1"):
        run() if kind == "sync" else asyncio.run(run_async())
    first, *others = logged(caplog)
    assert "is away, trying again" in first
    assert others
    assert all("is still away" in line for line in others)


def test_a_wrong_password_ends_a_worker_at_once(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Waiting would not mend it."""
    wrong = re.sub("://.*@", "://nobody:wrong@", postgres_url)
    with dibs.connect(wrong, patience=60) as client, pytest.raises(dibs.SetupRequired, match="password"):
        client.queue("a").run(lambda job: None)
    assert not logged(caplog)


# -- what others put --------------------------------------------------------------------------------------------------


def test_a_payload_that_is_not_json_is_the_handlers_to_see(client: dibs.Client, sqlite_url: str) -> None:
    """A row that somebody wrote by hand fails when its payload is read, with the error kept, and nothing else stops."""
    queue = client.queue("a", max_tries=1)
    first = queue.put("to be spoiled")
    queue.put("fine")
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as db:
        db.execute("UPDATE dibs_lease_job SET payload = '{not json' WHERE id = ?", (first,))
        db.commit()
    seen: list[Any] = []
    assert queue.run(lambda job: seen.append(job.payload), workers=1, idle=0.1) == 1
    assert seen == ["fine"]
    (dead,) = queue.dead()
    assert dead.payload == "{not json"
    assert json.JSONDecodeError.__name__ in (dead.error or "")
