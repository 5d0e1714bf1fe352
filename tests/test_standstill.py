"""A test that failed while the machine stood still, or as a server ended by itself, is run again, and only that."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.alone import MOST
from tests.command_line import until
from tests.standstill import WATCH, kept_from_running, moment

ROOT = Path(__file__).parent.parent
# The machine stands still, as far as the journal of the watchers tells.
FILE = """
import os, time, pytest

@pytest.fixture
def made(tmp_path):
    return tmp_path

def fails(name, stood, times):
    with open(name, "a") as file:
        file.write("x")
    if stood:
        now = time.monotonic()
        with open(os.environ["DIBS_TEST_STANDSTILLS"], "a") as file:
            file.write(f"{now - stood} {now + 0.001}\\n")
        time.sleep(0.01)
    if os.path.getsize(name) <= times:
        raise AssertionError("too late")

def test_once(made):
    time.sleep(0.6)
    fails("once", 0.6, 1)

def test_always(made):
    time.sleep(0.6)
    fails("always", 0.6, 9)

def test_awake(made):
    fails("awake", 0, 1)
"""


# What the host of this machine really takes is no part of it.
CALM = """
from pathlib import Path
from tests import standstill
standstill.STAT = Path("/nowhere")
"""
CRASH = """
import os, signal, pytest
from tests.servers.memcached import MemcachedServer

@pytest.fixture(scope="session")
def shared():
    with MemcachedServer() as server:
        yield server

@pytest.fixture
def own():
    with MemcachedServer() as server:
        yield server

def crash(server):
    with open("crashes", "a") as file:
        file.write("x")
    if os.path.getsize("crashes") in (1, 3):
        os.kill(server.process.pid, signal.SIGKILL)
    server.ask("version")

def test_shared(shared):
    crash(shared)

def test_own(own):
    crash(own)

def test_ended_on_purpose(own):
    own.kill()
    raise AssertionError("no")
"""


# Fails in a worker (of several at once), and by itself as often as it is told to.
CROWD = """
import os

def fails(name, alone):
    with open(name, "a") as file:
        file.write("x")
    crowded = "PYTEST_XDIST_WORKER" in os.environ
    assert not crowded and os.path.getsize(name) > 1 + alone, "too late"

def test_late():
    fails("late", 0)

def test_fine():
    pass
"""


def run_pytest(folder: Path, text: str, *more: str, passes: bool | None = None, name: str = "test_file.py") -> str:
    """What the tests of a file print, in a pytest with the hooks of ours; whether it passes."""
    (folder / name).write_text(text)
    (folder / "conftest.py").write_text(CALM)
    plugins = [part for name in ("standstill", "again", "alone") for part in ("-p", f"tests.{name}")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", "-q", *more, name],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = ran.stdout + ran.stderr
    assert passes in (None, ran.returncode == 0), printed
    return printed


@pytest.mark.parametrize("more", [(), ("-n", "1")], ids=["alone", "a worker"])
def test_what_failed_meanwhile_is_run_again(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Up to two times, with new fixtures; what failed on a machine that went on has failed."""
    printed = run_pytest(tmp_path, FILE, *more)
    assert "2 failed, 1 passed" in printed, printed
    assert "test_file.py::test_once: the machine stood still for 0.6 s; " in printed
    assert "AssertionError" in printed
    assert [len((tmp_path / name).read_text()) for name in ("once", "always", "awake")] == [2, 3, 1]


def test_what_took_too_long_is_not_run_again(tmp_path: Path) -> None:
    """Nothing would end it."""
    printed = run_pytest(tmp_path, FILE, "-k", "once", "-o", "timeout=60")
    assert "1 passed" in printed, printed
    (tmp_path / "once").unlink()
    printed = run_pytest(tmp_path, FILE, "-k", "once", "-o", "timeout=0.3")
    assert "1 failed" in printed, printed
    assert "Timeout" in printed


def test_what_failed_as_a_server_had_ended_is_run_again(tmp_path: Path) -> None:
    """Shared servers are started again for it; a server that the test itself ended is no excuse."""
    printed = run_pytest(tmp_path, CRASH)
    assert "1 failed, 2 passed" in printed, printed
    assert "FAILED test_file.py::test_ended_on_purpose" in printed
    for name in ("shared", "own"):
        assert f"test_file.py::test_{name}: memcached ended by itself; its log says at the end:" in printed
    assert len((tmp_path / "crashes").read_text()) == 4


def test_what_failed_in_the_crowd_is_run_by_itself(tmp_path: Path) -> None:
    """It has to pass three times; the run passes then, and shows what had failed."""
    printed = run_pytest(tmp_path, CROWD, "-n", "2", passes=True)
    assert "AssertionError: too late" in printed, printed
    assert "1 failed, 1 passed" in printed
    assert "test_file.py::test_late: failed beside others (see above), and passed 3 times by itself" in printed
    assert len((tmp_path / "late").read_text()) == 4


@pytest.mark.parametrize(
    "more, text, times",
    [
        (("-n", "2"), CROWD.replace('"late", 0', '"late", 1'), 2),  # fails by itself, too
        (("-n", "2", "-x"), CROWD, 1),  # some have not run
        (
            ("-n", "2", "-o", "timeout=3"),
            CROWD.replace("assert", "__import__('time').sleep(30)\n    assert"),
            1,
        ),  # it hung
        (("-n", "2"), CROWD.replace("assert", "not crowded or os._exit(1)\n    assert"), 1),  # its process ended
        (
            ("-n", "2"),
            CROWD + "".join(f"\ndef test_{n}():\n    fails('more', 0)\n" for n in range(MOST)),
            1,
        ),  # too many
        (("-n", "1"), CROWD, 1),  # there was no crowd
        ((), CROWD.replace("crowded =", "crowded = True or"), 1),
    ],
)
def test_what_fails_by_itself_fails(tmp_path: Path, more: tuple[str, ...], text: str, times: int) -> None:
    """Or when it hung, when it was among many, when not everything has run, or when nothing else did."""
    assert "failed" in run_pytest(tmp_path, text, *more, passes=False)
    assert len((tmp_path / "late").read_text()) == times


def test_what_nothing_may_make_fail_is_not_run_by_itself(tmp_path: Path) -> None:
    """Chaos and simulation."""
    printed = run_pytest(tmp_path, CROWD, "-n", "2", passes=False, name="test_chaos.py")
    assert "1 failed, 1 passed" in printed, printed
    assert len((tmp_path / "late").read_text()) == 1


def test_a_watcher_that_is_stopped_writes_it_down(tmp_path: Path) -> None:
    """From when to when, on the monotonic clock; and it ends with the one that started it."""
    journal = tmp_path / "journal"
    began = time.monotonic()
    watcher = subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCH, journal, "0.3"])
    try:

        def has_told() -> bool:
            time.sleep(0.5)  # it may not watch yet
            watcher.send_signal(signal.SIGSTOP)
            time.sleep(1)
            watcher.send_signal(signal.SIGCONT)
            return journal.exists() and journal.read_text().endswith("\n")

        until(has_told)
        start, end = map(float, journal.read_text().splitlines()[0].split())
        assert began < start < end - 0.3 < time.monotonic()
        others = Path(f"/proc/{watcher.pid}/task/{watcher.pid}/children").read_text().split()
    finally:
        watcher.kill()
        watcher.wait()
    until(lambda: not any(Path(f"/proc/{other}").exists() for other in others))


@pytest.mark.parametrize("stolen, said", [(6, ""), (300, "the machine's host took 31% of its time")])
def test_what_the_host_takes_is_told(monkeypatch: pytest.MonkeyPatch, stolen: int, said: str) -> None:
    """As the kernel counts it, for all processors."""
    monkeypatch.delenv("DIBS_TEST_STANDSTILLS", raising=False)
    before = moment("cpu  100 20 30 4000 50 0 60 700 9 9\ncpu0 1 1 1 1 1 1 1 1 1 1")
    after = moment(f"cpu  400 20 230 4150 60 0 60 {700 + stolen} 19 19\ncpu0 1 1 1 1 1 1 1 1 1 1")
    assert kept_from_running(before, after) == said


def test_this_machine_counts_or_does_not() -> None:
    """Nothing is stolen where the kernel counts nothing."""
    before = moment()
    assert moment().ticks >= before.ticks
    assert moment("cpu 0 0 0 0 0 0 0 0").ticks == 0
