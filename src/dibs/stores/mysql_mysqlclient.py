"""mysqlclient (MySQLdb), as the MySQL store uses it: its C module, whose public methods send and receive by themselves.

Its own time-outs count whole seconds, and a forked child must not touch what it has opened: both are seen to here.
"""

from __future__ import annotations

import os
from weakref import WeakSet

from MySQLdb import _mysql

from dibs._typing import TYPE_CHECKING, Any
from dibs.stores.mysql_drivers import FOUND_ROWS, SPARE_S, Answer, server_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.stores.mysql_drivers import Link, Where


def connect(where: Where, timeout: float) -> MySQLClientLink:
    seconds = max(1, int(timeout + SPARE_S))
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
        raise server_error(error, connecting=True) from error
    return MySQLClientLink(connection)


class MySQLClientLink:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._result: Any = None
        _INHERITED.add(self)

    def send(self, sql: str) -> None:
        try:
            self._connection.send_query(sql.encode())
        except _mysql.MySQLError as error:
            raise server_error(error) from error

    def receive(self) -> Answer:
        connection = self._connection
        try:
            connection.read_query_result()
            result = connection.store_result()
            self._result = result
            rows = () if result is None else result.fetch_row(0)
            return Answer(connection.affected_rows(), connection.insert_id(), rows)
        except _mysql.MySQLError as error:
            raise server_error(error) from error

    def columns(self) -> Sequence[tuple[str, int]]:
        return [] if self._result is None else [(column[0], column[1]) for column in self._result.describe()]

    def fileno(self) -> int:
        return int(self._connection.fileno())

    def session(self) -> int:
        return int(self._connection.thread_id())

    def close(self) -> None:
        _INHERITED.discard(self)
        self._connection.close()


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
