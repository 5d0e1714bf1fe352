"""Requests for one name take turns: a vector in rounds in each of which every name is asked for once."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.store import Request


def rounds_of(requests: Sequence[Request]) -> list[list[int]]:
    """The places of the requests, in the order given for each name; nearly always a single round."""
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for index, request in enumerate(requests):
        number = seen.get(request.name, 0)
        seen[request.name] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds
