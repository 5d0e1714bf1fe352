"""Planted bugs in queues, as in ``bugs``: each must be caught breaking one of these promises."""

from __future__ import annotations

import dibs.job
import dibs.queue_core
from dibs.aio.queue import AsyncJobBatch, AsyncQueue
from dibs.job import JobFacts
from dibs.job_batch import JobBatchFacts
from dibs.job_hold import EndAsk, JobHold
from dibs.queue import Queue
from dibs.queue_core import QueueCore
from dibs.renewer import Renewer
from dibs.stores.memory_jobs import MemoryJobs
from dibs.taking import TakeAsk
from dibs.waiting import Waiting
from tests.simulation.bugs import Bug, Edit

_TWO_WORKERS = ("P1", "P5")

JOB_BUGS = (
    Bug(
        "an extension for less time that is the last",
        ("renewal",),
        940,
        (Edit(Renewer, "track", "if terms.renew and hold.trusted_until - trust_s > t0 + ROUNDING_S:", "if False:"),),
    ),
    Bug(
        "hints lost, and takers that do not poll",
        ("P12",),
        430,
        (Edit(Waiting, "fall_asleep", "pause = POLL_MIN_S +", "pause = 4.0 * (ask.kind == JOBS) + POLL_MIN_S +"),),
    ),
    Bug(
        "takers that do not listen",
        ("P12",),
        960,
        (Edit(Waiting, "_names", "self._asleep.values()}", "self._asleep.values() if ask.kind != JOBS}"),),
    ),
    Bug(
        "a wait for the end of a job that knows of no time limit",
        ("P11",),
        2500,
        (Edit(QueueCore, "waiting_for", "session.time_left(until)", "None"),),
    ),
    Bug(
        "a job ended by any token",
        ("P18",),
        57,
        (
            Edit(
                MemoryJobs,
                "_claimed",
                "(job.name, job.fencing_token) != (request.name, request.fencing_token)",
                "job.name != request.name",
            ),
        ),
    ),
    Bug(
        "an end accepted of a claim that has expired",
        ("P18",),
        30,
        (Edit(MemoryJobs, "_claimed", "if job.state(now) == CLAIMED:", "if job.claim_id and not job.ended:"),),
    ),
    Bug(
        "a take's trust counted from its reply",
        _TWO_WORKERS,
        325,
        (Edit(TakeAsk, "_claimed", "self.owner, t0)", "self.owner, now)"),),
    ),
    Bug("a token not raised", ("P2",), 20, (Edit(MemoryJobs, "_take", "default=0) + 1", "default=1)"),)),
    Bug("tries not counted", ("P19",), 20, (Edit(MemoryJobs, "_take", "job.tries += 1", "job.tries += 0"),)),
    Bug("a repeated put put twice", ("P17",), 35, (Edit(MemoryJobs, "_put", "if put:", "if False:"),)),
    Bug(
        "a lost answer to an end taken for a loss",
        ("P18",),
        63,
        (Edit(EndAsk, "received", "if repeated and", "if False and"),),
    ),
    Bug(
        "an end whose claim was over taken for a success",
        ("P18",),
        135,
        (Edit(EndAsk, "received", "self._session.clock.now() < self._trusted_until", "True"),),
    ),
    Bug(
        "an end of which nothing is known taken for a success the second time",
        ("P18",),
        430,
        (Edit(JobFacts, "_ending", "first or self._hold.ends.get(self.id)", "first"),),
    ),
    Bug(
        "an end whose error is not looked at",
        ("P18",),
        106,
        (Edit(dibs.job, "sending", "if ask.error is not None:", "if False:"),),
    ),
    Bug("dropped jobs renewed for ever", ("P7",), 55, (Edit(dibs.job, "quietly", "hold.orphan = True", "pass"),)),
    Bug(
        "the trust of a renewal of jobs counted from its reply",
        _TWO_WORKERS,
        800,
        (Edit(Renewer, "_extend", "local_deadline(t0, ttl", "local_deadline(now, ttl"),),
    ),
    Bug(
        "a repeated take that does not extend its claim",
        _TWO_WORKERS,
        180,
        (Edit(MemoryJobs, "_take", "max(job.expires_at or now, now + request.ttl)", "job.expires_at or now"),),
    ),
    Bug(
        "the limit of a group ignored", ("groups",), 20, (Edit(MemoryJobs, "_has_its_turn", "not group_limit", "True"),)
    ),
    Bug(
        "a take that does not tell the limit of groups",
        ("groups",),
        20,
        (Edit(dibs.queue_core, "wish_for_jobs", "session.holder, group_limit", "session.holder, 0"),),
    ),
    Bug(
        "a job that waits for its next try overtaken in its group",
        ("groups",),
        33,
        (
            Edit(
                MemoryJobs,
                "_has_its_turn",
                "other.id < job.id",
                "other.id < job.id and bool(other.claim_id or not other.tries)",
            ),
        ),
    ),
    Bug(
        "a cancelled job handed out again",
        ("P17",),
        40,
        (Edit(MemoryJobs, "cancel", "self._end(job, CANCELLED, now, keep)", "job.claim_id = None"),),
    ),
    Bug(
        "an end accepted of a job that was cancelled",
        ("P18",),
        145,
        (Edit(MemoryJobs, "_claimed", "if job.state(now) == CLAIMED:", "if job.state(now) in (CLAIMED, CANCELLED):"),),
    ),
    Bug(
        "a cancelled job renewed on",
        ("P18",),
        375,
        (Edit(JobHold, "renewed_by", "for job in outcome.gone:", "for job in ():"),),
    ),
    Bug(
        "a refused end taken for a success",
        ("P18",),
        65,
        (Edit(EndAsk, "received", "self._hold.lost.update(gone)", "pass"),),
    ),
    Bug(
        "an interrupted take that leaves its jobs",
        ("P9",),
        145,
        (
            Edit(
                QueueCore,
                "taking",
                "except BaseException:\n        session.withdraw(ask)",
                "except BaseException:\n        pass",
            ),
        ),
    ),
    Bug(
        "an interrupted block that leaves its jobs",
        ("P9",),
        185,
        (Edit(JobBatchFacts, "_closing", "self._held()", "self._held() if isinstance(error, Exception) else []"),),
    ),
    Bug(
        "a stream that stops without finishing the job at hand",
        ("P18",),
        440,
        (Edit(Queue, "_stream", "batch._move_past()", "pass"),),
    ),
    Bug(
        "a stream that is closed and keeps its jobs",
        ("P9",),
        290,
        (Edit(Queue, "_stream", ".end(batch._closing(left_in_the_middle(error)), type(error))", ""),),
    ),
)
#: Only a Ctrl-C between two instructions brings these to light.
JOB_SIGNAL_BUGS = (
    Bug(
        "an end of jobs that is decided and not sent",
        ("P9", "liveness"),
        425,
        (Edit(dibs.job, "finish", "if ask is not None and hold.ends.get(mine[0]) is ask:", "if False:"),),
    ),
)
JOB_TASK_BUGS = (
    Bug(
        "a stream of jobs for tasks that is closed and keeps them",
        ("P9",),
        150,
        (
            Edit(
                AsyncQueue,
                "_stream",
                "await end(self._core.desk.session(), batch._closing(left_in_the_middle(error)), type(error), me)",
                "pass",
            ),
        ),
    ),
    Bug(
        "a block of jobs for tasks that keeps them when it is cancelled",
        ("P9",),
        515,
        (
            Edit(
                AsyncJobBatch,
                "__aexit__",
                "if self._claim is not None:",
                "if kind is None and self._claim is not None:",
            ),
        ),
    ),
)
