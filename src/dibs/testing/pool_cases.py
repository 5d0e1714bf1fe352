"""Conformance cases on the contract of stores that keep several permits of a name."""

from __future__ import annotations

import threading
import time
from functools import partial

from dibs._typing import TYPE_CHECKING
from dibs.store import ANY_SLOT, GONE, LINE_GRACE_S, PIN_KEEP_S, RELEASED, Granted, Mismatch, Release, Renew, Renewed
from dibs.testing.case import (
    STORE_CASES,
    Bench,
    asking,
    claims,
    equal,
    granted,
    held,
    pools,
    rising,
    together,
    told_soon,
    until,
)

if TYPE_CHECKING:
    from dibs.store import Acquire, Outcome
    from dibs.testing.case import Connection


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


@STORE_CASES.case("P12", pools)
def permits_given_back_are_hinted(bench: Bench) -> None:
    """Where a store has hints, one reaches the first in line when a holder gives back some of its permits, too."""
    store, name, (mine, a) = bench.open(), bench.name(), claims(2)
    granted(store.act(permits(name, mine, 3, 3))[0], "all permits")
    with told_soon(bench, permits(name, a, 3, line=True), "a downgrade"):
        granted(store.act(permits(name, mine, 3))[0], "the same claim, with fewer")


@STORE_CASES.case("P14", pools)
def permits_of_one_name_in_one_call(bench: Bench) -> None:
    """Several claims for permits of one name in one call are decided in the order given, new name or old.

    What one of them gives back, and another keeps by its place in line, counts for those behind it.
    """
    store, name, other = bench.open(), bench.name(), bench.name()
    a, b, c, d, e, f = claims(6)
    tokens: list[int] = []
    seen = store.act(permits(name, a, 3), permits(other, a, 2), permits(name, b, 3, 2), permits(name, c, 3))
    equal([slot(one, "of a new name") for one in seen[:3]], [1, 1, 2], "slots of new names")
    held(seen[3], "c, for whom nothing is left")
    tokens += [granted(seen[0], a), granted(seen[2], b)]
    again = store.act(permits(name, b, 3, 2), permits(name, d, 5), permits(name, a, 3))
    equal([again[0], again[2]], [seen[2], seen[0]], "those who hold, asked for again")
    equal(again[1], Mismatch(3), "d, who believes in another limit")
    seen = store.act(Release(name, b, 2), permits(name, c, 3), permits(name, d, 3, 2), permits(name, e, 3))
    equal([slot(seen[1], c), slot(seen[3], e)], [2, 3], "slots of those for whom b made room")
    held(seen[2], "d, who wants two when one is left")
    tokens += [granted(seen[1], c), granted(seen[3], e)]
    rising(tokens, "grants of one name")
    first = held(store.act(permits(name, d, 3, 2, line=True))[0], "d in line")
    of_d = permits(name, d, 3, 2)._replace(wake="w", ticket=first.ticket)
    seen = store.act(Release(name, c, 2), permits(name, f, 3), of_d, Release(name, a, 1))
    held(seen[1], "f, who is not in line")
    held(seen[2], "d, who is")
    seen = store.act(of_d, permits(name, f, 3))
    rising([*tokens, granted(seen[0], "d, as soon as two are free")], "grants of one name")
    held(seen[1], "f, behind it")


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
        store.purge(bench.namespace, 0)
    rising(tokens, "tokens across slots, releases and purge")


@STORE_CASES.case("P2", pools)
def purged_slots_leave_their_tokens(bench: Bench) -> None:
    """Slots that are purged while others are held take no token along: what comes after has a greater one."""
    store, other, name = bench.open(), bench.open(), bench.name()
    holder, *others = claims(4)
    slot(store.act(permits(name, holder, 3))[0], "one that stays")
    tokens: list[int] = []
    for claim in others:
        granted = store.act(permits(name, claim, 3))[0]
        equal(slot(granted, claim), 2, "the slot")
        assert isinstance(granted, Granted)
        tokens.append(granted.fencing_token)
        equal(store.act(Release(name, claim, 2)), [RELEASED], "its end")
        other.purge(bench.namespace, 0)
    rising(tokens, "tokens of a slot that was purged")


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


@STORE_CASES.case("P14", pools)
def a_limit_is_set_also_by_who_is_refused(bench: Bench) -> None:
    """A greater limit holds at once, though who sets it is refused: what is new is kept for who is ahead in line."""
    store, name, (a, b, c, d) = bench.open(), bench.name(), claims(4)
    for claim in (a, b):
        slot(store.act(permits(name, claim, 2))[0], claim)
    first = held(store.act(permits(name, c, 2, line=True))[0], "c, in line")
    held(store.act(permits(name, d, 3)._replace(resize=True))[0], "d, with a greater limit, behind c")
    equal(store.act(permits(name, d, 2)), [Mismatch(3)], "the old limit")
    equal(slot(store.act(permits(name, c, 3)._replace(wake="w", ticket=first.ticket))[0], "c"), 3, "c's slot")


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
