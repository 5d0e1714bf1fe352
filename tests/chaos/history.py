"""The history of a run: what each client did and saw, a line for each event, on the clock that all processes share.

A line is written in one call to a file of the process's own, so that a kill -9 costs the last line at most. What is
written before an act has a time before the act; what is written after it, one after: a *span*, the time from a grant to
the last moment at which the lease was seen held, is so never longer than what the client could have believed.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from dibs.clock import boot_now


class Event(NamedTuple):
    """Something that happened to an ask, or to the lease that it became.

    ``what`` is one of

    * asked: for ``names``, waiting ``limit`` seconds at most;
    * granted: ``mode`` is one, permits, reader or writer; ``names`` has token and slot of each; ``take`` permits;
    * refused: not now; failed: with ``error``; cancelled: nobody waits for the answer any more;
    * held: it was seen held; lost: it was seen not to be held any more;
    * ended: given back, given away or forgotten;
    * wrote, stale: the resource took what was written under it, or refused it;
    * broken: the client itself saw that a promise was broken, as ``text`` says.
    """

    at: float
    what: str
    #: Process and number of the ask.
    who: str
    facts: dict[str, Any]

    @property
    def pid(self) -> int:
        return int(self.who.partition(".")[0])

    def __str__(self) -> str:
        told = " ".join(f"{key}={value}" for key, value in self.facts.items())
        return f"{self.at:.4f} {self.who:>12} {self.what:<9} {told}"


class Recorder:
    """Writes the history of this process."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / f"{os.getpid()}.history", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._numbers = itertools.count(1)

    def who(self) -> str:
        """A name for a new ask."""
        return f"{os.getpid()}.{next(self._numbers)}"

    def tell(self, what: str, who: str, at: float | None = None, **facts: Any) -> None:
        """Write an event; ``at`` for one that was begun before."""
        line = json.dumps([boot_now() if at is None else at, what, who, facts])
        os.write(self._fd, line.encode() + b"\n")


def read(folder: Path, files: str = "*.history") -> list[Event]:
    """All that was written, in the order of time."""
    events = []
    for path in folder.glob(files):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last one may be torn
                at, what, who, facts = json.loads(line)
                events.append(Event(at, what, who, facts))
    events.sort(key=lambda event: event.at)
    return events
