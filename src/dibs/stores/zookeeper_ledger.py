"""What is known of a name with permits on ZooKeeper: its ledger, who holds, and who waits.

The ledger is the data of one node. It says who was granted permits; who holds them still is told by the nodes under it.
``zookeeper_permits`` says how the two are kept in step.
"""

from __future__ import annotations

import json
import os

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.store import Acquire, Granted
from dibs.stores.permits import Holding, State, Waiting
from dibs.stores.zookeeper_link import No
from dibs.stores.zookeeper_nodes import Standing, packed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dibs.stores.zookeeper_line import Sign
    from dibs.stores.zookeeper_link import Operation


class Entry(NamedTuple):
    """A grant of permits, as the ledger has it."""

    slot: int
    take: int
    #: How many were granted before it: the token is this much more than the zxid that made the ledger.
    number: int


class Ledger(NamedTuple):
    """What stands at the place of a lock when a name has permits: see ``zookeeper_permits``."""

    permits: int
    #: How many grants there have been.
    grants: int
    #: No two ledgers have the same, also not one that replaced another; a node is named after it.
    seal: str
    #: Who was granted permits, by the quoted claim. Who holds them still is told by the nodes.
    held: dict[str, Entry]

    def packed(self) -> bytes:
        return packed(self._asdict())


def seal_node(permit: str, seal: str) -> str:
    return f"{permit}/i-{seal}"


def ledger_of(data: bytes) -> Ledger | None:
    """The ledger that stands there; None where it is a lock."""
    if not data.startswith(b'{"permits":'):
        return None
    try:
        said = json.loads(data)
        held = {claim: Entry(*map(int, entry)) for claim, entry in said["held"].items()}
        return Ledger(int(said["permits"]), int(said["grants"]), str(said["seal"]), held)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def entries(ledger: Ledger, nodes: Collection[str]) -> dict[str, Entry]:
    """The entries of those who hold, by their nodes."""
    there, held = set(nodes), {}
    for claim, entry in ledger.held.items():
        for node in (f"c-{claim}", f"k-{claim}"):
            if node in there:
                held[node] = entry
    return held


def told_of(entry: Entry, ledger_stat: Any, words: dict[str, Any], stat: Any) -> Granted:
    """What was told to who was granted an entry; the other three are of the ledger's node and of the holder's."""
    return Granted(ledger_stat.czxid + entry.number, words.get("at", stat.ctime / 1000), entry.slot)


def holder_of(ledger: Ledger, stat: Any, nodes: Collection[str], fencing_token: int) -> str | None:
    """The node of who holds under this token; None when there is none."""
    number = fencing_token - stat.czxid
    return next((node for node, entry in entries(ledger, nodes).items() if entry.number == number), None)


def written(permit: str, ledger: Ledger, version: int) -> list[Operation]:
    """Write a ledger in the place of the one that was read, if it is still that one."""
    return [("check", seal_node(permit, ledger.seal), -1), ("set_data", permit, ledger.packed(), version)]


class View:
    """What was read of a name: the ledger, who holds, who waits; the ledger first, so that nobody is overlooked."""

    def __init__(self, request: Acquire, line: str, answers: Sequence[Any]) -> None:
        there, nodes, names = answers
        #: None when nothing stands at the name's place, or what a lock's dead holder left.
        self.ledger = ledger_of(there[0]) if type(there) is tuple else None
        self.stat: Any = there[1] if type(there) is tuple else None
        self.nodes: Sequence[str] = () if type(nodes) is No else nodes
        self.line = Standing(line, request.claim_id, request.ticket, names)
        #: The ledger's entries of those who hold, by their nodes.
        self.held = {} if self.ledger is None else entries(self.ledger, self.nodes)

    def changing(self) -> bool:
        """Whether a ledger was made while this was read."""
        return self.ledger is None and any(node.startswith("i-") for node in self.nodes)

    def is_lock(self) -> bool:
        """Whether somebody has the name as a lock, or waits for it as one."""
        return self.ledger is None and (bool(self.nodes) or any(not waiter.take for waiter in self.line.others))

    def left(self, permits: int) -> int:
        return permits - sum(entry.take for entry in self.held.values())

    def state(self, signs: Sequence[Sign]) -> State:
        ledger = self.ledger
        if ledger is None:
            return State(None, -1, (), ())
        base = self.stat.czxid
        holdings = [
            # What is kept after its release is nobody's any more.
            Holding(entry.slot, node[2:] if node[0] == "c" else "", entry.take, "", base + entry.number, 0.0, 0.0)
            for node, entry in self.held.items()
        ]
        line = [
            Waiting(rank, sign.waiter.claim, sign.waiter.take or 1, sign.silent_for)
            for rank, sign in enumerate(signs, 1)
        ]
        return State(ledger.permits, base + ledger.grants - 1, holdings, line)

    def after(self, permits: int) -> Ledger:
        """The ledger with this many permits, rid of those who hold no more."""
        ledger = self.ledger
        if ledger is None:
            return Ledger(permits, 0, os.urandom(6).hex(), {})
        return ledger._replace(permits=permits, held={node[2:]: entry for node, entry in self.held.items()})
