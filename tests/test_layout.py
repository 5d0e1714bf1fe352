"""Attributes of what there is a lot of stay where CPython reads them at once, in whatever order they come to be set."""

import asyncio
import gc
import itertools
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import dibs
from dibs.ask import Act, Ask, JobAsk
from dibs.hold import Hold
from dibs.job_hold import JobHold
from dibs.layout import laid_out
from dibs.taking import TakeAsk
from dibs.wishes import AcquireAsk

# More than the instances from which CPython learns.
MANY = 100
# Before Python 3.11 every instance has a dictionary.
ALWAYS = sys.version_info < (3, 11)


def has_a_dictionary(one: object, attribute: str) -> bool:
    """Whether its attributes have moved into one; looking at ``__dict__`` would move them."""
    return any(type(held) is dict and attribute in held for held in gc.get_referents(one))


class Plain:
    def __init__(self) -> None:
        self.first = 1


def test_what_is_set_late_makes_a_dictionary() -> None:
    """The control: what the others are kept from."""
    many = [Plain() for _ in range(MANY)]
    for one in many:
        one.second = one.third = 2  # type: ignore[attr-defined]
    assert all(has_a_dictionary(one, "first") for one in many)


def test_what_is_known_from_the_start_does_not() -> None:
    @laid_out("first second third")
    class Known(Plain):
        pass

    many = [Known() for _ in range(MANY)]
    for one in many:
        one.third = one.second = 2  # type: ignore[attr-defined]
    assert [has_a_dictionary(one, "first") for one in many] == [ALWAYS] * MANY
    assert vars(many[0]) == {"first": 1, "second": 2, "third": 2}


@pytest.mark.parametrize("kind", [Ask, Act, JobAsk, AcquireAsk, TakeAsk, Hold, JobHold])
def test_nothing_is_set_by_that(kind: type[Any]) -> None:
    """What is the same for all new ones is read from the class."""
    bare = object.__new__(kind)
    assert not vars(bare)


async def leases(client: dibs.AsyncClient, number: int) -> list[Any]:
    """Two asks that were answered, and the hold."""
    lease = await client.lock(f"name/{number}").acquire()
    assert lease is not None
    hold = lease._hold
    await lease.release()
    return [hold, hold.ending]


async def jobs(client: dibs.AsyncClient, number: int) -> list[Any]:
    queue = client.queue(f"queue/{number}")
    await queue.put(number)
    job = await queue.take(timeout=0)
    assert job is not None
    claim: Any = job._claim
    hold = claim.hold
    await job.done()
    return [hold]


ACTS: dict[str, Callable[[dibs.AsyncClient, int], Awaitable[list[Any]]]] = {"leases": leases, "jobs": jobs}


@pytest.mark.parametrize("act", ACTS)
def test_many_tasks_at_once_leave_no_dictionaries(act: str) -> None:
    """Of a crowd that asks before the first is answered, neither the asks nor what is granted have one."""
    # In a process of its own: what came first in this one has taught CPython some of the names.
    found = subprocess.run([sys.executable, "-m", __name__, act], capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == {"leases": {"Hold": ALWAYS, "Ask": ALWAYS}, "jobs": {"JobHold": ALWAYS}}[act]


async def crowd(act: str) -> dict[str, bool]:
    """Of which kinds were those of many tasks that acted at once, and whether any has a dictionary."""
    async with dibs.connect_async("memory://") as client:
        ended = await asyncio.gather(*(ACTS[act](client, number) for number in range(10 * MANY)))
    found: dict[str, bool] = {}
    for one in itertools.chain(*ended):
        kind = type(one).__name__
        found[kind] = found.get(kind, False) or has_a_dictionary(one, "t0")
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(crowd(sys.argv[1]))))
