"""A thread that is interrupted again and again disturbs none of the others, on any store.

Whoever calls dibs serves what others ask at the same moment, too. So a Ctrl-C can come in the middle of a conversation
with the store that is about others' leases as well: nothing of it may be lost, done twice, or taken for another answer.
The same holds for an error that a signal handler raises, though drivers and stores raise the like.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import NoReturn

import pytest

import dibs
from tests.servers.memcached import MemcachedServer

PROGRAM = """
import json, random, signal, sys, threading, time, dibs
from dibs import LockTimeout

SECONDS, POINTS_MIN = 2.0, 100
client = dibs.connect(sys.argv[1], ttl=60)
queues = sys.argv[2] == "queues"
Raised = {"ctrl-c": KeyboardInterrupt, "alarm": TimeoutError}[sys.argv[3]]
errors, over = [], threading.Event()
turns = interrupted = 0

def take_turns(number):
    global turns
    queue = client.queue(f"own {number}") if queues else None
    while not over.is_set():
        try:
            lease = client.lock(f"own {number}").acquire(timeout=60)
            assert lease is not None, "it is held by somebody else"
            lease.release()  # True, or False where it was repeated and it is not known which attempt ended it
            if queue is not None:
                queue.put(number)
                with queue.take(1, timeout=60) as batch:
                    assert batch.won, "what was put is not there"
                    for job in batch:
                        job.done()
            turns += 1
        except Exception as error:
            errors.append(f"{number}: {error!r}")

def interrupt(*_):
    if armed:
        raise Raised

def be_interrupted():
    global armed, interrupted
    armed = True
    try:
        # Again and again: what is raised while Python collects garbage reaches nobody.
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.006 * random.random() ** 2, 0.01)
        while True:
            try:
                with client.lock("main", timeout=0.5):
                    pass
            except LockTimeout:  # it was left to its ttl, by a Ctrl-C in front of the first line of the block's end
                pass
            if queues:
                client.queue("main").put(1)
    except Raised:
        armed = False
        interrupted += 1

armed = False
signal.signal(signal.SIGALRM, interrupt)
with client.lock("main"):  # what is needed is imported before: a Ctrl-C in there may leave Python's own locks taken
    client.queue("main").put(0) if queues else None
threads = [threading.Thread(target=take_turns, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
end = time.monotonic() + SECONDS
while time.monotonic() < end or interrupted < POINTS_MIN:
    try:
        be_interrupted()
    except Raised:  # just as it was told of that
        pass
    armed = False
signal.setitimer(signal.ITIMER_REAL, 0)
over.set()
for thread in threads:
    thread.join()
client.close()
print(json.dumps([errors, turns, interrupted]))
"""


@pytest.mark.parametrize(
    "url, also",
    [
        ("sqlite_url", "queues"),
        ("postgres_url", "queues"),
        ("mysql_url", "queues"),
        ("mysqlclient_url", "queues"),
        ("redis_url", "queues"),
        ("memcached_url", ""),
        ("etcd_url", ""),
        ("zookeeper_url", ""),
    ],
)
@pytest.mark.parametrize("raised", ["ctrl-c", "alarm"])
def test_an_interrupted_thread_disturbs_nobody(
    url: str, also: str, raised: str, request: pytest.FixtureRequest
) -> None:
    """Each other thread has its own lock whenever it wants it, hears of no loss, and has its own jobs done."""
    command = [sys.executable, "-c", PROGRAM, request.getfixturevalue(url), also, raised]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    errors, turns, interrupted = json.loads(ran.stdout.splitlines()[-1])
    assert errors == []
    assert turns
    assert interrupted


@pytest.mark.parametrize(
    "server", ["own_postgres", "own_mysql", "own_redis", "own_memcached", "own_etcd", "own_zookeeper"]
)
def test_an_alarm_is_not_taken_for_the_stores(server: str, request: pytest.FixtureRequest) -> None:
    """What it raises while the store stands still reaches the caller, at once, whatever he asks for."""
    own = request.getfixturevalue(server)

    def too_late(_signum: int, _frame: object) -> NoReturn:
        raise TimeoutError("the program's own")

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with dibs.connect(own.url(), request_timeout=30, patience=60) as client:
            lease = client.lock("held", ttl=60).acquire()
            assert lease is not None
            for ask in (client.lock("other").acquire, client.ping, lease.renew, lease.release):
                with own.paused():
                    signal.setitimer(signal.ITIMER_REAL, 0.3)
                    with pytest.raises(TimeoutError, match="the program's own"):
                        ask()
                client.ping()
            assert client.leases() == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "server", ["own_postgres", "own_mysql", "own_redis", "own_memcached", "own_etcd", "own_zookeeper"]
)
def test_a_timer_makes_no_wait_longer(server: str, request: pytest.FixtureRequest) -> None:
    """A program with a timer is told as soon as others that the store stands still, however often it ticks."""
    own = request.getfixturevalue(server)
    ticks = 0

    def tick(_signum: int, _frame: object) -> None:
        nonlocal ticks
        ticks += 1
        assert ticks < 100, "it is waited for as long as the timer ticks"

    before = signal.signal(signal.SIGALRM, tick)
    try:
        with dibs.connect(own.url(), request_timeout=1, patience=1) as client:
            client.ping()
            with own.paused():
                signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
                with pytest.raises(dibs.StoreUnavailable):
                    client.lock("other").acquire(timeout=0)
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert ticks
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_alarm_that_was_heard_is_over(own_memcached: MemcachedServer) -> None:
    """What fails while it is handled has failed by itself."""

    def too_late(_signum: int, _frame: object) -> NoReturn:
        raise TimeoutError("the program's own")

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with dibs.connect(own_memcached.url(), request_timeout=0.3, patience=0.3) as client:
            client.ping()
            try:
                signal.raise_signal(signal.SIGALRM)
            except TimeoutError:
                with own_memcached.paused(), pytest.raises(dibs.StoreUnavailable):
                    client.ping()
    finally:
        signal.signal(signal.SIGALRM, before)
