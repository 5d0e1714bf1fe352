"""PostgreSQL: claims in columns of a user's table, one statement a verb, each taking arrays.

A statement first locks what it is going to write and passes over what others have locked (SKIP LOCKED); what it writes
is looked at again on the row as it is then. FOR NO KEY UPDATE is the lock of an UPDATE that changes no key: rows that
refer to this one by a foreign key may be written meanwhile. Keys are cast to the type of their column, so that its
index is used.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.columns import COLUMNS, row_of
from dibs.errors import InvalidOption, SetupRequired
from dibs.store import Granted, Pin
from dibs.stores.columns import (
    KeyMisfit,
    Seen,
    TableRefuses,
    check_columns,
    claim_text,
    in_range,
    kept_s,
    no_right,
    not_unique,
)
from dibs.stores.identifiers import quoted, quoted_part
from dibs.stores.postgres_errors import Refused
from dibs.stores.postgres_wire import elements, float8, instant, integer, numbers, text, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.columns import Place
    from dibs.store import Renew
    from dibs.stores.columns import Asked

    Execute = Callable[[bytes, Sequence[bytes | None], Deadline], PGresult]

# Where the table is, whatever the search path; the key's type; whether it is unique; and which of our columns it has.
_FACTS = rb"""SELECT format('%I.%I', n.nspname, c.relname), format_type(a.atttypid, -1),
    EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid
            AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum AND i.indpred IS NULL),
    (SELECT string_agg(concat_ws(' ', o.attname, format_type(o.atttypid, o.atttypmod),
                                 CASE WHEN o.attnotnull THEN 'not null' END), E'\n') FROM pg_attribute AS o
     WHERE o.attrelid = c.oid AND o.attname = ANY ($3::text[]) AND o.attnum > 0 AND NOT o.attisdropped)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attname = $2 AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.oid = to_regclass($1)
"""
_BITS = {"smallint": 15, "integer": 31, "bigint": 63}
_NOW = "clock_timestamp()"
_FREE = f"(t.dibs_until IS NULL OR t.dibs_until <= {_NOW} OR split_part(t.dibs_claim, ' ', 1) = {{a}}.claim)"
_OURS = f"split_part(t.dibs_claim, ' ', 1) = {{a}}.claim AND t.dibs_until > {_NOW}"
_LASTING = f"{_NOW} + a.s * interval '1 second'"
_KEPT = "substr(t.dibs_claim, strpos(t.dibs_claim, ' '))"  # the holder, under a claim that nobody has
# What is asked for: keys, claims, and the values of the verb.
_ASKED = {
    "CLAIM": ("shown text", "s float8"),
    "RENEW": ("s float8",),
    "RELEASE": (),
    "KEEP": ("s float8",),
    "LOOK": (),
}
# What is locked, and what is written to it.
_LOCKS = {"CLAIM": _FREE, "RENEW": _OURS, "RELEASE": _OURS, "KEEP": _OURS}
_WRITES = {
    "CLAIM": f"""\
dibs_token = CASE WHEN split_part(t.dibs_claim, ' ', 1) = a.claim THEN t.dibs_token
                  ELSE coalesce(t.dibs_token, 0) + 1 END,
    dibs_claim = a.shown,
    dibs_until = greatest(CASE WHEN split_part(t.dibs_claim, ' ', 1) = a.claim THEN t.dibs_until END, {_LASTING})""",
    "RENEW": f"dibs_until = greatest(t.dibs_until, {_LASTING})",
    "RELEASE": "dibs_claim = NULL, dibs_until = NULL",
    "KEEP": f"""\
dibs_claim = CASE WHEN a.s > 0 THEN {_KEPT} END, dibs_until = CASE WHEN a.s > 0 THEN {_LASTING} END""",
}
# One row comes back for all.
_FOLDED = {
    "CLAIM": f"array_agg(i), array_agg(dibs_token), {_NOW}",
    "RENEW": f"array_agg(i), {_NOW}",
    "RELEASE": "array_agg(i)",
    "KEEP": "array_agg(i)",
}
# A release need not be durable: what a crash forgets of it is freed by the ttl. (What is kept, is.)
_RELAXED = "relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true)), "


class PostgresRows:
    """One table. ``execute`` runs a statement that finds no table of ours missing."""

    def __init__(self, execute: Execute, place: Place, where: str, kind: str) -> None:
        self._execute = execute
        self._place = place
        self._where, self._key, self._kind = where, quoted_part(place.key, "key"), kind
        self._sql = {verb: self._act(verb).encode() for verb in _LOCKS}
        self._sql["LOOK"] = self._look().encode()

    # -- statements -----------------------------------------------------------------------------------------------

    def _asked(self, verb: str) -> str:
        columns = ["key text", "claim text", *_ASKED[verb]]
        arrays = ", ".join(f"${number}::{column.split()[1]}[]" for number, column in enumerate(columns, 1))
        names = ", ".join(column.split()[0] for column in columns)
        return f"unnest({arrays}) WITH ORDINALITY AS a ({names}, i) JOIN {self._where} AS t ON {self._is_asked}"

    @property
    def _is_asked(self) -> str:
        return f"t.{self._key} = a.key::{self._kind}"

    def _act(self, verb: str) -> str:
        names = "".join(f", a.{column.split()[0]}" for column in _ASKED[verb])
        condition = _LOCKS[verb].format(a="a")
        before, at_first = (_RELAXED, "relaxed, ") if verb == "RELEASE" else ("", "")
        returned = ", t.dibs_token" if verb == "CLAIM" else ""
        return f"""\
WITH {before}locked AS MATERIALIZED (
    SELECT a.i, a.claim{names}, t.{self._key} AS key FROM {at_first}{self._asked(verb)}
    WHERE {condition} FOR NO KEY UPDATE OF t SKIP LOCKED
), written AS (
    UPDATE {self._where} AS t SET {_WRITES[verb]}
    FROM locked AS a WHERE t.{self._key} = a.key AND {condition}
    RETURNING a.i{returned}
)
SELECT {_FOLDED[verb]} FROM written
"""

    def _look(self) -> str:
        return f"""\
SELECT a.i, t.dibs_token, t.dibs_claim, (extract(epoch FROM t.dibs_until) - extract(epoch FROM {_NOW}))::float8,
    split_part(t.dibs_claim, ' ', 1) = a.claim
FROM {self._asked("LOOK")}
"""

    # -- verbs ----------------------------------------------------------------------------------------------------

    def fits(self, key: str) -> bool:
        bits = _BITS.get(self._kind)
        return bits is None or in_range(key, -(2**bits), 2**bits - 1)

    def claim(self, asked: list[Asked], deadline: Deadline) -> dict[int, Granted]:
        shown = texts([claim_text(request.claim_id, request.holder) for _, request in asked])
        get = self._run("CLAIM", asked, (shown, numbers([request.ttl for _, request in asked])), deadline).get_value
        since = instant(get(0, 2))
        return {
            place - 1: Granted(token, since)
            for place, token in zip(elements(get(0, 0)), elements(get(0, 1)), strict=True)
        }

    def renew(self, asked: list[Asked], deadline: Deadline) -> tuple[Collection[int], float]:
        get = self._run("RENEW", asked, (numbers([request.ttl for _, request in asked]),), deadline).get_value
        return [place - 1 for place in elements(get(0, 0))], instant(get(0, 1))

    def release(self, asked: list[Asked], deadline: Deadline) -> Collection[int]:
        keeps = [kept_s(request) for _, request in asked]
        kept = any(keeps)
        get = self._run("KEEP" if kept else "RELEASE", asked, (numbers(keeps),) if kept else (), deadline).get_value
        return [place - 1 for place in elements(get(0, 0))]

    def look(self, asked: list[Asked], deadline: Deadline) -> dict[int, Seen]:
        result = self._run("LOOK", asked, (), deadline)
        get = result.get_value
        seen = {}
        for r in range(result.ntuples):
            token, claim, left, mine = (get(r, column) for column in range(1, 5))
            seen[integer(get(r, 0)) - 1] = Seen(
                0 if token is None else integer(token),
                (text(claim) or "").partition(" ")[2] or None,
                0.0 if left is None else float8(left),
                mine == b"\x01",
            )
        return seen

    def _run(self, verb: str, asked: list[Asked], more: tuple[bytes, ...], deadline: Deadline) -> PGresult:
        keys, claims = texts([key for key, _ in asked]), texts([request.claim_id for _, request in asked])
        try:
            return self._execute(self._sql[verb], (keys, claims, *more), deadline)
        except SetupRequired as error:
            raise no_right(self._place, error) from error
        except Refused as error:
            refusal = error
        try:
            self._execute(f"SELECT count(key::{self._kind}) FROM unnest($1::text[]) AS key".encode(), (keys,), deadline)
        except Refused:
            raise KeyMisfit from refusal
        raise TableRefuses(refusal) from refusal

    # -- in the caller's transaction, and in his query ------------------------------------------------------------

    def pin(self, request: Renew) -> Pin:
        """Its lock on the row keeps everybody out. (Locked first and looked at then: of an old snapshot, an error.)"""
        row = f"{self._key} = {_text(row_of(request.name)[1])}::{self._kind}"
        ours = f"split_part(dibs_claim, ' ', 1) = {_text(request.claim_id)}"
        lock = (
            f"SELECT 1 FROM (SELECT dibs_claim, dibs_until FROM {self._where} WHERE {row} OFFSET 0 FOR NO KEY UPDATE)"
            f" AS t WHERE {ours} AND dibs_until > {_NOW}"
        )
        release = f"UPDATE {self._where} SET dibs_claim = NULL, dibs_until = NULL WHERE {row} AND {ours}"
        return Pin(lock, decides=True, release=lambda keep: release)

    def pinned(self, request: Renew, deadline: Deadline) -> bool:
        """Whether somebody has locked the row."""
        row = f"{self._key} = $1::text::{self._kind}"
        look = f"SELECT 1 FROM {self._where} WHERE {row} FOR NO KEY UPDATE SKIP LOCKED"
        return not self._execute(look.encode(), (row_of(request.name)[1].encode(),), deadline).ntuples

    @property
    def held(self) -> str:
        """What brings a row where the row of a query, ``q``, is claimed."""
        return f"SELECT true FROM {self._where} AS t WHERE t.{self._key} = q.dibs_key AND t.dibs_until > {_NOW} LIMIT 1"


def rows_of(execute: Execute, where: Place, deadline: Deadline) -> PostgresRows:
    """The table, or what is wrong with it."""
    asked = quoted(where.table).encode(), where.key.encode(), texts(COLUMNS)
    found = execute(_FACTS, asked, deadline)
    if not found.ntuples:
        raise InvalidOption(f"PostgreSQL has no table {where.table!r} here, to keep claims in")
    name, kind, unique, columns = (found.get_value(0, column) for column in range(4))
    if kind is None or unique != b"\x01":
        raise not_unique(where)
    check_columns(where, "postgresql", text(columns) or "")
    return PostgresRows(execute, where, text(name) or "", text(kind) or "")


def _text(value: str) -> str:
    """A text in a statement that no driver and no encoding of its own reads wrongly."""
    return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"
