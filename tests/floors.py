"""What the stores that keep a floor under the tokens of new names have in common when that is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dibs


def tokens_go_on(url: str, kind: str, lose: Callable[[], object]) -> None:
    """After a purge, and the loss of the floor: new names and old ones get tokens above all that were granted."""
    with dibs.connect(url) as client:
        lockables: list[Any] = [client.lock("x"), client.lock("y")]
        if kind == "semaphore":
            lockables = [client.semaphore("x", 2), client.semaphore("y", 2)]
        tokens = []
        for lockable in (lockables[0], lockables[0], lockables[0], lockables[1]):
            with lockable as lease:
                tokens.append(lease.fencing_token)
        client.purge(0)
        with lockables[1] as lease:
            tokens.append(lease.fencing_token)
        lose()
        for lockable in (lockables[0], client.lock("new")):
            with lockable as lease:
                assert lease.fencing_token > max(tokens)
