"""The two drivers of the MySQL store behind one face: send a statement, wait for its answer, read it.

mysqlclient (``mysql_mysqlclient``) is used when it is installed, else PyMySQL (``mysql_pymysql``), which needs no
compiler; ``driver=`` in the URL decides otherwise. Neither is used through cursors, whose calls last as long as the
server likes: an answer is waited for on the socket, until the deadline, and read when it has begun to arrive. A Ctrl-C
therefore finds the store waiting, never in the middle of a packet.

Values come back as bytes; what goes out stands in the text of a statement as hexadecimal or a number, so no escaping
rule of any ``sql_mode`` and no character set has a say in it.
"""

from __future__ import annotations

import re

from dibs._typing import TYPE_CHECKING, NamedTuple, Protocol
from dibs.clock import Readiness, boot_now
from dibs.stores.keepalive import keep_descriptor_alive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline

DRIVERS = ("mysqlclient", "pymysql")
SSL_MODES = ("disabled", "preferred", "required", "verify_ca", "verify_identity")
# The client's side of: affected rows are those found, also when nothing in them changed. (CLIENT_FOUND_ROWS)
FOUND_ROWS = 2
# A connection that was idle for longer is looked at before it is used: the server may have closed it meanwhile.
IDLE_S = 5.0
# What the drivers' own time-outs add to ours: they are a second line, for an answer that stops in the middle.
SPARE_S = 1.0
CR_SERVER_LOST, CR_SSL = 2013, 2026
# What is said of TLS that was cut: OpenSSL's words, or the system's. (MariaDB's library from 3.4 on gives the system's
# number, of whichever error came last: "TLS/SSL error: Resource temporarily unavailable (11)".)
_CUT = re.compile(r"eof|syscall|lib\(0\)|connection reset|broken pipe|timed out|\(\d+\)$", re.IGNORECASE)


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

    @property
    def at(self) -> str:
        """Where the server is, for people."""
        return self.unix_socket or f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


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


def server_error(error: Exception, *, connecting: bool = False) -> ServerError:
    """What a driver raised. TLS that fails while connecting is a wrong certificate, say; or it was cut, as later."""
    code, *texts = error.args or (0,)
    told = ServerError(code if isinstance(code, int) else 0, " ".join(str(text) for text in texts))
    # PyMySQL tells a failed TLS handshake as a host that cannot be reached.
    original = getattr(error, "original_exception", None)
    if told.code == CR_SSL or type(original).__module__ == "ssl":
        cut = not connecting or _CUT.search(told.text) is not None
        told.code = CR_SERVER_LOST if cut else CR_SSL
    return told
