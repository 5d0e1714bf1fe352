"""Conformance cases on the waiting line of a store: who is granted a free name. It never decides who holds one.

Claims here are those of different clients. A waiter asks with ``line=True``, is told its ticket, and asks again with
it.
"""

from __future__ import annotations

import time

from dibs.store import LINE_GRACE_S, RELEASED, Granted, Held, Release
from dibs.testing.case import (
    PATIENCE_S,
    STORE_CASES,
    Bench,
    Connection,
    Lateness,
    asking,
    claims,
    equal,
    fifo,
    gone,
    granted,
    held,
    rising,
    told_soon,
    until,
    within,
)

case = STORE_CASES.case


def line_up(store: Connection, name: str, *ids: str) -> list[int]:
    """Let each claim ask for a name that is held, and so stand in line; their tickets."""
    tickets = []
    for claim in ids:
        ticket = held(store.acquire(name, claim, line=True), "a waiter asks for a held name").ticket
        assert ticket is not None, "a waiter was told no ticket"
        tickets.append(ticket)
    return tickets


@case("P13")
def the_line_is_as_declared(bench: Bench) -> None:
    """Whoever asks for a place in line is told a ticket exactly where the store declares a line; others get none."""
    store, name, (mine, waiter, other) = bench.open(), bench.name(), claims(3)
    granted(store.acquire(name, mine), "a free name")
    ticket = held(store.acquire(name, waiter, line=True), "a waiter").ticket
    equal(
        ticket is not None,
        fifo(bench.capabilities),
        f"a ticket ({ticket}) where {bench.capabilities.waiting_line} is declared",
    )
    equal(
        held(store.acquire(name, other), "somebody who would not wait").ticket,
        None,
        "the ticket of one who would not wait",
    )
    lease = store.shown(name)
    equal(lease.waiting, 1 if fifo(bench.capabilities) else 0, "how many are shown waiting")


@case("P13", fifo)
def first_come_first_served(bench: Bench) -> None:
    """Grants follow the order in which waiters came, whoever asks first when the name is free."""
    store, name, (mine, a, b, c) = bench.open(), bench.name(), claims(4)
    granted(store.acquire(name, mine), "a free name")
    tickets = line_up(store, name, a, b, c)
    rising(tickets, "tickets in order of arrival")
    lease = store.shown(name)
    assert lease.waiting == 3, f"three wait: {lease}"
    equal(store.release(name, mine), RELEASED, "the holder's release")
    waiters = list(zip((a, b, c), tickets, strict=True))
    tokens = []
    while waiters:
        for claim, ticket in waiters[:0:-1]:
            refused = held(store.acquire(name, claim, line=True, ticket=ticket), "a waiter behind another")
            equal((refused.holder, refused.ahead, refused.ticket), (None, True, ticket), "what it is told")
            assert 0 <= refused.free_in <= LINE_GRACE_S, f"it is told to ask again in {refused.free_in} s"
        claim, ticket = waiters.pop(0)
        tokens.append(granted(store.acquire(name, claim, line=True, ticket=ticket), "the first in line"))
        for other, place in waiters:
            refused = held(store.acquire(name, other, line=True, ticket=place), "a waiter while the first holds")
            equal(refused.ahead, other != waiters[0][0], "whether somebody stands before it")
        equal(store.release(name, claim), RELEASED, "its release")
    rising(tokens, "grants down the line")


@case("P13", fifo)
def newcomers_go_behind(bench: Bench) -> None:
    """A free name is refused to newcomers, waiting or not, while a live waiter is ahead."""
    store, name, (mine, a, b, c) = bench.open(), bench.name(), claims(4)
    granted(store.acquire(name, mine), "a free name")
    (ticket,) = line_up(store, name, a)
    equal(store.release(name, mine), RELEASED, "the holder's release")
    equal(held(store.acquire(name, b), "one who would not wait").ticket, None, "its ticket")
    late = held(store.acquire(name, c, line=True), "one who would wait")
    equal(late.ahead, True, "whether somebody stands before it")
    rising([ticket, late.ticket or 0], "tickets in order of arrival")
    held(store.acquire(name, mine), "the holder before, again")
    granted(store.acquire(name, a, line=True, ticket=ticket), "the first in line")


@case("P13", fifo)
def a_place_is_kept_by_who_could_not_use_it(bench: Bench) -> None:
    """Who was granted a name in its turn and gave it back asks from the same place again, in line or for once.

    So does a multilock, which has no use for one name without the others. It asks with a new claim. Where the line
    has been empty meanwhile, tickets may begin anew: then it may come behind others.
    """
    store, name, (mine, a, b, newcomer, again, last) = bench.open(), bench.name(), claims(6)
    granted(store.acquire(name, mine), "a free name")
    place, behind = line_up(store, name, a, b)
    equal(store.release(name, mine), RELEASED, "the holder's release")
    tokens = [granted(store.acquire(name, a, line=True, ticket=place), "the first in line")]
    equal(store.release(name, a), RELEASED, "its release")
    held(store.acquire(name, newcomer), "a newcomer, with one in line")
    tokens.append(granted(store.acquire(name, again, ticket=place), "who had been the first, asking for once"))
    refused = held(store.acquire(name, b, line=True, ticket=behind), "the other in line")
    equal(refused.ticket, behind, "its ticket")
    (third,) = line_up(store, name, newcomer)
    equal(store.release(name, again), RELEASED, "the release")
    tokens.append(granted(store.acquire(name, b, line=True, ticket=behind), "the other in line"))
    refused = held(store.acquire(name, last, line=True, ticket=place), "who had been the first, in line once more")
    equal((refused.ticket, refused.ahead), (place, False), "its ticket, and whether somebody stands before it")
    equal(store.release(name, b), RELEASED, "the release")
    refused = held(store.acquire(name, newcomer, line=True, ticket=third), "who came last")
    equal(refused.ahead, True, "whether somebody stands before it")
    tokens.append(granted(store.acquire(name, last, line=True, ticket=place), "the first in line"))
    equal(store.release(name, last), RELEASED, "its release")
    tokens.append(granted(store.acquire(name, newcomer, line=True, ticket=third), "who came last"))
    rising(tokens, "grants")


@case("P13", fifo)
def the_line_holds_across_every_end(bench: Bench) -> None:
    """After an expiry or a break, too, the first in line is granted the name before newcomers."""
    store, (mine, a, b) = bench.open(), claims(3)
    for end in ("expiry", "break"):
        name = bench.name(end)
        token = granted(store.acquire(name, mine, bench.short_ttl if end == "expiry" else 60), "a free name")
        (ticket,) = line_up(store, name, a)
        if end == "break":
            equal(store.break_lease(name, token, now=True), True, "breaking it")
        else:
            store.until_expired(name, "the end of a short lease")
        held(store.acquire(name, b), f"a newcomer after the {end}")
        granted(store.acquire(name, a, line=True, ticket=ticket), f"the first in line after the {end}")


@case("P13", fifo)
def who_gives_up_leaves(bench: Bench) -> None:
    """A waiter that releases its ticket is not waited for."""
    store, name, (mine, a, b, c) = bench.open(), bench.name(), claims(4)
    granted(store.acquire(name, mine), "a free name")
    first, second = line_up(store, name, a, b)
    gone(store.release(name, a, first), "a waiter that gives up releases what it does not hold")
    lease = store.shown(name)
    assert lease.waiting == 1, f"one waits: {lease}"
    equal(store.release(name, mine), RELEASED, "the holder's release")
    granted(store.acquire(name, b, line=True, ticket=second), "the next in line")
    gone(store.release(name, c, second + 2**40), "giving up a ticket that is nobody's")
    equal(store.release(name, b, second), RELEASED, "a release that gives up its ticket, too")
    granted(store.acquire(name, c), "a name for which nobody waits")


@case("P13", fifo)
def giving_up_in_the_same_call(bench: Bench) -> None:
    """A waiter that gives up and the next that asks in one call: the next is granted."""
    store, name, (mine, a, b) = bench.open(), bench.name(), claims(3)
    granted(store.acquire(name, mine), "a free name")
    first, second = line_up(store, name, a, b)
    outcomes = store.act(
        Release(name, mine),
        asking(name, b, line=True, ticket=second),
        Release(name, a, 1, first),
        asking(name, b, line=True, ticket=second),
    )
    equal(
        [type(o).__name__ for o in outcomes], ["Released", "Held", "Gone", "Granted"], "one call that empties the line"
    )


@case("P13", fifo)
def asking_again_keeps_the_place(bench: Bench) -> None:
    """A waiter that asks again keeps its ticket, also when it repeats its first request because no answer came."""
    store, name, (mine, a, b) = bench.open(), bench.name(), claims(3)
    granted(store.acquire(name, mine), "a free name")
    first, second = line_up(store, name, a, b)
    equal(held(store.acquire(name, a, line=True, ticket=first), "asking again").ticket, first, "its ticket")
    equal(
        held(store.acquire(name, a, line=True), "the first request again").ticket,
        first,
        "its ticket after a repetition",
    )
    lease = store.shown(name)
    assert lease.waiting == 2, f"two wait: {lease}"
    equal(store.release(name, mine), RELEASED, "the holder's release")
    held(store.acquire(name, b, line=True, ticket=second), "the second in line")
    granted(store.acquire(name, a, line=True, ticket=first), "the first in line")


@case("P13", fifo)
def the_dead_delay_once(bench: Bench) -> None:
    """Waiters that died delay those behind them by the line's grace together, not each, and at most 2 s."""
    store, name, ids = bench.open(), bench.name(), claims(12)
    granted(store.acquire(name, ids[0]), "a free name")
    *_, ticket = line_up(store, name, *ids[1:])
    equal(store.release(name, ids[0]), RELEASED, "the holder's release")
    began = time.monotonic()
    with within(2.0, "ten dead waiters delayed the line"), Lateness() as late:
        told = held(store.acquire(name, ids[-1], line=True, ticket=ticket), "the last, ten dead before it")
        store.until_granted(name, ids[-1], "the last, ten dead before it", line=True, ticket=ticket)
    took = time.monotonic() - began
    assert took > LINE_GRACE_S - 0.3, f"waiters that might have been alive were passed over after {took:.2f} s"
    off = abs(told.free_in - took)
    assert off < 0.5 + late.seconds, f"it was told to wait {told.free_in:.2f} s, and waited {took:.2f} s"


@case("P13", fifo)
def a_long_wait_is_no_death(bench: Bench) -> None:
    """However long a waiter slept while the name was held, it has the whole grace to ask when it is free."""
    store = bench.open()

    def seen_in_time() -> bool:
        name, (mine, a, b) = bench.name(), claims(3)
        granted(store.acquire(name, mine), "a free name")
        (ticket,) = line_up(store, name, a)
        time.sleep(LINE_GRACE_S + 0.2)
        began = time.monotonic()
        equal(store.release(name, mine), RELEASED, "the holder's release")
        newcomers = [store.acquire(name, b)]
        time.sleep(LINE_GRACE_S / 2)
        newcomers.append(store.acquire(name, b))
        if time.monotonic() - began >= LINE_GRACE_S:
            return False  # this machine was too busy to ask within the grace: once more
        for newcomer in newcomers:
            held(newcomer, "a newcomer, within the grace")
        granted(store.acquire(name, a, line=True, ticket=ticket), "the waiter, within the grace")
        return True

    until(seen_in_time, "nobody asked within the grace", 6 * PATIENCE_S)


@case("P13", fifo)
def the_living_are_waited_for(bench: Bench) -> None:
    """A waiter that goes on asking behind a dead one is not overtaken by a newcomer when the grace is over."""
    store, name, (mine, dead, a, b) = bench.open(), bench.name(), claims(4)
    granted(store.acquire(name, mine), "a free name")
    _, ticket = line_up(store, name, dead, a)
    equal(store.release(name, mine), RELEASED, "the holder's release")
    end = time.monotonic() + 5
    while time.monotonic() < end:
        held(store.acquire(name, b), "a newcomer while a live waiter asks")
        if isinstance(store.acquire(name, a, line=True, ticket=ticket), Granted):
            return
        time.sleep(0.05)
    raise AssertionError("the live waiter was not granted the name within 5 s")


@case("P13", fifo)
def the_passed_over_keep_their_order(bench: Bench) -> None:
    """A waiter that slept through its turn comes back to its place before those who came later."""
    store, name, (mine, a, b, c) = bench.open(), bench.name(), claims(4)
    granted(store.acquire(name, mine), "a free name")
    first, second, third = line_up(store, name, a, b, c)
    equal(store.release(name, mine), RELEASED, "the holder's release")
    store.until_granted(name, b, "the second, after the first slept", line=True, ticket=second)
    equal(held(store.acquire(name, a, line=True, ticket=first), "the first, awake").ticket, first, "its ticket")
    equal(store.release(name, b), RELEASED, "its release")
    held(store.acquire(name, c, line=True, ticket=third), "the third")
    granted(store.acquire(name, a, line=True, ticket=first), "the first, back in its place")


@case("P13", fifo)
def a_grant_clears_the_line_before_it(bench: Bench) -> None:
    """A grant removes its own place and those before it, and leaves those behind it."""
    store, name, (mine, a, b, c, d) = bench.open(), bench.name(), claims(5)
    granted(store.acquire(name, mine), "a free name")
    _, second, third = line_up(store, name, a, b, c)
    equal(store.release(name, mine), RELEASED, "the holder's release")
    store.until_granted(name, b, "the second, the first being dead", line=True, ticket=second)
    lease = store.shown(name)
    assert lease.waiting == 1, f"one still waits: {lease}"
    equal(store.release(name, b), RELEASED, "its release")
    held(store.acquire(name, d), "a newcomer")
    granted(store.acquire(name, c, line=True, ticket=third), "the third, with nobody before it")
    lease = store.shown(name)
    assert lease.waiting == 0, f"nobody waits: {lease}"


@case("P13, P5", fifo)
def a_retry_leaves_the_line_alone(bench: Bench) -> None:
    """A holder that repeats its acquire because no answer came does not send away those who wait behind it."""
    store, name, (mine, a, b) = bench.open(), bench.name(), claims(3)
    token = granted(store.acquire(name, mine), "a free name")
    (ticket,) = line_up(store, name, a)
    equal(granted(store.acquire(name, mine), "the same acquire again"), token, "its token")
    lease = store.shown(name)
    assert lease.waiting == 1, f"one waits: {lease}"
    equal(store.release(name, mine), RELEASED, "the holder's release")
    held(store.acquire(name, b), "a newcomer")
    granted(store.acquire(name, a, line=True, ticket=ticket), "the waiter")


@case("P13", fifo)
def a_purge_leaves_the_line_alone(bench: Bench) -> None:
    """A purge between a release and the next in line does not let a newcomer in before it."""
    store, name, (mine, a, b) = bench.open(), bench.name(), claims(3)
    token = granted(store.acquire(name, mine), "a free name")
    (ticket,) = line_up(store, name, a)
    equal(store.release(name, mine), RELEASED, "the holder's release")
    store.purge(bench.namespace, 0)
    held(store.acquire(name, b), "a newcomer")
    rising([token, granted(store.acquire(name, a, line=True, ticket=ticket), "the waiter")], "grants across a purge")


@case("P13", fifo)
def lines_of_different_names_are_apart(bench: Bench) -> None:
    """A waiter for one name keeps nobody from another."""
    store, name, other, (mine, a, b) = bench.open(), bench.name(), bench.name(), claims(3)
    granted(store.acquire(name, mine), "a free name")
    line_up(store, name, a)
    granted(store.acquire(other, b), "another name")
    equal(store.release(other, b), RELEASED, "its release")
    granted(store.acquire(other, b, line=True), "another name, by one who would wait")


@case("P12")
def a_release_is_hinted(bench: Bench) -> None:
    """Where a store has hints, one reaches the first in line of a name that is released, and soon."""
    store, name, (mine, a) = bench.open(), bench.name(), claims(2)
    granted(store.acquire(name, mine), "a free name")
    with told_soon(bench, asking(name, a, line=True), "a release"):
        equal(store.release(name, mine), RELEASED, "the holder's release")


@case("P12")
def a_break_is_hinted(bench: Bench) -> None:
    """Where a store has hints, one reaches the first in line of a name that is taken from its holder at once."""
    store, name, (mine, a) = bench.open(), bench.name(), claims(2)
    token = granted(store.acquire(name, mine), "a free name")
    with told_soon(bench, asking(name, a, line=True), "a break"):
        equal(store.break_lease(name, token, now=True), True, "the break")


@case("P12")
def a_release_that_others_looked_past_is_hinted(bench: Bench) -> None:
    """What has changed is told of a name at the next look for it, also when there were looks for others meanwhile."""
    store, name, other, (mine, a) = bench.open(), bench.name(), bench.name(), claims(2)
    granted(store.acquire(name, mine), "a free name")
    granted(store.acquire(other, mine), "another")
    held(bench.open().acquire(name, a, line=True), "a waiter")
    watch = bench.open().watch(a.partition("-")[0])
    if watch is None:
        return
    try:
        held(bench.open().acquire(name, a, line=True), "the waiter once more, since what was before is not told")
        time.sleep(0.05)
        list(watch.changed([other]))
        equal(store.release(name, mine), RELEASED, "the holder's release")
        told = {*watch.changed([other])}  # a signal is told whoever is looked for
        until(lambda: name in told or name in watch.changed([name]), "the hint of a release", 2)
    finally:
        watch.close()


@case("P12")
def hints_need_not_be_listened_to(bench: Bench) -> None:
    """A waiter whose address reaches nobody does not disturb the release, nor the next in line."""
    store, name, (mine, a) = bench.open(), bench.name(), claims(2)
    granted(store.acquire(name, mine), "a free name")
    outcome = store.acquire(name, a, line=True)
    assert isinstance(outcome, Held), f"a waiter: {outcome}"
    equal(store.release(name, mine), RELEASED, "the holder's release")
    granted(store.acquire(name, a, line=True, ticket=outcome.ticket), "the waiter")
