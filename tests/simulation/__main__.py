"""Hunt through many seeds, or look at one: see ``--help``.

python -m tests.simulation --seeds 100000 --jobs 2      a long hunt, with a line of progress
python -m tests.simulation --show 4711                  the whole time line of one seed
python -m tests.simulation --bug "renewal by anybody"   how soon a planted bug is found
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

from tests.simulation.planted import PLANTED, Worlds
from tests.simulation.world import TIME_LINE_MAX, BrokenPromise

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Kinds of worlds other than those with locks, and what there is in them.
KINDS = {
    "permits": "semaphores and read/write locks",
    "once": "works that are to be done once",
    "multilocks": "locks of several names",
    "elections": "elections",
    "claims": "claims on items",
    "tasks": "tasks of asyncio",
    "task-permits": "semaphores and read/write locks of tasks",
    "task-multilocks": "locks of several names of tasks",
    "task-once": "works that tasks are to do once",
    "task-elections": "elections of tasks",
    "task-claims": "claims of tasks on items",
    "pauses": "pauses",
    "shared": "locks that threads share",
    "shared-permits": "semaphores and read/write locks that threads share",
    "shared-multilocks": "locks of several names that threads share",
    "shared-once": "works that threads share and are to do once",
    "shared-claims": "claims on items that threads share",
    "shared-elections": "elections that threads share",
    "queues": "queues of jobs",
    "task-queues": "queues of jobs that tasks work",
    "shared-queues": "queues of jobs that threads share",
    "workers": "workers of jobs",
}
# Seeds between two lines of progress, and what a worker is given at a time.
CHUNK = 250


def hunt(start: int, seeds: int, worlds: Worlds, bug_name: str | None, last: int = 0) -> list[tuple[int, str]]:
    """The seeds that break a promise, each with its story."""
    broken = []
    bug = next((bug for bug in PLANTED if bug.name == bug_name), None)
    with worlds.prepared(), nullcontext() if bug is None else bug.planted():
        for seed in range(start, start + seeds):
            try:
                worlds.simulate(seed)
            except BrokenPromise as error:
                broken.append((seed, error.told(last) if last else str(error)))
    return broken


def chunks(start: int, seeds: int) -> Iterator[tuple[int, int]]:
    for first in range(start, start + seeds, CHUNK):
        yield first, min(CHUNK, start + seeds - first)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulate dibs, seed by seed.")
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (default 1000)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes to use")
    parser.add_argument("--signals", action="store_true", help="interrupt programs between any two instructions, too")
    parser.add_argument("--switches", action="store_true", help="switch threads between any two instructions, too")
    kinds = parser.add_mutually_exclusive_group()
    kinds.set_defaults(kind="locks")
    for kind, what in KINDS.items():
        kinds.add_argument(f"--{kind}", action="store_const", dest="kind", const=kind, help=f"with {what}, not locks")
    parser.add_argument(
        "--steps",
        choices=("observe", "expiry"),
        default="",
        help="the store's clock is set now and then, and leases are taken over in this way",
    )
    parser.add_argument("--keep-going", action="store_true", help="count broken seeds instead of stopping at the first")
    parser.add_argument("--show", type=int, metavar="SEED", help="run one seed and print all of its time line")
    parser.add_argument("--bug", choices=[bug.name for bug in PLANTED], metavar="NAME", help="with this planted bug")
    options = parser.parse_args()
    worlds = Worlds(options.kind, options.steps, options.signals, options.switches)
    if options.bug is not None:
        worlds = next(found for bug, found in PLANTED.items() if bug.name == options.bug)
    if worlds.steps and worlds.kind != "locks":
        parser.error("--steps is for worlds of locks")
    # A lock object that is shared lives on with what it holds, where a signal comes in front of its end.
    lives_on = worlds.kind in ("shared", "shared-permits", "shared-elections")
    if worlds.signals and (lives_on or worlds.kind.startswith("task")):
        parser.error(f"--signals is for worlds without {worlds.kind}")
    if options.show is not None:
        for _, story in hunt(options.show, 1, worlds, options.bug, TIME_LINE_MAX):
            print(story)
            return 1
        with worlds.prepared():
            print(worlds.simulate(options.show))
        return 0
    began = time.monotonic()
    done = 0
    broken: list[tuple[int, str]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = [
            (seeds, pool.submit(hunt, first, seeds, worlds, options.bug))
            for first, seeds in chunks(options.start, options.seeds)
        ]
        for seeds, future in waiting:
            found = future.result()
            done += seeds
            broken += found
            rate = done / (time.monotonic() - began)
            print(f"\r{done} seeds, {rate:.0f} a second, {len(broken)} broken", end="", file=sys.stderr, flush=True)
            if found and not options.keep_going:
                for _, other in waiting:
                    other.cancel()
                break
    print(file=sys.stderr)
    if broken and not options.keep_going:
        print(broken[0][1])
    for _, story in broken:
        print(story.partition("\n")[0])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
