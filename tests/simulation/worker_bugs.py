"""Planted bugs in workers of jobs, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

import dibs.aio.workers
from dibs.crew import Crew
from tests.simulation.bugs import Bug, Edit

_WORKERS = ("workers",)

WORKER_BUGS = (
    Bug(
        "a worker that is spared while others are at work",
        ("P12",),
        280,
        (Edit(Crew, "room", "if waiting > quick // 2:", "if waiting > quick // 2 or self._running:"),),
    ),
    Bug(
        "a crew that goes on being alone when what was to be worked alone is lost",
        ("liveness",),
        645,
        (Edit(Crew, "_begin", "self._see_if_alone()", "pass"),),
    ),
    Bug(
        "one more at a time than there are workers",
        _WORKERS,
        20,
        (Edit(Crew, "_begin", "len(self._running) >= limit", "len(self._running) > limit"),),
    ),
    Bug(
        "a task that is cancelled before it begins, and its job kept",
        ("P7", *_WORKERS),
        900,
        (Edit(dibs.aio.workers, "run_in_tasks", "if task.cancelled():", "if False:"),),
    ),
    Bug(
        "counted as done before the store has said so",
        _WORKERS,
        20,
        (Edit(Crew, "_told", "if ask.error is None and not gone:", "if True:"),),
    ),
    Bug(
        "an end that forgets what is running still",
        ("P7", *_WORKERS),
        375,
        (Edit(Crew, "abandon", "self._send_back(jobs, lost=True)", "pass"),),
    ),
)
