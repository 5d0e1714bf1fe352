"""Conformance cases on leases that are exported and adopted, run through both faces."""

from __future__ import annotations

import asyncio
import json

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption, LeaseLost
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, pools, rising
from dibs.testing.client_bench import had, raises, shown, task, why

if TYPE_CHECKING:
    from dibs.testing.faces import Face


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
