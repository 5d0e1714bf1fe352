"""SQLite's files: made and left alone so that its locks hold, and missed when somebody removes them or their tables."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from errno import EDQUOT, ENOSPC, EPERM
from pathlib import Path
from typing import Any

import pytest

import dibs
from dibs.clock import Deadline, RealClock, namespace_ahead_s
from dibs.connecting import locate
from dibs.store import Acquire, Granted, Held, Release, Renew
from dibs.stores import sqlite, sqlite_boots, sqlite_file, sqlite_inodes, sqlite_many
from dibs.stores.sqlite import SQLiteStore

# Longer than a connection in use goes without a look at its files.
NOTICED_S = 0.2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


def elsewhere(url: str, act: str) -> str:
    """What another process prints: of a client that is closed properly."""
    program = f"import sys, dibs\nwith dibs.connect(sys.argv[1]) as client:\n    print({act})"
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def taken_elsewhere(url: str, name: str) -> bool:
    """Whether another process gets the name."""
    return elsewhere(url, f"client.lock({name!r}, timeout=0).acquire() is not None") == "True"


def holding_elsewhere(url: str, name: str) -> subprocess.Popen[str]:
    """Another process, which takes the name, says whether it got it, and goes on holding until its input ends."""
    program = """
import sys, dibs
with dibs.connect(sys.argv[1], ttl=60) as client:
    lease = client.lock(sys.argv[2], timeout=0).acquire()
    print("granted" if lease else "held", flush=True)
    sys.stdin.read()
    if lease:
        lease.check()
        lease.release()
"""
    command = [sys.executable, "-c", program, url, name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def beside(path: Path) -> list[Path]:
    """SQLite's own two files."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm")]


def remove_beside(path: Path) -> None:
    for file in beside(path):
        file.unlink()


def opened() -> Iterator[str]:
    """What this process has open."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(f"/proc/self/fd/{fd}")


def drop_locks(path: Path) -> None:
    """Do what a program does that copies its own database: the close takes this process's locks away."""
    path.read_bytes()


# -- made without being opened ----------------------------------------------------------------------------------------


def test_clients_that_make_the_file_at_the_same_time_keep_their_locks(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes late to make it takes no lock from another client of its process, which is at work in it."""
    stopped, go_on = threading.Event(), threading.Event()

    def stopping(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(at: Any, *args: Any, **kwargs: Any) -> Any:
            if at == str(path) and not stopped.is_set():
                stopped.set()
                assert go_on.wait(60)
            return make(at, *args, **kwargs)

        return made

    for name in ("open", "mknod"):
        monkeypatch.setattr(os, name, stopping(getattr(os, name)))
    with dibs.connect(url) as late, dibs.connect(url) as early:
        thread = threading.Thread(target=late.ping)
        thread.start()
        assert stopped.wait(60)
        lease = early.lock("x", ttl=20).acquire()
        assert lease is not None
        go_on.set()
        thread.join(60)
        assert elsewhere(url, "len(client.leases())") == "1"
        assert all(file.exists() for file in beside(path))  # that process did not take itself for the last one
        assert lease.release()


def test_tokens_of_permits_outlive_their_table(sqlite_url: str) -> None:
    """When only the table of pools was emptied, holders keep their slots and tokens go on from theirs."""
    with dibs.connect(sqlite_url) as client:
        gpu = client.semaphore("gpu", 3)
        leases = [gpu.acquire(timeout=0) for _ in range(3)]
        last = leases[2]
        assert last is not None
        assert leases[1] is not None
        leases[1].release()
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            connection.execute("DELETE FROM dibs_lease_pool")
        again = gpu.acquire(timeout=0)
        assert again is not None
        assert (again.slot, again.fencing_token) == (2, last.fencing_token + 1)
        assert gpu.acquire(timeout=0) is None


def test_a_program_that_uses_dibs_never_opens_the_file_itself(url: str, path: Path) -> None:
    """Nothing but SQLite opens it, whatever is asked for: a close would take the locks of the whole process away."""
    program = """
import sys, dibs
url, path = sys.argv[1:]
opened = []
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).startswith(path) and opened.append(args[0]))
with dibs.connect(url) as client, dibs.connect(url) as other:
    client.setup()
    with client.lock("x") as lease:
        assert other.lock("x", timeout=0.2).acquire() is None
        assert other.leases() and other.holder("x")
    with client.semaphore("y", 2), client.rwlock("z").read():
        pass
    queue = client.queue("jobs")
    queue.put(1)
    with queue.take(1) as batch:
        for job in batch:
            job.done()
    client.purge(0)
    client.ping()
from dibs.cli import main
for command in ("doctor", "ls", "setup --history 3", "history x", "show x", "purge"):
    try:
        main(["--url", url, *command.split()])
    except SystemExit:
        pass
print("opened:", opened)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, url, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["opened: []"], done.stdout + done.stderr


def test_where_only_root_makes_a_node_the_file_is_made_all_the_same(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: under another name first, of which nothing is left, for this user alone, and over nobody's file."""

    def refuse(*_: Any) -> None:
        raise PermissionError(EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mknod", refuse)
    with dibs.connect(url) as client, client.lock("x"):
        assert sorted(path.parent.iterdir()) == sorted([path, *beside(path)])
        assert path.stat().st_mode & 0o777 == 0o600
        inode = path.stat().st_ino
        sqlite_inodes.make(str(path))
        assert path.stat().st_ino == inode
    assert list(path.parent.iterdir()) == [path]


def test_a_link_to_a_file_that_is_not_there_yet_is_followed(path: Path) -> None:
    """The file is made where the link leads, for this user alone."""
    link = path.with_name("link.db")
    link.symlink_to(path)
    with dibs.connect(f"sqlite:///{link}") as client, client.lock("x"):
        assert [file.stat().st_mode & 0o777 for file in (path, *beside(path))] == [0o600] * 3
        assert link.is_symlink()


@pytest.mark.parametrize("code", [ENOSPC, EDQUOT])
def test_a_full_disk_is_no_mistake_in_the_setup(code: int, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file cannot be made now: StoreUnavailable, and nothing was applied."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with dibs.connect(url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(os, "mknod", full)
            patch.setattr(os, "open", full)
            with pytest.raises(dibs.StoreUnavailable, match=os.strerror(code)) as told:
                client.lock("x", timeout=0).acquire()
        assert not told.value.maybe_applied
        with client.lock("x", timeout=0):
            pass


# -- removed while in use ---------------------------------------------------------------------------------------------


@pytest.fixture
def holder(url: str) -> Iterator[dibs.Client]:
    with dibs.connect(url, patience=2) as client:
        yield client


def test_a_log_that_was_removed_by_hand_leaves_one_holder(holder: dibs.Client, url: str, path: Path) -> None:
    """Whoever held, or another, holds it in the end: never both."""
    mine = holder.lock("x", ttl=3).acquire()
    assert mine is not None
    remove_beside(path)
    theirs = holding_elsewhere(url, "x")
    try:
        if theirs.stdout.readline() == "granted\n":  # type: ignore[union-attr]
            assert mine.lost.wait(20)
            assert holder.lock("x", timeout=0).acquire() is None
        else:
            assert mine.held
    finally:
        theirs.communicate("")


def test_a_log_that_another_process_removed_is_noticed(holder: dibs.Client, url: str, path: Path) -> None:
    """The program took its own locks away; who left next took itself for the last. The lease goes on where all look."""
    lease = holder.lock("x", ttl=3).acquire()
    assert lease is not None
    drop_locks(path)
    assert elsewhere(url, "len(client.leases())") == "1"
    time.sleep(3.5)  # renewed meanwhile, or over
    assert lease.held
    assert not taken_elsewhere(url, "x")
    assert lease.release()
    assert taken_elsewhere(url, "x")


@pytest.mark.parametrize("end", ["-wal", "-shm"])
def test_one_of_the_two_is_enough(end: str, holder: dibs.Client, path: Path) -> None:
    """Every client of the process leaves what is gone, those that are idle too, and goes on with what is there."""
    with dibs.connect(f"sqlite:///{path}") as idle:
        for client in (holder, idle):
            with client.lock("x"), client.lock("y"):
                pass
        path.with_name(path.name + end).unlink()
        time.sleep(NOTICED_S)
        with holder.lock("z", ttl=20) as lease:
            assert not any(str(path) in name and "deleted" in name for name in opened())
            assert not taken_elsewhere(f"sqlite:///{path}", "z")
            assert idle.holder("z") is not None
            assert lease.held


def test_a_removed_log_is_not_written_back(url: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have written to the file since is not written over when the client that had the old log is closed."""
    with dibs.connect(url) as client:
        with client.lock("mine"):  # it has a row
            pass
        drop_locks(path)
        assert elsewhere(url, "client.lock('theirs', ttl=60).acquire().fencing_token") == "1"
        monkeypatch.setattr(sqlite_file, "LOOK_AT_FILE_S", 3600.0)  # for it to go on in the old log
    with dibs.connect(url) as client:
        with client.lock("mine"), client.lock("theirs"):
            pass
        drop_locks(path)
        assert elsewhere(url, "client.leases()") == "[]"
        with client.lock("mine"):
            token = elsewhere(url, "client.lock('theirs').acquire().fencing_token")
    assert int(elsewhere(url, "client.lock('theirs').acquire().fencing_token")) > int(token)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_file_that_is_not_in_wal_mode_is_put_into_it(holder: dibs.Client, url: str, path: Path) -> None:
    """A copy that was made by VACUUM INTO, say: it is used as any other."""
    holder.setup()
    holder.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    with dibs.connect(url) as client, client.lock("x"):
        assert all(file.exists() for file in beside(path))


def test_a_connection_of_the_programs_own_is_told(holder: dibs.Client, path: Path) -> None:
    """It keeps SQLite's view of the removed log alive for the whole process: nothing is asked until it is closed."""
    with holder.lock("x"):
        pass
    with closing(sqlite3.connect(path)) as own:
        assert own.execute("SELECT count(*) FROM dibs_lease").fetchone() == (1,)
        remove_beside(path)
        time.sleep(NOTICED_S)
        with pytest.raises(dibs.StoreUnavailable, match="a connection of its own"):
            holder.lock("x", timeout=0).acquire()
    with holder.lock("x", timeout=5):
        pass


def test_a_connection_to_the_file_that_was_replaced_is_left_alone(holder: dibs.Client, path: Path) -> None:
    """A copy is put in its place while the program reads the old one, and the new one, too: dibs goes on with that."""
    with holder.lock("x"):
        pass
    copy = path.with_name("copy.db")
    with closing(sqlite3.connect(path)) as old:
        assert old.execute("SELECT count(*) FROM dibs_lease").fetchone() == (1,)
        old.execute("VACUUM INTO ?", (str(copy),))
        copy.replace(path)
        remove_beside(path)
        with closing(sqlite3.connect(path)) as new:
            assert new.execute("SELECT count(*) FROM dibs_lease").fetchone() == (1,)
            time.sleep(NOTICED_S)
            with holder.lock("x", timeout=5):
                assert taken_elsewhere(f"sqlite:///{path}", "y")
                assert not taken_elsewhere(f"sqlite:///{path}", "x")


# -- dropped tables ---------------------------------------------------------------------------------------------------


def drop(path: Path, what: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"DROP {what}")


def tokens(client: dibs.Client) -> list[int]:
    with client.lock("x", timeout=0) as lock, client.semaphore("y", 2, timeout=0) as permit:
        return [lock.fencing_token, permit.fencing_token]


@pytest.mark.parametrize(
    "what", ["TABLE dibs_lease", "TABLE dibs_line", "TABLE dibs_pool", "TABLE dibs_meta", "INDEX dibs_line_name"]
)
def test_setup_makes_a_dropped_table_again(what: str, holder: dibs.Client, url: str, path: Path) -> None:
    """Whoever misses it is told so at once; after a setup all go on, those at work too, and tokens have risen."""
    what = what.replace("dibs_", "dibs_lease_").replace("dibs_lease_lease", "dibs_lease")
    with dibs.connect(url) as other:
        before = [max(pair) for pair in zip(tokens(other), tokens(holder), strict=True)]
        drop(path, what)
        with pytest.raises(dibs.SetupRequired, match="`dibs setup`"), holder.lock("x"), holder.lock("new"):
            other.lock("x", timeout=0.3).acquire()
        holder.setup()
        holder.setup()
        for client in (other, holder, other):
            after = tokens(client)
            assert all(new > old for new, old in zip(after, before, strict=True))
            before = after
    with dibs.connect(url) as fresh:
        assert all(new > old for new, old in zip(tokens(fresh), before, strict=True))


def test_who_holds_keeps_it_when_the_table_of_boots_is_lost(holder: dibs.Client, url: str, path: Path) -> None:
    """What the leases tell of the boot counts: who comes new and who is at work are of one opinion."""
    holder.setup()
    holder.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE dibs_lease_meta SET value = '7' WHERE key = 'boot'")
    with dibs.connect(url) as client, client.lock("x", ttl=60) as lease:
        drop(path, "TABLE dibs_lease_meta")
        assert not taken_elsewhere(url, "x")
        with client.lock("new", timeout=0) as new:
            assert new.fencing_token > lease.fencing_token


def test_a_folder_that_is_not_there_is_to_be_made(tmp_path: Path) -> None:
    """Who names a file in a folder that is missing is told to make the folder, not to change its rights."""
    with dibs.connect(f"sqlite:///{tmp_path}/nowhere/locks.db") as client:
        with pytest.raises(dibs.SetupRequired, match="Make its folder, or"):
            client.lock("x").acquire()


def test_jobs_go_on_after_a_setup(holder: dibs.Client, path: Path) -> None:
    """As for leases: a table of theirs that was dropped is told, and made again."""
    queue = holder.queue("jobs")
    queue.put(1)
    drop(path, "TABLE dibs_lease_job")
    with pytest.raises(dibs.SetupRequired, match="dibs setup"):
        queue.put(2)
    holder.setup()
    queue.put(3)
    with queue.take(1) as batch:
        assert [job.payload for job in batch] == [3]
        for job in batch:
            job.done()


# -- what is looked for -----------------------------------------------------------------------------------------------


def test_who_waits_sees_that_there_is_enough_for_it(url: str) -> None:
    """Of permits, a client looks whether they are enough for one of its own, also behind others who wait."""
    deadline = Deadline(RealClock(), float("inf"))
    address = locate(url)[0]
    store: Any = address.open()

    def asked(claim: str, wake: str | None = None, take: int = 1) -> Any:
        request = Acquire("yard", claim, 60, "h/1/x", wake=wake, permits=4, take=take)
        return type(store.act([request], deadline)[0])

    assert [asked("a", take=2), asked("b"), asked("c")] == [Granted] * 3
    watches: dict[str, Any] = {
        waiter: address.open().watch(waiter, deadline) for waiter in ("first", "second", "third", "idle")
    }
    assert [asked("first-1", "first", 2), asked("second-1", "second"), asked("third-1", "third")] == [Held] * 3

    def told() -> list[str]:
        return [waiter for waiter, watch in watches.items() if watch.changed(["yard"])]

    assert told() == []
    store.act([Release("yard", "b", 2)], deadline)
    assert told() == []  # the first wants two
    store.act([Release("yard", "c", 3)], deadline)
    assert told() == ["first"]
    store.act([Release("yard", "a", 1)], deadline)
    assert told() == ["first", "second", "third"]
    for watch in watches.values():
        watch.close()
    store.close()


# -- the time for it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["new", "of another boot"])
def test_the_first_use_waits_no_longer_than_it_may(file: str, url: str, path: Path) -> None:
    """Whoever else writes to a file that is new, or seen for the first time since the boot, keeps nobody for longer."""
    if file != "new":
        with dibs.connect(url) as client:
            client.setup()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        if file != "new":
            db.execute("UPDATE dibs_lease_meta SET value = 'restored' WHERE key = 'boot_id'")
        db.execute("BEGIN IMMEDIATE")
        with dibs.connect(f"{url}?patience=0.2&request_timeout=0.2") as client:
            began = time.monotonic()
            with pytest.raises(dibs.StoreUnavailable, match="locked"):
                client.lock("x", timeout=0).acquire()
            assert time.monotonic() - began < 3
            db.execute("COMMIT")
            with client.lock("x", timeout=5):
                pass


def test_whoever_waits_to_set_a_file_up_sees_that_another_has(
    url: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many begin at once after a boot, only one needs to write: the others go on when it has, whoever writes."""
    with dibs.connect(url) as client:
        client.setup()
    tried = threading.Event()
    begin = sqlite_boots.begin

    def noticed(*given: Any, **named: Any) -> None:
        tried.set()
        begin(*given, **named)

    monkeypatch.setattr(sqlite_boots, "begin", noticed)
    with closing(sqlite3.connect(path, isolation_level=None)) as db, dibs.connect(url) as client:
        ((this_boot,),) = db.execute("SELECT value FROM dibs_lease_meta WHERE key = 'boot_id'").fetchall()
        db.execute("UPDATE dibs_lease_meta SET value = 'before' WHERE key = 'boot_id'")
        db.execute("BEGIN IMMEDIATE")
        found: list[object] = []
        looking = threading.Thread(target=lambda: found.append(client.leases()))
        looking.start()
        assert tried.wait(10)
        db.execute("UPDATE dibs_lease_meta SET value = ? WHERE key = 'boot_id'", (this_boot,))
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        looking.join(10)
        assert found == [[]]


# -- many names in one statement --------------------------------------------------------------------------------------


def test_a_lease_that_a_locked_file_has_cost_says_so(url: str, path: Path) -> None:
    """Who loses a lease since somebody's transaction keeps the file locked is told that, not that it was too slow."""
    with dibs.connect(url) as client, closing(sqlite3.connect(path, isolation_level=None)) as db:
        lease = client.lock("x", ttl=3).acquire()
        assert lease is not None
        db.execute("BEGIN IMMEDIATE")
        assert lease.lost.wait(20)
        db.execute("ROLLBACK")
        with pytest.raises(dibs.LeaseLost, match=r"in time: the store stayed too busy \(database is locked\)"):
            lease.check()


def test_many_together_are_told_what_each_would_be_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in every state, asked for, renewed and released by many: with and without the statements for many, the same
    outcomes, and the same rows afterwards."""
    deadline = Deadline(RealClock(), float("inf"))
    names = [f"n:{place}" for place in range(40)]
    told: list[list[object]] = []
    for has_json in (True, False):
        clock = 1000.0
        monkeypatch.setattr(sqlite, "boot_now", lambda: clock)  # noqa: B023 - of this very round
        monkeypatch.setattr(sqlite_file, "boot_now", lambda: clock)  # noqa: B023
        monkeypatch.setattr(sqlite_many, "wall_now", lambda: 5.0)
        monkeypatch.setattr(sqlite, "wall_now", lambda: 5.0)
        store = SQLiteStore(str(tmp_path / f"{has_json}.db"), "dibs_lease", False)
        told.append(seen := [])

        def act(*requests: Any, ttl: float = 30.0) -> list[Any]:
            outcomes = store.act(requests, deadline)  # noqa: B023
            seen.append([o._replace(acquired_at=0.0) if isinstance(o, (Granted, Held)) else o for o in outcomes])
            return outcomes

        def asking(name: str, claim: str, ttl: float = 30.0, **more: Any) -> Acquire:
            return Acquire(name, claim, ttl, "host/1/" + claim, **more)

        store.act([asking("warm", "up")], deadline)
        store._file.has_json = has_json
        for place, name in enumerate(names):
            state = place % 10
            if state == 1:  # released
                act(asking(name, "a"))
                act(Release(name, "a"))
            elif state == 2:  # expired
                act(asking(name, "a", 1.0))
            elif state == 3:  # held by another
                act(asking(name, "a"))
            elif state == 4:  # held by the asker
                act(asking(name, "me"))
            elif state == 5:  # free, and somebody waits in line
                act(asking(name, "a"))
                act(asking(name, "b", wake="b"))
                act(Release(name, "a"))
            elif state == 6:  # of a boot that is over
                act(asking(name, "me" if place > 20 else "a"))
                store._file.open().execute("UPDATE dibs_lease SET boot = boot - 1 WHERE name = ?", (name,))
            elif state == 7:  # with permits
                act(asking(name, "a", permits=3))
            elif state == 8:  # the asker's, and over
                act(asking(name, "me", 1.0))
            elif state == 9:  # kept
                act(asking(name, "a"))
                act(Release(name, "a", keep=20.0))
        clock += 1.1
        act(*[Renew(name, "me", 25.0) for name in names[::2]])
        act(*[asking(name, "me", info='{"a": 1}' if place % 2 else None) for place, name in enumerate(names)])
        act(*[Renew(name, "me", 60.0) for name in names])
        act(*[Release(name, "me") for name in names[::3]])
        act(*[Release(name, "me") for name in names if int(name[2:]) % 10 in (0, 1)])  # most are held
        act(*[Renew(name, "me", 60.0) for name in names if int(name[2:]) % 10 in (2, 4)])
        held = [place for place, name in enumerate(names) if place % 10 in (2, 4) and place % 3]
        assert len(held) >= 5
        act(*[Release(names[place], "me") for place in held])
        rows = store._file.open().execute(
            "SELECT name, slot, claim_id, holder, fencing_token, boot, granted_boot, expires_boot, info, take"
            " FROM dibs_lease ORDER BY name, slot"
        )
        seen.append(rows.fetchall())
        store.close()
    assert told[0] == told[1]


def test_without_functions_for_json_each_is_asked_for_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite before 3.38 may have none."""
    monkeypatch.setattr(sqlite_many, "has_json", lambda db: False)
    monkeypatch.setattr(sqlite_many, "_Many", None)
    with dibs.connect(f"sqlite:///{path}") as client, client.multilock([str(n) for n in range(50)]) as leases:
        assert len(leases) == 50


# -- time namespaces ---------------------------------------------------------------------------------------------------

# A container whose clocks go ahead of its machine's. (Who is not root may make one as root of a namespace of users.)
AHEAD = ["unshare", "--time", "--boottime", "100000", "--fork", "--kill-child"]
if os.geteuid():
    AHEAD.append("--map-root-user")
CAN_GO_AHEAD = not subprocess.run([*AHEAD, "true"], stderr=subprocess.DEVNULL, check=False).returncode
HOLD = """
import sys, time, dibs
lease = dibs.connect(sys.argv[1]).lock("x", ttl=4).acquire()
print("in", flush=True)
time.sleep(60)
"""
LOOK = """
import sys, dibs
client = dibs.connect(sys.argv[1])
print([0 < lease.expires_in <= 4 for lease in client.leases()], client.lock("x").acquire(timeout=0))
"""
TAKE_OVER = "import sys, dibs; print(dibs.connect(sys.argv[1]).lock('x').acquire(timeout=30) is not None)"


@pytest.mark.skipif(not CAN_GO_AHEAD, reason="this kernel, or container, lets nobody make a time namespace")
@pytest.mark.parametrize("holder, other", [(AHEAD, []), ([], AHEAD)], ids=["holder ahead", "holder behind"])
def test_containers_of_other_clocks_exclude_each_other(sqlite_url: str, holder: list[str], other: list[str]) -> None:
    """Leases are in force and end as for everybody on the machine where a time namespace moves the boot clock."""

    def run(code: str) -> str:
        command = [*other, sys.executable, "-c", code, sqlite_url]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    command = [*holder, sys.executable, "-c", HOLD, sqlite_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == "in\n"
        assert run(LOOK) == "[True] None"
        held.kill()
    assert run(TAKE_OVER) == "True"


@pytest.mark.parametrize(
    "told, ahead_s",
    [
        ("monotonic           7         0\nboottime       100000 500000000\n", 100000.5),
        ("monotonic           0         0\nboottime            0         0\n", 0.0),
        ("boottime          -20         0\n", -20.0),
        ("", 0.0),
        ("something else\n", 0.0),
        (None, 0.0),
    ],
)
def test_what_a_time_namespace_tells(tmp_path: Path, told: str | None, ahead_s: float) -> None:
    """By how much its boot clock is ahead; nothing where there are no such namespaces."""
    path = tmp_path / "timens_offsets"
    if told is not None:
        path.write_text(told)
    assert namespace_ahead_s(str(path)) == ahead_s
