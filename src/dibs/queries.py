"""The contract between claims and a store that can run a caller's query beside the leases (``Capabilities.query``).

The query is the caller's own SQL and runs on a connection of dibs's own, which reads and nothing else. Its first column
tells one item from the others. Looking at what somebody holds is a part of the same statement, so that a thousand rows
which are held cost no round trip; what it says may be old a moment later, and nothing rests on it: a claim decides.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from dibs.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dibs.clock import Deadline
    from dibs.columns import Place


class Query(NamedTuple):
    """A caller's query, and which of its rows are asked for.

    ``text`` and ``params`` are as the store's driver takes them. Asked for are the first ``limit`` rows for whose key
    no lease is in force under the name ``prefix`` + key, or with ``place`` no claim in the columns of the row there; or
    rather, with ``only``, the rows with these keys, held or not.
    """

    text: str
    params: Sequence[Any] | Mapping[str, Any]
    prefix: str
    limit: int
    only: Sequence[Any] | None = None
    place: Place | None = None


class Querying(Protocol):
    """What a store has besides that can run a caller's query."""

    def find(self, query: Query, deadline: Deadline) -> list[tuple[Any, ...]]:
        """The rows, in the query's own order as far as the database keeps it.

        InvalidOption with the database's words when it refuses the query, SetupRequired when dibs's login may not read
        what it reads, StoreUnavailable when it takes longer than the deadline.
        """
        ...


def bare(text: str) -> str:
    """The query without the semicolon at its end, fit to stand in brackets; a comment may end it."""
    return text.strip().rstrip(";").rstrip() + "\n"


def filled(query: Query, literal: Callable[[object], str]) -> str:
    """The query with its parameters in it, where %s or %(name)s stands for them."""
    text, params = bare(query.text), query.params
    if not params:
        return text
    try:
        if hasattr(params, "items"):
            return text % {name: literal(value) for name, value in params.items()}
        return text % tuple(map(literal, params))
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidOption(f"params do not fit the query, where %s or %(name)s stands for each: {error}") from None
