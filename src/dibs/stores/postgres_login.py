"""Logging in to PostgreSQL by a deadline: what is said and asked first, and what it means that one has failed.

That is an outage, or a mistake in the URL.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import Readiness
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable

try:
    import psycopg.conninfo
    from psycopg import pq
except ImportError as missing:
    raise InvalidOption("PostgreSQL needs psycopg 3: pip install 'dibs[postgres]'") from missing

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn

    from dibs.clock import Deadline
    from dibs.stores.postgres_hosts import Hosts

# Parameters of the libpq that is installed may stand in the URL, too.
LIBPQ = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())
# What libpq and the server say of a login that may succeed in a moment: the connection was cut, the server has no room
# for another one, or was just starting. (libpq has the server's code for it, but does not tell.)
_OUTAGES = (
    "closed the connection",
    "closed unexpectedly",
    "could not receive",
    "could not send",
    "reset by peer",
    "SYSCALL",
    "unexpected eof",
    "too many clients",
    "too many connections",
    "slots are reserved",
    "starting up",
    "shutting down",
    "recovery mode",
    "not accepting",
    "not yet accepting",
)
SERVER_MIN = 120000

# What the planner may not do on our connections: plans that leave the primary key are slow on big tables, and visit
# rows in an order of their own, which would let two clients lock rows in opposite orders.
SETTINGS = b"""\
SELECT set_config('default_transaction_isolation', 'read committed', false),
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('enable_hashjoin', 'off', false), set_config('enable_mergejoin', 'off', false),
    set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', false),
    set_config('enable_material', 'off', false), set_config('jit', 'off', false),
    set_config('client_min_messages', 'error', false), set_config('array_nulls', 'on', false),
    set_config('statement_timeout', $1, false), set_config('lock_timeout', '0', false),
    set_config('idle_in_transaction_session_timeout', $1, false),
    set_config('synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
        false)
"""
LIMIT = b"""\
SELECT set_config('statement_timeout', $1, false), set_config('idle_in_transaction_session_timeout', $1, false)
"""
# What decides which promises are kept.
FACTS = b"""\
SELECT pg_backend_pid()::text, current_setting('server_encoding'), current_setting('fsync'),
    current_setting('full_page_writes'), current_setting('synchronous_commit'), pg_is_in_recovery()::text,
    current_setting('transaction_read_only'), current_setting('array_nulls')
"""


def connect(conninfo: bytes, hosts: Hosts, deadline: Deadline) -> PGconn:
    """A connection, by the deadline: libpq's own time-out would be whole seconds, and two at least."""
    pg = pq.PGconn.connect_start(conninfo)
    try:
        while (polled := pg.connect_poll()) != pq.PollingStatus.OK:
            if polled == pq.PollingStatus.FAILED:
                raise _refused(pg, conninfo, hosts.known_good)
            # The socket changes when libpq goes on to the next address.
            ready, left = Readiness(pg.socket), deadline.remaining()
            writing = polled == pq.PollingStatus.WRITING
            if not (ready.writable(left) if writing else ready.readable(left)):
                raise StoreUnavailable(f"{shown(pg)}: connecting took too long", maybe_applied=False)
    except BaseException:
        pg.finish()
        raise
    pg.nonblocking = 1
    hosts.known_good = True
    return pg


def shown(pg: PGconn) -> str:
    """The server at the other end of a connection that is not closed, for people."""
    return f"PostgreSQL on {b':'.join((pg.host, pg.port)).decode()}"


def is_cut(pg: PGconn, ready: Readiness) -> bool:
    """Whether an idle connection was ended meanwhile: by a restart, idle_session_timeout, an administrator."""
    try:
        while pg.status == pq.ConnStatus.OK and ready.readable(0.0):  # there may also be news on it
            pg.consume_input()
    except psycopg.Error:
        return True
    return pg.status != pq.ConnStatus.OK


def _refused(pg: PGconn, conninfo: bytes, known_good: bool) -> Exception:
    # The text names host, port, user and database, never the password.
    lines = [" ".join(line.split()) for line in pg.get_error_message().splitlines()]
    text = f"PostgreSQL: {'. '.join(line for line in lines if line).rstrip('.')}"
    if not known_good and not any(words in text for words in _OUTAGES):
        answers = pq.PGconn.ping(conninfo + b" connect_timeout=2")
        if answers == pq.Ping.OK:
            # The server is up and takes logins, only not ours, and never has: that is no outage.
            return SetupRequired(f"{text}. Check user, password and database in the URL")
        if answers == pq.Ping.NO_ATTEMPT:
            return SetupRequired(f"{text}. Check the options in the URL")
    return StoreUnavailable(text, maybe_applied=False)


def conninfo(parts: dict[str, Any]) -> bytes:
    """Parameters as libpq takes them."""
    try:
        return psycopg.conninfo.make_conninfo("", **parts).encode()
    except psycopg.Error as error:
        raise InvalidOption(f"that PostgreSQL URL cannot be used: {str(error).strip()}") from None
