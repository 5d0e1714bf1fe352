"""Work that is done once: crashes, reboots, lost answers, signals, cancellation, forks, keys, and the command line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest

import dibs
import dibs.once
from dibs.client import Client
from dibs.clock import boot_now, wall_now
from dibs.connecting import locate
from dibs.desk import DEFAULTS, Desk
from dibs.errors import StoreUnavailable
from dibs.once import OnceCore
from dibs.once_record import record_of
from dibs.store import Acquire, Release
from dibs.stores import (
    sqlite,
    sqlite_boots,
    sqlite_columns,
    sqlite_file,
    sqlite_history,
    sqlite_sql,
    sqlite_watch,
)
from dibs.stores.sqlite_sql import WALL_NOW
from dibs.testing.case import within
from tests.between import Between
from tests.servers.postgres import PostgresServer
from tests.test_api import ended, in_a_fork, in_a_thread
from tests.waits import eventually

KEEP_S = 300


@pytest.fixture
def client(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


@pytest.fixture
def other(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


def fails() -> None:
    raise AssertionError("it was run again")


# -- crashes ----------------------------------------------------------------------------------------------------------

# (It rests in short sleeps: one long one would outlast a signal that came just before it began.)
RUNNER = """
import sys, time, dibs
def rest():
    for _ in range(600):
        time.sleep(0.1)
url, what = sys.argv[1:]
client = dibs.connect(url, ttl=1)
once = client.once("job", keep=300)
if what == "holding":
    with once as run:
        assert run
        print("ready", flush=True)
        rest()
elif what == "done":
    once.run(lambda: "by a process that is gone")
    print("ready", flush=True)
    rest()
elif what == "busy":
    print("ready", flush=True)
    while True:
        with once as run:
            pass
        once.forget()
"""


def start(url: str, what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, url, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_crashed_run_is_run_again(url: str) -> None:
    """A process killed with -9 inside the block marks nothing: a waiter runs it when the ttl is over."""
    process = start(url, "holding")
    process.kill()
    ended(process)
    with dibs.connect(url) as client:
        began = time.monotonic()
        assert client.once("job", keep=KEEP_S, timeout=10).run(lambda: "second") == "second"
        assert time.monotonic() - began < 5
        assert client.once("job", keep=KEEP_S).run(fails) == "second"


def test_a_success_outlives_its_process(url: str) -> None:
    """What was done by a process that was killed right afterwards is done."""
    process = start(url, "done")
    process.kill()
    ended(process)
    with dibs.connect(url) as client:
        assert client.once("job", keep=KEEP_S).run(fails) == "by a process that is gone"


def test_a_success_outlives_a_crash_of_postgresql(own_postgres: PostgresServer) -> None:
    """The server killed with -9 the moment after a success: nobody runs it again, as the mark was written to disk."""
    with dibs.connect(own_postgres.url(), ttl=20, patience=30) as client:
        for number in range(3):
            client.once("job", number, keep=KEEP_S).run(lambda: "done")
            own_postgres.kill()
            own_postgres.start()
            assert client.once("job", number, keep=KEEP_S).run(fails) == "done"


class Machine:
    """What the SQLite store takes for the machine's clocks and boot id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.boot = "first boot"
        self.boot_offset = self.wall_offset = 0.0
        for module in (sqlite_file, sqlite_columns):
            monkeypatch.setattr(module, "boot_id", lambda: self.boot)
        for module in (sqlite, sqlite_boots, sqlite_columns, sqlite_file, sqlite_history, sqlite_watch):
            monkeypatch.setattr(module, "boot_now", lambda: boot_now() + self.boot_offset)
        for module in (sqlite, sqlite_boots, sqlite_columns):
            monkeypatch.setattr(module, "wall_now", lambda: wall_now() + self.wall_offset)

    def reboot(self, off_s: float) -> None:
        """Off for so many seconds, as its wall clock has it, and on again."""
        self.boot = f"after {self.boot}"
        self.boot_offset = 7.0 - boot_now()
        self.wall_offset += off_s
        # Grants and the history ask SQLite itself: clients made from now on.
        self.monkeypatch.setattr(sqlite_sql, "WALL_NOW", f"({WALL_NOW} + {self.wall_offset})")


def test_a_success_outlives_reboots_on_sqlite(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot leases are over, but what is done stays done for the rest of its time, by the wall clock."""
    machine = Machine(monkeypatch)

    def client() -> dibs.Client:
        return dibs.connect(sqlite_url, ttl=20)

    with client() as before:
        before.once("job", keep=3600).run(lambda: "done")
        lost = before.once("crashed", keep=3600).begin()
        machine.reboot(600)
        with client() as after:
            done = after.once("job", keep=3600).done()
            assert done is not None
            assert done.result == "done"
            assert done.expires_in == pytest.approx(3000, abs=30)
            assert (done.done_at - done.began_at).total_seconds() < 30
            assert after.once("job", keep=3600).run(fails) == "done"
            assert after.once("crashed", keep=3600, timeout=0).run(lambda: "again") == "again"
            first = after.once("job", keep=1).done()
        machine.reboot(-86400)  # the clock was set back: rather too long than too short
        with client() as after:
            done = after.once("job", keep=3600).done()
            assert done is not None
            assert done.expires_in == pytest.approx(3000, abs=700)
        machine.reboot(86400 + 3100)
        with client() as after:
            assert after.once("job", keep=3600).done() is None
            assert after.once("job", keep=3600).run(lambda: "next") == "next"
            again = after.once("job", keep=3600).done()
            assert again is not None
            assert first is not None
            assert again.fencing_token > first.fencing_token
        with pytest.raises(dibs.LeaseLost), lost:
            pass


def test_only_what_is_kept_waits_for_the_disk_on_sqlite(sqlite_url: str) -> None:
    """A commit that keeps a name is synchronous, and no other: each would cost a lock milliseconds."""
    opened: list[Any] = []
    levels: list[tuple[bool, int]] = []
    address = locate(sqlite_url)[0]

    def open_store() -> Any:
        store: Any = address.open()
        act = store.act

        def noting(requests: Any, deadline: Any) -> Any:
            outcomes = act(requests, deadline)
            kept = any(isinstance(request, Release) and request.keep > 0 for request in requests)
            levels.append((kept, store._file._db.execute("PRAGMA synchronous").fetchone()[0]))
            return outcomes

        store.act = noting
        opened.append(store)
        return store

    with client_of(address._replace(open=open_store)) as client:
        for _ in range(3):
            with client.lock("plain"):
                pass
            with client.once("job", keep=KEEP_S) as run:
                assert run
            client.once("job", keep=KEEP_S).forget()
    assert {kept for kept, _ in levels} == {False, True}
    assert all(level == (2 if kept else 1) for kept, level in levels), levels


# -- answers that do not come -----------------------------------------------------------------------------------------


def client_of(address: Any, **options: Any) -> Client:
    return Client(Desk(address, **{"info": None, **DEFAULTS, "ttl": 20, "patience": 1.0, **options}))


def disturbed(sqlite_url: str, disturb: Callable[[Any, Any, Any], Any]) -> Any:
    """The store, whose releases with ``keep`` go through ``disturb(act, requests, deadline)``."""
    address = locate(sqlite_url)[0]

    def open_store() -> Any:
        store: Any = address.open()
        act = store.act

        def acting(requests: Any, deadline: Any) -> Any:
            if any(isinstance(request, Release) and request.keep > 0 for request in requests):
                return disturb(act, requests, deadline)
            return act(requests, deadline)

        store.act = acting
        return store

    return address._replace(open=open_store)


def test_a_lost_answer_to_the_mark_is_looked_up(sqlite_url: str) -> None:
    """The mark was written and the answer lost: the repetition finds it gone, a look finds it there, and it is done."""
    calls: list[int] = []

    def lose(act: Any, requests: Any, deadline: Any) -> Any:
        calls.append(1)
        outcomes = act(requests, deadline)
        if len(calls) == 1:
            raise StoreUnavailable("the answer was lost")
        return outcomes

    with client_of(disturbed(sqlite_url, lose)) as client:
        assert client.once("job", keep=KEEP_S).run(lambda: "done") == "done"
        assert len(calls) == 2
        assert client.once("job", keep=KEEP_S).run(fails) == "done"


def test_a_mark_that_was_never_written_is_told(sqlite_url: str) -> None:
    """When the store does not confirm the mark, the run ends with StoreUnavailable, which says what that means."""

    def refuse(act: Any, requests: Any, deadline: Any) -> Any:
        raise StoreUnavailable("the store is away")

    with client_of(disturbed(sqlite_url, refuse), ttl=3) as client:
        once = client.once("job", keep=KEEP_S)
        runs: list[int] = []
        with pytest.raises(dibs.StoreUnavailable, match=r"'job' was run \(token 1\).*may be run again") as caught:
            once.run(runs.append, 1)
        assert caught.value.maybe_applied
        assert once.done() is None
        with dibs.connect(sqlite_url) as other:
            assert other.once("job", keep=KEEP_S, timeout=10).run(lambda: "again") == "again"
        assert runs == [1]


def test_a_client_closed_inside_the_block_marks_nothing(sqlite_url: str, other: dibs.Client) -> None:
    """A run whose client was closed meanwhile is told so at its end, and may be run again."""
    client = dibs.connect(sqlite_url)
    with pytest.raises(dibs.StoreUnavailable, match="closed inside the block"), client.once("job", keep=KEEP_S):
        client.close()
    assert other.once("job", keep=KEEP_S, timeout=0).run(lambda: 2) == 2


def test_a_client_closed_just_as_a_run_ends_marks_nothing(
    sqlite_url: str, other: dibs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another thread gives the lease back between the last look at it and the mark, the run is told that, too."""
    client = dibs.connect(sqlite_url)
    mark = OnceCore._mark

    def marked(core: Any, begun: Any) -> Any:
        in_a_thread(client.close)
        return mark(core, begun)

    monkeypatch.setattr(OnceCore, "_mark", marked)
    with pytest.raises(dibs.StoreUnavailable, match="may be run again"), client.once("job", keep=KEEP_S):
        pass
    monkeypatch.undo()
    assert other.once("job", keep=KEEP_S, timeout=0).run(lambda: 2) == 2


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_whoever_waits_asks_no_more_than_for_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again and again, and lines up once: who left the line at each look would go on passing its place on."""
    looks: list[object] = []

    def looked(*shown: Any) -> Any:
        looks.append(shown)
        return record_of(*shown)

    monkeypatch.setattr(dibs.once, "record_of", looked)
    between = Between("memory://once-line")
    with between.client() as holder, between.client() as waiter:
        with contextlib.suppress(KeyError), holder.once("job", keep=KEEP_S):
            looking = ThreadPoolExecutor(1)
            told = looking.submit(waiter.once("job", keep=KEEP_S).run, lambda: "mine")
            eventually(lambda: len(looks) > 5, "nobody looks")
            raise KeyError
        assert told.result(10) == "mine"
        looking.shutdown()
    asked = {request.claim_id for call in between.calls for request in call if isinstance(request, Acquire)}
    assert len(asked) == 3  # the holder's; and the waiter's first, which was told at once, and the one that waited


def test_waiters_of_one_process_all_hear_of_it(client: dibs.Client, other: dibs.Client) -> None:
    """Many threads of one client that wait for a run elsewhere come back with its result soon after its end."""
    results: list[Any] = []
    with other.once("job", keep=KEEP_S) as run:
        assert run
        threads = [
            threading.Thread(target=lambda: results.append(client.once("job", keep=KEEP_S).run(fails)))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        assert results == []
        run.result = "done"
    ended_at = time.monotonic()
    for thread in threads:
        thread.join(10)
    assert results == ["done"] * 5
    assert time.monotonic() - ended_at < 3
    record = client.holder("job")
    assert record is not None
    eventually(lambda: client.holder("job").waiting == 0, "somebody still stands in line")  # type: ignore[union-attr]


def test_a_short_wait_behind_a_long_one_ends_in_time(client: dibs.Client, other: dibs.Client) -> None:
    """A caller whose patience ends behind another caller of its process is told Held, and not that nobody answered."""
    lease = other.lock("busy").acquire()
    assert lease is not None
    had: list[Any] = []
    patient = threading.Thread(target=lambda: had.append(client.lock("busy").acquire(timeout=10)))
    patient.start()
    eventually(lambda: other.holder("busy").waiting == 1, "nobody waits")  # type: ignore[union-attr]
    lock = client.lock("busy", timeout=0.4)
    with within(2, "two waits of 0.4 s"):
        assert lock.acquire() is None
        with pytest.raises(dibs.LockTimeout) as caught, lock:
            pass
    assert caught.value.holder == lease.holder
    lease.release()
    patient.join(10)
    had[0].release()


# -- signals, forks, cancellation -------------------------------------------------------------------------------------


def test_ctrl_c_in_the_block_marks_nothing(url: str) -> None:
    """A run interrupted by Ctrl-C gives the name up at once, unmarked."""
    process = start(url, "holding")
    process.send_signal(signal.SIGINT)
    ended(process)
    with dibs.connect(url) as client:
        assert client.once("job", keep=KEEP_S, timeout=0).run(lambda: 1) == 1


def test_ctrl_c_anywhere_leaves_it_done_or_free(url: str) -> None:
    """Interrupted at any point of beginning, marking and forgetting, a process leaves it marked or free."""
    with dibs.connect(url, ttl=20) as client:
        once = client.once("job", keep=KEEP_S, timeout=0)
        for number in range(8):
            process = start(url, "busy")
            time.sleep(0.003 * number)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:  # Python swallows a Ctrl-C where it collects garbage
                process.send_signal(signal.SIGINT)
            code, _, err = ended(process)
            assert code in (-signal.SIGINT, 130), (code, err)
            if once.done() is None:
                assert client.holder("job") is None, err
            once.run(lambda: None)
            assert once.forget()


def test_a_forked_child_marks_nothing(client: dibs.Client) -> None:
    """A child forked inside the block that comes to its end hears that it does not hold the run; its parent does."""
    with client.once("job", keep=KEEP_S) as run:
        assert run

        def child() -> None:
            assert not run.lease.held
            with pytest.raises(dibs.LeaseLost, match="fork"):
                run.__exit__(None, None, None)
            assert client.once("job", keep=KEEP_S, timeout=0, on_busy="skip").run(fails) is None

        in_a_fork(child)
        assert client.once("job", keep=KEEP_S).done() is None
    assert client.once("job", keep=KEEP_S).done()


def test_a_block_that_is_entered_after_its_loss_is_over_and_forgotten(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop was held up just then: the block is cancelled and ends with LeaseLost, and then nobody is in it."""
    enter = OnceCore.enter

    def late(core: OnceCore[Any, Any], owner: object) -> Any:
        begun = yield from enter(core, owner)
        core._desk.session().keeper.lose(begun.lease._hold, "it could not be renewed in time")
        return begun

    monkeypatch.setattr(OnceCore, "enter", late)

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            once = client.once("report", keep=60)
            with pytest.raises(dibs.LeaseLost):
                async with once:
                    await asyncio.sleep(30)  # until it is cancelled
            assert not once._core.blocks._runs
            assert await once.done() is None

    asyncio.run(main())


def test_a_block_may_be_left_by_another_thread(client: dibs.Client) -> None:
    """The run that was entered last ends there. Which of several it would be cannot be told: then none is marked."""
    once = client.once("job", keep=KEEP_S, timeout=0, on_busy="skip")

    def enter() -> None:
        once.__enter__()

    in_a_thread(enter)
    assert once.done() is None
    once.__exit__(None, None, None)
    assert once.done()
    assert once.forget()

    in_a_thread(enter)
    in_a_thread(enter)  # in vain
    with pytest.raises(dibs.NotHeld, match="begin"):
        once.__exit__(None, None, None)
    assert once.done() is None


def test_cancelling_anywhere_leaves_it_done_or_free(sqlite_url: str) -> None:
    """A task cancelled at any moment of a run leaves it marked or free; it is never marked without having been run."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url, ttl=20) as other:
            seen = set()
            for number in range(40):
                once = client.once("job", number, keep=KEEP_S)
                runs: list[int] = []

                async def work(runs: list[int] = runs) -> str:
                    await asyncio.sleep(0.002)
                    runs.append(1)
                    return "done"

                task = asyncio.get_running_loop().create_task(once.run(work))
                if number < 10:
                    for _ in range(number):
                        await asyncio.sleep(0)
                else:
                    await asyncio.sleep(0.0004 * (number - 10))
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    pass
                again: list[int] = []

                async def more(again: list[int] = again) -> str:
                    again.append(1)
                    return "done"

                assert await other.once("job", number, keep=KEEP_S, timeout=2).run(more) == "done"
                assert runs or again
                seen.add((bool(runs), bool(again)))
            assert (False, True) in seen

    asyncio.run(main())


async def broken(client: dibs.AsyncClient, once: dibs.AsyncOnce) -> None:
    async with once as run:
        assert await client.break_lease("job", fencing_token=run.lease.fencing_token)
        await asyncio.sleep(60)


def test_a_block_whose_lease_is_lost_is_cancelled(sqlite_url: str) -> None:
    """A task's run that loses its lease is cancelled at once and ends with LeaseLost; nothing is marked."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=0.6) as client:
            once = client.once("job", keep=KEEP_S)
            began = time.monotonic()
            with pytest.raises(dibs.LeaseLost):
                await broken(client, once)
            assert time.monotonic() - began < 5
            assert await once.done() is None
            # The task is not left cancelled, and begin() makes the same blocks.
            async with await client.once("job", keep=KEEP_S, timeout=5).begin() as run:
                assert run
            assert await once.done()

    asyncio.run(main())


# -- keys -------------------------------------------------------------------------------------------------------------


class Colour(str, Enum):
    RED = "red"


class Number(IntEnum):
    SEVEN = 7


@pytest.mark.parametrize(
    "key, name",
    [
        (None, "job"),
        ("a/b", "job/a/b"),
        (42, "job/42"),
        (-1, "job/-1"),
        (date(2026, 11, 21), "job/2026-11-21"),
        (Colour.RED, "job/red"),
        (Number.SEVEN, "job/7"),
    ],
    ids=str,
)
def test_what_a_key_is_called(key: Any, name: str, client: dibs.Client) -> None:
    """The name is name/key: a str as it is, an int in digits, a date in ISO form; without a key the name alone."""
    assert client.once("job", key, keep=60).name == name


def test_the_keys_of_calls(client: dibs.Client) -> None:
    """Arguments make one key however they are passed, and different arguments never the same key."""
    calls: list[Any] = []

    @client.once_per("job", keep=KEEP_S)
    def job(a: Any, b: Any = 2, *, c: Any = "x") -> int:
        """What it does."""
        calls.append((a, b, c))
        return len(calls)

    assert (job(1), job(a=1), job(1, 2), job(b=2, c="x", a="1")) == (1, 1, 1, 1)
    assert (job("1/2"), job("1", "2/x"), job("1%2F2"), job(date(2026, 11, 21))) == (2, 3, 4, 5)
    names = {lease.name for lease in client.leases()}
    assert names == {"job/1/2/x", "job/1%2F2/2/x", "job/1/2%2Fx/x", "job/1%252F2/2/x", "job/2026-11-21/2/x"}
    assert job.__doc__ == "What it does."
    with pytest.raises(TypeError):
        job()  # type: ignore[call-arg]
    for wrong in ("", None, 1.5, True, [1], object(), "x" * 250, "a\nb"):
        with pytest.raises(dibs.InvalidName):
            job(wrong)
    assert len(calls) == 5


def test_a_number_of_many_digits_is_no_key(client: dibs.Client) -> None:
    """What Python does not write in digits is refused as what is too long."""
    for make in (
        lambda: client.once("x", 10**5000, keep=10),
        lambda: client.claims("x").take([10**5000]),
        lambda: client.queue("x").put(1, key=10**5000),
    ):
        with pytest.raises(dibs.InvalidName, match="too long"):
            make()


def test_functions_whose_calls_have_no_key(client: dibs.Client) -> None:
    """What takes any arguments, or an object, needs a key of its own; what is not called at once is refused."""
    with pytest.raises(dibs.InvalidOption, match="key="):
        client.once_per("job", keep=60)(lambda *rest: None)
    with pytest.raises(dibs.InvalidOption, match="key="):
        client.once_per("job", keep=60)(lambda **rest: None)
    assert client.once_per("job", keep=60, key=lambda *rest: len(rest))(lambda *rest: rest)(5, 6) == [5, 6]

    class Report:
        @client.once_per("report", keep=60)
        def without(self) -> None: ...

        @client.once_per("report", keep=60, key=lambda self, day: day)
        def made(self, day: str) -> str:
            return day

    with pytest.raises(dibs.InvalidName, match=r"'self'.*key="):
        Report().without()
    assert Report().made("monday") == "monday"
    assert client.once("report", "monday", keep=60).run(fails) == "monday"

    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    for wrong in (generator, coroutine, functools.partial(coroutine), 7):
        with pytest.raises(TypeError):
            client.once_per("job", keep=60)(wrong)  # type: ignore[type-var]
        with pytest.raises(TypeError):
            client.once("job", keep=60).run(wrong)  # type: ignore[arg-type]


def test_arguments_of_run_are_the_functions(client: dibs.Client) -> None:
    """`run` passes on whatever comes after the function, also arguments of the name of its own."""
    once = client.once("job", keep=60)
    assert once.run(lambda *a, **k: [a, k], 1, function=2) == [[1], {"function": 2}]


def test_a_block_inside_a_block(client: dibs.Client) -> None:
    """Blocks of one object inside each other are told apart; one that would wait for its own caller is refused."""
    once = client.once("job", keep=KEEP_S)
    with once as outer:
        assert outer
        with pytest.raises(dibs.WouldDeadlock), once:
            pass
        with client.once("job", keep=KEEP_S, timeout=0, on_busy="skip") as inner:
            assert not inner
        outer.result = 1
    with once as first:
        with once as second:
            assert (first.result, second.result) == (1, 1)
    assert once.forget()
    run = once.begin()
    with run:
        pass
    with pytest.raises(dibs.LeaseLost, match="released"), run:
        pass


# -- the command line -------------------------------------------------------------------------------------------------


def test_dibs_run_once_per(tmp_path: Path, sqlite_url: str) -> None:
    """`dibs run --once-per` runs again what failed, and not what succeeded; that is no error."""
    log = tmp_path / "log"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dibs", "run", "job", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, env={**os.environ, "DIBS_URL": sqlite_url}
        )

    def tried(code: int, *options: str) -> tuple[int, str, str]:
        done = run("--once-per", "5m", *options, "--", "sh", "-c", f"echo {code} >> {log}; exit {code}")
        return done.returncode, done.stdout, done.stderr

    assert [tried(3), tried(0), tried(0), tried(3)] == [(3, "", ""), (0, "", ""), (0, "", ""), (0, "", "")]
    assert log.read_text() == "3\n0\n"
    with dibs.connect(sqlite_url) as client:
        assert client.once("job", keep=60).forget()
        with client.once("job", keep=60):
            code, _, err = tried(0, "--nowait")
            assert (code, "is held by" in err) == (75, True)
            assert tried(0, "--on-busy", "skip") == (0, "", "")
        assert client.once("job", keep=60).forget()
    assert tried(0)[0] == 0
    assert log.read_text() == "3\n0\n0\n"
    assert run("--once-per", "5m", "--min-hold", "1m", "--", "true").returncode == 64
    assert run("--once-per", "400d", "--", "true").returncode == 64


async def _never_run(*args: object) -> None:
    raise AssertionError("nobody awaits it")


@pytest.mark.filterwarnings("ignore:coroutine '_never_run' was never awaited")
def test_what_has_not_run_is_not_done(sqlite_url: str) -> None:
    """A function that returns a coroutine, or a generator, has done nothing: TypeError, and it is tried again."""

    async def forgotten() -> Any:
        return _never_run()

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as tasks:
            with pytest.raises(TypeError, match="whose body has not run"):
                await tasks.once("report", 1, keep=60).run(forgotten)

    with dibs.connect(sqlite_url) as client:
        for keep_result in (True, False):
            once = client.once("report", 1, keep=60, keep_result=keep_result)
            with pytest.raises(TypeError, match="whose body has not run"):
                once.run(lambda: _never_run(1))
            with pytest.raises(TypeError, match="whose body has not run"):
                once.run(lambda: (row for row in [1]))
        asyncio.run(main())
        assert once.done() is None


@pytest.mark.parametrize("result, words", [({1}, "it cannot be written as JSON"), ("x" * 5000, "it is at most 4096")])
def test_a_result_that_is_not_kept_is_called_a_result(sqlite_url: str, result: Any, words: str) -> None:
    """Who returned it has given no info."""
    with (
        dibs.connect(sqlite_url) as client,
        pytest.raises(dibs.ResultNotKept, match=f"its result cannot be kept: {words}"),
    ):
        client.once("report", 1, keep=60).run(lambda: result)


def test_work_that_asks_for_itself_is_told_what_to_do(sqlite_url: str) -> None:
    """A function that calls itself through its once would wait for its own end; a once has no reentrant=True."""
    with dibs.connect(sqlite_url) as client:
        once = client.once("report", 1, keep=60)
        with pytest.raises(dibs.WouldDeadlock, match="cannot wait for itself to be done"):
            once.run(lambda: once.run(str))
        assert once.done() is None


def test_a_run_ends_with_a_stack_that_did_not_enter_it(sqlite_url: str) -> None:
    """An ExitStack takes what was begun before by its end alone."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            once = client.once("pushed", keep=60)
            async with contextlib.AsyncExitStack() as stack:
                stack.push_async_exit(await once.begin())
            assert await once.done()

    asyncio.run(main())
