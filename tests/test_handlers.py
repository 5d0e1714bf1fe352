"""Signal handlers, ``__del__`` and callbacks come anywhere, also in the midst of dibs's own work in their thread."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import dibs
from tests.between import Between
from tests.test_api import eventually, had


class Handler:
    """Handles SIGUSR1, which comes once, at the latest in the midst of this thread's next call to the store."""

    def __init__(self, handle: Callable[[], object]) -> None:
        self._handle = handle
        self.came = False
        self.answer: object = None

    def __call__(self, requests: Sequence[Any]) -> None:
        if not self.came:
            signal.raise_signal(signal.SIGUSR1)

    def handle(self, *of_signal: object) -> None:
        self.came = True
        try:
            self.answer = self._handle()
        except dibs.DibsError as error:
            self.answer = error


@pytest.fixture
def on_signal(between: Between) -> Iterator[Callable[..., Handler]]:
    before = signal.getsignal(signal.SIGUSR1)

    def make(handle: Callable[[], object]) -> Handler:
        handler = Handler(handle)
        between.before = handler
        signal.signal(signal.SIGUSR1, handler.handle)
        return handler

    yield make
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def between() -> Between:
    between = Between(f"memory://{uuid.uuid4().hex}")
    between.interrupts = True
    return between


@pytest.fixture
def other(between: Between) -> Iterator[dibs.Client]:
    """Another client of the same store, which no signal interrupts."""
    with dibs.connect(between.address.shown) as client:
        yield client


def is_free(client: dibs.Client, name: str) -> bool:
    return client.holder(name) is None


def test_a_lease_is_released_while_its_thread_serves_the_lane(
    between: Between, on_signal: Callable[..., Handler], other: dibs.Client
) -> None:
    """The handler does not wait for what it has interrupted: the lease is over at once, and the store hears of it."""
    with between.client() as client:
        lease = had(client.lock("a"))
        handler = on_signal(lease.release)
        with client.lock("b"):
            assert (handler.came, handler.answer, lease.held) == (True, False, False)
            eventually(lambda: is_free(other, "a"), "it is held still")
        assert lease.release()  # again does nothing


def test_several_leases_are_released_in_a_handler(
    between: Between, on_signal: Callable[..., Handler], other: dibs.Client
) -> None:
    """So is a multilease."""
    with between.client() as client:
        several = client.multilock(["a", "b"]).acquire()
        assert several is not None
        handler = on_signal(several.release)
        with client.lock("c"):
            assert (handler.came, several.held) == (True, False)
            eventually(lambda: is_free(other, "a") and is_free(other, "b"), "they are held still")


def test_a_lease_of_another_client_is_released_in_a_handler(
    between: Between, on_signal: Callable[..., Handler], other: dibs.Client
) -> None:
    """Clients of one process may share a file, or a mutex of the store's: that is not waited for either."""
    with between.client() as client:
        lease = had(other.lock("a"))
        handler = on_signal(lease.release)
        with client.lock("b"):
            assert (handler.came, handler.answer, lease.held) == (True, False, False)
            eventually(lambda: is_free(client, "a"), "it is held still")


def test_a_client_is_closed_in_a_handler(
    between: Between, on_signal: Callable[..., Handler], other: dibs.Client
) -> None:
    """What it holds is given back when the interrupted call is over, and whoever asks for more is refused."""
    client = between.client()
    lease = had(client.lock("a"))
    handler = on_signal(client.close)
    client.ping()
    assert (handler.came, handler.answer) == (True, None)
    eventually(lambda: not lease.held, "it is held still")
    eventually(lambda: is_free(other, "a"), "it is held still")
    with pytest.raises(dibs.StoreUnavailable, match="closed"):
        client.lock("a").acquire()


def test_a_job_is_done_in_a_handler(between: Between, on_signal: Callable[..., Handler], other: dibs.Client) -> None:
    """It is done, but the handler does not hear of it: unknown is an answer."""
    with between.client() as client:
        queue = client.queue("q")
        queue.put("payload")
        with queue.take() as batch:
            job = next(batch)
            handler = on_signal(job.done)
            client.ping()
            assert handler.came
            assert isinstance(handler.answer, dibs.StoreUnavailable)
            eventually(lambda: other.queue("q").job(job.id) is None, "it is not done")
            job.done()  # again does nothing


ASKS: list[Callable[[dibs.Client], object]] = [
    lambda client: client.lock("x").acquire(),
    lambda client: client.lock("x").acquire(timeout=0),
    lambda client: client.lock("x").acquire(timeout=10),
    lambda client: client.semaphore("x", 2).acquire(),
    lambda client: client.multilock(["x", "y"]).acquire(),
    lambda client: client.election("x").campaign(),
    lambda client: client.once("x", keep=10).begin(),
    lambda client: client.queue("x").take(timeout=None),
    lambda client: client.holder("x"),
    lambda client: client.ping(),
]


@pytest.mark.parametrize("ask", ASKS)
def test_who_asks_in_a_handler_is_refused(
    ask: Callable[[dibs.Client], object], between: Between, on_signal: Callable[..., Handler], other: dibs.Client
) -> None:
    """It would wait for the thread that it has interrupted, so it gets WouldDeadlock, and nothing is left of it."""
    with between.client() as client:
        client.ping()
        handler = on_signal(lambda: ask(client))
        with client.lock("b"):
            assert handler.came
            assert isinstance(handler.answer, dibs.WouldDeadlock)
            assert "flag" in str(handler.answer)
        eventually(lambda: is_free(other, "x") and is_free(other, "y"), "it was granted to nobody")


def test_the_threads_of_dibs_do_not_wait_for_themselves(between: Between, other: dibs.Client) -> None:
    """What a ``__del__`` releases that the garbage collector calls in a thread of dibs's is not waited for there."""
    lease = had(other.lock("a"))
    answers: list[object] = []

    def collect(requests: object) -> None:
        if not answers:
            answers.append(lease.release())

    async def main() -> None:
        async with between.async_client() as client:  # for whose tasks the lane's own thread calls the store
            between.before = collect
            async with client.lock("b"):
                assert answers == [False]

    asyncio.run(main())
    eventually(lambda: is_free(other, "a"), "it is held still")


def signal_under_the_mutex(client: dibs.Client) -> None:
    """A signal comes when the next release is queued: by a thread that has the mutex then."""
    session = client._desk.session()
    put = session.lane.put

    def put_late(ask: Any) -> None:
        assert session.mutex.locked()
        session.lane.put = put  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGUSR1)
        put(ask)

    session.lane.put = put_late  # type: ignore[method-assign]


@pytest.mark.parametrize("take", ["a lock", "a multilock", "a job"])
def test_who_has_the_mutex_does_not_wait_for_it(
    take: str, between: Between, on_signal: Callable[..., Handler], other: dibs.Client
) -> None:
    """In the few moments in which its thread has the session's mutex, another one does what the handler asks for."""
    with between.client() as client, client.lock("c") as third:
        queue = client.queue("q")
        queue.put("payload")
        leases = client.multilock(["a", "b"]).acquire() if take == "a multilock" else had(client.lock("a"))
        assert leases is not None
        with queue.take() as batch:
            job = next(batch)
            handler = on_signal(job.done if take == "a job" else leases.release)
            signal_under_the_mutex(client)
            third.release()
            assert handler.came
            assert isinstance(handler.answer, dibs.StoreUnavailable) if take == "a job" else handler.answer is False
            if take == "a job":
                eventually(lambda: other.queue("q").job(job.id) is None, "it is not done")
            else:
                eventually(lambda: not leases.held and is_free(other, "a") and is_free(other, "b"), "it is held still")


def test_a_client_is_closed_by_who_has_its_mutex(
    between: Between, on_signal: Callable[..., Handler], other: dibs.Client
) -> None:
    """Another thread closes it."""
    client = between.client()
    lease, third = had(client.lock("a")), had(client.lock("c"))
    handler = on_signal(client.close)
    signal_under_the_mutex(client)
    third.release()
    assert handler.came
    eventually(lambda: not lease.held and is_free(other, "a"), "it is held still")


CLOSE_AND_EXIT = """
import signal, sys
import dibs
from tests.between import Between

between = Between(sys.argv[1])
between.interrupts = True
client = between.client(ttl=60)
lease = client.lock("a").acquire()

def stop(*of_signal):
    between.before = lambda requests: None
    {handle}
    sys.exit(3)

signal.signal(signal.SIGTERM, stop)
between.before = lambda requests: signal.raise_signal(signal.SIGTERM)
client.lock("b").acquire()
"""


@pytest.mark.parametrize("handle", ["lease.release()", "pass"])
def test_a_handler_may_give_back_and_exit(handle: str, sqlite_url: str) -> None:
    """A program that SIGTERM ends in the midst of a call ends at once, and leaves nothing behind."""
    program = CLOSE_AND_EXIT.format(handle=handle)
    done = subprocess.run([sys.executable, "-c", program, sqlite_url], timeout=60)
    assert done.returncode == 3
    with dibs.connect(sqlite_url) as client:
        assert client.leases() == []
