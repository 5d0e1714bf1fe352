"""The servers that tests run against keep their own promises: real, private, and gone afterwards whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.servers import postgres as postgres_module
from tests.servers import process
from tests.servers.postgres import PostgresServer, find_postgres
from tests.servers.process import ServerProcess, ServerUnavailable, free_port, wait_until

ROOT = Path(__file__).parent.parent


def test_it_is_durable_as_shipped(postgres: PostgresServer) -> None:
    """Tests run on the durability that users have: a token that survives here survives there."""
    shown = [postgres.psql(f"SHOW {name}")[0][0] for name in ("fsync", "synchronous_commit", "full_page_writes")]
    assert shown == ["on", "on", "on"]


def test_everybody_needs_a_password(postgres: PostgresServer) -> None:
    """A wrong password is refused over TCP and over the socket, so tests of wrong passwords are real."""
    for host in ("127.0.0.1", str(postgres.socket_folder)):
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(postgres.url(password="wrong"), host=host)


def test_a_user_made_for_a_test_can_log_in_and_no_more(postgres: PostgresServer, postgres_url: str) -> None:
    """`create_user` gives a role without rights, whose URL carries its own password; odd names are quoted."""
    name = 'née "O\'Hara" %/@'
    postgres.create_user(name)
    url = postgres.url(postgres_url.rpartition("/")[2], user=name)
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("SELECT current_user").fetchone() == (name,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE public.mine ()")


def test_databases_are_new_and_separate(postgres: PostgresServer) -> None:
    """Each `create_database` is empty, and dropping it cuts off whoever is connected."""
    first, second = postgres.create_database(), postgres.create_database()
    with psycopg.connect(first, autocommit=True) as kept:
        kept.execute("CREATE TABLE t ()")
        with psycopg.connect(second) as other, pytest.raises(psycopg.errors.UndefinedTable):
            other.execute("SELECT FROM t")
        postgres.drop_database(first)
        with pytest.raises(psycopg.OperationalError):
            kept.execute("SELECT 1")
    postgres.drop_database(second)


def test_stop_and_start_keep_data_and_port(own_postgres: PostgresServer) -> None:
    """However it is stopped, the same URL leads to the same data after the next start, and to nothing in between."""
    url = own_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT 41 AS n")
    for mode in ("smart", "fast", "immediate"):
        own_postgres.stop(mode)
        assert own_postgres.process.processes() == []
        with pytest.raises(psycopg.OperationalError, match="refused"):
            psycopg.connect(url)
        own_postgres.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT n FROM t").fetchone() == (41,)


def test_kill_leaves_no_process_and_loses_nothing_committed(own_postgres: PostgresServer) -> None:
    """`kill` is a power cut for the programs: all of them end at once, and a start recovers what was committed."""
    url = own_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT 41 AS n")
        assert len(own_postgres.process.processes()) > 3
        own_postgres.kill()
        assert own_postgres.process.processes() == []
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    own_postgres.start()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT n FROM t").fetchone() == (41,)


def test_paused_it_answers_nobody_and_afterwards_everybody(own_postgres: PostgresServer) -> None:
    """A paused server keeps its connections and leaves them without an answer until it goes on."""
    with psycopg.connect(own_postgres.url(), autocommit=True) as connection:
        with own_postgres.paused():
            assert {process.state for process in own_postgres.process.processes()} == {"T"}
            connection.pgconn.send_query(b"SELECT 41")
            with pytest.raises(psycopg.errors.ConnectionTimeout):
                psycopg.connect(own_postgres.url(), connect_timeout=2)
            assert connection.pgconn.is_busy()
        result = connection.pgconn.get_result()
        assert result is not None
        assert result.get_value(0, 0) == b"41"
        assert connection.pgconn.get_result() is None


def test_a_paused_server_can_be_stopped_and_killed(own_postgres: PostgresServer) -> None:
    """Tests may leave a server in any state: ending it works from a pause, too."""
    own_postgres.pause()
    own_postgres.restart()
    own_postgres.pause()
    own_postgres.kill()
    own_postgres.start()
    own_postgres.pause()  # And `close`, in the fixture.


def test_close_leaves_nothing_and_may_be_called_twice() -> None:
    """After `close` there is no process and no folder of the server."""
    server = PostgresServer()
    folder, pids = server.process.folder, [process.pid for process in server.process.processes()]
    server.close()
    server.close()
    assert not folder.exists()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


OWNER = """
import os, sys, time
from tests.servers.postgres import PostgresServer

server = PostgresServer()
if "paused" in sys.argv:
    server.pause()
child = os.fork() if "with a child" in sys.argv else 0
if child or "with a child" not in sys.argv:
    print(child, server.process.folder, *[process.pid for process in server.process.processes()], flush=True)
time.sleep(600)
"""


@pytest.fixture
def killed_at_the_end() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("state", ["running", "paused", "with a child"])
def test_no_orphan_is_left_when_the_owner_is_killed(state: str, killed_at_the_end: list[int]) -> None:
    """kill -9 of the tests ends the server and removes its folder, also when it was paused, and when a forked child of
    the killed process still holds its pipes."""
    with subprocess.Popen([sys.executable, "-c", OWNER, state], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child, folder, *pids = owner.stdout.readline().split()
        if int(child):
            killed_at_the_end.append(int(child))
        assert len(pids) > 3
        owner.kill()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 10)
    assert wait_until(lambda: not os.path.exists(folder), 10)


def test_ctrl_c_reaches_the_tests_alone(own_postgres: PostgresServer) -> None:
    """The server is in no process group of the tests, so a signal to the terminal's group leaves it alone."""
    groups = set()
    for one in own_postgres.process.processes():
        with suppress(ProcessLookupError):  # a connection's, that has ended since
            groups.add(os.getpgid(one.pid))
    assert groups
    assert os.getpgrp() not in groups


def test_missing_programs_are_a_failure_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without PostgreSQL gets one sentence that says what is missing, and no skip."""
    monkeypatch.setattr(postgres_module, "DEBIAN_PROGRAMS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerUnavailable, match=r"initdb, postgres.*not on this machine.*make test"):
        find_postgres()


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server printed is part of the error, and nothing stays behind."""
    folders: list[str] = []
    make_folder = tempfile.mkdtemp

    def noted(**options: Any) -> str:
        folders.append(make_folder(**options))
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with pytest.raises(ServerUnavailable, match=r"(?s)ended while it was starting.*no_such_setting"):
        PostgresServer({"no_such_setting": 1})
    assert [os.path.exists(folder) for folder in folders] == [False]


def test_a_program_that_is_not_there_says_so() -> None:
    """The guard hands errors of starting a program back to its owner."""
    process = ServerProcess("nothing")
    try:
        with pytest.raises(ServerUnavailable, match="No such file"):
            process.spawn(["/no/such/program"])
        with pytest.raises(ServerUnavailable, match=r"(?s)exit code 3.*sorry"):
            process.run_tool(["/bin/sh", "-c", "echo sorry; exit 3"])
    finally:
        process.close()


def test_a_taken_port_is_waited_for_and_named(own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`start` keeps the port, as URLs name it: it waits for a passing user of it, and gives up with its number."""
    own_postgres.stop()
    with socket.create_server(("127.0.0.1", own_postgres.port)):
        monkeypatch.setattr(process, "PORT_PATIENCE_S", 0.5)
        with pytest.raises(ServerUnavailable, match=f"port {own_postgres.port} was taken"):
            own_postgres.start()
    monkeypatch.undo()
    own_postgres.start()
    assert own_postgres.psql("SELECT 1") == [(1,)]


def test_a_free_port_is_none_that_clients_get() -> None:
    """A client that tries to reach a stopped server must not be given the server's port, and so reach itself."""
    first, last = (int(part) for part in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not [port for port in (free_port() for _ in range(50)) if first <= port <= last]


def test_it_starts_fast() -> None:
    """A test that wants a server of its own pays little for it (0.8 s on the machine this was written on)."""
    started = time.monotonic()
    with PostgresServer():
        assert time.monotonic() - started < 10
