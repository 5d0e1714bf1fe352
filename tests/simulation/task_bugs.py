"""Planted bugs in what is for tasks, as in ``bugs``: each must be caught breaking its promise."""

from __future__ import annotations

import dibs.aio.lockable
import dibs.multilock
from dibs.aio.block import Block
from dibs.aio.election import AsyncElection
from dibs.aio.lockable import AsyncLockable
from dibs.aio.once import AsyncOnceRun
from dibs.aio.rwlock import AsyncRWLock
from dibs.aio.tasks import Begun, _Letter, _Mailbox
from dibs.multilock import MultiCore, _Part
from dibs.pending import Pending
from tests.simulation.bugs import Bug, Edit, Value

_ASYNCIO = ("asyncio",)

TASK_BUGS = (
    Bug(
        "a cancellation that wakes nobody",
        ("liveness", *_ASYNCIO),
        50,
        (Edit(_Letter, "cancel", "self._loop.call_soon(self.open)", "pass"),),
    ),
    Bug(
        "a cancellation that is taken for an answer",
        ("P9", *_ASYNCIO),
        25,
        (Edit(_Letter, "result", "if self._cancelled is not None:", "if False:"),),
    ),
    Bug(
        "a loop that is woken for the first answer only",
        ("liveness", "P7"),
        20,
        (Edit(_Mailbox, "_deliver", "left = len(letters)\n", "left = len(letters)\n    self._called = bool(left)\n"),),
    ),
    Bug(
        "a request that nobody sends while the loop runs",
        ("liveness", "P7"),
        20,
        (Edit(dibs.aio.lockable, "take", "session.lane.start()", "pass"),),
    ),
    Bug(
        "a call for a part of the tasks that forgets the others",
        ("liveness", "P7"),
        30,
        (Edit(Pending, "divided", "batch[share:] + rest", "rest"),),
    ),
    Bug(
        "a block that goes on without its lease",
        _ASYNCIO,
        50,
        (Edit(Block, "_cancel", 'task.cancel("the dibs lease of this block was lost")', "pass"),),
    ),
    Bug(
        "a loss that ends as a cancellation",
        _ASYNCIO,
        20,
        (Edit(Block, "end", "by_loss = self.cancelled and", "by_loss = False and"),),
    ),
    Bug(
        "a cancellation that ends as a loss",
        _ASYNCIO,
        1200,
        (Edit(Block, "end", "task.uncancel() == 0 and by_loss", "(task.uncancel(), True)[1]"),),
    ),
    Bug(
        "a release that is not begun before it is awaited",
        _ASYNCIO,
        80,
        (Edit(Begun, "__init__", "session.lane.start()", "pass"),),
    ),
    Bug(
        "the end of a block that leaves the lease",
        _ASYNCIO,
        20,
        (Edit(AsyncLockable, "__aexit__", "await take(lease._releasing())", "pass"),),
    ),
)

PERMIT_TASK_BUGS = (
    Bug(
        "a downgrade that changes nothing",
        ("P15",),
        20,
        (Edit(AsyncRWLock, "downgrade", "await take(self._core.downgrade(owner()))", "pass"),),
    ),
)
MULTI_TASK_BUGS = (
    Bug(
        "waiters who go from the end of one line to the end of the next, all in step",
        ("liveness",),
        960,
        (
            Edit(_Part, "keep_place", "self._ask.request.ticket or self._ticket", "None"),
            Edit(MultiCore, "acquire", "if parts:", "if False:"),
            Value(dibs.multilock, "ASKS_MAX", 0),
        ),
    ),
    Bug(
        "a block that goes on without one of its names",
        _ASYNCIO,
        85,
        (Edit(Block, "__init__", "for hold in self.holds:", "for hold in self.holds[1:]:"),),
    ),
)
ONCE_TASK_BUGS = (
    Bug(
        "a work that is done however its task ends",
        ("once",),
        20,
        (Edit(AsyncOnceRun, "__aexit__", "exc_type is not None)", "False)"),),
    ),
    Bug(
        "a work that goes on without its lease",
        _ASYNCIO,
        175,
        (Edit(AsyncOnceRun, "_enter", "self._block = Block(self._lease, me)", "pass"),),
    ),
)
ELECTION_TASK_BUGS = (
    Bug(
        "a loss that a run tells nobody",
        ("elections",),
        40,
        (Edit(AsyncElection, "run", "done = on_lost(term)", "done = None"),),
    ),
    Bug(
        "an end that a run tells as a loss",
        ("elections",),
        20,
        (Edit(AsyncElection, "run", "term.lost.is_set()", "True"),),
    ),
    Bug(
        "a leader that goes on without its term",
        _ASYNCIO,
        175,
        (Edit(AsyncLockable, "_enter", "self._blocks.append(Block(lease, me))", "pass"),),
    ),
)
