"""Ctrl-C at every point at which Python lets it in: a block that it ends holds nothing.

Since 3.11 Python looks for signals where a function begins and after a function written in C. A profiler is called at
the same points, so one that raises KeyboardInterrupt at the first, the second, … stands for a Ctrl-C that comes there.
(``tests.anywhere`` has those of 3.10, too, where what a function returns may be lost on the way to its caller.)
"""

from __future__ import annotations

import _thread
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from traceback import format_tb
from typing import TYPE_CHECKING, NoReturn, TypeVar

import pytest

import dibs
from dibs.clock import ExactMutex
from tests.command_line import until
from tests.waits import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

T = TypeVar("T")
HOME = str(Path(dibs.__file__).parent)


# Where a function begins Python 3.10 does not look, and what is raised there would pass by all of its handlers.
POINTS = ("call", "c_return") if sys.version_info >= (3, 11) else ("c_return",)


def _ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(HOME)


def _ends(frame: FrameType) -> bool:
    """Whether a block or lease is to end, and not a line of that has run: nothing can be done about a Ctrl-C there."""
    name = frame.f_code.co_name
    return name in ("__exit__", "given_back") or (name in ("release", "resign") and not _ours(frame.f_back))


def _goes_on(frame: FrameType) -> bool:
    """Whether a stream is closed or asked for the next: what comes then is raised in it, and not in front of it."""
    return frame.f_code.co_name == "_stream" and frame.f_lineno != frame.f_code.co_firstlineno


def _interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _end_task(_signum: int, _frame: FrameType | None) -> NoReturn:
    """What frameworks do with a task that takes too long: this is no KeyboardInterrupt, but an error like others."""
    raise TimeoutError


HANDLERS = {KeyboardInterrupt: _interrupt, TimeoutError: _end_task}


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of the program that is interrupted."""
    before = signal.signal(signal.SIGINT, _interrupt), signal.signal(signal.SIGALRM, _end_task)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGALRM, before[1])


def interrupted(act: Callable[[], object], at: int, raised: type[BaseException] = KeyboardInterrupt) -> str | None:
    """Do it with a signal at the point of this number, and say which that was; None when it was over before."""
    left = at

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event not in POINTS or not _ours(frame):
            return
        if frame.f_code.co_name == "<genexpr>" or (event == "call" and (_ends(frame) or _goes_on(frame))):
            return
        left -= 1
        if left < 0:
            sys.setprofile(None)
            HANDLERS[raised](0, frame)

    sys.setprofile(look)
    try:
        act()
    except raised as interrupt:
        return "".join(format_tb(interrupt.__traceback__))
    finally:
        sys.setprofile(None)
    return None


#: Objects that live on, as those of a module do: what one holds is not let go of with it.
KEPT: list[object] = []


def kept(made: T) -> T:
    KEPT.append(made)
    return made


def _lock(client: dibs.Client, name: str) -> None:
    with client.lock(name):
        pass


def _named(client: dibs.Client, name: str) -> None:
    lock = kept(client.lock(name))
    with lock as lease:
        lease.check()


def _reentrant(client: dibs.Client, name: str) -> None:
    lock = client.lock(name, reentrant=True)
    with lock, lock:
        pass


def _waited(client: dibs.Client, name: str) -> None:
    condition = threading.Condition(kept(client.lock(name, reentrant=True)))  # type: ignore[arg-type]
    with condition, condition:
        condition.wait(0)


def _released(client: dibs.Client, name: str) -> None:
    client.lock(name).acquire().release()  # type: ignore[union-attr]


def _released_by_the_lock(client: dibs.Client, name: str) -> None:
    lock = kept(client.lock(name))
    lock.acquire()
    lock.release()


def _released_twice(client: dibs.Client, name: str) -> None:
    lock = kept(client.lock(name, reentrant=True))
    lock.acquire()
    try:
        lock.acquire()
        lock.release()
    finally:
        lock.release()


def _some_released(client: dibs.Client, name: str) -> None:
    semaphore = kept(client.semaphore(name, 3))
    semaphore.acquire()
    semaphore.release()


def _all_released(client: dibs.Client, name: str) -> None:
    multilock = kept(client.multilock([name, f"{name}/2"]))
    multilock.acquire()
    multilock.release()


def _resigned(client: dibs.Client, name: str) -> None:
    election = kept(client.election(name))
    election.campaign()
    election.resign()


def _resigned_for_another(client: dibs.Client, name: str) -> None:
    election = kept(client.election(name, value="a"))
    election.campaign()
    election.resign(to="b", timeout=0)


def _decorated(client: dibs.Client, name: str) -> None:
    client.lock(name)(lambda: None)()


def _semaphore(client: dibs.Client, name: str) -> None:
    semaphore = client.semaphore(name, 2)
    with semaphore, semaphore:
        pass


def _writer(client: dibs.Client, name: str) -> None:
    with client.rwlock(name).write():
        pass


def _downgraded(client: dibs.Client, name: str) -> None:
    page = client.rwlock(name)
    with page.write():
        page.downgrade()


def _multilock(client: dibs.Client, name: str) -> None:
    with client.multilock([name, f"{name}/2"]):
        pass


def _led(client: dibs.Client, name: str) -> None:
    with client.election(name).lead():
        pass


def _once(client: dibs.Client, name: str) -> None:
    with client.once(name, "key", keep=60):
        pass


def _claimed(client: dibs.Client, name: str) -> None:
    with client.claims(name).take([1, 2, 3]) as batch:
        for item in batch:
            item.check()


def _ended_one_by_one(client: dibs.Client, name: str) -> None:
    with client.claims(name, max_tries=3).take([1, 2, 3]) as batch:
        done, failed, skipped = batch.items
        done.done()
        failed.fail("x")
        skipped.skip()


def _verified(client: dibs.Client, name: str) -> None:
    batch = client.claims(name).take([1, 2, 3], verify=lambda won: won[:1])
    batch.release()


def _streamed(client: dibs.Client, name: str) -> None:
    stream = client.claims(name, max_tries=3).stream(lambda: [1, 2, 3], n=2)
    try:
        for number, _ in enumerate(stream):
            if number == 2:  # in the second batch
                break
    finally:
        stream.close()


def _worked(client: dibs.Client, name: str) -> None:
    with _three_jobs(client, name).take(3) as batch:
        for job in batch:
            job.check()


def _three_jobs(client: dibs.Client, name: str) -> dibs.Queue:
    queue = client.queue(name)
    queue.put_many([1, 2, 3])
    return queue


def _all_worked(client: dibs.Client, name: str) -> None:
    with _three_jobs(client, name).take(3) as batch:
        batch.done()


def _worked_one_by_one(client: dibs.Client, name: str) -> None:
    with _three_jobs(client, name).take(3) as batch:
        done, failed, skipped = batch.won
        done.done()
        failed.fail("x")
        skipped.skip()


def _failed(client: dibs.Client, name: str) -> None:
    with suppress(ValueError), _three_jobs(client, name).take(3) as batch:
        for _ in batch:
            raise ValueError("x")


def _given_back(client: dibs.Client, name: str) -> None:
    batch = _three_jobs(client, name).take(3)
    try:
        batch.won[0].skip()
    finally:
        batch.release()


def _jobs_streamed(client: dibs.Client, name: str) -> None:
    stream = _three_jobs(client, name).stream(2)
    try:
        for number, _ in enumerate(stream):
            if number == 2:  # in the second batch
                break
    finally:
        stream.close()


def _run(client: dibs.Client, name: str) -> None:
    _three_jobs(client, name).run(lambda job: None, workers=1, idle=0)


def _told(client: dibs.Client, name: str) -> None:
    kept(client.election(name)).run(lambda term: None, lambda term: None)


def _put(client: dibs.Client, name: str) -> None:
    client.queue(name).put(1)


def _finished_by_id(client: dibs.Client, name: str) -> None:
    queue = _three_jobs(client, name)
    with queue.take(1) as batch:
        job = batch.won[0]
        queue.finish(job.id, job.fencing_token)


def _cancelled(client: dibs.Client, name: str) -> None:
    queue = client.queue(name)
    queue.cancel(queue.put(1))


def _broken(client: dibs.Client, name: str) -> None:
    with suppress(dibs.LeaseLost), client.lock(name) as lease:
        client.break_lease(name, fencing_token=lease.fencing_token, now=True)


def _extended(client: dibs.Client, name: str) -> None:
    with _three_jobs(client, name).take(1) as batch:
        batch.won[0].extend()


def _renewed(client: dibs.Client, name: str) -> None:
    with client.lock(name) as lease:
        lease.renew()


ACTS = (
    _lock,
    _named,
    _reentrant,
    _waited,
    _released,
    _released_by_the_lock,
    _released_twice,
    _some_released,
    _all_released,
    _resigned,
    _resigned_for_another,
    _decorated,
    _semaphore,
    _writer,
    _downgraded,
    _multilock,
    _led,
    _once,
    _claimed,
    _ended_one_by_one,
    _verified,
    _streamed,
    _worked,
    _all_worked,
    _worked_one_by_one,
    _failed,
    _given_back,
    _jobs_streamed,
    _run,
    _told,
    _put,
    _finished_by_id,
    _cancelled,
    _broken,
    _extended,
    _renewed,
)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("raised", HANDLERS)
def test_what_a_signal_ends_holds_nothing(raised: type[BaseException], act: Callable[[dibs.Client, str], None]) -> None:
    with dibs.connect("memory://") as client:
        act(client, "before")  # what is loaded once is loaded
        holdings, lane, at = client._desk.session().holdings, client._desk.session().lane, 0
        while (where := interrupted(partial(act, client, f"x{at}"), at, raised)) is not None:
            assert not holdings.held, where
            assert not holdings.owned, where
            # What was asked for is sent, or never will be: not hours later, along with what is asked for next.
            eventually(lambda: lane._server is None and all(ask.dropped for ask in lane.pending.asks), where, 5)
            client.ping()  # behind what asks for what a take was granted, which is then given back
            assert not client.queue(f"x{at}").jobs("claimed"), where
            at += 1
        assert at > 20  # it was interrupted at all
        # What was on its way gets there, long before the end of a ttl or an offer.
        until(lambda: not [record for record in client.leases() if "once" not in (record.info or {})], 3)
    KEPT.clear()


@pytest.mark.parametrize("url", ["memory://closing", "sqlite_url"])
def test_a_client_whose_end_was_stopped_can_be_closed(url: str, request: pytest.FixtureRequest) -> None:
    """Nobody hangs, nothing stays, and it takes no time-out."""
    url = url if url.startswith("memory:") else request.getfixturevalue(url)
    at, where = 0, "nowhere yet"
    with dibs.connect(url) as other, other.lock("taken"):
        while where:
            client = dibs.connect(url, request_timeout=60)
            assert kept(client.lock("x").acquire(timeout=0)) is not None
            session, told = client._desk.session(), []
            waiter = threading.Thread(target=lambda: told.append(_told_of_the_end(client)))  # noqa: B023 - it ends here
            waiter.start()
            eventually(lambda: session.waiting.seen("default:taken"))  # noqa: B023
            where = interrupted(client.close, at) or ""
            began = time.monotonic()
            client.close()
            waiter.join(5)
            assert told == ["this dibs client was closed while waiting"], where
            assert time.monotonic() - began < 30, where
            assert not [lease.name for lease in other.leases() if lease.name == "x"], where
            for part in (session.lane, session.waiting, session.renewer):
                eventually(lambda: part._bell is None, where, 5)  # noqa: B023
            assert session.lane._store is None, where
            at += 1
    assert at > 50
    KEPT.clear()


def _told_of_the_end(client: dibs.Client) -> str:
    try:
        return str(client.lock("taken").acquire())
    except dibs.StoreUnavailable as error:
        return str(error)


def test_a_loss_is_told_once() -> None:
    """Wherever a Ctrl-C meets whoever notices it."""
    with dibs.connect("memory://") as client:
        at = 0
        while True:
            calls: list[int] = []
            lease = client.lock(f"x{at}", on_lost=lambda calls=calls: calls.append(1)).acquire()  # type: ignore[misc]
            assert lease is not None
            keeper, hold = client._desk.session().keeper, lease._hold
            where = interrupted(lambda keeper=keeper, hold=hold: keeper.lose(hold, "it is"), at)  # type: ignore[misc]
            if lease.held:
                lease.release()
            else:
                until(lambda calls=calls: calls)  # type: ignore[misc]
                for thread in threading.enumerate():
                    if thread.name in ("dibs-lost", "dibs-on-lost"):
                        thread.join()
                assert calls == [1], where
            if where is None:
                break
            at += 1
    assert at > 5


# In a process of its own, whose main thread does nothing else. It says how often a mutex was left had, and of how many.
HAS_AND_LEAVES = """
import signal
from dibs.clock import ExactMutex, RealClock

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for mutex in RealClock.mutex(), ExactMutex():
    left = came = 0
    while came < 300:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            while True:
                with mutex:
                    pass
        except KeyboardInterrupt:
            came += 1
        if not mutex.acquire(False):
            left += 1
        mutex.release()
    print(left, came)
"""


def test_no_mutex_is_left_had() -> None:
    """Since 3.14 Python lets a Ctrl-C in between having a lock and entering its block: another kind of lock is used."""
    said = subprocess.run([sys.executable, "-c", HAS_AND_LEAVES], capture_output=True, text=True)
    assert said.stdout.split("\n")[:2] == ["0 300", "0 300"], said.stdout + said.stderr


def test_a_mutex_is_had_once() -> None:
    mutex = ExactMutex()
    with mutex:
        assert not mutex.acquire(False)
        assert not mutex.acquire(True, 60)
    assert mutex.acquire(True, 60)
    mutex.release()


DROPS_A_BELL = """
import os

from dibs.clock import RealBell

def are_open(fds):
    return [os.path.exists(f"/proc/self/fd/{fd}") for fd in fds]

bell = RealBell()
fds = bell._read_fd, bell._write_fd
child = os.fork()
if child:
    os.waitpid(child, 0)
del bell
print(are_open(fds), flush=True)
"""


def test_a_bell_that_nobody_sleeps_on_is_closed() -> None:
    """Its thread was never begun, as a Ctrl-C came first; but what a forked child has inherited is left alone there."""
    said = subprocess.run([sys.executable, "-c", DROPS_A_BELL], capture_output=True, text=True)
    assert said.stdout.splitlines() == ["[True, True]", "[False, False]"], said.stdout + said.stderr


def test_a_signal_that_no_system_call_has_noticed_ends_the_waiting() -> None:
    """It came after Python's last look and before the call (no call sees what ``interrupt_main`` asks for, either)."""
    with dibs.connect("memory://") as client, client.lock("x"):
        timer = threading.Timer(0.1, _thread.interrupt_main)  # once the main thread waits
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.lock("x").acquire(timeout=60)
        timer.join()
