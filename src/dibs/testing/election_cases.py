"""Conformance cases on elections, run through both faces: who leads, and who looks on."""

from __future__ import annotations

import asyncio
import time

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, LeaseLost, LockTimeout, NotHeld, WouldDeadlock
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, fifo, rising
from dibs.testing.client_bench import had, raises, shown, task, until, waiting, why

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.testing.faces import Face


case = CLIENT_CASES.case
# What a closed observer answers.
OVER = "over"


async def stand_by(face: Face, client: Any, name: str, count: int) -> None:
    """Until as many stand in line; where there is none, until they have had the time to."""
    if fifo(face.capabilities):
        await waiting(face, client, name, count)
    else:
        await asyncio.sleep(0.5)


async def elected(face: Face, election: Any, **how: Any) -> Any:
    """Campaign, and fail when it was not to be."""
    term = await face.do(election.campaign, **how)
    if term is None:
        raise AssertionError(f"{election!r} was not won with {how}")
    return term


async def following(face: Face, leaders: Any) -> Any:
    """What an observer tells next; OVER when it has ended."""
    if hasattr(leaders, "__anext__"):
        return await asyncio.wait_for(_anext(leaders), PATIENCE_S)
    return await face.do(lambda: next(leaders, OVER))


async def _anext(leaders: Any) -> Any:
    return await anext(leaders, OVER)


def callback(face: Face, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function for ``election.run`` as the face wants it."""
    if face.name == "threads":
        return function

    async def awaited(term: Any) -> Any:
        return function(term)

    return awaited


# -- leading ----------------------------------------------------------------------------------------------------------


@case("P1, P2, P16")
async def one_leader_at_a_time(face: Face) -> None:
    """Of several candidates that campaign again and again one leads at a time, under numbers that rise."""
    leading, numbers = 0, []

    async def work(number: int) -> None:
        nonlocal leading
        election = face.client().election("chief", value=number, ttl=20)
        for _ in range(4):
            async with face.holding(election.lead()) as term:
                leading += 1
                equal((leading, term.held, term.value), (1, True, number), "how many lead, held, value")
                numbers.append(term.number)
                await asyncio.sleep(0.002)
                leading -= 1

    await asyncio.gather(*[task(work(number)) for number in range(4)])
    equal(len(numbers), 16, "terms")
    rising(numbers, "numbers of the terms")


@case("P3, P16")
async def a_term_tells_all(face: Face) -> None:
    """A term is a lease: it knows its number and value, and others see them with its holder; resigning ends it."""
    ours, theirs = face.client(info={"service": "conformance"}), face.client()
    election = ours.election("facts", value={"url": "http://a:80", "ü": [1, None]}, ttl=20)
    equal((election.name, await face.do(election.leader)), ("facts", None), "name, and leader of nobody")
    term = await elected(face, election)
    equal((term.name, term.number, term.held, term.ttl), ("facts", term.fencing_token, True, 20.0), "name, number, ttl")
    equal(term.value, {"url": "http://a:80", "ü": [1, None]}, "value")
    equal(term.info, {"service": "conformance", "value": term.value}, "info")
    assert 15 < term.remaining() < 20 * 0.95, f"a term of 20 s is trusted for {term.remaining()} s"
    term.check()
    leader = await face.do(theirs.election("facts", value="another's").leader)
    equal(
        (leader.number, leader.value, leader.holder, leader.since),
        (term.number, term.value, term.holder, term.acquired_at),
        "the leader as others see it",
    )
    equal((await shown(face, theirs, "facts")).fencing_token, term.number, "the lease as others see it")
    equal(await face.do(theirs.election("facts").campaign, timeout=0), None, "campaigning against it")
    equal(await face.do(theirs.lock("facts").acquire, timeout=0), None, "a lock of the same name")
    equal(await face.do(term.resign), True, "resign")
    equal((term.held, term.lost.is_set()), (False, False), "held, lost after resigning")
    lease = await had(face, theirs.lock("facts"), timeout=5)
    equal((await face.do(election.leader)).value, None, "the value of a holder that is no leader")
    await face.do(lease.release)
    plain = await elected(face, theirs.election("plain"))
    equal((plain.value, plain.info), (None, None), "value and info where none were given")
    await face.do(plain.resign)


@case("P8, P11, P16")
async def campaigning_ends_as_asked(face: Face) -> None:
    """``timeout`` limits a campaign; ``lead`` says who leads; ``resign`` of who leads in no term is an error."""
    ours, theirs = face.client(), face.client()
    election, rival = ours.election("busy"), theirs.election("busy")
    with raises(NotHeld):
        await face.do(election.resign)
    term = await elected(face, election, timeout=0)
    began = time.monotonic()
    equal(await face.do(rival.campaign, timeout=0.3), None, "a campaign of 0.3 s against a leader")
    took = time.monotonic() - began
    assert 0.29 <= took < 0.3 + PATIENCE_S, f"a campaign of 0.3 s took {took:.2f} s"
    with raises(LockTimeout) as caught:
        async with face.holding(rival.lead(timeout=0)):
            pass
    equal((caught.error.name, caught.error.holder), ("busy", term.holder), "what the error knows")
    with raises(WouldDeadlock):
        await face.do(election.campaign)
    for leader in (term, election):
        with raises(InvalidOption):
            await face.do(leader.resign, timeout=-1)
    equal(term.held, True, "whether it leads after what was no way to resign")
    equal(await face.do(election.resign), True, "resign through the election")
    with raises(NotHeld):
        await face.do(election.resign)
    async with face.holding(rival.lead(timeout=5)) as won:
        rising([term.number, won.number], "numbers")
        equal(await face.do(won.resign), True, "resigning inside the block")
        equal((await elected(face, election, timeout=5)).held, True, "another wins before the block has ended")


@case("P13, P16", fifo)
async def standbys_win_in_turn(face: Face) -> None:
    """Candidates are elected in the order in which they came; each resignation elects the next."""
    first, order = await elected(face, face.client().election("turn", ttl=20)), []
    looker = face.client()

    async def stand_by(number: int) -> None:
        async with face.holding(face.client().election("turn", value=number, ttl=20).lead()) as term:
            order.append((term.number, term.value))

    standbys = []
    for number in range(3):
        standbys.append(task(stand_by(number)))
        await waiting(face, looker, "turn", number + 1)
    await face.do(first.resign)
    await asyncio.gather(*standbys)
    equal([value for _, value in order], [0, 1, 2], "who was elected after whom")
    rising([first.number, *[number for number, _ in order]], "numbers of the terms")


@case("P4, P5, P6, P16")
async def losing_is_told_before_another_wins(face: Face) -> None:
    """A leader whose term an operator has ended hears of it before anybody else is elected, and for good."""
    ours, theirs = face.client(), face.client()
    term = await elected(face, ours.election("deposed", ttl=max(1.5, face.short_ttl)))
    told_at = won_at = 0.0

    async def hear() -> None:
        nonlocal told_at
        equal(await face.do(term.lost.wait, PATIENCE_S + 2 * term.ttl), True, "the loss as an event")
        told_at = time.monotonic()

    async def rival() -> Any:
        nonlocal won_at
        won = await elected(face, theirs.election("deposed"))
        won_at = time.monotonic()
        equal((term.held, term.lost.is_set()), (False, True), "held and lost of the old term when the new one begins")
        return won

    hearer, campaign = task(hear()), task(rival())
    await asyncio.sleep(0.05)
    equal(await face.do(theirs.break_lease, "deposed", fencing_token=term.number), True, "breaking the term")
    won = await campaign
    await hearer
    assert told_at < won_at, f"the loss was told {told_at - won_at:.3f} s after another had won"
    rising([term.number, won.number], "numbers")
    assert "no longer knows" in why(term), f"the reason of the loss: {why(term)}"
    with raises(LeaseLost):
        await face.do(term.resign)
    equal((term.held, won.held), (False, True), "who leads now")
    await face.do(won.resign)


# -- being called -----------------------------------------------------------------------------------------------------


@case("P16")
async def run_leads_and_resigns(face: Face) -> None:
    """``run`` calls with a term that is held, resigns when the function returns or raises, and passes its error on."""
    ours, theirs = face.client(), face.client()
    election, seen = ours.election("called"), []

    def reign(term: Any) -> None:
        seen.append((term.held, term.lost.is_set(), term.number))
        if len(seen) == 2:
            raise ValueError("enough")

    def lost(term: Any) -> None:
        raise AssertionError(f"{term!r} was resigned, not lost")

    await face.do(election.run, callback(face, reign), callback(face, lost))
    equal(await face.do(theirs.election("called").leader), None, "the leader after the function has returned")
    with raises(ValueError):
        await face.do(election.run, callback(face, reign), callback(face, lost), forever=True)
    equal(await face.do(theirs.election("called").leader), None, "the leader after an error")
    equal([held for held, _, _ in seen], [True, True], "held in the function")
    rising([number for *_, number in seen], "numbers")


@case("P6, P16")
async def run_tells_a_loss(face: Face) -> None:
    """A term lost in ``run`` is told to ``on_lost``; then comes LeaseLost, or with ``forever`` the next campaign."""
    ours, theirs = face.client(), face.client()
    election = ours.election("unlucky", ttl=face.short_ttl)
    terms: list[Any] = []
    told: list[Any] = []

    def begin(term: Any) -> Any:
        terms.append(term)
        if len(terms) == 3:
            raise ValueError("enough")
        return theirs.break_lease("unlucky", fencing_token=term.number)

    def doomed(term: Any) -> None:
        assert begin(term), "the term could not be broken"
        assert term.lost.wait(PATIENCE_S), "the loss was not told"
        term.check()

    async def doomed_task(term: Any) -> None:
        assert await begin(term), "the term could not be broken"
        await asyncio.sleep(PATIENCE_S)
        raise AssertionError("it was not cancelled")

    reign = doomed if face.name == "threads" else doomed_task
    with raises(LeaseLost):
        await face.do(election.run, reign, told.append)
    equal((len(terms), told == terms), (1, True), "terms, and whether on_lost was called with the lost one")
    with raises(ValueError):
        await face.do(election.run, reign, told.append, forever=True)
    equal(len(terms), 3, "terms")
    equal(told == terms[:2], True, "on_lost was called with each lost term")
    rising([term.number for term in terms], "numbers of the terms")


# -- looking on -------------------------------------------------------------------------------------------------------


@case("P3, P16")
async def observers_see_who_leads(face: Face) -> None:
    """An observer is told at once who leads, then each time that changes, and ends when it or its client is closed."""
    looker = face.client()
    leaders = looker.election("watched").observe()
    equal(await following(face, leaders), None, "before anybody led")
    one = await elected(face, face.client().election("watched", value="one"))
    seen = await following(face, leaders)
    equal(
        (seen.number, seen.value, seen.holder, seen.since),
        (one.number, "one", one.holder, one.acquired_at),
        "the first leader",
    )
    late = looker.election("watched").observe(2)
    equal((await following(face, late)).value, "one", "told at once to one who looks later")
    two = face.client().election("watched", value="two")
    standby = task(elected(face, two))
    await asyncio.sleep(0.1)
    await face.do(one.resign)
    await standby

    async def second() -> bool:
        leader = await following(face, leaders)
        return leader is not None and leader.value == "two"

    await until(second, "the second leader is seen")
    waiter = task(following(face, leaders))
    await asyncio.sleep(0.1)
    leaders.close()
    equal(await waiter, OVER, "an observer closed while it waits")
    equal(await following(face, leaders), OVER, "the same, asked again")
    equal((await following(face, late)).value, "two", "the other observer")
    waiter = task(following(face, late))
    await asyncio.sleep(0.1)
    await face.do(looker.close)
    equal(await waiter, OVER, "an observer of a client that closes")


@case("P20, P25")
async def wrong_elections_are_refused(face: Face) -> None:
    """Wrong names and options of elections are refused before anything is sent."""
    client = face.idle_client()
    for name in ("", "a" * 256, "a\nb", 7):
        with raises(InvalidName):
            client.election(name)
    wrong: list[dict[str, Any]] = [
        {"value": object()},
        {"value": float("nan")},
        {"value": "x" * 4096},
        {"info": {"value": 1}},
        {"info": [1]},
        {"info": [1], "value": 2},
        {"ttl": 0},
        {"priority": 1},
        {"priority": -10},
        {"priority": True},
        {"priority": -1.0},
        {"standby_max": -1},
        {"standby_max": True},
        {"standby_max": 1001},
        {"standby_max": 1.5},
        {"standby_max": 1, "priority": -1},
        {"standby_max": 1, "standby_full": "both"},
        {"standby_max": 0, "standby_full": "replace"},
        {"standby_full": "replace"},
        {"info": {"offer": 1}},
    ]
    for options in wrong:
        with raises(InvalidOption):
            client.election("x", **options)
    election = client.election("x", value=0, priority=-9)
    for timeout in (-1, float("nan"), "soon", True):
        with raises(InvalidOption):
            await face.do(election.campaign, timeout=timeout)
        with raises(InvalidOption):
            election.lead(timeout)
    for interval in (0, 0.5, float("nan"), None):
        with raises(InvalidOption):
            election.observe(interval)
    for functions in ((None,), (7,), (callback(face, print), 7)):
        with raises(TypeError):
            await face.do(election.run, *functions)
