"""``dibs work`` and ``dibs claim``: a command for each job, or for what was won, with real kills, pauses and losses."""

import errno
import json
import os
import select
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dibs as library
from dibs.clock import boot_now
from tests.command_line import PATIENCE_S, Dibs, Started, until
from tests.servers.redis import RedisServer
from tests.test_cli_stop import ANOTHER_USER, ROOT_ONLY, without_kill


@pytest.fixture
def queue(dibs: Dibs) -> Iterator[library.Queue]:
    """The queue "q" of the same store, in this process."""
    with library.connect(dibs.url) as client:
        yield client.queue("q")


def working(dibs: Dibs, *options: str, script: str) -> Any:
    """``dibs work`` with a shell script, to its end."""
    return dibs("work", "q", "--idle", "0.3", *options, "--", "sh", "-c", script)


class Work:
    """A worker whose commands write their process ids into a file, and then do as the script says."""

    def __init__(self, dibs: Dibs, *options: str, script: str = "sleep 60", **settings: Any) -> None:
        self.begun = dibs.folder / "begun"
        self.process: Started = dibs.start(
            "work", "q", *options, "--", "sh", "-c", f"echo $$ >> {self.begun}; {script}", **settings
        )

    def pids(self, count: int) -> list[int]:
        """The commands that have begun, once there are so many."""
        until(lambda: self.begun.exists() and self.begun.read_text().count("\n") >= count)
        return [int(pid) for pid in self.begun.read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process runs; a dead one that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- what becomes of a job ---------------------------------------------------------------------------------------------


def test_the_command_gets_the_job(dibs: Dibs, queue: library.Queue) -> None:
    """The payload on standard input, JSON with a new line and bytes as they are; who it is in the environment."""
    first = queue.put({"to": "é"})
    second = queue.put(b"\0raw")
    done = working(dibs, script='echo "$DIBS_QUEUE $DIBS_JOB_ID $DIBS_FENCING_TOKEN $DIBS_TRIES"; od -An -c')
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"q {first} 1 1"
    assert lines[1].split()[-2:] == ["}", "\\n"]
    assert f"q {second} 1 1" in lines
    assert lines[-1].split() == ["\\0", "r", "a", "w"]
    assert queue.depth()[1:5] == (0, 0, 0, 0)


def test_a_payload_that_nobody_reads_is_no_trouble(dibs: Dibs, queue: library.Queue) -> None:
    """A command need not read its input, however long that is; and one that does gets all of it."""
    queue.put(b"x" * 2**20)
    done = working(dibs, script="exit 0")
    assert (done.returncode, done.stderr) == (0, "")
    queue.put(b"x" * 2**20)
    done = working(dibs, script="wc -c")
    assert int(done.stdout) == 2**20
    assert queue.depth()[1:5] == (0, 0, 0, 0)


def test_a_failed_command_is_tried_again_and_dies(dibs: Dibs, queue: library.Queue) -> None:
    """Its code and the end of its stderr are kept, its stderr is shown; without tries left the job is dead."""
    job = queue.put(1, max_tries=2)
    done = working(
        dibs, "--idle", "5", script=f'echo first >&2; echo "try $DIBS_TRIES" >&2; echo {"x" * 5000} >&2; exit 3'
    )
    assert done.returncode == 0
    assert "dibs: job 1 failed on try 1: exit code 3\n" in done.stderr
    assert "first\ntry 2\n" in done.stderr
    (dead,) = queue.dead()
    assert (dead.id, dead.tries) == (job, 2)
    assert dead.error is not None
    assert dead.error.startswith("exit code 3\nxxx")
    queue.put(2, max_tries=1)
    working(dibs, script="kill -SEGV $$")
    assert queue.dead()[0].error == "signal 11"


def test_not_now_costs_no_try(dibs: Dibs, queue: library.Queue) -> None:
    """With 75 the job is given back after a second, and is as it was."""
    queue.put(1, max_tries=1)
    began = time.monotonic()
    done = working(
        dibs, script=f"echo $DIBS_TRIES >> {dibs.folder}/tries; test $(wc -l < {dibs.folder}/tries) = 3 || exit 75"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (dibs.folder / "tries").read_text().split() == ["1", "1", "1"]
    assert time.monotonic() - began > 2.0, "nobody spins around it"
    assert queue.depth()[1:5] == (0, 0, 0, 0)


def test_a_command_that_is_not_there(dibs: Dibs, queue: library.Queue) -> None:
    """127 before any job is taken, and 126 for what cannot be executed."""
    queue.put(1)
    assert dibs("work", "q", "--", "no-such-command").returncode == 127
    assert dibs("work", "q", "--", str(dibs.folder)).returncode == 126
    assert dibs("claim", "s", "--ids", "-", "--", "no-such-command").returncode == 127
    assert queue.jobs("ready")[0].tries == 0


@pytest.mark.parametrize(
    "script, code", [("echo no line with an interpreter\n", 126), ("#!/no/such/interpreter\n", 127)]
)
def test_a_command_that_the_system_refuses(dibs: Dibs, queue: library.Queue, script: str, code: int) -> None:
    """It ends the worker with that code, as `--help` says, and costs no job a try: none is dead for that."""
    queue.put_many([1, 2, 3], max_tries=1)
    command = dibs.folder / "command"
    command.write_text(script)
    command.chmod(0o755)
    done = dibs("work", "q", "--workers", "2", "--idle", "0.3", "--", str(command))
    assert done.returncode == code
    assert set(done.stderr.splitlines()) == {
        f"dibs: cannot run {str(command)!r}: {os.strerror(errno.ENOEXEC if code == 126 else errno.ENOENT)}"
    }
    assert [job.tries for job in queue.jobs("ready")] == [0, 0, 0]


@pytest.mark.parametrize("words", [(), ("--workers", "0"), ("--workers", "101"), ("--idle", "-1"), ("--ttl", "0")])
def test_wrong_usage_is_64(dibs: Dibs, words: tuple[str, ...]) -> None:
    """One line, and nothing is run."""
    done = dibs("work", "q", *words, *(["--", "true"] if words else []))
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.count("\n") == 1
    assert dibs("--url", "memory://x", "work", "q", "--", "true").returncode == 64


def test_so_many_at_a_time(dibs: Dibs, queue: library.Queue) -> None:
    """--workers commands run at once, and every job is done once."""
    queue.put_many(range(40))
    done = working(dibs, "--workers", "4", script=f"cat >> {dibs.folder}/out; sleep 0.02")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(map(int, (dibs.folder / "out").read_text().split())) == list(range(40))
    queue.put_many(range(3))
    work = Work(dibs, "--workers", "2", "--drain-timeout", "0")
    assert len(work.pids(2)) == 2
    assert queue.depth()[1:4] == (1, 0, 2), "no more are claimed than are worked"
    work.process.send_signal(signal.SIGTERM)
    assert work.process.wait(PATIENCE_S) == 0


def test_groups_in_order(dibs: Dibs, queue: library.Queue) -> None:
    """With --group-limit 1, one of a group after the other, also with several workers."""
    for number in range(6):
        queue.put(number, group="g")
    script = f"read n; echo begin $n >> {dibs.folder}/out; sleep 0.05; echo end $n >> {dibs.folder}/out"
    assert working(dibs, "--workers", "3", "--group-limit", "1", "--idle", "1.5", script=script).returncode == 0
    expected = [f"{what} {number}" for number in range(6) for what in ("begin", "end")]
    assert (dibs.folder / "out").read_text().splitlines() == expected


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_signal_lets_commands_finish(dibs: Dibs, queue: library.Queue, signum: int, code: int) -> None:
    """Nothing more is taken; the job in hand is done; the exit code says whether it was Ctrl-C."""
    queue.put_many([1, 2])
    work = Work(dibs, script="sleep 1; echo finished")
    work.pids(1)
    work.process.send_signal(signum)
    out, err = work.process.communicate(timeout=PATIENCE_S)
    assert (work.process.returncode, out, err) == (code, "finished\n", "")
    (left,) = queue.jobs("ready")
    assert (left.payload, left.tries) == (2, 0)


def test_who_does_not_finish_is_stopped_and_given_back(dibs: Dibs, queue: library.Queue) -> None:
    """After the drain time the group gets TERM and then KILL; the job costs no try."""
    queue.put(1)
    work = Work(dibs, "--drain-timeout", "1", "--grace", "0.5", script="trap '' TERM; sleep 60 & wait; wait; sleep 60")
    (pid,) = work.pids(1)
    work.process.send_signal(signal.SIGTERM)
    _out, err = work.process.communicate(timeout=PATIENCE_S)
    assert work.process.returncode == 0
    assert "given back" in err
    assert not alive(pid)
    (job,) = queue.jobs("ready")
    assert job.tries == 0


def test_a_second_signal_does_not_wait(dibs: Dibs, queue: library.Queue) -> None:
    """Commands are stopped at once, and their jobs given back."""
    queue.put(1)
    work = Work(dibs)
    (pid,) = work.pids(1)
    began = time.monotonic()
    work.process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two signals at once may be told as one
    work.process.send_signal(signal.SIGINT)
    assert work.process.wait(PATIENCE_S) == 130
    assert time.monotonic() - began < 10
    assert not alive(pid)
    assert queue.jobs("ready")[0].tries == 0


def test_a_killed_worker_takes_its_commands_with_it(dibs: Dibs, queue: library.Queue) -> None:
    """kill -9 of dibs: the commands die at once, and the jobs are handed out again a ttl later, with a try less."""
    queue.put(1)
    work = Work(dibs, "--ttl", "1.5", script="sleep 60 & wait")
    (pid,) = work.pids(1)
    work.process.kill()
    until(lambda: not alive(pid))
    done = working(dibs, "--idle", "4", script="echo try $DIBS_TRIES")
    assert done.stdout == "try 2\n"


def test_the_keeper_may_die_as_well(dibs: Dibs, queue: library.Queue) -> None:
    """When the process that looks after the commands is killed, they die, the jobs are given back, and dibs says so."""
    queue.put(1)
    work = Work(dibs, script="sleep 60 & wait")
    (pid,) = work.pids(1)
    (keeper,) = [pid for pid, name in dibs.processes().items() if name == "dibs-keeper"]
    os.kill(keeper, signal.SIGKILL)
    _out, err = work.process.communicate(timeout=PATIENCE_S)
    assert work.process.returncode == 71, err
    assert "looks after the commands" in err
    until(lambda: not alive(pid))  # it was killed, which takes its time on a busy machine
    until(lambda: queue.depth().ready == 1)


def test_a_paused_worker_loses_its_job_and_its_command(dibs: Dibs, queue: library.Queue) -> None:
    """While dibs is stopped nobody renews: the command is ended before another can have the job."""
    job = queue.put(1)
    work = Work(dibs, "--ttl", "1.5", "--grace", "0.2", script="sleep 60 & wait")
    (pid,) = work.pids(1)
    work.process.send_signal(signal.SIGSTOP)
    try:
        with queue.take(1, timeout=20) as batch:
            assert [won.id for won in batch.won] == [job]
            assert not alive(pid)
            batch.done()
    finally:
        work.process.send_signal(signal.SIGCONT)
        work.process.send_signal(signal.SIGTERM)
    _out, err = work.process.communicate(timeout=PATIENCE_S)
    assert work.process.returncode == 0
    assert "was lost" in err


def test_a_frozen_keeper_is_overruled(dibs: Dibs, queue: library.Queue) -> None:
    """When the keeper is stopped and the job is cancelled, dibs itself kills the command at its last moment."""
    job = queue.put(1)
    work = Work(dibs, "--ttl", "1.5", "--grace", "0.2")
    (pid,) = work.pids(1)
    (keeper,) = [pid for pid, name in dibs.processes().items() if name == "dibs-keeper"]
    os.kill(keeper, signal.SIGSTOP)
    queue.cancel(job)
    until(lambda: not alive(pid))
    os.kill(keeper, signal.SIGCONT)
    work.process.send_signal(signal.SIGTERM)
    assert work.process.wait(PATIENCE_S) == 0


def test_a_cancelled_job_stops_its_command(dibs: Dibs, queue: library.Queue) -> None:
    """At the next renewal; the worker goes on with the next job."""
    first, second = queue.put_many([1, 2])
    work = Work(dibs, "--ttl", "1.5", "--grace", "0.2", script="read n; test $n = 2 || sleep 60")
    (pid, *_) = work.pids(1)
    assert queue.cancel(first) == [first]
    work.pids(2)
    assert not alive(pid)
    until(lambda: queue.depth().ready + queue.depth().claimed == 0)
    work.process.send_signal(signal.SIGTERM)
    _out, err = work.process.communicate(timeout=PATIENCE_S)
    assert work.process.returncode == 0
    assert f"job {first} was stopped" in err
    assert queue.job(second) is None


def test_a_command_that_never_returns_loses_its_job(dibs: Dibs, queue: library.Queue) -> None:
    """With --max-hold it is stopped, and the try counts."""
    queue.put(1, max_tries=2)
    done = dibs("work", "q", "--ttl", "1", "--max-hold", "1", "--grace", "0.2", "--idle", "3", "--", "sleep", "60")
    assert done.returncode == 0
    (dead,) = queue.dead()
    assert (dead.tries, dead.error) == (2, "it did not end within --max-hold")


def test_jobs_wait_while_the_queue_is_paused(dibs: Dibs, queue: library.Queue) -> None:
    """A worker finds nothing, says why, and goes on after the pause."""
    queue.pause("OPS-7")
    queue.put(1)
    work = Work(dibs, script="exit 0")
    assert work.process.stderr is not None
    assert "OPS-7" in work.process.stderr.readline()
    time.sleep(0.5)  # for what must not happen: that it begins
    assert not work.begun.exists()
    queue.resume()
    work.pids(1)
    until(lambda: queue.depth().ready + queue.depth().claimed == 0)
    work.process.send_signal(signal.SIGTERM)
    _out, err = work.process.communicate(timeout=PATIENCE_S)
    assert (work.process.returncode, err) == (0, "")


def test_a_store_that_is_away_stops_the_command(dibs: Dibs, own_redis: RedisServer) -> None:
    """When nobody can renew, before another could have the job; the worker goes on when the store is back."""
    dibs.env["DIBS_URL"] = own_redis.url()
    assert dibs("put", "q", "1").returncode == 0
    once = dibs.folder / "once"
    work = Work(dibs, "--ttl", "1.5", "--grace", "0.2", script=f"test -e {once} || {{ touch {once}; sleep 60; }}")
    (pid,) = work.pids(1)
    until(once.exists)
    with own_redis.paused():
        until(lambda: not alive(pid))
    work.pids(2)
    until(lambda: json.loads(dibs("queues", "--json").stdout) == [])
    work.process.send_signal(signal.SIGTERM)
    _out, err = work.process.communicate(timeout=PATIENCE_S)
    assert work.process.returncode == 0, err
    assert "was stopped" in err


def test_a_store_that_is_not_there(dibs: Dibs) -> None:
    """Tried for as long as the patience says, told of at once; then 69, for whoever may start the worker again."""
    done = dibs("work", "q", "--", "true", env={**dibs.env, "DIBS_URL": "redis://127.0.0.1:1?patience=0.5"})
    away, end = done.stderr.splitlines()
    assert done.returncode == 69
    assert away.startswith("dibs: queue 'q': the store is away, trying again: ")
    assert end.startswith("dibs: Redis on 127.0.0.1:1: ")


def test_an_ignored_sigchld_is_no_error(dibs: Dibs, queue: library.Queue) -> None:
    """Where whoever started dibs ignored SIGCHLD, ended processes are collected all the same."""

    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    queue.put(1)
    done = dibs("work", "q", "--idle", "0", "--", "true", preexec_fn=ignore)
    assert (done.returncode, done.stderr) == (0, "")
    assert queue.depth()[1:5] == (0, 0, 0, 0)


# -- stderr that nobody reads ------------------------------------------------------------------------------------------


class Unread:
    """A pipe that nobody reads until the test does."""

    def __init__(self) -> None:
        self.read_fd, self.fd = os.pipe()

    def __enter__(self) -> "Unread":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.read_fd, self.fd):
            os.close(fd)

    def is_full(self) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return not poll.poll(0)


@pytest.fixture
def unread() -> Iterator[Unread]:
    with Unread() as pipe:
        yield pipe


def test_a_command_is_ended_in_time_though_nobody_reads(dibs: Dibs, queue: library.Queue, unread: Unread) -> None:
    """A paused dibs, and a stderr that is full: the command is ended before another can have the job."""
    job = queue.put(1)
    work = Work(dibs, "--ttl", "2", "--grace", "0.2", script="yes >&2 & wait", stderr=unread.fd)
    (pid,) = work.pids(1)
    until(unread.is_full)
    work.process.send_signal(signal.SIGSTOP)
    try:
        with queue.take(1, timeout=20) as batch:
            assert [won.id for won in batch.won] == [job]
            assert not alive(pid)
            batch.done()
    finally:
        work.process.send_signal(signal.SIGCONT)
        work.process.send_signal(signal.SIGTERM)
    assert work.process.wait(PATIENCE_S) == 0


def test_a_second_signal_does_not_wait_for_a_reader(dibs: Dibs, queue: library.Queue, unread: Unread) -> None:
    """Nobody reads stderr: commands are stopped all the same, their jobs given back, and dibs ends."""
    queue.put_many([1, 2])
    options = ("--workers", "2", "--drain-timeout", "10m")
    work = Work(dibs, *options, script="trap '' TERM; yes >&2", stderr=unread.fd)
    pids = work.pids(2)
    until(unread.is_full)
    work.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)  # two signals at once may be told as one
    work.process.send_signal(signal.SIGTERM)
    assert work.process.wait(PATIENCE_S) == 0
    assert not any(map(alive, pids))
    assert [job.tries for job in queue.jobs("ready")] == [0, 0]


def test_a_claim_ends_though_nobody_reads(dibs: Dibs, unread: Unread) -> None:
    """TERM ends the command, and dibs with it; the claims are free."""
    (dibs.folder / "ids").write_text("a\n")
    process = dibs.start("claim", "s", "--ids", "ids", "--", "sh", "-c", "yes >&2", stderr=unread.fd)
    until(unread.is_full)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 143
    assert dibs.holder("s/a") is None


def test_a_last_line_that_nobody_reads(dibs: Dibs, unread: Unread) -> None:
    """When dibs has only to say what went wrong, TERM ends it; also one that comes while it still cleans up."""
    (dibs.folder / "ids").write_text("a\n")
    begun = dibs.folder / "begun"
    script = f"echo $$ > {begun}; exec yes >&2"
    words = ("claim", "s", "--ids", "ids", "--ttl", "1", "--no-renew", "--", "sh", "-c", script)
    process = dibs.start(*words, stderr=unread.fd)
    pid = int(until(lambda: begun.exists() and begun.read_text()))
    until(lambda: not alive(pid))
    time.sleep(2.0)  # before it has noticed that, a signal is the command's
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == -signal.SIGTERM


def test_nothing_is_lost_for_a_slow_reader(dibs: Dibs, queue: library.Queue, unread: Unread) -> None:
    """What commands say arrives whole and in order, each before dibs says how it ended; the end of it is kept."""
    jobs = queue.put_many(range(12), max_tries=1)
    process = dibs.start(
        "work", "q", "--idle", "0", "--", "sh", "-c", "seq 1 5000 >&2; echo out; exit 3", stderr=unread.fd
    )
    until(unread.is_full)
    time.sleep(2.0)  # longer than dibs waits for a reader of its own lines when it is to end
    os.close(unread.fd)
    unread.fd = os.dup(unread.read_fd)
    said = b""
    while data := os.read(unread.read_fd, 8192):
        said += data
        time.sleep(0.005)
    numbers = "".join(f"{number}\n" for number in range(1, 5001))
    expected = "".join(f"{numbers}dibs: job {job} failed on try 1: exit code 3\n" for job in jobs)
    assert said.decode() == expected
    assert process.wait(PATIENCE_S) == 0
    errors = [job.error for job in queue.dead()]
    assert len(errors) == 12
    assert all(error and error.startswith("exit code 3\n") and error.endswith("\n5000") for error in errors)


def test_a_payload_that_a_frozen_keeper_does_not_read(dibs: Dibs, queue: library.Queue) -> None:
    """When the keeper is stopped, dibs goes on to look after the other commands, and hands it the payload later."""
    job = queue.put(1)
    script = f"test $DIBS_JOB_ID = {job} && exec sleep 60; wc -c >> {dibs.folder}/got"
    work = Work(dibs, "--workers", "2", "--ttl", "2", "--grace", "0.2", script=script)
    (pid,) = work.pids(1)
    (keeper,) = [pid for pid, name in dibs.processes().items() if name == "dibs-keeper"]
    os.kill(keeper, signal.SIGSTOP)
    queue.put(b"x" * 300_000)
    until(lambda: queue.depth().claimed == 2)
    assert queue.cancel(job) == [job]
    until(lambda: not alive(pid))
    os.kill(keeper, signal.SIGCONT)
    until(lambda: queue.depth().ready + queue.depth().claimed == 0)
    assert int((dibs.folder / "got").read_text()) == 300_000
    work.process.send_signal(signal.SIGTERM)
    assert work.process.wait(PATIENCE_S) == 0


def test_a_frozen_keeper_is_overruled_in_time(dibs: Dibs) -> None:
    """When the keeper is stopped, dibs itself kills the command before another can have the id."""
    (dibs.folder / "ids").write_text("a\n")
    ticker = (
        "import time\n"
        "with open('ticks', 'w', buffering=1) as file:\n"
        "    while True:\n"
        "        file.write(f'{time.clock_gettime(time.CLOCK_BOOTTIME):.6f}\\n')\n"
        "        time.sleep(0.001)\n"
    )
    words = ("claim", "s", "--ids", "ids", "--ttl", "3", "--no-renew", "--", sys.executable, "-c", ticker)
    process = dibs.start(*words)
    until(lambda: (dibs.folder / "ticks").exists() and (dibs.folder / "ticks").read_text())
    (keeper,) = [pid for pid, name in dibs.processes().items() if name == "dibs-keeper"]
    os.kill(keeper, signal.SIGSTOP)
    with library.connect(dibs.url) as client, client.lock("s/a", timeout=PATIENCE_S):
        entered = boot_now()
    assert float((dibs.folder / "ticks").read_text().rstrip("\n").rpartition("\n")[2]) < entered
    os.kill(keeper, signal.SIGCONT)
    assert process.wait(PATIENCE_S) == 76


@ROOT_ONLY
def test_a_command_of_another_user_is_not_said_to_be_stopped(dibs: Dibs, queue: library.Queue) -> None:
    """It cannot be signalled: dibs says so and waits for its end; the job was lost meanwhile."""
    job = queue.put(1)
    script = ANOTHER_USER.replace("select.select([0], [], [], 15)", "import time; time.sleep(8)")
    words = ("work", "q", "--ttl", "1.5", "--grace", "0.2", "--", sys.executable, "-c", script)
    process = dibs.start(*words, preexec_fn=without_kill)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "on\n"
    assert queue.cancel(job) == [job]
    assert "cannot be signalled and goes on" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "lost" in err
    assert "stopped" not in err


# -- claim -------------------------------------------------------------------------------------------------------------


def test_a_command_runs_on_what_was_won(dibs: Dibs) -> None:
    """The ids that others have are left out and written down; afterwards all are free; the code is the command's."""
    with library.connect(dibs.url) as client:
        with client.claims("orders", renew=True).take(["2", "4"]):
            words = [
                "claim",
                "orders",
                "--ids",
                "-",
                "--busy",
                "busy",
                "--json",
                "--",
                "sh",
                "-c",
                "echo $DIBS_SOURCE; cat; exit 3",
            ]
            done = dibs(*words, input="1\n2\n\n3\n4\n", stdin=None)
            assert (done.returncode, done.stdout) == (3, "orders\n1\n3\n")
            assert (dibs.folder / "busy").read_text() == "2\n4\n"
            assert json.loads(done.stderr) == {"won": 2, "busy": 2, "lost": 0, "exit_code": 3}
            all_busy = dibs("claim", "orders", "--ids", "-", "--", "echo", "never", input="2\n4\n", stdin=None)
            assert (all_busy.returncode, all_busy.stdout) == (75, "")
            assert all_busy.stderr == "dibs: others have all 2 of them\n"
        with client.claims("orders").take(["1", "2", "3", "4"]) as batch:
            assert len(batch) == 4


def test_a_command_runs_on_rows_that_keep_their_claims(dibs: Dibs) -> None:
    """With columns that `dibs schema --claims` prints, the rows are claimed where they stand; missing ones are told."""
    path = dibs.url.removeprefix("sqlite:///")
    words = ("claim", "event", "--ids", "-", "--columns", "incident", "--key", "code")
    with closing(sqlite3.connect(path, isolation_level=None)) as shop:
        shop.execute("CREATE TABLE incident (code TEXT UNIQUE)")
        shop.execute("INSERT INTO incident VALUES ('a'), ('b')")
        before = dibs(*words, "--", "cat", input="a\n", stdin=None)
        assert before.returncode == 78
        assert "dibs schema --claims incident" in before.stderr
        shop.executescript(dibs("schema", "--claims", "incident").stdout)
        done = dibs(*words, "--json", "--", "cat", input="a\nb\nc\n", stdin=None)
        assert (done.returncode, done.stdout) == (0, "a\nb\n")
        told = {"won": 2, "busy": 0, "lost": 0, "exit_code": 0, "without_row": 1}
        assert json.loads(done.stderr) == told
        assert shop.execute("SELECT DISTINCT dibs_token, dibs_claim FROM incident").fetchall() == [(1, None)]
    nothing = dibs(*words, "--", "echo", "never", input="x\n", stdin=None)
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert nothing.stderr == "dibs: incident has no row for the id\n"
    assert dibs("claim", "s", "--ids", "-", "--key", "code", "--", "cat", input="x\n", stdin=None).returncode == 64


def test_no_ids_are_no_work(dibs: Dibs) -> None:
    """The command is not run; wrong files and ids are told."""
    assert dibs("claim", "s", "--ids", "-", "--", "echo", "never", input="\n", stdin=None).stdout == ""
    (dibs.folder / "ids").write_text("a\nb\nc\n")
    assert dibs("claim", "s", "--ids", "ids", "--limit", "2", "--", "cat").stdout == "a\nb\n"
    assert dibs("claim", "s", "--ids", "no-such-file", "--", "cat").returncode == 64
    (dibs.folder / "ids").write_bytes(b"\xff\n")
    assert dibs("claim", "s", "--ids", "ids", "--", "cat").returncode == 64
    assert dibs("claim", "s", "--", "cat").returncode == 64


def test_a_lost_claim_stops_the_command(dibs: Dibs) -> None:
    """76, and before anybody else can have the id."""
    (dibs.folder / "ids").write_text("a\nb\n")
    begun = dibs.folder / "begun"
    words = ["claim", "s", "--ids", "ids", "--ttl", "1.5", "--", "sh", "-c", f"echo $$ > {begun}; sleep 60"]
    process = dibs.start(*words)
    pid = int(until(lambda: begun.exists() and begun.read_text()))
    token = dibs.holder("s/b")["fencing_token"]
    assert dibs("break", "s/b", "--token", str(token)).returncode == 0
    _out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 76, err
    assert "1 of 2 claims was lost" in err
    assert not alive(pid)
    with library.connect(dibs.url) as client, client.lock("s/a", timeout=0):
        pass


def test_signals_reach_the_command(dibs: Dibs) -> None:
    """TERM is the command's; its code is dibs's; the claims are free."""
    (dibs.folder / "ids").write_text("a\n")
    begun = dibs.folder / "begun"
    script = f"trap 'echo term; exit 9' TERM; echo $$ > {begun}; while :; do sleep 0.05; done"
    process = dibs.start("claim", "s", "--ids", "ids", "--", "sh", "-c", script)
    until(lambda: begun.exists() and begun.read_text())
    process.send_signal(signal.SIGTERM)
    out, _err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (9, "term\n")
    assert dibs.holder("s/a") is None


def test_what_a_command_left_behind_may_go_on_to_write(dibs: Dibs, queue: library.Queue) -> None:
    """A process that outlives its command writes to stderr as before, and holds nothing up."""
    queue.put_many([1, 2])
    script = f"(sleep 0.7; echo late >&2; touch {dibs.folder}/late-$DIBS_JOB_ID) & exit 0"
    done = working(dibs, "--idle", "1.5", script=script)
    assert done.returncode == 0
    assert done.stderr == "late\nlate\n"
    assert len(list(dibs.folder.glob("late-*"))) == 2


def test_a_worker_in_python(dibs: Dibs, queue: library.Queue) -> None:
    """Python's own standard streams, a traceback as the error."""
    queue.put({"n": 2}, max_tries=1)
    script = "import json, sys; print(json.load(sys.stdin)['n'] * 21); raise ValueError('after the deed')"
    done = dibs("work", "q", "--idle", "0.3", "--", sys.executable, "-c", script)
    assert done.stdout == "42\n"
    error = queue.dead()[0].error
    assert error is not None
    assert error.endswith("ValueError: after the deed")


def test_the_same_on_a_server(dibs: Dibs, redis_url: str) -> None:
    """The commands are the same for a store on the network: Redis, as an example."""
    dibs.env["DIBS_URL"] = redis_url
    put = dibs("put", "q", "--lines", input="1\n2\n3\n", stdin=None)
    assert (put.returncode, put.stdout) == (0, "Put 3 jobs.\n"), put.stderr
    job = json.loads(dibs("take", "q", "--ttl", "60").stdout)
    assert job["payload"] == 1
    assert dibs("done", "q", str(job["id"]), "--token", str(job["token"])).returncode == 0
    assert dibs("done", "q", str(job["id"]), "--token", str(job["token"])).returncode == 76
    done = working(dibs, "--workers", "2", script="read n; test $n = 2 || { echo never >&2; exit 1; }")
    assert done.returncode == 0
    (failed,) = json.loads(dibs("jobs", "q", "--json").stdout)
    assert (failed["payload"], failed["error"]) == (3, "exit code 1\nnever")
    work = Work(dibs, script="sleep 60 & wait")
    (pid,) = work.pids(1)
    work.process.kill()
    until(lambda: not alive(pid))
