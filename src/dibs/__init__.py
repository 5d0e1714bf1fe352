"""dibs: who gets to do this? Locks and leases, kept in the database you already have.

>>> import dibs
>>> client = dibs.connect("memory://")
>>> with client.lock("digest/42") as lease:
...     print(lease.fencing_token)
1
>>> client.close()
"""

from __future__ import annotations

from dibs._version import __version__

# Type checkers take this for true. `typing` has it, too, but takes 3 ms to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from dibs import columns as columns
    from dibs import fencing as fencing
    from dibs import rows as rows
    from dibs import testing as testing
    from dibs.advice import Advice, QueueStats
    from dibs.aio import (
        AsyncBatch,
        AsyncClaims,
        AsyncClient,
        AsyncElection,
        AsyncItem,
        AsyncJob,
        AsyncJobBatch,
        AsyncLease,
        AsyncLock,
        AsyncMultiLease,
        AsyncMultiLock,
        AsyncOnce,
        AsyncOnceRun,
        AsyncQueue,
        AsyncRWLock,
        AsyncSemaphore,
        AsyncTerm,
    )
    from dibs.batch import Item
    from dibs.campaign import Leader
    from dibs.claims import Batch, Claims
    from dibs.client import Client
    from dibs.connecting import connect, connect_async
    from dibs.desk import LeaseRecord
    from dibs.election import Election, Term
    from dibs.errors import (
        DibsError,
        InvalidName,
        InvalidOption,
        JobExists,
        JobFailed,
        LeaseLost,
        LimitMismatch,
        LockOrderWarning,
        LockTimeout,
        NotHeld,
        ResultNotKept,
        SetupRequired,
        StoreUnavailable,
        Unsupported,
        WouldDeadlock,
    )
    from dibs.history import HistoryRecord
    from dibs.lease import Lease
    from dibs.lockable import Lock
    from dibs.multilock import MultiLease, MultiLock
    from dibs.new_jobs import NewJob
    from dibs.once import Once, OnceRun
    from dibs.once_record import OnceRecord
    from dibs.pausing import Pause
    from dibs.queue import Job, JobBatch, Queue
    from dibs.queue_records import JobRecord, QueueDepth
    from dibs.rwlock import RWLock
    from dibs.semaphore import Semaphore
    from dibs.store import Capabilities
    from dibs.tries import DeadItem

__all__ = [
    "Advice",
    "AsyncBatch",
    "AsyncClaims",
    "AsyncClient",
    "AsyncElection",
    "AsyncItem",
    "AsyncJob",
    "AsyncJobBatch",
    "AsyncLease",
    "AsyncLock",
    "AsyncMultiLease",
    "AsyncMultiLock",
    "AsyncOnce",
    "AsyncOnceRun",
    "AsyncQueue",
    "AsyncRWLock",
    "AsyncSemaphore",
    "AsyncTerm",
    "Batch",
    "Capabilities",
    "Claims",
    "DeadItem",
    "Client",
    "DibsError",
    "Election",
    "HistoryRecord",
    "InvalidName",
    "InvalidOption",
    "Item",
    "Job",
    "JobBatch",
    "JobExists",
    "JobFailed",
    "JobRecord",
    "Leader",
    "Lease",
    "LeaseLost",
    "LeaseRecord",
    "LimitMismatch",
    "Lock",
    "LockOrderWarning",
    "LockTimeout",
    "MultiLease",
    "MultiLock",
    "NewJob",
    "NotHeld",
    "Once",
    "OnceRecord",
    "OnceRun",
    "Pause",
    "Queue",
    "QueueDepth",
    "QueueStats",
    "RWLock",
    "ResultNotKept",
    "Semaphore",
    "SetupRequired",
    "StoreUnavailable",
    "Term",
    "Unsupported",
    "WouldDeadlock",
    "__version__",
    "connect",
    "connect_async",
]

_LAZY = {
    "Advice": "dibs.advice",
    "AsyncBatch": "dibs.aio",
    "AsyncClaims": "dibs.aio",
    "AsyncClient": "dibs.aio",
    "AsyncElection": "dibs.aio",
    "AsyncItem": "dibs.aio",
    "AsyncJob": "dibs.aio",
    "AsyncJobBatch": "dibs.aio",
    "AsyncLease": "dibs.aio",
    "AsyncLock": "dibs.aio",
    "AsyncMultiLease": "dibs.aio",
    "AsyncMultiLock": "dibs.aio",
    "AsyncOnce": "dibs.aio",
    "AsyncOnceRun": "dibs.aio",
    "AsyncQueue": "dibs.aio",
    "AsyncRWLock": "dibs.aio",
    "AsyncSemaphore": "dibs.aio",
    "AsyncTerm": "dibs.aio",
    "Batch": "dibs.claims",
    "Capabilities": "dibs.store",
    "Claims": "dibs.claims",
    "Client": "dibs.client",
    "DeadItem": "dibs.tries",
    "DibsError": "dibs.errors",
    "Election": "dibs.election",
    "HistoryRecord": "dibs.history",
    "InvalidName": "dibs.errors",
    "InvalidOption": "dibs.errors",
    "Item": "dibs.batch",
    "Job": "dibs.queue",
    "JobBatch": "dibs.queue",
    "JobExists": "dibs.errors",
    "JobFailed": "dibs.errors",
    "JobRecord": "dibs.queue_records",
    "Leader": "dibs.campaign",
    "Lease": "dibs.lease",
    "LeaseLost": "dibs.errors",
    "LeaseRecord": "dibs.desk",
    "LimitMismatch": "dibs.errors",
    "Lock": "dibs.lockable",
    "LockOrderWarning": "dibs.errors",
    "LockTimeout": "dibs.errors",
    "MultiLease": "dibs.multilock",
    "MultiLock": "dibs.multilock",
    "NewJob": "dibs.new_jobs",
    "NotHeld": "dibs.errors",
    "Once": "dibs.once",
    "OnceRecord": "dibs.once_record",
    "OnceRun": "dibs.once",
    "Pause": "dibs.pausing",
    "Queue": "dibs.queue",
    "QueueDepth": "dibs.queue_records",
    "QueueStats": "dibs.advice",
    "RWLock": "dibs.rwlock",
    "ResultNotKept": "dibs.errors",
    "Semaphore": "dibs.semaphore",
    "SetupRequired": "dibs.errors",
    "StoreUnavailable": "dibs.errors",
    "Term": "dibs.election",
    "Unsupported": "dibs.errors",
    "WouldDeadlock": "dibs.errors",
    "connect": "dibs.connecting",
    "connect_async": "dibs.connecting",
}
# Modules with functions of their own, as they are written in the reference: `dibs.fencing.advance`.
_MODULES = ("columns", "fencing", "rows", "testing")


if not TYPE_CHECKING:  # a type checker would take every misspelt name for Any

    def __getattr__(name):
        # What is here is loaded when somebody names it: `import dibs` must be cheap, and asyncio is not; and the
        # command line has its say on Ctrl-C before any of it (`dibs.__main__`).
        module = _LAZY.get(name)
        if module is None and name not in _MODULES:
            raise AttributeError(f"module 'dibs' has no attribute {name!r}")
        from importlib import import_module

        if module is None:
            return import_module(f"dibs.{name}")
        return getattr(import_module(module), name)


def __dir__() -> list[str]:
    # What is not loaded yet is there all the same, for whoever presses Tab.
    return sorted({*globals(), *_LAZY, *_MODULES})
