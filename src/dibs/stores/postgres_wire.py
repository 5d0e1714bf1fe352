"""Values as PostgreSQL takes and gives them: parameters go as text, answers come as binary."""

from __future__ import annotations

from struct import Struct

import psycopg
from psycopg.sql import Literal

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption
from dibs.store import StoredGrant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.stores.rounds import Row

_FLOAT8 = Struct("!d").unpack
_ELEMENTS = Struct("!iq").iter_unpack
_ARRAY_HEAD_BYTES = 20
# PostgreSQL counts microseconds from 2000-01-01.
EPOCH_S = 946684800.0

# -- parameters -------------------------------------------------------------------------------------------------------


def milliseconds(deadline: Deadline) -> bytes:
    """What is left, as PostgreSQL's settings take it."""
    return str(max(100, int(deadline.remaining() * 1000))).encode()


def plain(value: str | int | None) -> bytes | None:
    return None if value is None else str(value).encode()


def literal(value: object) -> str:
    """A value as it stands in a statement; InvalidOption for what psycopg cannot adapt."""
    try:
        return Literal(value).as_string(None)
    except psycopg.Error as error:
        raise InvalidOption(f"{value!r} cannot be a parameter of a query: {error}") from None


def texts(values: Iterable[str | None]) -> bytes:
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


def numbers(values: list[Any]) -> bytes:
    first = values[0]
    if values.count(first) == len(values):
        if first is None:
            return b"{}"
        return ("{" + ",".join([repr(first)] * len(values)) + "}").encode()
    return ("{" + ",".join("NULL" if v is None else repr(v) for v in values) + "}").encode()


def acquired(rows: list[Row]) -> tuple[bytes | None, ...]:
    """The columns of acquires: plain values of a single one, arrays of many."""
    if len(rows) > 1:
        return acquired_many(rows)
    name, claim_id, ttl, holder, info, _, ticket, *_permits = rows[0][2]
    return name.encode(), claim_id.encode(), b"%r" % ttl, holder.encode(), plain(info), plain(ticket)


def acquired_many(rows: list[Row]) -> tuple[bytes, ...]:
    requests = [row[2] for row in rows]
    return (
        texts([r.name for r in requests]),
        texts([r.claim_id for r in requests]),
        numbers([r.ttl for r in requests]),
        texts([r.holder for r in requests]),
        texts([r.info for r in requests]),
        numbers([r.ticket for r in requests]),
    )


def channels(rows: list[Row]) -> bytes:
    """Where those who wait are told."""
    return texts([row[2].wake and "dibs_" + row[2].wake for row in rows])


def released(rows: list[Row]) -> tuple[bytes | None, ...]:
    """The columns of releases: plain values of a single one, arrays of many."""
    if len(rows) == 1:
        name, claim_id, slot, ticket, keep, info = rows[0][2]
        return name.encode(), b"%d" % slot, claim_id.encode(), plain(ticket), b"%r" % keep, plain(info)
    requests = [row[2] for row in rows]
    return (
        texts([r.name for r in requests]),
        numbers([r.slot for r in requests]),
        texts([r.claim_id for r in requests]),
        numbers([r.ticket for r in requests]),
        numbers([r.keep for r in requests]),
        texts([r.info for r in requests]),
    )


# -- answers ----------------------------------------------------------------------------------------------------------

TRUE = b"\x01"


def integer(value: bytes | None) -> int:
    assert value is not None
    return int.from_bytes(value, "big", signed=True)


def float8(value: bytes | None) -> float:
    assert value is not None
    return float(_FLOAT8(value)[0])


def elements(value: bytes | None) -> list[int]:
    """An array on the wire: its head, then for each element a length and the number. None where there is nothing."""
    return [number for _, number in _ELEMENTS((value or b"")[_ARRAY_HEAD_BYTES:])]


def text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def instant(value: bytes | None) -> float:
    """A moment as seconds of Unix time; 0.0 for none."""
    return 0.0 if value is None else int.from_bytes(value, "big", signed=True) / 1e6 + EPOCH_S


def instants(value: bytes | None) -> list[float]:
    """An array of moments."""
    return [microseconds / 1e6 + EPOCH_S for microseconds in elements(value)]


def grants(result: PGresult) -> list[StoredGrant]:
    """The rows of a history."""
    get = result.get_value
    return [
        StoredGrant(
            integer(get(r, 0)),
            text(get(r, 1)) or "",
            integer(get(r, 2)),
            instant(get(r, 3)),
            None if get(r, 4) is None else instant(get(r, 4)),
            text(get(r, 5)),
            text(get(r, 6)),
        )
        for r in range(result.ntuples)
    ]
