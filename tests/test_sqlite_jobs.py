"""What is particular to queues on SQLite: one file, processes that die, reboots, the caller's own transactions."""

import ctypes
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dibs
from dibs.clock import Deadline, RealClock, boot_now
from dibs.door import Door, door_to
from dibs.jobs import DEAD, DONE, RETRY, Finish, Finished, KeyTaken, NewJob, Put, PutDone, Take, Taken
from dibs.store import Held, StoreBusy
from dibs.stores import sqlite, sqlite_boots, sqlite_file, sqlite_jobs, sqlite_jobs_sql
from dibs.stores.sqlite import SQLiteStore
from tests.callers import KINDS
from tests.job_queues import NAME, JobQueue, finishing

CLOCK = RealClock()
BY = Deadline(CLOCK, float("inf"))


class Queue(JobQueue):
    def __init__(self, path: Path) -> None:
        super().__init__(SQLiteStore(str(path), "dibs_lease", False))

    def act(self, *requests: Any) -> list[Any]:
        end = time.monotonic() + 10
        while True:
            try:
                return super().act(*requests)
            except StoreBusy:
                assert time.monotonic() < end
                time.sleep(0.001)  # before another try

    def finish(self, taken: Taken, end: str = DONE, **fields: Any) -> Any:
        return self.one(finishing(taken, end, **fields))

    def files(self, door: Door) -> Any:
        return door.execute("PRAGMA database_list").rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
def queue(path: Path) -> Iterator[Queue]:
    queue = Queue(path)
    yield queue
    queue.store.close()


def python(code: str, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    """A process with what the tests have, and the queue of the file that is its first argument."""
    start = (
        "import sys\nfrom pathlib import Path\nfrom tests.test_sqlite_jobs import *\nqueue = Queue(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", f"{start}\n{code}", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **{**pipes, **options})


# -- processes that die -----------------------------------------------------------------------------------------------


def test_a_killed_process_loses_nothing_it_was_told_of(path: Path, queue: Queue) -> None:
    """Whatever kills a process that puts, each put that was answered is there, whole, and once."""
    code = "for number in range(10**9):\n    print(*queue.put(f'{number}a', f'{number}b'), flush=True)"
    with python(code, path) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(20)]
        process.kill()
        told += process.stdout.readlines()
    whole = [line.split() for line in told if line.endswith("\n")]
    live = queue.payloads("ready")
    live += [job.payload for job in queue.taken(1000).jobs][len(live) :]
    assert live[: 2 * len(whole)] == [f"{number}{part}" for number in range(len(whole)) for part in "ab"]
    assert len(live) % 2 == 0


def test_every_job_is_done_though_workers_die(path: Path, queue: Queue, tmp_path: Path) -> None:
    """Workers of which one after the other is killed: each job is done effectively once, and none is lost."""
    jobs = 300
    queue.put(*[str(number) for number in range(jobs)])
    code = (
        "while True:\n"
        "    taken = queue.take(5, 0.3)\n"
        "    if isinstance(taken, Held):\n"
        "        if taken.free_in == float('inf') and sys.argv[2] == 'to the end': break\n"
        "        time.sleep(min(taken.free_in, 0.02)); continue  # as the store says\n"
        "    time.sleep(0.01)  # the work\n"
        "    gone = queue.finish(taken).gone\n"
        "    for job in taken.jobs:\n"
        "        if job.id not in gone: print(job.id, flush=True)\n"
    )
    words = [tmp_path / f"{number}.txt" for number in range(4)]

    def work(word: Path, until: str) -> "subprocess.Popen[str]":
        with word.open("w") as output:
            return python(code, path, until, stdout=output)

    for word in words[:2]:
        with work(word, "killed") as worker:
            end = time.monotonic() + 20
            while not word.read_text():
                assert time.monotonic() < end, "the worker does nothing"
                time.sleep(0.005)  # before another look
            worker.kill()
    for worker in [work(word, "to the end") for word in words[2:]]:
        _, error = worker.communicate(timeout=30)
        assert worker.returncode == 0, error
    done = Counter(line for word in words for line in word.read_text().splitlines())
    # A worker that is killed between an end and its word of it says nothing of up to five jobs.
    assert max(done.values()) == 1
    assert jobs - 2 * 5 - 2 <= len(done) <= jobs
    assert queue.jobs.depths(NAME, NAME + "\x01", BY) == []


def test_a_take_that_ctrl_c_left_among_its_rows_is_not_complained_of(queue: Queue) -> None:
    """Python drops what was left there after the connection was closed, and would show what goes wrong with that."""
    queue.put("a", "b")
    store: Any = queue.store
    db = store._file.open(BY)
    rows = queue.jobs._ready(db, Take(NAME, "claim", 1, 60.0, "host/1"), [(0, 0.0)], CLOCK.wall())
    assert next(rows)
    store.close()
    rows.close()


# -- reboots and power cuts -------------------------------------------------------------------------------------------


class Machine:
    """What the SQLite store takes for the machine's boot clock and boot id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boot, self.offset = "first boot", 0.0
        for module in (sqlite_file, sqlite_jobs):
            monkeypatch.setattr(module, "boot_id", lambda: self.boot)
        for module in (sqlite, sqlite_boots, sqlite_file, sqlite_jobs):
            monkeypatch.setattr(module, "boot_now", lambda: boot_now() + self.offset)

    def reboot(self) -> None:
        self.boot = f"after {self.boot}"
        self.offset = 7.0 - boot_now()


def test_a_reboot_ends_every_claim(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot what was claimed is ready again, its try and crash counted, and the old claim ends nothing."""
    machine = Machine(monkeypatch)
    before = Queue(path)
    ids = before.put("1", "2", NewJob("3", max_tries=1))
    old = before.taken(3, 3600.0)
    before.store.close()
    machine.reboot()
    after = Queue(path)
    assert after.finish(old) == Finished(ids)
    assert after.payloads("ready") == ["1", "2", "3"]
    new = after.taken(3)
    assert [(job.id, job.tries, job.crashes) for job in new.jobs] == [(ids[0], 2, 1), (ids[1], 2, 1)]
    assert new.fencing_token > old.fencing_token
    assert after.payloads(DEAD) == ["3"]
    assert after.finish(old) == Finished(ids)
    assert after.finish(new) == Finished()
    after.store.close()


def test_a_power_cut_repeats_no_token(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may take back takes; their tokens are not granted again, and what was put and ended stays so."""
    machine = Machine(monkeypatch)
    before = Queue(path)
    before.put("1", "2")
    before.finish(before.taken(1))
    kept = path.with_suffix(".kept")
    shutil.copy(path, kept)
    shutil.copy(f"{path}-wal", f"{kept}-wal")
    lost = [before.taken(1)]
    before.finish(lost[0], RETRY)
    lost.append(before.taken(1))
    before.store.close()
    machine.reboot()
    after = Queue(kept)
    new = after.taken(5)
    assert [job.payload for job in new.jobs] == ["2"]
    assert new.fencing_token > lost[1].fencing_token > lost[0].fencing_token
    assert after.finish(lost[1]) == Finished((lost[1].jobs[0].id,))
    after.store.close()


def test_a_call_is_one_commit_that_waits_for_the_disk_if_it_must(queue: Queue) -> None:
    """Puts and ends wait for the disk, once for all of a call; takes do not."""
    queue.put("0")
    db = queue.store._file._db
    assert db is not None
    said: list[str] = []
    db.set_trace_callback(said.append)

    def commits(*requests: Any) -> list[str]:
        said.clear()
        queue.jobs.act(requests, BY)
        assert said.count("COMMIT") == said.count("BEGIN IMMEDIATE") == 1
        (level,) = db.execute("PRAGMA synchronous").fetchone()
        return ["off", "normal", "full"][level : level + 1]

    assert commits(*[Put(NAME, f"p{number}", (NewJob("1"),)) for number in range(50)]) == ["full"]
    assert commits(Take(NAME, "c1", 5, 60.0, "h")) == ["normal"]
    assert commits(Finish(NAME, (1, 2), 1, DONE), Take(NAME, "c2", 5, 60.0, "h")) == ["full"]


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_job_that_is_claimed_costs_the_next_take_nothing(queue: Queue) -> None:
    """A take looks at no job that others work, however many they are."""
    queue.put(*[str(number) for number in range(2500)])
    db = queue.store._file._db
    assert db is not None

    def steps() -> int:
        counted = [0]

        def count() -> None:
            counted[0] += 1

        db.set_progress_handler(count, 10)
        queue.finish(queue.taken(1))
        db.set_progress_handler(None, 0)
        return counted[0]

    before = steps()
    queue.taken(1000)
    queue.taken(1000)
    assert steps() < 1.5 * before


def test_tables_are_made_when_they_are_missing(path: Path) -> None:
    """A file that has only leases gets those of queues at the first act on jobs; `dibs setup` makes all of them."""
    with dibs.connect(f"sqlite:///{path}") as client:
        with client.lock("x"):
            pass
        with closing(sqlite3.connect(path)) as db:
            assert not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'dibs_lease_job'").fetchall()
        queue = Queue(path)
        queue.put("1")
        assert queue.finish(queue.taken()) == Finished()
        queue.store.close()
    other = path.with_suffix(".other")
    with dibs.connect(f"sqlite:///{other}") as client:
        client.setup()
        client.setup()
    printed = path.with_suffix(".printed")
    with closing(sqlite3.connect(printed)) as db:
        db.executescript(SQLiteStore(str(other), "dibs_lease", False).schema())
    listing = "SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    names = []
    for file in (path, other, printed):
        with closing(sqlite3.connect(file)) as db:
            names.append([name for (name,) in db.execute(listing)])
    assert names[0] == names[1] == names[2]


def test_the_longest_table_name_has_queues(path: Path) -> None:
    """Every table and index has a name, whatever the option `table` is."""
    store = SQLiteStore(str(path), "t" * 52, False)
    store.setup(BY)
    assert isinstance(store.jobs.act([Put(NAME, "p", (NewJob("1"),))], BY)[0], PutDone)
    store.close()


def test_a_file_without_rights_says_so(path: Path, queue: Queue) -> None:
    """A process that may not write the file is told SetupRequired. Root is tried without its privileges."""
    queue.put("1")

    def drop_privileges() -> None:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP

    code = "try: queue.taken()\nexcept dibs.SetupRequired as error: print(error)"
    for mode in (0o000, 0o400):
        path.chmod(mode)
        with python(code, path, preexec_fn=drop_privileges) as process:
            output, error = process.communicate(timeout=30)
        assert "must be able to write the file" in output, error
    path.chmod(0o600)
    assert queue.taken().jobs[0].payload == "1"


def test_locks_load_nothing_of_queues(path: Path) -> None:
    """A program that only locks, also one that waits, loads no module of queues."""
    code = (
        f"import dibs, sys\nwith dibs.connect('sqlite:///{path}') as c:\n  with c.lock('x'): pass\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "dibs.stores.sqlite" in loaded
    assert not {"dibs.jobs", "dibs.stores.sqlite_jobs", "dibs.stores.sqlite_jobs_sql"} & loaded


# -- hints ------------------------------------------------------------------------------------------------------------


def test_an_empty_queue_is_not_worth_asking(path: Path, queue: Queue) -> None:
    """A watch tells of a queue when a job of it is due, and not of what others do in the same file."""
    queue.put("1")
    queue.finish(queue.taken())
    watching = SQLiteStore(str(path), "dibs_lease", False)
    watch = watching.watch("address", BY)
    queue.one(Put("default:other", "p", (NewJob("1"),)))
    assert list(watch.changed([NAME, "default:other"])) == ["default:other"]
    queue.put(NewJob("1", delay=60.0, priority=3))
    assert list(watch.changed([NAME])) == []
    queue.put(NewJob("1", priority=-3))
    assert list(watch.changed([NAME])) == [NAME]
    assert list(watch.changed([NAME])) == []
    watch.close()


# -- the caller's own transaction -------------------------------------------------------------------------------------


@pytest.fixture
def caller(path: Path, queue: Queue) -> Iterator[sqlite3.Connection]:
    """A connection of the caller's to the same file, with a table of its own."""
    queue.store.setup(BY)
    with closing(sqlite3.connect(path, timeout=5)) as connection:
        connection.execute("CREATE TABLE letter (body TEXT)")
        connection.commit()
        connection.execute("INSERT INTO letter VALUES ('dear ada')")
        yield connection


def letters(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT count(*) FROM letter").fetchone()[0])


def test_a_put_within_a_transaction_follows_it(path: Path, queue: Queue, caller: sqlite3.Connection) -> None:
    """Nothing is there before the commit, nothing after a rollback, and all of it after a commit, once."""
    request = Put(NAME, "p1", tuple(NewJob(str(number), key=str(number)) for number in range(250)))
    first = queue.within(caller, request)
    assert isinstance(first, PutDone)
    assert caller.in_transaction
    with pytest.raises(StoreBusy):  # nobody else writes meanwhile, and nobody waits inside the store
        queue.jobs.act([Take(NAME, "c", 1, 60.0, "h")], BY)
    assert queue.payloads("ready") == []
    caller.rollback()
    assert isinstance(queue.take(), Held)
    assert letters(path) == 0
    caller.execute("INSERT INTO letter VALUES ('dear ada')")
    second = queue.within(caller, request)
    assert queue.within(caller, request) == second
    refused = queue.within(caller, Put(NAME, "p2", (NewJob("new"), NewJob("again", key="7"))))
    assert refused == KeyTaken("7", second.ids[7], False)
    caller.commit()
    assert letters(path) == 1
    assert queue.put(*request.jobs, put_id="p1") == second.ids
    assert [job.payload for job in queue.taken(1000).jobs] == [str(number) for number in range(250)]


def test_an_end_within_a_transaction_follows_it(path: Path, queue: Queue, caller: sqlite3.Connection) -> None:
    """Effect and end are one: both are there after a commit, and neither after a rollback."""
    caller.rollback()
    queue.put("1", "2")
    taken = queue.taken(2)
    for end in (caller.rollback, caller.commit):
        caller.execute("INSERT INTO letter VALUES ('dear ada')")
        assert queue.within(caller, finishing(taken)) == Finished()
        assert queue.within(caller, finishing(taken)) == Finished(tuple(job.id for job in taken.jobs))
        end()
    assert letters(path) == 1
    assert queue.finish(taken) == Finished(tuple(job.id for job in taken.jobs))
    assert isinstance(queue.take(), Held)


def test_a_late_end_within_a_transaction_is_refused(queue: Queue, caller: sqlite3.Connection) -> None:
    """A claim that has expired ends nothing there either, whether somebody else has the job or nobody."""
    caller.rollback()
    (job,) = queue.put("1")
    old = queue.taken(1, 0.05)
    time.sleep(0.06)  # until the claim has certainly ended
    assert queue.within(caller, finishing(old)) == Finished((job,))
    caller.commit()
    new = queue.taken()
    assert queue.within(caller, finishing(old)) == Finished((job,))
    assert queue.within(caller, finishing(new, DEAD, note="e")) == Finished()
    caller.commit()
    assert queue.payloads(DEAD) == ["1"]


def test_a_claim_that_expires_while_the_file_is_locked_ends_nothing(
    path: Path, queue: Queue, caller: sqlite3.Connection
) -> None:
    """The time is read once the transaction can write, not before it waited for that."""
    caller.rollback()
    (job,) = queue.put("1")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        taken = queue.taken(1, 0.3)
        other.execute("BEGIN IMMEDIATE")
        unlocks = threading.Timer(0.5, other.rollback)
        unlocks.start()
        assert queue.within(caller, finishing(taken)) == Finished((job,))
        unlocks.join()
    caller.commit()
    assert queue.payloads("ready") == ["1"]


def test_the_first_put_of_all_may_be_within_a_transaction(path: Path) -> None:
    """The file need not be known to dibs yet, which cannot write to it meanwhile; a rollback takes all of it."""
    queue = Queue(path)
    with closing(sqlite3.connect(path)) as caller:
        caller.execute("CREATE TABLE letter (body TEXT)")
        for end in (caller.rollback, caller.commit):
            caller.execute("INSERT INTO letter VALUES ('dear ada')")
            assert isinstance(queue.within(caller, Put(NAME, "p", (NewJob("1"),))), PutDone)
            end()
    assert [job.payload for job in queue.taken(5).jobs] == ["1"]
    queue.store.close()


@pytest.mark.parametrize("vacuum", ["NONE", "FULL", "INCREMENTAL"])
@pytest.mark.parametrize("what", ["first put", "put", "end"])
def test_what_is_said_first_in_a_transaction_is_a_write(path: Path, queue: Queue, what: str, vacuum: str) -> None:
    """So it waits for others who write; had it read before, it would be refused at once when they have written."""
    with closing(sqlite3.connect(path, isolation_level=None)) as caller:
        caller.execute(f"PRAGMA auto_vacuum = {vacuum}")
        caller.execute("PRAGMA journal_mode = WAL")
        caller.execute("CREATE TABLE letter (body TEXT)")
        request: Any = Put(NAME, "p", (NewJob("1", key="k"),))
        if what != "first put":
            queue.put("0")
        if what == "end":
            request = finishing(queue.taken())
        caller.execute("BEGIN")
        door = door_to(caller)
        talk = queue.jobs.within(request, "sqlite", queue.files(door), BY)
        answer = door.execute(*next(talk))
        assert is_locked(path)
        try:
            while True:
                answer = door.execute(*talk.send(answer))
        except StopIteration as stop:
            outcome = stop.value
        caller.execute("COMMIT")
    assert isinstance(outcome, Finished if what == "end" else PutDone)
    assert len(queue.payloads("ready")) == {"first put": 1, "put": 2, "end": 0}[what]


def is_locked(path: Path) -> bool:
    """Whether somebody else who would write is kept out."""
    with closing(sqlite3.connect(path, timeout=0)) as connection:
        try:
            connection.execute("INSERT INTO letter VALUES ('dear bob')")
        except sqlite3.OperationalError:
            return True
        connection.commit()
        return False


@pytest.mark.parametrize("kind", [kind for kind, (fixture, _) in KINDS.items() if fixture == "sqlite_url"])
def test_every_kind_of_connection_will_do(kind: str, path: Path, queue: Queue) -> None:
    """Puts and ends follow the transactions of the driver, of SQLAlchemy and of Django."""
    queue.put("0")
    new = [NewJob('"100 % :of ?"', key="%s:k?"), NewJob(b"\x00\xff"), *[NewJob("1") for _ in range(150)]]
    caller = KINDS[kind][1](f"sqlite:///{path}")
    try:
        for end in (caller.rollback, caller.commit):
            put = queue.within(caller.given, Put(NAME, "p", tuple(new)))
            assert len(set(put.ids)) == len(new)
            assert queue.within(caller.given, Put(NAME, "p2", (new[0],))) == KeyTaken("%s:k?", put.ids[0], False)
            end()
        taken = queue.taken(1000)
        assert [job.payload for job in taken.jobs] == ["0", *[job.payload for job in new]]
        for end in (caller.rollback, caller.commit):
            assert queue.within(caller.given, finishing(taken, RETRY, note="100 % :of ?")) == Finished()
            end()
    finally:
        caller.close()
    assert {job.error for job in queue.jobs.jobs_in(NAME, "ready", 1000, BY)} == {"100 % :of ?"}


def test_the_first_put_after_a_reboot_may_be_within_a_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims of the boot before are over there, too, before anybody has told the file of the new one."""
    machine = Machine(monkeypatch)
    before = Queue(path)
    before.put(NewJob("1", key="k"))
    old = before.taken(1, 3600.0)
    before.store.close()
    machine.reboot()
    after = Queue(path)
    ids = tuple(job.id for job in old.jobs)
    with closing(sqlite3.connect(path)) as caller:
        caller.execute("CREATE TABLE letter (body TEXT)")
        caller.execute("INSERT INTO letter VALUES ('dear ada')")
        assert after.within(caller, Put(NAME, "p", (NewJob("2", key="k"),))) == KeyTaken("k", ids[0], False)
        assert after.within(caller, finishing(old)) == Finished(ids)
        caller.commit()
    assert after.payloads("ready") == ["1"]
    after.store.close()


def test_an_attached_file_will_do(path: Path, tmp_path: Path, queue: Queue) -> None:
    """The file of the queues may be one that the caller's connection has attached; any other is refused."""
    queue.put("0")
    with closing(sqlite3.connect(tmp_path / "own.db")) as caller:
        with pytest.raises(dibs.InvalidOption, match="ATTACH"):
            queue.within(caller, Put(NAME, "p", (NewJob("1"),)))
        caller.execute(f"ATTACH '{path}' AS [que\"ues]")
        caller.text_factory = bytes
        caller.row_factory = sqlite3.Row
        put = queue.within(caller, Put(NAME, "p", (NewJob("1", key="k"), NewJob(b"\xff"))))
        assert queue.within(caller, Put(NAME, "p2", (NewJob("2", key="k"),))) == KeyTaken("k", put.ids[0], False)
        caller.commit()
    assert queue.payloads("ready") == ["0", "1", b"\xff"]
    with pytest.raises(dibs.InvalidOption, match="postgresql"):
        queue.jobs.within(Put(NAME, "p", ()), "postgresql", None, BY)


def test_every_index_is_named_after_the_table() -> None:
    """What belongs to the queues is told by its name, and quoted with the schema of the connection."""
    names = sqlite_jobs_sql.names("t", "other")
    assert names.pop("meta") == '"other"."t_meta"'
    assert all(name.startswith('"other"."t_job') for key, name in names.items() if not key.endswith(("_here", "rows")))
