"""Conformance cases on the contract of stores: grants, tokens, ends, vectors, names, and what operators see.

Each is a function of a ``Bench``. Within the store's resolution around an expiry both answers are right, so a case that
sees a lease end asks until it has ended.
"""

from __future__ import annotations

import time
import unicodedata
from functools import partial
from typing import TYPE_CHECKING

from dibs.store import PIN_KEEP_S, RELEASED, Acquire, Gone, Granted, Held, Release, Renew, Renewed
from dibs.testing.case import STORE_CASES, Bench, asking, claims, equal, gone, granted, held, rising, together, until

if TYPE_CHECKING:
    from dibs.store import Outcome, Request

case = STORE_CASES.case

# Names that some store somewhere takes for one another.
LOOKALIKES = [
    "job",
    "JOB",
    "Job",
    "job ",
    "job  ",
    " job",
    unicodedata.normalize("NFC", "café"),
    unicodedata.normalize("NFD", "café"),
    "cafe",
    "CAFÉ",
    "straße",
    "strasse",
    "ﬁ",
    "fi",
    "ı",
    "i",
    "a'b",
    'a"b',
    "a''b",
    "a`b",
    "100%",
    "100%s",
    "100%%",
    "%(name)s",
    "a_b",
    "aXb",
    "a\\b",
    "a\\\\b",
    "a/b",
    "{a}",
    "{{a}}",
    "{0}",
    "{1,2}",
    "a,b",
    "a;b",
    "$1",
    ":name",
    "?",
    "NULL",
    "null",
    "🔒",
    "🔓",
    "👩‍👩‍👧",
    "e\u200bf",
    "ef",
    "\ufeffef",
    "\U0010ffff",
    "x" * 255,
    "x" * 254 + "y",
    "é" * 127,
    "é" * 126 + "è",
]


# -- granting ---------------------------------------------------------------------------------------------------------


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
    purged = store.purge(0)
    assert purged >= 0, f"purge(0) after a release says {purged}"  # 0 where nothing is kept of a free name
    tokens.append(granted(earlier.acquire(name, ids[3]), "a purged name"))
    equal(earlier.release(name, ids[3]), RELEASED, "its release")
    store.purge(0)
    tokens.append(granted(store.acquire(name, ids[4]), "a name purged again"))
    equal(store.release(name, ids[4]), RELEASED, "its release")
    store.purge(0)
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
        stores[(turn + 1) % 3].purge(0)
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
    store.purge(3600)
    store.purge(0)
    lease = store.shown(name)
    assert lease.fencing_token == token, f"the lease in force after a purge: {lease}"
    held(store.acquire(name, other), "a lease in force after a purge")
    assert isinstance(store.renew(name, mine), Renewed), "a lease in force cannot be renewed after a purge"


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


# -- renewing and releasing -------------------------------------------------------------------------------------------


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


# -- names that are kept ----------------------------------------------------------------------------------------------


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
    store.purge(0)
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


# -- vectors ----------------------------------------------------------------------------------------------------------


@case("13")
def a_thousand_in_one_call(bench: Bench) -> None:
    """One call carries a thousand requests, and its outcomes come in the order of the requests, not of the names."""
    store, (mine, other) = bench.open(), claims(2)
    equal(store.act(), [], "the outcomes of no requests")
    names = sorted(bench.names(1000), key=lambda name: name[::-1])
    taken = names[::7]
    store.act(*[asking(name, other) for name in taken])
    outcomes = store.act(*[asking(name, mine) for name in names])
    seen = [name for name, outcome in zip(names, outcomes, strict=True) if isinstance(outcome, Held)]
    equal(seen, taken, "the names of a thousand that were refused")
    renewals = store.act(*[Renew(name, mine, 60) for name in names])
    equal(
        [n for n, o in zip(names, renewals, strict=True) if isinstance(o, Gone)],
        taken,
        "the names of a thousand that could not be renewed",
    )
    releases = store.act(*[Release(name, mine) for name in names])
    equal(
        [n for n, o in zip(names, releases, strict=True) if isinstance(o, Gone)],
        taken,
        "the names of a thousand that could not be released",
    )
    equal(len(store.leases(bench.namespace + ":")), len(taken), "leases left")


@case("13")
def verbs_mix_in_one_call(bench: Bench) -> None:
    """Acquires, renewals and releases of different names travel together, each by itself, in any order."""
    store, (mine, other) = bench.open(), claims(2)
    a, b, c, d, e, f = bench.names(6)
    store.act(asking(f, mine), asking(b, other), asking(d, mine))
    kinds = [
        type(outcome).__name__
        for outcome in store.act(
            Release(f, mine), asking(e, mine), Renew(d, mine, 60), asking(b, mine), Renew(a, mine, 60), Release(c, mine)
        )
    ]
    equal(kinds, ["Released", "Granted", "Renewed", "Held", "Gone", "Gone"], "outcomes of a mixed call")
    equal([lease.name for lease in store.leases(bench.namespace + ":")], sorted([b, d, e]), "what is held afterwards")


@case("P2")
def one_name_many_times_in_one_call(bench: Bench) -> None:
    """Requests for one name in one call are tried in the order given: a release makes room for what is behind it."""
    store, name, x, y, (a, b, c) = bench.open(), bench.name(), bench.name(), bench.name(), claims(3)
    first = granted(store.acquire(name, a), "a free name")
    requests: list[Request] = [
        asking(y, a),
        Release(name, a),
        asking(name, b),
        asking(x, a),
        asking(name, c),
        asking(name, b),
        Renew(name, b, 60),
        Release(name, b),
        Release(name, b),
        asking(name, c),
        Renew(name, a, 60),
    ]
    seen = store.act(*requests)
    kinds = [type(outcome).__name__ for outcome in seen]
    expected = "Granted Released Granted Granted Held Granted Renewed Released Gone Granted Gone"
    equal(kinds, expected.split(), "outcomes for one name in one call")
    equal(seen[5], seen[2], "the retry in the same call")
    second, third = granted(seen[2], "second"), granted(seen[9], "third")
    rising([first, second, third], "grants in one call")
    equal(held(seen[4], "c behind b").fencing_token, second, "the token that the refused one is told")
    lease = store.shown(name)
    assert lease.fencing_token == third, f"the lease after the call: {lease}"


@case("P2")
def new_names_many_times_in_one_call(bench: Bench) -> None:
    """Two claims for a name that never was, in one call: the first is granted, the second refused."""
    store, name, (a, b) = bench.open(), bench.name(), claims(2)
    outcomes = store.act(asking(name, a), asking(name, b), asking(name, a))
    equal([type(o).__name__ for o in outcomes], ["Granted", "Held", "Granted"], "three acquires of a new name")
    equal(outcomes[2], outcomes[0], "the retry in the same call")


@case("13")
def poisoned_neighbours(bench: Bench) -> None:
    """Requests that cannot succeed, or look dangerous, do not fail those they travel with."""
    store, (mine, other) = bench.open(), claims(2)
    good, taken, odd = bench.names(10), bench.name(), bench.name("'\"\\%s{}$1;-- 🔒")
    granted(store.acquire(taken, other), "a free name")
    poison: list[Request] = [
        asking(taken, mine),
        Renew(taken, mine, 60),
        Release(taken, mine),
        Release(taken, "'; DROP TABLE dibs_lease; --"),
        Release(bench.name(), mine, 1, 2**62),
        Renew(bench.name(), mine, 60, 7),
        asking(odd, mine, info='{"a":"\'\\"\\\\%s{}🔒"}'),
        asking(bench.name(), "f" * 200 + "-1"),
        Acquire(bench.name(), mine, 60, "h" * 300 + "'\"%s", '{"x":"' + "é" * 2000 + '"}'),
    ]
    requests: list[Request] = []
    for index, name in enumerate(good):
        requests += [*poison[index % len(poison) :], asking(name, mine)]
    outcomes = store.act(*requests)
    refused = [r for r, o in zip(requests, outcomes, strict=True) if r.name in good and not isinstance(o, Granted)]
    equal(refused, [], "good requests that failed among bad ones")
    equal({lease.name for lease in store.leases(bench.namespace)} >= {*good, taken, odd}, True, "all of them are held")


@case("13")
def opposite_orders(bench: Bench) -> None:
    """Calls over the same names in opposite orders, from many connections at once, all come to an end."""
    names = bench.names(40)
    stores = [bench.open() for _ in range(4)]
    ids = claims(4)

    def work(index: int) -> int:
        mine, won = names if index % 2 else names[::-1], 0
        for _ in range(8):
            outcomes = stores[index].act(*[asking(name, ids[index]) for name in mine])
            had = [name for name, outcome in zip(mine, outcomes, strict=True) if isinstance(outcome, Granted)]
            won += len(had)
            released = stores[index].act(*[Release(name, ids[index]) for name in had[::-1]])
            equal(released, [RELEASED] * len(had), "the releases of what was granted")
        return won

    total = sum(together(partial(work, i) for i in range(4)))
    assert total >= len(names), f"only {total} grants"
    equal(store_names(bench), [], "what is held afterwards")


def store_names(bench: Bench) -> list[str]:
    return [lease.name for lease in bench.open().leases(bench.namespace + ":")]


@case("P3")
def no_reader_sees_a_mixture(bench: Bench) -> None:
    """A reader never sees one grant's holder with another grant's token."""
    name, writer, reader = bench.name(), bench.open(), bench.open()
    grants: dict[int, str] = {}
    over: list[bool] = []

    def write() -> None:
        try:
            for claim in claims(60):
                before = writer.acquire(name, claim)
                grants[granted(before, "a free name")] = f"host/{claim.partition('-')[0]}"
                writer.release(name, claim)
        finally:
            over.append(True)

    def read() -> list[tuple[int, str]]:
        seen = []
        while not over:
            seen += [(lease.fencing_token, lease.holder) for lease in reader.leases(name)]
        return seen

    _, seen = together([write, read])
    assert isinstance(seen, list)
    wrong = [(token, holder) for token, holder in seen if grants.get(token) != holder]
    equal(wrong, [], "pairs of token and holder that no grant had")


# -- names, and what operators see ------------------------------------------------------------------------------------


@case("P20")
def names_are_exact(bench: Bench) -> None:
    """Names that differ in case, accents, normal form, spaces, quotes or length are different locks."""
    store, namespace = bench.open(), bench.namespace
    ids = claims(len(LOOKALIKES))
    keys = [f"{namespace}:{name}" for name in LOOKALIKES]
    outcomes = store.act(*[asking(key, claim) for key, claim in zip(keys, ids, strict=True)])
    equal([k for k, o in zip(keys, outcomes, strict=True) if not isinstance(o, Granted)], [], "names taken for another")
    shown = {lease.name: lease.holder for lease in store.leases(namespace + ":")}
    equal(
        shown,
        {k: f"host/{c.partition('-')[0]}" for k, c in zip(keys, ids, strict=True)},
        "names and holders as they are shown",
    )
    for key, claim in zip(keys, ids, strict=True):
        equal(store.release(key, claim), RELEASED, f"the release of {key!r}")
    equal(store.leases(namespace + ":"), [], "what is held afterwards")


@case("P20")
def the_longest_key(bench: Bench) -> None:
    """The longest namespace together with the longest name is kept whole."""
    store = bench.open()
    namespace = (bench.namespace + "n" * 63)[:63]
    keys = [f"{namespace}:{'é' * 127}{last}" for last in "xy"]
    for key, claim in zip(keys, claims(2), strict=True):
        granted(store.acquire(key, claim), f"a key of {len(key.encode())} bytes")
    equal([lease.name for lease in store.leases(namespace)], keys, "the keys as they are shown")


@case("P20")
def leases_by_prefix(bench: Bench) -> None:
    r"""``leases(prefix)`` brings exactly the leases whose name starts with it, by name; %, _ and \ are letters."""
    store, (mine,) = bench.open(), claims(1)
    names = [
        "a",
        "a%",
        "a%b",
        "a_",
        "a_b",
        "ab",
        "aB",
        "A",
        "a\\",
        "a\\b",
        "b",
        "é",
        "a🔒",
        "a\U0010ffff",
        "a\U0010ffffb",
    ]
    keys = sorted(f"{bench.namespace}:{name}" for name in names)
    store.act(*[asking(key, mine) for key in reversed(keys)])
    for prefix in ["", "a", "a%", "a_", "a\\", "A", "ab", "b", "c", "é", "%", "_", "a🔒", "a\U0010ffff"]:
        start = f"{bench.namespace}:{prefix}"
        expected = [key for key in keys if key.startswith(start)]
        equal([lease.name for lease in store.leases(start)], expected, f"leases with the prefix {prefix!r}")
    store.release(keys[0], mine)
    equal([lease.name for lease in store.leases(bench.namespace + ":")], keys[1:], "leases after a release")


@case("P3")
def leases_tell_all(bench: Bench) -> None:
    """A lease is shown with its holder, token, times, info and how many wait, and not after it expired."""
    store, name, short, (mine, other) = bench.open(), bench.name(), bench.name(), claims(2)
    info = '{"text":"ünï 🔒 \\"quoted\\" \\\\ %s","n":9007199254740993,"list":[1,null,true,1.5]}'
    outcome = store.act(asking(name, mine, 60, info=info), asking(short, mine, bench.short_ttl))[0]
    token = granted(outcome, "a free name")
    assert isinstance(outcome, Granted)
    lease = store.shown(name)
    equal(lease.slot, 1, "slot")
    equal(lease.holder, f"host/{mine.partition('-')[0]}", "holder")
    equal(lease.fencing_token, token, "token")
    equal(lease.info, info, "info, to the letter")
    equal(lease.waiting, 0, "how many wait")
    assert abs(lease.acquired_at - outcome.acquired_at) < 0.001, f"granted at {outcome.acquired_at}, shown as {lease}"
    assert 50 < lease.expires_in <= 60, f"expires_in of a lease of 60 s: {lease.expires_in}"
    store.until_expired(short, "the end of a short lease")
    equal([lease.name for lease in store.leases(bench.namespace + ":")], [name], "leases in force")
    store.release(name, mine)
    granted(store.acquire(name, other), "a free name")
    lease = store.shown(name)
    assert lease.info is None, f"the next holder's lease shows the info of the one before: {lease}"


@case("P23")
def set_up_by_many_at_once(bench: Bench) -> None:
    """Several connections that set up at the same moment all succeed, and setting up again harms nothing."""
    name, (mine, other) = bench.name(), claims(2)
    stores = [bench.open() for _ in range(8)]
    together(store.setup for store in stores)
    token = granted(stores[0].acquire(name, mine), "a free name")
    together(store.setup for store in stores)
    equal(held(stores[1].acquire(name, other), "a lease from before").fencing_token, token, "its token")


@case("P23")
def first_use_by_many_at_once(bench: Bench) -> None:
    """Several connections that are used for the first time at the same moment all succeed."""
    names, ids = bench.names(8), claims(8)
    stores = [bench.open() for _ in range(8)]
    for outcome in together(partial(s.acquire, n, c) for s, n, c in zip(stores, names, ids, strict=True)):
        granted(outcome, "a name of one's own")


@case("P23")
def it_says_what_it_is(bench: Bench) -> None:
    """Capabilities are within what clients can use, and ``check`` and ``schema`` tell people something."""
    capabilities = bench.capabilities
    store = bench.open()
    store.act()
    for shown in (capabilities, store.store.capabilities):
        assert 0 < shown.ttl_min_s < shown.ttl_max_s <= 30 * 24 * 3600, f"limits of ttl: {shown}"
        assert 0 <= shown.resolution_s <= 5, f"resolution: {shown}"
        assert shown.margin_s >= 0.010, f"margin: {shown}"
        assert shown.waiting_line in ("FIFO", "none"), f"waiting line: {shown}"
    findings = store._patiently(store.store.check)
    assert findings, "check() found nothing to say"
    assert all(finding.promise and finding.detail for finding in findings), f"findings without words: {findings}"
    assert store.store.schema().strip(), "schema() is empty"


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
