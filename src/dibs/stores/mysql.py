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

*Permits.* Names that have several are decided in a transaction, which locks them: see dibs.stores.mysql_pools.

*Retries.* A deadlock (1213) or a lock wait (1205) rolls back a statement that is the whole transaction, so it is sent
again, a bounded number of times. A transaction on permits is rolled back and begun again. Nothing else is.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote

from dibs.clock import Deadline, RealClock, boot_now
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported
from dibs.store import (
    ANY_SLOT,
    LAST_TICKET,
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
from dibs.stores import mysql_check, mysql_history, mysql_pools, rounds
from dibs.stores import mysql_sql as sql
from dibs.stores.identifiers import quoted_table
from dibs.stores.mysql_drivers import CR_SSL, DRIVERS, SSL_MODES, ServerError, TimedOut, Where, Wire, opener
from dibs.stores.mysql_pins import Pins
from dibs.stores.mysql_sql import by_name, document, hexed, literal, optional, us
from dibs.stores.rounds import Row, Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from urllib.parse import SplitResult

    from dibs.store import Release, Renew
    from dibs.stores.mysql_drivers import Answer, Link

_T = TypeVar("_T")

CAPABILITIES = Capabilities(
    store="MySQL / MariaDB",
    survives_restart="yes",
    fencing_token="strict",
    clock="server, UTC, microseconds",
    waiting_line="FIFO",
    signal="poll",
    queue=False,
    durable=True,
    ttl_min_s=0.1,
    ttl_max_s=30 * 24 * 3600.0,
    resolution_s=0.001,
    margin_s=0.010,
    permits=True,
    pause=True,
    history=True,
    guard=True,
)
MYSQL_MIN, MARIADB_MIN = (8, 0, 4), (10, 6)
# Rows of one statement; it keeps them locked until it is done. And how much text of `info` they may carry together.
ROWS_MAX = 1000
INFO_BYTES_MAX = 1_000_000
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
# A look of the watch: how many names, and how long it may take.
LOOK_NAMES_MAX = 200
LOOK_LIMIT_S = 1.0
# Steps of one purge.
PURGE_STEPS_MAX = 100_000

# Codes of errors. Those of the client library are the first four, which both drivers use.
CONNECTION_LOST = frozenset((2006, 2013, 2027, 2055))
_NO_TABLE = frozenset((1146, 1054))
# Somebody else's locks; and a row that somebody else made at the same moment, where nobody else should.
_TRY_AGAIN = frozenset((1062, 1205, 1213))
_THERE_ALREADY = frozenset((1060, 1359))
_READ_ONLY = frozenset((1290, 1792, 1836))
_STATEMENT_BINLOG = frozenset((1665,))
_LOGIN = frozenset((1044, 1045, 1049, 1130, 1251, 1524, 1698, 1820, 1862, 2054, 2059, 2061, 3118, 4151))
_RIGHTS = frozenset((1142, 1143, 1227, 1370, 1419))
_TLS = frozenset((CR_SSL, 3159))
# Refused before anything was done: too many connections, shutting down, a Galera node outside the majority, disk full,
# a statement that ran into a limit or was killed.
_NOT_DONE = frozenset((1021, 1040, 1047, 1053, 1114, 1203, 1226, 1317, 1969, 3024))


class MySQLStore:
    def __init__(self, where: Where, table: str, connect: Callable[[Where, float], Link]) -> None:
        self._where = where
        self._connect = connect
        self._tables = [table, table + "_line", table + "_pool", table + "_meta", table + "_guard"]
        self._names = {
            key: sql.quoted(name)
            for key, name in zip(("lease", "line", "pool", "meta", "guard"), self._tables, strict=True)
        }
        self._names["database"] = "`" + where.database.replace("`", "``") + "`"
        self._wire: Wire | None = None
        self._facts: dict[str, str] = {}
        #: The server's clock in microseconds, and the boot clock when it was read.
        self._server_clock = (0, float("-inf"))
        #: Something of the call under way has been applied.
        self._wrote = False
        #: The server will end a transaction of ours in which nothing happens any more.
        self._limited = False
        self._pins = Pins(self._text)
        self._pools = mysql_pools.Pools(self._text, self._pins.drop)
        self._grant_one, self._grant_one_in_line = self._text(sql.GRANT_ONE), self._text(sql.GRANT_ONE_IN_LINE)
        claim = ("name", "claim_id", "us", "holder", "info", "ticket")
        self._grant_many = self._text(sql.GRANT_MANY)
        self._grant_many_in_line = self._text(sql.GRANT_MANY_IN_LINE, *claim)
        self._repeat = self._text(sql.REPEAT, *claim)
        self._make = self._text(sql.MAKE, *claim)
        self._ours = self._text(sql.OURS, "name", "claim_id")
        self._clear = self._text(sql.CLEAR, "name", "ticket")
        self._seen = self._text(sql.SEEN, "name", "claim_id", "ticket")
        self._line_up = self._text(sql.LINE_UP, "name", "claim_id", "wake")
        self._places = self._text(sql.PLACES, "name", "claim_id")
        self._last_tickets = self._text(sql.LAST_TICKETS, "name", "ticket")
        self._still_there = self._text(sql.STILL_THERE, "name", "claim_id", "wake", "ticket")
        self._renew = self._text(sql.RENEW, "name", "claim_id", "slot", "us")
        self._in_force = self._text(sql.IN_FORCE, "name", "claim_id", "slot")
        self._release_one = self._text(sql.RELEASE_ONE)
        self._release = self._text(sql.RELEASE)
        self._keep = self._text(sql.KEEP)
        self._slots = self._text(sql.SLOTS, "name", "claim_id")
        self._depart = self._text(sql.DEPART, "name", "claim_id", "ticket")
        self.look = self._text(sql.LOOK, "name")

    def _text(self, template: str, *columns: str) -> str:
        """A statement with our tables in it, ready for its values."""
        names = {key: name.replace("%", "%%") for key, name in self._names.items()}
        for key, lease in (("unpinned", "l"), ("unpinned_of_lease", names["lease"])):
            names[key] = sql.UNPINNED.format(lease=lease, guard=names["guard"])
        return template.format(**names, asked=sql.asked(*columns) if columns else "")

    @property
    def capabilities(self) -> Capabilities:
        if not self._facts or not mysql_check.volatile(self._facts):
            return CAPABILITIES
        return CAPABILITIES._replace(durable=False, fencing_token="strict while no crash loses acknowledged commits")

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        self._wrote = False
        if not requests:
            self._ask(sql.CLOCK, deadline)
            return []
        return rounds.act(self, requests, deadline)

    def acquire_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, in_line: bool) -> list[Row]:
        if len(rows) == 1:
            found = self._grant(rows[0], deadline, in_line)
        else:
            found = {}
            for part, first in _parts(rows):
                if in_line:
                    granted = self._write(self._grant_many_in_line, _claims(part), deadline)
                else:
                    granted = self._write(self._grant_many, _grants(part), deadline)
                ours = self._read_ours(part, deadline)
                if len(ours) > granted:  # some of them held before: the same acquire, repeated
                    self._write(self._repeat, _claims(part), deadline)
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
        now = self._server_now(deadline)
        name, claim = hexed(request.name), hexed(request.claim_id)
        grant = claim, hexed(request.holder), literal(request.info), now, us(request.ttl)
        if in_line:
            ticket = LAST_TICKET if request.ticket is None else request.ticket
            statement = self._grant_one_in_line % (*grant, ticket, name, claim, name, ticket, claim)
        else:
            statement = self._grant_one % (*grant, name, claim)
        answer = self._ask(statement, deadline)
        if not answer.affected:
            return {}
        self._wrote = True
        if not answer.insert_id:  # a trigger on the table (the history's is one) takes the token out of the answer
            return self._read_ours([row], deadline)
        return {0: Granted(answer.insert_id, now / 1e6)}

    def _clear_line(self, rows: list[Row], deadline: Deadline) -> None:
        """Take those who were granted out of the line, with everybody before them."""
        asked = [
            f'["{hexed(r.name)}",{LAST_TICKET if r.ticket is None else r.ticket}]' for r in (row[2] for row in rows)
        ]
        self._write(self._clear, document(asked), deadline)

    def _read_ours(self, rows: list[Row], deadline: Deadline) -> dict[int, Granted]:
        """Which of the claims hold, by their places."""
        found = {}
        for triple in self._list(self._ours, document(map(_claim, rows)), deadline):
            i, token, acquired_us = triple.split()
            found[int(i) - 1] = Granted(int(token), int(acquired_us) / 1e6)
        return found

    def enter_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> list[Row]:
        again: list[Row] = []
        for part, _ in _parts(rows):
            self._enter_part(part, outcomes, again, deadline)
        return again

    def _enter_part(self, rows: list[Row], outcomes: list[Any], again: list[Row], deadline: Deadline) -> None:
        asked = document(f'["{hexed(r.name)}","{hexed(r.claim_id)}",{optional(r.ticket)}]' for _, _, r in rows)
        seen: list[Any] = [None] * len(rows)
        places: list[int | None] = [None] * len(rows)
        mine: list[int] = []
        pools: set[int] = set()
        for values in self._rows(self._seen, asked, deadline):
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
            unpin = partial(self._transaction, partial(self._pins.drop, list(over)), deadline)
            for name in self._with_tables(unpin, deadline):
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
        if new and not self._write(self._make, _claims([rows[at] for at in new]), deadline):
            # Not even a row that somebody else made: there is no floor to begin above. The tables were emptied.
            self._make_tables(deadline)
            self._write(self._make, _claims([rows[at] for at in new]), deadline)
        if mine:
            self._write(self._repeat, _claims([rows[at] for at in mine]), deadline)
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
            self._write(self._still_there, document(asked), deadline)
        if entering:
            # In the order of the call, which is that of arrival.
            entering.sort(key=lambda at: rows[at][1])
            requests = [rows[at][2] for at in entering]
            asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}","{hexed(r.wake)}"]' for r in requests]
            self._write(self._line_up, document(asked), deadline)
            asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}"]' for r in requests]
            for pair in self._list(self._places, document(asked), deadline):
                i, ticket = pair.split()
                at = entering[int(i) - 1]
                seen[at] = seen[at]._replace(ticket=int(ticket))
        if staying or entering:
            asked = [f'["{hexed(rows[at][0])}",{seen[at].ticket}]' for at in sorted(staying + entering)]
            self._write(self._last_tickets, document(asked), deadline)

    def acquire_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for part, _ in _parts(rows):
            now_us = self._server_now(deadline)
            decide = partial(self._pools.acquire, part, outcomes, now_us)
            wrote = self._with_tables(partial(self._transaction, decide, deadline), deadline)
            self._wrote = self._wrote or wrote

    def renew_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for part, _ in _parts(rows):
            claims = [f'"{hexed(r.name)}","{hexed(r.claim_id)}",{r.slot:d}' for _, _, r in part]
            asked = document(f"[{claim},{us(row[2].ttl)}]" for claim, row in zip(claims, part, strict=True))
            renewed = self._write(self._renew, asked, deadline)
            now = self._server_now(deadline) / 1e6
            done: Collection[int] = range(len(part))
            if renewed < len(part):
                # Those that still hold held then: a claim that was lost does not come back.
                asked = document(f"[{claim}]" for claim in claims)
                done = [int(i) - 1 for i in self._list(self._in_force, asked, deadline)]
            for place in done:
                _, index, request = part[place]
                outcomes[index] = Renewed(now + request.ttl)

    def transfer_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        for row in rows:
            _, index, request = row
            now_us = self._server_now(deadline)
            if not request.from_claim or (not request.permits and request.slot != 1):
                continue
            if request.permits:
                move = partial(self._pools.transfer, request, now_us)
                moved = self._with_tables(partial(self._transaction, move, deadline), deadline)
                self._wrote = self._wrote or moved is not None
            else:
                moved = self._transfer(row, now_us, deadline)
            if moved is not None:
                outcomes[index] = moved

    def _transfer(self, row: Row, now_us: int, deadline: Deadline) -> Granted | None:
        request = row[2]
        lasting, name, claim = us(request.ttl), hexed(request.name), hexed(request.claim_id)
        values = now_us, lasting, hexed(request.holder), literal(request.info), claim, name, hexed(request.from_claim)
        for _ in range(2):
            answer = self._ask(self._text(sql.TRANSFER) % values, deadline)
            if answer.affected:
                self._wrote = True
                if not answer.insert_id:  # as in a grant
                    return self._read_ours([row], deadline).get(0)
                return Granted(answer.insert_id, now_us / 1e6)
            if self._write(self._text(sql.TRANSFERRED), (lasting, name, claim), deadline):
                return self._read_ours([row], deadline).get(0)
            # Pinned, perhaps, by a transaction that has ended: then it is once more.
            unpin = partial(self._transaction, partial(self._pins.drop, [request.name]), deadline)
            if not self._with_tables(unpin, deadline):
                break
        return None

    def release_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        if any(row[2].slot == ANY_SLOT for row in rows):
            rows = self._with_slots(rows, deadline)
        for part, _ in _parts(rows):
            leaving = [r for _, _, r in part if r.ticket is not None]
            if leaving:
                asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}",{r.ticket:d}]' for r in leaving]
                self._write(self._depart, document(asked), deadline)
            if len(part) == 1 and not part[0][2].keep:
                _, index, request = part[0]
                values = hexed(request.name), request.slot, hexed(request.claim_id)
                if self._ask(self._release_one % values, deadline).affected:
                    self._wrote = True
                    outcomes[index] = RELEASED
                continue
            # Which they are must be seen before: afterwards nothing of them is left. One that ends in between was held
            # when this was asked, and is over now, which is what Released says.
            asked = [f'["{hexed(r.name)}","{hexed(r.claim_id)}",{r.slot:d}]' for _, _, r in part]
            held = [part[int(i) - 1] for i in self._list(self._in_force, document(asked), deadline)]
            self._keep_or_release(held, deadline)
            for _, index, _ in held:
                outcomes[index] = RELEASED

    def _with_slots(self, rows: list[Row], deadline: Deadline) -> list[Row]:
        """The rows, where those who were never told their slots have them now; who has none keeps ANY_SLOT."""
        unknown = [row for row in rows if row[2].slot == ANY_SLOT]
        found = {}
        for part, first in _parts(unknown):
            for pair in self._list(self._slots, document(map(_claim, part)), deadline):
                i, slot = pair.split()
                found[unknown[first + int(i) - 1][1]] = int(slot)
        return [(name, index, request._replace(slot=found.get(index, request.slot))) for name, index, request in rows]

    def _keep_or_release(self, rows: list[Row], deadline: Deadline) -> None:
        plain = [r for _, _, r in rows if r.keep <= 0]
        if plain:
            self._write(self._release, _these(plain), deadline)
        kept = [r for _, _, r in rows if r.keep > 0]
        while kept:  # once, unless several slots of one name are kept
            firsts = {r.name: r for r in reversed(kept)}
            these, kept = [r for r in kept if firsts[r.name] is r], [r for r in kept if firsts[r.name] is not r]
            names = [f"x'{hexed(r.name)}'" for r in these]
            infos, lasting = [literal(r.info) for r in these], [str(us(r.keep)) for r in these]
            values = by_name(names, infos), by_name(names, lasting), *_these(these)
            self._write(self._keep, values, deadline)

    # -- pins -----------------------------------------------------------------------------------------------------

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        if dialect != "mysql":
            raise InvalidOption(f"leases are kept in MySQL, and that connection is to {dialect}: use dibs.fencing")
        self._wrote = False
        return Pin(self._pins.make(request, partial(self._ask, deadline=deadline)))

    def pinned(self, request: Renew, rows: Sequence[tuple[Any, ...]], deadline: Deadline) -> bool:
        self._wrote = False
        return self._pins.there(request, rows, partial(self._ask, deadline=deadline))

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        rows = self._rows(self._text(sql.LIST), (hexed(first), hexed(before)), deadline)
        return [
            StoredLease(
                name.decode(),
                int(slot),
                (holder or b"").decode(),
                int(token),
                int(since_us) / 1e6,
                int(until_us) / 1e6,
                int(left_us) / 1e6,
                None if info is None else info.decode(),
                int(waiting),
                int(take),
            )
            for name, slot, holder, token, since_us, until_us, left_us, info, waiting, take in rows
        ]

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        self._wrote = False
        which = (hexed(name), fencing_token)
        broken = self._write(self._text(sql.BREAK), which, deadline)
        if broken and now:  # as a second step, so that a history can tell it from a release
            self._write(self._text(sql.BREAK_NOW), which, deadline)
        return bool(broken)

    def purge(self, older_than: float, deadline: Deadline) -> int:
        self._wrote = False
        self._write(self._text(sql.PURGE_FLOOR), (us(older_than),), deadline)
        purged = 0
        for _ in range(PURGE_STEPS_MAX):
            some = self._write(self._text(sql.PURGE_SOME), (us(older_than),), deadline)
            purged += some
            if some < sql.PURGE_ROWS:
                break
        purged += self._purge_pools(older_than, deadline)
        self._write(self._text(sql.PURGE_LINE), (), deadline)
        for _ in range(PURGE_STEPS_MAX):
            rest = partial(self._transaction, self._pins.drop_rest, deadline)
            if not self._with_tables(rest, deadline):
                break
        return purged

    def _purge_pools(self, older_than: float, deadline: Deadline) -> int:
        purged, after = 0, ""
        for _ in range(PURGE_STEPS_MAX):
            names = self._pools.idle(partial(self._ask, deadline=deadline), us(older_than), after)
            if not names:
                break
            after = names[-1]
            empty = partial(self._pools.purge, names, us(older_than))
            purged += self._with_tables(partial(self._transaction, empty, deadline), deadline)
            self._wrote = self._wrote or purged > 0
        return purged

    def check(self, deadline: Deadline) -> list[Finding]:
        self._reopen(deadline)
        self._read_facts(deadline)
        engines = {
            (name or b"").decode(): (engine or b"").decode() for name, engine in self._ask(sql.ENGINES, deadline).rows
        }
        ours = {name: engine for name, engine in engines.items() if name in self._tables}
        return mysql_check.findings(self._facts, ours)

    # -- tables ---------------------------------------------------------------------------------------------------

    def schema(self) -> str:
        texts: dict[str, str] = {}
        for key, name in zip(("lease", "line"), self._tables, strict=False):
            texts |= {f"{key}_text": sql.in_quotes(name), f"{key}_quoted": sql.in_quotes(self._names[key])}
        return sql.SCHEMA.format(**self._names, **texts)

    def history_schema(self, keep: int) -> str:
        text = mysql_history.KEEP if keep else mysql_history.FORGET
        return text.format(**self._history_names(), keep=keep)

    def _history_names(self) -> dict[str, str]:
        names = {key: self._tables[0] + end for key, end in mysql_history.NAMES.items()}
        return {"lease": self._names["lease"], **{key: sql.quoted(name) for key, name in names.items()}}

    def keep_history(self, keep: int, deadline: Deadline) -> None:
        self._wrote = False
        for statement in self.history_schema(keep).split(";\n"):
            if statement.strip():
                try:
                    self._patiently(partial(self._execute, statement, deadline), deadline)
                except _ThereAlready:  # a trigger that somebody else has made at the same moment
                    pass

    def history(self, name: str, limit: int, deadline: Deadline) -> list[StoredGrant]:
        self._reopen(deadline)
        names = {key: name.replace("%", "%%") for key, name in self._history_names().items()}
        statement = mysql_history.READ.format(**names) % (hexed(name), limit)
        try:
            rows = self._patiently(partial(self._execute, statement, deadline), deadline).rows
        except _TablesMissing:
            raise SetupRequired("no history is kept here: `dibs setup --history 100` begins one") from None
        return [
            StoredGrant(
                int(slot or 0),
                (holder or b"").decode(),
                int(token or 0),
                int(since_us or 0) / 1e6,
                None if until_us is None else int(until_us) / 1e6,
                None if ending is None else ending.decode(),
                None if info is None else info.decode(),
            )
            for slot, holder, token, since_us, until_us, ending, info in rows
        ]

    def setup(self, deadline: Deadline) -> None:
        self._wrote = False
        self._reopen(deadline)
        try:
            self._make_tables(deadline)
        except SetupRequired as refused:
            raise SetupRequired(
                f"{refused}. Let somebody with the right to make tables run `dibs setup`, or what `dibs schema` prints"
            ) from refused

    def _make_tables(self, deadline: Deadline) -> None:
        # Each is harmless when it is there, also when several make it at once: the server's own locks see to that.
        for statement in self.schema().split(";\n"):
            if statement.strip():
                try:
                    self._patiently(partial(self._execute, statement, deadline), deadline)
                except _ThereAlready:  # a column that somebody else has added since we looked
                    pass

    # -- one statement, or transaction ----------------------------------------------------------------------------

    def _write(self, template: str, values: str | tuple[Any, ...], deadline: Deadline) -> int:
        """How many rows it found to change."""
        answer = self._ask(template % values, deadline)
        self._wrote = self._wrote or answer.affected > 0
        return answer.affected

    def _rows(self, template: str, values: str | tuple[Any, ...], deadline: Deadline) -> Sequence[tuple[Any, ...]]:
        return self._ask(template % values, deadline).rows

    def _list(self, template: str, values: str | tuple[Any, ...], deadline: Deadline) -> list[bytes]:
        """What GROUP_CONCAT put together."""
        ((joined,),) = self._ask(template % values, deadline).rows
        return joined.split(b",") if joined else []

    def _ask(self, statement: str, deadline: Deadline) -> Answer:
        """Execute one statement; make the tables when it turns out that there are none."""
        return self._with_tables(partial(self._execute, statement, deadline), deadline)

    def _with_tables(self, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        """Do something on the connection; make the tables when it turns out that there are none."""
        if self._wire is None or self._wire.stale():
            self._reopen(deadline)
        try:
            return self._patiently(attempt, deadline)
        except (_TablesMissing, mysql_pools.FloorMissing):
            pass
        try:
            self._make_tables(deadline)
        except SetupRequired as refused:
            raise SetupRequired(
                "the tables of dibs are missing or of an older version, and this login may not make them "
                f"({refused}). Let somebody who may run `dibs setup`, or what `dibs schema` prints"
            ) from refused
        try:
            return self._patiently(attempt, deadline)
        except (_TablesMissing, mysql_pools.FloorMissing) as error:
            raise SetupRequired(f"the tables of dibs do not fit this version: {error}") from error

    def _patiently(self, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        """Again, when somebody else's locks were in the way: what was attempted has then been undone as a whole."""
        for _ in range(TRIES_MAX):
            try:
                return attempt()
            except StoreBusy as error:
                busy = error
                if deadline.remaining() <= LOCK_WAIT_S:
                    break
        if self._wrote:
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
            self.close()
            raise StoreUnavailable(f"{self._shown} did not answer in time") from None
        except ServerError as error:
            self._refuse(error)
        except BaseException:
            # Ctrl-C. The server is at work on the statement; were it to finish after the release that follows on
            # another connection, the name would stay granted to nobody. So let it finish first, if it is quick.
            if sent:
                self._let_finish(wire, deadline)
            else:
                self.close()
            raise

    def _let_finish(self, wire: Wire, deadline: Deadline) -> None:
        try:
            wire.receive(deadline.within(FINISH_S))
        except ServerError:
            pass
        except TimedOut:
            self.close()
        except BaseException:
            self.close()
            raise

    def _refuse(self, error: ServerError) -> NoReturn:
        """Raise what an error of the server means."""
        code = error.code
        text = f"{self._shown}: {error}"
        if code in _NO_TABLE:
            raise _TablesMissing(text) from error
        if code in _THERE_ALREADY:
            raise _ThereAlready(text) from error
        if code in _TRY_AGAIN:
            raise StoreBusy(text) from error
        if code in _READ_ONLY:
            self.close()  # behind one name there may be another server now
            raise SetupRequired(f"{text}. Is this a replica? Name the primary in the URL") from error
        if code in _STATEMENT_BINLOG:
            raise SetupRequired(f"{text}. Set binlog_format to ROW or MIXED") from error
        if code in _RIGHTS:
            raise SetupRequired(text) from error
        if code in _LOGIN:
            self.close()
            raise SetupRequired(f"{text}. Check user, password and database in the URL") from error
        if code in _TLS:
            self.close()
            raise SetupRequired(f"{text}. Check ssl_mode, ssl_ca, ssl_cert and ssl_key in the URL") from error
        lost = code == 0 or code in CONNECTION_LOST
        if lost or code in _NOT_DONE:
            self.close()
        raise StoreUnavailable(text, maybe_applied=lost or self._wrote) from error

    # -- connecting -----------------------------------------------------------------------------------------------

    @property
    def _shown(self) -> str:
        return "MariaDB" if "MariaDB" in self._facts.get("version", "") else "MySQL"

    def _reopen(self, deadline: Deadline) -> None:
        """Connect, unless there is a connection that the server has not closed while it was idle."""
        if self._wire is not None and self._wire.stale():
            self.close()
        self._open(deadline)

    def _open(self, deadline: Deadline) -> None:
        if self._wire is not None:
            return
        left = deadline.remaining()
        if left <= 0:
            raise StoreUnavailable(f"{self._shown}: no time was left to connect", maybe_applied=self._wrote)
        try:
            self._wire = Wire(self._connect(self._where, left))
        except ServerError as error:
            try:
                self._refuse(error)
            except StoreUnavailable as unavailable:  # nothing was sent
                unavailable.maybe_applied = self._wrote
                raise
        try:
            self._get_ready(deadline)
        except StoreUnavailable as unavailable:
            self.close()
            unavailable.maybe_applied = self._wrote
            raise
        except BaseException:
            self.close()
            raise

    def _get_ready(self, deadline: Deadline) -> None:
        """Read what decides our promises, and make the session ours."""
        if self._where.ssl_mode not in ("disabled", "preferred") and not self._execute(sql.TLS, deadline).rows:
            # mysqlclient on MariaDB's client library goes on in the clear when the server has no TLS.
            raise SetupRequired(f"{self._shown}: ssl_mode={self._where.ssl_mode}, but the server offers no TLS")
        self._read_facts(deadline)
        version = self._facts["version"]
        numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("-")[0].split(".")[:3])
        if numbers < (MARIADB_MIN if "MariaDB" in version else MYSQL_MIN):
            raise Unsupported(f"dibs needs MySQL 8.0.4 or MariaDB 10.6, or later; this is {version}")
        self._execute(sql.SETTINGS % (LOCK_WAIT_S, max(LOCK_WAIT_S, int(deadline.remaining()))), deadline)
        self._execute(sql.ISOLATION, deadline)
        self._limited = "MariaDB" in version
        if self._limited:
            self._execute(sql.ON_MARIADB % IDLE_TRANSACTION_S, deadline)
        self._server_clock = (0, float("-inf"))

    def _read_facts(self, deadline: Deadline) -> None:
        rows = self._execute(sql.FACTS, deadline).rows
        self._facts = {(name or b"").decode().lower(): (value or b"").decode() for name, value in rows}

    def _server_now(self, deadline: Deadline) -> int:
        """The server's clock in microseconds of Unix time, nearly; for people, nothing is decided by it."""
        read_us, read_at = self._server_clock
        now = boot_now()
        if now - read_at > CLOCK_READ_S:
            ((text,),) = self._ask(sql.CLOCK, deadline).rows
            read_us, read_at = self._server_clock = int(text or 0), boot_now()
            return read_us
        return read_us + int((now - read_at) * 1e6)

    def watch(self, address: str, deadline: Deadline) -> MySQLWatch:
        self._ask(sql.CLOCK, deadline)
        return MySQLWatch(self, address)

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


class MySQLWatch:
    """Looks whether names are free with a waiter of this client first in line: one SELECT for all of them.

    Of very many names it looks at some each time, in turns.
    """

    interval_s: float | None = 0.002

    def __init__(self, store: MySQLStore, address: str) -> None:
        self._store = store
        self._address = hexed(address)
        self._turn = 0

    def fileno(self) -> int | None:
        return None

    def changed(self, names: Collection[str]) -> Collection[str]:
        if not names:
            return ()
        some = list(names)
        if len(some) > LOOK_NAMES_MAX:
            self._turn = (self._turn + LOOK_NAMES_MAX) % len(some)
            some = (some[self._turn :] + some[: self._turn])[:LOOK_NAMES_MAX]
        asked = document(f'["{hexed(name)}"]' for name in some)
        deadline = Deadline(RealClock(), boot_now() + LOOK_LIMIT_S)
        found = self._store._list(self._store.look, (asked, self._address, self._address), deadline)
        return [some[int(i) - 1] for i in found]

    def close(self) -> None:
        self._store.close()


class _TablesMissing(Exception):
    """The statement needs a table or column that is not there."""


class _ThereAlready(Exception):
    """What was to be made is there."""


# -- values in statements ---------------------------------------------------------------------------------------------


def _claim(row: Row) -> str:
    return f'["{hexed(row[2].name)}","{hexed(row[2].claim_id)}"]'


def _these(requests: list[Release]) -> tuple[str, str]:
    """The names, and what has to fit in the rows."""
    names = [f"x'{hexed(r.name)}'" for r in requests]
    claims = [f"({name},{r.slot:d},x'{hexed(r.claim_id)}')" for name, r in zip(names, requests, strict=True)]
    return ",".join(names), ",".join(claims)


def _claims(rows: list[Row]) -> str:
    """Acquires with everything that a grant writes."""
    return document(
        f'["{hexed(r.name)}","{hexed(r.claim_id)}",{us(r.ttl)},"{hexed(r.holder)}",'
        f"{optional(r.info)},{optional(r.ticket)}]"
        for _, _, r in rows
    )


def _grants(rows: list[Row]) -> tuple[str, ...]:
    """What a grant writes to many rows, for GRANT_MANY. The rows are sorted by name."""
    names = [f"x'{hexed(name)}'" for name, _, _ in rows]
    claims = [f"x'{hexed(r.claim_id)}'" for _, _, r in rows]
    return (
        by_name(names, claims),
        by_name(names, [literal(r.holder) for _, _, r in rows]),
        by_name(names, [literal(r.info) for _, _, r in rows]),
        by_name(names, [str(us(r.ttl)) for _, _, r in rows]),
        ",".join(names),
        ",".join(claims),
    )


def _parts(rows: list[Row]) -> Iterator[tuple[list[Row], int]]:
    """The rows in parts that one statement may carry, each with the place of its first row."""
    first = size = 0
    for place, row in enumerate(rows):
        size += len(getattr(row[2], "info", None) or "")
        if place - first >= ROWS_MAX or size > INFO_BYTES_MAX:
            yield rows[first:place], first
            first, size = place, len(getattr(row[2], "info", None) or "")
    yield rows[first:], first


# -- where ------------------------------------------------------------------------------------------------------------

# What drivers and SQLAlchemy take in a URL and dibs decides itself.
_OURS = ("charset", "use_unicode", "autocommit", "connect_timeout", "read_timeout", "write_timeout", "binary_prefix")
_SSL_WORDS = ("ssl", "ssl_disabled", "ssl_verify_cert", "ssl_verify_identity", "ssl_check_hostname")
#: What a URL may carry.
OPTIONS = ("table", "driver", "unix_socket", "ssl_mode", "ssl_ca", "ssl_cert", "ssl_key", *_SSL_WORDS, *_OURS)
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_SQLALCHEMY_DRIVERS = {"pymysql": "pymysql", "mysqldb": "mysqlclient", "mysqlclient": "mysqlclient"}


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``mysql://user:password@host:port/database`` (or ``mariadb://``) points.

    Options: ``table``, ``driver`` (mysqlclient or pymysql; ``mysql+pymysql://`` says it, too), ``unix_socket``, and for
    TLS ``ssl_mode``, ``ssl_ca``, ``ssl_cert``, ``ssl_key`` or the drivers' and SQLAlchemy's other words for them.
    """
    table = options.pop("table", "dibs_lease")
    quoted_table(table)
    if table != table.rstrip() or any(ord(letter) > 0xFFFF for letter in table):
        raise InvalidOption(f"table={table!r}: MySQL takes no name that ends in a space or has letters above U+FFFF")
    driver = options.pop("driver", "").lower()
    if driver and driver not in _SQLALCHEMY_DRIVERS:
        raise InvalidOption(f"driver={driver!r} is none of {', '.join(DRIVERS)}")
    driver = _SQLALCHEMY_DRIVERS.get(driver or url.scheme.partition("+")[2], "")
    for name in _OURS:
        options.pop(name, None)
    database = unquote(url.path[1:])
    if not database:
        raise InvalidOption("a MySQL URL names a database: mysql://user@host/database")
    unix_socket = options.pop("unix_socket", "")
    host = url.hostname or "localhost"
    where = Where(
        host=unquote(host),
        port=url.port or 3306,
        user=unquote(url.username or ""),
        password=unquote(url.password or ""),
        database=database,
        unix_socket=unix_socket,
        ssl_mode=_ssl_mode(options),
        ssl_ca=options.pop("ssl_ca", ""),
        ssl_cert=options.pop("ssl_cert", ""),
        ssl_key=options.pop("ssl_key", ""),
    )
    at = unix_socket or f"{host}:{where.port}"
    connect = opener(driver)
    return StoreAddress(f"mysql://{at}/{database}", CAPABILITIES, lambda: MySQLStore(where, table, connect))


def _ssl_mode(options: dict[str, str]) -> str:
    """One of MySQL's own five words, from it or from what the drivers and SQLAlchemy say instead."""
    said = {name: _boolean(name, options.pop(name)) for name in _SSL_WORDS if name in options}
    mode = options.pop("ssl_mode", "").lower()
    if mode:
        if mode not in SSL_MODES:
            raise InvalidOption(f"ssl_mode={mode!r} is none of {', '.join(SSL_MODES)}")
        return mode
    if said.get("ssl_disabled") or said.get("ssl") is False:
        return "disabled"
    if said.get("ssl_verify_identity") or said.get("ssl_check_hostname"):
        return "verify_identity"
    if said.get("ssl_verify_cert") or (options.get("ssl_ca") and said.get("ssl_verify_cert") is not False):
        return "verify_ca"
    if said.get("ssl") or options.get("ssl_cert") or options.get("ssl_ca"):
        return "required"
    return "preferred"


def _boolean(name: str, text: str) -> bool:
    if text.lower() in _YES:
        return True
    if text.lower() in _NO:
        return False
    raise InvalidOption(f"{name}={text!r} is neither true nor false")
