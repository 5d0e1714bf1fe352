"""Conformance cases on the contract of stores: what is granted, and that tokens rise whatever happens to a name.

Each is a function of a ``Bench``. Within the store's resolution around an expiry both answers are right, so a case that
sees a lease end asks until it has ended.
"""

from __future__ import annotations

import time
from functools import partial

from dibs.store import RELEASED, Granted, Renewed
from dibs.testing.case import STORE_CASES, Bench, claims, equal, gone, granted, held, rising, together

case = STORE_CASES.case


@case("P1")
def grant_then_held(bench: Bench) -> None:
    """A free name is granted to one claim, and refused to the next with who has it and for how long."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    token = granted(store.acquire(name, mine, 60), "a name nobody has")
    refused = held(store.acquire(name, other, 60), "a name another has")
    equal(refused.holder, f"host/{mine.partition('-')[0]}", "the holder it is told of")
    equal(refused.fencing_token, token, "the token it is told of")
    equal(refused.ahead, False, "whether somebody stands in line before it")
    assert 50 < refused.free_in <= 60, f"free_in of a lease of 60 s just granted: {refused.free_in}"
    assert abs(refused.acquired_at - time.time()) < 3600, f"acquired_at is no Unix time: {refused.acquired_at}"


@case("P1")
def one_of_many_at_once(bench: Bench) -> None:
    """Of many claims that ask for a free name at the same moment, over many connections, exactly one is granted."""
    name, ids = bench.name(), claims(8)
    stores = [bench.open() for _ in ids]
    for _ in range(5):
        outcomes = together(partial(s.acquire, name, c) for s, c in zip(stores, ids, strict=True))
        winners = [claim for claim, outcome in zip(ids, outcomes, strict=True) if isinstance(outcome, Granted)]
        equal(len(winners), 1, "how many of 8 claims were granted at once")
        equal(stores[0].release(name, winners[0]), RELEASED, "the winner's release")


@case("P5, P2")
def a_retry_is_the_same_grant(bench: Bench) -> None:
    """An acquire repeated by the claim that holds is granted again with the same token, over any connection."""
    store, second, name, (mine, other) = bench.open(), bench.open(), bench.name(), claims(2)
    first = store.acquire(name, mine)
    token = granted(first, "a name nobody has")
    equal(granted(store.acquire(name, mine), "the same claim again"), token, "the token of a retry")
    equal(granted(second.acquire(name, mine), "the same claim, elsewhere"), token, "the token of a retry elsewhere")
    equal(store.acquire(name, mine), first, "the grant that a retry shows")
    held(second.acquire(name, other), "somebody else after the retries")


@case("P5")
def a_retry_moves_the_expiry(bench: Bench) -> None:
    """The lease ends a ttl after the last retry that was granted, not after the first."""
    store, name, (mine,) = bench.open(), bench.name(), claims(1)
    granted(store.acquire(name, mine, 2), "a name nobody has")
    granted(store.acquire(name, mine, 60), "the same claim again")
    lease = store.shown(name)
    assert 50 < lease.expires_in <= 60, f"a lease granted again for 60 s: {lease}"


@case("P2")
def tokens_rise_across_releases(bench: Bench) -> None:
    """Each grant after a release has a greater token."""
    store, name, tokens = bench.open(), bench.name(), []
    for claim in claims(5):
        tokens.append(granted(store.acquire(name, claim), "a free name"))
        equal(store.release(name, claim), RELEASED, "its release")
    rising(tokens, "five grants with releases between")


@case("P2")
def tokens_rise_across_expiry(bench: Bench) -> None:
    """The grant after an expiry has a greater token, and needs no purge (P7)."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    first = granted(store.acquire(name, mine, bench.short_ttl), "a free name")
    rising([first, store.until_granted(name, other, "a name whose lease expired")], "grants across an expiry")


@case("P2")
def tokens_rise_across_break(bench: Bench) -> None:
    """A broken lease keeps the name until it expires, cannot be renewed, and the next grant has a greater token."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    ttl = max(1.0, bench.short_ttl)
    first = granted(store.acquire(name, mine, ttl), "a free name")
    equal(store.break_lease(name, first, now=False), True, "breaking the lease with its token")
    gone(store.renew(name, mine, 60), "renewal of a broken lease")
    refused = held(store.acquire(name, other), "a broken lease before its expiry")
    assert 0 <= refused.free_in <= ttl, f"a broken lease of {ttl} s is free in {refused.free_in} s"
    held(store.acquire(name, mine), "the claim whose lease was broken, before its expiry")
    rising([first, store.until_granted(name, other, "a broken lease after its expiry")], "grants across a break")


@case("P2")
def tokens_rise_across_break_now(bench: Bench) -> None:
    """A lease broken at once frees the name at once, and the next grant has a greater token."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    first = granted(store.acquire(name, mine), "a free name")
    equal(store.break_lease(name, first, now=True), True, "breaking the lease with its token")
    equal(store.lease(name), None, "the lease shown after it was broken")
    gone(store.renew(name, mine), "renewal of a broken lease")
    gone(store.release(name, mine), "release of a broken lease")
    second = granted(store.acquire(name, other), "the name of a broken lease")
    rising([first, second], "grants across a break")
    equal(store.release(name, other), RELEASED, "its release")
    third = granted(store.acquire(name, mine), "the first claim once more")
    rising([first, second, third], "grants across a break")


@case("P2")
def a_lease_can_be_broken_at_once_after_all(bench: Bench) -> None:
    """A lease that was broken for its expiry can still be broken at once."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    token = granted(store.acquire(name, mine), "a free name")
    equal(store.break_lease(name, token, now=False), True, "breaking it for its expiry")
    equal(store.break_lease(name, token, now=True), True, "breaking it at once")
    rising([token, granted(store.acquire(name, other), "its name")], "grants across two breaks")


@case("P4")
def breaking_compares_the_token(bench: Bench) -> None:
    """Breaking with another token, or a name nobody has, does nothing and says so."""
    store, name, free, (mine, other) = bench.open(), bench.name(), bench.name(), claims(2)
    first = granted(store.acquire(name, mine), "a free name")
    for now in (False, True):
        for token in (first - 1, first + 1, 0):
            equal(store.break_lease(name, token, now=now), False, f"breaking token {first} as {token}")
        equal(store.break_lease(free, 1, now=now), False, "breaking a name nobody ever had")
    assert isinstance(store.renew(name, mine), Renewed), "the lease was harmed by a break with the wrong token"
    equal(store.release(name, mine), RELEASED, "its release")
    for now in (False, True):
        equal(store.break_lease(name, first, now=now), False, "breaking a released lease")
    second = granted(store.acquire(name, other), "a free name")
    equal(store.break_lease(name, first, now=True), False, "breaking with the token of the holder before")
    lease = store.shown(name)
    assert lease.fencing_token == second, f"the new holder's lease: {lease}"


@case("P2")
def tokens_rise_across_purge(bench: Bench) -> None:
    """A purged name begins above all its earlier tokens, also through connections opened before the purge."""
    store, earlier, name, ids = bench.open(), bench.open(), bench.name(), claims(6)
    granted(earlier.acquire(bench.name(), ids[0]), "a connection that is in use before the purge")
    tokens = []
    for claim in ids[:3]:
        tokens.append(granted(store.acquire(name, claim), "a free name"))
        equal(store.release(name, claim), RELEASED, "its release")
    purged = store.purge(bench.namespace, 0)
    assert purged >= 0, f"purge(0) after a release says {purged}"  # 0 where nothing is kept of a free name
    tokens.append(granted(earlier.acquire(name, ids[3]), "a purged name"))
    equal(earlier.release(name, ids[3]), RELEASED, "its release")
    store.purge(bench.namespace, 0)
    tokens.append(granted(store.acquire(name, ids[4]), "a name purged again"))
    equal(store.release(name, ids[4]), RELEASED, "its release")
    store.purge(bench.namespace, 0)
    tokens.append(granted(bench.open().acquire(name, ids[5]), "a name purged a third time, by a new connection"))
    rising(tokens, "grants across purges")


@case("P2")
def a_purge_elsewhere_raises_no_doubt(bench: Bench) -> None:
    """Tokens of every name rise when different connections purge and grant different names by turns."""
    stores, names = [bench.open(), bench.open(), bench.open()], bench.names(3)
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(9):
        store, name, (claim,) = stores[turn % 3], names[(turn * 2) % 3], claims(1)
        tokens[name].append(granted(store.acquire(name, claim), "a free name"))
        store.release(name, claim)
        stores[(turn + 1) % 3].purge(bench.namespace, 0)
        name = names[(turn * 2 + 1) % 3]
        tokens[name].append(granted(stores[(turn + 2) % 3].acquire(name, claim), "a free name"))
        store.release(name, claim)
    for seen in tokens.values():
        rising(seen, "grants of one of three names, with purges between")


@case("P8")
def purge_leaves_what_is_in_use(bench: Bench) -> None:
    """A purge takes neither a lease in force nor a name that was free for less than the time given."""
    store, name, recent, (mine, other) = bench.open(), bench.name(), bench.name(), claims(2)
    token = granted(store.acquire(name, mine), "a free name")
    granted(store.acquire(recent, mine), "a free name")
    equal(store.release(recent, mine), RELEASED, "its release")
    store.purge(bench.namespace, 3600)
    store.purge(bench.namespace, 0)
    lease = store.shown(name)
    assert lease.fencing_token == token, f"the lease in force after a purge: {lease}"
    held(store.acquire(name, other), "a lease in force after a purge")
    assert isinstance(store.renew(name, mine), Renewed), "a lease in force cannot be renewed after a purge"


@case("P8")
def a_purge_keeps_to_its_names(bench: Bench) -> None:
    """A purge of the names from one to another leaves those before and after them as they are."""
    store, (before, name, after), (claim,) = bench.open(), bench.names(3), claims(1)
    for each in (before, name, after):
        granted(store.acquire(each, claim), "a free name")
        equal(store.release(each, claim), RELEASED, "its release")
    one = store.purge(name, 0)
    assert one in (0, 1), f"of one name that is free {one} were purged"  # 0 where nothing is kept of a free name
    equal(store.purge(bench.namespace, 0), 2 * one, "those that are left")


@case("P2")
def reopening_forgets_nothing(bench: Bench) -> None:
    """After every connection was closed, leases are still held and tokens go on rising."""
    store, name, free, (mine, other) = bench.open(), bench.name(), bench.name(), claims(2)
    token = granted(store.acquire(name, mine), "a free name")
    earlier = granted(store.acquire(free, mine), "a free name")
    equal(store.release(free, mine), RELEASED, "its release")
    bench.close()
    store = bench.open()
    equal(held(store.acquire(name, other), "a lease from before").fencing_token, token, "its token")
    equal(granted(store.acquire(name, mine), "the claim from before"), token, "the token of its retry")
    rising([earlier, granted(store.acquire(free, other), "a free name")], "grants across a reopening")
