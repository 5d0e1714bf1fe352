"""MySQL and MariaDB: claims in columns of a user's table, in short transactions that wait for nobody.

No UPDATE passes over what others have locked, so a transaction first locks what it is going to write (FOR UPDATE SKIP
LOCKED), and writes only that. Rows are asked for by a JSON document, as in dibs.stores.mysql_sql, which drives the join
by the key's own index. Keys are compared exactly, whatever the collation of their column.
"""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.columns import COLUMNS, row_of
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable
from dibs.store import Granted, Pin
from dibs.stores import mysql_sql as sql
from dibs.stores.columns import Seen, TableRefuses, check_columns, claim_text, in_range, kept_s, no_right, not_unique
from dibs.stores.identifiers import quoted_part
from dibs.stores.mysql_errors import refuses
from dibs.stores.mysql_values import document, hexed, us

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from dibs.clock import Deadline
    from dibs.columns import Place
    from dibs.store import Renew
    from dibs.stores.columns import Asked
    from dibs.stores.mysql_drivers import Answer
    from dibs.stores.mysql_link import Connection

    Execute = Callable[[str], Answer]

# The key's type, and whether it is unique, by which index; and which of our columns there are. A column that this login
# has no right to is not there.
_KEY = """\
SELECT c.data_type, c.column_type, c.character_set_name, c.collation_name,
(SELECT MIN(s.index_name) FROM information_schema.statistics AS s
WHERE s.table_schema = c.table_schema AND s.table_name = c.table_name AND s.column_name = c.column_name
AND s.non_unique = 0 AND s.sub_part IS NULL AND NOT EXISTS (SELECT 1 FROM information_schema.statistics AS o
WHERE o.table_schema = s.table_schema AND o.table_name = s.table_name AND o.index_name = s.index_name
AND o.seq_in_index > 1)),
(SELECT GROUP_CONCAT(o.column_name, ' ', o.column_type, IF(o.is_nullable = 'NO', ' not null', '')
SEPARATOR '\\n') FROM information_schema.columns AS o
WHERE o.table_schema = c.table_schema AND o.table_name = c.table_name AND o.column_name IN ({ours}))
FROM information_schema.columns AS c
WHERE c.table_schema = {schema} AND c.table_name = {table} AND c.column_name = {key}"""
_TABLE = "SELECT engine FROM information_schema.tables WHERE table_schema = {schema} AND table_name = {table}"
_INTEGERS = frozenset(("tinyint", "smallint", "mediumint", "int", "bigint"))
_TEXTS = frozenset(("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum"))
_OTHERS = {"date": "DATE", "uuid": "UUID"}

_FIRST = "SUBSTRING_INDEX(t.dibs_claim, ' ', 1)"
_MINE = f"COALESCE({_FIRST} = UNHEX(a.claim), 0)"
_FREE = f"(t.dibs_until IS NULL OR t.dibs_until <= {sql.NOW} OR {_FIRST} = UNHEX(a.claim))"
_OURS = f"{_FIRST} = UNHEX(a.claim) AND t.dibs_until > {sql.NOW}"
_LASTING = f"{sql.NOW} + INTERVAL a.us MICROSECOND"
_CLAIM = "claim VARCHAR(800) CHARACTER SET latin1 PATH '$[1]'"
_US = "us BIGINT PATH '$[2]'"
_SHOWN = "shown VARCHAR(2000) CHARACTER SET latin1 PATH '$[3]', token BIGINT PATH '$[4]'"


class _Key(NamedTuple):
    """How a key stands in a document: its column there, what it is compared as, and how a row is found by it."""

    column: str
    value: str
    exactly: str


class MySQLRows:
    """One table."""

    def __init__(self, connection: Connection, place: Place, where: str, index: str, key: _Key) -> None:
        self._connection = connection
        self._place = place
        self._where = where
        self._name = quoted_part(place.key, "key", "`")
        self._index = sql.quoted(index)
        self._key = key

    # -- statements -----------------------------------------------------------------------------------------------

    def _joined(self, rows: Iterable[str], *columns: str) -> str:
        """The document, and the rows that it asks for."""
        paths = ", ".join((self._key.column.format(path="$[0]"), *columns))
        asked = f"JSON_TABLE('{document(rows)}', '$[*]' COLUMNS (i FOR ORDINALITY, {paths})) AS a"
        return (
            f"{asked} STRAIGHT_JOIN {self._where} AS t FORCE INDEX ({self._index})"
            f" ON t.{self._name} = {self._key.value.format(key='a.k')}"
            f"{self._key.exactly.format(column='t.' + self._name, key='a.k')}"
        )

    def _rows(self, asked: Sequence[Asked]) -> list[str]:
        return [f'[{self._given(key)},"{hexed(request.claim_id)}"' for key, request in asked]

    def _given(self, key: str) -> str:
        """The key in a document."""
        return f'"{hexed(key)}"' if "BIGINT" not in self._key.column else str(int(key))

    # -- verbs ----------------------------------------------------------------------------------------------------

    def fits(self, key: str) -> bool:
        if "BIGINT" not in self._key.column:
            return True
        least, most = (0, 2**64) if "UNSIGNED" in self._key.column else (-(2**63), 2**63)
        return in_range(key, least, most - 1)

    def claim(self, asked: list[Asked], deadline: Deadline) -> dict[int, Granted]:
        rows = self._rows(asked)
        now = self._connection.server_now(deadline) / 1e6
        won = self._in_transaction(partial(self._claim, asked, rows), deadline)
        return {place: Granted(token, now) for place, token in won.items()}

    def _claim(self, asked: list[Asked], rows: list[str], execute: Execute) -> dict[int, int]:
        told = f"a.i, ' ', COALESCE(t.dibs_token, 0), ' ', {_MINE}, ' ', HEX(t.{self._name})"
        won: dict[int, int] = {}
        taken: set[bytes] = set()
        for piece in self._locked(execute, told, rows, _FREE):
            i, token, mine, key = piece.split(b" ")
            if key not in taken:  # two spellings of a number are one row
                taken.add(key)
                won[int(i) - 1] = int(token) + (mine == b"0")
        if won:
            values = ((place, *asked[place], token) for place, token in won.items())
            written = [
                f'{rows[place]},{us(r.ttl)},"{hexed(claim_text(r.claim_id, r.holder))}",{token}]'
                for place, _, r, token in values
            ]
            execute(
                f"UPDATE {self._joined(written, _CLAIM, _US, _SHOWN)} SET t.dibs_token = a.token,"
                f" t.dibs_claim = CONVERT(UNHEX(a.shown) USING utf8mb4),"
                f" t.dibs_until = GREATEST(COALESCE(t.dibs_until, {_LASTING}), {_LASTING})"
            )
        return won

    def renew(self, asked: list[Asked], deadline: Deadline) -> tuple[Collection[int], float]:
        change = f"t.dibs_until = GREATEST(t.dibs_until, {_LASTING})"
        renewed = self._write(asked, [us(request.ttl) for _, request in asked], change, deadline)
        return renewed, self._connection.server_now(deadline) / 1e6

    def release(self, asked: list[Asked], deadline: Deadline) -> Collection[int]:
        # A kept row shows its holder, under a claim that nobody has.
        change = (
            "t.dibs_claim = IF(a.us > 0, SUBSTRING(t.dibs_claim, LOCATE(' ', t.dibs_claim)), NULL),"
            f" t.dibs_until = IF(a.us > 0, {_LASTING}, NULL)"
        )
        return self._write(asked, [us(kept_s(request)) for _, request in asked], change, deadline)

    def _write(self, asked: list[Asked], numbers: list[int], change: str, deadline: Deadline) -> list[int]:
        """Change those rows that are the asker's; which they were."""
        # Locking a row to find that it is somebody else's, or free, makes it busy for who claims it in that moment. And
        # an end that was put off, because a transaction had locked the row, comes right after that has freed the row.
        seen = self.look(asked, deadline)
        mine = [place for place in sorted(seen) if seen[place].mine and seen[place].left_s > 0]
        if not mine:
            return []
        rows = self._rows(asked)

        def write(execute: Execute) -> list[int]:
            ours = [mine[int(i) - 1] for i in self._locked(execute, "a.i", [rows[place] for place in mine], _OURS)]
            if ours:
                written = [f"{rows[place]},{numbers[place]}]" for place in ours]
                execute(f"UPDATE {self._joined(written, _CLAIM, _US)} SET {change}")
            return ours

        return self._in_transaction(write, deadline)  # type: ignore[no-any-return]

    def look(self, asked: list[Asked], deadline: Deadline) -> dict[int, Seen]:
        joined = self._joined([f"{row}]" for row in self._rows(asked)], _CLAIM)
        left = f"COALESCE(TIMESTAMPDIFF(MICROSECOND, {sql.NOW}, t.dibs_until), 0)"
        look = f"SELECT a.i, COALESCE(t.dibs_token, 0), t.dibs_claim, {left}, {_MINE} FROM {joined}"
        answer = self._told(partial(self._connection.attempt, look, deadline))
        return {
            int(i or 0) - 1: Seen(
                int(token or 0),
                (claim or b"").decode().partition(" ")[2] or None,
                int(left_us or 0) / 1e6,
                mine == b"1",
            )
            for i, token, claim, left_us, mine in answer.rows
        }

    def _locked(self, execute: Execute, told: str, rows: Sequence[str], condition: str) -> list[bytes]:
        """What is told of the rows that meet the condition and that nobody else has locked; they are ours then."""
        joined = self._joined([f"{row}]" for row in rows], _CLAIM)
        lock = f"{sql.locking('t')} SKIP LOCKED"
        found = execute(f"SELECT GROUP_CONCAT({told}) FROM {joined} WHERE {condition} {lock}").rows
        text: bytes | None = found[0][0]
        return text.split(b",") if text else []

    def _in_transaction(self, work: Callable[[Execute], Any], deadline: Deadline) -> Any:
        return self._told(partial(self._connection.transaction_once, work, deadline))

    def _told(self, attempt: Callable[[], Any]) -> Any:
        """What came of it; what the server refuses is told as what it means."""
        try:
            return attempt()
        except SetupRequired as error:
            raise no_right(self._place, error) from error
        except StoreUnavailable as error:
            if refuses(error):
                raise TableRefuses(error) from error
            raise

    # -- in the caller's transaction, and in his query ------------------------------------------------------------

    def _this(self, request: Renew) -> str:
        key = self._given(row_of(request.name)[1])
        literal = key if key[0] != '"' else f"'{key[1:-1]}'"
        exactly = self._key.exactly.format(column=self._name, key=literal)
        return f"{self._name} = {self._key.value.format(key=literal)}{exactly}"

    def pin(self, request: Renew) -> Pin:
        """Its lock on the row keeps everybody out."""
        row = f"{self._this(request)} AND SUBSTRING_INDEX(dibs_claim, ' ', 1) = x'{hexed(request.claim_id)}'"
        lock = f"SELECT 1 FROM {self._where} WHERE {row} AND dibs_until > {sql.NOW} FOR UPDATE"
        release = f"UPDATE {self._where} SET dibs_claim = NULL, dibs_until = NULL WHERE {row}"
        for_caller = self._connection.for_caller
        return Pin(for_caller(lock), decides=True, release=lambda keep: for_caller(release))

    def pinned(self, request: Renew, deadline: Deadline) -> bool:
        """Whether somebody has locked the row."""
        look = f"SELECT 1 FROM {self._where} WHERE {self._this(request)} FOR UPDATE SKIP LOCKED"
        return not self._connection.attempt(look, deadline).rows

    def held(self, key: str) -> str:
        """What brings a row where the row of a query, ``q``, is claimed, by its quoted column."""
        return f"SELECT 1 FROM {self._where} AS t WHERE t.{self._name} = q.{key} AND t.dibs_until > {sql.NOW} LIMIT 1"


def rows_of(connection: Connection, place: Place, deadline: Deadline) -> MySQLRows:
    """The table, or what is wrong with it."""
    connection.reopen(deadline)
    *schema, table = place.table.split(".")
    database = schema[0] if schema else connection.where.database
    names = {"schema": _text(database), "table": _text(table), "key": _text(place.key)}
    tables = connection.attempt(_TABLE.format(**names), deadline).rows
    if not tables:
        raise InvalidOption(f"MySQL has no table {place.table!r} that this login can see, to keep claims in")
    engine = (tables[0][0] or b"InnoDB").decode()  # (of a view: none)
    if engine != "InnoDB":
        raise InvalidOption(
            f"table {place.table!r} is kept by {engine}, which locks no rows, so two could claim one: ALTER TABLE … "
            "ENGINE=InnoDB"
        )
    ours = ", ".join(map(_text, COLUMNS))
    found = connection.attempt(_KEY.format(ours=ours, **names), deadline).rows
    if not found or found[0][4] is None:
        raise not_unique(place)
    kind, full, charset, collation, index, columns = ((value or b"").decode() for value in found[0])
    check_columns(place, "mysql", columns)
    where = f"{quoted_part(database, 'schema', '`')}.{quoted_part(table, 'table', '`')}"
    return MySQLRows(connection, place, where, index, _key(place, kind.lower(), full.lower(), charset, collation))


def _key(place: Place, kind: str, full: str, charset: str, collation: str) -> _Key:
    if kind in _INTEGERS:
        sign = " UNSIGNED" if "unsigned" in full else ""
        return _Key(f"k BIGINT{sign} PATH '{{path}}'", "{key}", "")
    column = "k VARCHAR(800) CHARACTER SET latin1 PATH '{path}'"
    if kind in _TEXTS:
        value = f"CONVERT(CONVERT(UNHEX({{key}}) USING utf8mb4) USING {charset}) COLLATE {collation}"
        return _Key(column, value, " AND HEX(CONVERT({column} USING utf8mb4)) = UPPER({key})")
    if kind in _OTHERS:
        return _Key(column, f"CAST(CONVERT(UNHEX({{key}}) USING latin1) AS {_OTHERS[kind]})", "")
    raise InvalidOption(
        f"key={place.key!r} of {place.table!r} is a {full}: claims are on keys that are integers, texts, dates or UUIDs"
    )


def _text(value: str) -> str:
    return f"_utf8mb4 x'{hexed(value)}'"
