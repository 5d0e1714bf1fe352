"""Who is asked for along with the first in a line for permits: few calls for many, in order, and nothing left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

import dibs
from dibs.along import ALONG_MAX
from dibs.store import Acquire, Granted, Held, Release
from dibs.testing.client_bench import until
from tests.between import Between, Holdup

TOGETHER = ["memory", "sqlite", "postgres", "mysql", "redis"]


@pytest.fixture(params=TOGETHER)
def between(request: pytest.FixtureRequest) -> Between:
    store = request.param
    between = Between("memory://along" if store == "memory" else request.getfixturevalue(f"{store}_url"))
    assert between.address.together
    with between.client() as client:
        client.setup()
    return between


def acquires(between: Between) -> list[int]:
    """How many permits each call asked for, of those that asked for any."""
    sizes = [sum(isinstance(one, Acquire) and one.permits > 0 for one in call) for call in between.calls]
    return [size for size in sizes if size]


async def all_at_once(number: int, lock: Callable[[], Any]) -> list[dibs.AsyncLease]:
    """What so many tasks get that each keep theirs until all have theirs."""
    leases = await asyncio.gather(*[lock().acquire() for _ in range(number)])
    assert all(leases)
    return leases


async def from_one_line(
    between: Between, client: dibs.AsyncClient, number: int, lock: Callable[[], Any]
) -> list[dibs.AsyncLease]:
    """The same, where all of them stand in line before the first is asked for."""
    async with held_up(between, client):
        tasks = asyncio.create_task(all_at_once(number, lock))
        everybody = client._desk.session().waiting.everybody
        await until(lambda: len(everybody()) == number + 1, "all are in line, beside the one under way")
        between.calls.clear()
    return await tasks


def test_many_get_through_a_semaphore_in_few_calls(between: Between) -> None:
    """Permits for 100 tasks are asked for in 1, 3, 7 … at a time; they come in the order in which they were wanted."""

    async def main() -> None:
        async with between.async_client(ttl=60) as client:
            leases = await from_one_line(between, client, 100, lambda: client.semaphore("many", 100))
            assert len(acquires(between)) <= 8, acquires(between)
            tokens = [lease.fencing_token for lease in leases]
            assert tokens == sorted(set(tokens))
            assert sorted(lease.slot for lease in leases) == list(range(1, 101))
            assert max(acquires(between)) <= ALONG_MAX + 1

    asyncio.run(main())


def test_many_readers_enter_in_few_calls(between: Between) -> None:
    """So do readers; a writer behind them waits until all have left, and enters alone."""

    async def main() -> None:
        async with between.async_client(ttl=60) as client:
            leases = await from_one_line(between, client, 50, lambda: client.rwlock("read").read())
            assert len(acquires(between)) <= 8, acquires(between)
            writer = asyncio.create_task(client.rwlock("read").write().acquire())
            await until(lambda: waiting(client, "read"), "the writer waits")
            assert not writer.done()
            await asyncio.gather(*[lease.release() for lease in leases])
            lease = await asyncio.wait_for(writer, 10)
            assert lease is not None
            await lease.release()

    asyncio.run(main())


def test_what_is_given_back_together_is_asked_for_together(between: Between) -> None:
    """Ten leases that are released at once go to ten who wait, in a few calls, in order, and to nobody else."""

    async def main() -> None:
        async with between.async_client(ttl=60) as client:
            before = await all_at_once(10, lambda: client.semaphore("ten", 10))
            order: list[int] = []

            async def wait(number: int) -> dibs.AsyncLease:
                lease = await client.semaphore("ten", 10).acquire()
                assert lease is not None
                order.append(lease.fencing_token)
                return lease

            waiters = [asyncio.create_task(wait(number)) for number in range(30)]
            await until(lambda: waiting(client, "ten"), "somebody waits")
            for _ in range(3):
                async with held_up(between, client):
                    releases = asyncio.gather(*[lease.release() for lease in before])
                    await until(lambda: _all_released(client, 10), "ten releases wait for the call under way")
                    between.calls.clear()
                await releases
                before = await asyncio.gather(*waiters[:10])
                del waiters[:10]
                assert len(acquires(between)) <= 3, acquires(between)
            assert order == sorted(set(order))
            await asyncio.gather(*[lease.release() for lease in before])

    asyncio.run(main())


def test_who_goes_along_for_nothing_is_unknown_to_the_store(between: Between) -> None:
    """Two permits, twenty who wait: one of them stands in line at the store, and all get theirs in order."""

    async def main() -> None:
        async with between.async_client(ttl=60) as client, between.async_client(ttl=60) as other:
            theirs = await other.semaphore("two", 2).acquire()
            tokens: list[int] = []

            async def once() -> None:
                async with client.semaphore("two", 2) as lease:
                    tokens.append(lease.fencing_token)
                    await asyncio.sleep(0)  # the others run while it is held

            tasks = [asyncio.create_task(once()) for _ in range(20)]
            seen = set()
            while not all(task.done() for task in tasks):
                record = await other.holder("two")
                seen.add(0 if record is None else record.waiting)
            await asyncio.gather(*tasks)
            assert seen <= {0, 1}
            assert max(acquires(between)) <= 2  # no more than there are
            assert tokens == sorted(set(tokens))
            assert len(tokens) == 20
            assert theirs is not None
            await theirs.release()
            assert await other.leases("two") == []

    asyncio.run(main())


def test_a_smaller_wish_does_not_pass_a_larger_one(between: Between) -> None:
    """Who wants one permit stays behind who wants three, though there was one."""

    async def main() -> None:
        async with between.async_client(ttl=60) as client:
            takes = [1, 1, 1, 1, 3, 1, 1, 2, 1, 1, 1]  # the first goes alone, then two, then four
            first = await client.semaphore("sizes", 6, weight=6).acquire()
            tokens: list[int] = []

            async def once(take: int) -> None:
                async with client.semaphore("sizes", 6, weight=take) as lease:
                    tokens.append(lease.fencing_token)
                    order.append(take)
                    await go_on.wait()

            order: list[int] = []
            go_on = asyncio.Event()
            tasks = [asyncio.create_task(once(take)) for take in takes]
            await until(lambda: waiting(client, "sizes"), "somebody waits")
            assert first is not None
            await first.release()
            await until(
                lambda: waiting(client, "sizes", len(order) >= 4), "the larger one waits, for which two are left"
            )
            go_on.set()
            await asyncio.gather(*tasks)
            assert order == takes
            assert tokens == sorted(set(tokens))

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_is_cancelled_on_the_way_leaves_nothing(between: Between, when: str) -> None:
    """Half of those in one call are cancelled while it is under way: what they were granted is given back."""

    async def main() -> None:
        async with between.async_client(ttl=60) as client:
            aside = between.before = Holdup(lambda requests: requests[0].name.endswith("aside"))
            meanwhile = asyncio.create_task(client.lock("aside").acquire())
            await _reached(aside)
            tasks = [asyncio.create_task(client.semaphore("half", 40).acquire()) for _ in range(40)]
            everybody = client._desk.session().waiting.everybody
            await until(lambda: len(everybody()) == 41, "all are in line, beside the one under way")
            holdup = Holdup(lambda requests: sum(isinstance(one, Acquire) for one in requests) > 3)
            between.before = lambda requests: None
            setattr(between, when, holdup)
            aside.go_on()
            await _reached(holdup)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.sleep(0)  # each is told so before the store goes on
            holdup.go_on()
            got = await asyncio.gather(*tasks, return_exceptions=True)
            leases = [lease for lease in got if isinstance(lease, dibs.AsyncLease)]
            assert len(leases) >= 20
            await until(lambda: _as_many(client, "half", len(leases)), "the others are given back")
            lease = await meanwhile
            assert lease is not None
            await asyncio.gather(*[lease.release() for lease in (*leases, lease)])
            assert await client.leases("half") == []

    asyncio.run(main())


def test_threads_go_along_too(between: Between) -> None:
    """Forty threads, ten permits: never more than ten at once, each slot with one, and nothing left of them."""
    with between.client(ttl=60) as client:
        inside: set[int] = set()
        mutex = threading.Lock()
        most = 0
        go = threading.Event()

        def work() -> None:
            nonlocal most
            go.wait()
            for _ in range(5):
                with client.semaphore("threads", 10) as lease:
                    with mutex:
                        assert lease.slot not in inside
                        inside.add(lease.slot)
                        most = max(most, len(inside))
                    lease.check()
                    with mutex:
                        inside.discard(lease.slot)

        threads = [threading.Thread(target=work) for _ in range(40)]
        for thread in threads:
            thread.start()
        between.calls.clear()
        go.set()
        for thread in threads:
            thread.join(60)
        assert most <= 10
        assert client.leases("threads") == []


def test_a_lost_answer_grants_nothing_twice(between: Between) -> None:
    """The answer to a call for many is lost after the store carried it out: the same claims are asked for again."""
    lost: list[Sequence[Any]] = []

    def lose(requests: Sequence[Any]) -> None:
        if not lost and sum(isinstance(one, Acquire) for one in requests) > 3:
            lost.append(requests)
            raise dibs.StoreUnavailable("the answer is lost")

    async def main() -> None:
        async with between.async_client(ttl=60) as client:
            between.after = lose
            leases = await from_one_line(between, client, 40, lambda: client.semaphore("lost", 40))
            assert lost
            assert len({lease.fencing_token for lease in leases}) == 40
            assert len(await client.leases("lost")) == 40
            await asyncio.gather(*[lease.release() for lease in leases])
            assert await client.leases("lost") == []

    asyncio.run(main())


def test_a_grant_that_comes_too_late_leaves_everybody_in_place() -> None:
    """Of four that are asked for together all come too late to be trusted: they are asked for anew, in their order."""
    between = Between("memory://late")
    with between.client(ttl=5) as client:
        session = client._desk.session()
        terms = client.semaphore("late", 9)._core.terms
        asks = [session.wish("default:late", terms, who, blocking=True) for who in range(4)]
        with session.mutex:
            waiting = session.waiting
            for ask in asks:
                waiting.enter(ask)
            for _ in range(3):
                waiting.nudge("default:late")
            assert [ask.along for ask in asks] == [False, True, True, True]
            session.lane.pending.asks.clear()
            before = [ask.request.claim_id for ask in asks]
            for number, ask in enumerate(asks):
                ask.in_lane = False
                ask.t0 = session.clock.now() - 60
                ask.received(Granted(number + 1, 0.0, number + 1))
            assert waiting.everybody() == asks
            assert not {ask.request.claim_id for ask in asks} & set(before)
        session.lane.start()
        tokens = []
        for ask in asks:
            assert session.wait(ask, 10)
            assert ask.hold is not None
            tokens.append(ask.hold.granted.fencing_token)
        assert tokens == [1, 2, 3, 4]
        for ask in asks:
            session.withdraw(ask)


def test_nobody_goes_along_with_a_call_that_has_left() -> None:
    """A release that finds the first under way lets one more go along with its next call, and not before it."""
    with Between("memory://left").client(ttl=5) as client:
        session = client._desk.session()
        waiting, lane = session.waiting, session.lane
        terms = client.semaphore("under way", 9)._core.terms
        first, second, third = (session.wish("default:under way", terms, who, blocking=True) for who in range(3))
        with session.mutex:
            for ask in (first, second, third):
                waiting.enter(ask)
            lane._take()
            waiting.nudge("default:under way")
            assert not second.in_lane
            lane._batch, first.in_lane = [], False
            first.received(Held("h", 1, 0.0, 60.0, 7))
            assert [ask.request.claim_id for ask in lane.pending.asks] == [
                first.request.claim_id,
                second.request.claim_id,
            ]
            assert (first.request.wake, second.request.wake) == (session.client_id, None)
            assert not third.in_lane
        lane.start()
        for ask in (first, second, third):
            assert session.wait(ask, 10)
            session.withdraw(ask)


def test_who_had_left_the_line_before_a_ctrl_c_takes_the_last_place() -> None:
    """It was about to fail, and a Ctrl-C kept that from being told: asked for once more, it is told Held, and waits."""
    between = Between("memory://left")
    with between.client(ttl=5) as client:
        session = client._desk.session()
        terms = client.lock("left")._core.terms
        ask, following = (session.wish("default:left", terms, who, blocking=True) for who in ("me", "you"))
        with session.mutex:
            session.waiting.enter(ask)
            session.waiting.enter(following)
            session.waiting.leave_line(ask)
            ask.in_lane = False
            ask.received(Held("h", 1, 0.0, 60.0, 7))
            assert session.waiting.everybody() == [following, ask]
            session.lane.pending.asks.remove(ask)
        session.lane.start()
        assert session.wait(following, 10)
        session.withdraw(following)
        assert session.wait(ask, 10)
        session.withdraw(ask)


async def waiting(client: dibs.AsyncClient, name: str, already: bool = True) -> bool:
    """Whether somebody stands in line for the name at the store, and what is to be so was so before that was seen."""
    record = await client.holder(name)
    return already and record is not None and record.waiting > 0


@asynccontextmanager
async def held_up(between: Between, client: dibs.AsyncClient) -> AsyncIterator[None]:
    """A call is under way until the end of the block, so that what is asked for in it waits together."""
    holdup = between.before = Holdup(lambda requests: any(one.name.endswith("aside") for one in requests))
    aside = asyncio.create_task(client.lock("aside").acquire())
    try:
        await _reached(holdup)
        yield
    finally:
        holdup.go_on()
    between.before = lambda requests: None
    lease = await aside
    assert lease is not None
    await lease.release()


async def _reached(holdup: Holdup) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, holdup.reached.wait, 10), "no such call came"


async def _all_released(client: dibs.AsyncClient, number: int) -> bool:
    """Whether so many releases wait for the call that is under way."""
    return sum(isinstance(ask.request, Release) for ask in client._desk.session().lane.pending.asks) == number


async def _as_many(client: dibs.AsyncClient, name: str, number: int) -> bool:
    return len(await client.leases(name)) == number
