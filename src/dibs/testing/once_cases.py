"""Conformance cases on work that is to be done once, through both faces (see ``faces``)."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import date, datetime, timedelta, timezone

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, LeaseLost, LockTimeout, NotHeld, ResultNotKept, WouldDeadlock
from dibs.steps import LOOK_MIN_S
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal, fifo, rising
from dibs.testing.client_bench import had, raises, shown, task, until, waiting

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.testing.faces import Face

case = CLIENT_CASES.case

# Kept for longer than any case takes, and no longer than stores can keep a name that keep leases for a minute.
LONG_S = 60.0


def running(face: Face, once: Any, body: Callable[[], object]) -> Callable[[], Awaitable[Any]]:
    """``once.run(body)``, to be awaited."""
    return face.decorate(lambda function: lambda: once.run(function), body)


async def counted(face: Face, once: Any, runs: list[int], result: object = None) -> Any:
    """Run it once, which adds to ``runs``; what it returned."""

    def body() -> object:
        runs.append(len(runs))
        return result

    return await running(face, once, body)()


@case("once")
async def a_successful_run_is_the_only_one(face: Face) -> None:
    """After a successful run nobody runs it again, whichever client asks: all get the result that was kept."""
    runs: list[int] = []
    clients = [face.client(), face.client(info={"service": "reports"}), face.client()]
    results = [
        await counted(face, client.once("report", "2026-11-21", keep=LONG_S), runs, {"sent": 3, "to": ["ä", None]})
        for client in (*clients, *clients)
    ]
    equal((len(runs), results), (1, [{"sent": 3, "to": ["ä", None]}] * 6), "runs, and what they returned")
    other = clients[0].once("report", "2026-11-22", keep=LONG_S)
    equal((await counted(face, other, runs), len(runs)), (None, 2), "another key: its result, and runs in all")


@case("once, P1")
async def of_many_at_once_one_runs(face: Face) -> None:
    """Of many clients that ask at the same moment one runs it, and the others wait for its result."""
    runs: list[int] = []

    async def ask() -> Any:
        once = face.client().once("busy", 7, keep=LONG_S)
        async with face.holding(once) as run:
            if run:
                runs.append(1)
                await asyncio.sleep(0.3)
                run.result = "made"
        return run.result

    results = await asyncio.gather(*[task(ask()) for _ in range(5)])
    equal((len(runs), results), (1, ["made"] * 5), "runs, and what all were told")


@case("once")
async def what_is_kept_is_seen(face: Face) -> None:
    """A run that is kept shows who ran it, when, until when, and its result; until then there is none."""
    client, other = face.client(info={"service": "reports"}), face.client()
    once = client.once("seen", date(2026, 11, 21), keep=timedelta(minutes=1))
    equal(once.name, "seen/2026-11-21", "the name of the lock that a run holds")
    equal(await face.do(once.done), None, "done() before")
    async with face.holding(once) as run:
        equal((bool(run), run.done, run.lease.held), (True, None, True), "true, done, held")
        equal(await face.do(other.once("seen", "2026-11-21", keep=LONG_S).done), None, "done() meanwhile")
        run.result = [1, "two"]
        token, holder = run.lease.fencing_token, run.lease.holder
    equal(run.lease.held, False, "held after the block")
    done = await face.do(other.once("seen", "2026-11-21", keep=60).done)
    assert done is not None, "done() after a successful run knows none"
    equal(
        (done.name, done.result, done.holder, done.fencing_token), (once.name, [1, "two"], holder, token), "the record"
    )
    assert 50 < done.expires_in <= 60, f"a run kept for 60 s is kept for {done.expires_in} s"
    slack = timedelta(seconds=1 + face.capabilities.resolution_s)
    assert done.began_at - slack <= done.done_at <= done.began_at + timedelta(seconds=PATIENCE_S), f"times of {done}"
    assert abs(done.kept_until - done.done_at - timedelta(minutes=1)) < slack, f"times of {done}"
    record = await shown(face, other, once.name)
    equal((record.fencing_token, (record.info or {}).get("service")), (token, "reports"), "as a lease, to others")
    async with face.holding(other.once("seen", "2026-11-21", keep=60)) as again:
        equal((bool(again), again.result), (False, [1, "two"]), "a later run: true, result")
        equal(again.done.fencing_token, token, "the token of what a later run found")
        with raises(NotHeld):
            again.result = 2
        with raises(NotHeld):
            again.lease  # noqa: B018


@case("once, P9")
async def a_failed_run_may_be_tried_again(face: Face) -> None:
    """A run that raises is not marked: the error is raised, and the next caller, also one that waits, runs it."""
    ours, theirs = face.client(), face.client()
    runs: list[int] = []
    with raises(ZeroDivisionError):
        await running(face, ours.once("fails", keep=LONG_S), lambda: 1 // 0)()
    once = theirs.once("fails", keep=LONG_S)
    equal(await face.do(once.done), None, "done() after a failure")
    begun = await face.do(ours.once("fails", keep=LONG_S).begin, 0)
    equal(bool(begun), True, "whether it may be tried again at once")
    waiter = task(counted(face, once, runs, "second"))
    await asyncio.sleep(0.2)
    equal((waiter.done(), runs), (False, []), "whether the waiter came back, and ran it, while it goes on")
    with raises(ZeroDivisionError):
        async with face.holding(begun):
            raise ZeroDivisionError
    equal(await asyncio.wait_for(waiter, PATIENCE_S), "second", "what the waiter's run returned")
    equal((await counted(face, ours.once("fails", keep=LONG_S), runs), len(runs)), ("second", 1), "a later caller")


@case("once, P4, P7")
async def a_run_that_was_lost_is_not_marked(face: Face) -> None:
    """A run whose lease was lost ends with LeaseLost, marks nothing, and takes nothing from who runs it next."""
    ours, theirs = face.client(), face.client()
    with raises(LeaseLost):
        async with face.holding(ours.once("late", keep=LONG_S, ttl=face.short_ttl, max_hold=face.short_ttl)) as late:
            equal(bool(late), True, "the first run")
            waiter = task(face.do(theirs.once("late", keep=LONG_S).begin, PATIENCE_S))
            await asyncio.wait({waiter})  # on the face for tasks, the loss cancels this
    next_run = await waiter
    equal((bool(next_run), late.lease.held), (True, False), "whether another may run it, whether the first is held")
    rising([late.lease.fencing_token, next_run.lease.fencing_token], "tokens of the runs")
    equal(await face.do(theirs.once("late", keep=LONG_S).done), None, "done() after the late end")
    async with face.holding(next_run):
        equal(next_run.lease.held, True, "the second run after the late end of the first")
    assert await face.do(ours.once("late", keep=LONG_S).done), "the second run is not marked"

    with raises(LeaseLost):
        async with face.holding(ours.once("broken", keep=LONG_S)) as run:
            token = run.lease.fencing_token
            equal(await face.do(theirs.break_lease, "broken", fencing_token=token, now=True), True, "breaking it")
    equal(await face.do(ours.once("broken", keep=LONG_S).done), None, "done() of a run that was broken")


@case("once, P11")
async def that_somebody_runs_it_is_told(face: Face) -> None:
    """While somebody runs it: with ``timeout`` LockTimeout or, with on_busy="skip" and in ``begin``, a false run."""
    ours, theirs = face.client(), face.client()
    runs: list[int] = []
    begun = await face.do(ours.once("goes on", 1, keep=LONG_S, ttl=20).begin)
    for limit in (0, 0.3):
        began = time.monotonic()
        with raises(LockTimeout) as caught:
            await counted(face, theirs.once("goes on", 1, keep=LONG_S, timeout=limit), runs)
        took = time.monotonic() - began
        assert limit - 0.01 <= took < limit + PATIENCE_S, f"timeout={limit} took {took:.2f} s"
        equal((caught.error.name, caught.error.holder), ("goes on/1", begun.lease.holder), "name and holder told")
        skipping = theirs.once("goes on", 1, keep=LONG_S, timeout=limit, on_busy="skip")
        equal(await counted(face, skipping, runs), None, "what a skipped run returns")
        async with face.holding(skipping) as skipped:
            equal((bool(skipped), skipped.done, skipped.result), (False, None, None), "a skipped block")
        found = await face.do(theirs.once("goes on", 1, keep=LONG_S).begin, limit)
        equal((bool(found), found.done), (False, None), "begin(timeout)")
    equal(await face.do(theirs.once("goes on", 1, keep=LONG_S).forget), False, "forget() of a run that goes on")
    with raises(WouldDeadlock):
        await face.do(ours.once("goes on", 1, keep=LONG_S).begin)
    async with face.holding(begun):
        begun.lease.check()
    equal(runs, [], "runs of those who were refused")


@case("once, P13", fifo)
async def who_waits_for_a_run_keeps_its_place(face: Face) -> None:
    """When a run fails, whoever has waited for it longest runs it next, however often they have looked meanwhile."""
    runs: list[int] = []
    client = face.client()
    once = client.once("places", keep=LONG_S)
    run = await face.do(once.begin)
    first = task(counted(face, face.client().once("places", keep=LONG_S), runs, "first"))
    await waiting(face, client, once.name, 1)
    await asyncio.sleep(10 * LOOK_MIN_S)
    second = task(counted(face, face.client().once("places", keep=LONG_S), runs, "second"))
    await waiting(face, client, once.name, 2)
    await asyncio.sleep(10 * LOOK_MIN_S)  # both have looked, and the first more often
    await face.do(run.lease.release)
    equal(await asyncio.gather(first, second), ["first"] * 2, "what was run, as both are told")


@case("once")
async def it_may_be_run_again_after_keep(face: Face) -> None:
    """A run is kept for ``keep`` seconds from its end and then forgotten, by nobody's act."""
    client, runs = face.client(), [0]
    keep = 2 * face.short_ttl
    once = client.once("kept", keep=keep)
    began = time.monotonic()  # the end comes after this; when it was told, may be any time after it
    await counted(face, once, runs)

    async def forgotten() -> bool:
        return await face.do(once.done) is None

    await until(forgotten, "the end of what is kept")
    took = time.monotonic() - began
    assert took >= keep - face.capabilities.resolution_s - 0.01, f"kept for {keep} s, and forgotten after {took:.2f} s"
    await until(lambda: counted(face, once, runs, "again"), "a run after that")
    equal(len(runs), 3, "runs, with one counted before")


@case("once")
async def an_operator_makes_it_run_again(face: Face) -> None:
    """``forget`` makes what is done runnable again at once, by anybody; what is not done it leaves alone."""
    ours, theirs = face.client(), face.client()
    runs: list[int] = []
    once = ours.once("again", "key", keep=LONG_S)
    equal(await face.do(once.forget), False, "forget() of what was never done")
    await counted(face, once, runs, 1)
    first = await face.do(once.done)
    equal(await face.do(theirs.once("again", "key", keep=LONG_S).forget), True, "forget() by another client")
    equal(await face.do(once.done), None, "done() after that")
    equal((await counted(face, once, runs, 2), len(runs)), (2, 2), "the next run: its result, and runs in all")
    second = await face.do(once.done)
    rising([first.fencing_token, second.fencing_token], "tokens of the runs")


@case("once")
async def a_result_that_cannot_be_kept_is_told(face: Face) -> None:
    """A result that is too large or no JSON is told as ResultNotKept, with it; the work counts as done all the same."""
    client = face.client()
    for number, wrong in enumerate(({1, 2}, "x" * 5000, math.nan, "\0", [object()])):
        once = client.once("results", number, keep=LONG_S)
        with raises(ResultNotKept) as caught:
            await running(face, once, lambda wrong=wrong: wrong)()  # type: ignore[misc]
        assert caught.error.result is wrong, f"the error does not carry the result: {caught.error.result!r}"
        done = await face.do(once.done)
        assert done is not None, "what has such a result is not done"
        equal(done.result, None, "the result that is kept")
        equal(await running(face, once, lambda: 1 // 0)(), None, "what a later caller gets")
        loose = client.once("loose", number, keep=LONG_S, keep_result=False)
        assert await running(face, loose, lambda wrong=wrong: wrong)() is wrong, "a result that is not to be kept"  # type: ignore[misc]
        equal(await running(face, loose, lambda: 1 // 0)(), None, "what a later caller gets of that")
    equal(
        await running(face, client.once("tuple", keep=LONG_S), lambda: (1, {2: 3}))(), [1, {"2": 3}], "as JSON has it"
    )


@case("once")
async def a_run_may_end_without_a_mark(face: Face) -> None:
    """Releasing the run's lease inside the block ends it without a mark, and the next caller may run it at once."""
    client, runs = face.client(), [0]
    once = client.once("nothing to do", keep=LONG_S)
    async with face.holding(once) as run:
        equal(await face.do(run.lease.release), True, "release inside the block")
    equal(await face.do(once.done), None, "done() after that")
    await counted(face, once, runs)
    equal(len(runs), 2, "runs, with one counted before")


@case("once")
async def calls_of_a_decorated_function_are_runs(face: Face) -> None:
    """A decorated function is run once for each key: the name alone where it has no parameters."""
    ours, theirs = face.client(), face.client()
    runs: list[int] = []
    plain = [face.decorate(c.once_per("daily", keep=LONG_S), lambda: runs.append(1)) for c in (ours, theirs)]
    for function in (*plain, *plain):
        equal(await function(), None, "what it returns")
    keyed = face.decorate(ours.once_per("daily", keep=LONG_S, key=lambda: 5), lambda: len(runs))
    equal((await keyed(), await keyed()), (1, 1), "what a function with another key returns")
    equal([r.name for r in await face.do(ours.leases)], ["daily", "daily/5"], "the names that are kept")
    equal(len(runs), 1, "runs of four calls")
    lock = await had(face, theirs.lock("daily/6"))
    busy = face.decorate(ours.once_per("daily", keep=LONG_S, key=lambda: 6, timeout=0), lambda: 1 // 0)
    with raises(LockTimeout):
        await busy()
    skipping = ours.once_per("daily", keep=LONG_S, key=lambda: 6, timeout=0, on_busy="skip")
    equal(await face.decorate(skipping, lambda: 1 // 0)(), None, "a call that is skipped")
    equal(await face.do(lock.release), True, "release")


@case("once, P20")
async def a_once_is_checked_before_any_io(face: Face) -> None:
    """A name, key, time, info or function that cannot be used is refused before anything is sent."""
    idle = face.idle_client()
    for name, key in (
        ("", "key"),
        ("name", ""),
        ("name", "a\nb"),
        ("name", 1.5),
        ("name", True),
        ("name", b"key"),
        ("name", ("a", "b")),
        ("name", datetime.now(timezone.utc)),
        ("name", "x" * 251),
        (None, "key"),
    ):
        with raises(InvalidName):
            idle.once(name, key, keep=60)
    limits = face.capabilities
    for keep in (0, -1, math.nan, math.inf, "60", True, None, limits.ttl_max_s * 1.01, limits.ttl_min_s * 0.99):
        with raises(InvalidOption):
            idle.once("name", keep=keep)
        with raises(InvalidOption):
            idle.once_per("name", keep=keep)
    wrong: list[dict[str, Any]] = [
        {"ttl": -1},
        {"timeout": -1},
        {"max_hold": 0},
        {"on_busy": "wait"},
        {"on_lost": 5},
        {"info": {"once": 1}},
        {"info": {"a": "x" * 4085}},
        {"info": "text"},
    ]
    for options in wrong:
        with raises(InvalidOption):
            idle.once("name", keep=60, **options)
        with raises(InvalidOption):
            idle.once_per("name", keep=60, **options)
    with raises(InvalidName):
        idle.once_per("", keep=60)
    with raises(InvalidOption):
        face.decorate(idle.once_per("name", keep=60, key="key"), lambda: None)
    with raises(InvalidName):
        await face.decorate(idle.once_per("name", keep=60, key=lambda: None), lambda: None)()
    with raises(InvalidOption):
        face.idle_client(info={"once": 1}).once("name", keep=60)
    for timeout in (-2, math.nan):
        with raises(ValueError):
            await face.do(idle.once("name", keep=60).begin, timeout)
    with raises(TypeError):
        await face.do(idle.once("name", keep=60).run, 5)
    equal(idle.once("x" * 127, "y" * 127, keep=limits.ttl_max_s).name, "x" * 127 + "/" + "y" * 127, "the longest name")
