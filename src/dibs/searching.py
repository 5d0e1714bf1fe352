"""Claims on what a query finds in the database in which the leases are kept: found, claimed, and looked at once more.

One statement that reads the rows and takes the claims would be wrong: it sees the rows as they were when it began, and
the claims as they are when it reaches them. An item that somebody has worked and freed in between would be handed out
again. So the rows come first, without those that are held; then the claims, in one call; and then the same query again,
of what was won alone: what it does not find any more is not due any more, and given back. From there on nobody works
the item but the claimer. The values are those of the second look.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, TypeVar, cast
from dibs.batch import BatchFacts
from dibs.errors import InvalidOption, Unsupported
from dibs.once_keys import check_key
from dibs.queries import Query

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dibs.claiming import ClaimsCore
    from dibs.once_keys import Key
    from dibs.queries import Querying
    from dibs.steps import Steps

# How often is looked again when others have claimed all that was found.
LOOKS_MAX = 10
# As many rows are found and claimed at once.
FOUND_MAX = 10_000

B = TypeVar("B", bound=BatchFacts[Any])


def searching(
    core: ClaimsCore[B], owner: object, text: str, params: Sequence[Any] | Mapping[str, Any], most: int
) -> Steps[B]:
    """Claim up to ``most`` of what the query yields and nobody holds."""
    query = Query(text, params, f"{core._desk.key_prefix}{core.source}/", most, place=core.place)
    batch: B | None = None
    try:
        for _ in range(LOOKS_MAX):
            rows = core.keyed((yield from _find(core, query)), _key)
            batch = yield from core.taking(owner, {key: _value(row) for key, row in rows.items()}, None)
            if batch._items:
                won = [rows[item.key][0] for item in batch.items]
                due = core.keyed((yield from _find(core, query._replace(only=won))), _key)
                batch._keep_due(due)
                for item in batch.items:
                    item._value = _value(due[item.key])
                break
            if not batch.busy:
                break
            # Others were quicker, and have claimed all of them. The next look finds what is behind those.
        assert batch is not None
        return batch
    except BaseException:
        if batch is not None:
            batch._give_back(batch._items)
        raise


def check_query(core: ClaimsCore[Any], text: object, params: object, n: object) -> int:
    """How many rows to claim at most; raises InvalidOption, and Unsupported where no query can be run."""
    limits = core._desk.address.capabilities
    if not isinstance(text, str) or not text.strip():
        raise InvalidOption(f"query is the text of a SELECT whose first column is the key, not {text!r}")
    if isinstance(params, (str, bytes)) or not hasattr(params, "__len__"):
        raise InvalidOption(f"params is a list, tuple or dict of the query's parameters, not {params!r}")
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= FOUND_MAX:
        raise InvalidOption(f"n says how many to claim at most: a whole number from 1 to {FOUND_MAX:,}, not {n!r}")
    if core._desk.address.observed:
        raise Unsupported(
            "no queries with takeover='observe': whom they find is told by the store's clock; give take items"
        )
    if not limits.query:
        raise Unsupported(
            f"{limits.store} runs no queries: keep the leases in the SQL database in which the rows are, or give take "
            "the items"
        )
    return n


def _find(core: ClaimsCore[B], query: Query) -> Steps[list[tuple[Any, ...]]]:
    return (yield from core._desk._acting(lambda store, by: cast("Querying", store).find(query, by)))


def _value(row: tuple[Any, ...]) -> Any:
    """What an item is: the row, or of a single column what stands there."""
    return row[0] if len(row) == 1 else row


def _key(row: tuple[Any, ...]) -> Key:
    """The first column; what a database has for it and a key is not is taken by its text."""
    key = row[0]
    if type(key).__name__ == "UUID":
        return str(key)
    return check_key(key)


def key_of(value: Any) -> Key:
    """The key of an item, or of what ``verify`` tells for it: the row, or its first column alone."""
    return _key(value if isinstance(value, tuple) else (value,))
