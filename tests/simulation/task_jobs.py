"""Worlds of asyncio in which tasks put jobs and work them.

What programs of threads do there is told in ``jobs``, and all is checked that is checked of those; and besides what is
promised to tasks (``tasks``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dibs.aio.queue import AsyncJob, AsyncJobBatch, AsyncQueue
from dibs.errors import LeaseLost, StoreUnavailable
from tests.simulation.job_books import JobChecker
from tests.simulation.jobs import TTLS_S, JobProgram, simulate_in
from tests.simulation.loop import SimLoop
from tests.simulation.programs import Habits
from tests.simulation.tasks import TASKS_MAX, UNCANCEL, TaskMember
from tests.simulation.world import new_world

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dibs.job_hold import JobHold
    from tests.simulation.scenario import Result


class JobMember(TaskMember):
    """A task that puts jobs and works them."""

    program: Any
    checker: Any

    async def _round(self) -> None:
        rand, checker = self.world.random, self.checker
        queue = AsyncQueue(self.program._core(AsyncJob, AsyncJobBatch))
        try:
            if rand() < 0.6:
                putting = queue.put_many(range(1 + int(3 * rand())), group=self.program._group())
                checker.was_put(await self._soon(putting))
            if self.program._cancels and rand() < 0.3:
                await self._soon(queue.cancel(*self.program._some_known()))
            if rand() < 0.4:
                await self._work_stream(queue)
                return
            timeout = (0.0, None if rand() < 0.2 else 2.0 * rand())[rand() < 0.6]
            batch = await self._soon(queue.take(1 + int(3 * rand()), timeout=timeout))
            checker.given(self.process, batch.won)
            try:
                await self._work_through(batch)
            finally:
                del batch
        except (LeaseLost, StoreUnavailable) as error:
            self.note("hears: %s", repr(error))
            if self._cancelled and UNCANCEL:
                self.world.broken(f"asyncio: {self.name} was cancelled, and is told {error!r}")

    async def _soon(self, awaited: Awaitable[Any]) -> Any:
        """What is awaited here ends at once when the task is cancelled."""
        try:
            return await awaited
        except asyncio.CancelledError as error:
            self._look_how_late(error)
            raise

    async def _work_through(self, batch: AsyncJobBatch) -> None:
        rand = self.world.random
        if rand() < 0.6:
            hold = batch.won[0]._hold if batch else None
            try:
                async with batch:
                    async for job in batch:
                        if rand() < 0.1:
                            break
                        await self._work_on(job)
            finally:
                if hold is not None and not self.world.closing:
                    self.checker.is_left(hold)
            return
        await self._soon(asyncio.sleep(self.habits.work_max_s * rand()))
        if rand() < 0.2:
            await batch.done()
        for job in batch.won:
            await self._work_on(job)
        if rand() < 0.3:
            await batch.release()

    async def _work_stream(self, queue: AsyncQueue) -> None:
        rand, world = self.world.random, self.world
        until = world.now + 3.0 * rand()
        passed: list[AsyncJob] = []
        hand: JobHold | None = None
        idle_s = 2.0 * rand() if rand() < 0.5 else None
        stream = queue.stream(1 + int(3 * rand()), idle=idle_s, stop=lambda: world.now > until)
        try:
            async for job in stream:
                hand = job._hold
                self.checker.given(self.process, [job])
                if rand() < 0.1:
                    break
                await self._work_on(job)
                if job.id not in hand.ends:
                    passed.append(job)
            else:
                self.checker.streamed(passed)
        finally:
            if not world.closing:
                if hand is not None:
                    self.checker.is_left(hand)
                await stream.aclose()

    async def _work_on(self, job: AsyncJob) -> None:
        rand = self.world.random
        timer = self._cancel_by(job._hold.trusted_until) if rand() < self.habits.interrupt / 2 else None
        try:
            await self._soon(asyncio.sleep(self.habits.work_max_s * rand()))
            chance = rand()
            if chance < 0.1:
                await self._soon(job.extend(None if rand() < 0.5 else TTLS_S[int(rand() * len(TTLS_S))]))
            if chance < 0.5:
                await self._end(job.done(), rand())
                if job.id in job._hold.ends:
                    self.checker.said(job, "done", job._hold.ends[job.id].trouble is not None)
            elif chance < 0.6:
                await self._end(job.fail("no", retry_in=rand(), dead=rand() < 0.1), rand())
            elif chance < 0.7:
                await self._end(job.skip(), rand())
        finally:
            if timer is not None:
                timer.cancel()

    async def _end(self, ending: Awaitable[None], chance: float) -> None:
        """An end was called, and is awaited at once, or later."""
        if chance < 0.3:
            await asyncio.sleep(chance)
        await ending


class JobTasks(JobProgram):
    """One thread of a process, with an event loop and some tasks."""

    def __call__(self) -> None:
        self.world, self.process, self.checker = self.host.world, self.host.process, self._checker
        self.habits = Habits(work_max_s=self._work_max_s, interrupt=0.3)
        members = 1 + int(TASKS_MAX * self.world.random())
        loop = SimLoop(self.world, self.process)
        loop.work([JobMember(self, number).run() for number in range(members)])  # type: ignore[arg-type]


def simulate_job_tasks(seed: int) -> Result:
    """Run one scenario with tasks at queues to its end. Raises BrokenPromise."""
    with new_world(seed) as world:
        return simulate_in(world, JobTasks, JobChecker(world))
