"""The conversation with MySQL or MariaDB: a statement or a transaction, and what came of it by the deadline.

A connection whose request ran out of time is closed, so a late reply is never read as the answer to something else.

*Retries.* A deadlock (1213) or a lock wait (1205) rolls back a statement that is the whole transaction, so it is sent
again, a bounded number of times. A transaction on permits is rolled back and begun again. Nothing else is.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from dibs._typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from dibs.clock import boot_now
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported
from dibs.store import RowBusy, StoreBusy, TakesNoWrites
from dibs.stores import mysql_sql as sql
from dibs.stores.mysql_drivers import ServerError, TimedOut, Wire
from dibs.stores.mysql_errors import SameKey, ThereAlready, lacks_right, meant, refuses
from dibs.stores.mysql_leftover import Leftover
from dibs.stores.tables import TablesMissing, refuse_newer, set_up, with_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline
    from dibs.stores.mysql_drivers import Answer, Link, Where
    from dibs.stores.mysql_tables import Tables

_T = TypeVar("_T")

MYSQL_MIN, MARIADB_MIN = (8, 0, 4), (10, 6)
# How often a statement is sent again that the server rolled back for somebody else's locks.
TRIES_MAX = 10
# The server gives up on a lock after this long (it counts whole seconds), and tells us, instead of keeping us waiting.
LOCK_WAIT_S = 1
# A transaction on permits whose client has stopped is ended by the server after this long, on MariaDB; on MySQL, which
# can only end whole connections, after this long. Idle connections are looked at sooner (mysql_drivers.IDLE_S).
IDLE_TRANSACTION_S = 2
IDLE_CONNECTION_S = 10
# How long an interrupted caller waits for the answer to what it sent.
FINISH_S = 0.5
# The time of a grant, for people, is the server's as it was read this long ago at most, plus what has passed since.
CLOCK_READ_S = 5.0


class Connection:
    """A connection of dibs's own, opened when it is needed, and closed by an error that leaves it in doubt."""

    def __init__(self, where: Where, connect: Callable[[Where, float], Link], tables: Tables) -> None:
        self.where = where
        self._connect = connect
        #: What makes the tables, and what tells of which version they are.
        self._schema, self._version = tables.schema(), tables.version()
        self._wire: Wire | None = None
        self._left = Leftover()
        #: What the server told of itself when it was connected.
        self.facts: dict[str, str] = {}
        #: Something of the call under way has been applied. Whoever calls resets it.
        self.wrote = False
        #: The server's clock in microseconds, and the boot clock when it was read.
        self._server_clock = (0, float("-inf"))
        #: The server will end a transaction of ours in which nothing happens any more.
        self._limited = False

    # -- whatever it takes ----------------------------------------------------------------------------------------

    def write(self, template: str, values: str | tuple[Any, ...], deadline: Deadline) -> int:
        """How many rows it found to change."""
        answer = self.ask(template % values, deadline)
        self.wrote = self.wrote or answer.affected > 0
        return answer.affected

    def rows(self, template: str, values: str | tuple[Any, ...], deadline: Deadline) -> Sequence[tuple[Any, ...]]:
        return self.ask(template % values, deadline).rows

    def pieces(self, template: str, values: str | tuple[Any, ...], deadline: Deadline) -> list[bytes]:
        """What GROUP_CONCAT put together."""
        ((joined,),) = self.ask(template % values, deadline).rows
        return joined.split(b",") if joined else []

    def ask(self, statement: str, deadline: Deadline, schema: str | None = None) -> Answer:
        """Execute one statement; make the tables (None: of leases) when it turns out that there are none."""
        return self._with_tables(partial(self._execute, statement, deadline), deadline, schema)

    def unless_there(self, statement: str, deadline: Deadline, schema: str) -> Answer | None:
        """The same; None when it would make a row whose unique key another one has."""

        def attempt() -> Answer | None:
            try:
                return self._execute(statement, deadline)
            except SameKey:
                return None

        return self._with_tables(attempt, deadline, schema)

    def _with_tables(self, attempt: Callable[[], _T], deadline: Deadline, schema: str | None = None) -> _T:
        """Do something on the connection; make the tables when it turns out that there are none."""
        if self._wire is None or self._wire.stale():
            self.reopen(deadline)
        make = partial(self.make, schema or self._schema, deadline)
        return with_tables(partial(self._patiently, attempt, deadline), make)

    def transaction(
        self, work: Callable[[Callable[[str], Answer]], _T], deadline: Deadline, schema: str | None = None
    ) -> _T:
        """Do the work, which is given a function that executes statements, in a transaction; make missing tables."""
        return self._with_tables(partial(self._transaction, work, deadline), deadline, schema)

    def transaction_once(self, work: Callable[[Callable[[str], Answer]], _T], deadline: Deadline) -> _T:
        """The same, where missing tables are the caller's business."""
        self.reopen(deadline)
        return self._patiently(partial(self._transaction, work, deadline), deadline)

    def for_caller(self, statement: str) -> str:
        """A statement of ours as it goes into the caller's transaction, which may have begun before our row was so.

        And which may be in a session that is to update nothing without a key.
        """
        if statement.startswith("DELETE") and self._shown == "MariaDB":
            return (sql.UNSAFE_NO_SNAPSHOT_FOR if self._locks_by_snapshot else sql.UNSAFE_FOR) + statement
        ours = statement.startswith(("SELECT", "INSERT", "UPDATE", "DELETE"))
        return sql.NO_SNAPSHOT_FOR + statement if ours and self._locks_by_snapshot else statement

    @property
    def _locks_by_snapshot(self) -> bool:
        """Whether the server may refuse a lock on a row that has changed since somebody looked."""
        return "innodb_snapshot_isolation" in self.facts

    @property
    def _in_galera(self) -> bool:
        return self.facts.get("wsrep_on") == "ON"

    @property
    def certifies(self) -> bool:
        """Whether several servers take writes, which compare what was written, not what was locked, at the commit."""
        group, single = "group_replication_group_name", "group_replication_single_primary_mode"
        return self._in_galera or (bool(self.facts.get(group)) and self.facts.get(single) == "OFF")

    @property
    def server(self) -> str | None:
        """What ``sql.SERVER`` is here; None where several servers are one database."""
        if self._in_galera or self.facts.get("group_replication_group_name"):
            return None
        return " ".join(self.facts[fact] for fact in ("hostname", "port", "server_id"))

    @property
    def counts_by_one(self) -> bool:
        """Whether the rows of one INSERT are numbered without gaps, whatever happens to a cluster meanwhile."""
        return self.facts.get("auto_increment_increment") == "1" and not self._in_galera

    def server_now(self, deadline: Deadline) -> int:
        """The server's clock in microseconds of Unix time, nearly; for people, nothing is decided by it."""
        read_us, read_at = self._server_clock
        now = boot_now()
        if now - read_at > CLOCK_READ_S:
            ((text,),) = self.ask(sql.CLOCK, deadline).rows
            read_us, read_at = self._server_clock = int(text or 0), boot_now()
            return read_us
        return read_us + int((now - read_at) * 1e6)

    # -- tables ---------------------------------------------------------------------------------------------------

    def setup(self, schema: str, deadline: Deadline) -> None:
        """Make the tables, or bring them up to date."""
        self.reopen(deadline)
        set_up(partial(self.make, schema, deadline))

    def make(self, schema: str, deadline: Deadline) -> None:
        """Make what these statements make, unless a later dibs has changed the tables."""
        with suppress(TablesMissing):
            ((version,),) = self.attempt(self._version, deadline).rows or ((None,),)
            refuse_newer(version, sql.VERSION)
        # Each is harmless when it is there, also when several make it at once: the server's own locks see to that.
        for statement in schema.split(";\n"):
            if statement.strip():
                with suppress(ThereAlready):  # somebody else has made it since we looked
                    self.attempt(statement, deadline)

    def look(self, statement: str, deadline: Deadline) -> tuple[Answer, Sequence[tuple[str, int]]]:
        """Run somebody else's query; its rows, and its columns' names and types."""
        self.reopen(deadline)
        try:
            answer = self.attempt(statement, deadline)
        except (TablesMissing, ThereAlready) as error:
            raise InvalidOption(f"{self._shown} refuses the query: {error}") from error
        except StoreUnavailable as error:
            if refuses(error):
                raise InvalidOption(f"{self._shown} refuses the query: {error.__cause__}") from error
            raise
        assert self._wire is not None
        return answer, self._wire.columns()

    def denies(self, statement: str, deadline: Deadline) -> bool:
        """Whether this login lacks a right that the statement needs, which changes nothing."""
        try:
            self.attempt(statement, deadline)
        except (SetupRequired, TakesNoWrites) as error:
            return lacks_right(error)
        return False

    # -- one statement, or transaction ----------------------------------------------------------------------------

    def attempt(self, statement: str, deadline: Deadline) -> Answer:
        """Execute one statement; TablesMissing."""
        return self._patiently(partial(self._execute, statement, deadline), deadline)

    def _patiently(self, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        """Again, when somebody else's locks were in the way: what was attempted has then been undone as a whole."""
        for _ in range(TRIES_MAX):
            try:
                return attempt()
            except RowBusy:  # by somebody who may keep it for long: nobody waits here for that
                raise
            except StoreBusy as error:
                busy = error
                if deadline.remaining() <= LOCK_WAIT_S:
                    break
        if self.wrote:
            raise StoreUnavailable(f"{busy}, after a part of the requests was done") from busy
        raise busy

    def _transaction(self, work: Callable[[Callable[[str], Answer]], _T], deadline: Deadline) -> _T:
        """Do the work, which is given a function that executes statements, in a transaction, or nothing of it."""
        if self._wire is None:  # closed by an error since the call began
            self._open(deadline)
        if not self._limited:
            self._execute(sql.ON_MYSQL % IDLE_CONNECTION_S, deadline)
            self._limited = True
        try:
            self._execute("START TRANSACTION", deadline)
            done = work(partial(self._execute, deadline=deadline))
            self._execute("COMMIT", deadline)
        except BaseException:
            # What was sent is not known to be undone before the server says so, or the connection is gone.
            if self._wire is not None:
                try:
                    self._execute("ROLLBACK", deadline.within(FINISH_S))
                except (StoreUnavailable, SetupRequired, StoreBusy):
                    self.close()
            raise
        return done

    def _execute(self, statement: str, deadline: Deadline) -> Answer:
        wire = self._wire
        if wire is None:  # closed by an error since the call began
            self._open(deadline)
            wire = self._wire
        assert wire is not None
        sent = False
        try:
            wire.send(statement)
            sent = True
            return wire.receive(deadline)
        except TimedOut:
            self._give_up(wire)
            raise StoreUnavailable(f"{self._shown} on {self.where.at} did not answer in time") from None
        except ServerError as error:
            self._refuse(error)
        except BaseException:
            # Ctrl-C. The server is at work on the statement; were it to finish after the release that follows on
            # another connection, the name would stay granted to nobody. So let it finish first, if it is quick.
            try:
                if sent:
                    self._let_finish(wire, deadline)
            finally:
                self.close()
            raise

    def _let_finish(self, wire: Wire, deadline: Deadline) -> None:
        """Wait for an answer of which a part may have been read: the connection is of no use afterwards."""
        try:
            wire.receive(deadline.within(FINISH_S))
        except TimedOut:
            self._left.note(wire.session)
        except Exception:  # noqa: BLE001 - what a driver makes of the rest of an answer is nobody's business
            pass

    def _give_up(self, wire: Wire) -> None:
        """Close a connection on which the server is at work."""
        self._left.note(wire.session)
        self.close()

    def _refuse(self, error: ServerError) -> NoReturn:
        """Raise what an error of the server means."""
        may_be_plain = self.where.ssl_mode in ("disabled", "preferred")
        meaning, over = meant(error, f"{self._shown} on {self.where.at}", may_be_plain=may_be_plain, wrote=self.wrote)
        if over:
            self.close()
        raise meaning from error

    # -- connecting -----------------------------------------------------------------------------------------------

    @property
    def _shown(self) -> str:
        return "MariaDB" if "MariaDB" in self.facts.get("version", "") else "MySQL"

    def reopen(self, deadline: Deadline) -> None:
        """Connect, unless there is a connection that the server has not closed while it was idle."""
        if self._wire is not None and self._wire.stale():
            self.close()
        self._open(deadline)

    def _open(self, deadline: Deadline) -> None:
        if self._wire is not None:
            return
        left = deadline.remaining()
        if left <= 0:
            no_time = f"{self._shown} on {self.where.at}: no time was left to connect"
            raise StoreUnavailable(no_time, maybe_applied=self.wrote)
        try:
            self._wire = Wire(self._connect(self.where, left))
        except ServerError as error:
            try:
                self._refuse(error)
            except StoreUnavailable as unavailable:  # nothing was sent
                unavailable.maybe_applied = self.wrote
                raise
        try:
            self._get_ready(deadline)
            if self._left:
                self._left.check(self._shown, self._wire.session, lambda sql: self._execute(sql, deadline).rows)
        except StoreUnavailable as unavailable:
            self.close()
            unavailable.maybe_applied = self.wrote
            raise
        except BaseException:
            self.close()
            raise

    def _get_ready(self, deadline: Deadline) -> None:
        """Make the session ours, and read what decides our promises."""
        # First of all, for what the server is set up to may cut short, or refuse, what is read next.
        self._execute(sql.SETTINGS % (LOCK_WAIT_S, max(LOCK_WAIT_S, int(deadline.remaining()))), deadline)
        if self.where.ssl_mode not in ("disabled", "preferred") and not self._execute(sql.TLS, deadline).rows:
            # mysqlclient on MariaDB's client library goes on in the clear when the server has no TLS.
            raise SetupRequired(f"{self._shown}: ssl_mode={self.where.ssl_mode}, but the server offers no TLS")
        self.read_facts(deadline)
        version = self.facts["version"]
        numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("-")[0].split(".")[:3])
        if numbers < (MARIADB_MIN if "MariaDB" in version else MYSQL_MIN):
            raise Unsupported(f"dibs needs MySQL 8.0.4 or MariaDB 10.6, or later; this is {version}")
        self._execute(sql.ISOLATION, deadline)
        self._limited = "MariaDB" in version
        if self._limited:
            self._execute(sql.ON_MARIADB % IDLE_TRANSACTION_S, deadline)
        if self._locks_by_snapshot:
            self._execute(sql.NO_SNAPSHOT, deadline)
        if self._in_galera:
            self._execute(sql.CAUSAL_GALERA, deadline)
        elif self.certifies and "group_replication_consistency" in self.facts:  # not before 8.0.14
            self._execute(sql.CAUSAL_GROUP, deadline)
        self._server_clock = (0, float("-inf"))

    def read_facts(self, deadline: Deadline) -> None:
        self.facts = {name.lower(): value for name, value in self.pairs(sql.FACTS, deadline).items()}

    def pairs(self, statement: str, deadline: Deadline) -> dict[str, str]:
        """The rows of a statement that brings names, and something to each."""
        rows = self._execute(statement, deadline).rows
        return {(name or b"").decode(): (value or b"").decode() for name, value in rows}

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
