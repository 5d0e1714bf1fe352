"""Conformance cases on the tries of items: what counts as one, who is dead after them, who lives again."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.errors import LeaseLost, Unsupported
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal
from dibs.testing.claims_cases import LONG_S
from dibs.testing.client_bench import had, raises

if TYPE_CHECKING:
    from dibs.store import Capabilities
    from dibs.testing.faces import Face

case = CLIENT_CASES.case


def tries(capabilities: Capabilities) -> bool:
    return capabilities.tries


@case("P19", tries)
async def an_item_that_never_succeeds_is_dead(face: Face) -> None:
    """An item that has failed as often as it may is busy to all, is listed with its last error, and can be revived."""
    ours, theirs = face.client(), face.client()
    mine = ours.claims("poison", ttl=LONG_S, max_tries=2, info={"job": "x"})
    others = theirs.claims("poison", ttl=LONG_S, max_tries=2)
    for claims, error in ((mine, "first"), (others, ValueError("second"))):
        async with face.holding(await face.do(claims.take, ["good", "bad"])) as batch:
            equal(batch.won, ["good", "bad"], "won")
            batch.items[1].fail(error)
            batch.items[0].done()
        if claims is mine:
            equal(await face.do(others.dead), [], "dead after the first try")
    async with face.holding(await face.do(mine.take, ["good", "bad"])) as batch:
        equal((batch.won, batch.busy), (["good"], ["bad"]), "won, and busy")
    (dead,) = await face.do(mine.dead)
    equal((dead.key, dead.tries, dead.error), ("bad", 2, "ValueError: second"), "the dead one")
    equal(dead.died_at < dead.kept_until, True, "until when it is kept")
    equal([record.name for record in await face.do(theirs.leases)], ["poison/bad"], "what is held")
    equal(await face.do(mine.revive, ["good", "other"]), 0, "revived of others")
    equal(await face.do(others.revive, ["bad"]), 1, "revived")
    equal((await face.do(mine.dead), await face.do(mine.revive)), ([], 0), "dead then")
    for left in (1, 0):
        async with face.holding(await face.do(mine.take, ["bad"])) as batch:
            equal(batch.won, ["bad"], f"tried anew, with {left} tries left")
            batch.items[0].fail()
    equal([(item.key, item.error) for item in await face.do(mine.dead)], [("bad", None)], "dead again")
    equal(await face.do(mine.revive), 1, "all revived")


@case("P19", tries)
async def a_try_counts_from_the_claim(face: Face) -> None:
    """Whoever loses an item has paid for its try, so an item that ends its workers is dead after the last of them."""
    ours, theirs = face.client(), face.client()
    claims = ours.claims("deadly", ttl=face.short_ttl, max_tries=2)
    others = theirs.claims("deadly", ttl=LONG_S, max_tries=2)
    for _ in range(2):
        batch = await face.do(claims.take, ["a"])
        equal(batch.won, ["a"], "won")
        lease = await had(face, theirs.lock("deadly/a"), timeout=face.short_ttl + PATIENCE_S)
        with raises(LeaseLost):
            batch.items[0].done()
        await face.do(lease.release)
        await face.do(batch.release)
    batch = await face.do(others.take, ["a", "b"])
    equal((batch.won, batch.busy), (["b"], ["a"]), "won after two tries, and busy")
    await face.do(batch.release)
    equal([(item.key, item.tries) for item in await face.do(others.dead)], [("a", 2)], "dead")
    await face.do(others.revive)


@case("P19", tries)
async def what_is_given_back_costs_no_try(face: Face) -> None:
    """What is skipped, stale, left over, or held when its client is closed has cost no try; ``done`` forgets them."""
    ours, theirs = face.client(), face.client()
    claims = ours.claims("spared", ttl=LONG_S, max_tries=2)
    items = list("abcd")
    async with face.holding(await face.do(claims.take, items)) as batch:
        for item in batch.items:
            item.fail("once")
    for _ in range(3):
        async with face.holding(await face.do(claims.take, items, verify=lambda won: won[:-1])) as batch:
            equal((batch.won, batch.stale), (items[:-1], ["d"]), "won, and stale")
            batch.items[0].skip()
        async with face.holding(await face.do(claims.take, items, limit=2)) as batch:
            equal(batch.won, ["a", "b"], "the first two")
        closing = face.client()
        batch = await face.do(closing.claims("spared", ttl=LONG_S, max_tries=2).take, ["c"])
        equal(batch.won, ["c"], "won by a client that is closed")
        await face.do(closing.close)
    async with face.holding(await face.do(claims.take, items)) as batch:
        equal(batch.won, items, "all, for the last time but for the first, which")
        batch.items[0].done()
        for item in batch.items[1:]:
            item.fail("twice")
    equal([item.key for item in await face.do(claims.dead)], ["b", "c", "d"], "dead")
    async with face.holding(await face.do(theirs.claims("spared", ttl=LONG_S, max_tries=2).take, items)) as batch:
        batch.items[0].fail("once more")
        equal((batch.won, batch.failed), (["a"], ["a"]), "done once, it has all its tries")
    equal([item.key for item in await face.do(claims.dead)], ["b", "c", "d"], "dead, without the one that was done")
    equal(await face.do(claims.revive, ["b", "c", "d"]), 3, "revived")


@case("claims", lambda capabilities: not capabilities.tries)
async def tries_that_cannot_be_counted_are_refused(face: Face) -> None:
    """Where tries cannot be kept, whoever asks for them is told so at once."""
    client = face.idle_client()
    with raises(Unsupported):
        client.claims("a", max_tries=3)
    claims = client.claims("a")
    for verb in (claims.dead, claims.revive):
        with raises(Unsupported):
            await face.do(verb)
