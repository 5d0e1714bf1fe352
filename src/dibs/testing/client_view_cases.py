"""Conformance cases on clients, run through both faces: what is seen and mended, and what is refused at once."""

from __future__ import annotations

import asyncio
import math
import sqlite3
from datetime import timedelta

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, LeaseLost, StoreUnavailable, Unsupported
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, rising
from dibs.testing.client_bench import had, raises, shown, task, until, why

if TYPE_CHECKING:
    from dibs.store import Capabilities
    from dibs.testing.faces import Face


case = CLIENT_CASES.case


@case("P20")
async def leases_are_seen(face: Face) -> None:
    """``leases(prefix)`` and ``holder(name)`` show what is held in this namespace, by whom and how many wait."""
    ours, theirs = face.client(), face.client()
    names = ["a", "a/1", "a/2", "b%", "b_c", "Ä 🔒"]
    leases = {name: await had(face, ours.lock(name, ttl=20)) for name in names}
    for prefix in ("", "a", "a/", "b%", "b_", "Ä", "c", "%"):
        records = await face.do(theirs.leases, prefix)
        equal([r.name for r in records], sorted(n for n in names if n.startswith(prefix)), f"leases({prefix!r})")
    for record in await face.do(theirs.leases):
        lease = leases[record.name]
        equal(
            (record.holder, record.fencing_token), (lease.holder, lease.fencing_token), f"the record of {record.name}"
        )
    equal(await face.do(theirs.holder, "a/"), None, "holder() of a name that is the beginning of others")
    await face.do(leases["a"].release)
    equal(await face.do(theirs.holder, "a"), None, "holder() after a release")
    for lease in leases.values():
        await face.do(lease.release)
    equal(await face.do(theirs.leases), [], "leases() after all were released")


@case("P20")
async def namespaces_do_not_meet(face: Face) -> None:
    """One name in two namespaces is two locks, and neither sees the other's leases."""
    one, two = face.client(), face.client(namespace=face.namespace + "-2")
    first, second = await had(face, one.lock("same"), timeout=0), await had(face, two.lock("same"), timeout=0)
    for client, lease in ((one, first), (two, second)):
        records = await face.do(client.leases)
        equal([(r.name, r.holder) for r in records], [("same", lease.holder)], "leases of a namespace")
    equal(await face.do(one.break_lease, "same", fencing_token=first.fencing_token, now=True), True, "breaking one")
    record = await shown(face, two, "same")
    assert record.holder == second.holder, f"the other after that: {record}"
    equal(await face.do(second.release), True, "release")
    with raises(LeaseLost):
        await face.do(first.renew)


@case("P2")
async def breaking_and_purging(face: Face) -> None:
    """A broken lease cannot be renewed and frees the name at its expiry; tokens go on rising across a purge."""
    ours, theirs = face.client(), face.client()
    ttl = 2 * face.short_ttl
    lease = await had(face, ours.lock("mend", ttl=ttl))
    equal(
        await face.do(theirs.break_lease, "mend", fencing_token=lease.fencing_token),
        True,
        f"break_lease ({why(lease)})",
    )
    equal(await face.do(theirs.lock("mend").acquire, timeout=0), None, "the name before the expiry")
    next_lease = await had(face, theirs.lock("mend"), timeout=PATIENCE_S)
    equal(lease.held, False, "whether the old holder still trusts its lease when another has it")
    equal(await face.do(next_lease.release), True, "release")
    for client in (ours, theirs):
        purged = await face.do(client.purge, 0)
        assert purged >= 0, f"purge(0) says {purged!r}"
        after = await had(face, ours.lock("mend"), timeout=0)
        rising(
            [lease.fencing_token, next_lease.fencing_token, after.fencing_token], "tokens across a break and a purge"
        )
        next_lease = after
        equal(await face.do(after.release), True, "release")
    equal(await face.do(ours.purge, timedelta(days=1)), 0, "what a purge of the last day deletes")


@case("P23")
async def the_store_is_reached(face: Face) -> None:
    """``setup`` may be called again and again, ``ping`` says how long it took, ``capabilities`` what is promised."""
    client = face.client()
    await asyncio.gather(*[task(face.do(face.client().setup)) for _ in range(4)])
    await face.do(client.setup)
    took = await face.do(client.ping)
    assert 0 <= took < PATIENCE_S, f"ping() took {took} s"
    shown = await face.real_capabilities(client)
    equal(shown.store, face.capabilities.store, "the store's name")
    # What follows from the address alone must not change when the store is reached, or locks were checked wrongly.
    equal(
        (shown.ttl_min_s, shown.ttl_max_s), (face.capabilities.ttl_min_s, face.capabilities.ttl_max_s), "limits of ttl"
    )
    assert shown.margin_s <= face.capabilities.margin_s, f"a margin that grows when connected: {shown}"


@case("P23")
async def limits_of_ttl_are_real(face: Face) -> None:
    """The shortest and the longest ttl that a store declares work, and beyond them nothing is sent."""
    limits = face.capabilities
    client, idle = face.client(), face.idle_client()
    for wrong in (limits.ttl_min_s * 0.99, limits.ttl_max_s * 1.01, 0, -1, math.nan, math.inf, "30", True):
        with raises(InvalidOption):
            idle.lock("ttl", ttl=wrong)
        with raises(InvalidOption):
            face.idle_client(ttl=wrong)
    long = await had(face, client.lock("longest", ttl=limits.ttl_max_s), timeout=0)
    record = await shown(face, client, "longest")
    assert record.expires_in > limits.ttl_max_s - 3600, f"the longest lease: {record}"
    equal(await face.do(long.release), True, "release")

    async def short_lease_was_held() -> bool:
        try:
            lease = await face.do(client.lock("shortest", ttl=limits.ttl_min_s, renew=False).acquire, timeout=0)
        except StoreUnavailable:  # its answer took longer than that
            return False
        seen = lease is not None and lease.held
        if lease is not None:
            try:
                await face.do(lease.release)
            except LeaseLost:
                seen = False
        return seen

    await until(short_lease_was_held, "a lease of the shortest ttl that is held for a moment")


@case("P20, P25")
async def wrong_input_is_refused_before_any_io(face: Face) -> None:
    """A name, a number or an info that cannot be kept exactly is refused before anything is sent."""
    idle = face.idle_client()
    for name in ("", "a\nb", "a\0b", "a\x7f", "a\x85b", "\ud800", "x" * 256, "é" * 128, b"bytes", None, 7):
        with raises(InvalidName):
            idle.lock(name)
        with raises(InvalidName):
            await face.do(idle.holder, name)
        with raises(InvalidName):
            await face.do(idle.break_lease, name, fencing_token=1)
    wrong: list[dict[str, Any]] = [
        {"timeout": -1},
        {"timeout": math.nan},
        {"timeout": "1"},
        {"min_hold": -1},
        {"min_hold": math.nan},
        {"max_hold": 0},
        {"min_hold": 5, "max_hold": 4},
        {"on_lost": "call me"},
        {"on_busy": "wait"},
        {"info": "text"},
        {"info": {"a": object()}},
        {"info": {"a": math.nan}},
        {"info": {"a": "x" * 4096}},
        {"info": {"a": "\0"}},
        {"info": {"a": "\ud800"}},
    ]
    for options in wrong:
        with raises(InvalidOption):
            idle.lock("name", **options)
    for namespace in ("", "a:b", "a b", "ä", "x" * 64, None):
        with raises(InvalidOption):
            face.idle_client(namespace=namespace)
    for seconds in (-1, math.nan, "1"):
        with raises(InvalidOption):
            await face.do(idle.purge, seconds)
    for token in ("1", 1.0, True, None):
        with raises(InvalidOption):
            await face.do(idle.break_lease, "name", fencing_token=token)
    equal(idle.lock("x" * 255).name, "x" * 255, "the longest name")
    lock = idle.lock("tab", info={"a": "x" * 4000})
    equal(lock.locked(), False, "locked() of a lock nobody acquired")


def pins(capabilities: Capabilities) -> bool:
    return capabilities.guard


def pins_nothing(capabilities: Capabilities) -> bool:
    return not capabilities.guard


@case("P1", promised=pins_nothing)
async def what_cannot_pin_says_so(face: Face) -> None:
    """A lease on a store without transactions cannot be guarded: Unsupported, and it is held as before."""
    lease = await face.do(face.client().lock("name").acquire, timeout=0)
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    for verb in (lease.guard, lease.release_after_commit):
        with raises(Unsupported):
            await face.do(verb, connection)
    connection.close()
    equal(lease.held, True, "held after a guard that is not supported")


@case("P1", promised=pins)
async def only_a_transaction_there_can_pin(face: Face) -> None:
    """What is no connection, or one to another database, cannot guard a lease: InvalidOption; it is held as before."""
    lease = await face.do(face.client().lock("name").acquire, timeout=0)
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    for verb in (lease.guard, lease.release_after_commit):
        for wrong in (connection, connection.cursor(), object(), None):
            with raises(InvalidOption):
                await face.do(verb, wrong)
    connection.close()
    equal(lease.held, True, "held after a guard with what is no connection")
