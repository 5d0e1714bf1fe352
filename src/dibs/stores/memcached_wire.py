"""The connection to memcached: made by pymemcache (names, Unix sockets, TLS, passwords), used in flights.

A flight is many commands sent at once and as many replies read back, by a deadline; pymemcache's own calls are one
command each, and wait as long as they like. Whoever runs into the deadline drops the connection, so a late reply is
never taken for the answer to something else.
"""

from __future__ import annotations

import socket
import ssl

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable
from dibs.stores.greetings import heard, speaks_tls, was_cut
from dibs.stores.inlet import Inlet

try:
    import pymemcache
except ImportError as missing:
    raise InvalidOption("memcached needs pymemcache: pip install 'dibs[memcached]'") from missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline

# How long an interrupted caller waits for the answer to what it sent.
FINISH_S = 0.5
# Much more than this would be fetched from and given back to the operating system for every reply.
RECEIVE_BYTES = 1 << 14
# With TLS, memcached before 1.6.39 forgets what it did not take at once: commands go in records that it can take whole.
RECORD_BYTES_MAX = 8 * 1024
_ERRORS = (b"ERROR", b"CLIENT_ERROR")
# How a server begins that is at its limit of connections; and one that is not, or not any more.
_FULL, _LETS_IN = b"ERROR Too many open connections", (b"VERSION ", b"CLIENT_ERROR")
# The binary protocol's "noop", which most servers understand, and how one that wants a login by SASL refuses it.
_NOOP, _LOG_IN = b"\x80\x0a" + bytes(22), b"\x81\x0a\x00\x00\x00\x00\x00\x20"
_SASL = "wants a login by SASL, which dibs does not speak: use -Y instead of -S"


class Item(NamedTuple):
    """What ``mg key v c t`` brings."""

    cas: int
    #: Ticks left; -1 for ever.
    ticks: int
    data: bytes


Reply = Any  # bytes (a line without its end) or an Item


class Connection:
    """One connection; when ``closed``, it is of no further use."""

    def __init__(self, place: Place, deadline: Deadline) -> None:
        self._place = place
        self._client = place.connected(deadline)
        self.inlet = Inlet(self._client.sock)
        self.closed = False

    def fly(self, commands: Sequence[bytes], counts: Sequence[int], deadline: Deadline) -> list[Reply]:
        """Send commands at once; each is answered by so many lines or items, in the order of the commands."""
        if self._place.tls is None:
            return self._fly(b"".join(commands), sum(counts), deadline)
        replies: list[Reply] = []
        begin = size = 0
        for end, command in enumerate(commands):
            if end > begin and size + len(command) > RECORD_BYTES_MAX:
                replies += self._fly(b"".join(commands[begin:end]), sum(counts[begin:end]), deadline)
                begin, size = end, 0
            size += len(command)
        return replies + self._fly(b"".join(commands[begin:]), sum(counts[begin:]), deadline)

    def _fly(self, commands: bytes, count: int, deadline: Deadline) -> list[Reply]:
        flight = _Flight(self, commands, count)
        self._run(flight, deadline)
        if flight.error is not None:
            self.close()
            raise StoreUnavailable(f"{self._place.shown} did not understand: {shown(flight.error)}")
        return flight.replies

    def ask(self, command: str, deadline: Deadline) -> list[str]:
        """Send a command that is answered by many lines and END; or one line that says why not."""
        flight = _Flight(self, command.encode() + b"\r\n", 0)
        self._run(flight, deadline)
        return flight.buffer.decode("utf-8", "replace").splitlines()

    def stats(self, what: str, deadline: Deadline) -> dict[str, str]:
        words = [line.split(" ", 2) for line in self.ask(f"stats {what}".rstrip(), deadline)]
        return {line[1]: line[2] for line in words if len(line) == 3 and line[0] == "STAT"}

    def _run(self, flight: _Flight, deadline: Deadline) -> None:
        try:
            flight.run(deadline)
        except (OSError, ValueError) as error:
            self.close()
            text = f"{self._place.shown}: {error}"
            raise StoreUnavailable(text, maybe_applied=flight.begun) from error
        except BaseException:
            # Ctrl-C. What was sent will be done; were that to happen after the release that follows on another
            # connection, the name would stay granted to nobody. So let it finish first, if it is quick. What was sent
            # and read just then is not noted: the next replies on this connection could be taken for others.
            try:
                flight.run(deadline.within(FINISH_S))
            except (OSError, ValueError):
                pass
            finally:
                self.close()
            raise

    def close(self) -> None:
        self.closed = True
        self._client.close()


class _Flight:
    """Bytes on their way out and replies on their way back, at once: a server that cannot write does not read."""

    __slots__ = ("_connection", "_count", "_left", "begun", "buffer", "error", "replies")

    def __init__(self, connection: Connection, commands: bytes, count: int) -> None:
        self._connection = connection
        self._left = commands
        #: Replies that are still to come; 0 for one that ends with END.
        self._count = count
        self.buffer = b""
        self.begun = False
        self.replies: list[Reply] = []
        #: The first line by which the server says that it did not understand.
        self.error: bytes | None = None

    def run(self, deadline: Deadline) -> None:
        """Until all is sent and answered. Again, after an interruption, to wait for that: it may tell nonsense then."""
        inlet = self._connection.inlet
        if self._count and len(self.replies) == self._count:
            return
        while True:
            seconds = deadline.remaining()
            if self._left:
                self.begun = True
                left, self._left = self._left, b""  # not to be sent twice, if that is interrupted
                self._left = inlet.send(left)
            if self._left:
                if not inlet.writable(seconds):
                    raise TimeoutError("no answer in time")
                seconds = 0.0
            received = inlet.receive(RECEIVE_BYTES, seconds)
            if not received and not self._left and not deadline.remaining():
                raise TimeoutError("no answer in time")
            while received:
                self.buffer += received
                if self._complete():
                    return
                received = inlet.receive(RECEIVE_BYTES)  # TLS may have more in hand than can be waited for

    def _complete(self) -> bool:
        buffer, replies, count, at = self.buffer, self.replies, self._count, 0
        if not count:
            return buffer.endswith(b"END\r\n") or (buffer.endswith(b"\r\n") and buffer.startswith((b"BUSY", *_ERRORS)))
        while True:
            end = buffer.find(b"\r\n", at)
            if end < 0:
                break
            if buffer.startswith(b"VA ", at):
                # As asked for: c, then t. A server may add flags of its own.
                _, size, cas, ticks = buffer[at:end].split(b" ", 4)[:4]
                start = end + 2
                end = start + int(size)
                if len(buffer) < end + 2:
                    break
                replies.append(Item(int(cas[1:]), int(ticks[1:]), buffer[start:end]))
            else:
                if buffer.startswith(_ERRORS, at) and self.error is None:
                    self.error = buffer[at:end]
                replies.append(buffer[at:end])
            at = end + 2
            if len(replies) == count:
                return True
        self.buffer = buffer[at:]
        return False


class _Sockets:
    """The socket module as pymemcache sees it: with one address of a name, since it tries only the first itself."""

    def __init__(self, address: object) -> None:
        self._address = address

    def getaddrinfo(self, *_: object) -> list[object]:
        return [self._address]

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class Place(NamedTuple):
    """Where the server is, and how to get in."""

    shown: str
    #: Host and port, or the path of a Unix socket.
    server: tuple[str, int] | str
    user: str | None
    password: str
    tls: ssl.SSLContext | None
    #: Has anybody ever got in? Shared by the stores of one address.
    known_good: list[bool]

    def connected(self, deadline: Deadline) -> Any:
        """A pymemcache client that has greeted the server and given the password it wants."""
        addresses: list[Any] = [None]
        try:
            if not isinstance(self.server, str):
                addresses = socket.getaddrinfo(*self.server, type=socket.SOCK_STREAM)
            for address in addresses:
                try:
                    client = self._greeted(address, deadline)
                except ssl.SSLError:
                    raise
                except OSError:
                    if address is addresses[-1]:
                        raise
                else:
                    break
        except (OSError, pymemcache.MemcacheError) as error:
            raise self._translated(error, deadline) from error
        if not self.known_good:
            self.known_good.append(True)
        return client

    def _greeted(self, address: object, deadline: Deadline) -> Any:
        seconds = max(0.05, deadline.remaining())
        client = pymemcache.Client(
            self.server,
            connect_timeout=seconds,
            timeout=seconds,
            no_delay=True,
            tls_context=self.tls,
            socket_module=_Sockets(address),
        )
        try:
            try:
                client.version()
            except pymemcache.MemcacheClientError as refused:
                if self.user is None or isinstance(refused, pymemcache.MemcacheUnknownCommandError):
                    raise
                # Only a server that has just asked for it is sent the password: any other would keep it as an item.
                client.set("dibs", f"{self.user} {self.password}", noreply=False)
                client.version()
        except BaseException:
            client.close()
            raise
        return client

    def _translated(self, error: Exception, deadline: Deadline) -> Exception:
        text = f"{self.shown}: {str(error) or 'it closed the connection without a word'}"
        unknown = isinstance(error, pymemcache.MemcacheUnknownCommandError)
        cut = isinstance(error, pymemcache.MemcacheUnexpectedCloseError) or was_cut(error)
        if unknown or isinstance(error, ssl.SSLError) or (cut and not self.known_good):
            # At its limit memcached answers whatever comes by an ERROR, in text also where it wants TLS, and closes.
            said = heard(self.server, b"version\r\n", deadline)
            if said.startswith(_FULL) or (unknown and (self.known_good or said.startswith(_LETS_IN))):
                full = f"{self.shown} has too many open connections: raise its -c, or close some"
                return StoreUnavailable(full, maybe_applied=False)
        if unknown:
            return SetupRequired(f"what answers at {self.shown} is not memcached, or does not speak text ({error})")
        if cut:
            wanted = None if self.known_good else self._wanted(deadline)
            if wanted is not None:
                return SetupRequired(f"{self.shown} closed the connection without a word: it {wanted}")
        elif isinstance(error, TimeoutError):
            if not self.known_good and self._wants_sasl(deadline):
                return SetupRequired(f"{self.shown} says nothing: it {_SASL}")
        elif isinstance(error, pymemcache.MemcacheClientError):
            return SetupRequired(f"{self.shown} refuses user or password, or wants one in the URL")
        elif isinstance(error, pymemcache.MemcacheUnknownError):
            return SetupRequired(f"what answers at {self.shown} is not memcached, or does not speak text ({error})")
        elif isinstance(error, PermissionError) or (isinstance(error, ssl.SSLError) and not self.known_good):
            return SetupRequired(text)
        return StoreUnavailable(text, maybe_applied=False)

    def _wanted(self, deadline: Deadline) -> str | None:
        """What a server wants to hear that closes our connection; None: nothing, so it was an outage."""
        if self.tls is not None:
            return "does not speak TLS (?tls=off)" if heard(self.server, b"version\r\n", deadline) else None
        if speaks_tls(self.server, deadline):
            return "wants TLS (?tls=on)"
        return _SASL if self._wants_sasl(deadline) else None

    def _wants_sasl(self, deadline: Deadline) -> bool:
        return heard(self.server, _NOOP, deadline).startswith(_LOG_IN)


def shown(answer: bytes) -> str:
    return answer[:200].decode("utf-8", "replace")
