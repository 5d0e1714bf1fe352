"""Conformance cases on elections, run through both faces: who may stand by, and who is next."""

from __future__ import annotations

import asyncio
import time

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption, LeaseLost, LockTimeout, NotHeld, WouldDeadlock
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, fifo, rising
from dibs.testing.client_bench import raises, task, until, waiting
from dibs.testing.election_cases import callback, elected, stand_by

if TYPE_CHECKING:
    from dibs.testing.faces import Face


case = CLIENT_CASES.case


# -- who may stand by -------------------------------------------------------------------------------------------------


@case("P16")
async def standbys_enough(face: Face) -> None:
    """With ``standby_max`` standbys another candidate is refused at once, and told who leads."""
    leader = await elected(face, face.client().election("bounded", ttl=20))
    standby = task(elected(face, face.client().election("bounded", standby_max=1)))
    looker = face.client()
    await stand_by(face, looker, "bounded", 1)
    late = face.client().election("bounded", standby_max=1)
    began = time.monotonic()
    equal(await face.do(late.campaign), None, "a campaign with enough standbys")
    with raises(LockTimeout) as caught:
        async with face.holding(late.lead()):
            pass
    assert "standby_max is 1" in str(caught.error), f"the error: {caught.error}"
    equal(caught.error.holder, leader.holder, "the leader that the error names")
    with raises(LockTimeout):
        await face.do(late.run, callback(face, lambda _: None))
    assert time.monotonic() - began < PATIENCE_S, "refusing took long"
    await stand_by(face, looker, "bounded", 1)
    equal(await face.do(face.client().election("bounded", standby_max=0).campaign), None, "where none may stand by")
    await face.do(leader.resign)
    won = await standby
    await face.do(won.resign)
    alone = await elected(face, face.client().election("bounded", standby_max=0))
    await face.do(alone.resign)


@case("P16")
async def standbys_of_one_client_count(face: Face) -> None:
    """Standbys of one client count, too, though only the first of them stands in the store's line."""
    client = face.client()
    leader = await elected(face, face.client().election("crowd", ttl=20))
    election = client.election("crowd", standby_max=2)
    standbys = [task(elected(face, election)) for _ in range(2)]
    await stand_by(face, client, "crowd", 1)
    await asyncio.sleep(0.2)
    began = time.monotonic()
    equal(await face.do(election.campaign, timeout=PATIENCE_S), None, "a third standby")
    assert time.monotonic() - began < PATIENCE_S / 2, "the third was not refused at once"
    await face.do(leader.resign)
    for standby in asyncio.as_completed(standbys):
        await face.do((await standby).resign)


@case("P16")
async def the_longest_standby_is_replaced(face: Face) -> None:
    """With ``standby_full="replace"`` the newest joins in the place of the oldest, whose campaign ends and says why."""
    leader = await elected(face, face.client().election("fresh", ttl=20))
    how = {"standby_max": 2, "standby_full": "replace", "ttl": 20}
    looker, standbys = face.client(), []
    # A store without a line may not tell who came first of those that came within its resolution.
    pause_s = 0.0 if fifo(face.capabilities) else face.capabilities.resolution_s
    for number in range(2):
        standbys.append(task(face.do(face.client().election("fresh", value=number, **how).campaign)))
        await stand_by(face, looker, "fresh", number + 1)
        await asyncio.sleep(pause_s)  # so that it is certain who is the oldest
    oldest = face.client().election("fresh", standby_max=2)
    equal(await face.do(oldest.campaign), None, "one that does not replace")
    standbys.append(task(face.do(face.client().election("fresh", value=2, **how).campaign)))
    equal(await asyncio.wait_for(standbys[0], 2 * PATIENCE_S), None, "the campaign of the oldest")
    await stand_by(face, looker, "fresh", 2)
    await asyncio.sleep(pause_s)  # as above

    async def lead() -> None:
        async with face.holding(face.client().election("fresh", value=3, **how).lead()) as term:
            await face.do(term.resign)

    fourth = task(lead())
    equal(await asyncio.wait_for(standbys[1], 2 * PATIENCE_S), None, "the campaign of the second")
    await stand_by(face, looker, "fresh", 2)
    await asyncio.sleep(pause_s)  # as above
    fifth = task(face.do(face.client().election("fresh", value=4, **how).campaign))
    equal(await asyncio.wait_for(standbys[2], 2 * PATIENCE_S), None, "the campaign of the third")
    await stand_by(face, looker, "fresh", 2)
    await asyncio.sleep(pause_s)  # as above
    sixth = task(face.do(face.client().election("fresh", value=5, **how).campaign))
    with raises(LockTimeout) as caught:
        await asyncio.wait_for(fourth, 2 * PATIENCE_S)
    assert "replaced" in str(caught.error), f"the error: {caught.error}"
    equal([lease.name for lease in await face.do(looker.leases)], ["fresh"], "leases that are shown")
    await face.do(leader.resign)
    for standby in asyncio.as_completed([fifth, sixth]):
        await face.do((await standby).resign)


@case("P7, P16")
async def a_standby_that_goes_makes_room(face: Face) -> None:
    """The place of a standby whose time is over, or who was elected, is free for another."""
    leader = await elected(face, face.client().election("room", ttl=20))
    first, second = (face.client().election("room", standby_max=1, ttl=20) for _ in range(2))

    async def in_the_end(election: Any) -> Any:
        until = time.monotonic() + PATIENCE_S
        while (term := await face.do(election.campaign)) is None:  # refused until the other's seat is free
            assert time.monotonic() < until, "the seat was not free in the end"
            await asyncio.sleep(0.05)
        return term

    equal(await face.do(first.campaign, timeout=0.5), None, "a campaign of half a second")
    standby = task(in_the_end(second))
    await stand_by(face, face.client(), "room", 1)
    equal(await face.do(first.campaign, timeout=PATIENCE_S), None, "the first, while the second stands by")
    await face.do(leader.resign)
    won = await standby
    standby = task(in_the_end(first))
    await stand_by(face, face.client(), "room", 1)
    await face.do(won.resign)
    await face.do((await standby).resign)


# -- who is next ------------------------------------------------------------------------------------------------------


@case("P1, P2, P16")
async def a_leader_names_its_successor(face: Face) -> None:
    """``resign(to=…)`` makes the candidate with that value the next leader; the others keep their places in line."""
    leader = await elected(face, face.client().election("heir", value="old", ttl=20))
    order: list[tuple[int, Any, bool]] = []
    looker = face.client()
    resigned = asyncio.Event()

    async def campaign(value: Any) -> None:
        async with face.holding(face.client().election("heir", value=value, ttl=20).lead()) as term:
            order.append((term.number, term.value, leader.held))
            await resigned.wait()  # who resigns looks from time to time, and has to see the next term

    standbys = []
    for number, value in enumerate([{"port": 1}, {"port": 2}, {"port": 3}]):
        standbys.append(task(campaign(value)))
        await stand_by(face, looker, "heir", number + 1)
    try:
        equal(await face.do(leader.resign, to={"port": 3}, timeout=PATIENCE_S), True, "whether the third took over")
    finally:
        resigned.set()
    equal((leader.held, leader.lost.is_set()), (False, False), "held and lost of the old term")
    await asyncio.gather(*standbys)
    values = [value["port"] for _, value, _ in order]
    equal(values[0], 3, "who was elected first")
    equal(
        values if fifo(face.capabilities) else sorted(values),
        [3, 1, 2] if fifo(face.capabilities) else [1, 2, 3],
        "all",
    )
    rising([leader.number, *[number for number, _, _ in order]], "numbers of the terms")
    equal([held for *_, held in order], [False] * 3, "whether the old leader was trusted while another led")
    equal(await face.do(leader.resign), False, "resigning once more")


@case("P13, P16")
async def a_successor_that_is_not_there(face: Face) -> None:
    """When nobody with that value takes over in time, the leader resigns as usual, and says so."""
    ours, theirs = face.client(), face.client()
    leader = await elected(face, ours.election("nobody", value=1, ttl=20))
    standby = task(elected(face, theirs.election("nobody", value=2, ttl=20)))
    await stand_by(face, theirs, "nobody", 1)
    resigning = task(face.do(leader.resign, to=3, timeout=1.5))

    async def offered() -> bool:
        return await face.do(theirs.election("nobody").leader) is None

    await until(offered, "nobody leads while the term is offered")
    equal(leader.held, False, "the old leader's trust")
    equal(await face.do(face.client().lock("nobody").acquire, timeout=0), None, "acquiring it meanwhile")
    equal(await resigning, False, "whether somebody took over")
    won = await standby
    rising([leader.number, won.number], "numbers")
    equal(await face.do(won.resign, to=3, timeout=0), False, "where nobody stands by")
    again = await elected(face, ours.election("nobody"), timeout=5)
    await face.do(again.resign)


@case("P16")
async def a_successor_may_come_late_or_in_reserve(face: Face) -> None:
    """A candidate that begins to campaign while the term is offered to it takes over, and so does a reserve."""
    election = face.client().election("late", value="one", ttl=20)
    leader = await elected(face, election)
    resigning = task(face.do(leader.resign, to="two", timeout=PATIENCE_S))
    await asyncio.sleep(0.3)
    two = await elected(face, face.client().election("late", value="two", ttl=20), timeout=PATIENCE_S)
    equal(await resigning, True, "whether the late one took over")
    reserve = face.client().election("late", value="three", priority=-1, ttl=20)
    standby = task(elected(face, reserve, timeout=PATIENCE_S))
    await asyncio.sleep(0.2)
    equal(await face.do(two.resign, to="three", timeout=PATIENCE_S), True, "whether the reserve took over")
    three = await standby
    rising([leader.number, two.number, three.number], "numbers")
    equal((three.value, three.held, two.held), ("three", True, False), "value and held")
    await face.do(three.resign)


@case("P8, P16")
async def resigning_to_somebody_through_the_election(face: Face) -> None:
    """``election.resign(to=…)`` does the same for the term that it leads; a lost term is nobody's to give."""
    ours, theirs = face.client(), face.client()
    election, rival = ours.election("through", value="a", ttl=20), theirs.election("through", value="b", ttl=20)
    with raises(NotHeld):
        await face.do(election.resign, to="b")
    for wrong in ({"to": object()}, {"to": "x" * 4096}, {"to": 1, "timeout": -1}, {"to": 1, "timeout": "soon"}):
        with raises(InvalidOption):
            await face.do(election.resign, **wrong)
    await elected(face, election)
    standby = task(elected(face, rival))
    await stand_by(face, theirs, "through", 1)
    equal(await face.do(election.resign, to="b", timeout=PATIENCE_S), True, "whether it took over")
    won = await standby
    equal(await face.do(theirs.break_lease, "through", fencing_token=won.number, now=True), True, "breaking the term")
    with raises(LeaseLost):
        await face.do(won.resign, to="a", timeout=1)
    equal((won.held, won.lost.is_set()), (False, True), "held and lost")


@case("P16")
async def reserves_win_last(face: Face) -> None:
    """A reserve that came first is passed by a candidate of a higher priority, and leads when that has resigned."""
    first = await elected(face, face.client().election("site", ttl=20))
    clients = {priority: face.client() for priority in (-2, -1, 0)}
    order: list[int] = []

    async def stand_by(priority: int) -> None:
        election = clients[priority].election("site", value=priority, priority=priority, ttl=20)
        async with face.holding(election.lead()) as term:
            order.append(term.value)
            await asyncio.sleep(0.05)

    standbys = [task(stand_by(-2)), task(stand_by(-1))]
    await asyncio.sleep(0.2)
    standbys.append(task(stand_by(0)))
    if fifo(face.capabilities):  # reserves stand in no line
        await waiting(face, face.client(), "site", 1)
    else:
        await asyncio.sleep(0.3)
    await face.do(first.resign)
    await asyncio.gather(*standbys)
    equal(order, [0, -1, -2], "who was elected after whom")
    term = await elected(face, face.client().election("site", priority=-9), timeout=0)
    reserve = face.client().election("site", priority=-1)
    with raises(LockTimeout) as caught:
        async with face.holding(reserve.lead(timeout=0.3)):
            pass
    equal(caught.error.holder, term.holder, "the leader that a reserve is told of")
    with raises(WouldDeadlock):
        election = clients[-1].election("own", priority=-1)
        await elected(face, election, timeout=0)
        await face.do(election.campaign)
