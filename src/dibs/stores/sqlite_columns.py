"""SQLite: claims in columns of a user's table, which lies in the file of the leases.

All that one call asks for is one write transaction, so nothing changes between the look at a row and its write.
``dibs_until`` is in seconds of the machine's boot clock, as for leases; of which boot, ``dibs_claim`` says before all
else, and after another boot a claim is over. (The number that the leases have for a boot would not do: it is one for
each ``table=`` of a URL, and all of these may claim the same rows.) What was claimed is on the disk before it is told,
since a power cut would let a token be granted twice.
"""

from __future__ import annotations

import sqlite3
from string import ascii_lowercase, ascii_uppercase

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import boot_id, boot_now, wall_now
from dibs.columns import COLUMNS, row_of
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.store import Granted, Pin
from dibs.stores.columns import (
    Columns,
    Seen,
    TableRefuses,
    check_columns,
    claim_text,
    claims_some,
    in_range,
    kept_s,
    not_unique,
)
from dibs.stores.identifiers import quoted_part
from dibs.stores.sqlite_errors import primary_code
from dibs.stores.sqlite_pins import alias_of
from dibs.stores.sqlite_sql import numbered
from dibs.stores.tables import TablesMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from dibs.clock import Deadline
    from dibs.columns import Place
    from dibs.store import Outcome, Renew, Request
    from dibs.stores.columns import Asked
    from dibs.stores.sqlite_file import SQLiteFile

# Of a boot's id, so much is enough to tell it from the others of a machine.
_BOOT_CHARS = 13
_MISTAKE, _CONSTRAINT = 1, 19
_SMALL = str.maketrans(ascii_uppercase, ascii_lowercase)

# 1 key, 2 boot and claim with a space behind, 3 now, 4 boot with a space behind; then the values of the verb.
_OURS = "substr(dibs_claim, 1, length(?2)) = ?2"
_OVER = "(dibs_until IS NULL OR dibs_until <= ?3 OR substr(dibs_claim, 1, length(?4)) <> ?4)"
_ACTS = {
    "claim": (
        "UPDATE {where} SET"
        f" dibs_token = CASE WHEN {_OURS} THEN dibs_token ELSE coalesce(dibs_token, 0) + 1 END,"
        f" dibs_until = CASE WHEN {_OURS} THEN max(coalesce(dibs_until, ?6), ?6) ELSE ?6 END, dibs_claim = ?5"
        f" WHERE {{key}} = ?1 AND ({_OURS} OR {_OVER}) RETURNING dibs_token"
    ),
    "renew": (
        "UPDATE {where} SET dibs_until = max(dibs_until, ?5)"
        f" WHERE {{key}} = ?1 AND {_OURS} AND NOT {_OVER} RETURNING 1"
    ),
    # A kept row shows its holder, under a claim that nobody has.
    "release": (
        "UPDATE {where} SET dibs_claim = CASE WHEN ?5 > ?3 THEN ?4 || substr(dibs_claim, length(?2)) END,"
        " dibs_until = CASE WHEN ?5 > ?3 THEN ?5 END"
        f" WHERE {{key}} = ?1 AND {_OURS} AND NOT {_OVER} RETURNING 1"
    ),
    "look": (
        f"SELECT coalesce(dibs_token, 0), dibs_claim, CASE WHEN {_OVER} THEN 0.0 ELSE dibs_until - ?3 END,"
        f" coalesce({_OURS}, 0) FROM {{where}} WHERE {{key}} = ?1"
    ),
}


class SQLiteRows:
    """One table, inside the transaction that is open."""

    def __init__(self, db: Callable[[], sqlite3.Connection], place: Place, table: str, whole: bool) -> None:
        self._db = db
        self._whole = whole
        self._table, self._key = quoted_part(table, "table"), quoted_part(place.key, "key")
        self._boot = boot()
        self._sql = {verb: self._text(act, self._table) for verb, act in _ACTS.items()}

    def _text(self, act: str, where: str) -> str:
        return act.format(where=where, key=self._key)

    def fits(self, key: str) -> bool:
        # SQLite would take a number that is out of range for the nearest that is not.
        return not self._whole or in_range(key, -(2**63), 2**63 - 1)

    def claim(self, asked: list[Asked], deadline: Deadline) -> dict[int, Granted]:
        now, won = boot_now(), {}
        for place, (key, request) in enumerate(asked):
            text = f"{self._boot}{claim_text(request.claim_id, request.holder)}"
            found = self._run("claim", key, request, now, text, now + request.ttl)
            if found:
                won[place] = Granted(found[0][0], wall_now())
        return won

    def renew(self, asked: list[Asked], deadline: Deadline) -> tuple[Collection[int], float]:
        now = boot_now()
        renewed = [
            place
            for place, (key, request) in enumerate(asked)
            if self._run("renew", key, request, now, now + request.ttl)
        ]
        return renewed, wall_now()

    def release(self, asked: list[Asked], deadline: Deadline) -> Collection[int]:
        now = boot_now()
        return [
            place
            for place, (key, request) in enumerate(asked)
            if self._run("release", key, request, now, now + kept_s(request))
        ]

    def look(self, asked: list[Asked], deadline: Deadline) -> dict[int, Seen]:
        now, seen = boot_now(), {}
        for place, (key, request) in enumerate(asked):
            for token, claim, left_s, mine in self._run("look", key, request, now):
                seen[place] = Seen(token, " ".join((claim or "").split(" ")[2:]) or None, left_s, bool(mine))
        return seen

    def _run(self, verb: str, key: str, request: Any, now: float, *more: object) -> list[Any]:
        values = (key, f"{self._boot}{request.claim_id} ", now, self._boot, *more)
        try:
            return self._db().execute(self._sql[verb], numbered(values)).fetchall()
        except sqlite3.Error as error:
            code = primary_code(error)
            if code == _MISTAKE and str(error).startswith(("no such table", "no such column")):
                raise TablesMissing(f"SQLite: {error}") from error
            if code in (_MISTAKE, _CONSTRAINT):
                raise TableRefuses(error) from error
            raise

    # -- in the caller's transaction, and in his query ------------------------------------------------------------

    def pin(self, request: Renew, schema: str) -> Pin:
        """As for leases: a renewal, which has the lock on the whole file from then on."""
        where = f"{quoted_part(schema, 'schema')}.{self._table}"
        now = boot_now()
        claim = _literal(f"{self._boot}{request.claim_id} ")
        ours = (
            f"{self._key} = {_literal(row_of(request.name)[1])} AND substr(dibs_claim, 1, {len(claim) - 2}) = {claim}"
            f" AND dibs_until > {now!r}"
        )
        lock = f"UPDATE {where} SET dibs_until = max(dibs_until, {now + request.ttl!r}) WHERE {ours} RETURNING 1"
        release = f"UPDATE {where} SET dibs_claim = NULL, dibs_until = NULL WHERE {ours} RETURNING 1"
        return Pin(lock, decides=True, release=lambda keep: release)

    def held(self, key: str) -> str:
        """What brings a row where the row of a query, ``q``, is claimed, by its quoted column."""
        return (
            f"SELECT 1 FROM {self._table} AS t WHERE t.{self._key} = q.{key} AND t.dibs_until > {boot_now()!r}"
            f" AND substr(t.dibs_claim, 1, {len(self._boot)}) = {_literal(self._boot)} LIMIT 1"
        )


class SQLiteColumns:
    """The columns of all tables in one file. Whoever uses it has the file in use."""

    def __init__(self, file: SQLiteFile) -> None:
        self._file = file
        self._db: Any = None
        self._columns = Columns(self._find, self._together, self._undoing)

    def act(
        self,
        requests: Sequence[Request],
        deadline: Deadline,
        act_on_leases: Callable[[Sequence[Request], Deadline], list[Outcome]],
    ) -> list[Outcome]:
        """Try the requests whose names are of rows, in one transaction; then the others."""
        self._db = self._file.open(deadline)
        self._synced = claims_some(requests)
        return self._columns.act(requests, deadline, act_on_leases)

    def pin(self, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline) -> Pin:
        if files is None:
            raise InvalidOption(f"the rows are in SQLite, and that connection is to {dialect}: use dibs.fencing")
        rows = self.table(row_of(request.name)[0], deadline)
        return rows.pin(request, alias_of(self._file, files, "the rows", "use dibs.fencing"))

    def table(self, where: Place, deadline: Deadline) -> SQLiteRows:
        self._db = self._file.open(deadline)
        try:
            return self._columns.table(where, deadline)  # type: ignore[no-any-return]
        except sqlite3.Error as error:
            raise self._file.translated(error) from error

    def _together(self, work: Callable[[], list[Outcome]]) -> list[Outcome]:
        return self._file.transaction(self._db, lambda db: work(), synced=self._synced)

    def _undoing(self, part: Callable[[], None]) -> None:
        self._db.execute("SAVEPOINT dibs")
        try:
            part()
        except TableRefuses as error:
            if not self._db.in_transaction:
                raise StoreUnavailable(
                    f"SQLite: {error}. That has undone all that was asked for at once, other rows' claims, too: let "
                    "the table's triggers and constraints RAISE(ABORT, …), not ROLLBACK",
                    maybe_applied=False,
                ) from error
            self._db.execute("ROLLBACK TO dibs")
            self._db.execute("RELEASE dibs")
            raise
        self._db.execute("RELEASE dibs")

    def _find(self, where: Place, deadline: Deadline) -> SQLiteRows:
        """The table, or what is wrong with it."""
        *schema, table = where.table.split(".")
        if schema not in ([], ["main"]):
            raise InvalidOption(f"table={where.table!r}: claims are kept in tables of the file in which the leases are")
        name = quoted_part(table, "table")
        # By name: its type, and its place in the primary key, from 1.
        facts = self._db.execute(f"PRAGMA table_info({name})").fetchall()
        columns, key = {_same(row[1]): (row[2].upper(), row[5]) for row in facts}, _same(where.key)
        if not columns:
            raise InvalidOption(f"SQLite has no table {where.table!r} in {self._file.path!r}, to keep claims in")
        if key not in columns or not self._unique(name, key, columns):
            raise not_unique(where)
        kind = columns[key][0]
        if kind in ("", "ANY") or "BLOB" in kind:
            raise InvalidOption(
                f"key={where.key!r} of {where.table!r} is a column without a type, or a BLOB: give it one"
            )
        ours = [row for row in facts if _same(row[1]) in COLUMNS]
        told = (f"{name} {kind}{' not null' * required}" for _, name, kind, required, *_ in ours)
        check_columns(where, "sqlite", "\n".join(told))
        return SQLiteRows(lambda: self._db, where, table, whole="INT" in kind)

    def _unique(self, table: str, key: str, columns: dict[str, tuple[str, int]]) -> bool:
        if [name for name, (_, place) in columns.items() if place] == [key]:
            return True
        for _, index, unique, _, partial, *_ in self._db.execute(f"PRAGMA index_list({table})").fetchall():
            of_index = self._db.execute("SELECT name FROM pragma_index_info(?)", (index,)).fetchall()
            if unique and not partial and [_same(column or "") for (column,) in of_index] == [key]:
                return True
        return False


def _same(name: str) -> str:
    """The same for all spellings that are one column to SQLite: of the letters of ASCII it tells no capitals."""
    return name.translate(_SMALL)


def boot() -> str:
    """This boot of the machine, as it stands in a claim, with a space behind."""
    return f"{(boot_id() or '').replace(' ', '')[:_BOOT_CHARS]} "


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
