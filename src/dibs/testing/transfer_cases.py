"""Conformance cases on the contract of stores: leases that change hands."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.store import GONE, RELEASED, Granted, Release, Renew, Renewed, Transfer
from dibs.testing.case import STORE_CASES, asking, claims, equal, fifo, gone, granted, held, pools, rising
from dibs.testing.pool_cases import permits, slot

if TYPE_CHECKING:
    from dibs.testing.case import Bench


def moving(name: str, from_claim: str, claim_id: str, ttl: float = 60, *, info: str | None = None) -> Transfer:
    """A transfer of a lock as a session sends it."""
    return Transfer(name, claim_id, ttl, f"host/{claim_id.partition('-')[0]}", from_claim, info)


@STORE_CASES.case("P2, P3, P8")
def a_transfer_changes_hands_at_once(bench: Bench) -> None:
    """The new claim holds under a greater token and is shown with its own holder and info; the old one is over."""
    store, other, name, (a, b, c) = bench.open(), bench.open(), bench.name("ü"), claims(3)
    first = granted(store.act(asking(name, a, info='{"who":"a"}'))[0], "a")
    second = granted(other.act(moving(name, a, b, info='{"who":"ä"}'))[0], "the transfer to b")
    rising([first, second], "the tokens of a and b")
    shown = store.shown(name)
    equal(
        (shown.fencing_token, shown.holder, shown.info, shown.slot), (second, f"host/{b[:-2]}", '{"who":"ä"}', 1), "b"
    )
    equal(abs(shown.expires_in - 60) < 10, True, "how long b's lease lasts")
    equal(store.act(Renew(name, a, 60), Release(name, a)), [GONE, GONE], "what a says afterwards")
    held(store.acquire(name, c), "c")
    held(store.acquire(name, a), "a, asking anew")
    equal(type(other.renew(name, b)), Renewed, "b's renewal")
    equal(other.release(name, b), RELEASED, "b's release")
    rising([second, granted(store.acquire(name, c), "c at last")], "the tokens of b and c")


@STORE_CASES.case("P2, P5, P8")
def a_transfer_can_be_repeated(bench: Bench) -> None:
    """Sent again after a lost reply, through any connection, it is granted with the same token, until it is over."""
    store, other, name, (a, b, c) = bench.open(), bench.open(), bench.name(), claims(3)
    store.acquire(name, a)
    first = store.act(moving(name, a, b))[0]
    equal(store.act(moving(name, a, b))[0], first, "repeated")
    equal(other.act(moving(name, a, b))[0], first, "repeated through another connection")
    gone(other.act(moving(name, a, c))[0], "to a third, from the claim that is over")
    equal(store.act(moving(name, a, b, 5))[0], first, "repeated with a shorter ttl")
    equal(store.shown(name).expires_in > 30, True, "it was not shortened")
    equal(other.release(name, b), RELEASED, "b's release")
    gone(store.act(moving(name, a, b))[0], "repeated after the release")
    equal(store.lease(name), None, "afterwards")


@STORE_CASES.case("P8")
def a_transfer_takes_nothing_else(bench: Bench) -> None:
    """From a claim that holds nothing, any more or of this name, it is Gone: nobody gets a free name by it."""
    store, (free, taken, other), (a, b, c) = bench.open(), bench.names(3), claims(3)
    gone(store.act(moving(free, a, b))[0], "of a name never held")
    equal(store.leases(free), [], "the name never held")
    store.acquire(free, a)
    store.release(free, a)
    gone(store.act(moving(free, a, b))[0], "of a name released")
    first = granted(store.acquire(taken, a), "a")
    gone(store.act(moving(taken, c, b))[0], "from a claim that does not hold it")
    gone(store.act(moving(taken, "", b))[0], "from no claim")
    gone(store.act(moving(other, a, b))[0], "of another name")
    equal(store.shown(taken).fencing_token, first, "a's token")
    equal(store.release(taken, a), RELEASED, "a's release")


@STORE_CASES.case("P5, P7")
def a_lease_that_ended_is_not_transferred(bench: Bench) -> None:
    """From a claim that expired it is Gone; what was transferred ends by the ttl of the transfer, unless renewed."""
    store, (early, late), (a, b, c) = bench.open(), bench.names(2), claims(3)
    store.act(asking(early, a, bench.short_ttl), asking(late, a, 60))
    first = granted(store.act(moving(late, a, b, bench.short_ttl))[0], "the transfer")
    store.until_expired(early, "a's lease ends")
    gone(store.act(moving(early, a, b))[0], "from a claim that expired")
    rising([first, store.until_granted(late, c, "b's lease ends by its ttl")], "the tokens of b and c")
    gone(store.act(moving(late, a, b))[0], "the transfer, repeated too late")


@STORE_CASES.case("P8")
def what_is_kept_or_broken_is_not_transferred(bench: Bench) -> None:
    """A name that is kept after its release, or whose lease was broken, is no claim's to be transferred."""
    store, (kept, broken), (a, b) = bench.open(), bench.names(2), claims(2)
    store.acquire(kept, a)
    equal(store.act(Release(kept, a, 1, None, 60, '{"kept":1}')), [RELEASED], "the release that keeps")
    token = granted(store.acquire(broken, a), "a")
    equal(store.break_lease(broken, token, now=False), True, "broken")
    for name in (kept, broken):
        gone(store.act(moving(name, a, b))[0], "from the claim that held")
        gone(store.act(moving(name, "", b))[0], "from no claim")
        held(store.acquire(name, b), "somebody who asks")


@STORE_CASES.case("P8, P13")
def a_transferred_lease_can_be_kept_broken_and_transferred(bench: Bench) -> None:
    """What was transferred is a lease like any other."""
    store, other, names, (a, b, c) = bench.open(), bench.open(), bench.names(3), claims(3)
    tokens = [granted(o, "a") for o in store.act(*[asking(name, a) for name in names])]
    moved = [granted(o, "b") for o in other.act(*[moving(name, a, b) for name in names])]
    for pair in zip(tokens, moved, strict=True):
        rising(pair, "the tokens of a and b")
    equal(other.act(Release(names[0], b, 1, None, 60, '{"kept":"ü"}')), [RELEASED], "b's release that keeps")
    equal((store.shown(names[0]).fencing_token, store.shown(names[0]).info), (moved[0], '{"kept":"ü"}'), "what is kept")
    equal(store.break_lease(names[1], tokens[1], now=True), False, "breaking a's lease")
    equal(store.break_lease(names[1], moved[1], now=True), True, "breaking b's lease")
    gone(other.renew(names[1], b), "b's renewal")
    again = granted(store.act(moving(names[2], b, c))[0], "the transfer to c")
    rising([moved[2], again], "the tokens of b and c")
    equal(store.act(moving(names[2], c, a))[0].__class__, Granted, "back to a")


@STORE_CASES.case("P13", fifo)
def a_transfer_passes_nobody_in_line(bench: Bench) -> None:
    """Those who wait go on waiting in their order, and the first gets the name when the new holder releases it."""
    store, name, (a, b, c, d) = bench.open(), bench.name(), claims(4)
    store.acquire(name, a)
    third, fourth = held(store.acquire(name, c, line=True), "c"), held(store.acquire(name, d, line=True), "d")
    granted(store.act(moving(name, a, b))[0], "the transfer")
    for claim, ticket in ((c, third.ticket), (d, fourth.ticket)):
        seen = held(store.acquire(name, claim, line=True, ticket=ticket), claim)
        equal((seen.ticket, seen.holder), (ticket, f"host/{b[:-2]}"), "its place, and who holds")
    equal(store.release(name, b), RELEASED, "b's release")
    held(store.acquire(name, d, line=True, ticket=fourth.ticket), "d, whose turn it is not")
    granted(store.acquire(name, c, line=True, ticket=third.ticket), "c")


@STORE_CASES.case("P13", fifo)
def who_waits_may_take_over_and_leave_the_line(bench: Bench) -> None:
    """A client in line gets the lease by a transfer to another of its claims; then it leaves the line as usual."""
    store, name, (a, b, c) = bench.open(), bench.name(), claims(3)
    store.acquire(name, a)
    second, third = held(store.acquire(name, b, line=True), "b"), held(store.acquire(name, c, line=True), "c")
    mine = b.replace("-1", "-2")
    granted(store.act(moving(name, a, mine))[0], "the transfer")
    gone(store.release(name, b, second.ticket), "b leaves the line")
    equal(held(store.acquire(name, c, line=True, ticket=third.ticket), "c").ahead, False, "somebody is before c")
    equal(store.shown(name).waiting, 1, "how many wait")
    equal(store.release(name, mine), RELEASED, "b's release")
    granted(store.acquire(name, c, line=True, ticket=third.ticket), "c")


@STORE_CASES.case("P2, P3")
def a_vector_of_transfers(bench: Bench) -> None:
    """Transfers travel with other requests, each by itself; those for one name are tried in their order."""
    store, names, (a, b, c) = bench.open(), bench.names(4), claims(3)
    store.act(*[asking(name, a) for name in names[:3]])
    one, two, three, four = names
    outcomes = store.act(
        moving(three, a, b),
        moving(four, a, b),
        Release(one, a),
        moving(one, a, b),
        Renew(two, a, 60),
        moving(two, a, b),
        moving(two, b, c),
        Release(three, b),
        asking(three, c),
    )
    kinds = [type(outcome).__name__ for outcome in outcomes]
    expected = ["Granted", "Gone", "Released", "Gone", "Renewed", "Granted", "Granted", "Released", "Granted"]
    equal(kinds, expected, "what became of each")
    equal(
        [(x.name, x.holder) for x in store.leases(bench.namespace)],
        [(two, f"host/{c[:-2]}"), (three, f"host/{c[:-2]}")],
        "who holds",
    )


@STORE_CASES.case("P2, P14", pools)
def a_permit_is_transferred_with_its_slot(bench: Bench) -> None:
    """Slot and number of permits taken stay; the token is greater than that of every grant of the name, in any slot."""
    store, name, (a, b, c, d) = bench.open(), bench.name(), claims(4)
    slot(store.act(permits(name, a, 4))[0], "a")
    second = store.act(permits(name, b, 4, 2))[0]
    third = store.act(permits(name, c, 4))[0]
    assert isinstance(second, Granted)
    assert isinstance(third, Granted)
    move = Transfer(name, d, 60, "host/d", b, '{"d":1}', second.slot, 4)
    moved = store.act(move)[0]
    assert isinstance(moved, Granted), moved
    equal(moved.slot, second.slot, "the slot")
    rising([third.fencing_token, moved.fencing_token], "the tokens of the last grant and of the transfer")
    equal(store.act(move)[0], moved, "repeated")
    shown = [(x.slot, x.holder, x.take) for x in store.leases(name)]
    equal(shown[1], (second.slot, "host/d", 2), "what is shown")
    equal(store.act(Renew(name, b, 60, second.slot), Release(name, b, second.slot)), [GONE, GONE], "b's, afterwards")
    gone(store.act(Transfer(name, b, 60, "host/b", a, None, second.slot, 4))[0], "a's permit, by another's slot")
    gone(store.act(moving(name, a, b))[0], "a's permit, as if it were a lock")
    held(store.act(permits(name, b, 4))[0], "a fifth permit")
    equal(store.act(Release(name, d, second.slot)), [RELEASED], "d's release")
    last = store.act(permits(name, b, 4))[0]
    assert isinstance(last, Granted), last
    equal(last.slot, second.slot, "the freed slot")
    rising([moved.fencing_token, last.fencing_token], "the tokens of the transfer and of the next grant")


@STORE_CASES.case("P2, P20", pools)
def a_lock_is_not_transferred_as_permits(bench: Bench) -> None:
    """Of a name that is a lock no permit is transferred, and a name nobody knows is not made by it."""
    store, (lock, new), (a, b) = bench.open(), bench.names(2), claims(2)
    store.acquire(lock, a)
    for name in (lock, new):
        gone(store.act(Transfer(name, b, 60, "host/b", a, None, 1, 3))[0], "as permits")
    equal(store.release(lock, a), RELEASED, "a's release")
    granted(store.acquire(new, b), "the other name, as a lock")


@STORE_CASES.case("P13, P14", pools)
def permits_that_wait_are_not_passed(bench: Bench) -> None:
    """Who waits for permits goes on waiting, and is granted what the new holder gives back."""
    store, name, (a, b, c) = bench.open(), bench.name(), claims(3)
    first = store.act(permits(name, a, 2, 2))[0]
    waits = permits(name, c, 2, line=True)
    ticket = held(store.act(waits)[0], "c").ticket
    granted(store.act(Transfer(name, b, 60, "host/b", a, None, slot(first, "a"), 2))[0], "the transfer")
    equal(held(store.act(waits._replace(ticket=ticket))[0], "c").ticket, ticket, "c's place")
    equal(store.act(Release(name, b, 1)), [RELEASED], "b's release")
    granted(store.act(waits._replace(ticket=ticket))[0], "c")
