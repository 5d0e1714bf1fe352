"""Queues and their jobs as people see them: what the store tells, in the words of users."""

from __future__ import annotations

import json

from dibs._typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime

    from dibs.jobs import Depth, StoredJob

# Whoever shows a value is some calls further down than whoever reads it, and puts it into something else. So a value is
# shown as such only when it could be nested this much deeper.
SHOWN_DEEPER = 50


class JobRecord(NamedTuple):
    """A job as the store shows it to anybody who may read it.

    ``state`` is ready, later, claimed, done, dead or cancelled. ``payload`` is what was put; ``error`` the last error,
    ``result`` what a done one was done with. ``holder`` and ``expires_at`` are of its last claim, ``ended_at`` of a job
    that has ended. Times are by the store's clock.
    """

    id: int
    state: str
    payload: Any
    priority: int
    tries: int
    max_tries: int | None
    crashes: int
    fencing_token: int
    created_at: datetime
    due_at: datetime
    key: str | None
    group: str | None
    holder: str | None
    expires_at: datetime | None
    error: str | None
    result: Any
    ended_at: datetime | None


class QueueDepth(NamedTuple):
    """How many jobs are ready, due later, claimed and dead; for how many seconds the oldest has been ready."""

    queue: str
    ready: int
    later: int
    claimed: int
    dead: int
    oldest_s: float


def queue_key(namespace: str, name: str) -> str:
    """What the store knows a queue by: no name of a lock can be like it ('~' is in no namespace)."""
    return f"{namespace}~queue:{name}"


def queue_name(key: str) -> str:
    """The name of a queue as users know it."""
    return key.partition("~queue:")[2]


def shown_depth(depth: Depth) -> QueueDepth:
    """As users know it."""
    return QueueDepth(queue_name(depth.name), *depth[1:])


def shown_job(job: StoredJob) -> JobRecord:
    """As users know it."""
    from datetime import datetime, timezone

    def at(seconds: float | None) -> Any:
        return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)

    return JobRecord(
        job.id,
        job.state,
        shown_payload(job.payload),
        job.priority,
        job.tries,
        job.max_tries or None,
        job.crashes,
        job.fencing_token,
        at(job.created_at),
        at(job.due_at),
        job.key,
        job.group,
        job.holder,
        at(job.expires_at),
        job.error,
        None if job.result is None else shown_payload(job.result),
        at(job.ended_at),
    )


def shown_payload(payload: str | bytes) -> Any:
    """The payload as it was given; the text of it where that is no JSON, or is nested too deeply to be read here."""
    if not isinstance(payload, str):
        return payload
    try:
        value = json.loads("[" * SHOWN_DEEPER + payload + "]" * SHOWN_DEEPER)
        for _ in range(SHOWN_DEEPER):
            (value,) = value
    except (ValueError, TypeError, RecursionError):  # put by somebody else, or further up
        return payload
    return value
