"""What nodes of ZooKeeper are called, what stands in them, and how waiters' numbers are compared.

(What stands in the node of a name with permits is told in ``zookeeper_ledger``.)
"""

from __future__ import annotations

import json
from urllib.parse import quote

from dibs._typing import Any, NamedTuple

# What stands in the node of a holder whose lease was broken, before the time of its last renewal.
BROKEN = b"broken "
NUMBERS = 2**32


class Nodes:
    """The paths under one root."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.leases = f"{root}/lease"
        self.lines = f"{root}/line"

    def permit(self, name: str) -> str:
        return f"{self.leases}/{quoted(name)},1"

    def line(self, name: str) -> str:
        return f"{self.lines}/{quoted(name)}"

    def line_of(self, permit: str) -> str:
        """The line of those who wait for what is kept there."""
        return f"{self.lines}/{permit.rpartition('/')[2].rpartition(',')[0]}"

    def all(self) -> list[str]:
        """What must be there, parents first."""
        parts = self.root.strip("/").split("/")
        return ["/" + "/".join(parts[: n + 1]) for n in range(len(parts))] + [self.leases, self.lines]


def quoted(text: str) -> str:
    """A text as a part of a node's name: what is not plain is percent-encoded, so no two texts are one."""
    return quote(text, safe=":@=+")


def holder_node(permit: str, claim_id: str) -> str:
    return f"{permit}/c-{quoted(claim_id)}"


def claim_of(holder: str) -> str:
    """The quoted claim that a holder's node is named by."""
    return holder.rpartition("/")[2][2:]


def kept_node(permit: str, claim_id: str) -> str:
    """The node of a name that is kept after its release: a claim that nobody has."""
    return f"{permit}/k-{quoted(claim_id)}"


# -- the line ------------------------------------------------------------------------------------------------------


class Waiter(NamedTuple):
    number: int
    claim: str
    path: str
    #: How many permits it waits for; 0 when it waits for a lock.
    take: int = 0


def waiter_node(line: str, claim_id: str, number: int | None, take: int = 0) -> str:
    """The path of a waiter's node; with no number, what ZooKeeper appends one to, as it does: signed, in ten digits."""
    signed = "" if number is None else f"{number - NUMBERS if number >= NUMBERS // 2 else number:010d}"
    return f"{line}/w-{quoted(claim_id)},{f'{take},' if take else ''}{signed}"


def waiters(line: str, nodes: list[str]) -> list[Waiter]:
    """Those who wait, whatever else somebody put there."""
    found = []
    for node in nodes:
        front, _, number = node.rpartition(",")
        claim, _, take = front.partition(",")  # a claim that is quoted has no comma
        if claim.startswith("w-") and number.removeprefix("-").isdigit() and (take or "0").isdigit():
            found.append(Waiter(int(number) % NUMBERS, claim[2:], f"{line}/{node}", int(take or 0)))
    return found


def before(one: int, other: int) -> bool:
    """Whether a number came before another. ZooKeeper counts in 32 bits and begins again."""
    return 0 < (other - one) % NUMBERS < NUMBERS // 2


def in_order(some: list[Waiter]) -> list[Waiter]:
    """Those who came first first. All numbers of a line lie within half of what 32 bits can count."""
    origin = some[0].number - NUMBERS // 2 if some else 0
    return sorted(some, key=lambda waiter: (waiter.number - origin) % NUMBERS)


class Standing:
    """Who stands in line, as somebody sees it who is there or comes."""

    def __init__(self, line: str, claim_id: str, ticket: int | None, names: Any) -> None:
        #: Whether there is a line at all: ``names`` are its nodes, else something that is no list.
        self.there = type(names) is list
        #: How many nodes it has, those of strangers among them.
        self.nodes = len(names) if type(names) is list else 0
        everybody = waiters(line, names) if type(names) is list else []
        claim = quoted(claim_id)
        self.own = next((waiter for waiter in everybody if waiter.claim == claim), None)
        self.others = in_order([waiter for waiter in everybody if waiter is not self.own])
        #: The place in line; None for who is not in it, and never was.
        self.number = ticket - 1 if ticket else None
        if self.own is not None:
            self.number = self.own.number
        number = self.number
        self.ahead = [waiter for waiter in self.others if number is None or before(waiter.number, number)]
        self.behind = [waiter for waiter in self.others if number is not None and before(number, waiter.number)]


# -- what stands in a node -------------------------------------------------------------------------------------------


def packed(words: dict[str, Any]) -> bytes:
    return json.dumps(words, ensure_ascii=False, separators=(",", ":")).encode()


def unpacked(data: bytes) -> dict[str, Any]:
    """Holder, info and ttl, and when it was granted if that is noted; somebody's scribbles are no reason to fail."""
    try:
        words = json.loads(data)
        known = {"holder": str(words["holder"]), "info": words["info"], "ttl": float(words["ttl"])}
        return known | ({"at": float(words["at"])} if "at" in words else {})
    except (ValueError, KeyError, TypeError):
        return {"holder": "unknown", "info": None, "ttl": 0.0}


def broken(data: bytes, renewed_at_ms: int) -> bytes:
    """What is written over the data of a holder's node when its lease is broken."""
    return b"%s%d %s" % (BROKEN, renewed_at_ms, data)


def unbroken(data: bytes, mtime_ms: int) -> tuple[bytes, int]:
    """What a holder's node said before its lease was broken, if it was, and when that was written."""
    if not data.startswith(BROKEN):
        return data, mtime_ms
    at, _, text = data[len(BROKEN) :].partition(b" ")
    return text, int(at)
