"""dibs: who gets to do this? Locks and leases, kept in the database you already have.

>>> import dibs
>>> client = dibs.connect("memory://")
>>> with client.lock("digest/42") as lease:
...     print(lease.fencing_token)
1
>>> client.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dibs._version import __version__
from dibs.connecting import connect, connect_async
from dibs.errors import (
    DibsError,
    InvalidName,
    InvalidOption,
    LeaseLost,
    LimitMismatch,
    LockTimeout,
    NotHeld,
    SetupRequired,
    StoreUnavailable,
    Unsupported,
    WouldDeadlock,
)

if TYPE_CHECKING:
    from dibs.aio import AsyncClient, AsyncLease, AsyncLock, AsyncMultiLease, AsyncMultiLock
    from dibs.client import Client, Lock, MultiLease, MultiLock
    from dibs.desk import LeaseRecord
    from dibs.lease import Lease
    from dibs.store import Capabilities

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncLock",
    "AsyncMultiLease",
    "AsyncMultiLock",
    "Capabilities",
    "Client",
    "DibsError",
    "InvalidName",
    "InvalidOption",
    "Lease",
    "LeaseLost",
    "LeaseRecord",
    "LimitMismatch",
    "Lock",
    "LockTimeout",
    "MultiLease",
    "MultiLock",
    "NotHeld",
    "SetupRequired",
    "StoreUnavailable",
    "Unsupported",
    "WouldDeadlock",
    "__version__",
    "connect",
    "connect_async",
]

_LAZY = {
    "AsyncClient": "dibs.aio",
    "AsyncLease": "dibs.aio",
    "AsyncLock": "dibs.aio",
    "AsyncMultiLease": "dibs.aio",
    "AsyncMultiLock": "dibs.aio",
    "Capabilities": "dibs.store",
    "Client": "dibs.client",
    "Lease": "dibs.lease",
    "LeaseRecord": "dibs.desk",
    "Lock": "dibs.client",
    "MultiLease": "dibs.client",
    "MultiLock": "dibs.client",
}


def __getattr__(name: str) -> Any:
    # Classes are loaded when somebody names them: `import dibs` must be cheap, and asyncio is not.
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'dibs' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
