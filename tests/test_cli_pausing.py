"""``dibs pause``, ``resume``, ``wait``, ``top`` and ``history``, with real processes and a real terminal."""

import json
import os
import re
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

import dibs as library
from dibs.cli.top import Looks
from tests.command_line import Dibs, until
from tests.servers.redis import RedisServer
from tests.test_cli_stop import Terminal

# -- pause and resume --------------------------------------------------------------------------------------------------


def test_a_maintenance_window(dibs: Dibs, client: library.Client) -> None:
    """Pause, see who holds still, wait for them, do the work, resume: the job that waited runs then, and knew why."""
    holder = client.lock("deploy/web").acquire()
    assert holder is not None
    paused = dibs("pause", "deploy/*", "--note", "OPS-7", "--for", "10m")
    assert (paused.returncode, paused.stderr) == (0, "")
    assert paused.stdout.startswith("Paused 'deploy/*' until ")
    assert "`dibs resume 'deploy/*'` ends it before" in paused.stdout
    assert f"(pid {os.getpid()})" in paused.stdout
    waiter = dibs.start("run", "deploy/web", "--", "echo", "ran")
    assert waiter.stderr is not None
    told = waiter.stderr.readline()
    assert re.fullmatch(r"dibs: 'deploy/web' is paused by \S+ since .*: OPS-7\n", told)
    wait = dibs.start("wait", "deploy/*")
    time.sleep(0.5)  # for what must not happen: that one of them goes on
    assert (wait.poll(), waiter.poll()) == (None, None)
    holder.release()
    assert wait.communicate()[0] == ""
    assert wait.returncode == 0
    assert waiter.poll() is None
    done = dibs("resume", "deploy/*")
    assert (done.returncode, done.stdout) == (0, "Resumed 'deploy/*'.\n")
    assert waiter.communicate() == ("ran\n", "")
    assert waiter.returncode == 0


def test_a_job_that_does_not_wait_is_refused(dibs: Dibs, client: library.Client) -> None:
    """--nowait: exit 75 and the note; --on-busy skip: exit 0 without a word."""
    client.pause("nightly", "OPS-7", ttl=60)
    done = dibs("run", "nightly", "--nowait", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (75, "")
    assert re.fullmatch(r"dibs: 'nightly' is paused by .*: OPS-7 \(gave up .*\)\n", done.stderr)
    done = dibs("run", "nightly", "--on-busy", "skip", "--", "echo", "ran")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_pauses_are_listed(dibs: Dibs, client: library.Client) -> None:
    """`dibs pause` alone lists them; ls and show tell them, too; as JSON for programs."""
    assert dibs("pause").stdout == "Nothing is paused.\n"
    assert json.loads(dibs("pause", "--json").stdout) == []
    made = json.loads(dibs("pause", "a*", "--json", "--note", "why").stdout)
    assert (made["name"], made["note"], made["holders"]) == ("a*", "why", [])
    (listed,) = json.loads(dibs("pause", "--json").stdout)
    assert all(listed[key] == made[key] for key in ("name", "note", "by", "since"))
    assert 3000 < listed["expires_in"] <= 3600
    assert re.match(r"'a\*' is paused by \S+ since .*: why\n", dibs("pause").stdout)
    with client.lock("b"):
        assert dibs("ls").stdout.endswith(": why\n")
        shown = dibs("show", "a1")
        assert shown.returncode == 1
        assert re.fullmatch(r"Nobody holds 'a1'\.\npaused +'a\*' is paused by .*: why\n", shown.stdout)
        (lease,) = json.loads(dibs("ls", "--json").stdout)
        assert lease["paused"] is None
        client.pause("b", "two", ttl=60)
        assert json.loads(dibs("show", "b", "--json").stdout)["paused"]["note"] == "two"


def test_what_is_not_paused_cannot_be_resumed(dibs: Dibs, client: library.Client) -> None:
    """Exit 1, naming what is paused."""
    done = dibs("resume", "x")
    assert (done.returncode, done.stderr) == (1, "dibs: 'x' is not paused; nothing is\n")
    client.pause("x*", ttl=60)
    done = dibs("resume", "x")
    assert (done.returncode, done.stderr) == (1, "dibs: 'x' is not paused; there are 'x*'\n")


def test_a_pause_that_is_interrupted_is_told(dibs: Dibs, client: library.Client) -> None:
    """Ctrl-C before it is in force: 130, and whoever typed it is told that it may be there."""
    pausing = dibs.start("pause", "x")
    until(client.pauses)
    pausing.send_signal(signal.SIGINT)
    out, err = pausing.communicate()
    assert (out, err) == ("", "dibs: 'x' may be paused by now; `dibs pause` lists the pauses\n")
    assert pausing.returncode == 130


def test_a_star_in_the_middle_is_a_character(dibs: Dibs, client: library.Client) -> None:
    """It is paused as it stands, and said so: whoever meant a pattern should know."""
    assert "Only a * at the end" in dibs("pause", "a*b").stdout
    assert "Only a * at the end" not in dibs("pause", "a*").stdout
    assert [pause.name for pause in client.pauses()] == ["a*", "a*b"]


def test_the_command_that_ends_a_pause_can_be_typed(dibs: Dibs) -> None:
    """Also where the name looks like an option."""
    assert "`dibs resume -- --weird` ends it before" in dibs("pause", "--", "--weird").stdout
    assert dibs("resume", "--", "--weird").returncode == 0
    assert "`dibs resume --queue=--weird` ends it before" in dibs("pause", "--queue=--weird").stdout
    assert dibs("resume", "--queue=--weird").returncode == 0


def test_who_takes_or_claims_what_is_paused_is_told(dibs: Dibs, client: library.Client) -> None:
    """That there is no job, or that others have the items, would be wrong: nobody has them."""
    client.queue("mail").put(1)
    client.pause("queue/mail", "OPS-7")
    client.pause("orders/*", "OPS-8")
    done = dibs("take", "mail")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"dibs: 'queue/mail' is paused by .*: OPS-7\n", done.stderr)
    (dibs.folder / "ids").write_text("1\n2\n")
    done = dibs("claim", "orders", "--ids", "ids", "--", "cat")
    assert (done.returncode, done.stdout) == (75, "")
    assert re.fullmatch(r"dibs: 'orders/\*' is paused by .*: OPS-8\n", done.stderr)
    client.resume("queue/mail")
    with client.queue("mail").take():
        done = dibs("take", "mail")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize(
    "args, code",
    [
        (("pause", "--note", "why"), 64),
        (("pause", "x", "--note", "why" * 2000), 64),
        (("pause", "x", "--for", "soon"), 64),
        (("pause", "x", "--for", "0"), 64),
        (("pause", "x", "--for", "1"), 64),  # over when it would be reported
        (("pause", "x", "--for", "400d"), 64),
        (("resume",), 64),
        (("wait",), 64),
        (("wait", ""), 64),
        (("top", "--interval", "0"), 64),
        (("history", "x", "-n", "0"), 64),
        (("history", "x"), 78),
        (("setup", "--history", "many"), 64),
        (("--url", "memory://", "history", "x"), 78),
        (("--url", "memcached://localhost", "pause", "x"), 78),
    ],
)
def test_wrong_usage(dibs: Dibs, args: tuple[str, ...], code: int) -> None:
    """One line on stderr, and the exit code of the design."""
    done = dibs(*args)
    assert (done.returncode, done.stdout) == (code, ""), done
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["pause", "pause x", "resume x", "wait x", "top", "top --once --json", "history x"])
def test_a_store_that_cannot_be_reached_is_69(dibs: Dibs, command: str) -> None:
    """Unreachable is neither busy nor misconfigured."""
    dibs.env["DIBS_URL"] = "postgresql://app@127.0.0.1:1/prod"
    done = dibs(*command.split())
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.count("\n") == 1


# -- wait --------------------------------------------------------------------------------------------------------------


def test_wait_for_a_name(dibs: Dibs, client: library.Client) -> None:
    """Exit 0 when nobody holds it, 75 with who does when the time is over; the name is not taken."""
    assert dibs("wait", "x").returncode == 0
    with client.lock("x") as lease:
        for timeout in ("0", "0.3"):
            done = dibs("wait", "x", "--timeout", timeout)
            assert done.returncode == 75
            assert re.match(rf"dibs: 'x' is held by .*\(token {lease.fencing_token}\)", done.stderr)
        waiting = dibs.start("wait", "x", "--timeout", "30")
        time.sleep(0.5)  # for what must not happen: that it ends
        assert waiting.poll() is None
    assert waiting.wait(10) == 0
    with client.lock("x") as again:
        assert again.fencing_token == lease.fencing_token + 1


def test_wait_tells_how_many_hold_a_name_with_permits(dibs: Dibs, client: library.Client) -> None:
    """One of them, and how many more there are."""
    semaphore = client.semaphore("rooms", 2)
    with semaphore, semaphore:
        assert dibs("wait", "rooms", "--timeout", "0").stderr.endswith(" (and 1 more)\n")


def open_files(pid: int) -> list[str]:
    """What a process has open; nothing when it closes one of them just now."""
    try:
        return [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:
        return []


def test_wait_ends_with_ctrl_c(dibs: Dibs, client: library.Client) -> None:
    """130, and not a word."""
    with client.lock("x"):
        waiting = dibs.start("wait", "x")
        until(lambda: any(file.endswith(".db-wal") for file in open_files(waiting.pid)))  # it looks
        waiting.send_signal(signal.SIGINT)
        assert waiting.communicate() == ("", "")
        assert waiting.returncode == 130


# -- top ---------------------------------------------------------------------------------------------------------------


def test_top_looks_once(dibs: Dibs, client: library.Client) -> None:
    """Into a pipe it prints one table; with --json one line, whose numbers a program can use."""
    assert dibs("top").stdout == "No leases.\n"
    client.pause("z", "why", ttl=60)
    with client.lock("a", info={"why": "tëst"}), client.semaphore("b", 3), client.lock("c/1"):
        for args in ((), ("--once",)):
            done = dibs("top", *args)
            assert (done.returncode, done.stderr) == (0, "")
            pause, between, head, *rows = done.stdout.splitlines()
            assert between == ""
            assert pause.startswith("'z' is paused by ")
            assert head.split() == ["NAME", "SLOT", "HOLDER", "FOR", "LEFT", "WAITING", "GRANTS/S", "INFO"]
            assert [row.split()[0] for row in rows] == ["a", "b", "c/1"]
        seen = json.loads(dibs("top", "--once", "--json").stdout)
        assert (seen["held"], seen["waiting"], seen["grants_per_s"]) == (3, 0, None)
        assert [pause["note"] for pause in seen["pauses"]] == ["why"]
        assert 0 <= seen["leases"][0]["held_for"] < 60
        assert [lease["name"] for lease in json.loads(dibs("top", "c/", "--once", "--json").stdout)["leases"]] == [
            "c/1"
        ]


def test_top_counts_grants(dibs: Dibs, client: library.Client) -> None:
    """--json alone prints a line each interval, in which a name that is taken again and again counts as often."""
    watching = dibs.start("top", "--json", "--interval", "200ms")
    assert watching.stdout is not None
    lines = []
    for _ in range(8):
        with client.lock("x"):
            lines.append(json.loads(watching.stdout.readline()))
    watching.send_signal(signal.SIGINT)
    watching.communicate()
    assert watching.returncode == 130
    rates = [lease["grants_per_s"] for line in lines for lease in line["leases"] if lease["grants_per_s"]]
    assert rates
    assert max(rates) < 50


def test_top_outlives_an_outage(dibs: Dibs, own_redis: RedisServer) -> None:
    """--json writes no line while the store is away, says so, and goes on when it is back."""
    watching = dibs.start("--url", f"{own_redis.url()}?patience=0.2", "top", "--json", "--interval", "100ms")
    lines, told = watching.stdout, watching.stderr
    assert lines is not None
    assert told is not None
    assert json.loads(lines.readline())["held"] == 0
    own_redis.kill()
    assert told.readline().startswith("dibs: the store is away, trying again: Redis")
    own_redis.start()
    assert told.readline().startswith("dibs: the store is back, ")
    with library.connect(own_redis.url(), namespace="default").lock("x"):
        until(lambda: json.loads(lines.readline())["held"] == 1)
    watching.send_signal(signal.SIGINT)
    assert watching.communicate()[1] == ""
    assert watching.returncode == 130


class Screen(Terminal):
    """What a terminal shows of a command, and how it was left."""

    def all(self) -> str:
        self.sees("")
        return self._seen


def test_top_keeps_so_many_names_and_no_more(client: library.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs for months, in a store whose names are used once, does not grow; what is seen again is kept."""
    monkeypatch.setattr("dibs.cli.top.NAMES_MAX", 2)
    looks = Looks(client, "")
    with client.lock("always"):
        for number in range(5):
            with client.lock(f"order/{number}"):
                looks.look()
    assert list(looks._tokens) == ["always", "order/4"]


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_leaves_the_terminal_as_it_was(dibs: Dibs, client: library.Client, key: str) -> None:
    """q and Ctrl-C end it; the screen of before, the cursor and the keyboard's modes are back."""
    with client.lock("some/name") as lease:
        shell = Screen(dibs, "stty -a > before; $DIBS top --interval 200ms; echo code $?; stty -a > after; echo over")
        try:
            until(lambda: shell.sees("some/name"))
            assert "\x1b[?1049h" in shell.all()
            assert "1 held, 0 waiting, 0.0 grants/s, 0 paused" in shell.all()  # however long the address is
            until(lambda: shell.all().count("some/name") >= 3)
            lease.release()
            until(lambda: shell.sees("No leases."))
            shell.type(key)
            until(lambda: shell.sees("over"))
            assert f"code {0 if key == 'q' else 130}" in shell.all()
            end = shell.all().rpartition("\x1b[?1049l")[0]
            assert end.endswith("\x1b[?25h")
            assert (dibs.folder / "before").read_text() == (dibs.folder / "after").read_text()
        finally:
            shell.close()


def test_a_terminal_that_knows_no_sequences_gets_one_table(dibs: Dibs, client: library.Client) -> None:
    """With TERM=dumb, as in an editor's shell, top prints what it would print into a file."""
    shell = Screen(dibs, "TERM=dumb $DIBS top; echo over")
    try:
        until(lambda: shell.sees("over"))
        assert shell.all() == "No leases.\r\nover\r\n"
    finally:
        shell.close()


def test_top_is_ended_by_a_signal(dibs: Dibs, client: library.Client) -> None:
    """TERM leaves the terminal as it was, too."""
    shell = Screen(dibs, "$DIBS top & sleep 3; kill $!; wait $!; echo code $?; echo over")
    try:
        until(lambda: shell.sees("over"))
        assert "code 143" in shell.all()
        assert shell.all().count("\x1b[?1049l") == shell.all().count("\x1b[?1049h") == 1
    finally:
        shell.close()


# -- history -----------------------------------------------------------------------------------------------------------


def test_history(dibs: Dibs, client: library.Client) -> None:
    """Switched on by setup; newest first; as a table and as JSON; exit 78 with what to do while it is off."""
    done = dibs("history", "x")
    assert done.returncode == 78
    assert "dibs setup --history" in done.stderr
    assert dibs("setup", "--history", "3").returncode == 0
    assert dibs("history", "x").stdout == "No grant of 'x' is written down.\n"
    for _ in range(4):
        assert dibs("run", "x", "--", "true").returncode == 0
    with client.lock("x", info={"why": "OPS-7"}) as lease:
        head, *rows = dibs("history", "x").stdout.splitlines()
        assert head.split() == ["SINCE", "FOR", "ENDED", "SLOT", "HOLDER", "TOKEN", "INFO"]
        assert len(rows) == 3
        assert "holds it" in rows[0]
        assert rows[0].endswith('{"why": "OPS-7"}')
        records: list[dict[str, Any]] = json.loads(dibs("history", "x", "--json", "-n", "2").stdout)
    assert [record["fencing_token"] for record in records] == [lease.fencing_token, lease.fencing_token - 1]
    assert [record["ending"] for record in records] == [None, "released"]
    assert dibs("setup").returncode == 0
    assert dibs("history", "x").returncode == 0
    assert dibs("setup", "--history", "0").returncode == 0
    assert dibs("history", "x").returncode == 78


def test_the_sql_of_the_history_can_be_run_by_somebody_else(dibs: Dibs, client: library.Client) -> None:
    """`dibs schema --history N` prints what `dibs setup --history N` runs."""
    client.ping()
    printed = dibs("schema", "--history", "7")
    assert printed.returncode == 0
    db = sqlite3.connect(dibs.folder / "locks.db")
    try:
        db.executescript(printed.stdout)
    finally:
        db.close()
    with client.lock("x"):
        pass
    assert len(client.history("x")) == 1
    for url in ("postgresql://db/prod", "mysql://db/prod"):
        text = dibs("--url", url, "schema", "--history", "7").stdout
        assert "dibs_lease_history" in text
        assert "OFFSET 7" in text
    refused = dibs("--url", "redis://cache", "schema", "--history", "7")
    assert (refused.returncode, refused.stdout) == (78, ""), "nothing that could be taken for SQL"
