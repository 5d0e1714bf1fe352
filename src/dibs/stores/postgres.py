"""PostgreSQL: leases as rows, through psycopg 3, on connections of dibs's own in autocommit.

Statements go through libpq's asynchronous calls as psycopg exposes them, not through cursors: a request must not last
longer than its deadline, which a blocking call cannot promise, and skipping the cursor's adaptation is worth a quarter
of a lone pair's time (``python -m benchmarks --only pg-lone``). A connection whose request ran out of time is dropped,
so a late reply is never read as the answer to something else. Statements that belong together travel together (libpq's
pipelines).

Behind a connection pooler (told by a backend that is not the one that greeted us) nothing is prepared, no setting is
made, and waiters poll.
"""

from __future__ import annotations

from hashlib import sha256
from struct import Struct
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dibs.clock import Readiness
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported
from dibs.store import (
    PIN_KEEP_S,
    RELEASED,
    Capabilities,
    Finding,
    Granted,
    Mismatch,
    Outcome,
    Pin,
    Renewed,
    Request,
    StoreAddress,
    StoreBusy,
    StoredGrant,
    StoredLease,
)
from dibs.stores import postgres_history, postgres_pools, postgres_sql, rounds
from dibs.stores.identifiers import quoted_table
from dibs.stores.postgres_pools import Statement
from dibs.stores.rounds import Row, Seen

try:
    import psycopg.conninfo
    from psycopg import pq
except ImportError as missing:
    raise InvalidOption("PostgreSQL needs psycopg 3: pip install 'dibs[postgres]'") from missing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from urllib.parse import SplitResult

    from psycopg.pq.abc import PGconn, PGresult

    from dibs.clock import Deadline
    from dibs.store import Acquire, Renew

CAPABILITIES = Capabilities(
    store="PostgreSQL",
    survives_restart="yes",
    fencing_token="strict",
    clock="server clock_timestamp()",
    waiting_line="FIFO",
    signal="LISTEN/NOTIFY",
    queue=False,
    durable=True,
    ttl_min_s=0.05,
    ttl_max_s=30 * 24 * 3600.0,
    resolution_s=0.001,
    margin_s=0.010,
    permits=True,
    pause=True,
    history=True,
    guard=True,
)
# Parameters of the libpq that is installed may stand in the URL, too.
LIBPQ = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())
PIPELINES = pq.version() >= 140000
OPTIONS = ("table", "schema", *sorted(LIBPQ))
SERVER_MIN = 120000
# How long an interrupted caller waits for the answer to what it sent.
FINISH_S = 0.5
_FLOAT8 = Struct("!d").unpack
_ELEMENTS = Struct("!iq").iter_unpack
_ARRAY_HEAD_BYTES = 20
# PostgreSQL counts microseconds from 2000-01-01.
_EPOCH_S = 946684800.0
_TRUE = b"\x01"

# What the planner may not do on our connections: plans that leave the primary key are slow on big tables, and visit
# rows in an order of their own, which would let two clients lock rows in opposite orders.
_SETTINGS = b"""\
SELECT set_config('default_transaction_isolation', 'read committed', false),
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('enable_hashjoin', 'off', false),
    set_config('enable_mergejoin', 'off', false),
    set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false),
    set_config('enable_material', 'off', false),
    set_config('jit', 'off', false),
    set_config('client_min_messages', 'error', false),
    set_config('statement_timeout', $1, false),
    set_config('idle_in_transaction_session_timeout', $1, false),
    set_config('synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END,
        false)
"""
# So that those who make tables at the same moment do it one after the other.
_SETUP_LOCK = "SELECT pg_advisory_xact_lock(7095203471)"
_FACTS = b"""\
SELECT pg_backend_pid()::text, current_setting('server_encoding'), current_setting('fsync'),
    current_setting('full_page_writes'), current_setting('synchronous_commit'), pg_is_in_recovery()::text,
    current_setting('transaction_read_only')
"""


# A statement with its parameters.
Sql = tuple[bytes, "Sequence[bytes | None]"]


class PostgresStore:
    def __init__(self, conninfo: bytes, schema: str, table: str, known_good: list[bool]) -> None:
        self._conninfo = conninfo
        self._known_good = known_good  # shared by the stores of one address: has a login ever succeeded?
        qualified = quoted_table(schema, "schema") + "."
        self._names = {
            "lease": qualified + quoted_table(table),
            "line": qualified + quoted_table(table + "_line"),
            "pool": qualified + quoted_table(table + "_pool"),
            "meta": qualified + quoted_table(table + "_meta"),
        }
        # Of 48 bits, so that a slot's number can be added.
        self._names["pin_seed"] = str(int.from_bytes(sha256(self._names["lease"].encode()).digest()[:6], "big"))
        self._names["lease_text"] = "'" + self._names["lease"].replace("'", "''") + "'"
        self._schema_name = schema
        self._table = table
        self._pg: PGconn | None = None
        self._ready: Readiness | None = None
        self._prepared: set[bytes] = set()
        self._pooled = False
        self._facts: dict[str, Any] = {}
        self._sql = {
            verb: getattr(postgres_sql, verb).format(**self._names).encode()
            for verb in (
                "ENTER",
                "RENEW",
                "TRANSFER",
                "LIST",
                "BREAK",
                "BREAK_NOW",
                "PURGE",
                "PINNED",
            )
        }
        self._sql |= {
            verb: getattr(postgres_pools, verb).format(**self._names).encode() for verb in postgres_pools.VERBS
        }
        for verb in postgres_sql.ASKED:
            text = postgres_pools.POOL_TAKE if verb == "POOL_TAKE" else getattr(postgres_sql, verb)
            many = postgres_sql.folded(verb, text).format(asked=postgres_sql.many(verb), **self._names)
            self._sql[verb] = many.encode()
            self._sql[verb + "_ONE"] = text.format(asked=postgres_sql.one(verb), **self._names).encode()

    @property
    def capabilities(self) -> Capabilities:
        found = CAPABILITIES
        if self._pooled:
            found = found._replace(signal="poll (behind a connection pooler)")
        if self._facts and not self._durable():
            found = found._replace(durable=False, fencing_token="strict while no crash loses acknowledged commits")
        return found

    def _durable(self) -> bool:
        facts = self._facts
        return bool(facts["fsync"] == "on" and facts["synchronous_commit"] != "off")

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        if not requests:
            self._run(b"SELECT 1", (), deadline)
            return []
        return rounds.act(self, requests, deadline)

    def acquire_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, in_line: bool) -> list[Row]:
        verb = "ACQUIRE_IN_LINE" if in_line else "ACQUIRE"
        columns: tuple[bytes | None, ...]
        if len(rows) == 1:
            verb += "_ONE"
            name, claim_id, ttl, holder, info, _, ticket, *_permits = rows[0][2]
            columns = (name.encode(), claim_id.encode(), b"%r" % ttl, holder.encode(), _plain(info), _plain(ticket))
        else:
            columns = _acquire_columns([row[2] for row in rows])
        # Newcomers have no tickets.
        result = self._run(self._sql[verb], columns if in_line else columns[:-1], deadline)
        get = result.get_value
        if len(rows) == 1:
            if not result.ntuples:
                return rows
            outcomes[rows[0][1]] = Granted(_int(get(0, 1)), _instant(get(0, 2)))
            return []
        places, tokens, instants = _elements(get(0, 0)), _elements(get(0, 1)), _elements(get(0, 2))
        for place, token, microseconds in zip(places, tokens, instants, strict=True):
            outcomes[rows[place - 1][1]] = Granted(token, microseconds / 1e6 + _EPOCH_S)
        if len(places) == len(rows):
            return []
        granted = set(places)
        return [row for place, row in enumerate(rows, 1) if place not in granted]

    def enter_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> list[Row]:
        requests = [row[2] for row in rows]
        columns = (*_acquire_columns(requests), _texts([r.wake and "dibs_" + r.wake for r in requests]))
        result = self._run(self._sql["ENTER"], columns, deadline)
        get = result.get_value
        places = {(row[0], row[2].claim_id): place for place, row in enumerate(rows)}
        again: list[Row] = []
        tickets: dict[int, int] = {}
        for r in range(result.ntuples):
            kind = get(r, 0)
            if kind == b"e":
                tickets[places[_text(get(r, 1)) or "", _text(get(r, 2)) or ""]] = _int(get(r, 3))
            elif kind == b"m":
                place = places[_text(get(r, 1)) or "", _text(get(r, 2)) or ""]
                outcomes[rows[place][1]] = Granted(_int(get(r, 3)), _instant(get(r, 4)))
        for r in range(result.ntuples):
            if get(r, 0) != b"s":
                continue
            place = _int(get(r, 9)) - 1
            row = rows[place]
            if type(outcomes[row[1]]) is Granted:
                continue
            found, ticket = get(r, 3), get(r, 8)
            seen = None
            if get(r, 10) is not None:
                outcomes[row[1]] = Mismatch(_int(get(r, 10)))
                continue
            if found is not None:
                seen = Seen(
                    _text(get(r, 2)),
                    _int(found),
                    _instant(get(r, 4)),
                    get(r, 5) == _TRUE,
                    get(r, 6) == _TRUE,
                    float(_FLOAT8(get(r, 7) or b"")[0]),
                    tickets.get(place) if ticket is None else _int(ticket),
                )
            rounds.told(row, seen, outcomes, again)
        return again

    def acquire_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        rows = self._take_permits(rows, outcomes, deadline)
        if not rows:
            return
        try:
            self._acquire_permits(rows, outcomes, deadline)
        except _TablesMissing:
            self._make_missing_tables(deadline)
            try:
                self._acquire_permits(rows, outcomes, deadline)
            except _TablesMissing as error:
                raise SetupRequired(f"the tables of dibs do not fit this version: {error}") from error

    def _take_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> list[Row]:
        """Grant where it is plain that there are enough; return the rest."""
        verb = "POOL_TAKE"
        columns: tuple[bytes | None, ...]
        if len(rows) == 1:
            verb += "_ONE"
            name, claim_id, ttl, holder, info, _, ticket, permits, take, _ = rows[0][2]
            columns = (name.encode(), claim_id.encode(), b"%r" % ttl, holder.encode(), _plain(info), _plain(ticket))
            columns += (b"%d" % permits, b"%d" % take)
        else:
            requests = [row[2] for row in rows]
            columns = _acquire_columns(requests)
            columns += (_numbers([r.permits for r in requests]), _numbers([r.take for r in requests]))
        queue = (self._sql["POOL_QUEUE"], (_texts([row[0] for row in rows]),))
        result = self._run_all([queue, (self._sql[verb], columns)], deadline)[-1]
        get = result.get_value
        granted = set()
        for r in range(result.ntuples):
            place = _int(get(r, 0)) - 1
            granted.add(place)
            outcomes[rows[place][1]] = Granted(_int(get(r, 1)), _instant(get(r, 2)), _int(get(r, 3)))
        return [row for place, row in enumerate(rows) if place not in granted]

    def _acquire_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        def execute(statements: Sequence[Statement]) -> list[PGresult]:
            return self._execute_all([(self._sql[verb], given) for verb, given in statements], deadline)

        self._open(deadline)
        begin: list[Statement] = [("BEGIN", ())]
        if self._pooled:
            begin.append(("LIMITS", (_milliseconds(deadline),)))
        try:
            wire = postgres_pools.Wire(execute, _texts, _numbers, _int, _text, _instant)
            postgres_pools.acquire(wire, begin, rows, outcomes)
        except BaseException:
            # What was sent is not known to be undone before the server says so, or the connection is gone.
            if self._pg is not None:
                try:
                    self._simple(b"ROLLBACK", deadline.within(FINISH_S))
                except (StoreUnavailable, SetupRequired, StoreBusy, _TablesMissing):
                    self.close()
            raise

    def renew_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        requests = [row[2] for row in rows]
        columns = (
            _texts([r.name for r in requests]),
            _numbers([r.slot for r in requests]),
            _texts([r.claim_id for r in requests]),
            _numbers([r.ttl for r in requests]),
        )
        result = self._run(self._sql["RENEW"], columns, deadline)
        get = result.get_value
        now = _instant(get(0, 1))
        for place in _elements(get(0, 0)):
            _, index, request = rows[place - 1]
            outcomes[index] = Renewed(now + request.ttl)

    def transfer_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for _, index, request in rows:
            name, claim_id, ttl, holder, from_claim, info, slot, permits = request
            columns = (
                *(name.encode(), claim_id.encode(), b"%r" % ttl, holder.encode(), from_claim.encode()),
                *(_plain(info), b"%d" % slot),
            )
            result = self._run(self._sql["POOL_TRANSFER" if permits else "TRANSFER"], columns, deadline)
            if result.ntuples:
                get = result.get_value
                outcomes[index] = Granted(_int(get(0, 0)), _instant(get(0, 1)), slot)

    def release_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        kept = [row for row in rows if row[2].keep > 0]
        if kept:
            for verb, long in (("KEEP", True), ("RELEASE_PINNED", False)):
                some = [row for row in kept if (row[2].keep > PIN_KEEP_S) is long]
                if some:
                    self._release(verb, some, outcomes, deadline)
            rows = [row for row in rows if row[2].keep <= 0]
        if rows:
            self._release("RELEASE", rows, outcomes, deadline)

    def _release(self, verb: str, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        columns: tuple[bytes | None, ...]
        if len(rows) == 1:
            name, claim_id, slot, ticket, keep, info = rows[0][2]
            columns = (name.encode(), b"%d" % slot, claim_id.encode(), _plain(ticket), b"%r" % keep, _plain(info))
        else:
            requests = [row[2] for row in rows]
            columns = (
                _texts([r.name for r in requests]),
                _numbers([r.slot for r in requests]),
                _texts([r.claim_id for r in requests]),
                _numbers([r.ticket for r in requests]),
                _numbers([r.keep for r in requests]),
                _texts([r.info for r in requests]),
            )
        columns = columns[: len(postgres_sql.ASKED[verb])]
        result = self._run(self._sql[verb + "_ONE" if len(rows) == 1 else verb], columns, deadline)
        for place in _elements(result.get_value(0, 0)):
            outcomes[rows[place - 1][1]] = RELEASED

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        if dialect != "postgresql":
            raise InvalidOption(f"leases are kept in PostgreSQL, and that connection is to {dialect}: use dibs.fencing")
        text = postgres_sql.PIN.format(**self._names)
        return Pin(text.format(name=request.name.encode().hex(), slot=request.slot))

    def pinned(self, request: Renew, rows: Sequence[tuple[Any, ...]], deadline: Deadline) -> bool:
        columns = (b"%d" % rows[0][0], request.name.encode(), b"%d" % request.slot)
        return _int(self._run(self._sql["PINNED"], columns, deadline).get_value(0, 0)) > 0

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        result = self._run(self._sql["LIST"], (first.encode(), before.encode()), deadline)
        get = result.get_value
        found = []
        for r in range(result.ntuples):
            name, slot, holder, token, since, until, left, info, waiting, take = (get(r, c) for c in range(10))
            found.append(
                StoredLease(
                    _text(name) or "",
                    _int(slot),
                    _text(holder) or "",
                    _int(token),
                    _instant(since),
                    _instant(until),
                    _FLOAT8(left)[0] if left is not None else 0.0,
                    _text(info),
                    _int(waiting),
                    _int(take),
                )
            )
        return found

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        which = (name.encode(), str(fencing_token).encode())
        broken = self._run(self._sql["BREAK"], which, deadline).ntuples > 0
        if broken and now:  # as a second step, so that a history can tell it from a release
            self._run(self._sql["BREAK_NOW"], which, deadline)
        return broken

    def purge(self, older_than: float, deadline: Deadline) -> int:
        result = self._run(self._sql["PURGE"], (repr(older_than).encode(),), deadline)
        return _int(result.get_value(0, 0))

    def check(self, deadline: Deadline) -> list[Finding]:
        self._open(deadline)
        facts = self._facts
        version = self._pg.server_version if self._pg is not None else 0
        return [
            Finding("reachable", True, f"PostgreSQL {version // 10000}.{version % 10000}"),
            Finding(
                "writable",
                not facts["recovery"] and facts["read_only"] == "off",
                "this is a standby: name the primary, or add target_session_attrs=read-write to the URL"
                if facts["recovery"]
                else f"transaction_read_only={facts['read_only']}",
            ),
            Finding(
                "grants survive a crash of the server",
                self._durable() and facts["full_page_writes"] == "on",
                f"fsync={facts['fsync']}, full_page_writes={facts['full_page_writes']}, "
                f"synchronous_commit={facts['synchronous_commit']}"
                + ("" if self._durable() else ": set fsync=on, or a crash may hand out a token twice"),
            ),
            Finding("names are kept exactly", facts["encoding"] == "UTF8", f"server_encoding={facts['encoding']}"),
            Finding(
                "waiters are woken by the release",
                not self._pooled,
                "LISTEN/NOTIFY" if not self._pooled else "behind a connection pooler waiters poll once a second",
            ),
        ]

    # -- tables ---------------------------------------------------------------------------------------------------

    def schema(self) -> str:
        make = f"CREATE SCHEMA IF NOT EXISTS {quoted_table(self._schema_name, 'schema')};\n"
        return ("" if self._schema_name == "public" else make) + postgres_sql.SCHEMA.format(**self._names)

    def _history_names(self) -> dict[str, str]:
        table, schema = self._table, quoted_table(self._schema_name, "schema")
        names = {key: f"{schema}.{quoted_table(table + end)}" for key, end in postgres_history.NAMES.items()}
        triggers = {key: quoted_table(table + end) for key, end in postgres_history.TRIGGERS.items()}
        return {"lease": self._names["lease"], **names, **triggers}

    def history_schema(self, keep: int) -> str:
        text = postgres_history.KEEP if keep else postgres_history.FORGET
        return text.format(**self._history_names(), keep=keep)

    def keep_history(self, keep: int, deadline: Deadline) -> None:
        self._open(deadline)
        self._simple(f"BEGIN; {_SETUP_LOCK};\n{self.history_schema(keep)}COMMIT".encode(), deadline)

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        self._open(deadline)
        sql = postgres_history.READ.format(**self._history_names()).encode()
        try:
            result = self._execute(sql, (name.encode(), str(limit).encode()), deadline)
        except _TablesMissing:
            raise SetupRequired("no history is kept here: `dibs setup --history 100` begins one") from None
        get = result.get_value
        return [
            StoredGrant(
                _int(get(r, 0)),
                _text(get(r, 1)) or "",
                _int(get(r, 2)),
                _instant(get(r, 3)),
                None if get(r, 4) is None else _instant(get(r, 4)),
                _text(get(r, 5)),
                _text(get(r, 6)),
            )
            for r in range(result.ntuples)
        ]

    def setup(self, deadline: Deadline) -> None:
        self._open(deadline)
        try:
            self._make_tables(deadline)
        except SetupRequired as refused:
            raise SetupRequired(
                f"{refused}. Let somebody with the right to make tables run `dibs setup`, or what `dibs schema` prints"
            ) from refused

    def _make_tables(self, deadline: Deadline) -> None:
        # In one transaction behind one lock: CREATE … IF NOT EXISTS alone is not safe against itself.
        self._simple(f"BEGIN; {_SETUP_LOCK};\n{self.schema()}COMMIT".encode(), deadline)

    # -- one request ----------------------------------------------------------------------------------------------

    def _run(self, sql: bytes, parameters: Sequence[bytes | None], deadline: Deadline) -> PGresult:
        return self._run_all([(sql, parameters)], deadline)[-1]

    def _run_all(self, statements: Sequence[Sql], deadline: Deadline) -> list[PGresult]:
        """Execute statements in one round trip; make the tables when it turns out that there are none."""
        self._open(deadline)
        try:
            return self._execute_all(statements, deadline)
        except _TablesMissing:
            pass
        self._make_missing_tables(deadline)
        try:
            return self._execute_all(statements, deadline)
        except _TablesMissing as error:
            raise SetupRequired(f"the tables of dibs do not fit this version: {error}") from error

    def _make_missing_tables(self, deadline: Deadline) -> None:
        try:
            self._make_tables(deadline)
        except SetupRequired as refused:
            raise SetupRequired(
                f"the tables of dibs are missing or of an older version, and this login may not make them ({refused}). "
                "Let somebody who may run `dibs setup`, or what `dibs schema` prints"
            ) from refused

    def _execute(self, sql: bytes, parameters: Sequence[bytes | None], deadline: Deadline) -> PGresult:
        return self._execute_all([(sql, parameters)], deadline)[-1]

    def _execute_all(self, statements: Sequence[Sql], deadline: Deadline) -> list[PGresult]:
        """Execute statements in one round trip and one transaction (libpq before 14: one after the other)."""
        pg = self._pg
        assert pg is not None
        if len(statements) > 1 and not PIPELINES:
            return [self._execute(sql, parameters, deadline) for sql, parameters in statements]
        try:
            names = [b"" if self._pooled else self._prepare(pg, sql, deadline) for sql, _ in statements]
            several = len(statements) > 1
            if several:
                pg.enter_pipeline_mode()
            for name, (sql, parameters) in zip(names, statements, strict=True):
                if name:
                    pg.send_query_prepared(name, parameters, result_format=1)
                else:
                    pg.send_query_params(sql, parameters, result_format=1)
            if several:
                pg.pipeline_sync()
            results = self._results(pg, deadline)
        except (_TablesMissing, StoreBusy, SetupRequired):  # refused while preparing: the connection is fine
            raise
        except psycopg.Error as error:
            self.close()
            raise StoreUnavailable(f"PostgreSQL: {str(error).strip()}") from error
        except StoreUnavailable:
            self.close()
            raise
        except BaseException:
            # Ctrl-C. The server is at work on the statement; were it to finish after the release that follows on
            # another connection, the name would stay granted to nobody. So let it finish first, if it is quick.
            self._let_finish(pg, deadline)
            raise
        for result in results:
            self._check(result)
        return results

    def _prepare(self, pg: PGconn, sql: bytes, deadline: Deadline) -> bytes:
        # A statement is its own name: there is a fixed handful of them.
        name = b"dibs_%x" % (hash(sql) & 0xFFFFFFFFFFFFFFFF)
        if name not in self._prepared:
            pg.send_prepare(name, sql)
            self._check(self._results(pg, deadline)[-1])
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

    def _simple(self, sql: bytes, deadline: Deadline) -> None:
        """Several statements in one message; errors end them all."""
        pg = self._pg
        assert pg is not None
        try:
            pg.send_query(sql)
            result = self._results(pg, deadline)[-1]
            if pg.transaction_status != pq.TransactionStatus.IDLE:
                pg.send_query(b"ROLLBACK")
                self._results(pg, deadline)
        except psycopg.Error as error:
            self.close()
            raise StoreUnavailable(f"PostgreSQL: {str(error).strip()}") from error
        except BaseException:
            self.close()
            raise
        self._check(result)

    def _results(self, pg: PGconn, deadline: Deadline) -> list[PGresult]:
        """The answers to what was sent, one a statement; an error ends them."""
        ready = self._ready
        assert ready is not None
        while pg.flush():
            if not ready.writable(deadline.remaining()):
                raise StoreUnavailable("PostgreSQL did not take the request in time")
            pg.consume_input()
        pipelined = pg.pipeline_status != pq.PipelineStatus.OFF
        answers: list[PGresult] = []
        ended = not pipelined
        while True:
            while pg.is_busy():
                if not ready.readable(deadline.remaining()):
                    raise StoreUnavailable("PostgreSQL did not answer in time")
                pg.consume_input()
            result = pg.get_result()
            if result is None:
                if ended:
                    break
                ended = True  # of one statement's answers in a pipeline; another end is that of all
                continue
            ended = not pipelined
            if result.status == pq.ExecStatus.PIPELINE_SYNC:
                pg.get_result()
                pg.exit_pipeline_mode()
                break
            if not answers or answers[-1].status != pq.ExecStatus.FATAL_ERROR:
                answers.append(result)
        if not answers:
            raise StoreUnavailable("PostgreSQL closed the connection")
        return answers

    def _check(self, result: PGresult) -> PGresult:
        if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            return result
        code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        words = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")
        text = f"PostgreSQL: {words} ({code})"
        if code in ("42P01", "3F000", "42703"):  # no such table, schema, column
            raise _TablesMissing(text)
        if code in ("40P01", "40001", "55P03"):  # deadlock, serialization, lock not available: rolled back
            raise StoreBusy(text)
        if code == "25006":
            raise SetupRequired(
                f"{text}. Is this a standby? Name the primary, or add target_session_attrs=read-write to the URL"
            )
        if code == "42501":
            raise SetupRequired(text)
        pg = self._pg
        if pg is None or pg.status != pq.ConnStatus.OK or code.startswith("57P") or code == "26000":
            self.close()
        raise StoreUnavailable(text, maybe_applied=not code or code.startswith(("08", "57P")))

    # -- connecting -----------------------------------------------------------------------------------------------

    def _open(self, deadline: Deadline) -> None:
        if self._pg is not None:
            return
        self._pg = self._connect(deadline)
        self._ready = Readiness(self._pg.socket)
        self._prepared = set()
        self._pooled = True  # nothing is prepared before that is known
        try:
            self._get_ready(self._pg, deadline)
        except BaseException:
            self.close()
            raise

    def _connect(self, deadline: Deadline) -> PGconn:
        """A connection, by the deadline: libpq's own time-out would be whole seconds, and two at least."""
        pg = pq.PGconn.connect_start(self._conninfo)
        try:
            while (polled := pg.connect_poll()) != pq.PollingStatus.OK:
                if polled == pq.PollingStatus.FAILED:
                    raise self._refused(pg)
                # The socket changes when libpq goes on to the next address.
                ready, left = Readiness(pg.socket), deadline.remaining()
                writing = polled == pq.PollingStatus.WRITING
                if not (ready.writable(left) if writing else ready.readable(left)):
                    raise StoreUnavailable("PostgreSQL: connecting took too long", maybe_applied=False)
        except BaseException:
            pg.finish()
            raise
        pg.nonblocking = 1
        if not self._known_good:
            self._known_good.append(True)
        return pg

    def _refused(self, pg: PGconn) -> Exception:
        # The text names host, port, user and database, never the password.
        lines = [" ".join(line.split()) for line in pg.get_error_message().splitlines()]
        text = f"PostgreSQL: {'. '.join(line for line in lines if line).rstrip('.')}"
        if not self._known_good:
            answers = pq.PGconn.ping(self._conninfo + b" connect_timeout=2")
            if answers == pq.Ping.OK:
                # The server is up and takes logins, only not ours, and never has: that is no outage.
                return SetupRequired(f"{text}. Check user, password and database in the URL")
            if answers == pq.Ping.NO_ATTEMPT:
                return SetupRequired(f"{text}. Check the options in the URL")
        return StoreUnavailable(text, maybe_applied=False)

    def _get_ready(self, pg: PGconn, deadline: Deadline) -> None:
        """Read what decides our promises, and make the connection ours."""
        if pg.server_version < SERVER_MIN:
            raise Unsupported("dibs needs PostgreSQL 12 or later")
        facts = self._execute(_FACTS, (), deadline)
        pid, encoding, fsync, pages, commit, recovery, read_only = (
            (facts.get_value(0, column) or b"").decode() for column in range(7)
        )
        if encoding != "UTF8":
            raise Unsupported(f"the database's encoding is {encoding}; dibs keeps names exactly, which needs UTF8")
        if pid == str(pg.backend_pid):
            # The server gives up on a statement that we no longer wait for.
            self._execute(_SETTINGS, (_milliseconds(deadline),), deadline)
            self._pooled = False
            commit = "on" if commit == "off" else commit
        self._facts = {
            "encoding": encoding,
            "fsync": fsync,
            "full_page_writes": pages,
            "synchronous_commit": commit,
            "recovery": recovery == "true",
            "read_only": read_only,
        }

    def watch(self, address: str, deadline: Deadline) -> PostgresWatch | None:
        self._open(deadline)
        if self._pooled:
            return None
        self._simple(f'LISTEN "dibs_{address}"'.encode(), deadline)
        assert self._pg is not None
        return PostgresWatch(self, self._pg)

    def close(self) -> None:
        pg, self._pg = self._pg, None
        self._ready = None
        if pg is not None:
            pg.finish()


class PostgresWatch:
    """The notifications that releases send to this client's channel; each names what became free."""

    interval_s: float | None = None

    def __init__(self, store: PostgresStore, pg: PGconn) -> None:
        self._store = store
        self._pg = pg

    def fileno(self) -> int:
        return self._pg.socket

    def changed(self, names: Collection[str]) -> Collection[str]:
        self._pg.consume_input()
        told = []
        while (notification := self._pg.notifies()) is not None:
            told.append(notification.extra.decode())
        return told

    def close(self) -> None:
        self._store.close()


class _TablesMissing(Exception):
    """The statement needs a table, schema or column that is not there."""


# -- values on the wire: arrays go as text, answers come as binary ---------------------------------------------------


def _acquire_columns(requests: list[Acquire]) -> tuple[bytes, ...]:
    return (
        _texts([r.name for r in requests]),
        _texts([r.claim_id for r in requests]),
        _numbers([r.ttl for r in requests]),
        _texts([r.holder for r in requests]),
        _texts([r.info for r in requests]),
        _numbers([r.ticket for r in requests]),
    )


def _milliseconds(deadline: Deadline) -> bytes:
    """What is left, as PostgreSQL's settings take it."""
    return str(max(100, int(deadline.remaining() * 1000))).encode()


def _plain(value: str | int | None) -> bytes | None:
    return None if value is None else str(value).encode()


def _texts(values: Iterable[str | None]) -> bytes:
    """An array of texts. Most have nothing to escape, which one look at all of them together tells."""
    values = list(values)
    if None not in values:
        joined = '","'.join(values)  # type: ignore[arg-type]
        if joined.count('"') == 2 * (len(values) - 1) and "\\" not in joined:
            return ('{"' + joined + '"}').encode()
    elif values.count(None) == len(values):
        return b"{}"  # unnest fills shorter arrays up with NULL
    quoted = ("NULL" if v is None else '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values)
    return ("{" + ",".join(quoted) + "}").encode()


def _numbers(values: list[Any]) -> bytes:
    first = values[0]
    if values.count(first) == len(values):
        if first is None:
            return b"{}"
        return ("{" + ",".join([repr(first)] * len(values)) + "}").encode()
    return ("{" + ",".join("NULL" if v is None else repr(v) for v in values) + "}").encode()


def _int(value: bytes | None) -> int:
    assert value is not None
    return int.from_bytes(value, "big", signed=True)


def _elements(value: bytes | None) -> list[int]:
    """An array on the wire: its head, then for each element a length and the number. None where there is nothing."""
    return [number for _, number in _ELEMENTS((value or b"")[_ARRAY_HEAD_BYTES:])]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _instant(value: bytes | None) -> float:
    return 0.0 if value is None else int.from_bytes(value, "big", signed=True) / 1e6 + _EPOCH_S


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``postgresql://user:password@host:port/database?schema=…&table=…`` points.

    The query may also carry libpq's parameters (sslmode, target_session_attrs, application_name, …).
    """
    table = options.pop("table", "dibs_lease")
    schema = options.pop("schema", "public")
    quoted_table(table)
    quoted_table(schema, "schema")
    parts: dict[str, Any] = {key: options.pop(key) for key in list(options) if key in LIBPQ}
    parts.pop("connect_timeout", None)  # request_timeout is that
    hosts = url.netloc.rpartition("@")[2]
    if hosts:
        # Several hosts may stand in one URL, as libpq writes them: host1:5432,host2:5432.
        pairs = [_host_and_port(part) for part in hosts.split(",")]
        parts.setdefault("host", ",".join(host for host, _ in pairs))
        if any(port for _, port in pairs):
            parts.setdefault("port", ",".join(port for _, port in pairs))
    if url.username:
        parts["user"] = unquote(url.username)
    if url.password:
        parts["password"] = unquote(url.password)
    if url.path.strip("/"):
        parts["dbname"] = unquote(url.path[1:])
    parts.setdefault("application_name", "dibs")
    parts["client_encoding"] = "UTF8"
    try:
        conninfo = psycopg.conninfo.make_conninfo("", **parts)
    except psycopg.Error as error:
        raise InvalidOption(f"that PostgreSQL URL cannot be used: {str(error).strip()}") from None
    port = f":{parts['port']}" if parts.get("port") else ""
    shown = f"postgresql://{hosts or str(parts.get('host', '')) + port}/{parts.get('dbname', '')}"
    known_good: list[bool] = []
    return StoreAddress(shown, CAPABILITIES, lambda: PostgresStore(conninfo.encode(), schema, table, known_good))


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.lstrip(":")
    host, _, port = text.partition(":")
    return unquote(host), port
