"""Conformance cases on the contract of stores: how long a lease lasts, and what a release leaves behind."""

from __future__ import annotations

import time

from dibs._typing import TYPE_CHECKING
from dibs.store import PIN_KEEP_S, RELEASED, Granted, Held, Release, Renewed
from dibs.testing.case import STORE_CASES, Bench, asking, claims, equal, gone, granted, held, rising, until

if TYPE_CHECKING:
    from dibs.store import Outcome


case = STORE_CASES.case


@case("P5")
def renewal_extends(bench: Bench) -> None:
    """A renewal lets the lease end a ttl from now, and changes neither token, holder nor the time of the grant."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    granted(store.acquire(name, mine, 5), "a free name")
    before = store.shown(name)
    renewed = store.renew(name, mine, 60)
    assert isinstance(renewed, Renewed), f"a renewal by the holder: {renewed}"
    assert 50 < renewed.expires_at - time.time() < 3700, f"expires_at is no Unix time in 60 s: {renewed.expires_at}"
    after = store.shown(name)
    kept = before._replace(expires_in=after.expires_in, expires_at=after.expires_at)
    equal(after, kept, "the lease after its renewal, but for its end")
    assert 50 < after.expires_at - before.expires_at < 60, f"expires_at moved from {before} to {after}"
    assert 50 < after.expires_in <= 60, f"a lease renewed for 60 s ends in {after.expires_in} s"
    assert held(store.acquire(name, other), "a renewed lease").free_in > 50, "the renewal is not what others are told"


@case("P5")
def renewal_keeps_it_alive(bench: Bench) -> None:
    """A lease that is renewed in time outlives its first ttl."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    ttl = max(0.6, bench.short_ttl)
    granted(store.acquire(name, mine, ttl), "a free name")
    end = time.monotonic() + 2 * ttl
    while time.monotonic() < end:
        outcome = store.renew(name, mine, ttl)
        assert isinstance(outcome, Renewed), f"a renewal in time: {outcome}"
        held(store.acquire(name, other), "a lease that is renewed")
        time.sleep(ttl / 10)


@case("P4")
def renewal_is_by_claim(bench: Bench) -> None:
    """Renewal by a claim that does not hold, or of a name nobody has, changes nothing."""
    store, name, free, (mine, other) = bench.open(), bench.name(), bench.name(), claims(2)
    gone(store.renew(free, mine), "renewal of a name nobody ever had")
    equal(store.lease(free), None, "the lease made by a renewal")
    granted(store.acquire(name, mine, 5), "a free name")
    gone(store.renew(name, other, 60), "renewal by another claim")
    gone(store.renew(name, "", 60), "renewal by an empty claim")
    lease = store.shown(name)
    assert lease.expires_in <= 5, f"a foreign renewal extended the lease: {lease}"
    equal(store.release(name, mine), RELEASED, "its release")
    gone(store.renew(name, mine), "renewal after the release")
    gone(store.renew(name, ""), "renewal of a free name by an empty claim")
    granted(store.acquire(name, other), "the name after all that")


@case("P8")
def release_is_by_claim(bench: Bench) -> None:
    """Late, repeated and foreign releases free nobody's lease and say Gone."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    gone(store.release(name, mine), "release of a name nobody ever had")
    granted(store.acquire(name, mine), "a free name")
    gone(store.release(name, other), "release by another claim")
    gone(store.release(name, ""), "release by an empty claim")
    held(store.acquire(name, other), "the name after foreign releases")
    equal(store.release(name, mine), RELEASED, "release by the holder")
    gone(store.release(name, mine), "the same release again")
    token = granted(store.acquire(name, other), "a released name")
    gone(store.release(name, mine), "the holder before, releasing late")
    gone(store.renew(name, mine), "the holder before, renewing late")
    equal(held(store.acquire(name, mine), "the name of the new holder").fencing_token, token, "its token")


@case("P5, P8")
def an_expired_lease_is_gone(bench: Bench) -> None:
    """A lease that expired is gone for renewal and release, whether or not somebody else came."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    granted(store.acquire(name, mine, bench.short_ttl), "a free name")
    store.until_expired(name, "the end of a short lease")
    time.sleep(bench.capabilities.resolution_s)
    gone(store.renew(name, mine), "renewal of an expired lease")
    gone(store.release(name, mine), "release of an expired lease")
    token = granted(store.acquire(name, other), "an expired name")
    gone(store.renew(name, mine), "renewal by the holder before")
    gone(store.release(name, mine), "release by the holder before")
    equal(held(store.acquire(name, mine), "the holder before, again").fencing_token, token, "the new holder's token")


@case("3")
def a_kept_name_is_refused_and_shown(bench: Bench) -> None:
    """A name released with ``keep`` is refused to all until then, and shown with its holder, token and new info."""
    store, second, name, (mine, other) = bench.open(), bench.open(), bench.name(), claims(2)
    token = granted(store.act(asking(name, mine, 20, info='{"a":1}'))[0], "a free name")
    before = store.shown(name)
    equal(store.act(Release(name, mine, keep=60, info='{"once":"ü"}'))[0], RELEASED, "a release that keeps the name")
    for connection in (store, second):
        kept = connection.shown(name)
        expected = before._replace(info='{"once":"ü"}', expires_at=kept.expires_at, expires_in=kept.expires_in)
        equal(kept, expected, "the kept name as shown, but for its end")
        assert 50 < kept.expires_in <= 60, f"a name kept for 60 s: {kept}"
        for claim in (mine, other):
            refused = held(connection.acquire(name, claim), "a kept name")
            equal((refused.holder, refused.fencing_token), (before.holder, token), "who has it, as told to who asks")
            assert 50 < refused.free_in <= 60, f"free_in of a name kept for 60 s: {refused.free_in}"
    gone(store.renew(name, mine, 600), "renewal of a kept name by who had it")
    for again in (Release(name, mine), Release(name, mine, keep=600, info="{}"), Release(name, other, keep=600)):
        gone(store.act(again)[0], "another release of a kept name")
    store.purge(bench.namespace, 0)
    after = store.shown(name)
    equal((after.info, after.fencing_token), ('{"once":"ü"}', token), "info and token after all that")
    assert after.expires_in <= 60, f"a kept name that was extended: {after}"


@case("3")
def a_kept_name_shows_the_lease_it_was(bench: Bench) -> None:
    """Kept without a new info, a name is shown with that of its lease; plain releases in the same call free theirs."""
    store, (mine, other), (a, b, c) = bench.open(), claims(2), bench.names(3)
    store.act(*[asking(name, mine, info='{"a":1}') for name in (a, b, c)])
    outcomes = store.act(Release(a, mine, keep=60), Release(b, mine), Release(c, mine, keep=60, info='{"c":1}'))
    equal(outcomes, [RELEASED] * 3, "three releases")
    shown = [(lease.name, lease.info) for lease in store.leases(bench.namespace + ":")]
    equal(shown, [(a, '{"a":1}'), (c, '{"c":1}')], "what is shown after releases of which two keep")
    granted(store.acquire(b, other), "the name that was not kept")


@case("P2")
def a_kept_name_is_free_in_time(bench: Bench) -> None:
    """A kept name is free when its time is over, with no janitor, and the next grant has a greater token."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    first = granted(store.acquire(name, mine, 60), "a free name")
    equal(store.act(Release(name, mine, keep=bench.short_ttl, info="{}"))[0], RELEASED, "a release that keeps the name")
    held(store.acquire(name, other), "a kept name")
    second = store.until_granted(name, other, "a name that was kept")
    rising([first, second], "grants across a time in which the name was kept")
    equal(store.shown(name).info, None, "the info of the next lease")


@case("P2")
def a_kept_name_can_be_freed(bench: Bench) -> None:
    """An operator frees a kept name at once by its token; broken for its expiry it stays kept and shown."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    token = granted(store.acquire(name, mine, 60), "a free name")
    equal(store.act(Release(name, mine, keep=60, info='{"a":1}'))[0], RELEASED, "a release that keeps the name")
    equal(store.break_lease(name, token + 1, now=True), False, "breaking with another token")
    equal(store.break_lease(name, token, now=False), True, "breaking it for its expiry")
    equal(store.shown(name).info, '{"a":1}', "the info after that")
    held(store.acquire(name, other), "a kept name that was broken for its expiry")
    equal(store.break_lease(name, token, now=True), True, "breaking it at once")
    equal(store.lease(name), None, "what is shown after that")
    rising([token, granted(store.acquire(name, other), "its name")], "grants across a break of a kept name")


@case("3")
def keeping_is_by_claim(bench: Bench) -> None:
    """A release that would keep the name does nothing when the claim does not hold it any more."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    gone(store.act(Release(name, mine, keep=60, info="{}"))[0], "keeping a name nobody ever had")
    granted(store.acquire(name, mine, bench.short_ttl), "a free name")
    store.until_expired(name, "the end of a short lease")
    time.sleep(bench.capabilities.resolution_s)
    gone(store.act(Release(name, mine, keep=60, info="{}"))[0], "keeping a name whose lease has expired")
    token = granted(store.acquire(name, other, 60), "an expired name")
    gone(store.act(Release(name, mine, keep=600, info="{}"))[0], "keeping the name of the next holder")
    lease = store.shown(name)
    equal((lease.fencing_token, lease.info), (token, None), "the next holder's lease")
    assert lease.expires_in <= 60, f"the next holder's lease, extended by another: {lease}"


def _expires(outcome: Outcome) -> float:
    assert isinstance(outcome, Held)
    return outcome.free_in


@case("P7")
def a_lease_ends_when_it_said(bench: Bench) -> None:
    """A lease nobody renews is free about when refused callers were told, and not before."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    began = time.monotonic()
    granted(store.acquire(name, mine, 0.5 + bench.short_ttl), "a free name")
    free_in = _expires(store.acquire(name, other))
    until(lambda: isinstance(store.acquire(name, other), Granted), "the end of a short lease")
    took = time.monotonic() - began
    assert took > free_in - bench.capabilities.resolution_s - 0.02, f"told {free_in} s, free after {took} s"
    assert took < free_in + 3, f"told {free_in} s, free after {took} s"


@case("P8", promised=lambda capabilities: capabilities.guard)
def a_release_of_what_may_be_pinned_is_a_release(bench: Bench) -> None:
    """A release that keeps for PIN_KEEP_S frees a name that nothing pins, and the next token is greater."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    token = granted(store.acquire(name, mine), "a free name")
    (outcome,) = store.act(Release(name, mine, keep=PIN_KEEP_S))
    equal(outcome, RELEASED, "the release")
    equal(store.lease(name), None, "what is shown after it")
    gone(store.renew(name, mine), "a renewal after it")
    rising([token, granted(store.acquire(name, other), "a name given back")], "grants")
    (outcome,) = store.act(Release(name, mine, keep=PIN_KEEP_S))
    gone(outcome, "a release by another claim")


@case("P8", promised=lambda capabilities: capabilities.guard and capabilities.permits)
def permits_that_may_be_pinned_are_released(bench: Bench) -> None:
    """The same of a permit: its slot is free for the next."""
    store, name, (mine, other) = bench.open(), bench.name(), claims(2)
    token = granted(store.act(asking(name, mine)._replace(permits=1))[0], "a free permit")
    equal(store.act(Release(name, mine, keep=PIN_KEEP_S))[0], RELEASED, "the release")
    again = granted(store.act(asking(name, other)._replace(permits=1))[0], "a permit given back")
    rising([token, again], "grants")
