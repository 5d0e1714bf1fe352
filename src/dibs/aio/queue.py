"""A durable queue of work, for tasks: the verbs of ``dibs.queue``, awaited."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, Literal
from dibs.aio.lease import AsyncLost, converse
from dibs.aio.tasks import Begun, end, owner, take
from dibs.door import door_to
from dibs.job import JobFacts
from dibs.job_batch import JobBatchFacts
from dibs.names import check_timeout
from dibs.queue import result_of
from dibs.queue_core import LIST_DEFAULT, Patience, check_n, left_in_the_middle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
    from datetime import datetime
    from threading import Event

    from dibs.advice import Advice, QueueStats
    from dibs.names import Seconds
    from dibs.new_jobs import PutOptions
    from dibs.once_keys import Key
    from dibs.pausing import Pause
    from dibs.queue_core import QueueCore
    from dibs.queue_records import JobRecord, QueueDepth

    #: Works a job; what it returns is the result.
    Handler = Callable[["AsyncJob"], Awaitable[Any]]


class AsyncJob(JobFacts):
    """A job that this process works, for tasks. Finish it: ``done``, ``fail`` or ``skip``."""

    __slots__ = ()

    @property
    def lost(self) -> AsyncLost:
        """Set when its claim is lost; can be waited for."""
        return AsyncLost(self)

    def done(self, result: Any = None, *, connection: Any = None) -> Awaitable[None]:
        """It is done, at once, and leaves the queue; await it to know that the store has confirmed. See ``Job.done``.

        connection: of those that ``AsyncLease.guard`` takes; with one, nothing is done before it is awaited.
        """
        if connection is None:
            return Begun(self._done(result))
        door = door_to(connection)
        return converse(self._done_within(door, result), door)

    def fail(
        self, error: BaseException | str | None = None, *, retry_in: Seconds | None = None, dead: bool = False
    ) -> Awaitable[None]:
        """This try has failed, at once; await it to know that the store has confirmed. See ``dibs.Job.fail``."""
        return Begun(self._failed(error, retry_in, dead))

    def skip(self) -> Awaitable[None]:
        """Give it back as it was, at once; await it to know that the store has confirmed. See ``dibs.Job.skip``."""
        return Begun(self._skipped())

    async def extend(self, ttl: Seconds | None = None) -> None:
        """Extend the claim now, for all jobs of its batch, and from now on; see ``dibs.Job.extend``."""
        await take(self._extending(ttl))


class AsyncJobBatch(JobBatchFacts[AsyncJob]):
    """The jobs of one take: ``async with await queue.take(10) as batch: async for job in batch: …``.

    See ``dibs.JobBatch``.
    """

    __slots__ = ("_entered",)

    def done(self) -> Awaitable[None]:
        """Everything that is left is done, at once, in one call. Raises LeaseLost when some was not held any more."""
        return Begun(self._finishing())

    async def release(self) -> None:
        """Give back what is left, and wait until the store has confirmed everything; ``lost`` is exact then."""
        await take(self._closing(None))

    def __aiter__(self) -> AsyncJobBatch:
        return self

    async def __anext__(self) -> AsyncJob:
        job = self._move_on()
        if job is None:
            raise StopAsyncIteration
        return job

    async def __aenter__(self) -> AsyncJobBatch:
        self._entered = owner()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._claim is not None:
            await end(self._claim.session, self._closing(error), kind, getattr(self, "_entered", None))


class AsyncQueue:
    """A durable queue of work, for asyncio; see ``dibs.Queue``."""

    __slots__ = ("_core",)

    def __init__(self, core: QueueCore[AsyncJob, AsyncJobBatch]) -> None:
        self._core = core

    @property
    def name(self) -> str:
        """What the queue is called."""
        return self._core.name

    # -- putting ----------------------------------------------------------------------------------------------------

    async def put(
        self,
        payload: Any,
        *,
        delay: Seconds | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        key: Key | None = None,
        on_conflict: Literal["raise", "keep", "replace"] = "raise",
        group: Key | None = None,
        max_tries: int | None = None,
        connection: Any = None,
    ) -> int:
        """Put a job, and return its id once it is durable; see ``dibs.Queue.put``.

        connection: of those that ``AsyncLease.guard`` takes.
        """
        from dibs.new_jobs import NewJob

        job = NewJob(payload, key=key)
        options = self._core.put_options(delay, at, priority, group, max_tries, on_conflict)
        return (await self._put_all([job], options, connection))[0]

    async def put_many(
        self,
        payloads: Iterable[Any],
        *,
        delay: Seconds | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        on_conflict: Literal["raise", "keep", "replace"] = "raise",
        group: Key | None = None,
        max_tries: int | None = None,
        connection: Any = None,
    ) -> list[int]:
        """Put up to 10,000 jobs in one call, all or none; their ids, in their order. See ``dibs.Queue.put_many``."""
        options = self._core.put_options(delay, at, priority, group, max_tries, on_conflict)
        return await self._put_all(payloads, options, connection)

    async def _put_all(self, payloads: Iterable[Any], options: PutOptions, connection: Any) -> list[int]:
        if connection is None:
            return await take(self._core.putting(payloads, options))
        door = door_to(connection)
        return await converse(self._core.putting_within(door, payloads, options), door)

    # -- working ----------------------------------------------------------------------------------------------------

    async def take(self, n: int = 1, *, timeout: Seconds | None = 0) -> AsyncJobBatch:
        """Claim up to ``n`` jobs that are due, by priority and age; an empty batch if there are none.

        See ``dibs.Queue.take``.
        """
        return await take(self._core.taking(owner(), check_n(n), check_timeout(timeout)))

    def stream(
        self, n: int = 10, *, idle: Seconds | None = None, stop: Event | Callable[[], bool] | None = None
    ) -> AsyncGenerator[AsyncJob, None]:
        """Work without end, one job after the other; see ``dibs.Queue.stream``.

        Left in the middle, it gives back what is left when it is closed: ``async with
        contextlib.aclosing(queue.stream()) as jobs:``.
        """
        return self._stream(check_n(n), Patience(idle, stop))

    async def _stream(self, n: int, patience: Patience) -> AsyncGenerator[AsyncJob, None]:
        while (look_s := patience.look_s()) is not None:
            me = owner()
            batch = await take(self._core.taking(me, n, look_s, waited_s=patience.waited_s))
            try:
                patience.saw(len(batch), look_s)
                while not patience.stopped() and (job := batch._move_on()) is not None:
                    yield job
                batch._move_past()
            except BaseException as error:
                await end(self._core.desk.session(), batch._closing(left_in_the_middle(error)), type(error), me)
                raise
            await take(batch._closing(None))

    async def run(
        self,
        handler: Handler,
        *,
        workers: int = 4,
        prefetch: int = 100,
        drain_timeout: Seconds = 30.0,
        idle: Seconds | None = None,
        stop: Event | Callable[[], bool] | None = None,
    ) -> int:
        """Have jobs worked by the async function ``handler``, ``workers`` at a time, until told to stop.

        See ``dibs.Queue.run``; how many were done is returned. The task of a handler whose job is lost is cancelled.
        Cancelling this call cancels all handlers and gives their jobs back.
        """
        from dibs.aio.workers import run_in_tasks
        from dibs.crew import Crew

        return await run_in_tasks(Crew(self._core, workers, prefetch, drain_timeout, idle, stop), handler)

    async def finish(
        self,
        id: int,  # noqa: A002 - what it is called everywhere
        token: int,
        result: Any = None,
        *,
        outcome: str = "done",
        error: BaseException | str | None = None,
        retry_in: Seconds | None = None,
    ) -> None:
        """End a job that was taken elsewhere, by its id and its token; see ``dibs.Queue.finish``."""
        from dibs.finishing import finishing

        await take(finishing(self._core, id, token, result, outcome, error, retry_in))

    # -- see and mend -----------------------------------------------------------------------------------------------

    async def depth(self) -> QueueDepth:
        """How many jobs are ready, due later, claimed and dead, and how long the oldest has been ready."""
        return await take(self._core.depth())

    async def jobs(self, state: str = "ready", limit: int = LIST_DEFAULT) -> list[JobRecord]:
        """The first jobs in a state; see ``dibs.Queue.jobs``."""
        return await take(self._core.jobs(state, limit))

    async def job(self, id: int) -> JobRecord | None:  # noqa: A002 - what it is called everywhere
        """One job, or None when it has left or never was."""
        return await take(self._core.job(id))

    async def dead(self, limit: int = LIST_DEFAULT) -> list[JobRecord]:
        """The dead jobs with their last errors, the latest first."""
        return await take(self._core.jobs("dead", limit))

    async def requeue(self, *ids: int) -> int:
        """Make dead jobs ready again; see ``dibs.Queue.requeue``."""
        return await take(self._core.requeuing(ids))

    async def cancel(self, *ids: int) -> list[int]:
        """End jobs that have not ended; see ``dibs.Queue.cancel``."""
        return await take(self._core.cancelling(ids))

    async def purge(self, *ids: int, older_than: Seconds = 0) -> int:
        """Delete jobs that ended ``older_than`` seconds ago or before; see ``dibs.Queue.purge``."""
        return await take(self._core.purging(ids, older_than))

    async def wait(self, id: int, *, timeout: Seconds | None = None) -> Any:  # noqa: A002 - as above
        """Wait until a job has ended; its result, where the queue keeps results. See ``dibs.Queue.wait``."""
        return result_of(await take(self._core.waiting_for(id, timeout)))

    async def stats(self) -> QueueStats:
        """What all processes that take its jobs have counted in the last minute; see ``dibs.Queue.stats``."""
        return await take(self._core.counting())

    async def advice(self) -> Advice:
        """How many workers the queue needs, and why; see ``dibs.Queue.advice``."""
        return await take(self._core.advising())

    async def pause(self, note: str | None = None, *, ttl: Seconds | None = None, by: str | None = None) -> Pause:
        """Stop handing out jobs, for every client; jobs in hand go on. See ``dibs.Queue.pause``."""
        from dibs.pausing import pausing

        return await take(pausing(self._core.desk, self._core.pause_name, note, ttl, by))

    async def resume(self) -> bool:
        """End the pause; False when there was none."""
        from dibs.pausing import resuming

        return await take(resuming(self._core.desk, self._core.pause_name))

    def __repr__(self) -> str:
        return f"<dibs.AsyncQueue {self.name!r}>"
