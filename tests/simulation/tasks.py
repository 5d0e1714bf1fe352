"""Worlds of asyncio: threads with an event loop, whose tasks take locks and are cancelled.

Everything is checked that is checked of locks, and besides what is promised to tasks: a cancellation ends what it
reaches, and leaves nothing held; a block whose lease is lost is cancelled, and ends with LeaseLost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dibs.aio.lease import AsyncLease
from dibs.aio.lockable import AsyncLock
from dibs.aio.tasks import owner
from dibs.errors import InvalidOption, LeaseLost, LockTimeout, NotHeld, StoreUnavailable
from dibs.hold import HELD, LOST, RELEASED
from dibs.lock import LockCore
from tests.simulation.loop import SimLoop
from tests.simulation.programs import NAMES, TTLS_S, Program
from tests.simulation.several import SeveralChecker

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.hold import Hold
    from dibs.terms import Terms
    from tests.simulation.programs import Habits, Host
    from tests.simulation.remembered import Tenure

TASKS_MAX = 3
# Before 3.11 nobody knows of two cancellations, that by a loss and another, that they were two.
UNCANCEL = hasattr(asyncio.Task, "uncancel")


class SimAsyncLease(AsyncLease):
    """The shipped lease for tasks; the checker hears when it is made."""

    __slots__ = ()

    def __init__(self, session: Any, hold: Hold, name: str) -> None:
        super().__init__(session, hold, name)
        session.checker.made(hold)


class Failed(Exception):
    """What a block may be left by."""


class TaskMember:
    """One task of a thread, which takes locks."""

    #: What an acquire may raise.
    CANNOT: tuple[type[Exception], ...] = (StoreUnavailable,)

    def __init__(self, program: TaskProgram, number: int) -> None:
        self.program = program
        self.host = program.host
        self.world = program.world
        self.process = program.process
        self.checker = program.checker
        self.habits = program.habits
        self.name = f"{program.name}.{number}"
        self._cancelled = False
        self._cancelled_at = 0.0

    def note(self, text: str, *args: object) -> None:
        self.world.note(self.process.name, f"{self.name} {text}", *args)

    async def run(self) -> None:
        """Some rounds, of which some are cancelled."""
        rand = self.world.random
        for _ in range(1 + int(rand() * self.habits.rounds)):
            if self.host.session.closed:
                break
            task = asyncio.current_task()
            assert task is not None
            self._cancelled = False
            timer = None
            if rand() < self.habits.interrupt:
                timer = asyncio.get_running_loop().call_later(2.0 * rand() ** 2, self._cancel, task)
            try:
                await self._round()
                if self._cancelled and UNCANCEL:
                    self.world.broken(f"asyncio: {self.name} was cancelled, and goes on")
            except asyncio.CancelledError:
                if not self._cancelled:
                    self.world.broken(f"asyncio: {self.name} is cancelled, and nobody asked for that")
                self.note("is cancelled")
                if UNCANCEL and task.uncancel():  # type: ignore[attr-defined, unused-ignore]
                    self.world.broken(f"asyncio: {self.name} has one cancellation left")
            finally:
                if timer is not None:
                    timer.cancel()
            await asyncio.sleep(rand() * rand())

    def _cancel_by(self, moment: float) -> asyncio.TimerHandle:
        """Cancel this task at about that time of its process's clock, which is the end of a trust."""
        left_s = moment - self.process.clock.boot() + 0.004 * self.world.random() ** 2
        task = asyncio.current_task()
        assert task is not None
        return asyncio.get_running_loop().call_later(left_s, self._cancel, task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        if self._cancelled:
            return
        self.note("is to be cancelled")
        self._cancelled = True
        self._cancelled_at = self.world.now
        task.cancel()

    def _look_how_late(self, error: BaseException) -> None:
        """This ends what the task was at. (A block that is left for it waits for the answer to its release.)"""
        if not (self._cancelled and isinstance(error, asyncio.CancelledError)):
            return
        late_s = self.world.now - self._cancelled_at
        if self.checker.prompt and late_s > self.checker.slack_s and self.process.troubled_at < self._cancelled_at:
            self.world.broken(f"asyncio: {self.name} goes on for {late_s:.3f} s after it was cancelled")

    async def _round(self) -> None:
        habits, rand = self.habits, self.world.random
        timeout = self._timeout()
        told: list[float] = []
        name = NAMES[int(rand() * habits.names)]
        in_block = rand() < 0.6
        if in_block and rand() < 0.5:
            lock = self._shared_lock(name)
        else:
            lock = self._lock(name, self._terms(lambda: told.append(self.world.now)))
        self.note("wants %s, waits %s", name, timeout)

        def had(lease: Any) -> list[Tenure]:
            min_hold = lease._hold.terms.min_hold
            return [self.checker.acquired(owner(), self.host.session, lease._hold, min_hold, told)]

        await self._take(lock, timeout, in_block, had)

    def _timeout(self) -> float | None:
        rand = self.world.random
        chance = rand()
        return None if chance < self.habits.patience else 0.0 if chance < 0.8 else 3.0 * rand()

    async def _take(self, lock: Any, timeout: float | None, in_block: bool, had: Callable[[Any], list[Tenure]]) -> None:
        """Take it, and use it; ``had`` tells the checker."""
        lease = await self._acquire(lock, timeout, in_block)
        if lease is None:
            return
        tenures = had(lease)
        self.note("holds %s", _claims(tenures))
        try:
            if in_block:
                await self._in_block(lock, lease, tenures)
            else:
                await self._use(lock, lease, tenures)
        except StoreUnavailable as error:
            self.note("does not know: %s", str(error))
        except Failed:
            self.note("has failed")
        except (InvalidOption, LeaseLost, NotHeld) as error:
            self.note("is told: %s", str(error))
            if self._cancelled and UNCANCEL:
                self.world.broken(f"asyncio: {self.name} was cancelled, and is told {error}")
        finally:
            for tenure in tenures:
                tenure.dropped = tenure.hold.state == HELD
            del lock, lease

    def _lock(self, name: str, terms: Terms) -> Any:
        """What the task takes."""
        return AsyncLock(LockCore(self.host.desk, name, terms, SimAsyncLease))

    def _shared_lock(self, name: str) -> Any:
        """The same for all tasks of this thread. Its ``on_lost`` does not say whose lease was lost."""
        lock = self.program.locks.get(name)
        if lock is None:

            def on_lost() -> None:
                self.checker.told_lost(on_lost)

            lock = self.program.locks[name] = self._lock(name, self._terms(on_lost))
        return lock

    def _terms(self, on_lost: Callable[[], object]) -> Terms:
        habits, rand = self.habits, self.world.random
        min_hold = 0.5 * rand() if rand() < habits.min_hold else 0.0
        max_hold = max(min_hold, 0.5 + 4.0 * rand()) if rand() < habits.max_hold else None
        ttl, renew = TTLS_S[int(rand() * len(TTLS_S))], rand() < habits.renew
        return self.host.desk.terms(ttl, renew, None, False, min_hold, max_hold, on_lost, "raise", None)

    async def _acquire(self, lock: Any, timeout: float | None, in_block: bool) -> Any:
        if in_block:
            lock._core.terms = lock._core.terms._replace(timeout=timeout)
        return await self._attempt(lock.__aenter__() if in_block else lock.acquire(timeout=timeout), timeout)

    async def _attempt(self, acquiring: Awaitable[Any], timeout: float | None, *, refused: bool = False) -> Any:
        """Await what acquires something, seen by the checker; what came of it, None when it raised.

        ``refused``: it may be turned away while it has time.
        """
        checker, me = self.checker, owner()
        checker.attempt(me, self.process, timeout)
        had = None
        try:
            had = await acquiring
            if had is None:
                checker.refused(me, self.host.session)
                if timeout is None and not refused:
                    self.world.broken("P12 who waits without limit is told that it could not be had in time")
        except LockTimeout as error:
            checker.refused(me, self.host.session)
            if timeout is None and not refused:
                self.world.broken(f"P12 who waits without limit is told {error}")
        except self.CANNOT as error:
            checker.refused(me, self.host.session, error)
            self.note("cannot have it: %s", str(error))
        except asyncio.CancelledError as error:
            self._look_how_late(error)
            raise
        finally:
            if had is None:
                checker.not_acquired(me, self.host.session)
                self.note("goes without")
        return had

    async def _in_block(self, lock: Any, lease: Any, tenures: list[Tenure]) -> None:
        """As in ``async with lock as lease``, which was entered."""

        async def body() -> None:
            await self._change(lock, lease)
            await self._work(lease, tenures)
            if self.world.random() < 0.2:
                raise Failed

        error = await self._error_in(body, min(tenure.hold.trusted_until for tenure in tenures))
        for tenure in tenures:
            self.checker.releasing(tenure)
        try:
            await lock.__aexit__(None if error is None else type(error))
            if error is not None:
                raise error
            for tenure in tenures:
                self.checker.release_returned(tenure, None)
            self.note("has left the block of %s", _claims(tenures))
        finally:
            del error

    async def _error_in(self, body: Callable[[], Awaitable[None]], until: float) -> BaseException | None:
        """What the body of a block raises, which is perhaps cancelled about when it cannot be trusted any more."""
        timer = self._cancel_by(until) if self.world.random() < self.habits.interrupt else None
        try:
            await body()
        except BaseException as raised:
            if self.world.closing:
                raise
            self._look_how_late(raised)
            return raised
        finally:
            if timer is not None:
                timer.cancel()
        return None

    async def _change(self, lock: Any, lease: Any) -> Any:
        """Perhaps make something else of what is held; what it is released by then."""
        return lock

    async def _work(self, lease: Any, tenures: list[Tenure]) -> None:
        rand, habits = self.world.random, self.habits
        for _ in range(int(3 * rand()) + 1):
            await self._be_at_work(tenures)
            if rand() < habits.own_renewal:
                await lease.renew(None if rand() < 0.5 else TTLS_S[int(rand() * len(TTLS_S))])

    async def _be_at_work(self, tenures: list[Tenure]) -> None:
        """For a while, inside a block."""
        since, slack_s = self.world.now, self.checker.slack_s
        await asyncio.sleep(self.habits.work_max_s * self.world.random())
        for tenure in tenures:
            over_at = tenure.over_at
            if over_at is not None and tenure.hold.state == LOST and self.checker.prompt:
                late_s = self.world.now - max(over_at, since)
                if late_s > slack_s and self.process.troubled_at < since and not tenure.stillborn:
                    self.world.broken(f"asyncio: {self.name} is at work {late_s:.3f} s after its loss")

    async def _use(self, lock: Any, lease: Any, tenures: list[Tenure]) -> None:
        rand, habits, checker = self.world.random, self.habits, self.checker
        lock = await self._change(lock, lease)
        await asyncio.sleep(habits.work_max_s * rand())
        if rand() < habits.own_renewal:
            await lease.renew()
        lease.check()
        chance = rand()
        if chance < habits.drop:
            self.note("drops %s", _claims(tenures))
            return
        if chance < habits.drop + habits.sit:
            await lease.lost.wait(3.0 * rand())
        for tenure in tenures:
            checker.releasing(tenure)
        release = lease.release() if rand() < 0.5 else lock.release()
        if rand() < 0.3:
            self.note("releases %s, and waits later", _claims(tenures))
            for tenure in tenures:
                checker.release_begun(tenure)
            await asyncio.sleep(2.0 * rand())
        confirmed = await release
        for tenure in tenures:
            checker.release_returned(tenure, confirmed)
        self.note("has released %s: %s", _claims(tenures), confirmed)


def _claims(tenures: list[Tenure]) -> str:
    return ", ".join(tenure.claim_id for tenure in tenures)


class TaskProgram(Program):
    """One thread of a process, with an event loop and some tasks."""

    #: What its tasks are.
    MEMBER: type[TaskMember] = TaskMember

    checker: TaskChecker

    def __init__(self, host: Host, name: str, habits: Habits) -> None:
        super().__init__(host, name, habits)
        #: Locks that several of its tasks use.
        self.locks: dict[str, Any] = {}
        if self.world.seed % 3 == 1:
            host.session.lane.pending._most = 1  # as if they were a crowd, of which a call serves a part

    def __call__(self) -> None:
        members = 1 + int(TASKS_MAX * self.world.random())
        SimLoop(self.world, self.process).work([self.MEMBER(self, number).run() for number in range(members)])


class TaskChecker(SeveralChecker):
    """What is promised to tasks besides what is promised to threads."""

    def release_begun(self, tenure: Tenure) -> None:
        """A release was called, and is not awaited yet."""
        if self.calm and tenure.hold.state == RELEASED and not tenure.min_hold:
            self.world.at(self.world.now + self.slack_s, self._look_if_free, tenure)

    def _look_if_free(self, tenure: Tenure) -> None:
        if (tenure.key, tenure.claim_id) in self._left_in_store():
            self.world.broken(f"asyncio: the release of {tenure.claim_id} was begun, and it still holds the name")
