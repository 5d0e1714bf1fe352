"""Private real servers for tests: on a free port, in a folder of their own, and gone afterwards whatever happens.

`free_port` and `ServerProcess` are for any server; `PostgresServer` is made of them, and other stores' servers will be.

**Nothing outlives its owner.** Between the process that wants a server (the *owner*: pytest) and the server stands a
*guard*, this same file run as a program. It starts the server on the owner's word and adopts every process of it that
loses its parent (PR_SET_CHILD_SUBREAPER), so that *all processes below the guard are the server, and all of the server
is below the guard*, although PostgreSQL puts each of its processes into a session of its own. When the owner closes its
end of the pipe, or dies in any way, the guard ends them, removes the folder and ends. It is not in the terminal's
process group, so that Ctrl-C reaches the tests alone.

Linux only: processes are read from /proc, of which only what every user may read is used; in a container root may not
look at the current folder or the environment of another user's processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pwd
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

START_LIMIT_S = 30.0
STOP_LIMIT_S = 20.0
TOOL_LIMIT_S = 60.0
PORT_TRIES = 5
PORT_PATIENCE_S = 10.0
POLL_S = 0.01

# How long the guard lets a server end by itself, and how often it looks whether its owner lives. The pipe tells it at
# once, except where a forked child of a killed owner still holds the owner's end.
GUARD_PATIENCE_S = 3.0
GUARD_LOOKS_S = 0.25


class ServerUnavailable(Exception):
    """A server that the tests need cannot be had; the text says why. A failure, never a reason to skip."""


class Process(NamedTuple):
    pid: int
    parent: int
    state: str  # The kernel's letter: R, S, D, T (stopped), Z (ended, not yet waited for)


def processes_below(ancestor: int) -> list[Process]:
    """The live processes that descend from this one, parents before their children."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as stat:
                    state, parent = stat.read().rpartition(")")[2].split()[:2]
            except OSError:  # It ended while we looked.
                continue
            children.setdefault(int(parent), []).append(Process(int(entry), int(parent), state))
    found: list[Process] = []
    parents = [ancestor]
    while parents:
        below = children.pop(parents.pop(0), [])
        found += [process for process in below if process.state not in "ZX"]
        parents += [process.pid for process in below]
    return found


def send(signal_number: int, processes: Sequence[Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)


def wait_until(condition: Callable[[], object], limit_s: float) -> bool:
    """True as soon as the condition holds, False when it did not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on, from below the range the system takes client ports from.

    A port from that range, as binding to port 0 gives, may be taken by an outgoing connection while the server is
    stopped; worse, a client that keeps trying to reach the stopped server can be connected to itself.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first_client_port = int(file.read().split()[0])
    ports = range(10_000, first_client_port) if first_client_port > 12_000 else range(61_000, 65_536)
    for port in random.sample(ports, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            return port
    raise ServerUnavailable("no free TCP port was found in 200 tries")


def server_user() -> str | None:
    """The user to run servers as: None for the current one; for root an unprivileged one, as servers refuse root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ServerUnavailable("servers refuse to run as root, and there is neither a user postgres nor a user nobody")


class ServerProcess:
    """One server in a private folder: at most one run of it at a time, and everything that this run starts.

    `polite_signal` is what makes it end quickly and cleanly, for the guard.
    """

    def __init__(self, name: str, *, polite_signal: int = signal.SIGTERM) -> None:
        self.name = name
        self._user = server_user()
        # Directly in /tmp: a Unix socket's path has at most 107 bytes, and the server's user must be able to get here.
        self.folder = Path(tempfile.mkdtemp(prefix="dibs-", dir="/tmp"))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self.log_path = self.folder / "server.log"
        self._pid = 0
        # -I -S: nothing of the tests' environment, no site-packages; it is up in 20 ms.
        command = [sys.executable, "-I", "-S", __file__, str(self.folder), str(os.getpid()), str(int(polite_signal))]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd="/"
        )

    def close(self) -> None:
        """End the server and remove its folder. Twice is fine."""
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._guard.stdin.close()
        code = self._guard.wait(STOP_LIMIT_S)
        self._guard.stdout.close()
        if code != 0:
            raise ServerUnavailable(f"the guard of {self.name} in {self.folder} failed with exit code {code}")

    # Starting

    def run_tool(self, command: Sequence[str | os.PathLike[str]]) -> None:
        """Run a program of the server, as the server's user, to its end (initdb and the like)."""
        answer = self._ask("run", command)
        if answer["exit_code"]:
            raise ServerUnavailable(f"{command[0]} failed with exit code {answer['exit_code']}:\n{answer['output']}")

    def spawn(self, command: Sequence[str | os.PathLike[str]]) -> None:
        """Start the server; what it prints goes to the log. When it is ready is for the caller to find out."""
        if self.running:
            raise ServerUnavailable(f"{self.name} runs already")
        self._pid = self._ask("spawn", command)["pid"]

    def _ask(self, act: str, command: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        request = {"act": act, "command": [os.fspath(part) for part in command], "user": self._user}
        print(json.dumps(request), file=self._guard.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._guard.stdout.readline() or '{"error": "its guard is gone"}')
        if "error" in answer:
            raise ServerUnavailable(f"{self.name}: {command[0]} could not be started: {answer['error']}")
        return answer

    # Looking

    @property
    def pid(self) -> int:
        """The id of the process that was spawned; an error when it is not running."""
        if not self.running:
            raise ServerUnavailable(f"{self.name} is not running")
        return self._pid

    @property
    def running(self) -> bool:
        return any(process.pid == self._pid for process in self.processes())

    def processes(self) -> list[Process]:
        """All live processes of this server."""
        return processes_below(self._guard.pid)

    def log_tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(it wrote no log)"

    # What can happen to it

    def end(self, signal_number: int) -> None:
        """Ask the server to end and wait until all its processes have; an error when it does not."""
        if not self.running:
            return
        self.resume()
        os.kill(self._pid, signal_number)
        if not wait_until(lambda: not self.processes(), STOP_LIMIT_S):
            self.kill()
            raise ServerUnavailable(f"{self.name} did not end in {STOP_LIMIT_S:g} s and was killed\n{self.log_tail()}")

    def kill(self) -> None:
        """SIGKILL to every process of the server: what a power cut does to programs."""

        def killed() -> bool:
            left = self.processes()
            send(signal.SIGKILL, left)
            return not left

        if not wait_until(killed, STOP_LIMIT_S):
            raise ServerUnavailable(f"{self.name} could not be killed: {self.processes()} are left")

    def pause(self) -> None:
        """Stop every process of the server in its tracks, and return when all stand still. Connections stay open."""

        def still() -> bool:
            # Parents before their children, so that those who could start new ones stand still first.
            send(signal.SIGSTOP, self.processes())
            return all(process.state == "T" for process in self.processes())

        if not wait_until(still, STOP_LIMIT_S):
            raise ServerUnavailable(f"{self.name} could not be paused: {self.processes()}")

    def resume(self) -> None:
        """Let a paused server go on; nothing happens to one that runs."""
        send(signal.SIGCONT, self.processes())


# --- PostgreSQL ---

DEBIAN_PROGRAMS = Path("/usr/lib/postgresql")  # …/15/bin
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


def find_postgres() -> Path:
    """The folder with initdb and postgres: from PATH, from Debian's places (newest first), or as pg_config says."""
    candidates = []
    on_path = shutil.which("initdb")
    if on_path is not None:
        candidates.append(Path(on_path).resolve().parent)

    def version(folder: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in folder.parent.name.split(".") if part.isdigit())

    candidates += sorted(DEBIAN_PROGRAMS.glob("*/bin"), key=version, reverse=True)
    if shutil.which("pg_config") is not None:
        said = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True)
        candidates.append(Path(said.stdout.strip()))
    for folder in candidates:
        if os.access(folder / "initdb", os.X_OK) and os.access(folder / "postgres", os.X_OK):
            return folder
    raise ServerUnavailable(
        "PostgreSQL's server programs (initdb, postgres) are not on this machine; "
        "`make test` installs them on Debian as root or with sudo"
    )


class PostgresServer:
    """A PostgreSQL of the tests' own, durable as shipped, where everybody needs a password.

    It listens on 127.0.0.1 and on a socket in `socket_folder`, and keeps its port and data through `stop`, `kill` and
    `start`. `settings` go on the server's command line. `close()` ends it for good.
    """

    SUPERUSER = "postgres"

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        self._programs = find_postgres()
        self._settings = {"max_connections": 200, "log_line_prefix": "%m [%p] %q%u@%d ", **(settings or {})}
        self._passwords = {self.SUPERUSER: secrets.token_urlsafe(16)}
        self._databases = 0
        self.process = ServerProcess("PostgreSQL", polite_signal=STOP_SIGNALS["immediate"])
        self.socket_folder = self.process.folder
        self.data_folder = self.process.folder / "data"
        self.port = 0
        try:
            self._make_data_folder()
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PostgresServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Where it is

    def url(self, database: str = "postgres", *, user: str = SUPERUSER, password: str | None = None) -> str:
        """A URL over TCP; the password is the user's own unless another one, say a wrong one, is given."""
        secret = self._passwords[user] if password is None else password
        return f"postgresql://{quote(user, '')}:{quote(secret, '')}@127.0.0.1:{self.port}/{quote(database, '')}"

    def psql(self, sql: str, parameters: Sequence[object] | None = None, *, database: str = "postgres") -> list[Any]:
        """Run SQL as the superuser, each statement by itself, on a connection made for it; the rows of the last one."""
        # The guard runs this file without site-packages, so what comes from there is imported where it is used.
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True, connect_timeout=10) as connection:
            # Without parameters the simple protocol is used, which takes several statements in one text.
            cursor = connection.execute(sql, parameters)
            while cursor.nextset():
                pass
            return cursor.fetchall() if cursor.description else []

    def create_database(self) -> str:
        """A new empty database; its URL as the superuser."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.psql(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database made by `create_database`, whoever is still connected to it."""
        self.psql(f'DROP DATABASE IF EXISTS "{url.rpartition("/")[2]}" WITH (FORCE)')

    def create_user(self, name: str) -> None:
        """A role that may log in, with a random password that `url(user=…)` knows, and with no other right."""
        self._passwords[name] = secrets.token_urlsafe(16)
        quoted = name.replace('"', '""')
        self.psql(f"CREATE ROLE \"{quoted}\" LOGIN PASSWORD '{self._passwords[name]}'")

    # What can happen to it

    def start(self) -> None:
        """Start it again on its port, after `stop` or `kill`, and wait until it answers."""
        # Another program may have the port for a moment. URLs in use name it, so it cannot change.
        if not wait_until(self._try_to_start, PORT_PATIENCE_S):
            raise ServerUnavailable(f"port {self.port} was taken by another program")

    def stop(self, mode: str = "fast") -> None:
        """Stop it: "smart" (after the last client), "fast" (clients are cut off) or "immediate" (as in a crash)."""
        self.process.end(STOP_SIGNALS[mode])

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def kill(self) -> None:
        """SIGKILL to the server and all its processes; `start` brings it back with what was durable."""
        self.process.kill()

    def pause(self) -> None:
        """Freeze it, connections and all, until `resume`."""
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen inside the `with` block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """End it and remove all its data. Twice is fine."""
        self.process.close()

    # How it starts

    def _make_data_folder(self) -> None:
        password_file = self.process.folder / "password"
        password_file.write_text(self._passwords[self.SUPERUSER])
        password_file.chmod(0o644)  # For the server's user; nobody else can enter the folder.
        # --no-sync: a power cut during the tests need not find this folder. The server itself syncs as shipped.
        options = ["--no-sync", "--no-instructions", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        options += [f"--pgdata={self.data_folder}", f"--username={self.SUPERUSER}", f"--pwfile={password_file}"]
        self.process.run_tool([self._programs / "initdb", *options])
        password_file.unlink()

    def _start_on_a_free_port(self) -> None:
        for _ in range(PORT_TRIES):
            self.port = free_port()
            if self._try_to_start():
                return
        raise ServerUnavailable(f"{PORT_TRIES} ports in turn were taken by other programs before PostgreSQL had them")

    def _try_to_start(self) -> bool:
        """True when it answers, False when the port was taken; anything else is an error."""
        # After a kill the ids in these files may by now be another server's, which would stop this one; we know better.
        if not self.process.processes():
            (self.data_folder / "postmaster.pid").unlink(missing_ok=True)
            (self.socket_folder / f".s.PGSQL.{self.port}.lock").unlink(missing_ok=True)
        settings: dict[str, object] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.socket_folder,
            **self._settings,
        }
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        log_start = self.process.log_path.stat().st_size if self.process.log_path.exists() else 0
        self.process.spawn([self._programs / "postgres", "-D", self.data_folder, *options])
        answered = wait_until(lambda: self._answers() or not self.process.running, START_LIMIT_S)
        if self.process.running:
            if answered:
                return True
            self.kill()
            raise ServerUnavailable(f"PostgreSQL did not answer in {START_LIMIT_S:g} s\n{self.process.log_tail()}")
        if b"could not bind" in self.process.log_path.read_bytes()[log_start:]:
            return False
        raise ServerUnavailable(f"PostgreSQL ended while it was starting\n{self.process.log_tail()}")

    def _answers(self) -> bool:
        import psycopg

        # The status line spares the log some refused connections: it reads "ready" when connections are accepted.
        try:
            if not (self.data_folder / "postmaster.pid").read_text().rstrip().endswith("ready"):
                return False
            return self.psql("SELECT 1") == [(1,)]
        except (FileNotFoundError, psycopg.OperationalError):
            return False


class PgBouncer:
    """A connection pooler in transaction mode in front of a PostgresServer, as found in production."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        if not os.path.exists(program):
            raise ServerUnavailable("pgbouncer is missing: scripts/setup_postgres.sh installs it")
        self.process = ServerProcess("PgBouncer")
        self.port = free_port()
        superuser, password = server.SUPERUSER, server._passwords[server.SUPERUSER]
        users = self.process.folder / "users.txt"
        users.write_text(f'"{superuser}" "{password}"\n')
        users.chmod(0o644)
        settings = self.process.folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\nauth_type = scram-sha-256\nauth_file = {users}\npool_mode = transaction\n"
            "unix_socket_dir =\nignore_startup_parameters = extra_float_digits\n"
        )
        settings.chmod(0o644)
        self.process.spawn([program, settings])

    def url(self, database: str) -> str:
        """The URL of a database of the server, through the pooler."""
        return self._server.url(database).replace(f":{self._server.port}/", f":{self.port}/")

    def close(self) -> None:
        """End it."""
        self.process.close()

    def __enter__(self) -> PgBouncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- The guard ---


class _Guard:
    """The program that stands between owner and server; see the head of this file."""

    def __init__(self, folder: Path, owner: int, polite_signal: int) -> None:
        self._folder = folder
        self._owner = owner
        self._polite_signal = polite_signal

    def main(self) -> None:
        pr_set_child_subreaper = 36  # <linux/prctl.h>
        if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        try:
            self._serve()
        finally:
            self._end_processes()
            shutil.rmtree(self._folder)

    def _serve(self) -> None:
        """Answer the owner's requests, one line each, until it closes the pipe or is no longer there."""
        while os.getppid() == self._owner:
            self._reap()
            if select.select([0], [], [], GUARD_LOOKS_S)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                try:
                    answer = self._do(**json.loads(line))
                except (OSError, subprocess.SubprocessError) as error:
                    answer = {"error": str(error)}
                with contextlib.suppress(BrokenPipeError):
                    print(json.dumps(answer), flush=True)

    def _do(self, act: str, command: list[str], user: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "cwd": self._folder,
            # Not the owner's: PGHOST, PGDATA or a locale from there would make every machine's tests different.
            "env": {"PATH": os.defpath, "HOME": str(self._folder), "LC_ALL": "C.UTF-8"},
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        if user is not None:
            options |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        if act == "run":
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, errors="replace", timeout=TOOL_LIMIT_S, **options
            )
            return {"exit_code": done.returncode, "output": done.stdout.strip()}
        with open(self._folder / "server.log", "ab") as log:
            return {"pid": subprocess.Popen(command, stdout=log, **options).pid}

    def _end_processes(self) -> None:
        # Politely first, to the server's first process: one that ends by itself frees its shared memory.
        deadline = time.monotonic() + GUARD_PATIENCE_S
        processes = processes_below(os.getpid())
        send(signal.SIGCONT, processes)
        send(self._polite_signal, [process for process in processes if process.parent == os.getpid()])
        while processes_below(os.getpid()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            self._reap()
        # Then firmly, for as long as there are any: what loses its parent becomes ours and is found in the next look.
        while processes := processes_below(os.getpid()):
            send(signal.SIGKILL, processes)
            time.sleep(POLL_S)
            self._reap()
        self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass


if __name__ == "__main__":
    _Guard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).main()
