"""``dibs run``: exit codes, environment, waiting and silence, with real processes and a real SQLite file."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.command_line import PATIENCE_S, Dibs, until

# -- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, code", [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("exit 255", 255)]
)
def test_the_exit_code_is_the_commands_own(dibs: Dibs, script: str, code: int) -> None:
    """The command's code, or 128+n when signal n ended it; dibs adds no word."""
    done = dibs("run", "x", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_success_is_silent_and_streams_are_the_commands(dibs: Dibs) -> None:
    """stdin, stdout and stderr go straight to the command, and nothing is added."""
    done = dibs("run", "x", "--", "sh", "-c", "cat; echo err >&2", input="hello\n", stdin=None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "err\n")


def test_a_command_that_is_not_there(dibs: Dibs) -> None:
    """127 and one line, without asking for the lock."""
    for command in ("no-such-command", "./nothing", ""):
        done = dibs("run", "x", "--", command)
        assert done.returncode == 127
        assert done.stderr == f"dibs: cannot run {command!r}: no such command\n"
    assert not (dibs.folder / "locks.db").exists()


def test_a_command_that_cannot_be_executed(dibs: Dibs) -> None:
    """126 for a folder, a file without the right bit, and a file the kernel refuses; 127 without its interpreter."""
    plain = dibs.folder / "plain"
    plain.write_text("echo hello\n")
    garbled = dibs.folder / "garbled"
    garbled.write_text("neither a script nor a program\n")
    garbled.chmod(0o755)
    orphan = dibs.folder / "orphan"
    orphan.write_text("#!/no/such/interpreter\n")
    orphan.chmod(0o755)
    for command, code in ((plain, 126), (dibs.folder, 126), (garbled, 126), (orphan, 127)):
        done = dibs("run", "x", "--", str(command))
        assert done.returncode == code
        assert done.stderr.startswith(f"dibs: cannot run {str(command)!r}: ")
        assert done.stderr.count("\n") == 1
    assert dibs.holder("x") is None


def test_commands_are_found_as_a_shell_finds_them(dibs: Dibs) -> None:
    """By $PATH, skipping what is not executable; arguments arrive untouched, also a second ``--``."""
    for folder, mode in (("a", 0o644), ("b", 0o755)):
        (dibs.folder / folder).mkdir()
        script = dibs.folder / folder / "tool"
        script.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@"\n')
        script.chmod(mode)
    dibs.env["PATH"] = f"{dibs.folder}/a:{dibs.folder}/b:{dibs.env['PATH']}"
    done = dibs("run", "x", "--", "tool", "a b", "--", "--ttl", "'$HOME'", "")
    assert done.stdout == f"{dibs.folder}/b/tool|a b|--|--ttl|'$HOME'||"


@pytest.mark.parametrize(
    "args",
    [
        ("run",),
        ("run", "x"),
        ("run", "x", "true"),
        ("run", "x", "--"),
        ("run", "--", "true"),
        ("run", "x", "y", "--", "true"),
        ("run", "x", "--slots", "0", "--", "true"),
        ("run", "x", "--slots", "1_0", "--", "true"),
        ("run", "x", "--slots", "٣", "--", "true"),
        ("run", "x", "--slots", "1" * 9000, "--", "true"),
        ("run", "x", "--info", "[" * 90_000, "--", "true"),
        ("run", "x", "--ttl", "soon", "--", "true"),
        ("run", "x", "--ttl", "-5", "--", "true"),
        ("run", "x", "--ttl", "nan", "--", "true"),
        ("run", "x", "--ttl", "0", "--", "true"),
        ("run", "x", "--ttl", "365d", "--", "true"),
        ("run", "x", "--ttl", "1e3", "--", "true"),
        ("run", "x", "--ttl", "5y", "--", "true"),
        ("run", "x", "--timeout", "5", "--nowait", "--", "true"),
        ("run", "x", "--on-busy", "wait", "--", "true"),
        ("run", "x", "--min-hold", "5", "--max-hold", "2", "--", "true"),
        ("run", "x", "--info", "{", "--", "true"),
        ("run", "x", "--info", "[1]", "--", "true"),
        ("run", "x", "--info", '{"a": "' + "b" * 5000 + '"}', "--", "true"),
        ("run", "", "--", "true"),
        ("run", "a\nb", "--", "true"),
        ("run", "é" * 127 + "xx", "--", "true"),
        ("run", b"\xff\xfe".decode("utf-8", "surrogateescape"), "--", "true"),
        ("--url", "nothing", "run", "x", "--", "true"),
        ("--url", "", "run", "x", "--", "true"),
        ("--url", "redis://\udcff/0", "run", "x", "--", "true"),
        ("--url", "redis://a..b/0", "run", "x", "--", "true"),
        ("put", "q", '"\udcff"'),
        ("top", "--json", "--interval", "9999999d"),
        ("--url", "oracle://host/db", "run", "x", "--", "true"),
        ("--url", "sqlite:////tmp/x.db?tabel=y", "run", "x", "--", "true"),
        ("--url", "memory://", "run", "x", "--", "true"),
        ("--namespace", "a b", "run", "x", "--", "true"),
    ],
)
def test_wrong_usage_is_64(dibs: Dibs, args: tuple[str, ...]) -> None:
    """Exit 64 and one line that begins with ``dibs:``."""
    done = dibs(*args)
    assert done.returncode == 64, done
    assert done.stdout == ""
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_no_database_is_78(dibs: Dibs) -> None:
    """Misconfigured is 78, and neither busy nor unreachable: no database, a folder, a file that cannot be made."""
    (dibs.folder / "text").write_text("this is not a database, and long enough to be looked at as one\n" * 20)
    for path in (dibs.folder / "text", dibs.folder, "/proc/dibs/locks.db"):
        done = dibs("--url", f"sqlite:///{path}", "run", "x", "--", "true")
        assert done.returncode == 78, done
        assert done.stderr.startswith("dibs: ")
        assert done.stderr.count("\n") == 1


def test_a_file_without_rights_is_78(dibs: Dibs) -> None:
    """A file that this user may not read, or not write, is misconfigured. Root is tried without its privileges."""

    def drop_privileges() -> None:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP

    assert dibs("run", "x", "--", "true").returncode == 0
    for mode in (0o000, 0o400):
        (dibs.folder / "locks.db").chmod(mode)
        done = dibs("run", "x", "--", "true", preexec_fn=drop_privileges)
        assert done.returncode == 78, done
        assert "locks.db" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_wrong_address_in_the_environment_is_78(dibs: Dibs) -> None:
    """A wrong $DIBS_URL is no fault of the command line; and its text is not shown, it may hold a password."""
    for url in ("oracle://app:hunter2@db/prod", "app:hunter2@db", "sqlite://app:hunter2@host:99999/x"):
        dibs.env["DIBS_URL"] = url
        done = dibs("run", "x", "--", "true")
        assert done.returncode == 78
        assert "hunter2" not in done.stderr
        assert done.stderr.startswith("dibs: $DIBS_URL: ")


# -- several at a time -------------------------------------------------------------------------------------------------


def test_so_many_run_at_a_time(dibs: Dibs) -> None:
    """With --slots 2 two commands run at once, each with a number of its own; a third is told that it is busy."""
    numbers = dibs.folder / "numbers"
    first = dibs.start_holder("gpu", "--slots", "2", body=f"echo $DIBS_SLOT >> {numbers}; exec sleep 60")
    second = dibs.start_holder("gpu", "--slots", "2", body=f"echo $DIBS_SLOT >> {numbers}; exec sleep 60")
    until(lambda: numbers.exists() and numbers.read_text().split() == ["1", "2"])
    third = dibs("run", "gpu", "--slots", "2", "--nowait", "--", "echo", "never")
    assert (third.returncode, third.stdout) == (75, "")
    assert "'gpu' is held by" in third.stderr
    skipped = dibs("run", "gpu", "--slots", "2", "--on-busy", "skip", "--", "echo", "never")
    assert (skipped.returncode, skipped.stdout, skipped.stderr) == (0, "", "")
    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_S) == 143
    again = dibs("run", "gpu", "--slots", "2", "--timeout", "10", "--", "sh", "-c", "echo $DIBS_SLOT")
    assert (again.returncode, again.stdout) == (0, "1\n"), "the number that became free"
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 143


def test_a_command_may_take_several_slots(dibs: Dibs) -> None:
    """With --weight 3 a command takes three of the slots, all or nothing, and has one number of its own."""
    heavy = dibs.start_holder("gb", "--slots", "4", "--weight", "3")
    shown = dibs.holder("gb")
    assert (shown["slot"], shown["take"]) == (1, 3)
    for weight, code in (("2", 75), ("1", 0)):
        done = dibs("run", "gb", "--slots", "4", "--weight", weight, "--nowait", "--", "sh", "-c", "echo $DIBS_SLOT")
        assert (done.returncode, done.stdout) == (code, "" if code else "2\n"), done.stderr
    heavy.send_signal(signal.SIGTERM)
    assert heavy.wait(PATIENCE_S) == 143


@pytest.mark.parametrize(
    "options, told",
    [
        (("--weight", "1"), "give --slots with --weight"),
        (("--slots", "2", "--weight", "3"), "weight is from 1 to 2, not 3"),
        (("--slots", "2", "--weight", "0"), "weight is from 1 to 2, not 0"),
        (("--slots", "2", "--weight", "1.5"), "argument --weight: '1.5' is no whole number"),
    ],
)
def test_a_weight_is_some_of_the_slots(dibs: Dibs, options: tuple[str, ...], told: str) -> None:
    """--weight needs --slots, and takes a whole number from 1 to that: else it is wrong usage, and nothing is run."""
    done = dibs("run", "gb", *options, "--", "echo", "never")
    assert (done.returncode, done.stdout) == (64, "")
    assert told in done.stderr
    assert not (dibs.folder / "locks.db").exists()


def test_the_number_of_slots_must_agree(dibs: Dibs) -> None:
    """Another number of slots, or none, is a misconfiguration (78), told in one line; so it is afterwards."""
    holder = dibs.start_holder("gpu", "--slots", "2")
    for options in (["--slots", "3"], []):
        done = dibs("run", "gpu", *options, "--", "echo", "never")
        assert (done.returncode, done.stdout) == (78, "")
        assert re.fullmatch(r"dibs: .*2 permits.*\n", done.stderr), done.stderr
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(PATIENCE_S) == 143
    assert dibs("run", "gpu", "--slots", "3", "--", "true").returncode == 78


def test_a_killed_command_of_several_gives_its_slot_back(dibs: Dibs) -> None:
    """When dibs is killed with -9, its command dies too, and the slot is free a ttl later; the other goes on."""
    first = dibs.start_holder("gpu", "--slots", "2", "--ttl", "1.5")
    second = dibs.start_holder("gpu", "--slots", "2", "--ttl", "1.5")
    first.kill()
    until(lambda: first.command_pid not in dibs.processes())
    done = dibs("run", "gpu", "--slots", "2", "--timeout", "10", "--", "sh", "-c", "echo $DIBS_SLOT")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 143


def test_wrong_numbers_of_slots_are_wrong_usage(dibs: Dibs) -> None:
    """--slots takes a whole number from 1, and does not go with --once-per; nothing is made or run."""
    for options in (["--slots", "0"], ["--slots", "-1"], ["--slots", "x"], ["--slots", "2", "--once-per", "1d"]):
        done = dibs("run", "gpu", *options, "--", "echo", "never")
        assert (done.returncode, done.stdout) == (64, ""), (options, done)
        assert "dibs:" in done.stderr
    assert "--slots N" in dibs("run", "--help").stdout


# -- what the command finds --------------------------------------------------------------------------------------------


def dibs_variables(dibs: Dibs, *args: str) -> dict[str, str]:
    done = dibs(*args, "--", "env")
    assert done.returncode == 0, done.stderr
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    return {key: value for key, _, value in lines if key.startswith("DIBS_") and key != "DIBS_TEST_MARK"}


def test_the_environment_of_the_command(dibs: Dibs) -> None:
    """Name, slot and a rising token; nothing else, and no DIBS_URL that was not there before."""
    assert dibs_variables(dibs, "run", "deploy/web") == {
        "DIBS_NAME": "deploy/web",
        "DIBS_SLOT": "1",
        "DIBS_FENCING_TOKEN": "1",
        "DIBS_URL": dibs.url,
    }
    del dibs.env["DIBS_URL"]
    assert dibs_variables(dibs, "--url", dibs.url, "run", "deploy/web") == {
        "DIBS_NAME": "deploy/web",
        "DIBS_SLOT": "1",
        "DIBS_FENCING_TOKEN": "2",
    }


def test_the_default_store_is_the_users_own(dibs: Dibs) -> None:
    """Without an address the leases are in a file that only this user can read."""
    del dibs.env["DIBS_URL"]
    assert dibs("run", "x", "--", "true").returncode == 0
    (made,) = dibs.folder.rglob("dibs.db")
    assert made.stat().st_mode & 0o777 == 0o600


# A user that no database of users knows, as in a container that runs under any number.
HOMELESS = """
import pwd, sys
def getpwuid(uid):
    raise KeyError(uid)
pwd.getpwuid = getpwuid
from dibs.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("home", [{}, {"HOME": ""}, {"HOME": "here"}, {"HOME": "~", "XDG_STATE_HOME": "state"}])
@pytest.mark.parametrize("words", [("run", "x", "--", "true"), ("ls",), ("doctor",), ("setup",)])
def test_without_a_home_directory_there_is_no_default(dibs: Dibs, home: dict[str, str], words: tuple[str, ...]) -> None:
    """Two processes that make up a place, each in its own folder, would both hold: it is 78, and nothing is made."""
    for name in ("DIBS_URL", "HOME"):
        del dibs.env[name]
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, *words],
        env={**dibs.env, **home}, cwd=dibs.folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 78
    assert "DIBS_URL" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(dibs.folder.iterdir())


def test_the_state_directory_of_who_has_no_home(dibs: Dibs) -> None:
    """$XDG_STATE_HOME is enough."""
    for name in ("DIBS_URL", "HOME"):
        del dibs.env[name]
    state = dibs.folder / "state"
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, "run", "x", "--", "true"],
        env={**dibs.env, "XDG_STATE_HOME": str(state)}, cwd=dibs.folder, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert (state / "dibs" / "dibs.db").exists()


@pytest.mark.parametrize(
    "name", ["café\u0301", " two  spaces ", 'it\'s "quoted"', "100%s", "a=b", "é" * 127 + "x", "-x"]
)
def test_names_arrive_as_they_were_given(dibs: Dibs, name: str) -> None:
    """Accents, spaces, quotes, percent signs, and 255 bytes."""
    words = ("run", "--nowait", f"--info={json.dumps({'n': name})}")
    if name.startswith("-"):
        assert dibs(*words, name, "--", "true").returncode == 64
        return
    assert dibs_variables(dibs, *words, name)["DIBS_NAME"] == name


def test_signals_are_as_a_command_expects_them(dibs: Dibs) -> None:
    """Nothing is blocked, and nothing ignored that was not ignored before: Python's own habits are not inherited."""

    def masks(status: str) -> dict[str, int]:
        lines = (line.partition(":") for line in status.splitlines())
        return {key: int(value, 16) for key, _, value in lines if key in ("SigBlk", "SigIgn", "SigCgt")}

    show = ("cat", "/proc/self/status")
    before = masks(subprocess.run(show, capture_output=True, text=True, check=True).stdout)
    assert masks(dibs("run", "x", "--", *show).stdout) == before
    quiet = dibs("run", "x", "--", *show, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert masks(quiet.stdout)["SigIgn"] == before["SigIgn"] | 1 << (signal.SIGHUP - 1)


def test_only_the_files_that_were_open(dibs: Dibs) -> None:
    """The command inherits what dibs was given, and none of the pipes and files of dibs."""
    read_fd, write_fd = os.pipe()
    try:
        done = dibs("run", "x", "--", "sh", "-c", "ls /proc/$$/fd", pass_fds=[write_fd])
    finally:
        os.close(read_fd)
        os.close(write_fd)
    assert sorted(map(int, done.stdout.split())) == sorted([0, 1, 2, write_fd])


def test_closed_standard_files(dibs: Dibs) -> None:
    """It runs with stdin, stdout and stderr closed, as some daemons start their children."""
    script = f'exec {sys.executable} -m dibs run x -- sh -c "ls /proc/\\$\\$/fd > seen" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", script], env=dibs.env, cwd=dibs.folder, timeout=60)
    assert done.returncode == 0
    assert (dibs.folder / "seen").read_text().split() == ["1"]


# -- busy and waiting --------------------------------------------------------------------------------------------------


def test_busy_is_75_and_names_the_holder(dibs: Dibs) -> None:
    """The second run of a name, told not to wait, exits 75 at once and says who has it, since when, for how long."""
    holder = dibs.start_holder("x")
    for options in (("--nowait",), ("--timeout", "0"), ("--timeout", "200ms")):
        done = dibs("run", "x", *options, "--", "touch", "ran")
        assert done.returncode == 75
        assert done.stdout == ""
        assert re.match(rf"dibs: 'x' is held by {os.uname().nodename}\b.*\b{holder.pid}\b", done.stderr)
        assert "free in" in done.stderr
        assert done.stderr.count("\n") == 1
    assert not (dibs.folder / "ran").exists()
    assert dibs("run", "y", "--nowait", "--", "true").returncode == 0, "another name is free"
    assert dibs("--namespace", "other", "run", "x", "--nowait", "--", "true").returncode == 0
    holder.terminate()
    assert holder.wait() == 143


def test_skip_is_silent(dibs: Dibs) -> None:
    """--on-busy skip exits 0 without a word and without running the command, after waiting only if told to."""
    holder = dibs.start_holder("x")
    for options in ((), ("--nowait",), ("--timeout", "100ms")):
        done = dibs("run", "x", "--on-busy", "skip", *options, "--", "touch", "ran")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (dibs.folder / "ran").exists()
    holder.terminate()


def test_waiting_is_the_default(dibs: Dibs) -> None:
    """Without options it waits for its turn, which comes when the holder is done, in the order of arrival."""
    holder = dibs.start_holder("x")
    order = dibs.folder / "order"
    waiters = []
    for number in range(3):
        waiters.append(dibs.start("run", "x", "--", "sh", "-c", f"echo {number} >> {order}"))
        until(lambda: dibs.holder("x")["waiting"] == number + 1)  # noqa: B023 - called before the next turn
    holder.terminate()
    assert [waiter.wait() for waiter in waiters] == [0, 0, 0]
    assert order.read_text().split() == ["0", "1", "2"]


def test_a_waiting_time_is_enough_when_the_holder_ends_in_it(dibs: Dibs) -> None:
    """--timeout is a limit and not a delay."""
    dibs.start_holder("x", body="sleep 0.3")
    assert dibs("run", "x", "--timeout", "1m", "--", "true").returncode == 0


def test_min_hold_keeps_the_name_after_a_quick_command(dibs: Dibs) -> None:
    """A command that was over at once keeps others out for as long as it was told; dibs itself does not wait."""
    started = time.monotonic()
    assert dibs("run", "x", "--min-hold", "4s", "--", "true").returncode == 0
    left = 4 - (time.monotonic() - started)
    assert left > 0, "this machine is too slow for this test"
    assert dibs("run", "x", "--nowait", "--", "true").returncode == 75
    assert dibs("run", "x", "--", "true").returncode == 0
    assert time.monotonic() - started > 3.9


def test_info_is_shown_to_others(dibs: Dibs) -> None:
    """--info says why."""
    holder = dibs.start_holder("x", "--info", '{"ticket": "OPS-7"}')
    assert dibs.holder("x")["info"] == {"ticket": "OPS-7"}
    holder.terminate()


def test_what_a_command_leaves_behind_goes_on(dibs: Dibs) -> None:
    """The command is over when its first process is; a daemon it started is not killed, and holds nothing."""
    done = dibs("run", "x", "--", "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    pid = int(done.stdout)
    try:
        assert dibs.holder("x") is None
        os.kill(pid, 0)
    finally:
        os.kill(pid, signal.SIGKILL)


# -- start time --------------------------------------------------------------------------------------------------------


def test_nothing_heavy_is_imported(dibs: Dibs) -> None:
    """The path of ``dibs run`` on SQLite loads no module that it could do without."""
    script = textwrap.dedent("""\
        import sys
        from dibs.cli import main
        code = main(sys.argv[1:])
        print("\\n".join(sys.modules), file=sys.stderr)
        sys.exit(code)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "x", "--", "true"],
        env=dibs.env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    heavy = {"asyncio", "dataclasses", "email", "inspect", "logging", "psycopg", "shutil", "socket", "ssl"}
    heavy |= {
        "subprocess",
        "tabulate",
        "tempfile",
        "urllib",
        "urllib.parse",
        "importlib.metadata",
        "locale",
        "uuid",
        "ctypes",
    }
    assert not heavy & set(done.stderr.split())
