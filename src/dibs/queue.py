"""A durable queue of work, for threads: jobs are put, taken by one worker at a time, and leave when they are done.

What it does is in ``dibs.queue_core``, what becomes of a job in ``dibs.job_batch``; ``dibs.aio.queue`` has the same
verbs for tasks.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, Literal
from dibs.entry import itself
from dibs.errors import DibsError, JobFailed
from dibs.job import JobFacts
from dibs.job_batch import JobBatchFacts
from dibs.lost import Lost
from dibs.names import check_timeout
from dibs.owners import this_thread
from dibs.queue_core import LIST_DEFAULT, Patience, check_n, left_in_the_middle
from dibs.steps import run

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
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
    Handler = Callable[["Job"], Any]


class Job(JobFacts):
    """A job that this process works, for threads. Finish it: ``done``, ``fail`` or ``skip``."""

    __slots__ = ()

    @property
    def lost(self) -> Lost:
        """Set when its claim is lost; can be waited for."""
        return Lost(self)

    def done(self, result: Any = None, *, connection: Any = None) -> None:
        """It is done, and leaves the queue. May be called twice; a job that has failed already is left as it is.

        result: JSON, kept with the job where the queue keeps results (``keep_results``), else dropped. connection: end
        it inside the transaction that is open there, the caller's own, to the database in which the queue is: what the
        job did there and that it is done are committed together, or neither is. After a rollback the job is handed out
        again when its claim ends, at the latest a ttl later. An error of the database's in it (a deadlock, a
        serialization failure) has ended nothing: the job is held as before, and can be done in the next transaction.
        To go on to the next job instead, or to return from the handler, is to have failed with that error.

        Raises LeaseLost when it was not held any more, or was given back (by ``skip``, the end of its batch, or
        ``client.close``): others may have taken it; then nothing is changed (and the transaction should be rolled
        back). StoreUnavailable when that is unknown: it may be done again.
        """
        if connection is None:
            run(self._done(result))
            return
        from dibs.door import door_to
        from dibs.guarding import converse

        door = door_to(connection)
        converse(self._done_within(door, result), door)

    def fail(
        self, error: BaseException | str | None = None, *, retry_in: Seconds | None = None, dead: bool = False
    ) -> None:
        """This try has failed: the job is tried again, or is dead when it has no tries left.

        error: kept with the job, of an exception with its traceback (4,096 characters). retry_in: seconds until it is
        due again; by default a second, doubled with each try up to an hour, give or take a quarter. dead: do not try
        again, whatever retry_in says. May be called twice. Raises LeaseLost and StoreUnavailable as ``done``.
        """
        run(self._failed(error, retry_in, dead))

    def skip(self) -> None:
        """Give it back as it was: it is ready for others, and the try is not counted. Raises as ``done``."""
        run(self._skipped())

    def extend(self, ttl: Seconds | None = None) -> None:
        """Extend the claim now, for all jobs of its batch, and from now on, for ``ttl`` seconds (default: as before).

        Claims are extended by themselves, unless the queue was built with ``renew=False``. Raises LeaseLost, or
        StoreUnavailable when the answer is unknown.
        """
        run(self._extending(ttl))


class JobBatch(JobBatchFacts[Job]):
    """The jobs of one take, for one thread: ``with queue.take(10) as batch: for job in batch: …``.

    Going on to the next job finishes the one before as done. When an exception ends the ``with`` block, the job at
    hand has failed with it. What else is left at the end of the block, however it ends, is given back, and costs no
    try. Its jobs may be ended by other threads, too.
    """

    __slots__ = ()

    def done(self) -> None:
        """Everything that is left is done, in one call. Raises LeaseLost when some was not held any more."""
        run(self._finishing())

    def release(self) -> None:
        """Give back what is left, and wait until the store has confirmed everything; ``lost`` is exact then."""
        self.__exit__(None, None, None)

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        job = self._move_on()
        if job is None:
            raise StopIteration
        return job

    if TYPE_CHECKING:

        def __enter__(self) -> JobBatch: ...
    else:
        __enter__ = itself

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        try:
            if self._claim is not None:
                self._claim.session.end(self._closing(error), kind)
        except DibsError:
            raise
        except BaseException:  # Ctrl-C on the way
            self._give_up()
            raise


class Queue:
    """A durable queue of work. A description: nothing is kept here. Safe to share among threads."""

    __slots__ = ("_core",)

    def __init__(self, core: QueueCore[Job, JobBatch]) -> None:
        self._core = core

    @property
    def name(self) -> str:
        """What the queue is called."""
        return self._core.name

    # -- putting ----------------------------------------------------------------------------------------------------

    def put(
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
        """Put a job, and return its id once it is durable: from then on it is not lost.

        payload: anything that JSON can express, or bytes; at most 1 MiB. delay: seconds until it is due; or at: a
        datetime with a time zone. priority: -100 to 100, the greatest first (default: the queue's). key: unique among
        the jobs that have not ended. on_conflict: what to do when there is such a job: "raise" JobExists, "keep" that
        one and return its id, or "replace" its payload, time, priority, group and tries (JobExists when it is being
        worked). group: of a group only as many are worked at a time as the takers' ``group_limit`` says, with 1 in
        order. max_tries: after so many tries it is dead (default: the queue's).

        connection: put it inside the transaction that is open there, the caller's own, to the database in which the
        queue is: nobody sees it before that is committed, and nothing is left of it after a rollback. Workers then
        notice it at their next look, within a second. (In autocommit none is open, and the job is put at once.)
        Where it leads to another database, nothing is put: InvalidOption.

        Raises InvalidOption and InvalidName before anything is sent, StoreUnavailable when it is unknown whether it
        was put (``maybe_applied``).
        """
        from dibs.new_jobs import NewJob

        job = NewJob(payload, key=key)
        options = self._core.put_options(delay, at, priority, group, max_tries, on_conflict)
        return self._put_all([job], options, connection)[0]

    def put_many(
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
        """Put up to 10,000 jobs in one call, all or none; their ids, in their order. See ``put``.

        Payloads with the same key become one job, with one id: with on_conflict "keep" the first, with "replace" the
        last.

        payloads: what jobs carry; a ``dibs.NewJob`` among them says for itself what it does not share with the others
        (a key, for example).
        """
        options = self._core.put_options(delay, at, priority, group, max_tries, on_conflict)
        return self._put_all(payloads, options, connection)

    def _put_all(self, payloads: Iterable[Any], options: PutOptions, connection: Any) -> list[int]:
        if connection is None:
            return run(self._core.putting(payloads, options))
        from dibs.door import door_to
        from dibs.guarding import converse

        door = door_to(connection)
        return converse(self._core.putting_within(door, payloads, options), door)

    # -- working ----------------------------------------------------------------------------------------------------

    def take(self, n: int = 1, *, timeout: Seconds | None = 0) -> JobBatch:
        """Claim up to ``n`` jobs that are due, by priority and age; an empty batch if there are none.

        timeout: how long to wait for the first of them; None for as long as it takes. All jobs of a batch have one
        fencing token and one deadline, which is moved on while somebody has the batch or one of its jobs. While the
        queue is paused, nothing is had.

        Raises StoreUnavailable when the store gives no answer: nothing is held then.
        """
        return run(self._core.taking(this_thread(), check_n(n), check_timeout(timeout)))

    def stream(
        self, n: int = 10, *, idle: Seconds | None = None, stop: Event | Callable[[], bool] | None = None
    ) -> Generator[Job, None, None]:
        """Work without end, one job after the other: take up to ``n``, yield them one by one, wait for more.

        Going on to the next job finishes the one before as done; finish it yourself with ``fail`` or ``skip``. stop: an
        event, or a function, that ends it after the job at hand. idle: end it when nothing came for so many seconds.

        Left in the middle, by ``break``, an error or Ctrl-C, it counts the job at hand as failed (so finish it before a
        ``break``, or ``skip`` it); what was not begun is given back at once, and costs no try. This happens when the
        iterator is closed; where it has a name, a ``with`` block of ``contextlib.closing`` makes that certain.
        """
        return self._stream(check_n(n), Patience(idle, stop))

    def _stream(self, n: int, patience: Patience) -> Generator[Job, None, None]:
        while (look_s := patience.look_s()) is not None:
            batch = run(self._core.taking(this_thread(), n, look_s, waited_s=patience.waited_s))
            try:
                try:
                    patience.saw(len(batch), look_s)
                    while not patience.stopped() and (job := batch._move_on()) is not None:
                        yield job
                    batch._move_past()
                except BaseException as error:
                    self._core.desk.session().end(batch._closing(left_in_the_middle(error)), type(error))
                    raise
                run(batch._closing(None))
            except (DibsError, GeneratorExit):
                raise
            except BaseException:  # Ctrl-C on the way
                batch._give_up()
                raise

    def run(
        self,
        handler: Handler,
        *,
        workers: int = 4,
        prefetch: int = 100,
        drain_timeout: Seconds = 30.0,
        idle: Seconds | None = None,
        stop: Event | Callable[[], bool] | None = None,
    ) -> int:
        """Have jobs worked by ``handler`` in ``workers`` threads until told to stop; how many were done.

        handler: gets the ``Job``. What it returns is the job's result, what it raises its failure, unless it finished
        the job itself. Its claim is extended all the while by a thread of dibs's, whatever the handler does; when it is
        lost, ``job.lost`` is set. prefetch: how many jobs may be claimed beyond those that are being worked; so many
        only while the workers are quick.

        It ends when ``stop`` is set, after ``idle`` seconds without work, or by SIGTERM or Ctrl-C (when called in the
        main thread): it takes nothing more, gives jobs in hand ``drain_timeout`` seconds, and gives the rest back. A
        second Ctrl-C does not wait. Signals that are ignored stay so, and what the program does about them itself is
        put back at the end. A handler that raises SystemExit has failed, and ends it in the same way; that is raised.

        A job that ended its worker twice is worked alone. A handler that goes on when its job is lost keeps one of the
        workers busy; after another ttl the log (``dibs``) tells of it.

        While the store is away it waits for it. A store that it has never reached it gives the client's ``patience``
        (5 s), and then raises StoreUnavailable: the address may be wrong. Other errors (SetupRequired for a wrong
        password, …) are raised at once.
        """
        from dibs.crew import Crew
        from dibs.workers import run_in_threads

        return run_in_threads(Crew(self._core, workers, prefetch, drain_timeout, idle, stop), handler)

    def finish(
        self,
        id: int,  # noqa: A002 - what it is called everywhere
        token: int,
        result: Any = None,
        *,
        outcome: str = "done",
        error: BaseException | str | None = None,
        retry_in: Seconds | None = None,
    ) -> None:
        """End a job that was taken elsewhere, by its id and its token: see ``JobBatch.leave``, and ``dibs take``.

        outcome: "done", with ``result`` as in ``Job.done``; "failed", with ``error`` and ``retry_in`` as in
        ``Job.fail``; "dead", with ``error``: it is not tried again; "skipped": given back, the try is not counted.

        Raises LeaseLost when no claim with this token is in force on it: it has expired, or the job was ended, or taken
        again; nothing is changed then. StoreUnavailable when it is unknown.
        """
        from dibs.finishing import finishing

        run(finishing(self._core, id, token, result, outcome, error, retry_in))

    # -- see and mend -----------------------------------------------------------------------------------------------

    def depth(self) -> QueueDepth:
        """How many jobs are ready, due later, claimed and dead, and how long the oldest has been ready."""
        return run(self._core.depth())

    def jobs(self, state: str = "ready", limit: int = LIST_DEFAULT) -> list[JobRecord]:
        """The first jobs in a state: ready, later, claimed, done, dead or cancelled.

        In the order in which they are taken; those that have ended the latest first. (Those done and cancelled are kept
        for ``keep_results`` only, the latter for a minute at least.)
        """
        return run(self._core.jobs(state, limit))

    def job(self, id: int) -> JobRecord | None:  # noqa: A002 - what it is called everywhere
        """One job, or None when it has left or never was."""
        return run(self._core.job(id))

    def dead(self, limit: int = LIST_DEFAULT) -> list[JobRecord]:
        """The dead jobs with their last errors, the latest first."""
        return run(self._core.jobs("dead", limit))

    def requeue(self, *ids: int) -> int:
        """Make dead jobs ready again, with all their tries before them; all of the queue without ids. How many.

        One whose key another job has meanwhile stays dead.
        """
        return run(self._core.requeuing(ids))

    def cancel(self, *ids: int) -> list[int]:
        """End jobs that have not ended, which ``wait`` and ``job`` tell for a minute at least. Which those were.

        Whoever works one hears of it at the next extension of the claim, and its ``done`` is refused.
        """
        return run(self._core.cancelling(ids))

    def purge(self, *ids: int, older_than: Seconds = 0) -> int:
        """Delete jobs that ended ``older_than`` seconds ago or before, dead or kept; all such without ids. How many."""
        return run(self._core.purging(ids, older_than))

    def wait(self, id: int, *, timeout: Seconds | None = None) -> Any:  # noqa: A002 - as above
        """Wait until a job has ended; its result, where the queue keeps results, else None.

        Looks a few times a second at first, later once a second. Raises JobFailed when it is dead or was cancelled,
        TimeoutError after ``timeout`` seconds, StoreUnavailable. A job that has left without a trace counts as done.
        """
        return result_of(run(self._core.waiting_for(id, timeout)))

    def stats(self) -> QueueStats:
        """What all processes that take its jobs have counted in the last minute."""
        return run(self._core.counting())

    def advice(self) -> Advice:
        """How many workers the queue needs, and why; measured over the last minute and all processes that take jobs."""
        return run(self._core.advising())

    def pause(self, note: str | None = None, *, ttl: Seconds | None = None, by: str | None = None) -> Pause:
        """Stop handing out jobs, for every client; jobs in hand go on. As ``client.pause("queue/NAME")``, see there."""
        from dibs.pausing import pausing

        return run(pausing(self._core.desk, self._core.pause_name, note, ttl, by))

    def resume(self) -> bool:
        """End the pause; False when there was none."""
        from dibs.pausing import resuming

        return run(resuming(self._core.desk, self._core.pause_name))

    def __repr__(self) -> str:
        return f"<dibs.Queue {self.name!r}>"


def result_of(job: JobRecord | None) -> Any:
    """What a job that has ended was done with; raises JobFailed."""
    if job is None or job.state == "done":
        return None if job is None else job.result
    last = (job.error or "").rstrip().rpartition("\n")[2]
    raise JobFailed(f"job {job.id} is {job.state}" + (f": {last}" if last else ""), state=job.state, error=job.error)
