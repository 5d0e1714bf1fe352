"""MySQL and MariaDB: leases as rows of InnoDB tables, through mysqlclient or PyMySQL, on connections of dibs's own.

*A permit is a row*, found by its primary key. A grant is one UPDATE of it in autocommit, whose condition the server
evaluates on the row that it has locked; the token is the old row's plus one. A lone acquire is one round trip, since
the token comes back as LAST_INSERT_ID in the answer to the UPDATE; a batch is an UPDATE that joins the rows with a JSON
document, followed by a SELECT of those that now carry our claim ids, which nobody else can take from us.

*Clock.* The server's, in UTC: UTC_TIMESTAMP(6), the moment at which it *began* with the statement. That is before the
row was locked, if that took a wait, and after the request was sent, which makes it the safe one of the server's clocks:
a lease is taken for expired too late, never too early; a new lease ends a ttl after the request was sent or later; and
a statement that was held up until long after its caller gave up (by ALTER TABLE, a frozen server) grants a lease that
is over already. SYSDATE(6), read at execution, would grant a full ttl to nobody there, and is another thing under
``sysdate-is-now``. What is promised nowhere: that the server's clock is never stepped.

*Line.* A row for each waiter, in order of tickets from an AUTO_INCREMENT. MySQL has no way to call a client, so the
watch of a client looks, in one SELECT for all names it waits for, whether one of them is free with one of its own first
in line. GET_LOCK is not used.

*Permits.* Names that have several are decided in a transaction, which locks them: see dibs.stores.mysql_pools. Where it
is plain that there are enough, one gets by without: see dibs.stores.mysql_pools_plain.
"""

from __future__ import annotations

from functools import cached_property, partial

from dibs._typing import TYPE_CHECKING, Any
from dibs.columns import row_of
from dibs.errors import InvalidOption
from dibs.store import (
    ANY_SLOT,
    LAST_TICKET,
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
    StoreAddress,
    StoredGrant,
    StoredLease,
)
from dibs.stores import mysql_address, mysql_check, mysql_columns, mysql_pools, mysql_pools_plain, mysql_query, rounds
from dibs.stores import mysql_sql as sql
from dibs.stores.columns import Columns, in_call
from dibs.stores.mysql_link import Connection
from dibs.stores.mysql_operators import Operators
from dibs.stores.mysql_pins import Pins
from dibs.stores.mysql_pools_purge import IdlePools
from dibs.stores.mysql_tables import Tables
from dibs.stores.mysql_values import (
    acquires,
    by_key,
    claim_of,
    document,
    grants,
    hexed,
    listed,
    literal,
    optional,
    parts,
    quoted,
    us,
)
from dibs.stores.mysql_watch import MySQLWatch
from dibs.stores.rounds import Row, Seen
from dibs.stores.tables import after_a_crash

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.queries import Query
    from dibs.store import Release, Renew
    from dibs.stores.mysql_columns import MySQLRows
    from dibs.stores.mysql_jobs import MySQLJobs

CAPABILITIES = Capabilities(
    store="MySQL / MariaDB",
    survives_restart="yes",
    fencing_token="strict",
    clock="server, UTC, microseconds",
    waiting_line="FIFO",
    signal="poll",
    queue=True,
    durable=True,
    ttl_min_s=0.1,
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
OPTIONS = mysql_address.OPTIONS


class MySQLStore:
    def __init__(self, place: mysql_address.Place) -> None:
        self._tables = Tables(place.where.database, place.table)
        self._connection = Connection(place.where, place.connect, self._tables)
        self._has_tables = False
        self._sql = self._tables.sql
        self._pins = Pins(self._tables.text)
        self._columns = Columns(partial(mysql_columns.rows_of, self._connection))
        self._plain = mysql_pools_plain.Plain(self._tables.text)
        self._pools = mysql_pools.Pools(self._tables.text, self._pins, self._plain.tallies)
        idle = IdlePools(self._tables.text, self._pools)
        self._operators = Operators(self._connection, self._tables, idle, self._pins)

    @cached_property
    def jobs(self) -> MySQLJobs:
        from dibs.stores.mysql_jobs import MySQLJobs  # who keeps no queues need not wait for it

        return MySQLJobs(self._connection, self._tables)

    @property
    def capabilities(self) -> Capabilities:
        return after_a_crash(CAPABILITIES, mysql_check.lost_by_a_crash(self._connection.facts))

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        self._connection.wrote = False
        if not requests:
            self._connection.ask(sql.CLOCK, deadline)
            return []
        if in_call(requests):
            return self._columns.act(requests, deadline, partial(rounds.act, self))
        return rounds.act(self, requests, deadline)

    def acquire_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, in_line: bool) -> list[Row]:
        if len(rows) == 1:
            found = self._grant(rows[0], deadline, in_line)
        else:
            found = {}
            for part, first in parts(rows):
                if in_line:
                    granted = self._connection.write(self._sql["GRANT_MANY_IN_LINE"], acquires(part), deadline)
                else:
                    granted = self._connection.write(self._sql["GRANT_MANY"], grants(part), deadline)
                ours = self._read_ours(part, deadline)
                if len(ours) > granted:  # some of them held before: the same acquire, repeated
                    self._connection.write(self._sql["REPEAT"], acquires(part), deadline)
                    ours = self._read_ours(part, deadline)
                found.update((first + place, grant) for place, grant in ours.items())
        for place, grant in found.items():
            outcomes[rows[place][1]] = grant
        if in_line and found:
            self._clear_line([rows[place] for place in sorted(found)], deadline)
        if len(found) == len(rows):
            return []
        return [row for place, row in enumerate(rows) if place not in found]

    def _grant(self, row: Row, deadline: Deadline, in_line: bool) -> dict[int, Granted]:
        """Try one row; its token comes with the answer, its time we set."""
        request = row[2]
        now = self._connection.server_now(deadline)
        name, claim = hexed(request.name), hexed(request.claim_id)
        grant = claim, hexed(request.holder), literal(request.info), now, us(request.ttl)
        if in_line:
            ticket = LAST_TICKET if request.ticket is None else request.ticket
            statement = self._sql["GRANT_ONE_IN_LINE"] % (*grant, ticket, name, claim, name, ticket, claim)
        else:
            statement = self._sql["GRANT_ONE"] % (*grant, name, claim)
        answer = self._connection.ask(statement, deadline)
        if not answer.affected:
            return {}
        self._connection.wrote = True
        if not answer.insert_id:  # a trigger on the table (the history's is one) takes the token out of the answer
            return self._read_ours([row], deadline)
        return {0: Granted(answer.insert_id, now / 1e6)}

    def _clear_line(self, rows: list[Row], deadline: Deadline) -> None:
        """Take those who were granted out of the line, with everybody before them."""
        asked = [
            f'["{hexed(r.name)}",{LAST_TICKET if r.ticket is None else r.ticket}]' for r in (row[2] for row in rows)
        ]
        self._connection.write(self._sql["CLEAR"], document(asked), deadline)

    def _read_ours(self, rows: list[Row], deadline: Deadline) -> dict[int, Granted]:
        """Which of the claims hold, by their places."""
        found = {}
        for triple in self._connection.pieces(self._sql["OURS"], document(map(claim_of, rows)), deadline):
            i, token, acquired_us = triple.split()
            found[int(i) - 1] = Granted(int(token), int(acquired_us) / 1e6)
        return found

    def enter_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> list[Row]:
        again: list[Row] = []
        for part, _ in parts(rows):
            self._enter_part(part, outcomes, again, deadline)
        return again

    def _enter_part(self, rows: list[Row], outcomes: list[Any], again: list[Row], deadline: Deadline) -> None:
        asked = document(f'["{hexed(r.name)}","{hexed(r.claim_id)}",{optional(r.ticket)}]' for _, _, r in rows)
        seen: list[Any] = [None] * len(rows)
        places: list[int | None] = [None] * len(rows)
        mine: list[int] = []
        pools: set[int] = set()
        for values in self._connection.rows(self._sql["SEEN"], asked, deadline):
            i, token, holder, acquired_us, free, left_us, is_mine, place, ahead, take, permits = values
            at = int(i) - 1
            if take is not None or (token is None and permits is not None):
                outcomes[rows[at][1]] = Mismatch(int(take if permits is None else permits))
                pools.add(at)
                continue
            places[at] = None if place is None else int(place)
            if token is None:
                continue
            if is_mine == b"1":
                mine.append(at)
            ticket = places[at] if rows[at][2].ticket is None else rows[at][2].ticket
            seen[at] = Seen(
                None if holder is None else holder.decode(),
                int(token),
                int(acquired_us) / 1e6,
                free == b"1",
                ahead == b"1",
                int(left_us) / 1e6,
                ticket,
            )
        over = {rows[at][0]: at for at, one in enumerate(seen) if one and not one.free and one.free_in <= 0}
        if over:  # but for their pins
            for name in self._connection.transaction(partial(self._pins.drop, list(over)), deadline):
                seen[over[name]] = seen[over[name]]._replace(free=True)
        new = [at for at, one in enumerate(seen) if one is None and at not in pools]
        granted = self._make_or_repeat(rows, new, mine, deadline)
        waiting = [at for at, row in enumerate(rows) if row[2].wake is not None and seen[at] and at not in granted]
        if waiting:
            self._line(rows, seen, places, waiting, deadline)
        for at, row in enumerate(rows):
            if at in granted:
                outcomes[row[1]] = granted[at]
            elif at not in pools:
                rounds.told(row, seen[at], outcomes, again)

    def _make_or_repeat(
        self, rows: list[Row], new: list[int], mine: list[int], deadline: Deadline
    ) -> dict[int, Granted]:
        """Grants to whom a new row is made, and to whom hold already; by place."""
        if not new and not mine:
            return {}
        if new and not self._connection.write(self._sql["MAKE"], acquires([rows[at] for at in new]), deadline):
            # Not even a row that somebody else made: there is no floor to begin above. The tables were emptied.
            self._connection.make(self._tables.schema(), deadline)
            self._connection.write(self._sql["MAKE"], acquires([rows[at] for at in new]), deadline)
        if mine:
            self._connection.write(self._sql["REPEAT"], acquires([rows[at] for at in mine]), deadline)
            waited = [rows[at] for at in mine if rows[at][2].ticket is not None]
            if waited:  # the answer was lost, and perhaps this, too
                self._clear_line(waited, deadline)
        asked = sorted(new + mine)
        ours = self._read_ours([rows[at] for at in asked], deadline)
        return {asked[place]: grant for place, grant in ours.items()}

    def _line(
        self, rows: list[Row], seen: list[Any], places: list[int | None], waiting: list[int], deadline: Deadline
    ) -> None:
        """Put those who wait in line, or note that they have been seen there; their tickets go into ``seen``."""
        entering = [at for at in waiting if seen[at].ticket is None]
        staying = [at for at in waiting if seen[at].ticket is not None and (seen[at].free or places[at] is None)]
        if staying:
            asked = [
                f'["{hexed(r.name)}","{hexed(r.claim_id)}","{hexed(r.wake)}",{seen[at].ticket}]'
                for at, r in ((at, rows[at][2]) for at in staying)
            ]
            self._connection.write(self._sql["STILL_THERE"], document(asked), deadline)
        # In the order of the call, which is that of arrival.
        unplaced = sorted(entering, key=lambda at: rows[at][1])
        while unplaced:
            requests = [rows[at][2] for at in unplaced]
            asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}","{hexed(r.wake)}"]' for r in requests]
            self._connection.write(self._sql["LINE_UP"], document(asked), deadline)
            asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}"]' for r in requests]
            for pair in self._connection.pieces(self._sql["PLACES"], document(asked), deadline):
                i, ticket = pair.split()
                at = unplaced[int(i) - 1]
                seen[at] = seen[at]._replace(ticket=int(ticket))
            # A place may be gone already: with the line before one whose ticket is greater and was seen earlier.
            unplaced = [at for at in unplaced if seen[at].ticket is None]
        if staying or entering:
            asked = [f'["{hexed(rows[at][0])}",{seen[at].ticket}]' for at in sorted(staying + entering)]
            self._connection.write(self._sql["LAST_TICKETS"], document(asked), deadline)

    def acquire_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for part, _ in parts(rows):
            plain = True
            if len(part) == 1 and part[0][2].info is None:
                granted, plain = self._plain.take(part[0][2], self._connection, deadline)
                if granted is not None:
                    outcomes[part[0][1]] = granted
                    continue
            now_us = self._connection.server_now(deadline)
            acquire = partial(self._pools.acquire, part, plain, outcomes, now_us)
            wrote = self._connection.transaction(acquire, deadline)
            self._connection.wrote = self._connection.wrote or wrote

    def renew_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for part, _ in parts(rows):
            claims = [f'"{hexed(r.name)}","{hexed(r.claim_id)}",{r.slot:d}' for _, _, r in part]
            asked = document(f"[{claim},{us(row[2].ttl)}]" for claim, row in zip(claims, part, strict=True))
            renewed = self._connection.write(self._sql["RENEW"], asked, deadline)
            now = self._connection.server_now(deadline) / 1e6
            done: Collection[int] = range(len(part))
            if renewed < len(part):
                # Those that still hold held then: a claim that was lost does not come back.
                asked = document(f"[{claim}]" for claim in claims)
                done = [int(i) - 1 for i in self._connection.pieces(self._sql["IN_FORCE"], asked, deadline)]
            for place in done:
                _, index, request = part[place]
                outcomes[index] = Renewed(now + request.ttl)

    def transfer_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for row in rows:
            _, index, request = row
            now_us = self._connection.server_now(deadline)
            if not request.from_claim or (not request.permits and request.slot != 1):
                continue
            if request.permits:
                moved = self._connection.transaction(partial(self._pools.transfer, request, now_us), deadline)
                self._connection.wrote = self._connection.wrote or moved is not None
            else:
                moved = self._transfer(row, now_us, deadline)
            if moved is not None:
                outcomes[index] = moved

    def _transfer(self, row: Row, now_us: int, deadline: Deadline) -> Granted | None:
        request = row[2]
        lasting, name, claim = us(request.ttl), hexed(request.name), hexed(request.claim_id)
        values = now_us, lasting, hexed(request.holder), literal(request.info), claim, name, hexed(request.from_claim)
        for _ in range(2):
            answer = self._connection.ask(self._sql["TRANSFER"] % values, deadline)
            if answer.affected:
                self._connection.wrote = True
                if not answer.insert_id:  # as in a grant
                    return self._read_ours([row], deadline).get(0)
                return Granted(answer.insert_id, now_us / 1e6)
            if self._connection.write(self._sql["TRANSFERRED"], (lasting, name, claim), deadline):
                return self._read_ours([row], deadline).get(0)
            # Pinned, perhaps, by a transaction that has ended: then it is once more.
            drop = partial(self._pins.drop_ended, request.name, request.slot)
            if not self._connection.transaction(drop, deadline):
                break
        return None

    def release_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, more: bool) -> None:
        if any(row[2].slot == ANY_SLOT for row in rows):
            rows = self._with_slots(rows, deadline)
        for part, _ in parts(rows):
            leaving = [r for _, _, r in part if r.ticket is not None]
            if leaving:
                asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}",{r.ticket:d}]' for r in leaving]
                self._connection.write(self._sql["DEPART"], document(asked), deadline)
            if len(part) == 1 and not part[0][2].keep:
                _, index, request = part[0]
                values = hexed(request.name), request.slot, hexed(request.claim_id)
                if self._connection.ask(self._sql["RELEASE_ONE"] % values, deadline).affected:
                    self._connection.wrote = True
                    outcomes[index] = RELEASED
                continue
            # Which they are must be seen before: afterwards nothing of them is left. One that ends in between was held
            # when this was asked, and is over now, which is what Released says.
            asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}",{r.slot:d}]' for _, _, r in part]
            held = [part[int(i) - 1] for i in self._connection.pieces(self._sql["IN_FORCE"], document(asked), deadline)]
            self._keep_or_release(held, deadline)
            for _, index, _ in held:
                outcomes[index] = RELEASED

    def _with_slots(self, rows: list[Row], deadline: Deadline) -> list[Row]:
        """The rows, where those who were never told their slots have them now; who has none keeps ANY_SLOT."""
        unknown = [row for row in rows if row[2].slot == ANY_SLOT]
        found = {}
        for part, first in parts(unknown):
            for pair in self._connection.pieces(self._sql["SLOTS"], document(map(claim_of, part)), deadline):
                i, slot = pair.split()
                found[unknown[first + int(i) - 1][1]] = int(slot)
        return [(name, index, request._replace(slot=found.get(index, request.slot))) for name, index, request in rows]

    def _keep_or_release(self, rows: list[Row], deadline: Deadline) -> None:
        plain = [r for _, _, r in rows if r.keep <= 0]
        if plain:
            self._connection.write(self._sql["RELEASE"], listed(plain), deadline)
        kept = [r for _, _, r in rows if r.keep > 0]
        while kept:  # once, unless several slots of one name are kept
            firsts = {r.name: r for r in reversed(kept)}
            these, kept = [r for r in kept if firsts[r.name] is r], [r for r in kept if firsts[r.name] is not r]
            names = [quoted(r.name) for r in these]
            infos, lasting = [literal(r.info) for r in these], [str(us(r.keep)) for r in these]
            values = by_key(names, infos), by_key(names, lasting), *listed(these)
            self._connection.write(self._sql["KEEP"], values, deadline)

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        if dialect != "mysql":
            raise InvalidOption(f"leases are kept in MySQL, and that connection is to {dialect}: use dibs.fencing")
        self._connection.wrote = False
        if ROW_MARK in request.name:
            return self._row(request, deadline).pin(request)
        pin = self._pins.make(request, partial(self._connection.ask, deadline=deadline))
        return Pin(self._connection.for_caller(pin))

    def pinned(self, request: Renew, rows: Sequence[tuple[Any, ...]], deadline: Deadline) -> bool:
        self._connection.wrote = False
        if ROW_MARK in request.name:
            return self._row(request, deadline).pinned(request, deadline)
        return self._pins.there(request, rows, partial(self._connection.ask, deadline=deadline))

    def _row(self, request: Renew, deadline: Deadline) -> MySQLRows:
        return self._columns.table(row_of(request.name)[0], deadline)  # type: ignore[no-any-return]

    def ending(self, request: Release) -> str:
        return self._sql["RELEASE_ONE"] % (hexed(request.name), request.slot, hexed(request.claim_id))

    def find(self, query: Query, deadline: Deadline) -> list[tuple[Any, ...]]:
        look, lease = self._connection.look, self._tables.lease
        if query.place is None and not self._has_tables:
            self.leases("", "", deadline)  # makes them, so that what is missing from now on is the query's
            self._has_tables = True
        _, columns = look(mysql_query.columns(query), deadline)
        key = sql.quoted(columns[0][0])
        if query.place is None:
            held = mysql_query.held(query, lease, key)
        else:
            held = self._columns.table(query.place, deadline).held(key)
        answer, columns = look(mysql_query.statement(query, held, key), deadline)
        kinds = [kind for _, kind in columns]
        return [tuple(map(mysql_query.read, row, kinds)) for row in answer.rows]

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        return self._operators.leases(first, before, deadline)

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        return self._operators.break_lease(name, fencing_token, now, deadline)

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        return self._operators.end_unchanged(name, fencing_token, expires_at, deadline)

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        return self._operators.purge(first, before, older_than, deadline)

    def check(self, deadline: Deadline) -> list[Finding]:
        return mysql_check.check(self._connection, self._tables.called, deadline)

    # -- tables ---------------------------------------------------------------------------------------------------

    def schema(self) -> str:
        return self._tables.schema() + self._tables.jobs_schema()

    def setup(self, deadline: Deadline) -> None:
        self._connection.wrote = False
        self._connection.setup(self.schema(), deadline)

    def history_schema(self, keep: int) -> str:
        return self._tables.history_schema(keep)

    def keep_history(self, keep: int, deadline: Deadline) -> None:
        self._connection.wrote = False
        self._connection.make(self.history_schema(keep), deadline)

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        return self._operators.history(name, limit, deadline)

    # -- hints ----------------------------------------------------------------------------------------------------

    def watch(self, address: str, deadline: Deadline) -> MySQLWatch:
        self._connection.ask(sql.CLOCK, deadline)
        looks = (self._sql[verb] for verb in ("LOOK", "ANY_FREE", "READY"))
        return MySQLWatch(self._connection, *looks, address=address)

    def close(self) -> None:
        self._connection.close()


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``mysql://user:password@host:port/database`` (or ``mariadb://``) points.

    Options: ``table``, ``driver`` (mysqlclient or pymysql; ``mysql+pymysql://`` says it, too), ``unix_socket``, and for
    TLS ``ssl_mode``, ``ssl_ca``, ``ssl_cert``, ``ssl_key`` or the drivers' and SQLAlchemy's other words for them.
    """
    place = mysql_address.place(url, options)
    return StoreAddress(place.shown, CAPABILITIES, lambda: MySQLStore(place), together=True, served=True)
