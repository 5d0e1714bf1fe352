"""One ZooKeeper session, through kazoo: what dibs asks for, and what the server may answer.

Everything of kazoo is here. A request is sent at once and answered later (``answer``), so that many are under way
together. That a node is, is not, or has changed is an answer (``No``); everything else that goes wrong is raised, as
StoreUnavailable, or as SetupRequired where trying again helps nobody.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Generator
from math import ceil

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.clock import boot_now
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable
from dibs.stores.greetings import heard, speaks_tls, was_cut

try:
    from kazoo import exceptions as kazoo_errors
    from kazoo.client import KazooClient
    from kazoo.handlers.threading import SequentialThreadingHandler
    from kazoo.protocol.serialization import Auth, Connect
    from kazoo.protocol.states import KazooState
    from kazoo.retry import KazooRetry
    from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE
except ImportError as missing:
    raise InvalidOption("ZooKeeper needs kazoo: pip install 'dibs[zookeeper]'") from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from ssl import SSLContext

    from dibs.clock import Deadline

# By how many of the server's ticks a session outlasts the ttl of its leases; zookeeper_pool says why.
SLACK_TICKS = 1.5
# Pauses between attempts to reconnect double from the first to the last of these.
RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 0.5
# The least and the most time that one attempt to connect is given; between them it has a third of the session, shared
# by the servers.
CONNECT_MIN_S = 1.0
CONNECT_MAX_S = 5.0
# How long one of several servers may owe an answer and say nothing; less where CONNECT_MIN_S and so on say less.
SILENCE_S = 2.0
# Every address is tried this often before the first connection is given up.
FIRST_TRIES = 2

# Why the server says No.
ABSENT, EXISTS, CHANGED, NOT_EMPTY = "absent", "exists", "changed", "not empty"
_REASONS = {
    kazoo_errors.NoNodeError: ABSENT,
    kazoo_errors.NodeExistsError: EXISTS,
    kazoo_errors.BadVersionError: CHANGED,
    kazoo_errors.NotEmptyError: NOT_EMPTY,
}
_NOT_ALLOWED = (
    kazoo_errors.NoAuthError,
    kazoo_errors.AuthFailedError,
    kazoo_errors.InvalidACLError,
    kazoo_errors.SessionClosedRequireSaslError,
)


class No(NamedTuple):
    """Nothing was done, for this reason; of a transaction: because of the operation at this place."""

    why: str
    at: int = 0


class Settings(NamedTuple):
    """What the URL says."""

    hosts: tuple[str, ...]
    root: str
    #: "user:password", or None.
    login: str | None
    tls: SSLContext | None
    tick_ms: int
    session_max_ms: int

    @property
    def acl(self) -> Any:
        """Whose the nodes are that are made: this login's alone, or everybody's."""
        return CREATOR_ALL_ACL if self.login else OPEN_ACL_UNSAFE

    @property
    def slack_ms(self) -> int:
        return ceil(SLACK_TICKS * self.tick_ms)


# A flight is what is sent together and waited for together. A verb is a generator of flights that returns an outcome,
# so that the verbs of a vector share the time on the wire.
Flights = Generator[list[Any], list[Any], Any]
# ``(verb, path, …)`` as the methods of kazoo's TransactionRequest take them, "create" with ``acl`` third.
Operation = tuple[Any, ...]


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """Kazoo's threads, with four differences.

    One attempt to connect is limited: kazoo would spend a whole session on a server that accepts and says nothing. So
    is the silence of a server that owes an answer, where there are others: kazoo notices it when nothing has been asked
    for a third of a session, and so never while its client goes on asking. TLS
    is ours: kazoo leaves the socket open when the handshake fails. And hints are told by the thread that reads them, as
    ours do not block; a thread more would cost every hand-over a switch.
    """

    connect_limit_s = CONNECT_MIN_S
    connecting = False
    #: Whether there are other servers; what this one owes, and since when it has said nothing.
    others = False
    owed: Collection[Any] = ()
    owed_since: float | None = None
    tls: SSLContext | None = None

    def select(self, *arguments: Any) -> Any:
        *descriptors, timeout = arguments
        if self.connecting:
            self.owed_since = None
            if timeout is None or timeout > self.connect_limit_s:
                timeout = self.connect_limit_s
        elif self.others and len(descriptors[0]) == 2:  # the connection, and what wakes its thread to send on it
            return self._select_unless_silent(descriptors, timeout)
        return super().select(*descriptors, timeout)

    def _select_unless_silent(self, descriptors: list[Any], timeout: float) -> Any:
        limit_s = min(SILENCE_S, self.connect_limit_s)
        since = self.owed_since = (self.owed_since or boot_now()) if self.owed else None
        if since is not None:
            timeout = min(timeout, max(0.0, since + limit_s - boot_now()))
        ready = super().select(*descriptors, timeout)
        if descriptors[0][0] in ready[0]:
            self.owed_since = None
        elif since is not None and boot_now() >= since + limit_s:
            raise ConnectionResetError(f"no answer in {limit_s:g} s")
        return ready

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def create_connection(self, address: Any, hostname: str | None = None, **_: Any) -> socket.socket:
        connection = socket.create_connection(address, self.connect_limit_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                return self.tls.wrap_socket(connection, server_hostname=hostname)
        except BaseException:
            connection.close()
            raise
        return connection


class Session:
    """One session and its connection. ``over`` is final: it expired, or was closed, and all that was in it is gone."""

    def __init__(self, settings: Settings, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        #: The server's number for it, which stands in its nodes.
        self.id = 0
        #: What a lease in it can last.
        self.ttl_ms = timeout_ms - settings.slack_ms
        self.over = False
        self.used_at = boot_now()
        self._settings = settings
        self._given_ms: int | None = None
        self._tries = 0
        self._trouble: BaseException | None = None
        self._touch: Any = None
        handler = _Handler()
        handler.tls = settings.tls
        share_s = timeout_ms / 3000.0 / len(settings.hosts)
        handler.connect_limit_s = min(max(CONNECT_MIN_S, share_s), CONNECT_MAX_S)
        handler.others = len(settings.hosts) > 1
        self._news = handler.event_object()
        retry = KazooRetry(
            max_tries=-1, delay=RECONNECT_MIN_S, max_delay=RECONNECT_MAX_S, sleep_func=handler.sleep_func
        )
        self.client = client = KazooClient(
            ",".join(settings.hosts),
            timeout=timeout_ms / 1000.0,
            handler=handler,
            connection_retry=retry,
            command_retry=KazooRetry(max_tries=1, sleep_func=handler.sleep_func),
            auth_data=[("digest", settings.login)] if settings.login else None,
            logger=_logger(),
            use_ssl=settings.tls is not None,
        )
        handler.owed = client._pending
        # Kazoo does not tell which time-out the server gave, nor why it cannot connect. Both pass through here.
        connect = client._connection._connect

        def connecting(*args: Any) -> tuple[float, float]:
            handler.connecting = True
            try:
                read_ms, connect_ms = connect(*args)
            except BaseException as error:
                self._tries += 1
                self._trouble = error
                self._news.set()
                raise
            finally:
                handler.connecting = False
            self._trouble = None
            self.id = client.client_id[0]
            self._given_ms = round(read_ms * 3 / 2)  # kazoo waits for an answer for two thirds of the session
            self._news.set()
            return read_ms, connect_ms

        client._connection._connect = connecting
        client.add_listener(self._changed)
        client.start_async()

    def _changed(self, state: str) -> None:
        # Kazoo's thread. An expired session is never followed by another in the same object, though kazoo would.
        if state == KazooState.LOST:
            self.over = True

    @property
    def connected(self) -> bool:
        return not self.over and self._fits() and bool(self.client.connected)

    def _fits(self) -> bool:
        """The server has given the time-out that was asked for."""
        return self._given_ms is not None and abs(self._given_ms - self.timeout_ms) <= 1

    def ready(self, deadline: Deadline) -> Session:
        """Return when requests can be sent; raises StoreUnavailable or SetupRequired."""
        while self._given_ms is None:
            if self.over or self._tries >= FIRST_TRIES * len(self._settings.hosts):
                raise self._unreached(deadline)
            left = deadline.remaining()
            if left <= 0:
                raise StoreUnavailable(
                    f"ZooKeeper: no answer from {', '.join(self._settings.hosts)}{self._why()}", maybe_applied=False
                )
            self._news.wait(left)
            self._news.clear()
        if not self._fits():
            self.over = True
            raise SetupRequired(
                f"ZooKeeper gives sessions of {self._given_ms} ms where {self.timeout_ms} ms are needed (a ttl of "
                f"{self.ttl_ms / 1000:g} s and {SLACK_TICKS:g} ticks): the URL takes tickTime={self._settings.tick_ms} "
                f"and maxSessionTimeout={self._settings.session_max_ms}. Copy both from the servers' zoo.cfg into the "
                "URL's query; or, where minSessionTimeout is greater there, take a longer ttl, or lower it"
            )
        if self.over:
            raise StoreUnavailable("ZooKeeper: the session has expired", maybe_applied=False)
        if not self.client.connected:
            raise StoreUnavailable(f"ZooKeeper: connection lost{self._why()}, reconnecting", maybe_applied=False)
        self.used_at = boot_now()
        return self

    def _why(self) -> str:
        return f" ({_words(self._trouble)})" if self._trouble else ""

    def _unreached(self, deadline: Deadline) -> Exception:
        cause = _first(ssl.SSLError, self._trouble)
        trouble = cause or self._trouble
        text = f"ZooKeeper at {', '.join(self._settings.hosts)}: {_words(trouble)}"
        self._tries = 0  # whoever comes next gives it another chance
        cut = was_cut(trouble) or isinstance(trouble, kazoo_errors.ConnectionDropped)
        if (cause is not None and not cut) or (cut and self._misled(deadline)):
            return SetupRequired(f"{text}. Check tls, ssl_ca, ssl_cert and ssl_key in the URL")
        if cut and ((said := _first(OSError, trouble)) is None or was_cut(said)):
            text += ". Has this host as many connections as the servers' maxClientCnxns allows?"  # or they just restart
        return StoreUnavailable(text, maybe_applied=False)

    def _misled(self, deadline: Deadline) -> bool:
        """Whether a server that closes our connections wants TLS, or does not speak it."""
        for shown in self._settings.hosts:
            host, _, port = shown.rpartition(":")
            server = (host.strip("[]"), int(port))
            if speaks_tls(server, deadline) if self._settings.tls is None else heard(server, b"srvr", deadline):
                return True
        return False

    @property
    def zxid(self) -> int:
        """Of the last transaction that the server had done when it answered last."""
        return int(self.client.last_zxid)

    # Each of these sends a request and returns what ``answer`` takes.

    def multi(self, operations: Iterable[Operation]) -> Any:
        """A transaction. The result is a list; of ``set_data`` it holds the node's stat."""
        transaction = self.client.transaction()
        for verb, *arguments in operations:
            getattr(transaction, verb)(*arguments)
        return transaction.commit_async()

    def get(self, path: str) -> Any:
        """A tuple of data and stat."""
        return self.client.get_async(path)

    def exists(self, path: str) -> Any:
        """The stat, or None."""
        return self.client.exists_async(path)

    def children(self, path: str, watch: Callable[[Any], None] | None = None) -> Any:
        """Their names, in no order."""
        return self.client.get_children_async(path, watch)

    def acls(self, path: str) -> Any:
        return self.client.get_acls_async(path)

    def touch(self) -> None:
        """Let the server know that we live, without waiting for the answer."""
        if self.connected and (self._touch is None or self._touch.ready()):
            self._touch = self.exists(self._settings.root)

    def say(self, word: bytes) -> str:
        """What the server answers to a four letter word; nothing where it is not allowed."""
        try:
            return str(self.client.command(word))
        except (OSError, kazoo_errors.KazooException):
            return ""

    def stop(self) -> None:
        """Close it: what is in it is gone. Takes as long as the server takes, and up to 10 s when it is silent."""
        self.over = True
        try:
            self.client.stop()
            self.client.close()
        except Exception:  # noqa: BLE001 - a session that cannot be closed expires
            pass


def answer(asked: Any, root: str, deadline: Deadline) -> Any:
    """What the server said to a request: its result, or a ``No``."""
    if not asked.ready() and not asked.wait(deadline.remaining()):
        raise StoreUnavailable("ZooKeeper did not answer in time")
    error, at = asked.exception, 0
    if error is None:
        if type(asked.value) is not list:
            return asked.value
        for at, result in enumerate(asked.value):  # noqa: B007 - the place of the failure is told
            # Those before the failure are "rolled back" and those after it "inconsistent", which are no reasons.
            if isinstance(result, Exception) and type(result) not in (
                kazoo_errors.RolledBackError,
                kazoo_errors.RuntimeInconsistency,
            ):
                error = result
                break
        else:
            return asked.value
    reason = _REASONS.get(type(error))
    if reason is not None:
        return No(reason, at)
    text = f"ZooKeeper: {type(error).__name__} {error}".strip()
    if isinstance(error, _NOT_ALLOWED):
        raise SetupRequired(
            f"{text}: this login may not use the nodes under {root}. Check user and password in the URL, and who made "
            f"the nodes (`getAcl {root}/lease` in zkCli.sh)"
        ) from error
    if isinstance(error, kazoo_errors.NotReadOnlyCallError):
        raise SetupRequired(f"{text}: this server is cut off from the others, and read-only") from error
    if isinstance(error, kazoo_errors.QuotaExceededError):
        raise SetupRequired(f"{text}: raise the quota on {root}") from error
    raise StoreUnavailable(text) from error


def _words(error: BaseException | None) -> str:
    """What a socket said, rather than kazoo's words for it."""
    error = _first(OSError, error) or error
    return " ".join(str(error).split()) or type(error).__name__


def _first(kind: type[BaseException], error: BaseException | None) -> BaseException | None:
    """The error itself, or what it came of, whichever is of this kind."""
    while error is not None and not isinstance(error, kind):
        error = error.__context__
    return error


def _logger() -> logging.Logger:
    """Where kazoo's own messages go: to whoever configured logging, and to nobody's terminal otherwise."""
    logger = logging.getLogger("dibs.stores.zookeeper.kazoo")
    logger.addFilter(_without_secrets)
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


def _without_secrets(record: logging.LogRecord) -> bool:
    """Kazoo logs its requests as they are: the login among them, and what anybody can take a session over with."""
    if type(record.args) is tuple:
        record.args = tuple(
            said._replace(auth="***")
            if isinstance(said, Auth)
            else said._replace(passwd="***")
            if isinstance(said, Connect)
            else said
            for said in record.args
        )
    return "session_passwd" not in str(record.msg)
