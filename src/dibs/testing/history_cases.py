"""Conformance cases on the history of grants, through both faces: who had a name, when, and how it ended."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, SetupRequired, Unsupported
from dibs.testing.case import CLIENT_CASES, Connection, asking, equal, granted
from dibs.testing.client_bench import had, raises

if TYPE_CHECKING:
    from dibs.store import Capabilities
    from dibs.testing.faces import Face

case = CLIENT_CASES.case


def history(capabilities: Capabilities) -> bool:
    return capabilities.history


async def kept(face: Face, keep: int = 20, **options: Any) -> Any:
    """A client of a store that writes history down from now on."""
    client = face.client(**options)
    await face.do(client.setup, history=keep)
    return client


def crashed(face: Face, name: str, ttl: float, permits: int = 0) -> int:
    """A holder that died: nobody renews or releases what it was granted. Its token."""
    connection = Connection(face.place.address.open())
    try:
        request = asking(f"{face.namespace}:{name}", "dead-1", ttl)._replace(permits=permits)
        return granted(connection.act(request)[0], f"{name!r} for who is about to die")
    finally:
        connection.store.close()


async def endings(face: Face, client: Any, name: str) -> list[tuple[int, str | None]]:
    """Tokens and how they ended, newest first."""
    return [(record.fencing_token, record.ending) for record in await face.do(client.history, name)]


@case("history")
async def no_history_where_there_is_none(face: Face) -> None:
    """A store that cannot write history down says Unsupported before any I/O; one that can, that none is kept yet."""
    if not face.capabilities.history:
        client = face.idle_client()
        for call in (lambda: client.history("job"), lambda: client.setup(history=10)):
            with raises(Unsupported):
                await face.do(call)
        return
    client = face.client()
    await face.do(client.setup, history=0)
    with raises(SetupRequired):
        await face.do(client.history, "job")
    idle = face.idle_client()
    for error, verb, args, how in (
        (InvalidName, idle.history, ("",), {}),
        (InvalidOption, idle.history, ("job", 0), {}),
        (InvalidOption, idle.history, ("job", True), {}),
        (InvalidOption, idle.setup, (), {"history": -1}),
        (InvalidOption, idle.setup, (), {"history": "all"}),
    ):
        with raises(error):
            await face.do(verb, *args, **how)


@case("history", history)
async def grants_and_releases_are_written_down(face: Face) -> None:
    """Every grant is there, newest first: who, when, with which info, and that it was released or is in force."""
    early = face.client()
    before = await had(face, early.lock("job"), timeout=0)
    client = await kept(face, info={"service": "digest"})
    await face.do(before.release)
    leases = []
    for _ in range(2):
        lease = await had(face, client.lock("job"), timeout=10)
        await face.do(lease.renew)
        await asyncio.sleep(0.05)
        await face.do(lease.release)
        leases.append(lease)
    last = await had(face, early.lock("job"), timeout=10)
    await face.do(last.renew)
    records = await face.do(client.history, "job")
    expected = [last, *reversed(leases), before]
    equal([r.fencing_token for r in records], [lease.fencing_token for lease in expected], "tokens, newest first")
    equal([r.ending for r in records], [None, "released", "released", "released"], "endings")
    equal([r.holder for r in records], [lease.holder for lease in expected], "holders")
    equal([r.info for r in records], [None, {"service": "digest"}, {"service": "digest"}, None], "infos")
    equal({(r.name, r.slot) for r in records}, {("job", 1)}, "names and slots")
    equal(records[0].ended_at, None, "the end of what is in force")
    for newer, older in pairwise(records):
        assert older.acquired_at <= older.ended_at <= newer.acquired_at, f"{older} and then {newer}"
    assert (records[1].ended_at - records[1].acquired_at).total_seconds() >= 0.04, f"{records[1]} took no time"
    equal(await face.do(client.history, "job", 2), records[:2], "the last two")
    equal(await face.do(client.history, "jo"), [], "of another name")
    await face.do(last.release)


@case("history", history)
async def other_endings_are_told_apart(face: Face) -> None:
    """What nobody renewed has expired, at its expiry, before and after the next grant; what was broken was broken."""
    client, other = await kept(face), face.client()
    ttl = face.short_ttl
    lost = crashed(face, "job", ttl)
    broken = await had(face, client.lock("other"), timeout=0)
    await face.do(other.break_lease, "other", fencing_token=broken.fencing_token, now=True)
    patient = await had(face, client.lock("third"), timeout=0)
    await face.do(other.break_lease, "third", fencing_token=patient.fencing_token)
    equal(await endings(face, other, "other"), [(broken.fencing_token, "broken")], "broken at once")
    equal(await endings(face, other, "third"), [(patient.fencing_token, "broken")], "broken")
    await asyncio.sleep(ttl + face.capabilities.resolution_s + 0.1)
    (record,) = await face.do(other.history, "job")
    equal(record.ending, "expired", "of what nobody renewed")
    lasted = (record.ended_at - record.acquired_at).total_seconds()
    assert abs(lasted - ttl) < 0.5, f"a lease of {ttl} s that was not renewed lasted {lasted} s"
    again = await had(face, other.lock("job"), timeout=10)
    equal((await face.do(other.history, "job"))[1], record, "the same after the next grant")
    await face.do(again.release)
    expected = [(again.fencing_token, "released"), (lost, "expired")]
    equal(await endings(face, other, "job"), expected, "both")


@case("history", history)
async def what_changed_hands_is_told_apart(face: Face) -> None:
    """What was exported and adopted ended when it was, and neither expired nor was released; permits, too."""
    client, other = await kept(face), face.client()
    for name, lock in (("job", client.lock("job", ttl=60)), ("gpu", client.semaphore("gpu", 2, ttl=60))):
        lease = await had(face, lock, timeout=0)
        await asyncio.sleep(0.05)
        adopted = await face.do(other.adopt, await face.do(lease.export))
        await asyncio.sleep(0.05)
        await face.do(adopted.release)
        newer, older = await face.do(client.history, name)
        equal((newer.ending, older.ending), ("released", "transferred"), f"how the grants of {name!r} ended")
        equal((newer.holder, older.holder), (adopted.holder, lease.holder), f"who held {name!r}")
        assert older.acquired_at < older.ended_at <= newer.acquired_at, f"{older} and then {newer}"


@case("history", history)
async def what_was_kept_is_no_grant(face: Face) -> None:
    """A release that keeps the name (min_hold, once) ends the grant when it is given back, not when it is free."""
    client = await kept(face)
    lease = await had(face, client.lock("job", min_hold=60), timeout=0)
    await face.do(lease.release)
    (record,) = await face.do(client.history, "job")
    equal(record.ending, "released", "of what was kept")
    assert (record.ended_at - record.acquired_at).total_seconds() < 30, (
        f"{record} is said to last as long as it is kept"
    )
    await face.do(client.break_lease, "job", fencing_token=lease.fencing_token, now=True)
    equal((await face.do(client.history, "job")), [record], "after what was kept was broken")


@case("history", history)
async def permits_are_written_down_by_slot(face: Face) -> None:
    """Each permit of a semaphore is a grant with its slot; what expires in one slot does not end another's."""
    client, other = await kept(face), face.client()
    ttl = face.short_ttl
    lost = crashed(face, "gpu", ttl, permits=2)
    stays = await had(face, other.semaphore("gpu", 2), timeout=0)
    await asyncio.sleep(ttl + face.capabilities.resolution_s + 0.1)
    again = await had(face, client.semaphore("gpu", 2), timeout=10)
    await face.do(again.release)
    records = await face.do(client.history, "gpu")
    equal(
        [(r.fencing_token, r.slot, r.ending) for r in records],
        [
            (again.fencing_token, again.slot, "released"),
            (stays.fencing_token, stays.slot, None),
            (lost, 1, "expired"),
        ],
        "token, slot and ending of each",
    )
    await face.do(stays.release)


@case("history", history)
async def many_at_once_are_all_written_down(face: Face) -> None:
    """A hundred names granted in one call, and released in one, are a hundred entries in as many histories."""
    client = await kept(face)
    names = [f"many/{number}" for number in range(100)]
    for _ in range(2):
        leases = await had(face, client.multilock(names), timeout=20)
        await face.do(leases.release)
    tokens = leases.fencing_tokens
    for name in names[::9]:
        expected = [(tokens[name], "released"), (tokens[name] - 1, "released")]
        equal(await endings(face, client, name), expected, f"history of {name!r}")


@case("history", history)
async def history_is_bounded(face: Face) -> None:
    """Of each name the last so many grants are kept; setting up again changes how many, and 0 forgets them all."""
    client, other = await kept(face, 3), face.client()
    tokens = []
    for _ in range(5):
        lease = await had(face, other.lock("job"), timeout=10)
        tokens.append(lease.fencing_token)
        await face.do(lease.release)
    equal(await endings(face, client, "job"), [(token, "released") for token in tokens[:1:-1]], "the last three")
    await face.do(client.setup, history=2)
    lease = await had(face, other.lock("job"), timeout=10)
    await face.do(lease.release)
    equal(len(await face.do(client.history, "job")), 2, "how many are kept when it is two")
    await face.do(client.setup)
    equal(len(await face.do(client.history, "job")), 2, "how many after a setup that does not say")
    await face.do(client.setup, history=0)
    with raises(SetupRequired):
        await face.do(client.history, "job")
    lease = await had(face, other.lock("job"), timeout=10)
    assert lease.fencing_token > tokens[-1], "the token after history was switched off"
    await face.do(lease.release)


@case("history", history)
async def purged_names_keep_their_history(face: Face) -> None:
    """Purging the row of a name leaves its history, and what had expired without being released says so."""
    client = await kept(face)
    token = crashed(face, "job", face.short_ttl)
    await asyncio.sleep(face.short_ttl + face.capabilities.resolution_s + 0.1)
    await face.do(client.purge, 0)
    equal(await endings(face, client, "job"), [(token, "expired")], "history of a purged name")
