"""Conformance cases on the contract of stores: many requests in one call."""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING
from dibs.store import RELEASED, Acquire, Gone, Granted, Held, Release, Renew
from dibs.testing.case import STORE_CASES, Bench, asking, claims, equal, granted, held, rising, together
from dibs.testing.lookalikes import LOOKALIKES

if TYPE_CHECKING:
    from dibs.store import Request


case = STORE_CASES.case


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


@case("P8")
def one_call_says_what_many_calls_say(bench: Bench) -> None:
    """Names that look alike, new, free, the asker's or another's: in one call, each is told what it would be alone."""
    store, (mine, other, third) = bench.open(), claims(3)
    base = bench.name()
    names = [base + text for text in LOOKALIKES if len((base + text).encode()) <= 255]
    new, free, own, foreign = (names[start::4] for start in range(4))
    before = {name: granted(store.act(asking(name, other))[0], "of a new name") for name in free + foreign}
    before |= {name: granted(store.act(asking(name, mine))[0], "of a new name") for name in own}
    for name in free:
        store.act(Release(name, other))
    tokens: dict[str, int] = {}
    for name, outcome in zip(names, store.act(*[asking(name, mine) for name in names]), strict=True):
        if name in foreign:
            held(outcome, f"an acquire of {name!r}, which another holds")
        else:
            tokens[name] = granted(outcome, f"an acquire of {name!r}")
    for name in free:
        rising([before[name], tokens[name]], f"tokens of {name!r}")
    for name in own:
        equal(tokens[name], before[name], f"the token of {name!r}, acquired again by its holder")
    for name in new + free + own:
        equal(granted(store.act(asking(name, mine))[0], name), tokens[name], f"the token of {name!r}, asked for alone")
    for verb in (partial(Renew, ttl=60), Release):
        # Of every fifth an impostor asks.
        asked = [verb(name, third if place % 5 == 0 else mine) for place, name in enumerate(names)]
        for request, outcome in zip(asked, store.act(*asked), strict=True):
            expected = request.claim_id == third or request.name in foreign
            equal(isinstance(outcome, Gone), expected, f"whether {request!r} is Gone")
    left = [name for place, name in enumerate(names) if place % 5 == 0 or name in foreign]
    equal([lease.name for lease in store.leases(bench.namespace + ":")], sorted(left), "what is held afterwards")


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
