"""What dibs keeps in etcd, in the gateway's words: the keys, their values, and the transactions on them as JSON.

Keys are a prefix, ``lease/`` or ``line/``, the name, and behind a NUL and a slash what belongs to it. No name contains
a NUL, so each name has ranges of its own, and keys sort as names do, by code point. On a terminal the NUL is not seen::

    dibs/lease/default:digest/42␀/1/5f0c2a77e1d4-7    {"holder":"web1/4711/5f0c2a77e1d4","since":…,"ttl":30,"info":null}
    dibs/line/default:digest/42␀/00000000000004d2/9b1fe0c3a655-2    {"holder":"web2/815/9b1fe0c3a655"}

The ``1`` is the permit's slot. A key that ends after ``/1/`` is no claim's: the name is kept, by min_hold or because a
lease was broken; its value tells the token of the lease it stands for. What is no lock has a *head* besides, which
says how many permits there are and when that was last written; then holders and waiters say how many they take::

    dibs/lease/default:downloads␀/0    {"permits":5,"at":…}
    dibs/lease/default:downloads␀/2/5f0c2a77e1d4-9    {"holder":"web1/4711/5f0c2a77e1d4","since":…,"ttl":30,"take":1,…}
"""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64

from dibs._typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dibs.store import Acquire, Release, Renew, Transfer


# What stands in a value before its info. In a string the quotes would have backslashes.
INFO = ',"info":'


def b64(text: str) -> str:
    """As the gateway takes bytes."""
    return b2a_base64(text.encode(), newline=False).decode()


def unb64(text: str) -> str:
    return a2b_base64(text).decode("utf-8", "replace")


class Span(NamedTuple):
    """A range of keys, in base64: from the first (included) to the last (excluded)."""

    first: str
    last: str


class Kept(NamedTuple):
    """A key as etcd shows it."""

    key: str  # in base64, as it came
    created: int
    modified: int
    lease: str
    value: str

    def place(self) -> tuple[int, str]:
        """Of a key in line: its ticket and claim."""
        ticket, _, claim_id = unb64(self.key).rpartition("\0/")[2].partition("/")
        return int(ticket, 16), claim_id

    def permit(self) -> tuple[int, str]:
        """Of a key that is no head: which of the name's permits it is, and whose; nobody's where the name is kept."""
        slot, _, claim_id = unb64(self.key).rpartition("\0/")[2].partition("/")
        return int(slot) if slot.isdecimal() else 1, claim_id

    def number(self, what: str) -> float:
        """A number in a value that has nothing else to tell; 0 where it is not said."""
        try:
            return float(json.loads(unb64(self.value))[what])
        except (ValueError, KeyError, TypeError):
            return 0.0

    def name(self, start: str) -> str:
        """The name in a key that begins so."""
        return unb64(self.key).removeprefix(start).partition("\0")[0]

    def shown(self) -> Shown:
        """What the value of a lease's key tells. Values that dibs did not write tell nothing."""
        text = unb64(self.value)
        head, _, info = text.partition(INFO)
        try:
            record = json.loads(head + "}")
            token, holder = int(record.get("token", self.created)), str(record["holder"])
            since, take = float(record["since"]), int(record.get("take", 1))
        except (ValueError, KeyError, TypeError, AttributeError):
            return Shown("?", self.created, 0.0, None, 1)
        return Shown(holder, token, since, None if info[:-1] in ("", "null") else info[:-1], take)


class Shown(NamedTuple):
    holder: str
    fencing_token: int
    since: float
    info: str | None
    take: int


def kept(answer: dict[str, Any]) -> list[Kept]:
    """The keys in the answer to a range; what is zero or empty is left out there."""
    return [
        Kept(
            found["key"],
            int(found["create_revision"]),
            int(found["mod_revision"]),
            found.get("lease", "0"),
            found.get("value", ""),
        )
        for found in answer["response_range"].get("kvs", ())
    ]


class Layout:
    """Where things are, under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.leases = f"{prefix}lease/"
        self.lines = f"{prefix}line/"

    def permit(self, name: str) -> Span:
        """Whoever holds the name, or nobody; before them, of a name with permits, the head."""
        start = f"{self.leases}{name}\0"
        return Span(b64(start + "/"), b64(start + "0"))

    def head(self, name: str) -> str:
        """What says how many permits the name has; a lock has none."""
        return b64(f"{self.leases}{name}\0/0")

    def slots(self, name: str) -> Span:
        """Whoever holds permits of the name."""
        start = f"{self.leases}{name}\0"
        return Span(b64(start + "/1"), b64(start + "0"))

    def slot(self, name: str, slot: int) -> Span:
        start = f"{self.leases}{name}\0/{slot}"
        return Span(b64(start + "/"), b64(start + "0"))

    def claim(self, name: str, claim_id: str, slot: int = 1) -> str:
        return b64(f"{self.leases}{name}\0/{slot}/{claim_id}")

    def claim_of(self, request: Release | Renew | Transfer) -> str:
        return self.claim(request.name, request.claim_id, request.slot)

    def line(self, name: str) -> Span:
        """All who wait for the name."""
        start = f"{self.lines}{name}\0"
        return Span(b64(start + "/"), b64(start + "0"))

    def place(self, name: str, ticket: int, claim_id: str) -> str:
        return b64(f"{self.lines}{name}\0/{ticket:016x}/{claim_id}")

    def between(self, first: str, before: str) -> tuple[Span, Span]:
        """The leases and the lines of all names from ``first`` to ``before`` (excluded)."""
        return (
            Span(b64(self.leases + first), b64(self.leases + before)),
            Span(b64(self.lines + first), b64(self.lines + before)),
        )


# -- operations and transactions --------------------------------------------------------------------------------------


def get(key: str) -> str:
    """Read one key, but for its value."""
    return f'{{"request_range":{{"key":"{key}","keys_only":true}}}}'


def get_whole(key: str) -> str:
    """Read one key with its value."""
    return f'{{"request_range":{{"key":"{key}"}}}}'


def get_all(span: Span, how: str = "") -> str:
    """Read a range; ``how`` is more of a RangeRequest."""
    return f'{{"request_range":{{"key":"{span.first}","range_end":"{span.last}"{how}}}}}'


KEYS_ONLY = ',"keys_only":true'
FIRST = ',"limit":"1"'
LATEST = ',"keys_only":true,"limit":"1","sort_order":"DESCEND","sort_target":"MOD"'
LAST = ',"keys_only":true,"limit":"1","sort_order":"DESCEND","sort_target":"KEY"'


def delete(key: str) -> str:
    return f'{{"request_delete_range":{{"key":"{key}"}}}}'


def delete_all(span: Span) -> str:
    return f'{{"request_delete_range":{{"key":"{span.first}","range_end":"{span.last}"}}}}'


def put(key: str, value: str, lease: str) -> str:
    return f'{{"request_put":{{"key":"{key}","value":"{b64(value)}","lease":"{lease}"}}}}'


def move(key: str, lease: str) -> str:
    """Hang a key on another etcd lease; its value stays."""
    return f'{{"request_put":{{"key":"{key}","ignore_value":true,"lease":"{lease}"}}}}'


def by_itself(operation: str) -> tuple[str, str, str]:
    """A read or deletion as a request of its own: path and body, and what its answer is called in a transaction."""
    kind, _, body = operation[2:-1].partition('":')
    return ("kv/range" if kind == "request_range" else "kv/deleterange"), body, kind.replace("request", "response")


def nothing_in(span: Span) -> str:
    """The comparison that is true when there is no key in a range."""
    return f'{{"key":"{span.first}","range_end":"{span.last}","target":"CREATE","create_revision":"0"}}'


def unchanged(found: Kept) -> str:
    """The comparison that is true while a key is the one that was seen, whatever etcd lease it hangs on."""
    return f'{{"key":"{found.key}","target":"CREATE","create_revision":"{found.created}"}}'


def same(found: Kept) -> str:
    """The comparison that is true while nothing of a key has changed."""
    return f'{{"key":"{found.key}","target":"MOD","mod_revision":"{found.modified}"}}'


def none_newer(span: Span, revision: int) -> str:
    """The comparison that is true while no key was made in a range since a revision."""
    newer = f'"target":"CREATE","result":"LESS","create_revision":"{revision + 1}"'
    return f'{{"key":"{span.first}","range_end":"{span.last}",{newer}}}'


def nested(text: str) -> str:
    """A transaction as an operation of another one, whose comparisons see what was before it."""
    return f'{{"request_txn":{text}}}'


def txn(compare: Iterable[str], success: Iterable[str], failure: Iterable[str] = ()) -> str:
    return f'{{"compare":[{",".join(compare)}],"success":[{",".join(success)}],"failure":[{",".join(failure)}]}}'


def value_of(request: Acquire | Transfer, since: float, take: int) -> str:
    """What is written for people, and of how many permits it takes. The info comes last, letter for letter."""
    holder = json.dumps(request.holder, ensure_ascii=False)
    taking = f',"take":{take}' if request.permits else ""
    return f'{{"holder":{holder},"since":{since!r},"ttl":{request.ttl:g}{taking}{INFO}{request.info or "null"}}}'


def place_of(request: Acquire) -> str:
    """The value of a place in line."""
    take = f',"take":{request.take}' if request.permits else ""
    return f'{{"holder":{json.dumps(request.holder, ensure_ascii=False)}{take}}}'


def head_of(permits: int, at: float) -> str:
    """The value of the head of a name with permits."""
    return f'{{"permits":{permits},"at":{at!r}}}'


def marker_of(found: Kept, info: str | None = None) -> str:
    """The value of the key that keeps a name in the place of a holder's: what the lease showed, its token, a new info.

    The token is written down because the key has another revision.
    """
    head, _, tail = unb64(found.value).partition(INFO)
    if info is not None:
        tail = info + "}"
    return f'{{"token":{found.shown().fencing_token},{head[1:]}{INFO}{tail}'
