"""Conformance cases on rings of waiters, run through both faces: who is told, how soon, and who must not be."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import WouldDeadlock
from dibs.notes import BEAT_S, MARK, SOON_S, TOLD_WITHIN_S
from dibs.testing.case import CLIENT_CASES, STORE_CASES, Bench, Lateness, equal, gone, granted, held
from dibs.testing.client_bench import had, raises, reached, task, until
from dibs.waiting import NOTE_AFTER_S

if TYPE_CHECKING:
    from dibs.store import Capabilities
    from dibs.testing.faces import Face

case = CLIENT_CASES.case

# Long enough for a ring to be told, had it been taken for one.
QUIET_S = TOLD_WITHIN_S + 0.5
# Between two that begin to wait, so that which of them is the younger is beyond doubt.
PAUSE_S = 0.5


def told(capabilities: Capabilities) -> bool:
    return capabilities.deadlocks


def told_with_permits(capabilities: Capabilities) -> bool:
    return capabilities.deadlocks and capabilities.permits


class Actor:
    """A task that takes one thing, and when all have theirs another; what became of it, and when."""

    def __init__(self, face: Face, first: Any, second: Any, **how: Any) -> None:
        self.face = face
        self.first, self.second, self.how = first, second, how
        self.has_first = asyncio.Event()
        self.go_on = asyncio.Event()
        self.end = asyncio.Event()
        self.error: WouldDeadlock | None = None
        self.told_at = 0.0
        self.had_second = False
        self.running = task(self._run())

    async def reached_first(self) -> None:
        await reached(self.has_first, self.running, f"{self.first!r} is had")

    async def _run(self) -> None:
        face = self.face
        lease = await had(face, self.first)
        self.has_first.set()
        await self.go_on.wait()
        try:
            second = await face.do(self.second.acquire, **self.how) if self.second is not None else None
        except WouldDeadlock as error:
            self.told_at = time.monotonic()
            self.error = error
        else:
            if second is not None:
                self.had_second = True
                await face.do(second.release)
            if self.second is None or self.how:
                await self.end.wait()
        with suppress(Exception):
            await face.do(lease.release)


async def begin(*actors: Actor, pause: float = PAUSE_S) -> float:
    """Let everybody have its first, then begin to wait for its second in the order given; when the last did."""
    for error in await asyncio.gather(*(actor.reached_first() for actor in actors), return_exceptions=True):
        if error is not None:
            raise error
    for actor in actors[:-1]:
        actor.go_on.set()
        await asyncio.sleep(pause)
    actors[-1].go_on.set()
    return time.monotonic()


async def all_over(*actors: Actor) -> None:
    for actor in actors:
        actor.end.set()
    await asyncio.wait_for(asyncio.gather(*(actor.running for actor in actors)), 30)


async def ring(face: Face, actors: list[Actor], names: list[str]) -> None:
    """The last to wait is told in time and how, and all the others get what they waited for."""
    with Lateness() as late:
        closed_at = await begin(*actors)
        await all_over(*actors)
    equal([actor.error is not None for actor in actors], [False] * (len(actors) - 1) + [True], "who is told")
    equal([actor.had_second for actor in actors[:-1]], [True] * (len(actors) - 1), "who goes on")
    took = actors[-1].told_at - closed_at
    assert took < TOLD_WITHIN_S + late.seconds, f"told {took:.2f} s after the ring was closed"
    error = actors[-1].error
    assert error is not None
    equal(len(error.cycle), len(actors), "lines of the ring")
    for name in names:
        holds = [line for line in error.cycle if f"holds {name!r} (token" in line]
        waits = [line for line in error.cycle if line.endswith(f"waits for {name!r}")]
        equal((len(holds), len(waits)), (1, 1), f"who holds and who waits for {name} in {error.cycle}")
    assert all(line in str(error) for line in error.cycle), str(error)


@case("the rings", told)
async def two_who_wait_for_each_other(face: Face) -> None:
    """Of two clients that wait for each other's name the last to wait is told within 2 s, and the other goes on."""
    ours, theirs = face.client(), face.client()
    actors = [
        Actor(face, ours.lock("a"), ours.lock("b")),
        Actor(face, theirs.lock("b"), theirs.lock("a")),
    ]
    await ring(face, actors, ["a", "b"])


@case("the rings, once", told)
async def a_run_and_a_lock_who_wait_for_each_other(face: Face) -> None:
    """Who holds a lock and waits for work that is done once is told when the one at that work waits for the lock."""
    ours, theirs = face.client(), face.client()
    lease = await had(face, ours.lock("a"))
    begun = asyncio.Event()

    async def work() -> None:
        run = await face.do(theirs.once("b", keep=60).begin)
        begun.set()
        try:
            second = await had(face, theirs.lock("a"))
            await face.do(second.release)
        finally:
            await face.do(run.lease.release)

    worker = task(work())
    await reached(begun, worker, "the run begins")
    await asyncio.sleep(PAUSE_S)
    with Lateness() as late:
        closed_at = time.monotonic()
        with raises(WouldDeadlock) as caught:
            await face.do(ours.once("b", keep=60).begin)
        took = time.monotonic() - closed_at
    assert took < TOLD_WITHIN_S + late.seconds, f"told {took:.2f} s after the ring was closed"
    equal(len(caught.error.cycle), 2, "lines of the ring")
    await face.do(lease.release)
    await asyncio.wait_for(worker, 30)


@case("the rings", told)
async def three_in_a_ring(face: Face) -> None:
    """Three clients in a ring: the last to wait is told within 2 s, with all three spelled out."""
    clients = [face.client() for _ in range(3)]
    actors = [
        Actor(face, client.lock(first), client.lock(second))
        for client, first, second in zip(clients, "abc", "bca", strict=True)
    ]
    await ring(face, actors, ["a", "b", "c"])


@case("the rings", told)
async def two_of_one_client(face: Face) -> None:
    """Two threads or tasks of one client in a ring are told like those of two."""
    client = face.client(lock_order_warnings=False)
    actors = [
        Actor(face, client.lock("a"), client.lock("b")),
        Actor(face, client.lock("b"), client.lock("a")),
    ]
    await ring(face, actors, ["a", "b"])


@case("the rings", told)
async def a_ring_with_a_time_limit(face: Face) -> None:
    """Somebody whose wait has a limit that is far away is told, too."""
    ours, theirs = face.client(), face.client()
    actors = [
        Actor(face, ours.lock("a"), ours.lock("b")),
        Actor(face, theirs.lock("b"), theirs.lock("a", timeout=60)),
    ]
    await ring(face, actors, ["a", "b"])


@case("the rings", told)
async def a_ring_through_a_multilock(face: Face) -> None:
    """A multilock holds nothing while it waits, but what its caller holds besides can close a ring."""
    ours, theirs = face.client(), face.client()
    actors = [
        Actor(face, ours.multilock(["a", "x"]), ours.lock("b")),
        Actor(face, theirs.lock("b"), theirs.multilock(["a", "y"])),
    ]
    await ring(face, actors, ["a", "b"])


@case("the rings", told_with_permits)
async def a_ring_of_permits(face: Face) -> None:
    """Where all permits are held by those who wait, it is a ring, of semaphores and of readers and writers alike."""
    clients = [face.client() for _ in range(3)]
    actors = [
        Actor(face, clients[0].semaphore("s", 2), clients[0].lock("b")),
        Actor(face, clients[1].semaphore("s", 2), clients[1].lock("b")),
        Actor(face, clients[2].lock("b"), clients[2].semaphore("s", 2)),
    ]
    with Lateness() as late:
        closed_at = await begin(*actors)
        await all_over(*actors)
    equal([actor.error is not None for actor in actors], [False, False, True], "who is told")
    took = actors[-1].told_at - closed_at
    assert took < TOLD_WITHIN_S + late.seconds, f"told after {took:.2f} s"
    ours, theirs = face.client(), face.client()
    both = [
        Actor(face, ours.rwlock("rw").read(), ours.lock("c")),
        Actor(face, theirs.lock("c"), theirs.rwlock("rw").write()),
    ]
    await ring(face, both, ["rw", "c"])


async def nobody_told(actors: list[Actor]) -> None:
    await begin(*actors)
    await asyncio.sleep(QUIET_S)
    await all_over(*actors)
    for actor in actors:
        assert actor.error is None, f"told of a ring that is none: {actor.error}"


@case("the rings")
async def a_chain_is_no_ring(face: Face) -> None:
    """Who waits for somebody who waits for somebody who is at work is told nothing, however long it takes."""
    clients = [face.client() for _ in range(3)]
    actors = [
        Actor(face, clients[0].lock("a"), None),
        Actor(face, clients[1].lock("b"), clients[1].lock("a")),
        Actor(face, clients[2].lock("c"), clients[2].lock("b")),
    ]
    await nobody_told(actors)
    equal([actor.had_second for actor in actors], [False, True, True], "who goes on")


@case("the rings")
async def who_gives_up_soon_is_in_no_ring(face: Face) -> None:
    """A wait with a limit that ends within 2 s breaks its ring by itself: nobody is told."""
    ours, theirs = face.client(), face.client()
    actors = [
        Actor(face, ours.lock("a"), ours.lock("b")),
        Actor(face, theirs.lock("b"), theirs.lock("a"), timeout=SOON_S - 0.2),
    ]
    await nobody_told(actors)
    equal([actor.had_second for actor in actors], [True, False], "who goes on")


@case("the rings", told_with_permits)
async def a_permit_that_can_be_freed(face: Face) -> None:
    """While one of the permits is held by somebody who can give it back, waiting for it is no ring."""
    clients = [face.client() for _ in range(3)]
    actors = [
        Actor(face, clients[0].semaphore("s", 2), None),
        Actor(face, clients[1].semaphore("s", 2), clients[1].lock("b")),
        Actor(face, clients[2].lock("b"), clients[2].semaphore("s", 2)),
    ]
    await nobody_told(actors)
    equal([actor.had_second for actor in actors], [False, True, True], "who goes on")


@case("the rings", told)
async def whose_time_is_nearly_over(face: Face) -> None:
    """A waiter with a limit leaves a ring 2 s before it ends, so nobody is told of a ring that was about to break."""
    ours, theirs = face.client(), face.client()
    actors = [
        Actor(face, ours.lock("a"), ours.lock("b")),
        # Its note stands for less than a beat: in a whole one the ring may be proven, and it is right to tell it then.
        Actor(face, theirs.lock("b"), theirs.lock("a"), timeout=SOON_S + NOTE_AFTER_S + 0.8 * BEAT_S),
    ]
    await nobody_told(actors)
    equal([actor.had_second for actor in actors], [True, False], "who goes on")


@case("the rings", told)
async def notes_leave_no_trace(face: Face) -> None:
    """Waiting notes are in no list of leases, and are taken back when the wait is over."""
    ours, theirs = face.client(), face.client()
    actors = [
        Actor(face, ours.lock("a"), None),
        Actor(face, theirs.lock("b"), theirs.lock("a")),
    ]
    look = Bench(face.place.address)
    try:
        store = look.open()
        await begin(*actors)
        notes = f"{face.namespace}{MARK}"
        await until(lambda: store.leases(notes), "a waiter's note")
        equal([lease.name for lease in await face.do(ours.leases)], ["a", "b"], "the leases that are shown")
        await all_over(*actors)
        await until(lambda: not store.leases(notes), "no note is left", 3)
    finally:
        look.close()


@case("the rings")
async def who_holds_nothing_leaves_no_note(face: Face) -> None:
    """A caller that holds nothing and waits writes nothing besides; where rings are not told, nobody does."""
    clients = [face.client() for _ in range(3)]
    holder = Actor(face, clients[0].lock("a"), None)
    await holder.reached_first()
    waiter = task(face.do(clients[1].lock("a").acquire))
    both = None
    if not face.capabilities.deadlocks:
        both = Actor(face, clients[2].lock("b"), clients[2].lock("a"))
        await begin(both)
    await asyncio.sleep(NOTE_AFTER_S + 1.0)
    look = Bench(face.place.address)
    try:
        equal(look.open().leases(f"{face.namespace}{MARK}"), [], "notes")
    finally:
        look.close()
    holder.go_on.set()
    await all_over(holder)
    lease = await waiter
    await face.do(lease.release)
    if both is not None:
        await all_over(both)


@STORE_CASES.case("the rings", told)
def names_of_notes_are_apart(bench: Bench) -> None:
    """A note's name is beside the namespace's names: neither range shows the other's, and it is free for the next."""
    store = bench.open()
    first, second = "one-1", "two-1"
    note, name = f"{bench.namespace}{MARK}1", bench.name("x")
    granted(store.acquire(note, first, max(4.0, bench.capabilities.ttl_min_s)), "a note")
    granted(store.acquire(name, first), "a lease")
    equal([lease.name for lease in store.leases(f"{bench.namespace}:")], [name], "what is shown of the namespace")
    equal([lease.name for lease in store.leases(f"{bench.namespace}{MARK}")], [note], "what is shown of notes")
    held(store.acquire(note, second), "a number that is taken")
    store.release(note, first)
    granted(store.acquire(note, second, max(4.0, bench.capabilities.ttl_min_s)), "a number that was given back")
    gone(store.renew(note, first), "the note before")
    store.release(note, second)
    store.release(name, first)
