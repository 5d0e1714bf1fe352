"""PostgreSQL: leases as rows, through psycopg 3, on connections of dibs's own in autocommit.

One statement a verb: see dibs.stores.postgres_sql. Waiters are told by NOTIFY; behind a connection pooler, where that
does not get through, they poll.
"""

from __future__ import annotations

from functools import cached_property, partial

from dibs._typing import TYPE_CHECKING, Any
from dibs.columns import row_of
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.store import (
    PIN_KEEP_S,
    RELEASED,
    ROW_MARK,
    Capabilities,
    Finding,
    Granted,
    Mismatch,
    Outcome,
    Pin,
    Renewed,
    Request,
    RowBusy,
    StoreAddress,
    StoreBusy,
    StoredGrant,
    StoredLease,
)
from dibs.stores import (
    postgres_address,
    postgres_check,
    postgres_columns,
    postgres_query,
    postgres_sql,
    rounds,
)
from dibs.stores.columns import Columns, in_call
from dibs.stores.postgres_hosts import Hosts
from dibs.stores.postgres_link import Connection
from dibs.stores.postgres_pools import Pools
from dibs.stores.postgres_tables import Tables
from dibs.stores.postgres_watch import PostgresWatch, job_channel
from dibs.stores.postgres_wire import (
    TRUE,
    acquired,
    acquired_many,
    channels,
    elements,
    float8,
    grants,
    instant,
    instants,
    integer,
    literal,
    numbers,
    plain,
    released,
    text,
    texts,
)
from dibs.stores.rounds import Row, Seen
from dibs.stores.tables import TablesMissing, after_a_crash, set_up, without_history

if TYPE_CHECKING:
    from collections.abc import Sequence
    from urllib.parse import SplitResult

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.queries import Query
    from dibs.store import Release, Renew
    from dibs.stores.postgres_columns import PostgresRows
    from dibs.stores.postgres_jobs import PostgresJobs

CAPABILITIES = Capabilities(
    store="PostgreSQL",
    survives_restart="yes",
    fencing_token="strict",
    clock="server clock_timestamp()",
    waiting_line="FIFO",
    signal="LISTEN/NOTIFY",
    queue=True,
    durable=True,
    ttl_min_s=0.05,
    ttl_max_s=30 * 24 * 3600.0,
    resolution_s=0.001,
    margin_s=0.010,
    permits=True,
    pause=True,
    tries=True,
    query=True,
    history=True,
    guard=True,
    observe=True,
)
OPTIONS = postgres_address.OPTIONS
# Why a lease is not renewed.
LEASE_LOCKED = "a transaction that is still open has locked its row in dibs's table"


class PostgresStore:
    def __init__(self, place: postgres_address.Place, hosts: Hosts) -> None:
        self._tables = Tables(place.schema, place.table)
        self._sql = self._tables.sql
        self._connection = Connection(hosts, self._tables)
        self._pools = Pools(self._connection, self._sql)
        self._place = place
        self._has_tables = False
        self._columns = Columns(partial(postgres_columns.rows_of, self._connection.execute))

    @cached_property
    def jobs(self) -> PostgresJobs:
        from dibs.stores.postgres_jobs import PostgresJobs  # for who has queues only

        return PostgresJobs(self._connection, self._place.schema, self._place.table)

    @property
    def capabilities(self) -> Capabilities:
        found, connection = CAPABILITIES, self._connection
        if connection.pooled:
            found = found._replace(signal="poll (behind a connection pooler)")
        return after_a_crash(found, postgres_check.lost_by_a_crash(connection.facts))

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        if not requests:
            self._connection.run(b"SELECT 1", (), deadline)
            return []
        connection = self._connection
        connection.wrote = False
        try:
            if in_call(requests):
                connection.open(deadline)
                return self._columns.act(requests, deadline, self._act)
            return self._act(requests, deadline)
        except (StoreBusy, StoreUnavailable) as error:
            error.maybe_applied = error.maybe_applied or connection.wrote
            raise
        finally:
            connection.forget_ahead()

    def _act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        outcomes = rounds.act(self, requests, deadline)
        self._connection.send_ahead(deadline)
        return outcomes

    def acquire_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, in_line: bool) -> list[Row]:
        verb = "ACQUIRE_IN_LINE" if in_line else "ACQUIRE"
        if len(rows) == 1:
            verb += "_ONE"
        columns = acquired(rows)
        # Newcomers have no tickets.
        result = self._connection.run(self._sql[verb], columns if in_line else columns[:-1], deadline)
        get = result.get_value
        if len(rows) == 1:
            if result.ntuples:
                outcomes[rows[0][1]] = Granted(integer(get(0, 1)), instant(get(0, 2)))
            return [] if result.ntuples else rows
        places = elements(get(0, 0))
        for place, token, since in zip(places, elements(get(0, 1)), instants(get(0, 2)), strict=True):
            outcomes[rows[place - 1][1]] = Granted(token, since)
        if len(places) == len(rows):
            return []
        granted = set(places)
        return [row for place, row in enumerate(rows, 1) if place not in granted]

    def enter_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> list[Row]:
        result = self._connection.run(self._sql["ENTER"], (*acquired_many(rows), channels(rows)), deadline)
        get = result.get_value
        places = {(row[0], row[2].claim_id): place for place, row in enumerate(rows)}
        again: list[Row] = []
        tickets: dict[int, int] = {}
        for r in range(result.ntuples):
            kind = get(r, 0)
            if kind == b"e":
                tickets[places[text(get(r, 1)) or "", text(get(r, 2)) or ""]] = integer(get(r, 3))
            elif kind == b"m":
                place = places[text(get(r, 1)) or "", text(get(r, 2)) or ""]
                outcomes[rows[place][1]] = Granted(integer(get(r, 3)), instant(get(r, 4)))
        for r in range(result.ntuples):
            if get(r, 0) != b"s":
                continue
            place = integer(get(r, 9)) - 1
            row = rows[place]
            if type(outcomes[row[1]]) is Granted:
                continue
            found, ticket = get(r, 3), get(r, 8)
            seen = None
            if get(r, 10) is not None:
                outcomes[row[1]] = Mismatch(integer(get(r, 10)))
                continue
            if found is not None:
                seen = Seen(
                    text(get(r, 2)),
                    integer(found),
                    instant(get(r, 4)),
                    get(r, 5) == TRUE,
                    get(r, 6) == TRUE,
                    float8(get(r, 7)),
                    tickets.get(place) if ticket is None else integer(ticket),
                    float8(get(r, 11)),
                )
            rounds.told(row, seen, outcomes, again)
        return again

    def acquire_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        self._pools.acquire(rows, outcomes, deadline)

    def renew_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        requests = [row[2] for row in rows]
        columns = (
            texts([r.name for r in requests]),
            numbers([r.slot for r in requests]),
            texts([r.claim_id for r in requests]),
            numbers([r.ttl for r in requests]),
        )
        try:
            result = self._connection.run_all([(self._sql["HURRY"], ()), (self._sql["RENEW"], columns)], deadline)[-1]
        except RowBusy:
            result = self._connection.run(self._sql["RENEW_UNLOCKED"], columns, deadline)
            for place in elements(result.get_value(0, 2)):
                outcomes[rows[place - 1][1]] = RowBusy(LEASE_LOCKED)
        get = result.get_value
        now = instant(get(0, 1))
        for place in elements(get(0, 0)):
            _, index, request = rows[place - 1]
            outcomes[index] = Renewed(now + request.ttl)

    def transfer_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for _, index, request in rows:
            name, claim_id, ttl, holder, from_claim, info, slot, permits = request
            columns = (
                *(name.encode(), claim_id.encode(), b"%r" % ttl, holder.encode(), from_claim.encode()),
                *(plain(info), b"%d" % slot),
            )
            result = self._connection.run(self._sql["POOL_TRANSFER" if permits else "TRANSFER"], columns, deadline)
            if result.ntuples:
                get = result.get_value
                outcomes[index] = Granted(integer(get(0, 0)), instant(get(0, 1)), slot)

    def release_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, more: bool) -> None:
        kept = [row for row in rows if row[2].keep > 0]
        if kept:
            for verb, long in (("KEEP", True), ("RELEASE_PINNED", False)):
                some = [row for row in kept if (row[2].keep > PIN_KEEP_S) is long]
                if some:
                    self._release(verb, some, outcomes, deadline, more)
            rows = [row for row in rows if row[2].keep <= 0]
        if rows:
            self._release("RELEASE", rows, outcomes, deadline, more)

    def _release(self, verb: str, rows: list[Row], outcomes: list[Any], deadline: Deadline, more: bool) -> None:
        def held(result: PGresult) -> None:
            if result.ntuples:
                outcomes[rows[0][1]] = RELEASED

        def told(result: PGresult) -> None:
            for place in elements(result.get_value(0, 0)):
                outcomes[rows[place - 1][1]] = RELEASED

        columns, request, one = released(rows), rows[0][2], "_ONE" if len(rows) == 1 else ""
        execute = self._connection.ahead if more else self._connection.tell
        if one and verb == "RELEASE" and request.ticket is None and request.slot:  # (any slot is 0)
            execute((self._sql["RELEASE_HELD"], columns[:3]), held, deadline)
        else:
            execute((self._sql[verb + one], columns[: len(postgres_sql.ASKED[verb])]), told, deadline)

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        if dialect != "postgresql":
            raise InvalidOption(f"leases are kept in PostgreSQL, and that connection is to {dialect}: use dibs.fencing")
        if ROW_MARK in request.name:
            return self._row(request, deadline).pin(request)
        return Pin(self._tables.pin(request))

    def pinned(self, request: Renew, rows: Sequence[tuple[Any, ...]], deadline: Deadline) -> bool:
        if ROW_MARK in request.name:
            return self._row(request, deadline).pinned(request, deadline)
        columns = (b"%d" % rows[0][0], request.name.encode(), b"%d" % request.slot)
        return integer(self._connection.run(self._sql["PINNED"], columns, deadline).get_value(0, 0)) > 0

    def _row(self, request: Renew, deadline: Deadline) -> PostgresRows:
        self._connection.open(deadline)
        return self._columns.table(row_of(request.name)[0], deadline)  # type: ignore[no-any-return]

    def ending(self, request: Release) -> str:
        return self._tables.ending(request)

    def find(self, query: Query, deadline: Deadline) -> list[tuple[Any, ...]]:
        if query.place is not None:
            self._connection.open(deadline)
            held = self._columns.table(query.place, deadline).held
        else:
            if not self._has_tables:
                self.leases("", "", deadline)  # makes them, so that what is missing from now on is the query's
                self._has_tables = True
            held = postgres_query.held(query, self._tables.lease, literal)
        sql = postgres_query.statement(query, held, literal)
        return self._connection.look(postgres_query.BEFORE, sql, deadline)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        result = self._connection.run(self._sql["LIST"], (first.encode(), before.encode()), deadline)
        get = result.get_value
        found = []
        for r in range(result.ntuples):
            name, slot, holder, token, since, until, left, info, waiting, take = (get(r, c) for c in range(10))
            found.append(
                StoredLease(
                    text(name) or "",
                    integer(slot),
                    text(holder) or "",
                    integer(token),
                    instant(since),
                    instant(until),
                    float8(left),
                    text(info),
                    integer(waiting),
                    integer(take),
                )
            )
        return found

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        which = (name.encode(), str(fencing_token).encode())
        broken = self._connection.run(self._sql["BREAK"], which, deadline).ntuples > 0
        if broken and now:  # as a second step, so that a history can tell it from a release
            self._connection.run(self._sql["BREAK_NOW"], which, deadline)
        return broken

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        which = (name.encode(), str(fencing_token).encode())
        ended = self._connection.run(self._sql["END"], (*which, repr(expires_at).encode()), deadline).ntuples > 0
        if ended:
            self._connection.run(self._sql["BREAK_NOW"], which, deadline)
        return ended

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        which = (repr(older_than).encode(), first.encode(), before.encode())
        return integer(self._connection.run(self._sql["PURGE"], which, deadline).get_value(0, 0))

    def check(self, deadline: Deadline) -> list[Finding]:
        self._connection.open(deadline)
        found = postgres_check.findings(self._connection.facts, self._connection.pooled)
        found += postgres_check.standbys(self._connection, deadline)
        return found + postgres_check.rights(self._connection, self._tables.names, self.jobs.tables, deadline)

    # -- tables ---------------------------------------------------------------------------------------------------

    def schema(self) -> str:
        return self._tables.schema() + self.jobs.schema()

    def setup(self, deadline: Deadline) -> None:
        schema = self._tables.schema()
        # (Who does not own a table may not even say CREATE INDEX IF NOT EXISTS.)
        if not self.jobs.set_up(deadline):
            schema += self.jobs.schema()
        set_up(partial(self._connection.make, schema, deadline))

    def history_schema(self, keep: int) -> str:
        return self._tables.history_schema(keep)

    def keep_history(self, keep: int, deadline: Deadline) -> None:
        self._connection.make(self.history_schema(keep), deadline)

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        self._connection.open(deadline)
        given = name.encode(), str(limit).encode()
        try:
            result = self._connection.execute(self._tables.history(), given, deadline)
        except TablesMissing:
            raise without_history() from None
        return grants(result)

    # -- hints ----------------------------------------------------------------------------------------------------

    def watch(self, address: str, deadline: Deadline) -> PostgresWatch | None:
        channels = f"dibs_{address}", job_channel(self._place.schema, self._place.table)
        pg = self._connection.listen(channels, deadline)
        return None if pg is None else PostgresWatch(pg, self.close)

    def close(self) -> None:
        self._connection.close()


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``postgresql://user:password@host:port/database?schema=…&table=…`` points.

    The query may also carry libpq's parameters (sslmode, application_name, …), and name several hosts.
    """
    place = postgres_address.place(url, options)
    hosts = Hosts(place.conninfos)
    return StoreAddress(place.shown, CAPABILITIES, lambda: PostgresStore(place, hosts), together=True, served=True)
