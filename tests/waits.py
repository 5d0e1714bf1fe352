"""Times in tests: until when something must have answered, and waiting for what is about to happen."""

from __future__ import annotations

import time
from collections.abc import Callable

from dibs.clock import Deadline, RealClock, boot_now


def soon(seconds: float = 20.0) -> Deadline:
    """The end of a request's time."""
    return Deadline(RealClock(), boot_now() + seconds)


def eventually(condition: Callable[[], object], what: str = "it did not happen", limit_s: float = 20.0) -> None:
    """Wait until the condition holds; after so long it fails, saying ``what`` has not become true."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"{what} (in {limit_s:g} s)"
        time.sleep(0.01)
