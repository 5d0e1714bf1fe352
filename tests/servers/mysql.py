"""A private MariaDB, or a MySQL where there is no MariaDB."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pymysql
from pymysql.constants import CLIENT

from tests.servers.server import Server, find_program

# What MySQL and newer MariaDBs have unless they are told not to: TLS, and MySQL a second port and a folder.
NO_TLS = {"mariadbd": {"ssl": "OFF"}, "mysqld": {"tls-version": ""}}
ALONE = {"mariadbd": {}, "mysqld": {"mysqlx": "OFF", "secure-file-priv": "NULL"}}


class MariaDBServer(Server):
    """A MariaDB (or MySQL) of the tests' own, durable as shipped, where everybody needs a password.

    It listens on 127.0.0.1 and on the socket `socket_path`. `settings` go on the server's command line. As a
    `replica_of` another it follows that one from now on, and takes writes of the superuser only until it is promoted.
    """

    NAME = "MariaDB"
    SUPERUSER = "root"
    PORT_TAKEN = b"Address already in use"

    def __init__(
        self, settings: Mapping[str, object] | None = None, *, replica_of: MariaDBServer | None = None
    ) -> None:
        self._settings = {"max-connections": 300, **(settings or {})}
        self._passwords: dict[str, str] = {self.SUPERUSER: secrets.token_urlsafe(16)}
        if replica_of is not None:
            self._passwords = replica_of._passwords
        self._databases = 0
        super().__init__()
        if replica_of is not None:
            self._follow(replica_of)

    @property
    def _kind(self) -> str:
        return Path(self._program).name

    @property
    def is_mariadb(self) -> bool:
        return self._kind == "mariadbd"

    @property
    def data_folder(self) -> Path:
        return self.folder / "data"

    @property
    def socket_path(self) -> Path:
        return self.folder / "mariadb.sock"

    # Where it is

    def url(self, database: str = "mysql", *, user: str = SUPERUSER, password: str | None = None) -> str:
        """A URL over TCP; the password is the user's own unless another one, say a wrong one, is given."""
        secret = self._passwords[user] if password is None else password
        return f"mysql://{quote(user, '')}:{quote(secret, '')}@127.0.0.1:{self.port}/{quote(database, '')}"

    def connect(self, database: str = "mysql", **options: Any) -> pymysql.connections.Connection[Any]:
        """A connection of the superuser in autocommit."""
        # Without TLS, for which PyMySQL would read all of the system's certificates each time (25 ms).
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user=self.SUPERUSER,
            password=self._passwords[self.SUPERUSER],
            database=database,
            autocommit=True,
            connect_timeout=10,
            ssl_disabled=True,
            **options,
        )

    def sql(self, text: str, parameters: Sequence[object] = (), *, database: str = "mysql") -> list[Any]:
        """Run SQL as the superuser, on a connection made for it; the rows of the last statement."""
        with self.connect(database, client_flag=CLIENT.MULTI_STATEMENTS) as connection, connection.cursor() as cursor:
            cursor.execute(text, parameters or None)
            rows = list(cursor.fetchall())
            while cursor.nextset():
                rows = list(cursor.fetchall())
            return rows

    def create_database(self) -> str:
        """A new empty database; its URL as the superuser."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.sql(f"CREATE DATABASE `{name}`")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database made by `create_database`."""
        self.sql(f"DROP DATABASE IF EXISTS `{url.rpartition('/')[2].partition('?')[0]}`")

    def create_user(self, name: str, options: str = "") -> None:
        """A user that may log in from here, with a random password that `url(user=…)` knows, and no other right."""
        self._passwords[name] = secrets.token_urlsafe(16)
        self.sql(f"CREATE USER '{name}'@'127.0.0.1' IDENTIFIED BY '{self._passwords[name]}' {options}")

    def _follow(self, source: MariaDBServer) -> None:
        log, position = source._position()
        said = f"{source.port}, {{0}}_USER='root', {{0}}_PASSWORD='{self._passwords[self.SUPERUSER]}'"
        said = f"{{0}}_HOST='127.0.0.1', {{0}}_PORT={said}, {{0}}_LOG_FILE='{log}', {{0}}_LOG_POS={position}"
        if self.is_mariadb:
            self.sql(f"CHANGE MASTER TO {said.format('MASTER')}; START SLAVE; SET GLOBAL read_only = ON")
        else:
            more = "SOURCE_SSL=0, GET_SOURCE_PUBLIC_KEY=1"
            self.sql(f"CHANGE REPLICATION SOURCE TO {said.format('SOURCE')}, {more}; START REPLICA")
            self.sql("SET GLOBAL read_only = ON")

    def _position(self) -> tuple[str, int]:
        """Where its log of changes ends."""
        told = self.sql("SHOW MASTER STATUS" if self.is_mariadb else "SHOW BINARY LOG STATUS")[0]
        return told[0], int(told[1])

    def has_all_of(self, source: MariaDBServer) -> bool:
        """Whether this replica has, or soon had, all that was written there."""
        wait = "MASTER_POS_WAIT" if self.is_mariadb else "SOURCE_POS_WAIT"
        ((lacked,),) = self.sql(f"SELECT {wait}(%s, %s, 10)", source._position())
        return lacked is not None and lacked >= 0

    def promote(self) -> None:
        """Let a replica follow nobody, and take writes."""
        self.sql(f"STOP {'SLAVE' if self.is_mariadb else 'REPLICA'}; SET GLOBAL read_only = OFF")

    def wait_for_replicas(self, on: bool) -> None:
        """From now on a commit is told when a replica has it, however long that takes (semi-synchronous), or not."""
        role = "master" if self.is_mariadb else "source"
        if not self.is_mariadb and on:
            self.sql("INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'")
        self.sql(f"SET GLOBAL rpl_semi_sync_{role}_timeout = 1000000, rpl_semi_sync_{role}_enabled = {on}")

    def facts(self) -> dict[str, str]:
        """Its version, and what decides how much a commit is worth and costs."""
        names = ("innodb_flush_log_at_trx_commit", "innodb_flush_method", "innodb_buffer_pool_size", "log_bin")
        rows = self.sql("SHOW GLOBAL VARIABLES WHERE Variable_name IN %s", (names,))
        ((version,),) = self.sql("SELECT VERSION()")
        return {"MariaDB": version, "MariaDB's settings": ", ".join(f"{name}={value}" for name, value in rows)}

    # How it starts

    def _prepare(self) -> None:
        self._program = find_program("mariadbd", "mysqld", package="mariadb-server")
        # Its temporary tables, too: two that begin together have been seen to take one file in /tmp for their own.
        options = ["--no-defaults", f"--datadir={self.data_folder}", f"--tmpdir={self.folder}"]
        if self.is_mariadb:
            install = find_program("mariadb-install-db", package="mariadb-server")
            self.process.run_tool([install, *options, "--skip-test-db", "--auth-root-authentication-method=normal"])
        else:
            # What names are written in is decided once, for the data.
            case = self._settings.get("lower-case-table-names", 0)
            self.process.run_tool(
                [self._program, *options, f"--lower-case-table-names={case}", "--initialize-insecure"]
            )
        password = self._passwords[self.SUPERUSER]
        at_start = self.folder / "at-start.sql"
        at_start.write_text(
            f"ALTER USER '{self.SUPERUSER}'@'localhost' IDENTIFIED BY '{password}';\n"
            f"CREATE USER IF NOT EXISTS '{self.SUPERUSER}'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            f"GRANT ALL ON *.* TO '{self.SUPERUSER}'@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        at_start.chmod(0o644)  # For the server's user; nobody else can enter the folder.

    def _before_start(self) -> None:
        self.socket_path.unlink(missing_ok=True)

    def _command(self) -> Sequence[str]:
        options: dict[str, object] = {
            "datadir": self.data_folder,
            "tmpdir": self.folder,
            "socket": self.socket_path,
            "pid-file": self.folder / "mariadb.pid",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "init-file": self.folder / "at-start.sql",
            **ALONE[self._kind],
            **({} if "ssl-cert" in self._settings else NO_TLS[self._kind]),
            **self._settings,
        }
        return [self._program, "--no-defaults", *(f"--{name}={value}" for name, value in options.items())]

    def _answers(self) -> bool:
        try:
            # What takes connections at this port and says nothing is another program, or this very connection: from a
            # port to itself, as the system may give it out while nobody listens there.
            with self.connect(read_timeout=5) as connection, connection.cursor() as cursor:
                cursor.execute("SELECT 1")
                return list(cursor.fetchall()) == [(1,)]
        except pymysql.err.OperationalError:
            return False
