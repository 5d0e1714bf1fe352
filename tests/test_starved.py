"""A process that for a while has no file descriptor, or no thread, left: it is told so, and goes on afterwards.

Every way through it at once is the simulation's to look for (``tests/simulation``, where every eighth world has such
processes); here it happens to a real one.
"""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import dibs

# What a program does that uses up its descriptors, in front of each of the scripts below.
STARVING = """
import asyncio, os, resource, sys
import dibs

url = sys.argv[1]
holder = dibs.connect(url)
held = holder.lock("held").acquire()

def starve():
    # Loaded before: what Python itself cannot open then is no business of dibs.
    import copy, datetime, encodings.idna, json, traceback
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        return taken

def feed(taken):
    for fd in taken:
        os.close(fd)
"""
THREADS = """
client = dibs.connect(url, patience=1)
with client.lock("free"):
    pass
taken = starve()
with client.lock("free") as lease:  # needs nothing new
    assert lease.held
try:
    client.lock("held", timeout=1).acquire()
except dibs.StoreUnavailable as error:
    assert "Too many open files" in str(error), error
else:
    raise AssertionError("a wait without anybody to look after it")
other = dibs.connect(url, patience=1)
try:
    other.lock("free").acquire()
except dibs.StoreUnavailable as error:
    assert "too many open files" in str(error), error
else:
    raise AssertionError("a connection without a descriptor")
feed(taken)
for each in (client, other):
    with each.lock("free", timeout=5):
        pass
    assert each.lock("held", timeout=0.3).acquire() is None
assert held.held and held.release()
with client.lock("held", timeout=5):
    pass
for each in (client, other, holder):
    each.close()
print("well")
"""
TASKS = """
async def main():
    client = dibs.connect_async(url, patience=1)
    async with client.lock("free"):
        pass
    taken = starve()
    async with client.lock("free"):
        pass
    waits = [asyncio.ensure_future(client.lock("held", timeout=5).acquire()) for _ in range(3)]
    for answer in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(answer, dibs.StoreUnavailable), answer
    async with client.lock("free"):  # the lane's thread is still there
        pass
    feed(taken)
    waits = [asyncio.ensure_future(client.lock("held", timeout=5).acquire()) for _ in range(3)]
    held.release()
    lease = await asyncio.wait_for(waits[0], 5)
    await lease.release()
    for wait in waits[1:]:
        await (await wait).release()
    await client.close()
    holder.close()
    print("well")

asyncio.run(main())
"""
FIRST_USE = """
other = dibs.connect(url.replace("dibs.db", "new.db"), patience=1)
taken = starve()
for attempt in range(2):
    try:
        other.lock("free").acquire()
    except dibs.StoreUnavailable as error:
        assert "oo many open files" in str(error) and not error.maybe_applied, error
    else:
        raise AssertionError("a connection without a descriptor")
feed(taken)
with other.lock("free", timeout=5):
    pass
for each in (other, holder):
    each.close()
print("well")
"""


@pytest.mark.parametrize("script", [THREADS, TASKS, FIRST_USE], ids=["threads", "tasks", "first use of a file"])
def test_without_file_descriptors(tmp_path: Path, script: str) -> None:
    """Who needs a thread or a connection is told; everybody else goes on, and all of them do afterwards."""
    program = textwrap.dedent(STARVING + script)
    arguments = [sys.executable, "-c", program, f"sqlite:///{tmp_path}/dibs.db"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")


class NoThreads:
    """From when it is entered until it is left, no thread can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def __enter__(self) -> None:
        def start(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        self._patch.setattr(threading.Thread, "start", start)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def test_without_threads_nothing_is_held_that_nobody_would_renew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lease of a process needs a thread: without one, the acquire says so and gives the grant back."""
    url = f"sqlite:///{tmp_path}/dibs.db"
    with dibs.connect(url) as client, dibs.connect(url) as other:
        with NoThreads(monkeypatch), pytest.raises(dibs.StoreUnavailable, match="can't start new thread"):
            client.lock("job").acquire()
        assert other.holder("job") is None
        with other.lock("job", timeout=0), client.lock("another"):
            pass


def test_without_threads_a_loss_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """``on_lost`` is called by the thread that noticed, when it cannot have one of its own."""
    told = threading.Event()
    with dibs.connect("memory://") as client:
        lease = client.lock("job", ttl=0.3, on_lost=told.set).acquire()
        assert lease is not None
        with NoThreads(monkeypatch):
            assert client.break_lease("job", fencing_token=lease.fencing_token, now=True)
            assert told.wait(5)
        assert not lease.held
        with client.lock("job", timeout=5) as lease:  # the thread that told it lives on
            assert lease.held


def test_a_worker_without_threads_says_so_and_ends_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` raises what Python says, and the threads that it could start do not stay."""
    started = threading.Thread.start
    with dibs.connect("memory://") as client:
        queue = client.queue("jobs")
        queue.put(1)
        before = set(threading.enumerate())

        def start(thread: threading.Thread) -> None:
            if thread.name == "dibs-worker-2":
                raise RuntimeError("can't start new thread")
            started(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            queue.run(print, workers=2)
        monkeypatch.undo()
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("dibs-worker"):
                thread.join(5)
                assert not thread.is_alive()
