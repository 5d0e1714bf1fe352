"""Requests to ZooKeeper side by side: each verb sends flights, and is given the answers of each before the next."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import DibsError, StoreUnavailable
from dibs.stores.zookeeper_link import answer

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.zookeeper_link import Flights

# Verbs under way at once; more of a vector wait for these.
WINDOW = 100
# How often one request looks again because others were faster, before its caller is told to ask again.
TRIES = 8


def fly(verbs: list[Flights], root: str, deadline: Deadline) -> list[Any]:
    """Run verbs side by side: the first flight of each is on its way before the first answer is waited for."""
    results: list[Any] = [None] * len(verbs)
    under_way: list[tuple[int, Flights, list[Any]]] = []
    try:
        for index, verb in enumerate(verbs):
            _advance(index, verb, None, under_way, results)
        while under_way:
            flights, under_way = under_way, []
            for index, verb, flight in flights:
                answers: list[Any] | DibsError
                try:
                    answers = [answer(asked, root, deadline) for asked in flight]
                except DibsError as error:
                    answers = error  # the verb may know better what it means
                _advance(index, verb, answers, under_way, results)
    except StoreUnavailable as error:
        # Whatever this one was told: others of the vector may have been done.
        error.maybe_applied = error.maybe_applied or len(verbs) > 1
        raise
    finally:
        for verb in verbs:
            verb.close()
    return results


def _advance(index: int, verb: Flights, answers: Any, under_way: list[Any], results: list[Any]) -> None:
    """Let a verb take its answers, and note its next flight or its outcome."""
    try:
        flight = verb.throw(answers) if isinstance(answers, DibsError) else verb.send(answers)
        under_way.append((index, verb, flight))
    except StopIteration as end:
        results[index] = end.value
