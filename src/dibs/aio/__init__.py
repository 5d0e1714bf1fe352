"""The face for asyncio: the verbs of ``dibs.client``, awaited. The only package that knows asyncio.

Nothing here waits for the store: a task's request goes to the lane's thread, and whatever was answered since the last
time wakes the event loop once (``dibs.aio.tasks``). A task is the owner of what it acquires. Cancelling a task anywhere
withdraws its request, and a grant that arrives too late is given back.
"""

from __future__ import annotations

from dibs.aio.claims import AsyncBatch, AsyncClaims, AsyncItem
from dibs.aio.client import AsyncClient
from dibs.aio.election import AsyncElection, AsyncLead, AsyncLeaders, AsyncTerm
from dibs.aio.lease import AsyncLease, AsyncLost
from dibs.aio.lockable import AsyncLock, AsyncLockable
from dibs.aio.multilock import AsyncMultiLease, AsyncMultiLock
from dibs.aio.once import AsyncOnce, AsyncOnceRun
from dibs.aio.queue import AsyncJob, AsyncJobBatch, AsyncQueue
from dibs.aio.rwlock import AsyncRWLock
from dibs.aio.semaphore import AsyncSemaphore

__all__ = [
    "AsyncBatch",
    "AsyncClaims",
    "AsyncClient",
    "AsyncElection",
    "AsyncItem",
    "AsyncJob",
    "AsyncJobBatch",
    "AsyncLead",
    "AsyncLeaders",
    "AsyncLease",
    "AsyncLock",
    "AsyncLockable",
    "AsyncLost",
    "AsyncMultiLease",
    "AsyncMultiLock",
    "AsyncOnce",
    "AsyncOnceRun",
    "AsyncQueue",
    "AsyncRWLock",
    "AsyncSemaphore",
    "AsyncTerm",
]
