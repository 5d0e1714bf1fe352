"""Handlers in threads: ``queue.run(handler, workers=4)``. What is taken when, and how jobs end, is in ``dibs.crew``.

The thread that calls it takes jobs and sleeps; as many others as there are workers call the handler. In the main thread
SIGTERM and Ctrl-C end it in order: what is in hand is finished, the rest is given back.
"""

from __future__ import annotations

from queue import SimpleQueue

from dibs._typing import TYPE_CHECKING, Any
from dibs.crew import Crew
from dibs.errors import InvalidOption
from dibs.lock import check_decorated, ran
from dibs.owners import this_thread
from dibs.steps import run
from dibs.worker_signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable


def run_in_threads(crew: Crew, handler: Callable[[Any], Any]) -> int:
    """Work until it is time to stop; how many jobs were done."""
    if not callable(handler):
        raise InvalidOption(f"handler is a function that takes a job, not {handler!r}")
    check_decorated(handler, awaited=False)
    to_work: SimpleQueue[Any] = SimpleQueue()
    crew.start = to_work.put
    ending: list[BaseException] = []

    def work() -> None:
        while (job := to_work.get()) is not None:
            if not job.held:  # it was lost, or given back at the end, while it waited for this thread
                crew.missed(job)
                del job
                continue
            try:
                result = ran(handler(job))
            except Exception as error:  # noqa: BLE001 - whatever it was, it is what the job failed with
                crew.raised(job, error)
            except BaseException as error:  # noqa: BLE001 - SystemExit and the like: this worker is to end
                crew.raised(job, error)
                ending.append(error)
                crew.stopping = True
            else:
                crew.succeeded(job, result)
            finally:
                crew.over(job)
            del job  # so that a claim that is over is not kept by an idle thread
        to_work.put(None)  # for the next

    def end() -> None:
        to_work.put(None)
        crew.drop_waiting()
        crew.abandon(crew.running())

    try:
        for number in range(crew.workers):
            crew.clock.spawn(f"dibs-worker-{number + 1}", work)
        with Signals(crew):
            run(crew.dispatching(this_thread()))
            crew.drop_waiting()
            run(crew.draining())
    finally:
        try:
            end()
            run(crew.settling())
        except BaseException:  # one Ctrl-C more, perhaps before anybody was told
            end()
            raise
    if ending:  # what was to end this worker ends its program as well: only so does who looks after that hear of it
        raise ending[0]
    return crew.done
