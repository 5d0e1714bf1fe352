"""Conformance cases on names with several permits: on the contract, and on semaphores and read/write locks."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from dibs.errors import InvalidOption, LeaseLost, LimitMismatch, LockTimeout, NotHeld, Unsupported, WouldDeadlock
from dibs.store import ANY_SLOT, GONE, LINE_GRACE_S, PIN_KEEP_S, RELEASED, Granted, Mismatch, Release, Renew, Renewed
from dibs.testing.case import CLIENT_CASES, STORE_CASES, Bench, asking, claims, equal, held, rising, together, until
from dibs.testing.client_cases import had, raises, task, waiting

if TYPE_CHECKING:
    from dibs.store import Acquire, Capabilities, Outcome
    from dibs.testing.case import Connection
    from dibs.testing.faces import Face


def pools(capabilities: Capabilities) -> bool:
    return capabilities.permits


def none(capabilities: Capabilities) -> bool:
    return not capabilities.permits


def permits(name: str, claim_id: str, of: int, take: int = 1, ttl: float = 60, *, line: bool = False) -> Acquire:
    """An acquire of ``take`` of ``of`` permits."""
    return asking(name, claim_id, ttl, line=line)._replace(permits=of, take=take)


def slot(outcome: Outcome, what: str) -> int:
    if not isinstance(outcome, Granted):
        raise AssertionError(f"{what}: expected it to be granted, saw {outcome!r}")
    return outcome.slot


def ask_for(store: Connection, request: Acquire) -> Granted | None:
    """The grant, or None when it was refused."""
    outcome = store.act(request)[0]
    return outcome if isinstance(outcome, Granted) else None


# -- the contract -----------------------------------------------------------------------------------------------------


@STORE_CASES.case("P14", pools)
def no_more_than_the_limit(bench: Bench) -> None:
    """Permits are numbered from 1, freed numbers are used again first, and nobody gets one more than there are."""
    store, name, (a, b, c, d) = bench.open(), bench.name(), claims(4)
    equal([slot(store.act(permits(name, x, 3))[0], x) for x in (a, b, c)], [1, 2, 3], "slots of the first three")
    equal(held(store.act(permits(name, d, 3))[0], "the fourth").holder is not None, True, "somebody is named")
    equal(store.act(Release(name, b, 2)), [RELEASED], "the second gives back")
    equal(slot(store.act(permits(name, d, 3))[0], "the fourth again"), 2, "the freed slot")
    equal(sorted((lease.slot, lease.holder) for lease in store.leases(name))[1][0], 2, "slots as listed")
    equal(len(store.leases(name)), 3, "leases as listed")
    for claim, number in ((a, 1), (c, 3), (d, 2)):
        equal(store.act(Release(name, claim, number)), [RELEASED], "the others give back")
    equal(store.leases(name), [], "afterwards")


@STORE_CASES.case("P2", pools)
def tokens_of_permits_rise(bench: Bench) -> None:
    """Every grant of a name has a greater token than all before it, in any slot; a repetition keeps token and slot."""
    store, name = bench.open(), bench.name()
    tokens: list[int] = []
    for _ in range(2):
        them = claims(3)
        for claim in them:
            first, again = store.act(permits(name, claim, 3))[0], store.act(permits(name, claim, 3))[0]
            equal(again, first, "a repeated acquire")
            assert isinstance(first, Granted)
            tokens.append(first.fencing_token)
        for number, claim in enumerate(them, 1):
            store.act(Release(name, claim, number))
        store.purge(0)
    rising(tokens, "tokens across slots, releases and purge")


@STORE_CASES.case("P7, P8", pools)
def permits_end_by_themselves(bench: Bench) -> None:
    """A dead holder's permit comes back by its ttl; a renewal keeps one, and only the claim's own can be ended."""
    store, name, (a, b, c) = bench.open(), bench.name(), claims(3)
    ttl = bench.short_ttl
    slot(store.act(permits(name, a, 2, ttl=ttl))[0], "a")
    slot(store.act(permits(name, b, 2))[0], "b")
    equal(store.act(Release(name, c, 1), Renew(name, c, 60, 1)), [GONE, GONE], "what is not c's")
    outcome = until(partial(ask_for, store, permits(name, c, 2)), "a's permit comes back")
    equal(outcome.slot, 1, "the dead holder's slot")
    equal(store.act(Renew(name, a, 60, 1)), [GONE], "a's own renewal, too late")
    equal(type(store.act(Renew(name, b, 60, 2))[0]), Renewed, "b's renewal")


@STORE_CASES.case("P14", pools)
def the_limit_is_kept_by_the_store(bench: Bench) -> None:
    """Another limit is told, not obeyed, unless it is to be the new one; a smaller one evicts nobody."""
    store, name, (a, b, c, d) = bench.open(), bench.name(), claims(4)
    for claim in (a, b):
        slot(store.act(permits(name, claim, 2))[0], claim)
    equal(store.act(permits(name, c, 5)), [Mismatch(2)], "another limit")
    slot(store.act(permits(name, c, 3)._replace(resize=True))[0], "c, with a greater limit")
    equal(store.act(permits(name, d, 2)), [Mismatch(3)], "the old limit")
    held(store.act(permits(name, d, 1)._replace(resize=True))[0], "d, with a smaller limit")
    equal(len(store.leases(name)), 3, "nobody is evicted")
    store.act(Release(name, a, 1))
    store.act(Release(name, b, 2))
    held(store.act(permits(name, d, 1))[0], "d, while one permit of one is held")
    store.act(Release(name, c, 3))
    equal(slot(store.act(permits(name, d, 1))[0], "d"), 1, "d at last")


@STORE_CASES.case("P14, P20", pools)
def a_lock_has_no_permits(bench: Bench) -> None:
    """A name is a lock or has permits; whoever takes it for the other is told."""
    store, (lock, pool), (a, b) = bench.open(), bench.names(2), claims(2)
    store.acquire(lock, a)
    equal(store.act(permits(lock, b, 3), permits(pool, a, 3))[0], Mismatch(0), "permits of a lock")
    for line in (False, True):
        equal(store.acquire(pool, b, line=line), Mismatch(3), "a lock on permits")
    store.act(Release(pool, a, 1))
    equal(store.acquire(pool, b), Mismatch(3), "a lock on permits nobody holds")


@STORE_CASES.case("P13, P15", pools)
def permits_are_kept_for_who_is_ahead(bench: Bench) -> None:
    """Who wants many waits for them in line, and those behind do not pass; who gives up no longer stands in the way."""
    store, name, (a, b, c, d) = bench.open(), bench.name(), claims(4)
    slot(store.act(permits(name, a, 3))[0], "a")
    first = held(store.act(permits(name, b, 3, take=3, line=True))[0], "b wants all three")
    equal((first.ticket is not None, first.ahead), (True, False), "b's place")
    second = held(store.act(permits(name, c, 3, line=True))[0], "c wants one, behind b")
    equal((second.holder, second.ahead), (None, True), "why c waits though two are free")
    assert 0 < second.free_in <= LINE_GRACE_S + 0.01, f"when c may ask again: {second.free_in}"
    equal(store.shown(name).waiting, 2, "waiters as listed")
    store.act(Release(name, a, 1))
    held(store.act(permits(name, d, 3))[0], "d, who is not in line")
    equal(slot(store.act(permits(name, b, 3, take=3)._replace(wake="w", ticket=first.ticket))[0], "b"), 1, "b's slot")
    equal(store.shown(name).take, 3, "how many b took")
    store.act(Release(name, b, 1))
    equal(slot(store.act(permits(name, c, 3)._replace(wake="w", ticket=second.ticket))[0], "c"), 1, "c's slot")
    equal(store.shown(name).waiting, 0, "waiters left")


@STORE_CASES.case("P13", pools)
def a_place_in_line_is_for_what_was_asked_last(bench: Bench) -> None:
    """A waiter that asks again, for more or for fewer, keeps its place, and that many are kept for it."""
    store, name, (a, b, waiter, newcomer) = bench.open(), bench.name(), claims(4)
    for takes, in_time in (((1, 3), False), ((3, 1), True)):
        first = slot(store.act(permits(name, a, 4, 3))[0], "a")
        second = slot(store.act(permits(name, b, 4, 1))[0], "b")
        places = [held(store.act(permits(name, waiter, 4, take, line=True))[0], "the waiter") for take in takes]
        equal(places[1].ticket, places[0].ticket, "its place")
        # In one call, so that the waiter counts as alive however slow the machine is.
        *_, outcome = store.act(
            permits(name, waiter, 4, takes[1], line=True), Release(name, a, first), permits(name, newcomer, 4, 2)
        )
        equal(isinstance(outcome, Granted), in_time, f"two of four beside a waiter for {takes[1]}, granted")
        store.act(Release(name, waiter, ANY_SLOT, places[0].ticket), Release(name, newcomer, ANY_SLOT))
        store.act(Release(name, b, second))


@STORE_CASES.case("P13", pools)
def the_dead_in_line_for_permits_are_passed(bench: Bench) -> None:
    """A waiter that asks no more keeps those behind it back for the grace and no longer."""
    store, name, (a, dead, c) = bench.open(), bench.name(), claims(3)
    slot(store.act(permits(name, a, 2))[0], "a")
    held(store.act(permits(name, dead, 2, take=2, line=True))[0], "the one that dies")
    began = time.monotonic()
    ticket = held(store.act(permits(name, c, 2, line=True))[0], "c, behind it").ticket
    asked = permits(name, c, 2)._replace(wake="w", ticket=ticket)
    until(lambda: isinstance(store.act(asked)[0], Granted), "c passes the dead")
    took = time.monotonic() - began
    assert took < LINE_GRACE_S + 1.0 + bench.capabilities.resolution_s, f"the dead held c back for {took:.1f} s"


@STORE_CASES.case("P15", pools)
def permits_can_be_given_back_in_part(bench: Bench) -> None:
    """A claim that asks again for fewer permits keeps slot and token, and frees the others at once; never for more."""
    store, name, (a, b, c) = bench.open(), bench.name(), claims(3)
    first = store.act(permits(name, a, 2, take=2))[0]
    held(store.act(permits(name, b, 2))[0], "b, while a has both")
    equal(store.act(permits(name, a, 2, take=1)), [first], "a keeps one")
    equal(slot(store.act(permits(name, b, 2))[0], "b"), 2, "b's slot")
    equal(store.act(permits(name, a, 2, take=2)), [first], "a asks for both again")
    held(store.act(permits(name, c, 2))[0], "c, for whom none is left")
    store.act(Release(name, b, 2))
    equal(slot(store.act(permits(name, c, 2))[0], "c"), 2, "c: a's second was not given to a again")


@STORE_CASES.case("P8, P9", pools)
def who_was_not_told_its_slot_can_give_it_back(bench: Bench) -> None:
    """A release for whatever slot the claim has, as after a lost answer, frees it; a wrong slot does not."""
    store, name, (a, b, c) = bench.open(), bench.name(), claims(3)
    slot(store.act(permits(name, a, 3))[0], "a")
    equal(slot(store.act(permits(name, b, 3))[0], "b"), 2, "b's slot")
    equal(store.act(Release(name, b, 1), Release(name, b, 3), Release(name, c, ANY_SLOT)), [GONE] * 3, "wrong ones")
    equal(store.act(Release(name, b, ANY_SLOT)), [RELEASED], "b, whatever its slot")
    equal([lease.slot for lease in store.leases(name)], [1], "slots left")
    equal(store.act(Release(name, a, ANY_SLOT, None, 60)), [RELEASED], "a, whose slot is to be kept")
    equal([lease.slot for lease in store.leases(name)], [1], "slots kept")
    equal(slot(store.act(permits(name, b, 3))[0], "b, again"), 2, "b's slot")
    equal(store.act(Release(name, b, ANY_SLOT, None, PIN_KEEP_S)), [RELEASED], "b, as if it might be pinned")
    until(lambda: [lease.slot for lease in store.leases(name)] == [1], "b's slot is free")


@STORE_CASES.case("P14", pools)
def a_repetition_resizes_nothing(bench: Bench) -> None:
    """A claim that repeats its acquire after somebody else has set another limit leaves that one as it is."""
    store, name, (a, b, c) = bench.open(), bench.name(), claims(3)
    first = store.act(permits(name, a, 2))[0]
    slot(store.act(permits(name, b, 5)._replace(resize=True))[0], "b, with a greater limit")
    equal(store.act(permits(name, a, 2)), [first], "a, again")
    equal(store.act(permits(name, c, 2)), [Mismatch(5)], "the limit that is kept")


@STORE_CASES.case("P13", pools)
def a_grant_clears_the_line_of_the_dead(bench: Bench) -> None:
    """Who stands in line and has ceased to ask is not counted for ever; if it asks again, it has its place."""
    store, name, (a, dead, b) = bench.open(), bench.name(), claims(3)
    slot(store.act(permits(name, a, 1))[0], "a")
    silent = held(store.act(permits(name, dead, 1, line=True))[0], "the one that falls silent")
    equal(store.shown(name).waiting, 1, "waiters as listed")
    time.sleep(LINE_GRACE_S + 0.1 + bench.capabilities.resolution_s)
    store.act(Release(name, a, 1))
    slot(store.act(permits(name, b, 1))[0], "b")
    equal(store.shown(name).waiting, 0, "waiters after a grant")
    back = permits(name, dead, 1)._replace(wake="w", ticket=silent.ticket)
    equal(held(store.act(back)[0], "the silent one").ticket, silent.ticket, "its place")


@STORE_CASES.case("P14", pools)
def permits_under_contention(bench: Bench) -> None:
    """Many connections at once never hold more than the limit, and no two the same slot."""
    name, limit, clients = bench.name(), 3, 6
    stores, mutex = [bench.open() for _ in range(clients)], threading.Lock()
    inside: set[int] = set()
    most, visits = 0, 0

    def work(number: int) -> None:
        nonlocal most, visits
        for round_ in range(6):
            claim = f"{bench.namespace[-6:]}{number}-{round_}"
            ask = permits(name, claim, limit)
            got = until(partial(ask_for, stores[number], ask), "a permit")
            with mutex:
                assert got.slot not in inside, f"slot {got.slot} was given twice"
                inside.add(got.slot)
                most, visits = max(most, len(inside)), visits + 1
            time.sleep(0.002)
            with mutex:
                inside.discard(got.slot)
            equal(stores[number].act(Release(name, claim, got.slot)), [RELEASED], "release")

    together([partial(work, number) for number in range(clients)])
    equal((most <= limit, visits), (True, clients * 6), f"at most {limit} at once ({most} were), all visits made")


# -- what users see ---------------------------------------------------------------------------------------------------

case = CLIENT_CASES.case


@case("P14", pools)
async def a_semaphore_lets_so_many_in(face: Face) -> None:
    """Clients that pass through one semaphore are never more inside than its limit, each with a slot of its own."""
    inside: set[int] = set()
    most, visits = 0, 0

    async def work() -> None:
        nonlocal most, visits
        semaphore = face.client().semaphore("rooms", 2, ttl=20)
        for _ in range(5):
            async with face.holding(semaphore) as lease:
                assert lease.slot in (1, 2), f"slot {lease.slot} of 2"
                assert lease.slot not in inside, f"slot {lease.slot} was given twice"
                inside.add(lease.slot)
                most = max(most, len(inside))
                await asyncio.sleep(0.1)  # long enough for the next to be let in beside it
                lease.check()
                inside.discard(lease.slot)
                visits += 1

    await asyncio.gather(*[task(work()) for _ in range(4)])
    equal((most, visits), (2, 20), "most at once, visits of 4 clients")


@case("P14", pools)
async def like_a_bounded_semaphore(face: Face) -> None:
    """One object, many holders; releasing once too often is ValueError; ``available()`` asks the store."""
    client, other = face.client(), face.client()
    semaphore = client.semaphore("bounded", 3)
    equal((semaphore.name, semaphore.limit, semaphore.locked()), ("bounded", 3, False), "name, limit, locked")
    leases = [await had(face, semaphore) for _ in range(3)]
    equal([lease.slot for lease in leases], [1, 2, 3], "slots")
    equal((semaphore.locked(), await face.do(semaphore.available)), (True, 0), "locked and available")
    equal(await face.do(semaphore.acquire, timeout=0), None, "a fourth")
    equal(await face.do(other.semaphore("bounded", 3).acquire, timeout=0), None, "a fourth, elsewhere")
    equal(await face.do(semaphore.release, 2), True, "two released")
    equal(await face.do(semaphore.available), 2, "available")
    with raises(ValueError):
        await face.do(semaphore.release, 2)
    equal(await face.do(semaphore.release), True, "the last released")
    with raises(ValueError):
        await face.do(semaphore.release)
    equal(await face.do(semaphore.available), 3, "available at last")


@case("P14", pools)
async def limits_must_agree(face: Face) -> None:
    """Another limit is LimitMismatch, until it is set with ``resize``; so is a lock of the same name."""
    client, other = face.client(), face.client()
    lease = await had(face, client.semaphore("agreed", 2))
    for how in ({"timeout": 0}, {"timeout": 5}):
        with raises(LimitMismatch) as caught:
            await face.do(other.semaphore("agreed", 3).acquire, **how)
        assert {"2", "3"} <= set(str(caught.error).split()), f"the limits are not told: {caught.error}"
    with raises(LimitMismatch):
        await face.do(other.lock("agreed").acquire)
    with raises(LimitMismatch):
        await face.do(other.rwlock("agreed").read().acquire)
    wider = await had(face, other.semaphore("agreed", 3, resize=True))
    with raises(LimitMismatch):
        await face.do(client.semaphore("agreed", 2).acquire, timeout=0)
    for each in (lease, wider):
        await face.do(each.release)


@case("P14, P22", pools)
async def nested_use_takes_no_second_permit(face: Face) -> None:
    """With ``reentrant`` an owner that holds a permit enters again with the same one."""
    client = face.client()
    semaphore = client.semaphore("nested", 1, reentrant=True)
    async with face.holding(semaphore) as outer:
        async with face.holding(semaphore) as inner:
            equal(inner is outer, True, "the same lease")
        equal(outer.held, True, "after the inner block")
    equal(await face.do(semaphore.available), 1, "afterwards")


@case("P14", pools)
async def weight_is_all_or_nothing(face: Face) -> None:
    """Who takes several permits at once gets all of them or waits, and is not starved by those who take one."""
    client, other = face.client(), face.client()
    ones = [await had(face, client.semaphore("heavy", 4)) for _ in range(2)]
    heavy = task(face.do(other.semaphore("heavy", 4, weight=3).acquire, timeout=20))
    await waiting(face, client, "heavy", 1)
    equal(await face.do(client.semaphore("heavy", 4).acquire, timeout=0), None, "a newcomer who wants one")
    await face.do(ones[0].release)
    lease = await heavy
    equal(lease is not None, True, "three of four")
    equal({r.slot: r.take for r in await face.do(client.leases)}, {ones[1].slot: 1, lease.slot: 3}, "as listed")
    equal(await face.do(client.semaphore("heavy", 4).available), 0, "available")
    for each in (lease, ones[1]):
        await face.do(each.release)


@case("P7, P14", pools)
async def a_lost_permit_is_told(face: Face) -> None:
    """A permit that was broken is lost to its holder, and comes back."""
    client, operator = face.client(), face.client()
    lease = await had(face, client.semaphore("broken", 1, ttl=max(2.0, face.short_ttl)))
    await face.do(operator.break_lease, "broken", fencing_token=lease.fencing_token, now=True)
    equal(await face.do(lease.lost.wait, 20), True, "lost")
    with raises(LeaseLost):
        await face.do(lease.release)
    again = await had(face, operator.semaphore("broken", 1), timeout=20)
    assert again.fencing_token > lease.fencing_token, "the token of the next grant"
    await face.do(again.release)


@case("P14", pools)
async def who_would_wait_for_itself_is_told(face: Face) -> None:
    """Whoever would wait without limit for permits that it holds itself gets WouldDeadlock, and not before."""
    client = face.client()
    leases = [await had(face, client.semaphore("own", 2)) for _ in range(2)]
    with raises(WouldDeadlock):
        await face.do(client.semaphore("own", 2).acquire)
    equal(await face.do(client.semaphore("own", 2).acquire, timeout=0), None, "without waiting")
    for lease in leases:
        await face.do(lease.release)
    reading = await had(face, client.rwlock("own/page").read())
    for side in (client.rwlock("own/page").read(), client.rwlock("own/page").write()):
        with raises(WouldDeadlock):
            await face.do(side.acquire)
    await face.do(reading.release)


@case("P14", pools)
async def all_are_released_before_a_loss_is_told(face: Face) -> None:
    """``release(n)`` gives back everything it can before it raises LeaseLost for what had been lost."""
    client, operator = face.client(), face.client()
    semaphore = client.semaphore("some", 3, ttl=max(2.0, face.short_ttl))
    leases = [await had(face, semaphore) for _ in range(3)]
    await face.do(operator.break_lease, "some", fencing_token=leases[1].fencing_token, now=True)
    equal(await face.do(leases[1].lost.wait, 20), True, "lost")
    with raises(LeaseLost):
        await face.do(semaphore.release, 3)
    equal([lease.held for lease in leases], [False] * 3, "held afterwards")
    equal(await face.do(operator.semaphore("some", 3).available), 3, "available afterwards")


@case("P15", pools)
async def a_writer_that_became_a_reader_in_a_block(face: Face) -> None:
    """``downgrade()`` inside the writer's block lets readers in at once; the end of the block gives the lease back."""
    ours, theirs = face.client(), face.client()
    lock = ours.rwlock("block")
    async with face.holding(lock.write()) as lease:
        equal((lock.write().locked(), lock.read().locked()), (True, False), "who holds it, before")
        await face.do(lock.downgrade)
        equal((lock.write().locked(), lock.read().locked(), lease.held), (False, True, True), "who holds it, after")
        other = await had(face, theirs.rwlock("block").read(), timeout=20)
        await face.do(other.release)
    equal(lease.held, False, "the lease after the block")
    writer = await had(face, theirs.rwlock("block").write(), timeout=0)
    await face.do(writer.release)


@case("P6, P15", pools)
async def a_lease_that_is_over_is_not_revived_by_a_downgrade(face: Face) -> None:
    """Who downgrades a lease that was taken away is told LeaseLost, and holds nothing in the store."""
    client, operator = face.client(), face.client()
    lock = client.rwlock("taken", ttl=60)
    lease = await had(face, lock.write())
    await face.do(operator.break_lease, "taken", fencing_token=lease.fencing_token, now=True)
    with raises(LeaseLost):
        await face.do(lock.downgrade)
    equal(lease.held, False, "the lease")
    writer = await had(face, operator.rwlock("taken").write(), timeout=20)
    await face.do(writer.release)


@case("P15", pools)
async def many_readers_or_one_writer(face: Face) -> None:
    """Readers are inside together and never with a writer, of whom there is one at a time."""
    readers, writers, together_, writes = 0, 0, 0, 0

    async def read() -> None:
        nonlocal readers, together_
        lock = face.client().rwlock("page", ttl=20)
        for _ in range(4):
            async with face.holding(lock.read()):
                readers += 1
                together_ = max(together_, readers)
                equal(writers, 0, "writers beside a reader")
                await asyncio.sleep(0.1)
                readers -= 1

    async def write() -> None:
        nonlocal writers, writes
        lock = face.client().rwlock("page", ttl=20)
        for _ in range(3):
            async with face.holding(lock.write()):
                writers += 1
                equal((readers, writers), (0, 1), "readers and writers beside a writer")
                await asyncio.sleep(0.002)
                writers -= 1
                writes += 1

    await asyncio.gather(task(read()), task(read()), task(read()), task(write()), task(write()))
    equal((together_ > 1, writes), (True, 6), f"readers were together ({together_}), writes of 2 clients")


@case("P15", pools)
async def a_waiting_writer_holds_back_readers(face: Face) -> None:
    """Once a writer waits, new readers wait behind it; a reader cannot become a writer, a writer can a reader."""
    one, two, three = face.client(), face.client(), face.client()
    reading = one.rwlock("book")
    lease = await had(face, reading.read())
    with raises(WouldDeadlock):
        await face.do(reading.write().acquire, timeout=0)
    with raises(NotHeld):
        await face.do(reading.downgrade)
    writing = two.rwlock("book")
    written = asyncio.Event()

    async def write() -> None:
        got = await had(face, writing.write(), timeout=20)
        written.set()
        equal(await face.do(three.rwlock("book").read().acquire, timeout=0), None, "a reader beside the writer")
        await face.do(writing.downgrade)
        equal(got.held, True, "the downgraded lease")
        other = await had(face, three.rwlock("book").read(), timeout=20)
        equal(await face.do(one.rwlock("book").write().acquire, timeout=0), None, "a writer beside two readers")
        await face.do(other.release)
        equal(await face.do(writing.read().release), True, "released as a reader")

    writer = task(write())
    await waiting(face, three, "book", 1)
    equal(await face.do(three.rwlock("book").read().acquire, timeout=0), None, "a new reader while a writer waits")
    equal(written.is_set(), False, "the writer while a reader holds it")
    await face.do(lease.release)
    await writer


@case("P25", pools)
async def numbers_of_permits_are_checked(face: Face) -> None:
    """Limits and weights that are none are errors before any I/O."""
    client = face.idle_client()
    for limit, weight in ((0, 1), (-1, 1), (True, 1), (2.0, 1), (2**31, 1), (2, 0), (2, 3)):
        with raises(InvalidOption):
            client.semaphore("wrong", limit, weight=weight)
    with raises(LockTimeout, LimitMismatch, InvalidOption):
        client.semaphore("wrong", None)


@case("P25", none)
async def without_permits_there_are_no_semaphores(face: Face) -> None:
    """Where a store has only locks, making a semaphore or a read/write lock is refused at once."""
    client = face.idle_client()
    with raises(Unsupported):
        client.semaphore("none", 2)
    with raises(Unsupported):
        client.rwlock("none")
