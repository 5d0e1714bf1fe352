"""``dibs run``: the command runs only while the lease is trusted, with real signals, kills and pauses."""

import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dibs.cli.guard import out_of_reach, send
from dibs.clock import boot_now
from tests.command_line import DIBS, PATIENCE_S, Dibs, until

# For scripts with traps, which a shell runs between two commands.
FOR_EVER = "while :; do sleep 0.05; done"

# Writes the boot clock into a file every millisecond: shows until when it ran. Ends by KILL only.
TICKER = """
import signal, sys, time
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, lambda signum, frame: print("signal", signum, flush=True))
with open(sys.argv[1], "w", buffering=1) as file:
    while True:
        file.write(f"{time.clock_gettime(time.CLOCK_BOOTTIME):.6f}\\n")
        time.sleep(0.001)
"""


class Ticker:
    """A command that ignores TERM, and its child that does the same; both say when they last ran."""

    def __init__(self, dibs: Dibs, name: str, *options: str) -> None:
        self.paths = [dibs.folder / f"ticks-{name}-{role}" for role in ("command", "grandchild")]
        script = dibs.folder / "ticker.py"
        script.write_text(TICKER)
        commands = [f"{sys.executable} {script} {path}" for path in self.paths]
        self.wrapper = dibs.start("run", name, *options, "--", "sh", "-c", f"{commands[1]} & exec {commands[0]}")
        until(lambda: self.wrapper.poll() is not None or all(p.exists() and p.read_text() for p in self.paths))
        assert self.wrapper.poll() is None, self.wrapper.communicate()

    def last(self) -> float:
        """The last moment at which either of the two ran."""
        return max(float(path.read_text().rstrip("\n").rpartition("\n")[2]) for path in self.paths)


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def state(pid: int) -> str:
    """R, S, T, Z … of the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- the first process of a container ----------------------------------------------------------------------------------

# What the first process of a container is, without the right to make one: what nobody handles does nothing to it.
FIRST = """
import os, sys
import dibs.cli.ctrl_c as ctrl_c
ctrl_c.FIRST_PROCESS = os.getpid()
from dibs.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [("wait", "x"), ("take", "q", "--timeout", "1m"), ("top", "--json")])
def test_term_ends_what_waits_as_the_first_process(dibs: Dibs, words: tuple[str, ...]) -> None:
    """Where SIGTERM has no default action it ends the command all the same, with 143 and no word."""
    dibs.start_holder("x")
    waiting = subprocess.Popen(
        [sys.executable, "-c", FIRST, *words], env=dibs.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        handled = 1 << signal.SIGTERM - 1
        status = Path(f"/proc/{waiting.pid}/status")
        until(lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & handled)
        waiting.terminate()
        _out, err = waiting.communicate(timeout=PATIENCE_S)
        assert (waiting.returncode, err) == (143, b"")
    finally:
        waiting.kill()
        waiting.communicate()


# -- modules that are loaded late --------------------------------------------------------------------------------------

# A signal comes while a module is being loaded: raised there, it might leave the import system locked.
LOADING = """
import sys, time
{begin}
try:
    {block}
        import loaded_late
        end = time.monotonic() + {patience}
        while time.monotonic() < end:
            time.sleep(0.05)  # short, as one that a signal comes just before is not ended by it
except {error}:
    print("interrupted", hasattr(sys.modules.get("loaded_late"), "whole"))
"""
LOADED_LATE = "import os, signal; os.kill(os.getpid(), signal.SIGINT); sum(range(1000)); whole = True"


@pytest.mark.parametrize(
    "begin, block, error",
    [
        ("from dibs.cli.ctrl_c import heed_ctrl_c; heed_ctrl_c()", "if True:", "KeyboardInterrupt"),
        ("from dibs.cli.signals import Interrupted, Signals; signals = Signals()", "with signals:", "Interrupted"),
    ],
)
def test_what_is_being_loaded_is_not_interrupted(tmp_path: Path, begin: str, block: str, error: str) -> None:
    (tmp_path / "loaded_late.py").write_text(LOADED_LATE)
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\n" + LOADING
    done = subprocess.run(
        [sys.executable, "-c", program.format(begin=begin, block=block, error=error, patience=PATIENCE_S)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.stdout, done.stderr) == ("interrupted True\n", "")


# -- the wrapper dies or stands still ----------------------------------------------------------------------------------


def test_kill_9_of_the_wrapper_kills_the_whole_group(dibs: Dibs) -> None:
    """The command and what it started die at once, TERM or no TERM; the name is free a ttl later, by itself."""
    ticker = Ticker(dibs, "x", "--ttl", "2")
    os.kill(ticker.wrapper.pid, signal.SIGKILL)
    killed = boot_now()
    until(lambda: not dibs.processes(), 5.0)
    assert ticker.last() < killed + 0.5
    assert dibs("run", "x", "--nowait", "--", "true").returncode == 75, "its ttl is not over yet"
    assert dibs("run", "x", "--", "true").returncode == 0
    assert boot_now() < killed + 2 + 2


def test_kill_9_of_the_wrapper_while_it_waits(dibs: Dibs) -> None:
    """Nothing is left of a run that was killed before its turn, and the command never runs."""
    holder = dibs.start_holder("x")
    waiter = dibs.start("run", "x", "--", "touch", "ran")
    until(lambda: dibs.holder("x")["waiting"] == 1)
    waiter.kill()
    waiter.wait()
    holder.terminate()
    until(lambda: not dibs.processes())
    assert not (dibs.folder / "ran").exists()


def test_kill_9_of_wrapper_and_guard_at_once(dibs: Dibs) -> None:
    """Even ``pkill -9 dibs``, which takes the guard too, takes the command along (on Linux)."""
    holder = dibs.start_holder("x", body="exec sleep 60")
    guard = dibs.guard_pid()
    os.kill(guard, signal.SIGSTOP)  # so that it can do nothing in the moment between the two
    os.kill(holder.pid, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    until(lambda: not alive(holder.command_pid))


def test_a_paused_wrapper_does_not_outlive_its_lease(dibs: Dibs) -> None:
    """kill -STOP longer than the ttl: the command is dead before another may enter; after -CONT the run exits 76."""
    ticker = Ticker(dibs, "x", "--ttl", "2")
    os.kill(ticker.wrapper.pid, signal.SIGSTOP)
    other = dibs("run", "x", "--", sys.executable, "-c", "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME))")
    assert other.returncode == 0, other
    assert ticker.last() < float(other.stdout)
    assert ticker.wrapper.poll() is None
    os.kill(ticker.wrapper.pid, signal.SIGCONT)
    output, errors = ticker.wrapper.communicate()
    assert ticker.wrapper.returncode == 76
    assert "signal 15" in output, "TERM came before KILL"
    assert errors.startswith("dibs: the command was stopped: lost 'x' (token 1): ")
    assert errors.count("\n") == 1


def test_a_short_pause_does_no_harm(dibs: Dibs) -> None:
    """A pause that ends before anybody had to act is not noticed."""
    holder = dibs.start_holder("x", "--ttl", "20", body="sleep 2; exit 3")
    os.kill(holder.pid, signal.SIGSTOP)
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.wait() == 3
    assert holder.stderr is not None
    assert holder.stderr.read() == ""


def test_a_pause_that_the_guard_noticed(dibs: Dibs) -> None:
    """Once the guard has sent TERM the run has failed, also when the wrapper wakes up in time to renew."""
    holder = dibs.start_holder("x", "--ttl", "4", traps='trap "echo told; exit 0" TERM', body=FOR_EVER)
    assert holder.stdout is not None
    os.kill(holder.pid, signal.SIGSTOP)
    assert holder.stdout.readline() == "told\n"
    os.kill(holder.pid, signal.SIGCONT)
    assert holder.wait() == 76


# -- the lease is lost -------------------------------------------------------------------------------------------------


def test_a_broken_lease_stops_the_command(dibs: Dibs) -> None:
    """The holder hears of the break at its next renewal: TERM, time to clean up, and exit 76."""
    traps = 'trap "echo cleaning up; sleep 0.1; echo done; exit 0" TERM'
    holder = dibs.start_holder("x", "--ttl", "3", traps=traps, body=FOR_EVER)
    assert dibs("break", "x", "--token", "1").returncode == 0
    output, errors = holder.communicate()
    assert holder.returncode == 76
    assert output == "cleaning up\ndone\n"
    last = errors.splitlines()[-1]  # before it, the shell tells what became of its sleep
    assert last.startswith("dibs: the command was stopped: lost 'x' (token 1): the store no longer knows")


def test_a_loss_that_is_noticed_at_the_end(dibs: Dibs) -> None:
    """A command that succeeds, but whose lease somebody had taken before it ended, exits 76."""
    holder = dibs.start_holder("x", body="until test -e go; do sleep 0.05; done")
    assert dibs("break", "x", "--token", "1", "--now").returncode == 0
    (dibs.folder / "go").touch()
    _output, errors = holder.communicate()
    assert holder.returncode == 76
    assert errors.startswith("dibs: the command ended with code 0, but the lease on 'x'")
    assert errors.count("\n") == 1


def test_a_command_that_ignores_term_is_killed_in_time(dibs: Dibs) -> None:
    """TERM first, then KILL to the whole group, and all that before the name is free for others."""
    ticker = Ticker(dibs, "x", "--ttl", "3", "--grace", "10m")
    broken = boot_now()
    assert dibs("break", "x", "--token", "1").returncode == 0
    other = dibs("run", "x", "--", sys.executable, "-c", "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME))")
    output, _errors = ticker.wrapper.communicate()
    assert ticker.wrapper.returncode == 76
    assert "signal 15" in output
    assert ticker.last() < float(other.stdout)
    assert float(other.stdout) < broken + 3 + 2


def test_the_grace_is_respected(dibs: Dibs) -> None:
    """A command that ignores TERM gets KILL after --grace, also when the lease would be trusted for longer."""
    ticker = Ticker(dibs, "x", "--ttl", "6", "--grace", "200ms")
    assert dibs("break", "x", "--token", "1").returncode == 0
    assert ticker.wrapper.wait() == 76
    assert dibs("run", "x", "--nowait", "--", "true").returncode == 75, "it was over before the lease was"


def test_a_store_that_cannot_be_written(dibs: Dibs) -> None:
    """Renewals fail for too long: TERM while there is still trust, KILL at its end at the latest, exit 76."""
    ticker = Ticker(dibs, "x", "--ttl", "3")
    other = sqlite3.connect(dibs.folder / "locks.db", isolation_level=None, timeout=30)
    try:
        other.execute("BEGIN IMMEDIATE")
        (expires,) = other.execute("SELECT expires_boot FROM dibs_lease").fetchone()
        output, errors = ticker.wrapper.communicate()
    finally:
        other.close()
    assert ticker.wrapper.returncode == 76
    assert "signal 15" in output
    assert errors.startswith("dibs: the command was stopped: 'x' could not be renewed and is lost in 0.")
    assert errors.count("\n") == 1
    assert ticker.last() < expires


def test_max_hold(dibs: Dibs) -> None:
    """--max-hold stops the command before that time is over."""
    started = boot_now()
    done = dibs("run", "x", "--max-hold", "1500ms", "--", "sleep", "60")
    assert done.returncode == 76
    assert boot_now() < started + 10
    assert done.stderr == "dibs: the command was stopped: it has held 'x' for as long as --max-hold lets it\n"
    assert dibs("run", "x", "--timeout", "5", "--", "true").returncode == 0


def test_the_guard_dies(dibs: Dibs) -> None:
    """Without its guard the command would survive a kill -9 of the wrapper: it is stopped as for a loss."""
    holder = dibs.start_holder("x", traps='trap "echo told; exit 0" TERM', body=FOR_EVER)
    os.kill(dibs.guard_pid(), signal.SIGKILL)
    output, errors = holder.communicate()
    assert holder.returncode == 76
    assert output == "told\n"
    assert errors.endswith("dibs: the command was stopped: the process that would end it if dibs were killed is gone\n")
    assert dibs.holder("x") is None, "it was still held, so it was given back"


def test_the_guard_holds_nothing_open(dibs: Dibs) -> None:
    """The guard has its pipe and /dev/null; it is in a session of its own and blocks what can be blocked."""
    holder = dibs.start_holder("x")
    guard = dibs.guard_pid()
    folder = Path(f"/proc/{guard}/fd")
    until(lambda: len(list(folder.iterdir())) == 4)
    files = sorted(os.readlink(fd) for fd in folder.iterdir())
    assert files[:3] == ["/dev/null"] * 3
    assert files[3].startswith("pipe:")
    assert os.getsid(guard) == guard
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR1):
        os.kill(guard, signum)
    holder.terminate()
    assert holder.wait() == 143


# -- commands of another user ------------------------------------------------------------------------------------------

# As a command behind sudo, for a dibs that may not signal it.
ANOTHER_USER = "import os, select; os.setuid(65534); print('on', flush=True); select.select([0], [], [], 15)"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a command as another user")


def without_kill() -> None:
    """Root may signal everybody by a capability; sudo takes it from nobody, who never had it."""
    ctypes.CDLL(None).prctl(24, 5)  # PR_CAPBSET_DROP, CAP_KILL


def test_who_may_not_be_signalled_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of another user is no group that is gone."""

    def refuse(group: int, signum: int) -> None:
        raise PermissionError

    def miss(group: int, signum: int) -> None:
        raise ProcessLookupError

    own = os.getpgrp()
    assert (send(own, 0), out_of_reach(own)) == (True, False)
    monkeypatch.setattr(os, "killpg", refuse)
    assert (send(own, 0), out_of_reach(own)) == (True, True)
    monkeypatch.setattr(os, "killpg", miss)
    assert (send(own, 0), out_of_reach(own)) == (False, False)


@ROOT_ONLY
def test_a_command_of_another_user_is_not_said_to_be_stopped(dibs: Dibs) -> None:
    """dibs says at once that it cannot be signalled and goes on, and at its end that the lease was lost: 76."""
    words = ("run", "x", "--ttl", "3", "--", sys.executable, "-c", ANOTHER_USER)
    wrapper = dibs.start(*words, stdin=subprocess.PIPE, preexec_fn=without_kill)
    assert wrapper.stdout is not None
    assert wrapper.stderr is not None
    assert wrapper.stdout.readline() == "on\n"
    assert dibs("break", "x", "--token", "1").returncode == 0
    said = wrapper.stderr.readline()
    assert said.startswith(
        "dibs: the command runs as another user: it cannot be signalled and goes on. Put sudo before"
    )
    assert wrapper.poll() is None
    _output, errors = wrapper.communicate("\n")
    assert wrapper.returncode == 76
    assert errors.startswith("dibs: the command went on to its end as another user: lost 'x' (token 1): ")
    assert errors.count("\n") == 1


@ROOT_ONLY
def test_a_signal_that_does_not_reach_the_command(dibs: Dibs) -> None:
    """It is told once; the exit code is the command's own."""
    words = ("run", "x", "--", sys.executable, "-c", ANOTHER_USER)
    wrapper = dibs.start(*words, stdin=subprocess.PIPE, preexec_fn=without_kill)
    assert wrapper.stdout is not None
    assert wrapper.stderr is not None
    assert wrapper.stdout.readline() == "on\n"
    wrapper.terminate()
    assert "cannot be signalled" in wrapper.stderr.readline()
    wrapper.terminate()
    assert wrapper.communicate("\n") == ("", "")
    assert wrapper.returncode == 0


@ROOT_ONLY
def test_what_runs_on_as_another_user_behind_a_stopped_command(dibs: Dibs) -> None:
    """A shell is stopped, and what it had started as another user is not: dibs says so."""
    script = '"$0" -c "$1" & wait'
    words = ("run", "x", "--ttl", "3", "--grace", "0.2", "--", "sh", "-c", script)
    command = ANOTHER_USER.replace("select.select([0], [], [], 15)", "import time; time.sleep(8)")
    wrapper = dibs.start(*words, sys.executable, command, preexec_fn=without_kill)
    assert wrapper.stdout is not None
    assert wrapper.stderr is not None
    assert wrapper.stdout.readline() == "on\n"
    assert dibs("break", "x", "--token", "1").returncode == 0
    assert wrapper.wait(PATIENCE_S) == 76
    said = wrapper.stderr.read().splitlines()[-1]
    assert said.startswith("dibs: the command was stopped, but not what it runs as another user: lost 'x' (token 1): ")
    until(lambda: not dibs.processes())


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_waiting(dibs: Dibs, signum: signal.Signals, code: int) -> None:
    """Ctrl-C, TERM and HUP end the waiting without a word, leave the line, and run nothing."""
    holder = dibs.start_holder("x")
    waiter = dibs.start("run", "x", "--", "touch", "ran")
    until(lambda: dibs.holder("x")["waiting"] == 1)
    waiter.send_signal(signum)
    assert waiter.communicate() == ("", "")
    assert waiter.returncode == code
    assert dibs.holder("x")["waiting"] == 0
    holder.terminate()
    holder.wait()
    assert not (dibs.folder / "ran").exists()


# In the order in which they are: help needs the first three.
LOADED = ("dibs.cli", "argparse", "dibs.errors", "dibs.client", "dibs.session")
INTERRUPTED_IMPORT = """
import os, signal, sys
import dibs.__main__

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "MODULE":
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # Python's handlers run between instructions
                pass

sys.meta_path.insert(0, Interrupt())
sys.argv = ["dibs", *"COMMAND".split()]
sys.exit(dibs.__main__.main())
"""


@pytest.mark.parametrize(
    "command, module",
    [
        *((command, module) for command in ("run x -- touch ran", "ls") for module in LOADED),
        *(("--help", module) for module in LOADED[:3]),
    ],
)
def test_ctrl_c_while_dibs_is_loaded(dibs: Dibs, command: str, module: str) -> None:
    """It ends without a word, whatever is being imported, and a shell says 130; where it is ignored, it is ignored."""
    program = INTERRUPTED_IMPORT.replace("MODULE", module).replace("COMMAND", command)
    for before, code in (("", "130"), ("trap '' INT; ", "0")):
        shell = f'{before}"$0" -c "$1"; echo "code $?"'
        done = subprocess.run(
            ["sh", "-c", shell, sys.executable, program], env=dibs.env, cwd=dibs.folder, capture_output=True, text=True
        )
        assert done.stderr == ""
        assert done.stdout.endswith(f"code {code}\n"), done.stdout
        assert (dibs.folder / "ran").exists() == (code == "0" and command.startswith("run"))


def test_a_signal_at_any_moment_of_the_start(dibs: Dibs) -> None:
    """Whenever TERM comes, nothing is left held, running or unexplained."""
    # TERM may come in the middle of an import, which then leaves a file to the garbage collector.
    dibs.env["PYTHONWARNINGS"] = "error,ignore::ResourceWarning"
    for delay_ms in range(0, 200, 5):
        wrapper = dibs.start("run", "x", "--", "sleep", "60")
        time.sleep(delay_ms / 1000)
        wrapper.terminate()
        output, errors = wrapper.communicate()
        # The latter before dibs has come to its own first lines.
        assert wrapper.returncode in {143, -signal.SIGTERM}
        assert (output, errors) == ("", "")
        until(lambda: not dibs.processes())
    assert dibs("run", "x", "--nowait", "--", "true").returncode == 0


INTERRUPTED_CLEANING = """
import os, signal, sys
import dibs.__main__
from MODULE import CLASS

def clean_up(self, step=CLASS.STEP):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):  # Python's handlers run between instructions
        pass
    step(self)

CLASS.STEP = clean_up
sys.argv = ["dibs", *WORDS]
dibs.__main__.main()
"""


GIVING_UP = (
    (["run", "x", "--nowait", "--", "touch", "ran"], 75, "command Command end"),
    (["run", "x", "--nowait", "--", "touch", "ran"], 75, "guard Guard close"),
    (["elect", "x", "--standby-max", "0", "--", "touch", "ran"], 75, "guard Guard close"),
    (["--url", "redis://127.0.0.1:1", "claim", "s", "--ids", "ids", "--", "touch", "ran"], 69, "keeper Keeper close"),
)


@pytest.mark.parametrize("words, code, step", GIVING_UP)
def test_a_signal_while_dibs_gives_up(dibs: Dibs, words: list[str], code: int, step: str) -> None:
    """TERM at a step of the clean-up: the exit code is that of giving up, nothing is said twice, nothing is left."""
    (dibs.folder / "ids").write_text("1\n")
    holder = dibs.start_holder("x")
    file, class_, method = step.split()
    program = INTERRUPTED_CLEANING.replace("MODULE", f"dibs.cli.{file}").replace("CLASS", class_)
    program = program.replace("STEP", method).replace("WORDS", repr(words))
    done = subprocess.run(
        [sys.executable, "-c", program], env=dibs.env, cwd=dibs.folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1
    assert not (dibs.folder / "ran").exists()
    holder.terminate()
    holder.wait()
    until(lambda: not dibs.processes())


def test_a_blocked_sigchld_delays_nothing(dibs: Dibs) -> None:
    """Where whoever started dibs had blocked SIGCHLD, the end of the command is heard of all the same."""

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})

    for words in (("run", "x"), ("elect", "y")):
        began = boot_now()
        done = dibs(*words, "--ttl", "10m", "--", "grep", "SigBlk", "/proc/self/status", preexec_fn=block)
        assert boot_now() < began + 30, "an eighth of the ttl is 75 s"
        assert done.returncode == 0
        assert int(done.stdout.split()[1], 16) == 1 << (signal.SIGCHLD - 1), "the command has it as it was"


RECORDER = """
import os, signal, sys
def note(signum, frame):
    print(sys.argv[1], signal.Signals(signum).name, flush=True)
for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "CONT"):
    signal.signal(getattr(signal, "SIG" + name), note)
print(sys.argv[1], "ready", flush=True)
while True:
    signal.pause()
"""


def test_signals_reach_the_whole_group(dibs: Dibs) -> None:
    """TERM, INT, HUP, QUIT, USR1, USR2 and CONT are passed on to the command and to what it started."""
    (dibs.folder / "recorder.py").write_text(RECORDER)
    recorder = f"{sys.executable} recorder.py"
    with open(dibs.folder / "notes", "w") as notes:
        wrapper = dibs.start("run", "x", "--", "sh", "-c", f"{recorder} a & exec {recorder} b", stdout=notes)
    noted = lambda: set((dibs.folder / "notes").read_text().splitlines())  # noqa: E731
    until(lambda: {"a ready", "b ready"} <= noted())
    for name in ("SIGUSR1", "SIGHUP", "SIGUSR2", "SIGQUIT", "SIGCONT", "SIGINT", "SIGTERM"):
        wrapper.send_signal(getattr(signal, name))
        until(lambda: {f"a {name}", f"b {name}"} <= noted())  # noqa: B023 - called before the next turn
    assert wrapper.poll() is None
    wrapper.kill()


def test_ctrl_c_while_running(dibs: Dibs) -> None:
    """An INT that ends the command is 130; one that the command handles leaves the code to it."""
    holder = dibs.start_holder("x")
    holder.send_signal(signal.SIGINT)
    assert holder.communicate() == ("", "")
    assert holder.returncode == 130
    holder = dibs.start_holder("x", traps='trap "exit 5" INT', body=FOR_EVER)
    holder.send_signal(signal.SIGINT)
    assert holder.wait() == 5
    assert dibs.holder("x") is None


def test_a_command_that_was_stopped_by_hand(dibs: Dibs) -> None:
    """kill -STOP of the command stops nothing else: the lease is renewed, and -CONT lets it go on."""
    holder = dibs.start_holder("x", "--ttl", "1", body="exec sleep 3")
    os.kill(holder.command_pid, signal.SIGSTOP)
    until(lambda: state(holder.command_pid) == "T")
    time.sleep(1.5)
    assert dibs.holder("x")["fencing_token"] == 1
    os.kill(holder.command_pid, signal.SIGCONT)
    assert holder.wait() == 0


def test_a_stopped_command_is_ended_too(dibs: Dibs) -> None:
    """A command that is stopped when its lease is lost is continued to hear TERM."""
    holder = dibs.start_holder("x", "--ttl", "3", traps='trap "echo told; exit 0" TERM', body=FOR_EVER)
    os.kill(holder.command_pid, signal.SIGSTOP)
    dibs("break", "x", "--token", "1")
    assert holder.communicate()[0] == "told\n"
    assert holder.returncode == 76


# -- terminals ---------------------------------------------------------------------------------------------------------


class Terminal:
    """A terminal with a shell script on it, in a session whose leader is the shell."""

    def __init__(self, dibs: Dibs, script: str) -> None:
        self.fd, slave = os.openpty()
        name = os.ttyname(slave)
        # The leader of a session without a terminal that opens one gets it as its own.
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec bash --norc --noprofile -c "$1" < "$0" > "$0" 2>&1', name, script],
            env={**dibs.env, "DIBS": " ".join(DIBS), "TERM": "xterm"},
            cwd=dibs.folder,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""
        os.set_blocking(self.fd, False)

    def sees(self, text: str) -> bool:
        try:
            self._seen += os.read(self.fd, 65536).decode()
        except BlockingIOError:
            pass
        except OSError:  # EIO: everybody has closed it
            pass
        return text in self._seen

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(dibs: Dibs) -> Iterator[Any]:
    made: list[Terminal] = []

    def make(script: str) -> Terminal:
        made.append(Terminal(dibs, script))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_command_gets_the_keyboard(terminal: Any) -> None:
    """A command can read from the terminal and be ended by Ctrl-C; the shell has its terminal back afterwards."""
    shell = terminal(
        "$DIBS run x -- bash -c 'read line; echo got $line; sleep 60'; echo code $?; read line; echo shell $line"
    )
    shell.type("one\n")
    until(lambda: shell.sees("got one"))
    shell.type("\x03")
    until(lambda: shell.sees("code 130"))
    shell.type("two\n")
    until(lambda: shell.sees("shell two"))


def test_in_a_pipeline_the_reader_keeps_the_keyboard(dibs: Dibs, terminal: Any) -> None:
    """In ``dibs run … | less`` it is less that reads from the terminal; Ctrl-C ends the command all the same."""
    shell = terminal("$DIBS run x -- sleep 60 | bash -c 'read line < /dev/tty; echo got $line; cat'")
    shell.type("one\n")
    until(lambda: shell.sees("got one"))
    shell.type("\x03")
    until(lambda: "sleep" not in dibs.processes().values())


def test_a_command_in_a_pipeline_may_ask_for_the_keyboard(terminal: Any) -> None:
    """It is given to a command that was stopped for wanting it."""
    shell = terminal("$DIBS run x -- bash -c 'read line < /dev/tty; echo got $line' | cat; echo code ${PIPESTATUS[0]}")
    shell.type("one\n")
    until(lambda: shell.sees("got one"))
    until(lambda: shell.sees("code 0"))


def test_ctrl_z_and_fg(dibs: Dibs, terminal: Any) -> None:
    """Ctrl-Z stops command and wrapper, the shell goes on; ``fg`` continues both."""
    shell = terminal(
        textwrap.dedent("""\
            set -m
            $DIBS run x -- bash -c 'echo started; read line; echo got $line; exit 4'
            echo stopped $?
            read line; echo shell $line
            fg
            echo code $?
        """)
    )
    until(lambda: shell.sees("started"))
    shell.type("\x1a")
    until(lambda: shell.sees("stopped 148"))
    shell.type("two\n")
    until(lambda: shell.sees("shell two"))
    shell.type("three\n")
    until(lambda: shell.sees("got three"))
    until(lambda: shell.sees("code 4"))


def test_ctrl_z_for_too_long(dibs: Dibs, terminal: Any) -> None:
    """A job that stays stopped longer than its lease lasts loses it: the command is ended, and fg shows 76."""
    shell = terminal(
        textwrap.dedent("""\
            set -m
            $DIBS run x --ttl 2 -- bash -c 'echo started; sleep 60'
            echo stopped $?
            read line
            fg
            echo code $?
        """)
    )
    until(lambda: shell.sees("started"))
    shell.type("\x1a")
    until(lambda: shell.sees("stopped 148"))
    assert dibs("run", "x", "--", "true").returncode == 0
    shell.type("\n")
    until(lambda: shell.sees("code 76"))


def test_ctrl_c_in_a_callback_is_not_forgotten() -> None:
    """Where Python can raise nothing, as in a callback of its import system, it shows Ctrl-C and goes on; dibs ends."""
    program = """
import os, signal, threading, weakref
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as dibs.__main__ has it
from argparse import Namespace
from dibs.cli import connect

class Thing:
    pass

def pressed(_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

with connect(Namespace(url="memory://x", namespace=None)):
    thing = Thing()
    watched = weakref.ref(thing, pressed)
    try:
        del thing
        threading.Event().wait(60)
    except KeyboardInterrupt:
        print("ended")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


FORGETFUL = """
import os, select, signal, sys, threading, weakref
import dibs.cli.signals
from dibs.cli.signals import PASSED_ON, Interrupted, Signals, later

class Thing:
    pass

def asked(_):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass

def slowly(ask):
    dibs.cli.signals.later = later
    later(ask)
    signal.pause()

what = sys.argv[1]
if what == "slow":
    dibs.cli.signals.later = slowly
signals = Signals()
try:
    with signals:
        thing = Thing()
        watched = weakref.ref(thing, asked)
        if what == "held":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        del thing
        if what != "held":
            threading.Event().wait(50)
        signals.collect()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        told = []
        while not told and select.select([signals.fd], [], [], 50)[0]:
            told = [number for number in signals.taken() if number in PASSED_ON]
        print("passed on", *told)
except Interrupted as interrupted:
    print("interrupted", interrupted.signum)
"""


@pytest.mark.parametrize("what, told", [("waiting", "interrupted"), ("slow", "interrupted"), ("held", "passed on")])
def test_a_signal_in_a_callback_is_not_forgotten(what: str, told: str) -> None:
    """A signal that comes where Python can raise nothing ends the waiting a moment later, or is for the command.

    Also where it comes again before it has been taken in.
    """
    done = subprocess.run([sys.executable, "-c", FORGETFUL, what], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{told} 15\n", "")
