"""PyMySQL, as the MySQL store uses it: what to ask of it, and where it can be stopped between sending and receiving.

That seam is in two of its private methods: ``_execute_command`` sends a statement and waits for nothing, and
``next_result`` reads one answer, which has begun to arrive by then.
"""

from __future__ import annotations

import ssl
from functools import partial

import pymysql.connections
from pymysql.constants import COMMAND

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption
from dibs.stores.mysql_drivers import FOUND_ROWS, SPARE_S, Answer, server_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.stores.mysql_drivers import Where


class Connector:
    """Connects to one address."""

    def __init__(self) -> None:
        self._context: ssl.SSLContext | None = None  # once it is made

    def __call__(self, where: Where, timeout: float) -> PyMySQLLink:
        given: dict[str, Any] = {}
        if where.ssl_mode == "disabled":
            given["ssl_disabled"] = True
        elif where.ssl_mode != "preferred":
            given["ssl"] = self.context(where)
        if where.unix_socket:
            given["unix_socket"] = where.unix_socket
        try:
            connection = _Connection(
                partial(self.context, where),
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
        except pymysql.err.MySQLError as error:
            raise server_error(error, connecting=True) from error
        return PyMySQLLink(connection)

    def context(self, where: Where) -> ssl.SSLContext:
        if self._context is None:
            self._context = _ssl_context(where)
        return self._context


class _Connection(pymysql.connections.Connection):  # type: ignore[misc]
    def __init__(self, context: Callable[[], ssl.SSLContext], **given: Any) -> None:
        self._dibs_context = context
        super().__init__(**given)

    def _create_ssl_ctx(self, _options: object) -> Any:
        # Asked for without a word of TLS in the URL, too, since PyMySQL 1.2. Its own would take 50 ms to read
        # certificates that it then trusts nobody for.
        return self._dibs_context()


class PyMySQLLink:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send(self, sql: str) -> None:
        try:
            self._connection._execute_command(COMMAND.COM_QUERY, sql)
        except pymysql.err.MySQLError as error:
            raise server_error(error) from error

    def receive(self) -> Answer:
        connection = self._connection
        try:
            affected = connection.next_result()
        except pymysql.err.MySQLError as error:
            raise server_error(error) from error
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


def _ssl_context(where: Where) -> ssl.SSLContext:
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
