"""Handlers in tasks: ``await queue.run(handler, workers=4)``. What is taken when, how jobs end: see ``dibs.crew``.

One task takes jobs; each job is worked in a task of its own. A handler whose job is lost is cancelled. Where the event
loop is the main thread's, SIGTERM and Ctrl-C end it in order, as for threads.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from functools import partial
from weakref import ref

from dibs._typing import TYPE_CHECKING, Any
from dibs.aio.tasks import call_in, owner, take
from dibs.crew import Crew
from dibs.errors import InvalidOption
from dibs.lock import ran
from dibs.worker_signals import Signals

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.aio.queue import AsyncJob


async def run_in_tasks(crew: Crew, handler: Callable[[AsyncJob], Awaitable[Any]]) -> int:
    """Work until it is time to stop; how many jobs were done."""
    if not inspect.iscoroutinefunction(handler) and not inspect.iscoroutinefunction(type(handler).__call__):
        raise InvalidOption(f"handler is an async function that takes a job, not {handler!r}")
    loop = asyncio.get_running_loop()
    tasks: dict[asyncio.Task[None], AsyncJob] = {}
    ending: list[BaseException] = []

    async def work(job: AsyncJob) -> None:
        try:
            result = ran(await handler(job))
        except asyncio.CancelledError as error:
            # By us, or by who ends the event loop; or the handler awaited something else that was cancelled.
            if crew.stopping or not job.held or _is_being_cancelled():
                crew.give_back(job)
            else:
                crew.raised(job, error)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is what the job failed with
            crew.raised(job, error)
        except GeneratorExit:  # the event loop is gone, and this task with it: nobody can be told anything here
            raise
        except BaseException as error:  # SystemExit and the like end this worker; not for ever at no cost to the job
            crew.raised(job, error)
            raise
        else:
            crew.succeeded(job, result)

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            crew.stopping = True
            if not isinstance(error, (SystemExit, KeyboardInterrupt)):  # (The event loop has raised those by now.)
                ending.append(error)
        job = tasks.pop(task)
        if task.cancelled():  # before its first step: nothing of it has run, nor will
            crew.give_back(job)
        crew.over(job)

    def lost(working: ref[asyncio.Task[None]], worked: ref[AsyncJob]) -> None:
        task, job = working(), worked()
        if task is not None and job is not None and job._is_lost():
            task.cancel()

    def start(job: Any) -> None:
        task = loop.create_task(work(job), name=f"job {job.id} of {job.queue}")
        tasks[task] = job
        task.add_done_callback(ended)
        # The claim keeps neither the task nor the job: when the loop is gone, nobody works it, and its renewal ends.
        job._when_over(partial(call_in, loop, partial(lost, ref(task), ref(job))))

    crew.start = start
    gone = False
    with Signals(crew):
        try:
            await take(crew.dispatching(owner()))
            crew.drop_waiting()
            await take(crew.draining())
        except GeneratorExit:  # the event loop is gone, and this task with it: the claims of its jobs end by the ttl
            gone = True
            raise
        finally:
            if not gone:
                crew.drop_waiting()
                crew.stopping = True
                while tasks:
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                await take(crew.settling())
    if ending:  # as for threads: what was to end this worker ends its program as well
        raise ending[0]
    return crew.done


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return sys.version_info >= (3, 11) and task is not None and task.cancelling() > 0
