"""Conformance cases on leases that are watched (``takeover="observe"``): what the store adds, and what users see."""

from __future__ import annotations

import asyncio
import time

from dibs._typing import TYPE_CHECKING, cast
from dibs.clock import boot_now
from dibs.errors import InvalidOption, Unsupported
from dibs.observing import observing
from dibs.store import RELEASED, Renewed
from dibs.testing.case import CLIENT_CASES, STORE_CASES, Connection, asking, claims, equal, gone, granted, held, rising
from dibs.testing.client_bench import had, raises

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.abilities import Observed
    from dibs.store import Capabilities
    from dibs.testing.case import Bench
    from dibs.testing.faces import Face

case = CLIENT_CASES.case
store_case = STORE_CASES.case


def observe(capabilities: Capabilities) -> bool:
    return capabilities.observe


def end(store: Connection, name: str, token: int, expires_at: float) -> bool:
    """End a lease if it is as it was seen."""
    observed = cast("Observed", store.store)
    return store._patiently(lambda deadline: observed.end_unchanged(name, token, expires_at, deadline))


def crashed(face: Face, names: list[str], ttl: float) -> list[int]:
    """A holder of these names that died: nobody renews or releases what it was granted. Its tokens."""
    connection = Connection(observing(face.place.address, "observe", boot_now).open())
    try:
        wanted = [asking(f"{face.namespace}:{name}", "dead-1", ttl) for name in names]
        return [granted(outcome, "for who is about to die") for outcome in connection.act(*wanted)]
    finally:
        connection.store.close()


@store_case("observe", observe)
def every_renewal_moves_the_end(bench: Bench) -> None:
    """The end that is shown moves with each renewal, also with one that gives no more time; to look moves nothing."""
    store, name, (mine,) = bench.open(), bench.name(), claims(1)
    granted(store.acquire(name, mine, 3600), "a free name")
    ends = [store.shown(name).expires_at]
    for _ in range(5):
        for _ in range(3):
            equal(store.shown(name).expires_at, ends[-1], "the end, looked at again")
        assert isinstance(store.renew(name, mine, 1), Renewed), "a renewal was refused"
        ends.append(store.shown(name).expires_at)
    assert ends == sorted(set(ends)), f"the ends after five renewals: {ends}"
    assert ends[-1] - ends[0] < 1, f"five renewals for a second have given more than that: {ends}"


@store_case("observe", observe)
def an_unchanged_lease_can_be_ended(bench: Bench) -> None:
    """A lock that has still the token and the end that were seen is freed at once, and no other."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    far = 60 * 365 * 24 * 3600.0
    equal(end(store, name, 1, 1.0), False, "ending what nobody ever had")
    token = granted(store.acquire(name, mine, far), "a free name")
    seen = store.shown(name).expires_at
    equal(end(store, name, token + 1, seen), False, "with another token")
    equal(end(store, name, token, seen - 1), False, "with another end")
    assert isinstance(store.renew(name, mine, far), Renewed), "a renewal was refused"
    equal(end(store, name, token, seen), False, "with the end before the renewal")
    held(store.acquire(name, other), "it is held still")
    equal(end(store, name, token, store.shown(name).expires_at), True, "as it was seen last")
    equal(store.lease(name), None, "the lease shown after its end")
    gone(store.renew(name, mine), "a renewal after the end")
    gone(store.release(name, mine), "a release after the end")
    equal(end(store, name, token, seen), False, "once more")
    rising([token, granted(store.acquire(name, other), "the name of an ended lease")], "grants across an end")
    equal(store.release(name, other), RELEASED, "its release")


@store_case("observe", observe)
def a_broken_lease_can_be_ended(bench: Bench) -> None:
    """One that was broken for its expiry keeps its end until then, and can be ended by who has watched it."""
    store, name, (mine, other, third) = bench.open(), bench.name(), claims(3)
    token = granted(store.acquire(name, mine, 3600), "a free name")
    seen = store.shown(name).expires_at
    held(store.acquire(name, other, line=True), "a name that is held")
    equal(store.break_lease(name, token, now=False), True, "breaking it for its expiry")
    equal(store.shown(name).expires_at, seen, "the end of a broken lease")
    equal(end(store, name, token, seen), True, "ending it")
    held(store.acquire(name, third), "somebody stands in line for it")
    rising([token, granted(store.acquire(name, other, line=True), "the first in line")], "grants across an end")


@case("observe", observe)
async def a_dead_holder_is_taken_over_by_who_has_watched_it(face: Face) -> None:
    """Nobody gets a name before its holder's ttl was over on the own clock of who asks; then somebody soon does."""
    ttl, client = face.short_ttl, face.client(takeover="observe")
    (dead,) = crashed(face, ["job"], ttl)
    await asyncio.sleep(ttl + 0.1)
    began = time.monotonic()
    equal(await face.do(client.lock("job").acquire, timeout=0), None, "a first try")
    (record,) = await face.do(client.leases)
    equal((record.name, record.holder, record.fencing_token), ("job", "host/dead", dead), "what is shown")
    assert 0 < record.expires_in <= 1.05 * ttl, f"what is left of a ttl of {ttl} s: {record}"
    lease = await had(face, client.lock("job"), timeout=10)
    took = time.monotonic() - began
    assert ttl < took < 2 * ttl + 2, f"a lease of {ttl} s was watched for {took:.2f} s"
    rising([dead, lease.fencing_token], "tokens across the take-over")
    await face.do(lease.release)


@case("observe", observe)
async def who_only_tries_watches_too(face: Face) -> None:
    """A client that tries now and then, and never waits, takes over from a dead holder as well."""
    ttl, client = face.short_ttl, face.client(takeover="observe")
    (dead,) = crashed(face, ["job"], ttl)
    lock = client.lock("job")
    equal(await face.do(lock.acquire, timeout=0), None, "a first try")
    await asyncio.sleep(1.2 * ttl)
    lease = await had(face, lock, timeout=0)
    rising([dead, lease.fencing_token], "tokens across the take-over")
    await face.do(lease.release)


@case("observe", observe)
async def who_renews_is_not_taken_over(face: Face) -> None:
    """As long as its holder renews it, a lease is its own, however long others watch; released, it is theirs."""
    ttl = face.short_ttl
    mine, theirs = (face.client(takeover="observe") for _ in range(2))
    lease = await had(face, mine.lock("job", ttl=ttl), timeout=0)
    began = time.monotonic()
    equal(await face.do(theirs.lock("job", ttl=ttl).acquire, timeout=3 * ttl), None, "waiting for three of its ttls")
    assert time.monotonic() - began >= 3 * ttl * 0.99
    equal(lease.held, True, "whose it is")
    with raises(InvalidOption):
        await face.do(lease.renew, 2 * ttl)
    waiting = asyncio.ensure_future(had(face, theirs.lock("job", ttl=ttl), timeout=10))
    await asyncio.sleep(0.1)
    await face.do(lease.release)
    await face.do((await waiting).release)


@case("observe", observe)
async def many_names_are_watched_at_once(face: Face) -> None:
    """A dead holder of several names is taken over by who wants all of them."""
    ttl, client = face.short_ttl, face.client(takeover="observe")
    names = [f"part/{n}" for n in range(12)]
    tokens = crashed(face, names, ttl)
    leases = await had(face, client.multilock(names), timeout=10 + ttl)
    for name, token in zip(names, tokens, strict=True):
        rising([token, leases[name].fencing_token], f"tokens of {name!r}")
    await face.do(leases.release)


@case("observe", observe)
async def an_exported_lease_is_watched_too(face: Face) -> None:
    """A lease that was given away and never adopted ends for who has watched it; one that was adopted goes on."""
    ttl = face.short_ttl
    mine, theirs = (face.client(takeover="observe") for _ in range(2))
    state = await face.do((await had(face, mine.lock("job", ttl=ttl), timeout=0)).export)
    adopted = await face.do(theirs.adopt, state, ttl=ttl)
    equal(await face.do(mine.lock("job").acquire, timeout=1.5 * ttl), None, "what was adopted")
    await face.do(adopted.export)
    await face.do((await had(face, mine.lock("job"), timeout=10)).release)


@case("observe", observe)
async def a_dead_leader_is_followed(face: Face) -> None:
    """An election goes on when its leader has died: also when only reserves are left, which look before they ask."""
    ttl, client = face.short_ttl, face.client(takeover="observe")
    (dead,) = crashed(face, ["seat"], ttl)
    term = await face.do(client.election("seat", ttl=ttl, priority=-1).campaign, timeout=20)
    rising([dead, term.number], "terms")
    await face.do(term.resign)


@case("observe", observe)
async def what_cannot_be_watched_is_refused(face: Face) -> None:
    """Permits, queues and claims in columns end by the store's clock: Unsupported when the object is made."""
    client = face.idle_client(takeover="observe")
    makes: list[Callable[[], object]] = [
        lambda: client.semaphore("pool", 3),
        lambda: client.rwlock("page"),
        lambda: client.queue("mails"),
        lambda: client.claims("items", mode="columns"),
    ]
    for make in makes:
        with raises(Unsupported):
            make()
    with raises(InvalidOption):
        face.idle_client(takeover="trust")
