"""Conformance cases on leases that change hands: the transfer in the contract, and what users make of it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from dibs.errors import InvalidOption, LeaseLost
from dibs.store import GONE, RELEASED, Granted, Release, Renew, Renewed, Transfer
from dibs.testing.case import (
    CLIENT_CASES,
    PATIENCE_S,
    STORE_CASES,
    asking,
    claims,
    equal,
    fifo,
    gone,
    granted,
    held,
    rising,
)
from dibs.testing.client_cases import had, raises, shown, task, why
from dibs.testing.pool_cases import permits, pools, slot

if TYPE_CHECKING:
    from dibs.testing.case import Bench
    from dibs.testing.faces import Face


def moving(name: str, from_claim: str, claim_id: str, ttl: float = 60, *, info: str | None = None) -> Transfer:
    """A transfer of a lock as a session sends it."""
    return Transfer(name, claim_id, ttl, f"host/{claim_id.partition('-')[0]}", from_claim, info)


# -- the contract -----------------------------------------------------------------------------------------------------


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


# -- export and adopt -------------------------------------------------------------------------------------------------


async def exported(face: Face, lease: Any) -> dict[str, Any]:
    """The state as it comes out at the other end of a pipe."""
    state: dict[str, Any] = json.loads(json.dumps(await face.do(lease.export)))
    return state


@CLIENT_CASES.case("P1, P2, P6, P8")
async def a_lease_is_adopted(face: Face) -> None:
    """What one client exported another adopts, with a greater token; the old lease is over at once, and is not lost."""
    ours, theirs = face.client(info={"of": "ours"}), face.client(info={"of": "theirs"})
    lease = await had(face, ours.lock("ü"))
    state = await exported(face, lease)
    equal((lease.held, lease.lost.is_set(), lease.remaining()), (False, False, 0.0), "held, lost, remaining")
    assert "was exported" in why(lease), f"what became of it: {why(lease)}"
    for verb in (lease.renew, lease.export):
        with raises(LeaseLost):
            await face.do(verb)
    equal(await face.do(lease.release), False, "release after it was exported")
    seen = await shown(face, theirs, "ü")
    equal((seen.fencing_token, seen.holder), (lease.fencing_token, lease.holder), "what is shown before it is adopted")
    equal(await face.do(theirs.lock("ü").acquire, timeout=0), None, "acquiring it before it is adopted")
    adopted = await face.do(theirs.adopt, state)
    rising([lease.fencing_token, adopted.fencing_token], "tokens")
    equal((adopted.name, adopted.held, adopted.claim_id != lease.claim_id), ("ü", True, True), "name, held, claim")
    equal((adopted.slot, adopted.info), (1, {"of": "ours"}), "slot, info")
    seen = await shown(face, ours, "ü")
    equal(
        (seen.fencing_token, seen.holder, seen.info), (adopted.fencing_token, adopted.holder, {"of": "ours"}), "shown"
    )
    with raises(LeaseLost) as caught:
        await face.do(ours.adopt, state)
    assert "cannot be adopted" in str(caught.error), f"the error: {caught.error}"
    equal(await face.do(ours.lock("ü").acquire, timeout=0), None, "acquiring it afterwards")
    await face.do(adopted.renew)
    equal(await face.do(adopted.release), True, "release by the adopter")
    again = await had(face, ours.lock("ü"), timeout=5)
    rising([adopted.fencing_token, again.fencing_token], "tokens")


@CLIENT_CASES.case("P4, P7")
async def what_is_not_adopted_ends(face: Face) -> None:
    """An exported lease is renewed no more: if nobody adopts it, it ends by its ttl, and then nobody can."""
    ours, theirs = face.client(ttl=face.short_ttl), face.client()
    state = await exported(face, await had(face, ours.lock("left")))
    lease = await had(face, theirs.lock("left"), timeout=PATIENCE_S + face.short_ttl)
    with raises(LeaseLost):
        await face.do(theirs.adopt, state)
    lease.check()


@CLIENT_CASES.case("P4, P6, P8")
async def an_adopted_lease_is_a_lease(face: Face) -> None:
    """It is renewed for as long as it is held, with the terms of its adopter, and is lost when it is broken."""
    ours, theirs = face.client(), face.client(ttl=face.short_ttl)
    adopted = await face.do(theirs.adopt, await exported(face, await had(face, ours.lock("kept"))), info={"a": 1})
    equal((adopted.ttl, adopted.info), (face.short_ttl, {"a": 1}), "its terms")
    await asyncio.sleep(1.5 * face.short_ttl)
    adopted.check()
    again = await face.do(ours.adopt, await exported(face, adopted), ttl=20)
    rising([adopted.fencing_token, again.fencing_token], "tokens")
    equal((again.ttl, again.info), (20.0, {"a": 1}), "the terms of the second adopter")
    equal(await face.do(theirs.break_lease, "kept", fencing_token=adopted.fencing_token), False, "breaking the old one")
    equal(await face.do(theirs.break_lease, "kept", fencing_token=again.fencing_token), True, "breaking it")
    with raises(LeaseLost):
        await face.do(again.renew)
    with raises(LeaseLost):
        await face.do(again.export)


@CLIENT_CASES.case("P1, P9")
async def a_block_may_end_after_an_export(face: Face) -> None:
    """A ``with`` block whose lease was exported ends in silence, and does not take it back."""
    ours, theirs = face.client(), face.client()
    async with face.holding(ours.lock("block")) as lease:
        state = await exported(face, lease)
    adopted = await face.do(theirs.adopt, state)
    equal((await shown(face, ours, "block")).fencing_token, adopted.fencing_token, "who holds it afterwards")
    again = await face.do(theirs.adopt, await exported(face, adopted))
    rising([adopted.fencing_token, again.fencing_token], "tokens within one client")
    await face.do(again.release)
    await had(face, ours.lock("block"), timeout=0)


@CLIENT_CASES.case("P1, P9")
async def an_export_outlives_its_client(face: Face) -> None:
    """Closing the client gives back what it holds, and not what it exported."""
    ours, theirs = face.client(), face.client()
    state = await exported(face, await had(face, ours.lock("outlives")))
    kept = await had(face, ours.lock("given back"))
    await face.do(ours.close)
    adopted = await face.do(theirs.adopt, state)
    rising([state["fencing_token"], adopted.fencing_token], "tokens")
    await had(face, theirs.lock("given back"), timeout=5)
    equal(kept.held, False, "the other lease")


@CLIENT_CASES.case("P1, P8")
async def of_two_adopters_one_has_it(face: Face) -> None:
    """Of several that adopt the same state at the same moment one gets the lease; the others are told."""
    state = await exported(face, await had(face, face.client().lock("one")))

    async def adopt(client: Any) -> Any:
        try:
            return await face.do(client.adopt, state)
        except LeaseLost:
            return None

    leases = await asyncio.gather(*[task(adopt(face.client())) for _ in range(4)])
    equal(sum(lease is not None and lease.held for lease in leases), 1, "how many have it")


@CLIENT_CASES.case("P14, P15", pools)
async def a_permit_is_adopted_with_its_slot(face: Face) -> None:
    """A permit keeps its slot and weight, a side of a read/write lock stays that side."""
    ours, theirs = face.client(), face.client()
    first = await had(face, ours.semaphore("pool", 4))
    second = await had(face, ours.semaphore("pool", 4, weight=2))
    adopted = await face.do(theirs.adopt, await exported(face, second))
    equal((adopted.slot, adopted.held, first.held), (second.slot, True, True), "its slot, and who holds")
    rising([second.fencing_token, adopted.fencing_token], "tokens")
    equal(await face.do(ours.semaphore("pool", 4).available), 1, "permits left")
    await face.do(adopted.release)
    equal(await face.do(ours.semaphore("pool", 4).available), 3, "permits left afterwards")
    writer = await face.do(theirs.adopt, await exported(face, await had(face, ours.rwlock("book").write())))
    equal(await face.do(ours.rwlock("book").read().acquire, timeout=0), None, "reading beside the writer")
    await face.do(writer.release)
    reader = await face.do(theirs.adopt, await exported(face, await had(face, ours.rwlock("book").read())))
    other = await had(face, ours.rwlock("book").read())
    equal(await face.do(ours.rwlock("book").write().acquire, timeout=0), None, "writing beside the readers")
    await face.do(reader.release)
    await face.do(other.release)


@CLIENT_CASES.case("P20, P25")
async def wrong_states_are_refused(face: Face) -> None:
    """What is no state, a damaged one, and one of another namespace or store are refused before anything is sent."""
    client, idle = face.client(), face.idle_client()
    state = await exported(face, await had(face, client.lock("state")))
    wrong: list[Any] = [None, "", 7, [], {}, {**state, "dibs": 2}, json.dumps(state)]
    for field, values in {
        "name": ("", "a" * 256, None, 7),
        "claim_id": ("", None, 7, "a b", "a\n", "x" * 101),
        "fencing_token": (0, -1, "1", True, None, 2**63),
        "slot": (0, None, "1", 1.0),
        "permits": (-1, "3", None),
        "take": (0, True),
        "store": ("another store", None),
        "namespace": ("another", None),
    }.items():
        wrong += [{**state, field: value} for value in values]
    for each in wrong:
        with raises(InvalidOption):
            await face.do(idle.adopt, each)
    for options in ({"ttl": 0}, {"info": 1}, {"on_lost": 1}, {"max_hold": 1, "min_hold": 2}):
        with raises(InvalidOption):
            await face.do(idle.adopt, state, **options)
    with raises(InvalidOption) as caught:
        await face.do(idle.adopt, {**state, "namespace": "another"})
    assert "namespace 'another'" in str(caught.error), f"the error: {caught.error}"
    adopted = await face.do(client.adopt, state)
    equal(adopted.held, True, "held by whoever adopts the right one")
