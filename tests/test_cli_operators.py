"""``dibs`` for operators: ls, show, break, purge, setup, schema, doctor, help, and output that nobody reads."""

import contextlib
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from argparse import Namespace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

import dibs as library
from dibs.cli import COMMANDS, _parse
from dibs.cli.looks import table
from dibs.cli.operators import _break_command
from dibs.cli.streams import columns_of, cut
from dibs.clock import Deadline, RealClock
from dibs.store import Acquire, Release
from tests.command_line import DIBS, Dibs
from tests.servers.postgres import PostgresServer

# -- help --------------------------------------------------------------------------------------------------------------


def test_without_arguments_it_prints_help(dibs: Dibs) -> None:
    """``dibs`` alone explains itself on stdout and exits 0, as ``dibs --help`` does."""
    alone = dibs()
    assert alone.returncode == 0
    assert alone.stdout.startswith("usage: dibs ")
    assert alone.stdout == dibs("--help").stdout
    assert all(re.search(rf"^    {command} ", alone.stdout, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_teaches_by_example(dibs: Dibs, command: str | None) -> None:
    """Each help has four examples or more, which dibs understands, and is at most 120 columns wide."""
    words = [] if command is None else [command]
    done = dibs(*words, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 120
    lines = done.stdout.partition("examples:")[2].partition("exit codes:")[0].splitlines()
    examples = [line[line.index("dibs ") :] for line in lines if re.match(r"  (\S.*)?dibs ", line)]
    assert len(examples) >= 4
    for example in examples:
        if "$(" not in example:
            typed = shlex.split(example.partition("   ")[0])
            end = min([typed.index(word) for word in ("|", ">", "&&", "||") if word in typed], default=len(typed))
            assert _parse(typed[1:end]) is not None


def test_version(dibs: Dibs) -> None:
    """``dibs --version`` and ``python -m dibs`` are the same program."""
    assert dibs("--version").stdout == f"dibs {library.__version__}\n"
    script = Path(sys.executable).parent / "dibs"
    shown = subprocess.run([script, "--version"], env=dibs.env, capture_output=True, text=True, timeout=60)
    assert shown.stdout == f"dibs {library.__version__}\n"


@pytest.mark.parametrize(
    "args",
    [
        ("nothing",),
        ("--nothing",),
        ("ls", "a", "b"),
        ("ls", "--jso"),
        ("show",),
        ("break",),
        ("break", "x", "--token", "new"),
        ("purge",),
        ("purge", "--older-than", "yesterday"),
        ("schema", "--column", "token"),
        ("schema", "--fence", "account", "--history", "100"),
        ("schema", "--fence", "account", "--claims", "account"),
        ("schema", "--claims", "a.b."),
        ("--url", "memory://", "schema", "--claims", "account"),
        ("show", "a\nb"),
        ("--url", "sqlite://app:hunter2@host/x", "ls"),
        ("ls", "--url", "app:hunter2@db"),
        ("--namespace", "", "ls"),
    ],
)
def test_wrong_usage_is_64(dibs: Dibs, args: tuple[str, ...]) -> None:
    """Exit 64 with one line on stderr, and no password in it."""
    done = dibs(*args)
    assert done.returncode == 64
    assert done.stdout == ""
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr


def test_a_mistyped_command_is_recognised(dibs: Dibs) -> None:
    """The command that was meant is named, and those that there are."""
    done = dibs("pasue", "x")
    assert done.stderr.startswith("dibs: there is no command 'pasue' (did you mean 'pause'?). dibs has run, elect, ")


@pytest.mark.parametrize(
    "words, said",
    [
        (("ls", "--jsno"), "there is no option '--jsno' (did you mean '--json'?)"),
        (("run", "x", "--slot=2", "--", "true"), "there is no option '--slot' (did you mean '--slots'?)"),
        (("pause", "--", "x", "--note", "why"), "'--note' is an option, and stands behind --: put it before that"),
        (("show", "a", "b"), "'b' is one argument too many"),
        (("run", "x", "--slots", "two", "--", "true"), "argument --slots: 'two' is no whole number"),
        (("done", "mail", "seven", "--token", "1"), "argument ID: 'seven' is no whole number"),
        (
            ("run", "-x", "--", "true"),
            (
                "there is no option '-x'; what begins with - and is none stands behind the options and --: "
                "dibs run -- -x -- COMMAND"
            ),
        ),
        (
            ("show", "-x"),
            "there is no option '-x'; what begins with - and is none stands behind the options and --: dibs show -- -x",
        ),
        (("pause", "--queue", "-x"), "'-x' is taken for an option: write --queue=-x if it belongs to that"),
        (("requeue", "--", "mail", "-x"), "argument ID: '-x' is no whole number"),
        (("jobs",), "the following arguments are required: QUEUE"),
        (("requeue",), "the following arguments are required: QUEUE"),
        (("forget",), "the following arguments are required: QUEUE"),
    ],
)
def test_a_mistake_is_named(dibs: Dibs, words: tuple[str, ...], said: str) -> None:
    """What is wrong, what was perhaps meant, and where it is explained."""
    done = dibs(*words)
    assert done.returncode == 64
    assert done.stderr == f"dibs: {said} (`dibs {words[0]} --help` explains)\n"
    assert dibs("--namespace", "a", *words).stderr == done.stderr, "behind an option of all commands"


def test_a_name_may_look_like_an_option(dibs: Dibs) -> None:
    """Behind the options and --, whatever the command; one that runs a command has a second -- in front of that."""
    for before in ([], ["--namespace", "a"]):
        told = dibs(*before, "run", "--nowait", "--", "-x", "--", "sh", "-c", "echo $DIBS_NAME $0 $1", "--", "--")
        assert (told.returncode, told.stdout) == (0, "-x -- --\n")
        assert dibs(*before, "show", "--", "-x").stdout == "Nobody holds '-x'.\n"
        assert dibs(*before, "put", "--delay", "0", "--", "-q", "-5").returncode == 0
        assert '"payload": -5' in dibs(*before, "jobs", "--json", "--", "-q").stdout
        assert dibs(*before, "work", "--idle", "0", "--", "-q", "--", "grep", "-q", "-e", "-5").returncode == 0
        assert dibs(*before, "take", "--", "-q").returncode == 1
    assert dibs("run", "--", "sh", "--", "true").returncode == 64, "no name"


@pytest.mark.parametrize("url", ["postgresql://127.0.0.1:1/x", "redis://127.0.0.1:1", "mysql://127.0.0.1:1/x"])
def test_what_drivers_say_becomes_sentences(dibs: Dibs, url: str) -> None:
    """No two stops in a row, and no two sentences without one."""
    said = dibs("--url", url, "ls").stderr
    assert ".." not in said
    assert "refused Is" not in said


# -- ls and show -------------------------------------------------------------------------------------------------------


def test_ls_of_nothing_is_a_sentence(dibs: Dibs) -> None:
    """No table without rows; with --json an empty list."""
    assert dibs("ls").stdout == "No leases.\n"
    assert dibs("ls", "deploy/").stdout == "No leases on names that start with 'deploy/'.\n"
    assert json.loads(dibs("ls", "--json").stdout) == []


@pytest.mark.parametrize("prefix", ["deploy/", "deploy/*", "*"])
def test_a_prefix_may_end_with_a_star(dibs: Dibs, client: library.Client, prefix: str) -> None:
    """As it does for `dibs pause` and `dibs wait`; nothing that begins so is left out, a star in a name neither."""
    client.queue("deploy/web").put(1)
    with client.lock("deploy/web"), client.lock("deploy/*"), client.lock("other"):
        names = [row["name"] for row in json.loads(dibs("ls", prefix, "--json").stdout)]
        top = json.loads(dibs("top", prefix, "--json", "--once").stdout)
    assert names == [row["name"] for row in top["leases"]]
    assert names == ["deploy/*", "deploy/web", "other"][: 3 if prefix == "*" else 2]
    assert [row["queue"] for row in json.loads(dibs("queues", prefix, "--json").stdout)] == ["deploy/web"]


def test_ls_shows_who_has_what(dibs: Dibs, client: library.Client) -> None:
    """One line a lease, by name: slot, holder, since, left, token, waiting and info."""
    with client.lock("deploy/web", info={"ticket": "OPS-7"}), client.lock("007"), client.lock("café ☕"):
        lines = dibs("ls").stdout.splitlines()
        assert lines[0].split() == ["NAME", "SLOT", "HOLDER", "SINCE", "LEFT", "TOKEN", "WAITING", "INFO"]
        assert [line.split()[0] for line in lines[1:]] == ["007", "café", "deploy/web"]
        assert f"{os.uname().nodename} (pid {os.getpid()})" in lines[3]
        assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +[23]\d\.\d s +1 ", lines[3])
        assert lines[3].endswith('{"ticket": "OPS-7"}')
        assert len(dibs("ls", "deploy/").stdout.splitlines()) == 2
        assert dibs("--namespace", "other", "ls").stdout == "No leases.\n"
        assert (
            dibs("ls", "--namespace", "default", "--url", dibs.url, "de")
            .stdout.splitlines()[1]
            .startswith("deploy/web")
        )


def test_a_table_is_no_wider_than_what_is_in_it() -> None:
    """Columns are as wide as their widest cell and two apart, so an ordinary lease fits a terminal of 80 columns."""
    headers = ("NAME", "SLOT", "HOLDER", "SINCE", "LEFT", "TOKEN", "WAITING", "INFO")
    cells = ("tutorial", "1", "vm (pid 13405)", "2026-03-07 14:59:39", "8.0 s", "3", "1", "null")
    wide = sum(max(map(len, column)) for column in zip(headers, cells, strict=True)) + 2 * (len(headers) - 1)
    assert [len(line) for line in table(headers, [cells]).splitlines()] == [wide, wide]
    assert wide <= 80


def test_json_for_programs(dibs: Dibs, client: library.Client) -> None:
    """``ls --json`` and ``show --json`` give the same facts, exactly."""
    with client.lock("x", info={"a": [1, "é"]}) as lease:
        (listed,) = json.loads(dibs("ls", "--json").stdout)
        shown = dibs.holder("x")
    for record in (listed, shown):
        assert record["name"] == "x"
        assert record["slot"] == 1
        assert record["take"] == 1
        assert record["holder"] == lease.holder
        assert record["fencing_token"] == lease.fencing_token
        assert record["info"] == {"a": [1, "é"]}
        assert record["waiting"] == 0
        assert 0 < record["expires_in"] <= 30
        assert datetime.fromisoformat(record["expires_at"]) > datetime.now(timezone.utc)
        assert abs(datetime.fromisoformat(record["acquired_at"]) - lease.acquired_at).total_seconds() < 0.001


def test_columns_are_those_of_the_terminal(dibs: Dibs, client: library.Client) -> None:
    """Characters that are two columns wide, and marks that take none, move nothing that stands behind them."""
    names = ("plain", "中文字", "e\u0301te\u0301", "🎈", "\u0301", "ﬁ")
    with contextlib.ExitStack() as held:
        for name in names:
            held.enter_context(client.lock(name, info={"why": "新"}))
        lines = dibs("ls").stdout.splitlines()
    where = {columns_of(line.partition(f"{os.uname().nodename} (pid")[0]) for line in lines[1:]}
    assert where == {lines[0].index("HOLDER")}
    assert {name for name in names if any(name in line for line in lines)} == set(names)
    assert [columns_of(text) for text in names] == [5, 6, 3, 2, 0, 1]
    assert [cut("a中文", columns) for columns in (0, 1, 2, 3, 9)] == ["", "a", "a", "a中", "a中文"]


def test_show(dibs: Dibs, client: library.Client) -> None:
    """``show`` prints who holds a name and exits 0; nobody is exit 1."""
    with client.lock("-x", info={"a": 1}) as lease:
        done = dibs("show", "--", "-x")
        assert done.returncode == 0
        facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
        assert facts["name"] == "-x"
        assert facts["token"] == str(lease.fencing_token)
        assert facts["holder"] == f"{os.uname().nodename} (pid {os.getpid()})"
        assert facts["info"] == '{"a": 1}'
    done = dibs("show", "x")
    assert (done.returncode, done.stdout, done.stderr) == (1, "Nobody holds 'x'.\n", "")
    done = dibs("show", "x", "--json")
    assert (done.returncode, done.stdout) == (1, "null\n")


def test_who_takes_several_permits(dibs: Dibs, client: library.Client) -> None:
    """``show`` says how many permits the holder has, a writer all; ``--json`` says it in numbers."""
    with client.semaphore("rooms", 5, weight=3):
        assert dibs.holder("rooms")["take"] == 3
        assert "permits  3\n" in dibs("show", "rooms").stdout
    with client.rwlock("page").write():
        assert "permits  all\n" in dibs("show", "page").stdout
    with client.rwlock("page").read():
        assert "permits" not in dibs("show", "page").stdout


@pytest.mark.parametrize("command", ["show", "break"])
def test_of_several_holders_the_others_are_told_of(command: str, dibs: Dibs, client: library.Client) -> None:
    """``show`` and ``break`` show one of those who hold a name with permits, and how many others there are."""
    semaphore = client.semaphore("rooms", 3)
    with semaphore:
        assert "others" not in dibs(command, "rooms").stdout
        with semaphore:
            shown = dibs(command, "rooms").stdout
            assert shown.startswith("name     rooms\nslot     1\n")
            assert "others   1 more holds it: `dibs ls` shows all\n" in shown
            with semaphore:
                assert "others   2 more hold it: `dibs ls` shows all\n" in dibs(command, "rooms").stdout


# -- break -------------------------------------------------------------------------------------------------------------


def test_break_without_a_token_shows_the_command_to_type(dibs: Dibs, client: library.Client) -> None:
    """It shows the holder, changes nothing, and prints a command that works as it stands."""
    for name in ("it's mine", "-x"):
        lease = client.lock(name).acquire()
        assert lease is not None
        done = dibs("break", "--namespace", "default", "--url", dibs.url, "--", name)
        assert done.returncode == 64
        assert f"pid {os.getpid()}" in done.stdout
        (command,) = [line for line in done.stdout.splitlines() if line.startswith("  dibs ")]
        lease.renew()
        broken = dibs(*shlex.split(command)[1:])
        assert broken.returncode == 0, broken
        with pytest.raises(library.LeaseLost):
            lease.renew()
    assert dibs("break", "nobody's").returncode == 1


def test_break_does_not_show_a_password() -> None:
    """The command to type has a place for a URL with a password, and not the URL."""
    record: Any = SimpleNamespace(name="x", fencing_token=7)
    for url in ("postgresql://app:hunter2@db/prod", "postgresql://app@db/prod?password=hunter2"):
        shown = _break_command(Namespace(url=url, namespace=None), record)
        assert shown == "dibs --url URL break x --token 7"


def test_break_compares_the_token(dibs: Dibs, client: library.Client) -> None:
    """A lease that somebody got since is not broken by mistake."""
    with client.lock("x") as lease:
        done = dibs("break", "x", "--token", "41")
        assert done.returncode == 1
        assert f"held with token {lease.fencing_token}, not 41" in done.stderr
        lease.renew()
    done = dibs("break", "x", "--token", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dibs: nothing was broken: nobody holds 'x' any more\n"


def test_break_frees_at_the_expiry_or_now(dibs: Dibs, client: library.Client) -> None:
    """Without --now others wait for the expiry, with --now they need not; both say so."""
    later = client.lock("later", renew=False).acquire()
    sooner = client.lock("sooner", renew=False).acquire()
    assert later is not None
    assert sooner is not None
    assert "free in " in dibs("break", "later", "--token", "1").stdout
    assert "free now" in dibs("break", "sooner", "--token", "1", "--now").stdout
    assert dibs("run", "later", "--nowait", "--", "true").returncode == 75
    assert dibs("run", "sooner", "--nowait", "--", "true").returncode == 0
    for lease in (later, sooner):
        with pytest.raises(library.LeaseLost):
            lease.renew()


# -- purge, setup, schema ----------------------------------------------------------------------------------------------


def test_purge(dibs: Dibs, client: library.Client) -> None:
    """What has been free for so long goes, what is held stays, and tokens go on rising."""
    for name in ("a", "b"):
        with client.lock(name):
            pass
    with client.lock("c"):
        assert dibs("purge", "--older-than", "30d").stdout == "Purged 0 names.\n"
        assert dibs("purge", "--older-than", "0").stdout == "Purged 2 names.\n"
        assert dibs("show", "c").returncode == 0
    with client.lock("a") as lease:
        assert lease.fencing_token == 2


def test_a_purge_is_of_one_namespace(dibs: Dibs, client: library.Client) -> None:
    """What is kept for other namespaces stays, though their names begin alike; what dibs keeps beside its own goes."""
    store = client._desk.address.open()
    keys = ["n:a", "n~tries:a/b", "n~standby:a/1", "n-2:a", "n.2:a", "n2:a", "nn:a", "n-2~tries:a/b", "m:a", "o:a"]
    clock = RealClock()
    by = Deadline(clock, clock.now() + 60)
    store.act([Acquire(key, "c-1", 60, "h") for key in keys], by)
    store.act([Release(key, "c-1") for key in keys], by)
    assert dibs("--namespace", "n", "purge", "--older-than", "0").stdout == "Purged 3 names.\n"
    assert store.purge("", "\U0010ffff", 0, by) == 7
    store.close()


def test_setup_and_schema(dibs: Dibs) -> None:
    """``setup`` makes the tables, ``schema`` prints the same SQL and touches nothing."""
    schema = dibs("schema")
    assert schema.returncode == 0
    assert not (dibs.folder / "locks.db").exists()
    done = dibs("setup")
    assert (done.returncode, done.stdout) == (0, f"Ready: {dibs.url}\n")
    assert dibs("setup").returncode == 0
    printed = sqlite3.connect(":memory:")
    made = sqlite3.connect(dibs.folder / "locks.db")
    try:
        printed.executescript(schema.stdout)
        tables = "SELECT name, sql FROM sqlite_master ORDER BY name"
        assert printed.execute(tables).fetchall() == made.execute(tables).fetchall()
    finally:
        printed.close()
        made.close()
    assert '"ops"' in dibs("--url", dibs.url + "?table=ops", "schema").stdout


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_of_a_healthy_store(dibs: Dibs) -> None:
    """One line a promise, all ok; then what the store offers; exit 0."""
    done = dibs("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    findings = [line for line in done.stdout.splitlines() if line.startswith(("ok", "FAIL"))]
    assert any(line.startswith("ok    durable: ") for line in findings)
    assert not any(line.startswith("FAIL") for line in findings)
    assert re.search(r"^ +fencing token: strict$", done.stdout, re.MULTILINE)


def test_doctor_of_a_store_that_forgets(dibs: Dibs) -> None:
    """A promise that is not kept is a FAIL line, and exit 1."""
    done = dibs("--url", "memory://", "doctor")
    assert done.returncode == 1
    assert re.search(r"^FAIL  durable: ", done.stdout, re.MULTILINE)
    answer = json.loads(dibs("--url", "memory://", "doctor", "--json").stdout)
    assert answer["ok"] is False
    assert [finding["kept"] for finding in answer["findings"] if finding["promise"] == "durable"] == [False]
    assert answer["capabilities"]["durable"] is False


def test_doctor_of_a_store_that_is_not_set_up(dibs: Dibs) -> None:
    """Not set up is a FAIL line and exit 78."""
    done = dibs("--url", "sqlite:////proc/dibs/locks.db", "doctor")
    assert done.returncode == 78
    assert re.search(r"^FAIL  set up: .*/proc/dibs/locks.db", done.stdout, re.MULTILINE)
    answer = json.loads(dibs("--url", "sqlite:////proc/dibs/locks.db", "doctor", "--json").stdout)
    assert answer["ok"] is False
    assert answer["capabilities"] is None


def test_doctor_of_a_login_without_rights(dibs: Dibs, postgres: PostgresServer, postgres_url: str) -> None:
    """No tables and no right to make them, or tables that it may only read: exit 78, and what `dibs run` would say."""
    database = urlsplit(postgres_url).path[1:]
    role = f"app_{database}"
    postgres.create_user(role)
    postgres.psql("REVOKE CREATE ON SCHEMA public FROM PUBLIC", database=database)
    url = postgres.url(database, user=role)

    def doctor() -> tuple[int, list[str]]:
        done = dibs("--url", url, "doctor")
        return done.returncode, [line for line in done.stdout.splitlines() if "set up: " in line]

    for grant in (None, "SELECT", "SELECT, INSERT, UPDATE, DELETE"):
        if grant is not None:
            assert dibs("--url", postgres_url, "setup").returncode == 0
            postgres.psql(f'GRANT {grant} ON ALL TABLES IN SCHEMA public TO "{role}"', database=database)
        code, (line,) = doctor()
        if grant is None or grant == "SELECT":
            assert (code, line[:4]) == (78, "FAIL")
            assert line.partition(": ")[2] in dibs("--url", url, "run", "x", "--nowait", "--", "true").stderr
        else:
            assert (code, line[:4]) == (0, "ok  ")
    assert dibs("--url", postgres_url, "ls").stdout == "No leases.\n"


def test_doctor_needs_no_lock_to_be_free(dibs: Dibs, client: library.Client) -> None:
    """Another doctor at work, or a pause of everything, is no finding."""
    with client.lock("dibs-doctor"):
        assert dibs("doctor").returncode == 0
    client.pause("*", ttl=60)
    assert dibs("doctor").returncode == 0


@pytest.mark.parametrize("command", ["run x --nowait -- true", "ls", "show x", "setup", "doctor", "doctor --json"])
def test_a_store_that_cannot_be_reached_is_69(dibs: Dibs, command: str) -> None:
    """Unreachable is neither busy nor misconfigured, and no answer shows the password."""
    dibs.env["DIBS_URL"] = "postgresql://app:hunter2@127.0.0.1:1/prod"
    done = dibs(*command.split())
    assert done.returncode == 69, done
    assert "hunter2" not in done.stdout + done.stderr
    if command.startswith("doctor"):
        assert done.stderr == ""
        assert "reachable" in done.stdout
    else:
        assert done.stderr.startswith("dibs: ")
        assert done.stderr.count("\n") == 1


# -- output ------------------------------------------------------------------------------------------------------------


def test_a_reader_that_has_seen_enough(dibs: Dibs) -> None:
    """``dibs … | head`` ends without a traceback, and without success."""
    script = f"{shlex.join(DIBS)} --help; echo $? >&2"
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        done = subprocess.run(
            ["sh", "-c", script], env=dibs.env, stdout=write_fd, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write_fd)
    assert done.stderr == "141\n"


def test_a_full_disk(dibs: Dibs) -> None:
    """Output that cannot be written is an error and one line."""
    with open("/dev/full", "w") as full:
        done = dibs("ls", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 74
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1
