"""The conversation with PostgreSQL: a statement, several, or a transaction, and what came of it by the deadline.

Statements go through libpq's asynchronous calls as psycopg exposes them, not through cursors: a request must not last
longer than its deadline, which a blocking call cannot promise, and skipping the cursor's adaptation is worth a quarter
of a lone pair's time (``python -m benchmarks --only pg-lone``). A connection whose request ran out of time is dropped,
so a late reply is never read as the answer to something else. Statements that belong together travel together (libpq's
pipelines), in one transaction; what is sent ``ahead``, in one of its own.

Behind a connection pooler (told by a backend that is not the one that greeted us) nothing is prepared, and no setting
is made.
"""

from __future__ import annotations

from functools import partial

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import Readiness, boot_now
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported
from dibs.store import StoreBusy, TakesNoWrites
from dibs.stores.postgres_errors import meant, told
from dibs.stores.postgres_leftover import Leftover
from dibs.stores.postgres_login import FACTS, LIMIT, SERVER_MIN, SETTINGS, connect, is_cut, shown
from dibs.stores.postgres_wire import milliseconds
from dibs.stores.tables import TablesMissing, with_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn, PGresult

    from dibs.clock import Deadline
    from dibs.stores.postgres_hosts import Hosts
    from dibs.stores.postgres_tables import Tables

    # A statement with its parameters.
    Sql = tuple[bytes, Sequence[bytes | None]]

PIPELINES = pq.version() >= 140000
_WELL = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
# How long an interrupted caller waits for the answer to what it sent.
FINISH_S = 0.5
# A connection that was made when there was little time lets the server take more as soon as there is so much more.
LIMIT_GROWTH = 2
# After so long without an answer the connection is looked at before it is used: the server may have closed it.
IDLE_S = 5.0

# The time limits for one transaction, where the connection is not ours: else a statement that waits for somebody's lock
# would do so when its caller and its connection are gone, and then grant what nobody has.
_LIMITS = b"""\
SELECT set_config('statement_timeout', $1, true), set_config('lock_timeout', '0', true),
    set_config('idle_in_transaction_session_timeout', $1, true)
"""


class Connection:
    """A connection of dibs's own, opened when it is needed, and closed by an error that leaves it in doubt."""

    def __init__(self, hosts: Hosts, tables: Tables) -> None:
        self._hosts = hosts
        #: To which of them it is, or was, and whether that did not answer the last time.
        self._host = b""
        self._was_silent = False
        #: What makes the tables, and what goes before whatever makes any.
        self._schema, self._first = tables.schema(), tables.first()
        self._pg: PGconn | None = None
        self._ready: Readiness | None = None
        self._used_at = 0.0
        self._prepared: set[bytes] = set()
        #: Something of the call under way has been applied. Whoever calls resets it.
        self.wrote = False
        #: What travels in front of the next statements, and to whom its answer is given.
        self._ahead: list[tuple[Sql, Callable[[PGresult], None]]] = []
        #: How many transactions of the pipeline under way have not been answered.
        self._unanswered = 0
        #: A pooler is in front of the server.
        self.pooled = False
        self._left = Leftover()
        #: The server gives up on a statement after so long, as we do.
        self._limit_s = float("inf")
        #: What the server told of itself when it was connected.
        self.facts: dict[str, Any] = {}

    # -- whatever it takes ----------------------------------------------------------------------------------------

    def run(self, sql: bytes, parameters: Sequence[bytes | None], deadline: Deadline) -> PGresult:
        return self.run_all([(sql, parameters)], deadline)[-1]

    def tell(self, statement: Sql, answered: Callable[[PGresult], None], deadline: Deadline) -> None:
        """Execute a statement, and give somebody its answer."""
        answered(self.run_all((statement,), deadline)[-1])

    def run_all(self, statements: Sequence[Sql], deadline: Deadline) -> list[PGresult]:
        """Execute statements in one round trip; make the tables when it turns out that there are none."""
        self.open(deadline)
        try:
            return self.execute_all(statements, deadline)
        except TablesMissing:
            make = partial(self.make, self._schema, deadline)
            return with_tables(partial(self.execute_all, statements, deadline), make)

    def transaction(self, work: Callable[[], None], deadline: Deadline) -> None:
        """Do the work, which begins and commits a transaction, or nothing of it; make missing tables."""
        with_tables(partial(self.transaction_once, work, deadline), partial(self.make, self._schema, deadline))

    def transaction_once(self, work: Callable[[], None], deadline: Deadline) -> None:
        """The same, where missing tables are the caller's business."""
        self.open(deadline)
        try:
            work()
        except BaseException:
            # What was sent is not known to be undone before the server says so, or the connection is gone.
            if self._pg is not None:
                try:
                    self._simple(b"ROLLBACK", deadline.within(FINISH_S))
                except (StoreUnavailable, SetupRequired, StoreBusy, TablesMissing):
                    self.close()
            raise

    def make(self, schema: str, deadline: Deadline) -> None:
        """Make what these statements make, unless a later dibs has changed the tables."""
        self.open(deadline)
        limit = f"SET LOCAL statement_timeout = {milliseconds(deadline).decode()}; " if self.pooled else ""
        self._simple(f"BEGIN; {limit}{self._first}{schema}COMMIT".encode(), deadline)

    def ahead(self, statement: Sql, answered: Callable[[PGresult], None], deadline: Deadline) -> None:
        """Execute a statement in a transaction of its own, which costs no round trip of its own.

        It is sent with what is executed next in this call, and before that; its answer is given before an error of the
        latter is raised.
        """
        self.open(deadline)
        if PIPELINES and not self.pooled:
            self._ahead.append((statement, answered))
        else:
            self.tell(statement, answered, deadline)

    def send_ahead(self, deadline: Deadline) -> None:
        """Send what nothing has followed."""
        while self._ahead:
            self.tell(*self._ahead.pop(), deadline)

    def forget_ahead(self) -> None:
        """The call is over; if it has failed, it is repeated as a whole."""
        self._ahead.clear()

    # -- one flight -----------------------------------------------------------------------------------------------

    def execute(self, sql: bytes, parameters: Sequence[bytes | None], deadline: Deadline) -> PGresult:
        return self.execute_all([(sql, parameters)], deadline)[-1]

    def execute_all(self, statements: Sequence[Sql], deadline: Deadline) -> list[PGresult]:
        """Execute statements in one round trip and one transaction (libpq before 14: one after the other)."""
        begun = statements[0][0].startswith(b"BEGIN")  # how a transaction is isolated must be said first
        if not self.pooled or not (PIPELINES or begun):  # they would be for the transaction that saying them is
            return self._sent(statements, deadline)
        limits = (_LIMITS, (milliseconds(deadline),))
        results = self._sent([*statements[:begun], limits, *statements[begun:]], deadline)
        return results[:begun] + results[begun + 1 :]

    def _sent(self, statements: Sequence[Sql], deadline: Deadline) -> list[PGresult]:
        if len(statements) == 1 or PIPELINES:
            return self._flight(statements, deadline)
        return [self._flight([statement], deadline)[0] for statement in statements]

    def _flight(self, statements: Sequence[Sql], deadline: Deadline) -> list[PGresult]:
        pg = self._pg
        assert pg is not None
        deadline = self._hosts.patience(deadline, self._was_silent)
        try:
            before = len(self._prepared)
            alone = len(self._ahead)
            sent = [*(statement for statement, _ in self._ahead), *statements] if alone else statements
            names = [b"" if self.pooled else self._prepare(pg, sql, deadline) for sql, _ in sent]
            ahead, self._ahead = self._ahead, []
            if len(sent) > 1:
                pg.enter_pipeline_mode()
                self._unanswered = alone + 1
            for place, (name, (sql, parameters)) in enumerate(zip(names, sent, strict=True), 1):
                values = list(parameters)  # psycopg 3.2 takes no other sequence
                if name:
                    pg.send_query_prepared(name, values, result_format=1)
                else:
                    pg.send_query_params(sql, values, result_format=1)
                if place <= alone or 1 < place == len(sent):
                    pg.pipeline_sync()
            results = self._results(pg, deadline)
        except (TablesMissing, StoreBusy, SetupRequired):  # refused while preparing: the connection is fine
            raise
        except psycopg.Error as error:
            broken = StoreUnavailable(f"{shown(pg)}: {' '.join(str(error).split())}")
            self.close()
            raise broken from error
        except StoreUnavailable:
            self._was_silent = True
            self.close()
            raise
        except BaseException:
            # Ctrl-C. The server is at work on the statement; were it to finish after the release that follows on
            # another connection, the name would stay granted to nobody. So let it finish first, if it is quick.
            self._let_finish(pg, deadline)
            raise
        self._was_silent = False
        if not self.wrote:  # a transaction whose last statement went well has been committed
            whole = results[:alone] + results[-1:] if len(results) == len(sent) else results[:alone]
            self.wrote = any(result.status in _WELL for result in whole)
        planned = 0 < before == len(self._prepared)
        for place, result in enumerate(results):
            self._check(result, planned)
            if place < alone:
                ahead[place][1](result)
        return results[alone:]

    def _prepare(self, pg: PGconn, sql: bytes, deadline: Deadline) -> bytes:
        # A statement is its own name: there is a fixed handful of them.
        name = b"dibs_%x" % (hash(sql) & 0xFFFFFFFFFFFFFFFF)
        if name not in self._prepared:
            pg.send_prepare(name, sql)
            prepared = self._results(pg, deadline)[-1]
            if told(prepared)[0] != "42P05":  # whoever prepared it was interrupted, and did not hear that it is there
                self._check(prepared)
            self._prepared.add(name)
        return name

    def _let_finish(self, pg: PGconn, deadline: Deadline) -> None:
        try:
            self._results(pg, deadline.within(FINISH_S))
        except (psycopg.Error, StoreUnavailable):
            self.close()
        except BaseException:
            self.close()
            raise

    def look(self, before: str, sql: str, deadline: Deadline) -> list[tuple[Any, ...]]:
        """Run somebody else's query in a transaction, which ``before`` begins; its rows as Python has them."""
        self.open(deadline)
        limits = f"{before} SET LOCAL statement_timeout = {milliseconds(deadline).decode()};"
        results = self._several(f"{limits}\n{sql}\n;COMMIT".encode(), deadline)
        code, words = told(results[-1])
        # A mistake in it or in what it computes, a feature that the server lacks, an attempt to write.
        if code != "42501" and (code[:2] in ("0A", "21", "22", "42") or code == "25006"):
            raise InvalidOption(f"PostgreSQL refuses the query: {words} ({code})")
        self._check(results[-1])
        rows = Transformer()
        rows.set_pgresult(results[-2])
        try:
            return rows.load_rows(0, results[-2].ntuples, tuple)
        except (psycopg.Error, ValueError) as error:  # infinity, or a year before 1 or after 9999
            raise InvalidOption(
                f"the query yields what Python has no value for: {error}; CAST it to text, or leave it out"
            ) from error

    def _simple(self, sql: bytes, deadline: Deadline) -> None:
        """Several statements in one message; errors end them all."""
        self._check(self._several(sql, deadline)[-1])

    def _several(self, sql: bytes, deadline: Deadline) -> list[PGresult]:
        """The answers to several statements in one message, the last perhaps an error that has ended them all."""
        pg = self._pg
        assert pg is not None
        try:
            pg.send_query(sql)
            results = self._results(pg, deadline)
            if pg.transaction_status != pq.TransactionStatus.IDLE:
                pg.send_query(b"ROLLBACK")
                self._results(pg, deadline)
        except psycopg.Error as error:
            broken = StoreUnavailable(f"{shown(pg)}: {' '.join(str(error).split())}")
            self.close()
            raise broken from error
        except BaseException:
            self.close()
            raise
        return results

    def _results(self, pg: PGconn, deadline: Deadline) -> list[PGresult]:
        """The answers to what was sent, one a statement; an error ends those of its transaction."""
        ready = self._ready
        assert ready is not None
        while pg.flush():
            if not ready.writable(deadline.remaining()):
                raise StoreUnavailable(f"{shown(pg)} did not take the request in time")
            pg.consume_input()
        pipelined = pg.pipeline_status != pq.PipelineStatus.OFF
        answers: list[PGresult] = []
        ended, failed = not pipelined, False
        while True:
            while pg.is_busy():
                if not ready.readable(deadline.remaining()):
                    raise StoreUnavailable(f"{shown(pg)} did not answer in time")
                pg.consume_input()
            result = pg.get_result()
            if result is None:
                if ended:
                    break
                ended = True  # of one statement's answers in a pipeline; another end is that of all
                continue
            ended = not pipelined
            if result.status == pq.ExecStatus.PIPELINE_SYNC:
                failed = False
                self._unanswered -= 1
                if self._unanswered:
                    continue
                pg.get_result()
                pg.exit_pipeline_mode()
                break
            if not failed:
                answers.append(result)
                failed = result.status == pq.ExecStatus.FATAL_ERROR
        if not answers:
            raise StoreUnavailable(f"{shown(pg)} closed the connection")
        self._used_at = boot_now()
        return answers

    def _check(self, result: PGresult, planned: bool = False) -> PGresult:
        """Raise what an error of the server means; ``planned``: the statements are those of earlier calls."""
        if result.status in _WELL:
            return result
        error, over = meant(result, "PostgreSQL" if self._pg is None else shown(self._pg), planned)
        if over or self._pg is None or self._pg.status != pq.ConnStatus.OK:
            self.close()
        raise error

    # -- connecting -----------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline) -> None:
        if self._pg is not None and self._ready is not None:
            if boot_now() - self._used_at <= IDLE_S or not is_cut(self._pg, self._ready):
                if deadline.remaining() > LIMIT_GROWTH * self._limit_s:
                    self._limit_s = deadline.remaining()
                    self.execute(LIMIT, (milliseconds(deadline),), deadline)
                return
            self.close()
        self._hosts.first(self._connect, deadline)

    def _connect(self, conninfo: bytes, deadline: Deadline) -> None:
        self._host = conninfo
        self._pg = connect(conninfo, self._hosts, deadline)
        self._ready = Readiness(self._pg.socket)
        self._prepared = set()
        self.pooled, self._limit_s = True, float("inf")  # nothing is prepared, and limited, before that is known
        try:
            self._get_ready(self._pg, deadline)
            if self._hosts.several and (self.facts["recovery"] or self.facts["read_only"] != "off"):
                raise TakesNoWrites(f"{shown(self._pg)} takes no writes", maybe_applied=False)
            if self._left.is_on(conninfo):
                self._left.check(lambda sql, parameters: self.execute(sql, parameters, deadline))
        except BaseException:
            self.close()
            raise

    def _get_ready(self, pg: PGconn, deadline: Deadline) -> None:
        """Read what decides our promises, and make the connection ours."""
        if pg.server_version < SERVER_MIN:
            raise Unsupported("dibs needs PostgreSQL 12 or later")
        facts = self.execute(FACTS, (), deadline)
        pid, encoding, fsync, pages, commit, recovery, read_only, array_nulls = (
            (facts.get_value(0, column) or b"").decode() for column in range(8)
        )
        if encoding != "UTF8":
            raise Unsupported(f"the database's encoding is {encoding}; dibs keeps names exactly, which needs UTF8")
        if pid == str(pg.backend_pid):
            self.execute(SETTINGS, (milliseconds(deadline),), deadline)
            self.pooled, self._limit_s = False, deadline.remaining()
            commit = "on" if commit == "off" else commit
        elif array_nulls != "on":  # what is NULL would be kept as a text of four letters
            raise SetupRequired(
                "array_nulls is off, and dibs cannot set it for itself behind a connection pooler: ALTER DATABASE or "
                "ALTER ROLE … SET array_nulls = on, or give dibs the server's own address"
            )
        self.facts = {
            "version": pg.server_version,
            "encoding": encoding,
            "fsync": fsync,
            "full_page_writes": pages,
            "synchronous_commit": commit,
            "recovery": recovery == "true",
            "read_only": read_only,
        }

    def listen(self, channels: Sequence[str], deadline: Deadline) -> PGconn | None:
        """Ask for notifications, which can then be waited for and read; None where they do not get through."""
        self.open(deadline)
        if self.pooled:
            return None
        self._simple("; ".join(f'LISTEN "{channel}"' for channel in channels).encode(), deadline)
        return self._pg

    def close(self) -> None:
        pg, self._pg = self._pg, None
        self._ready = None
        if pg is not None:
            if not self.pooled:
                self._left.note(pg, self._host)
            pg.finish()
