"""The two drivers of the MySQL store behind one face: send a statement, wait for its answer, read it.

mysqlclient (MySQLdb) is used when it is installed, else PyMySQL, which needs no compiler; ``driver=`` in the URL
decides otherwise. Neither is used through cursors, whose calls last as long as the server likes: an answer is waited
for on the socket, until the deadline, and read when it has begun to arrive. A Ctrl-C therefore finds the store waiting,
never in the middle of a packet. PyMySQL has that seam in two of its private methods (``_execute_command`` and what
``next_result`` calls), mysqlclient in public ones.

Values come back as bytes; what goes out stands in the text of a statement as hexadecimal or a number, so no escaping
rule of any ``sql_mode`` and no character set has a say in it.
"""

from __future__ import annotations

import os
import re
from weakref import WeakSet

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from dibs.clock import Readiness, boot_now
from dibs.errors import InvalidOption
from dibs.stores.keepalive import keep_descriptor_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline

DRIVERS = ("mysqlclient", "pymysql")
SSL_MODES = ("disabled", "preferred", "required", "verify_ca", "verify_identity")
# The client's side of: affected rows are those found, also when nothing in them changed. (CLIENT_FOUND_ROWS)
FOUND_ROWS = 2
# A connection that was idle for longer is looked at before it is used: the server may have closed it meanwhile.
IDLE_S = 5.0
# What the drivers' own time-outs add to ours: they are a second line, for an answer that stops in the middle.
SPARE_S = 1.0


class Where(NamedTuple):
    """What a driver needs to know to connect."""

    host: str
    port: int
    user: str
    password: str
    database: str
    unix_socket: str
    ssl_mode: str
    ssl_ca: str
    ssl_cert: str
    ssl_key: str


class Answer(NamedTuple):
    affected: int
    insert_id: int
    rows: Sequence[tuple[bytes | None, ...]]


class ServerError(Exception):
    """What the server or the driver said, with its code; the text never holds a password."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.code = code
        self.text = text


class TimedOut(Exception):
    """No answer by the deadline."""


class Link(Protocol):
    """One connection. A ServerError with a code from 2000 to 2999 is the driver's: the connection is of no use."""

    def send(self, sql: str) -> None: ...
    def receive(self) -> Answer: ...
    def columns(self) -> Sequence[tuple[str, int]]:
        """Of the last answer: the names of its columns, and their types as the protocol numbers them."""
        ...

    def fileno(self) -> int: ...
    def session(self) -> int:
        """The number by which the server calls it."""
        ...

    def close(self) -> None: ...


class Wire:
    """A link, and how to wait for it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        keep_descriptor_alive(link.fileno())
        self._ready = Readiness(link.fileno())
        self._used_at = boot_now()

    def send(self, sql: str) -> None:
        """Send one statement; ServerError."""
        self._link.send(sql)

    def receive(self, deadline: Deadline) -> Answer:
        """The answer to what was sent; ServerError, or TimedOut."""
        if not self._ready.readable(deadline.remaining()):
            raise TimedOut
        answer = self._link.receive()
        self._used_at = boot_now()
        return answer

    def columns(self) -> Sequence[tuple[str, int]]:
        """Of the last answer: the names of its columns, and their types as the protocol numbers them."""
        return self._link.columns()

    def stale(self) -> bool:
        """Whether the server has closed an idle connection. Nothing is owed to us, so anything to read is its end."""
        return boot_now() - self._used_at > IDLE_S and self._ready.readable(0.0)

    @property
    def session(self) -> int:
        """The number by which the server calls it."""
        return self._link.session()

    def close(self) -> None:
        self._link.close()


def opener(driver: str) -> Callable[[Where, float], Link]:
    """The function that connects with this driver; "" takes the better one that is installed."""
    for name in (driver,) if driver else DRIVERS:
        try:
            return _pymysql_opener() if name == "pymysql" else _mysqlclient_opener()
        except ImportError as missing:
            error = missing
    package = {"mysqlclient": "mysqlclient: pip install mysqlclient"}.get(driver, "PyMySQL: pip install 'dibs[mysql]'")
    raise InvalidOption(f"MySQL and MariaDB need {package}") from error


# -- PyMySQL ----------------------------------------------------------------------------------------------------------


def _pymysql_opener() -> Callable[[Where, float], Link]:
    import pymysql.connections
    from pymysql.constants import COMMAND

    contexts: list[Any] = []  # the one of this address, once it is made

    def context(where: Where) -> Any:
        if not contexts:
            contexts.append(_ssl_context(where))
        return contexts[0]

    def connect(where: Where, timeout: float) -> Link:
        class _Connection(pymysql.connections.Connection):  # type: ignore[misc]
            def _create_ssl_ctx(self, _options: object) -> Any:
                # Asked for without a word of TLS in the URL, too, since PyMySQL 1.2. Its own would take 50 ms to read
                # certificates that it then trusts nobody for.
                return context(where)

        given: dict[str, Any] = {"ssl_disabled": True} if where.ssl_mode == "disabled" else {}
        if where.ssl_mode not in ("disabled", "preferred"):
            given["ssl"] = context(where)
        if where.unix_socket:
            given["unix_socket"] = where.unix_socket
        return _PyMySQLLink(
            _Connection(
                host=where.host,
                port=where.port,
                user=where.user,
                # As bytes: PyMySQL would write a text in Latin-1.
                password=where.password.encode(),
                database=where.database or None,
                charset="utf8mb4",
                use_unicode=False,
                conv={},
                client_flag=FOUND_ROWS,
                autocommit=None,
                connect_timeout=timeout,
                read_timeout=timeout + SPARE_S,
                write_timeout=timeout + SPARE_S,
                **given,
            )
        )

    class _PyMySQLLink:
        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def send(self, sql: str) -> None:
            try:
                self._connection._execute_command(COMMAND.COM_QUERY, sql)
            except pymysql.err.MySQLError as error:
                raise _server_error(error) from error

        def receive(self) -> Answer:
            connection = self._connection
            try:
                affected = connection.next_result()
            except pymysql.err.MySQLError as error:
                raise _server_error(error) from error
            return Answer(affected, connection.insert_id(), connection._result.rows or ())

        def columns(self) -> Sequence[tuple[str, int]]:
            return [(column[0], column[1]) for column in self._connection._result.description or ()]

        def fileno(self) -> int:
            return int(self._connection._sock.fileno())

        def session(self) -> int:
            return int(self._connection.thread_id())

        def close(self) -> None:
            if self._connection.open:
                self._connection.close()

    def translated(where: Where, timeout: float) -> Link:
        try:
            return connect(where, timeout)
        except pymysql.err.MySQLError as error:
            raise _server_error(error, connecting=True) from error

    return translated


def _ssl_context(where: Where) -> Any:
    import ssl

    try:
        if where.ssl_mode in ("verify_ca", "verify_identity"):
            context = ssl.create_default_context(cafile=where.ssl_ca or None)
            # The certificates that MySQL makes for itself are not strict, which Python 3.13 asks for by default.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            context.check_hostname = where.ssl_mode == "verify_identity"
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if where.ssl_cert:
            context.load_cert_chain(where.ssl_cert, where.ssl_key or None)
    except (OSError, ssl.SSLError) as error:
        raise InvalidOption(f"the TLS files named in the MySQL URL cannot be used: {error}") from error
    return context


# -- mysqlclient ------------------------------------------------------------------------------------------------------


def _mysqlclient_opener() -> Callable[[Where, float], Link]:
    from MySQLdb import _mysql

    def connect(where: Where, timeout: float) -> Link:
        seconds = max(1, int(timeout + SPARE_S))  # it counts whole seconds
        given: dict[str, Any] = {"unix_socket": where.unix_socket} if where.unix_socket else {}
        files = {"ca": where.ssl_ca, "cert": where.ssl_cert, "key": where.ssl_key}
        files = {key: value for key, value in files.items() if value}
        if files:
            given["ssl"] = files
        if where.ssl_mode != "preferred":
            given["ssl_mode"] = where.ssl_mode.upper()
        if where.database:
            given["database"] = where.database
        try:
            connection = _mysql.connect(
                host=_host(where),
                port=where.port,
                user=where.user,
                password=where.password,
                conv={},
                client_flag=FOUND_ROWS,
                connect_timeout=seconds,
                read_timeout=seconds,
                write_timeout=seconds,
                **given,
            )
            connection.set_character_set("utf8mb4")
        except _mysql.MySQLError as error:
            raise _server_error(error, connecting=True) from error
        return _MySQLClientLink(connection)

    class _MySQLClientLink:
        def __init__(self, connection: Any) -> None:
            self._connection = connection
            self._result: Any = None
            _INHERITED.add(self)

        def send(self, sql: str) -> None:
            try:
                self._connection.send_query(sql.encode())
            except _mysql.MySQLError as error:
                raise _server_error(error) from error

        def receive(self) -> Answer:
            connection = self._connection
            try:
                connection.read_query_result()
                result = connection.store_result()
                self._result = result
                rows = () if result is None else result.fetch_row(0)
                return Answer(connection.affected_rows(), connection.insert_id(), rows)
            except _mysql.MySQLError as error:
                raise _server_error(error) from error

        def columns(self) -> Sequence[tuple[str, int]]:
            return [] if self._result is None else [(column[0], column[1]) for column in self._result.describe()]

        def fileno(self) -> int:
            return int(self._connection.fileno())

        def session(self) -> int:
            return int(self._connection.thread_id())

        def close(self) -> None:
            _INHERITED.discard(self)
            self._connection.close()

    return connect


def _host(where: Where) -> str:
    """Its "localhost" would mean a socket file; what a URL says must not depend on the driver.

    Where a certificate may have to be for this name (MariaDB's library looks under verify_ca, too), it is written in
    capitals: so it is a host like others.
    """
    if where.host != "localhost" or where.unix_socket:
        return where.host
    return "LOCALHOST" if where.ssl_mode.startswith("verify") else "127.0.0.1"


class _Inherited:
    """The connections of mysqlclient that a forked child gets copies of.

    When the child drops one, libmysqlclient says goodbye to the server on it, which would end the parent's connection.
    So in the child their descriptors lead nowhere.
    """

    def __init__(self) -> None:
        self._links: WeakSet[Any] = WeakSet()
        self._told = False

    def add(self, link: Link) -> None:
        self._links.add(link)
        if not self._told:
            self._told = True
            os.register_at_fork(after_in_child=self._lead_nowhere)

    def discard(self, link: Link) -> None:
        self._links.discard(link)

    def _lead_nowhere(self) -> None:
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for link in list(self._links):
            os.dup2(nowhere, link.fileno(), inheritable=False)
        os.close(nowhere)


# A process forks as a whole, so what must be told of it is known to the module as a whole.
_INHERITED = _Inherited()


def _server_error(error: Exception, *, connecting: bool = False) -> ServerError:
    """What a driver raised. TLS that fails while connecting is a wrong certificate, say; or it was cut, as later."""
    code, *texts = error.args or (0,)
    told = ServerError(code if isinstance(code, int) else 0, " ".join(str(text) for text in texts))
    # PyMySQL tells a failed TLS handshake as a host that cannot be reached.
    original = getattr(error, "original_exception", None)
    if told.code == CR_SSL or type(original).__module__ == "ssl":
        cut = not connecting or _CUT.search(told.text) is not None
        told.code = CR_SERVER_LOST if cut else CR_SSL
    return told


CR_SERVER_LOST, CR_SSL = 2013, 2026
# What is said of TLS that was cut: OpenSSL's words, or the system's. (MariaDB's library from 3.4 on gives the system's
# number, of whichever error came last: "TLS/SSL error: Resource temporarily unavailable (11)".)
_CUT = re.compile(r"eof|syscall|lib\(0\)|connection reset|broken pipe|timed out|\(\d+\)$", re.IGNORECASE)
