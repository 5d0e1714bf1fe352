"""The suite every store must pass, public and without a test framework: ``check_store``.

Cases on the contract run on the store itself; cases on what users see run through both faces of a client, for threads
and for tasks, from one table. A case for something that the store does not declare is left out, except where leaving
it out would hide that it works after all.
"""

from __future__ import annotations

import asyncio

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.connecting import locate
from dibs.store import StoreAddress
from dibs.testing import (
    adopt_cases,
    claims_cases,
    client_cases,
    client_view_cases,
    deadlock_cases,
    election_cases,
    history_cases,
    job_cases,
    job_order_cases,
    job_promise_cases,
    job_put_cases,
    job_view_cases,
    lease_cases,
    line_cases,
    multilock_cases,
    observe_cases,
    once_cases,
    pause_cases,
    pool_cases,
    queue_batch_cases,
    queue_cases,
    queue_waiting_cases,
    rwlock_cases,
    semaphore_cases,
    standby_cases,
    store_cases,
    store_end_cases,
    store_vector_cases,
    store_view_cases,
    transfer_cases,
    tries_cases,
    worker_cases,
)
from dibs.testing.case import CLIENT_CASES, STORE_CASES, Bench
from dibs.testing.faces import FACES, Place, in_leases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dibs.testing.case import Case

# Imported for the cases they put into the tables.
_MODULES = (
    store_cases,
    store_end_cases,
    store_vector_cases,
    store_view_cases,
    line_cases,
    client_cases,
    lease_cases,
    client_view_cases,
    multilock_cases,
    election_cases,
    standby_cases,
    once_cases,
    pool_cases,
    semaphore_cases,
    rwlock_cases,
    deadlock_cases,
    pause_cases,
    history_cases,
    claims_cases,
    tries_cases,
    job_cases,
    job_order_cases,
    job_view_cases,
    job_promise_cases,
    job_put_cases,
    queue_cases,
    queue_batch_cases,
    queue_waiting_cases,
    worker_cases,
    transfer_cases,
    adopt_cases,
    observe_cases,
)


class Run(NamedTuple):
    """A case on one face: "store", "threads" or "tasks"."""

    face: str
    case: Case

    def on(self, address: StoreAddress, claims: Callable[..., Any] = in_leases) -> bool:
        """Run it; False when the store does not promise it. AssertionError names case, promise and what was seen.

        claims: makes a client's claims on the items of a source, with the options of ``client.claims``, in the cases
        that hold ``anywhere``.
        """
        if not __debug__:
            raise RuntimeError(
                "the conformance suite checks with assert, which this Python leaves out: run it without -O and "
                "without PYTHONOPTIMIZE"
            )
        try:
            if not self.case.promised(address.capabilities):
                return False
            if self.face == "store":
                bench = Bench(address)
                try:
                    self.case.run(bench)
                finally:
                    bench.close()
            else:
                asyncio.run(self._through_a_face(Place(address, claims)))
        except Exception as error:
            seen = str(error) if isinstance(error, AssertionError) else repr(error)
            raise AssertionError(
                f"{self.case.name} ({self.face}, on {address.shown}) breaks {self.case.promise}. "
                f"{self.case.sentence} But: {seen}"
            ) from error
        return True

    async def _through_a_face(self, place: Place) -> None:
        face = FACES[self.face](place)
        try:
            await self.case.run(face)
        finally:
            await face.close()


def runs() -> Iterator[Run]:
    """Everything there is to run."""
    for case in STORE_CASES.cases.values():
        yield Run("store", case)
    for face in FACES:
        for case in CLIENT_CASES.cases.values():
            yield Run(face, case)


def check_store(where: str | StoreAddress | Callable[[], StoreAddress], *, only: Collection[str] | None = None) -> int:
    """Run the conformance suite against a store; return how many cases were run.

    where: a URL, a ``StoreAddress``, or a function that returns one. The store may be in use and keeps everything in
    it. only: names of cases; by default all that the store's ``capabilities`` promise.

    Raises AssertionError for the first case that fails: it names the case, the promise, and what was seen; RuntimeError
    where ``python -O`` left the assertions out. Needs some minutes, and must not be called from a coroutine.
    (``dibs.testing.conformance.runs()`` gives the cases one by one, for a test framework: ``run.on(address)``.)
    """
    if isinstance(where, str):
        address, _ = locate(where)
    elif isinstance(where, StoreAddress):
        address = where
    else:
        address = where()
    known = {run.case.name for run in runs()}
    unknown = set(only or ()) - known
    if unknown:
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}")
    count = 0
    for run in runs():
        if (only is None or run.case.name in only) and run.on(address):
            count += 1
    return count
