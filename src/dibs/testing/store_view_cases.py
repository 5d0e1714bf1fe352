"""Conformance cases on the contract of stores: names, what operators see of them, and what a store says of itself."""

from __future__ import annotations

from functools import partial

from dibs.store import RELEASED, Granted
from dibs.testing.case import STORE_CASES, Bench, asking, claims, equal, granted, held, together
from dibs.testing.lookalikes import LOOKALIKES

case = STORE_CASES.case


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
