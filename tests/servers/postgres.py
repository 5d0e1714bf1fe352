"""A private PostgreSQL, and a pooler in front of it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from tests.servers.process import ServerProcess, ServerUnavailable, free_port
from tests.servers.server import Server

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


class PostgresServer(Server):
    """A PostgreSQL of the tests' own, durable as shipped, where everybody needs a password.

    It listens on 127.0.0.1 and on a socket in `socket_folder`. `settings` go on the server's command line. As a
    `standby_of` another it has the same data, follows it, and takes no writes until it is promoted.
    """

    NAME = "PostgreSQL"
    SUPERUSER = "postgres"
    POLITE_SIGNAL = STOP_SIGNALS["immediate"]
    PORT_TAKEN = b"could not bind"

    def __init__(
        self, settings: Mapping[str, object] | None = None, *, standby_of: PostgresServer | None = None
    ) -> None:
        self._programs = find_postgres()
        self._primary = standby_of
        # Shared memory that lies in the data folder goes with it, also when the server is killed and not started again.
        ours = {"max_connections": 200, "log_line_prefix": "%m [%p] %q%u@%d ", "dynamic_shared_memory_type": "mmap"}
        self._settings = {**ours, **(settings or {})}
        self._passwords: dict[str, str] = {self.SUPERUSER: secrets.token_urlsafe(16)}
        if standby_of is not None:
            self._passwords = standby_of._passwords
        self._databases = 0
        #: The superuser's. Each test has a database of its own, and two logins for it take as long as it does.
        self._kept: psycopg.Connection[Any] | None = None
        super().__init__()

    @property
    def socket_folder(self) -> Path:
        return self.folder

    @property
    def data_folder(self) -> Path:
        return self.folder / "data"

    # Where it is

    def url(self, database: str = "postgres", *, user: str = SUPERUSER, password: str | None = None) -> str:
        """A URL over TCP; the password is the user's own unless another one, say a wrong one, is given."""
        secret = self._passwords[user] if password is None else password
        return f"postgresql://{quote(user, '')}:{quote(secret, '')}@127.0.0.1:{self.port}/{quote(database, '')}"

    def psql(self, sql: str, parameters: Sequence[object] | None = None, *, database: str = "postgres") -> list[Any]:
        """Run SQL as the superuser, each statement by itself, on a connection made for it; the rows of the last one."""
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
        self._administer(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database made by `create_database`, whoever is still connected to it."""
        self._administer(f'DROP DATABASE IF EXISTS "{url.rpartition("/")[2]}" WITH (FORCE)')

    def _administer(self, sql: str) -> None:
        """Run SQL as the superuser on a connection that is kept, unless the server has been ended since."""
        if self._kept is not None:
            try:
                self._kept.execute(sql)
                return
            except psycopg.OperationalError:
                self._forget()
        self._kept = psycopg.connect(self.url(), autocommit=True, connect_timeout=10)
        self._kept.execute(sql)

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def close(self) -> None:
        self._forget()
        super().close()

    def create_user(self, name: str) -> None:
        """A role that may log in, with a random password that `url(user=…)` knows, and with no other right."""
        self._passwords[name] = secrets.token_urlsafe(16)
        quoted = name.replace('"', '""')
        self.psql(f"CREATE ROLE \"{quoted}\" LOGIN PASSWORD '{self._passwords[name]}'")

    def facts(self) -> dict[str, str]:
        """Its version, and what decides how much a commit is worth and costs."""
        rows = self.psql(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(%s) ORDER BY name",
            (["fsync", "synchronous_commit", "full_page_writes", "wal_sync_method", "shared_buffers", "max_wal_size"],),
        )
        ((number,),) = self.psql("SHOW server_version")
        return {"PostgreSQL": number, "its settings": ", ".join(f"{name}={value}" for name, value in rows)}

    # What can happen to it

    def stop(self, mode: str = "fast") -> None:
        """Stop it: "smart" (after the last client), "fast" (clients are cut off) or "immediate" (as in a crash)."""
        self._forget()
        self.process.end(STOP_SIGNALS[mode])

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def promote(self) -> None:
        """Make a standby the primary."""
        assert self.psql("SELECT pg_promote()") == [(True,)]

    # How it starts

    def _prepare(self) -> None:
        if self._primary is not None:
            place = [f"--pgdata={self.data_folder}", "--dbname", self._primary.url()]
            options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
            self.process.run_tool([self._programs / "pg_basebackup", *place, *options])
            return
        password_file = self.folder / "password"
        password_file.write_text(self._passwords[self.SUPERUSER])
        password_file.chmod(0o644)  # For the server's user; nobody else can enter the folder.
        # --no-sync: a power cut during the tests need not find this folder. The server itself syncs as shipped.
        options = ["--no-sync", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
        options += [f"--pgdata={self.data_folder}", f"--username={self.SUPERUSER}", f"--pwfile={password_file}"]
        self.process.run_tool([self._programs / "initdb", *options])
        password_file.unlink()

    def _before_start(self) -> None:
        # After a kill the ids in these files may by now be another server's, which would stop this one; we know better.
        (self.data_folder / "postmaster.pid").unlink(missing_ok=True)
        (self.socket_folder / f".s.PGSQL.{self.port}.lock").unlink(missing_ok=True)

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        settings: dict[str, object] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.socket_folder,
            **self._settings,
        }
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        return [self._programs / "postgres", "-D", self.data_folder, *options]

    def _answers(self) -> bool:
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
            raise ServerUnavailable("pgbouncer is missing: scripts/setup_servers.sh installs it")
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
