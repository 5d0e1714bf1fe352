"""Flights of transactions and reads to etcd: many as parts of one where that is possible, and what was answered."""

from __future__ import annotations

from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_gateway import NoSpace, Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline
    from dibs.stores.etcd_gateway import Gateway

# etcd takes 128 operations a transaction (--max-txn-ops), and counts those of nested ones with their parents'.
OPS_MAX = 120


class Sent(NamedTuple):
    """What became of a flight of transactions."""

    #: Of each: whether its comparisons held, the answers of the branch taken, and the revision.
    results: list[tuple[bool, list[Any], int]]
    #: The terms of raft in which anything of it was answered.
    terms: set[str]


class LeaseGone(Exception):
    """A transaction would have hung a key on an etcd lease that is not there."""


class Flights:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def transactions(
        self,
        texts: list[str],
        deadline: Deadline,
        before: Sequence[tuple[str, str]] = (),
        together_max: int = OPS_MAX,
    ) -> Sent:
        """Send transactions, each atomic by itself: many as parts of one, which etcd writes to its log at once.

        At most ``together_max`` in one, which leaves the rest of OPS_MAX for what is nested in them.
        """
        flight = list(before)
        if len(texts) == 1:
            flight.append(("kv/txn", texts[0]))
        else:
            parts = (texts[start : start + together_max] for start in range(0, len(texts), together_max))
            flight += [("kv/txn", keys.txn((), map(keys.nested, part))) for part in parts]
        answers = self._gateway.flight(flight, deadline)
        results: list[tuple[bool, list[Any], int]] = []
        for answer in answers[len(before) :]:
            if type(answer) is Refusal:
                raise LeaseGone
            revision = int(answer["header"]["revision"])
            single = [answer] if len(texts) == 1 else [part["response_txn"] for part in answer["responses"]]
            results += [(part.get("succeeded", False), part.get("responses", []), revision) for part in single]
        return Sent(results, _terms(answers))

    def operations(
        self, operations: list[str], deadline: Deadline, before: Sequence[tuple[str, str]] = ()
    ) -> tuple[list[Any], set[str]]:
        """Send reads or deletions; their answers, and the terms in which they were given."""
        if not operations and not before:
            return [], set()
        if len(operations) > 1:
            starts = range(0, len(operations), OPS_MAX)
            together = [("kv/txn", keys.txn((), operations[start : start + OPS_MAX])) for start in starts]
            # Out of space, etcd up to 3.5.1 refuses all transactions, but no read or deletion by itself.
            with suppress(NoSpace):
                answers = self._gateway.flight([*before, *together], deadline)
                return [part for answer in answers[len(before) :] for part in answer["responses"]], _terms(answers)
        single = [keys.by_itself(operation) for operation in operations]
        answers = self._gateway.flight([*before, *((path, body) for path, body, _ in single)], deadline)
        named = zip(single, answers[len(before) :], strict=True)
        return [{name: answer} for (_, _, name), answer in named], _terms(answers)


def _terms(answers: list[Any]) -> set[str]:
    """The terms of raft in which a flight was answered; a keepalive's answer is a list."""
    headers = (message["header"] for answer in answers for message in (answer if type(answer) is list else [answer]))
    return {header["raft_term"] for header in headers}
