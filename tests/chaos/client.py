"""A client process: threads and tasks that ask for names as fast as they can, and tell what they get and see.

python -m tests.chaos.client PLAN, where PLAN is the JSON of a ``Plan``. When there is a file ``calm`` in its folder it
begins nothing any more, says ``calm``, and lives on: what it holds then it would hold for ever. It ends when its parent
does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import dibs
from dibs.clock import boot_now
from tests.chaos.bugs import plant
from tests.chaos.history import Recorder
from tests.chaos.resource import Counters

LOCKS = ("blue", "green", "red")
POOL, POOL_LIMIT = "pool", 4
PAGE = "page"
SEAT = "seat"
REQUEST_TIMEOUT_S = 1.0
PATIENCE_S = 3.0
LOOK_S = 0.005


class Plan(NamedTuple):
    """What a client process is to do."""

    url: str
    folder: str
    seed: int
    ttl: float
    #: Of ``PROGRAMS``: those that the store can carry.
    programs: list[str]
    fenced: bool
    threads: int = 2
    tasks: int = 2
    bug: str = ""
    takeover: str = "expiry"


async def got(value: Any) -> Any:
    """What a verb returned, awaited where it is to be."""
    return await value if inspect.isawaitable(value) else value


class Actor:
    """One thread, or one task, that runs programs one after the other. They are written once, for both faces."""

    def __init__(self, plan: Plan, number: int, client: Any, recorder: Recorder) -> None:
        self._plan = plan
        self._client = client
        self._tell = recorder.tell
        self._who = recorder.who
        self._random = random.Random(plan.seed * 100 + number)
        self._counters = Counters(Path(plan.folder) / "resource.db", plan.fenced)
        self._threaded = isinstance(client, dibs.Client)
        self._sleep: Callable[[float], Any] = time.sleep if self._threaded else asyncio.sleep

    async def one(self) -> None:
        """Run one program."""
        program = self._random.choice(self._plan.programs)
        who = self._who()
        try:
            await PROGRAMS[program](self, who)
        except (dibs.LeaseLost, dibs.StoreUnavailable, dibs.WouldDeadlock) as error:
            self._tell("failed", who, error=type(error).__name__)
        except asyncio.CancelledError:
            self._tell("cancelled", who)
            raise

    # -- programs -------------------------------------------------------------------------------------------------

    async def lock(self, who: str) -> None:
        name = self._random.choice(LOCKS)
        lease = await self._ask(who, [name], self._client.lock(name, ttl=self._plan.ttl, renew=self._renewed()))
        if lease is not None:
            await self._work(who, lease, {name: lease}, counter=name)
            await self._end(who, lease)

    async def hand_over(self, who: str) -> None:
        name = self._random.choice(LOCKS)
        lease = await self._ask(who, [name], self._client.lock(name, ttl=self._plan.ttl))
        if lease is not None:
            await self._work(who, lease, {name: lease}, counter=name)
            state = await got(lease.export())
            self._tell("ended", who, how="exported")
            if self._random.random() < 0.7:  # or it ends by its ttl
                successor = self._who()
                self._tell("asked", successor, names=[name], limit=None)  # it waits for nobody, but is patient
                lease = await got(self._client.adopt(state, ttl=self._plan.ttl))
                await self._work(successor, lease, {name: lease}, counter=name)
                await self._end(successor, lease)

    async def several(self, who: str) -> None:
        names = self._random.sample(LOCKS, self._random.choice((2, 3)))
        leases = await self._ask(who, names, self._client.multilock(names, ttl=self._plan.ttl))
        if leases is not None:
            await self._work(who, leases, leases.leases, counter=names[0])
            await self._end(who, leases)

    async def permits(self, who: str) -> None:
        take = self._random.choice((1, 1, 1, 2, 3))
        pool = self._client.semaphore(POOL, POOL_LIMIT, weight=take, ttl=self._plan.ttl, renew=self._renewed())
        lease = await self._ask(who, [POOL], pool)
        if lease is not None:
            await self._work(who, lease, {POOL: lease}, mode="permits", take=take)
            await self._end(who, lease)

    async def pages(self, who: str) -> None:
        page = self._client.rwlock(PAGE, ttl=self._plan.ttl)
        reads = self._random.random() < 0.7
        lease = await self._ask(who, [PAGE], page.read() if reads else page.write())
        if lease is not None:
            await self._work(who, lease, {PAGE: lease}, mode="reader" if reads else "writer")
            await self._end(who, lease)

    async def lead(self, who: str) -> None:
        limit = self._limit()
        self._tell("asked", who, names=[SEAT], limit=None)  # an election looks for successors, too: not timed here
        term = await got(self._client.election(SEAT, ttl=self._plan.ttl).campaign(timeout=limit))
        if term is None:
            self._tell("refused", who)
        else:
            await self._work(who, term, {SEAT: term})
            await self._end(who, term)

    async def break_in(self, who: str) -> None:
        """Break what is held, one time in ten."""
        if self._random.random() < 0.1:
            name = self._random.choice(LOCKS)
            holder = await got(self._client.holder(name))
            if holder is not None:
                await got(self._client.break_lease(name, fencing_token=holder.fencing_token))

    # -- what they have in common ---------------------------------------------------------------------------------

    def _limit(self) -> float:
        return self._random.choice((0, 0.05, 0.3, 1, 3))

    def _renewed(self) -> bool:
        return self._random.random() < 0.9

    async def _nap(self, seconds: float) -> None:
        await got(self._sleep(seconds))

    async def _ask(self, who: str, names: list[str], lock: Any) -> Any:
        limit = self._limit()
        self._tell("asked", who, names=names, limit=limit)
        lease = await got(lock.acquire(timeout=limit))
        if lease is None:
            self._tell("refused", who)
        return lease

    async def _work(
        self, who: str, lease: Any, parts: dict[str, Any], mode: str = "one", take: int = 1, counter: str = ""
    ) -> None:
        """Hold it for a while, looking all the time whether it is held; then write, as if nobody had looked."""
        at = boot_now()
        names = {name: (part.fencing_token, part.slot) for name, part in parts.items()}
        self._tell("granted", who, at, mode=mode, names=names, take=take)
        token = parts[counter].fencing_token if counter else 0
        value = self._counters.read(counter, token) if counter else None
        if self._threaded and self._random.random() < 0.01:
            self._fork(who, lease)
        long = self._random.random() < 0.02
        until = at + (1.5 * self._plan.ttl if long else self._random.choice((0, 0.002, 0.01, 0.03, 0.1, 0.3)))
        try:
            while True:
                at = boot_now()
                if not lease.held:
                    self._tell("lost", who, at)
                    if lease.held:
                        self._tell("broken", who, text="a lease that was lost is held again")
                    break
                self._tell("held", who, at)
                if at >= until:
                    break
                await self._nap(min(LOOK_S, until - at))
        except asyncio.CancelledError:
            lease.release()  # begun, as documented, and not waited for
            raise
        if value is not None:
            self._tell("wrote" if self._counters.write(counter, token, value + 1) else "stale", who, name=counter)

    async def _end(self, who: str, lease: Any) -> None:
        if self._random.random() < 0.01:
            self._tell("ended", who, how="forgotten")
            return
        confirmed = await got(lease.release())
        self._tell("ended", who, how="released" if confirmed else "unconfirmed")
        if lease.held:
            self._tell("broken", who, text="a lease that was released is held")

    def _fork(self, who: str, lease: Any) -> None:
        child = os.fork()
        if not child:
            os._exit(1 if lease.held else 0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 1:
            self._tell("broken", who, text="a forked child holds its parent's lease")


PROGRAMS = {
    "lock": Actor.lock,
    "hand_over": Actor.hand_over,
    "several": Actor.several,
    "permits": Actor.permits,
    "pages": Actor.pages,
    "lead": Actor.lead,
    "break_in": Actor.break_in,
}


def at_once(program: Coroutine[Any, Any, None]) -> None:
    """Run a program whose client is for threads: it never has to wait for a loop."""
    try:
        program.send(None)
    except StopIteration:
        return
    raise AssertionError("a program for threads has waited for an event loop")


def in_thread(plan: Plan, number: int, client: dibs.Client, recorder: Recorder) -> None:
    actor = Actor(plan, number, client, recorder)
    while not calm(plan):
        at_once(actor.one())


def calm(plan: Plan) -> bool:
    return os.path.exists(os.path.join(plan.folder, "calm"))


async def in_tasks(plan: Plan, client: dibs.AsyncClient, recorder: Recorder) -> None:
    """Run programs in tasks, of which many are cancelled somewhere in the middle."""

    async def go_on(actor: Actor, chance: random.Random) -> None:
        while not calm(plan):
            try:
                await asyncio.wait_for(actor.one(), chance.choice((0.002, 0.01, 0.1, 1, 10, 10)))
            except asyncio.TimeoutError:
                pass
            await asyncio.sleep(0)  # a program that asks for nothing lets nobody else have the loop

    numbers = range(plan.threads, plan.threads + plan.tasks)
    await asyncio.gather(*(go_on(Actor(plan, n, client, recorder), random.Random(plan.seed + n)) for n in numbers))


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    parent = os.getppid()
    plant(plan.bug)
    recorder = Recorder(Path(plan.folder))

    def guarded(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            recorder.tell("broken", recorder.who(), text=f"{type(error).__name__}: {error}")
            raise

    async def tasks() -> None:
        aclient = dibs.connect_async(plan.url, **how)
        await in_tasks(plan, aclient, recorder)
        over.release()
        await asyncio.Event().wait()  # the loop goes on, as that of a program would

    def threads(number: int) -> None:
        in_thread(plan, number, client, recorder)
        over.release()

    how: Any = {"request_timeout": REQUEST_TIMEOUT_S, "patience": PATIENCE_S, "takeover": plan.takeover}
    over = threading.Semaphore(0)
    client = dibs.connect(plan.url, **how)
    for number in range(plan.threads):
        threading.Thread(target=guarded, args=(threads, number), daemon=True).start()
    threading.Thread(target=guarded, args=(lambda: asyncio.run(tasks()),), daemon=True).start()
    left = plan.threads + 1
    while os.getppid() == parent:
        if over.acquire(timeout=0.2):
            left -= 1
            if not left:
                recorder.tell("calm", recorder.who())
    os._exit(0)


if __name__ == "__main__":
    main()
