"""One connection to a Redis or Valkey: making it, commands out, answers in, by a deadline.

redis-py makes the connection: it knows addresses, logins and TLS, and its own retries are off. Requests then travel
over the driver's socket as bytes, many in one flight, and their answers are read here. For a request must not last
longer than its deadline, while the driver's time-out is one for each read: a server that trickles would keep a thread
for as long as it likes.

An answer that is missing is StoreUnavailable, and whoever uses the wire then closes it, so that a late answer is never
read as that to something else. What a server refuses is a ``Refusal`` among the answers.
"""

from __future__ import annotations

import ssl

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported
from dibs.store import TakesNoWrites
from dibs.stores.greetings import heard, speaks_tls, was_cut
from dibs.stores.inlet import Inlet

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as missing:
    raise InvalidOption("Redis and Valkey need redis-py: pip install 'dibs[redis]'") from missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dibs.clock import Deadline
    from dibs.stores.parts import Parts

SERVER_MIN = 6
# How long an interrupted caller waits for the answer to what it sent.
FINISH_S = 0.5
READ_BYTES = 65536
# Refusals of a whole server that pass by themselves; nothing was applied.
PASSING = frozenset(("LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS", "MISCONF"))
LOGIN = frozenset(("NOAUTH", "WRONGPASS", "NOPERM"))
# What redis-py cuts off where it has a class for the code; newer versions keep it beside the text.
CODES: tuple[tuple[type[Exception], str], ...] = (
    (redis.exceptions.ReadOnlyError, "READONLY"),
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.TryAgainError, "TRYAGAIN"),
    (redis.exceptions.MasterDownError, "MASTERDOWN"),  # a kind of ClusterDownError
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
    (redis.exceptions.MovedError, "MOVED"),
)


class Place(NamedTuple):
    """What a URL says of where the leases are."""

    hosts: tuple[tuple[str, int], ...]
    #: A Unix socket, instead of hosts.
    path: str | None
    tls: bool
    #: Arguments of the driver's connections: db, login, TLS.
    login: dict[str, Any]
    #: The name under which sentinels know the master, and their own arguments.
    sentinel: str | None
    sentinel_login: dict[str, Any]
    cluster: bool
    #: Where hints go, followed by the client that is told.
    channels: str
    #: Whether this address has ever worked; shared by all links to it. What fails from the start is misconfigured.
    worked: list[bool]
    #: Which nodes of a cluster do not answer; shared likewise.
    parts: Parts


class Refusal(NamedTuple):
    """An error that a server answered."""

    code: str
    text: str


def packed(*words: str) -> bytes:
    """One command as the protocol writes it: each word behind its length in bytes."""
    text = f"*{len(words)}\r\n" + "".join([f"${len(word)}\r\n{word}\r\n" for word in words])
    if text.isascii():
        return text.encode()
    raw = [word.encode() for word in words]
    return b"*%d\r\n" % len(raw) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in raw])


def packed_raw(*words: str | bytes) -> bytes:
    """The same where some words are bytes, which need not be text."""
    raw = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"*%d\r\n" % len(raw) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in raw])


# -- one connection ---------------------------------------------------------------------------------------------------


class _Incomplete(Exception):
    """More bytes are needed to read the next answer."""


class Wire:
    """One connection to one server. Nothing here waits longer than its deadline, also when bytes come one by one."""

    def __init__(self, connection: Any, where: str) -> None:
        self._connection = connection
        self._inlet = Inlet(connection._sock)  # the driver has no public name for it
        self._data = b""
        self._at = 0
        #: How many answers are still to come, and whether a command has left in part only.
        self._owed = 0
        self._torn = False
        self.where = where
        self.facts: dict[str, str] = {}

    def exchange(self, data: bytes, count: int, deadline: Deadline) -> list[Any]:
        self.send(data, count, deadline)
        return self.receive(deadline)

    def send(self, data: bytes, count: int, deadline: Deadline) -> None:
        """Send commands to which there will be so many answers."""
        self._torn = True
        while data:
            try:
                rest = self._inlet.send(data)
            except OSError as error:
                raise StoreUnavailable(f"{self.where}: {error}") from error
            if len(rest) == len(data):
                left = deadline.remaining()
                if not left or not self._inlet.writable(left):
                    raise StoreUnavailable(f"{self.where} did not take the request in time")
                self._read()  # answers that wait to be read would look like room to write
            data = rest
        self._owed += count
        self._torn = False

    def receive(self, deadline: Deadline, silence: Deadline | None = None) -> list[Any]:
        """The answers to what was sent. ``silence``: until when something must have been heard."""
        answers = []
        limit = silence or deadline
        while self._owed:
            try:
                answer, self._at = _parse(self._data, self._at)
            except _Incomplete:
                left = limit.remaining()
                if self._read(left):
                    limit = deadline
                elif not left:
                    raise StoreUnavailable(f"{self.where} did not answer in time") from None
                continue
            answers.append(answer)
            self._owed -= 1
        return answers

    def finish(self, deadline: Deadline) -> None:
        """Wait a moment until the server has done what it was asked, for a caller that was interrupted."""
        try:
            if not self._torn:
                self.receive(deadline.within(FINISH_S))
        except StoreUnavailable:
            pass  # it is closed anyway

    def arrived(self) -> list[Any]:
        """The messages that are there, without waiting for more. What is left makes the descriptor readable again."""
        messages = []
        while self._read():
            try:
                while True:
                    message, self._at = _parse(self._data, self._at)
                    messages.append(message)
            except _Incomplete:
                if not self._inlet.has_more():
                    break
        return messages

    def _read(self, wait_s: float = 0.0) -> bool:
        """Take what has come, or comes first within so many seconds; False when nothing did."""
        try:
            data = self._inlet.receive(READ_BYTES, wait_s)
        except OSError as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error
        if not data:
            return False
        self._data = self._data[self._at :] + data
        self._at = 0
        return True

    def fileno(self) -> int:
        return self._inlet.fileno()

    def close(self) -> None:
        self._connection.disconnect()


def _parse(data: bytes, at: int) -> tuple[Any, int]:
    """The answer that begins there, and where the next one does."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise _Incomplete
    kind, line, after = data[at : at + 1], data[at + 1 : end], end + 2
    if kind == b"$":
        length = int(line)
        if length < 0:
            return None, after
        if len(data) < after + length + 2:
            raise _Incomplete
        return data[after : after + length], after + length + 2
    if kind == b"*":
        length = int(line)
        if length < 0:
            return None, after
        items = []
        for _ in range(length):
            item, after = _parse(data, after)
            items.append(item)
        return items, after
    if kind == b":":
        return int(line), after
    if kind == b"+":
        return line, after
    if kind == b"-":
        return refusal(line), after
    raise StoreUnavailable(f"that is no Redis: it answered {data[at : at + 20]!r}")


def refusal(line: bytes) -> Refusal:
    """The error with its code: its first word, in capitals. Scripts of Redis 6 put words of their own before it."""
    text = line.decode("utf-8", "replace")
    code = text.split(" ", 1)[0]
    if not code.isupper() or text.startswith("ERR Error running script"):
        code = text.partition(" -")[2].split(" ", 1)[0]
    return Refusal(code.lstrip("-"), text)


def raised(answer: Refusal, where: str, *, maybe_applied: bool, in_script: bool = False) -> Exception:
    """The error of dibs for what a server refused as a whole."""
    text = f"{where}: {answer.text}".rstrip(".")
    if answer.code == "NOAUTH":
        return SetupRequired(
            f"{text}. Give the password in the URL, redis://:password@host, behind a user if it has one"
        )
    if answer.code in LOGIN:
        return SetupRequired(f"{text}. docs/how-to/redis.md lists the rights that dibs needs")
    if answer.code == "DENIED":  # protected mode
        return SetupRequired(text)
    # Redis has no code of its own for it. What follows are the arguments, which may be secrets.
    if answer.text.startswith("ERR unknown command"):
        text = text.partition(", with args")[0]
        return SetupRequired(f"{text}. dibs needs it: is it renamed there, or switched off?")
    # Nor for one within a script: its right is missing (before Redis 7.2), it is renamed, or meets what is not ours.
    if in_script and answer.code in ("ERR", "") and "Script killed" not in answer.text:
        return SetupRequired(
            f"{text}. Has this login the rights that `dibs schema` prints? Is one of the commands renamed? "
            "Or has somebody else written to a key of dibs's?"
        )
    if answer.code == "READONLY":
        hint = "Name the master, or its sentinels with ?sentinel="
        return TakesNoWrites(f"{text}. {hint}", maybe_applied=maybe_applied)
    if answer.code == "WRONGTYPE":
        return SetupRequired(f"{text}. A key that begins as dibs's do is somebody else's: see prefix=")
    if answer.code in ("MOVED", "ASK", "CROSSSLOT"):
        return SetupRequired(f"{text}. This is a cluster: add ?cluster=true")
    return StoreUnavailable(text, maybe_applied=maybe_applied and answer.code not in PASSING)


def connect(place: Place, host: tuple[str, int] | None, login: dict[str, Any], deadline: Deadline) -> Wire:
    """A connection, logged in."""
    left = max(deadline.remaining(), 0.001)
    arguments = {
        **login,
        "socket_timeout": left,
        "socket_connect_timeout": left,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if host is None:
        where = f"Redis on {place.path}"
        kind: Any = redis.UnixDomainSocketConnection
        connection = kind(path=place.path, **arguments)
    else:
        where = f"Redis on {host[0]}:{host[1]}"
        kind = redis.SSLConnection if place.tls else redis.Connection
        connection = kind(host=host[0], port=host[1], **arguments)
    # It would say what it is by CLIENT SETINFO, and pass over what a server says that turns clients away.
    connection.driver_info = connection.lib_name = connection.lib_version = None
    try:
        connection.connect()
    except (redis.ConnectionError, redis.TimeoutError) as error:
        said = str(error).rstrip(".")
        causes = list(_causes(error))
        if any(isinstance(cause, redis.AuthenticationError) for cause in causes):
            raise SetupRequired(f"{where}: {said}. Check user and password in the URL") from error
        hint = ""
        if host is not None and not place.worked:
            if place.tls and any(_refused(cause) for cause in causes):
                raise SetupRequired(f"{where}: {said}. Check the TLS options in the URL") from error
            # A server without TLS waits for more of what it is told in it.
            if any(was_cut(cause) or (place.tls and isinstance(cause, TimeoutError)) for cause in causes):
                hint = f". Does it {'speak' if place.tls else 'want'} TLS (rediss://)?"
                if place.tls and heard(host, b"PING\r\n", deadline):
                    raise SetupRequired(f"{where}: it does not speak TLS: write redis:// ({said})") from error
                if not place.tls and speaks_tls(host, deadline):
                    raise SetupRequired(f"{where}: it wants TLS: write rediss:// ({said})") from error
        raise StoreUnavailable(f"{where}: {said}{hint}", maybe_applied=False) from error
    except redis.InvalidResponse as error:
        raise SetupRequired(f"{where}: that is no Redis, or it wants TLS (rediss://): {error}") from error
    except redis.RedisError as error:
        answer = refused_with(error)
        if answer.code in ("ERR", ""):
            said = answer.text.rstrip(".")
            raise SetupRequired(f"{where}: {said}. Check user, password and database in the URL") from error
        raise raised(answer, where, maybe_applied=False) from error
    except OSError as error:
        raise StoreUnavailable(f"{where}: {error}", maybe_applied=False) from error
    return Wire(connection, where)


def refused_with(error: redis.RedisError) -> Refusal:
    """What the server said while redis-py logged in, with the code that redis-py may have taken away."""
    code = getattr(error, "status_code", None) or next((code for kind, code in CODES if isinstance(error, kind)), None)
    if code is None and str(error).startswith("DB index"):
        code = "ERR"  # as 5.2 tells it, and DB is no code
    return refusal(str(error).encode()) if code is None else Refusal(code, f"{code} {error}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refused(error: BaseException) -> bool:
    """No authority, no certificate file, or a certificate for somebody else: that is no outage."""
    return isinstance(error, FileNotFoundError) or (isinstance(error, ssl.SSLError) and not was_cut(error))


def greet(wire: Wire, place: Place, deadline: Deadline) -> None:
    """Read what decides our promises. What this login may not ask is not known."""
    commands = (
        ("INFO",),
        ("CONFIG", "GET", "append*"),
        ("CONFIG", "GET", "save"),
        ("PUBLISH", place.channels + "nobody", ""),
    )
    flight = b"".join(packed(*words) for words in commands)
    # By itself: a server that turns clients away answers once, whatever it is told, and closes the connection.
    (named,) = wire.exchange(packed("CLIENT", "SETNAME", "dibs"), 1, deadline)
    if isinstance(named, Refusal) and named.code == "DENIED":
        raise raised(named, wire.where, maybe_applied=False)
    try:
        info, append, save, published = wire.exchange(flight, len(commands), deadline)
    except StoreUnavailable as error:
        if isinstance(named, Refusal):
            raise StoreUnavailable(f"{error}; it had said: {named.text}", maybe_applied=False) from error
        raise
    if isinstance(info, bytes):
        pairs = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
        wire.facts = {key: value for key, _, value in pairs if value}
    elif isinstance(info, Refusal) and info.code not in ("NOPERM", "ERR"):  # ERR: an unknown command
        raise raised(info, wire.where, maybe_applied=False)
    for settings in (append, save):
        if isinstance(settings, list):
            words = [word.decode() for word in settings]
            wire.facts.update(zip(words[::2], words[1::2], strict=True))
    wire.facts["publishes"] = "no" if isinstance(published, Refusal) else "yes"
    version = wire.facts.get("redis_version", str(SERVER_MIN))
    if int(version.split(".")[0]) < SERVER_MIN:
        raise Unsupported(f"{wire.where} is version {version}; dibs needs {SERVER_MIN} or later")
    mode = wire.facts.get("redis_mode") or wire.facts.get("server_mode")
    if mode == "sentinel":
        raise SetupRequired(f"{wire.where} is a sentinel: add ?sentinel= with the name of the master it watches")
    if mode == "cluster" and not place.cluster:
        raise SetupRequired(f"{wire.where} is a node of a cluster: add ?cluster=true")
    if mode == "standalone" and place.cluster:
        raise SetupRequired(f"{wire.where} is no cluster: leave ?cluster= out")
