"""How the SQL stores act on claims that are kept in columns of a user's table: one way, whatever the dialect.

A dialect knows how to ask its database (``Rows``). Here is what becomes of the answers. Nobody waits for a row: what a
transaction of somebody else's has locked is passed over, so that two who claim the same rows in any order cannot
deadlock, and a user's transaction holds up nobody. What was asked of such a row was not tried (``RowBusy``): a renewal
or a release is asked for again. A claim is told that the row is busy; but after a lost answer it, too, is asked for
again, since what has locked the row may be its own first attempt.
"""

from __future__ import annotations

import re
from functools import partial

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from dibs.columns import COLUMNS, migration_sql, misfit, row_of
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable
from dibs.store import (
    GONE,
    PIN_KEEP_S,
    RELEASED,
    ROW_MARK,
    Acquire,
    Granted,
    Held,
    Renewed,
    RowBusy,
    StoreBusy,
)
from dibs.stores import rounds
from dibs.stores.tables import TablesMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dibs.clock import Deadline
    from dibs.columns import Place
    from dibs.store import Outcome, Release, Request
    from dibs.stores.rounds import Row

    # The key of a row, and what is asked of it.
    Asked = tuple[str, Any]

# Of a holder, so much is kept; a claim is shorter than 50.
HOLDER_CHARS_MAX = 200
_WHOLE = re.compile(r"[+-]?[0-9]+")
# Rows that are locked together, by one statement or transaction.
ROWS_MAX = 1000
_STORES = {"postgresql": "PostgreSQL", "mysql": "MySQL or MariaDB", "sqlite": "SQLite"}
LOCKED = "a transaction has locked its row"


class KeyMisfit(Exception):
    """A key cannot be a value of its column, so there is no such row. Nothing was changed."""


class TableRefuses(Exception):
    """The database refuses to write one of the rows. Nothing was changed."""


class Seen(NamedTuple):
    """A row that is there: its token, who has claimed it for how many seconds more, and whether that is the asker."""

    token: int
    holder: str | None
    left_s: float
    mine: bool


class Rows(Protocol):
    """One table, as its dialect acts on it. What is asked for and what is answered is told by places, from 0.

    A row is found by its key, exactly. It is free when ``dibs_until`` is NULL or over, and a claim's when that stands
    first in ``dibs_claim``. Each verb may raise KeyMisfit and TableRefuses.
    """

    def fits(self, key: str) -> bool:
        """Whether it can be a value of the key's column, as far as is known without asking the database."""
        ...

    def claim(self, asked: list[Asked], deadline: Deadline) -> dict[int, Granted]:
        """Of acquires: claim those that are free, or the asker's already, and that nobody has locked."""
        ...

    def renew(self, asked: list[Asked], deadline: Deadline) -> tuple[Collection[int], float]:
        """Let those last longer that are the asker's, in force, and locked by nobody; and the store's Unix time."""
        ...

    def release(self, asked: list[Asked], deadline: Deadline) -> Collection[int]:
        """End or keep those that are the asker's, in force, and locked by nobody."""
        ...

    def look(self, asked: list[Asked], deadline: Deadline) -> dict[int, Seen]:
        """Those that are there, locked or not, as they were last committed."""
        ...


class Columns:
    """Acts on the rows of any table; ``find`` looks at one, or raises what is wrong with it.

    ``together`` does what it is given as one transaction; without it, each part is one by itself. ``undoing`` does a
    part of one, and undoes that when it raises KeyMisfit or TableRefuses.
    """

    def __init__(
        self,
        find: Callable[[Place, Deadline], Any],
        together: Callable[[Callable[[], list[Outcome]]], list[Outcome]] = lambda work: work(),
        undoing: Callable[[Callable[[], None]], None] = lambda part: part(),
    ) -> None:
        self._find = find
        self._together = together
        self._undoing = undoing
        self._tables: dict[Place, Any] = {}
        #: A part of the call under way has been done.
        self._wrote = False

    def table(self, where: Place, deadline: Deadline) -> Any:
        """What is known of a table, looked up once."""
        known = self._tables.get(where)
        if known is None:
            known = self._tables[where] = self._find(where, deadline)
        return known

    def act(
        self,
        requests: Sequence[Request],
        deadline: Deadline,
        act_on_leases: Callable[[Sequence[Request], Deadline], list[Outcome]],
    ) -> list[Outcome]:
        """Try the requests whose names are of rows, then the others."""
        of_rows = [request for request in requests if ROW_MARK in request[0]]
        self._wrote = False
        rows = iter(self._together(lambda: rounds.act(self, of_rows, deadline)))
        others = [request for request in requests if ROW_MARK not in request[0]]
        if not others:
            return list(rows)
        try:
            leases = iter(act_on_leases(others, deadline))
        except StoreBusy as error:
            raise StoreUnavailable(f"{error}, after a part of the requests was done") from error
        return [next(rows) if ROW_MARK in request[0] else next(leases) for request in requests]

    # -- a round of them, as rounds.Verbs -------------------------------------------------------------------------

    def acquire_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, in_line: bool) -> list[Row]:
        def claim(table: Rows, part: list[Row]) -> None:
            granted = table.claim(_asked(part), deadline)
            for place, grant in granted.items():
                outcomes[part[place][1]] = grant
            rest = [row for place, row in enumerate(part) if place not in granted]
            for place, seen in table.look(_asked(rest), deadline).items() if rest else ():
                if seen.mine and seen.left_s > 0:  # a repetition, while somebody has the row locked
                    outcomes[rest[place][1]] = Granted(seen.token, 0.0)
                elif seen.left_s > 0:
                    outcomes[rest[place][1]] = Held(seen.holder, seen.token, 0.0, seen.left_s)
                else:
                    outcomes[rest[place][1]] = RowBusy(LOCKED)

        self._each(rows, outcomes, deadline, claim)
        return []

    def renew_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        def renew(table: Rows, part: list[Row]) -> None:
            renewed, now = table.renew(_asked(part), deadline)
            for place in renewed:
                _, index, request = part[place]
                outcomes[index] = Renewed(now + request.ttl)
            _told_locked(table, part, renewed, outcomes, deadline)

        self._each(rows, outcomes, deadline, renew)

    def release_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline, *, more: bool) -> None:
        def release(table: Rows, part: list[Row]) -> None:
            released = table.release(_asked(part), deadline)
            for place in released:
                outcomes[part[place][1]] = RELEASED
            _told_locked(table, part, released, outcomes, deadline)

        self._each(rows, outcomes, deadline, release)

    def enter_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> list[Row]:
        return []  # nobody waits for a row

    def transfer_rows(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Claims on items do not change hands: they are Gone."""

    def acquire_permits(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        raise AssertionError("rows have no permits")

    # -- tables ---------------------------------------------------------------------------------------------------

    def _each(
        self, rows: list[Row], outcomes: list[Any], deadline: Deadline, act: Callable[[Any, list[Row]], None]
    ) -> None:
        """Act on the rows of each table; what is wrong with a table is told to those who asked for its rows alone."""
        by_place: dict[Place, list[Row]] = {}
        for row in rows:
            by_place.setdefault(row_of(row[0])[0], []).append(row)
        for where, of_place in by_place.items():
            try:
                try:
                    self._act(where, of_place, outcomes, deadline, act)
                except TablesMissing:  # it was changed since it was looked at
                    self._tables.pop(where, None)
                    self._act(where, of_place, outcomes, deadline, act)
            except (SetupRequired, InvalidOption, TablesMissing) as error:
                self._tables.pop(where, None)
                told = SetupRequired(str(error)) if isinstance(error, TablesMissing) else error
                for _, index, _ in of_place:
                    if outcomes[index] is GONE:
                        outcomes[index] = told

    def _act(
        self,
        where: Place,
        rows: list[Row],
        outcomes: list[Any],
        deadline: Deadline,
        act: Callable[[Any, list[Row]], None],
    ) -> None:
        known = where in self._tables
        odd = self._each_that_can(self.table(where, deadline), rows, deadline, act)
        if odd and known:  # perhaps not any more: the table may have been changed
            del self._tables[where]
            odd = self._each_that_can(self.table(where, deadline), [row for row, _ in odd], deadline, act)
        for (name, index, _), error in odd:
            if type(error) is TableRefuses:
                outcomes[index] = InvalidOption(
                    f"row {row_of(name)[1]!r} of {where.table!r} cannot be written to claim it, or to end its claim; "
                    f"does a trigger of the table refuse that? {error}"
                )

    def _each_that_can(
        self, table: Any, rows: list[Row], deadline: Deadline, act: Callable[[Any, list[Row]], None]
    ) -> list[tuple[Row, Exception]]:
        """Act on the rows that can be acted on; one that cannot must not keep the others from it. Those, and why.

        What is refused is looked for in halves, for half of the time at most: a table that refuses every row would
        take all of it, and its refusal would be told as an outage.
        """
        halving_until_s = deadline.remaining() / 2
        fitting = [row for row in rows if table.fits(row_of(row[0])[1])]
        odd: list[tuple[Row, Exception]] = []
        if len(fitting) < len(rows):
            odd += [(row, KeyMisfit()) for row in rows if not table.fits(row_of(row[0])[1])]
            rows = fitting
        parts = [rows[first : first + ROWS_MAX] for first in range(0, len(rows), ROWS_MAX)]
        while parts:
            part = parts.pop()
            try:
                self._undoing(partial(act, table, part))
                self._wrote = True
            except StoreBusy as error:
                if self._wrote:
                    raise StoreUnavailable(f"{error}, after a part of the requests was done") from error
                raise
            except (KeyMisfit, TableRefuses) as error:
                half = len(part) // 2
                if half and (type(error) is KeyMisfit or deadline.remaining() > halving_until_s):
                    parts += [part[half:], part[:half]]
                else:
                    odd += [(row, error) for row in part]
        return odd


def in_range(key: str, least: int, most: int) -> bool:
    """Whether it is a whole number, and in that range."""
    return _WHOLE.fullmatch(key) is not None and least <= int(key) <= most


def in_call(requests: Sequence[Request]) -> bool:
    """Whether any of these names is of a row."""
    for request in requests:  # noqa: SIM110 - every call is looked at: any() of a generator takes twice as long
        if ROW_MARK in request[0]:
            return True
    return False


def claims_some(requests: Sequence[Request]) -> bool:
    """Whether any of these would claim a row."""
    return any(type(request) is Acquire and ROW_MARK in request[0] for request in requests)


def kept_s(request: Release) -> float:
    """How long a row is kept that is released. (That its pin has ended, its lock tells; nothing is kept for that.)"""
    return request.keep if request.keep > PIN_KEEP_S else 0.0


def claim_text(claim_id: str, holder: str) -> str:
    """What stands in ``dibs_claim``: the claim, then for people the host and the process."""
    return f"{claim_id} {(holder.rpartition('/')[0] or holder)[:HOLDER_CHARS_MAX]}"


def _asked(rows: list[Row]) -> list[Asked]:
    return [(row_of(row[0])[1], row[2]) for row in rows]


def _told_locked(table: Rows, rows: list[Row], done: Collection[int], outcomes: list[Any], deadline: Deadline) -> None:
    """Of those that were not done: which are the asker's all the same, and so must be locked. The rest is Gone."""
    if len(done) == len(rows):
        return
    done = set(done)
    rest = [row for place, row in enumerate(rows) if place not in done]
    for place, seen in table.look(_asked(rest), deadline).items():
        if seen.mine and seen.left_s > 0:
            outcomes[rest[place][1]] = RowBusy(LOCKED)


def no_right(where: Place, error: Exception) -> SetupRequired:
    """What is raised where this login may not do what a claim does."""
    return SetupRequired(
        f"{error}. To claim rows of {where.table!r}, dibs's login needs SELECT on {where.key}, dibs_token, dibs_claim, "
        "dibs_until, and UPDATE on these three"
    )


def check_columns(where: Place, dialect: str, told: str) -> None:
    """Raise SetupRequired where the table lacks one of the columns, or this login may not see it, or it is no good.

    What the database tells has a line for each that is there: its name, its type, and ``not null`` where that is so.
    """
    found = {name.lower(): kind for name, _, kind in (line.partition(" ") for line in told.split("\n"))}
    if not all(column in found for column in COLUMNS):
        raise SetupRequired(
            f"table {where.table!r} has no columns dibs_token, dibs_claim and dibs_until that this login can see. Let "
            f"somebody who may alter it run what `dibs schema --claims {where.table}` prints for {_STORES[dialect]}:\n"
            + migration_sql(dialect, where.table)
        )
    wrong = misfit(dialect, found)
    if wrong is not None:
        name, wanted = wrong
        raise SetupRequired(
            f"{name} of {where.table!r} is {found[name]!r}, which does not keep what claims write there as it is: make "
            f"it {wanted}, as `dibs schema --claims {where.table}` prints it"
        )


def not_unique(where: Place) -> InvalidOption:
    """What is raised for a key that does not tell one row from the others."""
    return InvalidOption(
        f"key={where.key!r} is no column of {where.table!r} that has a unique index of its own: a claim is on one row"
    )
