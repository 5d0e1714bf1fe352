"""What several threads or tasks end at once: each is told what became of it, and none waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from sqlite3 import connect
from typing import Any

import pytest

import dibs
import dibs.campaign
import dibs.succession
from dibs.ask import Ask
from dibs.clock import RealClock
from dibs.errors import LeaseLost, StoreUnavailable
from dibs.steps import run
from dibs.waiting import Waiting
from tests.waits import eventually

WAIT_S = 20.0
SEVERAL = 4


def at_once(acts: list[Callable[[], object]]) -> list[object]:
    """Call each in a thread of its own; what it returned or raised, in their order."""
    told: list[object] = ["nothing"] * len(acts)
    ready = threading.Barrier(len(acts))

    def call(place: int) -> None:
        ready.wait()
        try:
            told[place] = acts[place]()
        except Exception as error:  # noqa: BLE001 - what is raised is looked at
            told[place] = error

    threads = [threading.Thread(target=call, args=(place,), daemon=True) for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return told


@contextmanager
def kept_busy(url: str) -> Iterator[None]:
    """Nobody else can write to the file."""
    with closing(connect(url.removeprefix("sqlite:///"), isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        yield
        file.execute("ROLLBACK")


async def in_tasks(acts: list[Callable[[], Awaitable[object]]]) -> list[Any]:
    """The same in tasks."""

    async def call(act: Callable[[], Awaitable[object]]) -> object:
        return await act()

    return await asyncio.wait_for(asyncio.gather(*map(call, acts), return_exceptions=True), WAIT_S)


def test_all_who_wait_for_an_answer_have_it() -> None:
    """Whoever asked, threads and listeners beside it, and who comes when it has been answered."""
    ask, letters, woken = Ask(None, float("inf")), list[int](), list[bool]()
    asks = [ask, *(ask.echo() for _ in range(SEVERAL))]
    threads = [threading.Thread(target=lambda ask=ask: woken.append(ask.wait(RealClock(), WAIT_S))) for ask in asks]
    for thread in threads:
        thread.start()
    assert not ask.echo().wait(RealClock(), 0.01)
    ask.echo().listen(letters.append, 1)
    ask.trouble = StoreUnavailable("away")
    ask.settle("done")
    for thread in threads:
        thread.join(WAIT_S)
    assert woken == [True] * len(asks)
    ask.echo().listen(letters.append, 2)
    assert letters == [1, 2]
    assert {(echo.outcome, echo.maybe_applied) for echo in (*asks, ask.echo())} == {("done", ask.maybe_applied)}


def test_a_job_that_several_finish(sqlite_url: str) -> None:
    """All are told that it is done."""
    with dibs.connect(sqlite_url) as client:
        queue = client.queue("q")
        for _ in range(20):
            queue.put_many(range(4))
            batch = queue.take(4)
            told = at_once([job.done for job in batch.won for _ in range(2)])
            assert told == [None] * 8


def test_a_job_that_several_tasks_finish(sqlite_url: str) -> None:
    async def work() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            queue = client.queue("q")
            for _ in range(20):
                await queue.put_many(range(4))
                batch = await queue.take(4)
                told = await in_tasks([job.done for job in batch.won for _ in range(2)])
                assert told == [None] * 8
                assert not batch.lost

    asyncio.run(work())


def test_a_batch_that_several_finish(sqlite_url: str) -> None:
    """While its jobs are being finished, too."""
    with dibs.connect(sqlite_url) as client:
        queue = client.queue("q")
        for _ in range(20):
            queue.put_many(range(4))
            batch = queue.take(4)
            told = at_once([*(job.done for job in batch.won), batch.done, batch.done])
            assert told == [None] * 6
            assert not batch.left
            assert not batch.lost
        assert not queue.take()


def test_items_that_several_end(sqlite_url: str) -> None:
    """The end of their batch may come before the worker's: that one is told so."""
    with dibs.connect(sqlite_url) as client:
        for number in range(20):
            batch = client.claims("c").take([f"{number}/{part}" for part in range(4)])
            told = at_once([*(item.done for item in batch.items for _ in range(2)), batch.release, batch.release])
            assert all(answer is None or isinstance(answer, LeaseLost) for answer in told)
            assert not batch.lost
        assert not client.leases()


@pytest.mark.parametrize("what", ["lock", "multilock"])
def test_whoever_releases_what_is_being_released_waits_for_the_answer(sqlite_url: str, what: str) -> None:
    """Only then has the store confirmed it. (It was told to be so at once, while the release was on its way.)"""
    with dibs.connect(sqlite_url) as client, dibs.connect(sqlite_url) as other:
        lease = client.lock("a").acquire() if what == "lock" else client.multilock(["a", "b"]).acquire()
        assert lease is not None

        def release() -> bool:
            return lease.release() and other.holder("a") is None

        assert at_once([release] * SEVERAL) == [True] * SEVERAL
        assert release(), "and whoever does it once more later"


def test_a_release_that_the_store_has_not_heard_of_is_confirmed_to_nobody(sqlite_url: str) -> None:
    with dibs.connect(sqlite_url, request_timeout=0.2, patience=0.4) as client:
        lease = client.lock("a").acquire()
        assert lease is not None
        with kept_busy(sqlite_url):
            assert at_once([lease.release] * SEVERAL) == [False] * SEVERAL
        assert not lease.release()


def test_a_batch_of_which_it_is_unknown_whether_it_is_done_stays_so(sqlite_url: str) -> None:
    """Who says it a second time is not told that it is."""
    with dibs.connect(sqlite_url, request_timeout=0.2, patience=0.4, ttl=1.0) as client:
        queue = client.queue("q")
        queue.put("x")
        batch = queue.take()
        with kept_busy(sqlite_url), pytest.raises(StoreUnavailable):
            batch.done()
        with pytest.raises(StoreUnavailable):
            batch.done()


def test_a_release_that_is_awaited_twice(sqlite_url: str) -> None:
    """Once it has returned it does so again; while another task awaits it, that says so."""

    async def work() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            lease = await client.lock("a").acquire()
            assert lease is not None
            with kept_busy(sqlite_url):
                release = lease.release()

                async def wait() -> bool:
                    return await release

                first = asyncio.create_task(wait())
                with pytest.raises(RuntimeError, match="call the method again"):
                    await asyncio.create_task(wait())
            assert await first
            assert await release

    asyncio.run(work())


def test_a_client_that_several_close(sqlite_url: str) -> None:
    for _ in range(10):
        client = dibs.connect(sqlite_url)
        lease = client.lock("a").acquire()
        assert at_once([client.close] * SEVERAL) == [None] * SEVERAL
        assert lease is not None
        assert not lease.held
    with dibs.connect(sqlite_url) as client:
        assert not client.leases()


@pytest.mark.parametrize("second", ["done", "skip", "fail"])
@pytest.mark.parametrize("first", ["done", "skip", "fail"])
def test_an_item_ends_as_the_first_says(
    first: str, second: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes second in the same moment is told nothing, and changes nothing."""
    end = dibs.Item._end
    with dibs.connect(sqlite_url) as client:
        claims = client.claims("rows", max_tries=1)
        with claims.take([1]) as batch:
            (item,) = batch.items

            def late(*arguments: Any) -> None:
                monkeypatch.undo()
                assert at_once([getattr(item, first)]) == [None]
                end(*arguments)

            monkeypatch.setattr(dibs.Item, "_end", late)
            getattr(item, second)()
        assert (batch.failed, batch.left, batch.lost) == ([1] if first == "fail" else [], [], [])
        assert [dead.key for dead in claims.dead()] == (["1"] if first == "fail" else [])
        with claims.take([1]) as again:
            assert again.won == ([] if first == "fail" else [1])


@pytest.mark.parametrize("how", ["release", "done"])
def test_what_is_ended_once_more_after_ctrl_c_was_not_lost(
    how: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release that was interrupted is the one that is asked for again, and whatever it was told stands."""
    with dibs.connect(sqlite_url) as client:
        lease: Any = client.lock("red").acquire() if how == "release" else client.claims("rows").take([1]).items[0]
        nudge = Waiting.nudge

        def interrupted(*arguments: Any) -> None:
            monkeypatch.undo()
            nudge(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(Waiting, "nudge", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(lease, how)()
        assert getattr(lease, how)() is (True if how == "release" else None)
        if how == "done":
            run(lease._ends.settling())
            assert not lease._ends.lost


class _LetIn:
    """A mutex that lets another thread in between an error in it and the clean-up."""

    def __init__(self, mutex: Any, meanwhile: Callable[[], None]) -> None:
        self._mutex = mutex
        self._meanwhile = meanwhile

    def __enter__(self) -> None:
        self._mutex.__enter__()

    def __exit__(self, kind: Any, *exc: Any) -> None:
        self._mutex.__exit__(kind, *exc)
        if kind is KeyboardInterrupt:
            self._meanwhile()


@pytest.mark.parametrize("how", ["lease", "batch"])
def test_who_waits_for_a_release_that_ctrl_c_stopped_halfway_is_answered(
    how: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the interrupted thread's first try to queue it and its second."""
    with dibs.connect(sqlite_url) as client:
        if how == "lease":
            lease: Any = client.lock("red").acquire()
            wait: Any = lease.release
        else:
            batch = client.claims("rows").take([1])
            lease, wait = batch.items[0], batch.release
        keeper = lease._session.keeper
        told: list[object] = []
        another = threading.Thread(target=lambda: told.append(wait()), daemon=True)

        def meanwhile() -> None:
            another.start()
            eventually(lambda: lease._hold.ending.__dict__.get("_echoes"), "nobody waits for it")

        def interrupted(*arguments: Any) -> Any:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(keeper.renewer, "forget", interrupted)
        monkeypatch.setattr(keeper, "_mutex", _LetIn(keeper._mutex, meanwhile))
        with pytest.raises(KeyboardInterrupt):
            lease.release() if how == "lease" else lease.done()
        another.join(WAIT_S)
        assert told == [True if how == "lease" else None]
        assert client.leases() == []


def test_before_a_stopped_release_is_queued_it_is_confirmed_to_nobody(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one in the same gap cannot wait for what is not there yet, and does not say that it was answered."""
    with dibs.connect(sqlite_url) as client:
        lease: Any = client.lock("red").acquire()
        keeper, told = lease._session.keeper, list[bool]()

        def interrupted(*arguments: Any) -> Any:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(keeper, "_end", interrupted)
        monkeypatch.setattr(keeper, "_mutex", _LetIn(keeper._mutex, lambda: told.append(lease.release())))
        with pytest.raises(KeyboardInterrupt):
            lease.release()
        assert told == [False]
        assert lease.release()
        assert client.leases() == []


@pytest.mark.parametrize("through", ["term", "election"])
@pytest.mark.parametrize("where", ["check_offer", "offering"])
def test_who_is_interrupted_while_it_resigns_has_resigned(
    where: str, through: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the first step of it, and although the election, which others use, lives on."""

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with dibs.connect(sqlite_url) as client:
        election = client.election("shard-7", value="a")
        term = election.campaign()
        assert term is not None
        module = dibs.succession if through == "term" else dibs.campaign
        monkeypatch.setattr(module, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            (term if through == "term" else election).resign(to="b")
        assert not term.held
        assert election.leader() is None
