"""Conformance cases on claims: lists of items of which everybody takes what is free, run through both faces."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, LeaseLost
from dibs.testing.case import CLIENT_CASES, PATIENCE_S, equal
from dibs.testing.client_bench import had, raises, shown, task, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.testing.faces import Face

case = CLIENT_CASES.case
anywhere = partial(CLIENT_CASES.case, anywhere=True)


# What nobody waits out.
LONG_S = 60.0


async def following(face: Face, items: Any) -> Any:
    """The next item of a batch or a stream; None at the end."""
    if hasattr(items, "__anext__"):
        return await face.do(lambda: anext(items, None))
    return await face.do(next, items, None)


async def closed(face: Face, stream: Any) -> None:
    """End a stream before its end."""
    await face.do(stream.aclose if hasattr(stream, "aclose") else stream.close)


async def everything(face: Face, items: Any) -> list[Any]:
    """The values that are left, worked off."""
    values = []
    while (item := await following(face, items)) is not None:
        values.append(item.value)
    return values


async def all_won(face: Face, claims: Any, items: Any, limit_s: float = PATIENCE_S) -> Any:
    """A batch of all of these, as soon as they are free."""

    async def take() -> Any:
        batch = await face.do(claims.take, items)
        if batch.won == list(items):
            return batch
        await face.do(batch.release)
        return None

    return await until(take, f"all of {items!r} free", limit_s)


async def all_free(face: Face, claims: Any, items: Any, what: str) -> None:
    """Fail unless nobody holds any of these now."""
    async with face.holding(await face.do(claims.take, list(items))) as batch:
        equal((batch.won, batch.busy), (list(items), []), what)


@anywhere("P1, P25")
async def what_is_free_is_won(face: Face) -> None:
    """A take wins what is free, in the order given and each item once; what others hold is busy, and no error."""
    ours, theirs = face.client(), face.client()
    claims, others = face.claims(ours, "orders", ttl=LONG_S), face.claims(theirs, "orders", ttl=LONG_S)
    busy = await face.do(others.take, ["c"])
    async with face.holding(await face.do(claims.take, ["e", "c", "a", "e", "d"])) as batch:
        equal((batch.won, batch.busy, batch.left), (["e", "a", "d"], ["c"], ["e", "a", "d"]), "won, busy, left")
        equal((len(batch), batch.stale, batch.lost), (3, [], []), "how many; stale; lost")
        async with face.holding(await face.do(others.take, list("abcde"))) as other:
            equal((other.won, other.busy), (["b"], ["a", "c", "d", "e"]), "what others win, and find busy")
        item = batch.items[0]
        equal((item.name, item.key, item.value, item.held), ("orders/e", "e", "e", True), "an item")
    async with face.holding(await face.do(claims.take, list("abcde"))) as batch:
        equal((batch.won, batch.busy), (["a", "b", "d", "e"], ["c"]), "afterwards")
    await face.do(busy.release)
    await all_free(face, claims, "abcde", "in the end")


@case("P1, P2")
async def a_claim_is_a_lease(face: Face) -> None:
    """A claim on an item and a lock of the name source/item exclude each other, and it is shown like any lease."""
    ours, theirs = face.client(), face.client()
    lock = await had(face, theirs.lock("orders/c"))
    async with face.holding(await face.do(ours.claims("orders", ttl=LONG_S).take, ["e", "c"])) as batch:
        equal((batch.won, batch.busy), (["e"], ["c"]), "won, busy")
        equal(await face.do(theirs.lock("orders/e").acquire, timeout=0), None, "a lock of the same name meanwhile")
        record = await shown(face, theirs, "orders/e")
        equal(batch.items[0].fencing_token, record.fencing_token, "its token as others see it")
    equal([record.name for record in await face.do(theirs.leases, "orders/")], ["orders/c"], "held afterwards")
    await face.do(lock.release)


@anywhere("P1")
async def of_several_takers_each_item_has_one(face: Face) -> None:
    """Of several that take overlapping lists at the same moment, each item is won by exactly one."""
    worked: Counter[int] = Counter()
    clients = [face.client(request_timeout=3 * PATIENCE_S) for _ in range(4)]  # for a machine with much else to do

    async def work(client: Any, first: int) -> None:
        claims = face.claims(client, "rows", ttl=LONG_S)
        async with face.holding(await face.do(claims.take, range(first, first + 40))) as batch:
            worked.update(batch.won)
            await together.wait()

    together = _Meeting(4)
    await asyncio.gather(*[task(work(client, first)) for client, first in zip(clients, (0, 5, 10, 15), strict=True)])
    equal(worked, Counter(range(55)), "how often each was won")


class _Meeting:
    """Where several wait for each other."""

    def __init__(self, many: int) -> None:
        self._left = many
        self._all = asyncio.Event()

    async def wait(self) -> None:
        self._left -= 1
        if not self._left:
            self._all.set()
        await asyncio.wait_for(self._all.wait(), PATIENCE_S)


@anywhere("claims")
async def going_on_finishes_an_item(face: Face) -> None:
    """Going on to the next item frees the one before, while the others are kept."""
    ours, theirs = face.client(), face.client()
    others = face.claims(theirs, "files", ttl=LONG_S)
    batch = await face.do(face.claims(ours, "files", ttl=LONG_S).take, ["a", "b", "c"])
    for at, name in enumerate("abc"):
        item = await following(face, batch)
        equal((item.value, item.held, batch.left), (name, True, list("abc")[at:]), f"item {name}")
        if name == "b":
            await face.do((await all_won(face, others, ["a"])).release)
            item.done()
            item.done()
            equal((item.held, batch.left), (False, ["c"]), "after done(), twice")
            freed = await all_won(face, others, ["b"])
            equal((await face.do(others.take, ["c"])).busy, ["c"], "the one that is left")
            await face.do(freed.release)
        if name == "c":
            item.skip()
    equal(await following(face, batch), None, "at the end")
    await face.do(batch.release)
    equal((batch.left, batch.lost, batch.won), ([], [], ["a", "b", "c"]), "left, lost, won")


@anywhere("claims, P9")
async def what_is_left_is_given_back(face: Face) -> None:
    """What is not finished when the block ends, also by an error, is free at once for others."""
    ours, theirs = face.client(), face.client()
    batch: Any = None
    with raises(ZeroDivisionError):
        async with face.holding(await face.do(face.claims(ours, "left", ttl=LONG_S).take, range(5))) as batch:
            await following(face, batch)
            await following(face, batch)
            raise ZeroDivisionError
    equal((batch.left, batch.won), ([1, 2, 3, 4], [0, 1, 2, 3, 4]), "what was given back, of what was won")
    async with face.holding(await face.do(face.claims(theirs, "left", ttl=LONG_S).take, range(5))) as other:
        equal(other.won, [0, 1, 2, 3, 4], "what others win then")
        equal(await everything(face, other), [0, 1, 2, 3, 4], "worked off")
    equal((other.left, other.lost), ([], []), "left and lost")


@anywhere("claims")
async def what_was_won_is_looked_at_again(face: Face) -> None:
    """``verify`` is called once with what was won; what it does not return is given back, and counted stale."""
    ours, theirs = face.client(), face.client()
    claims, others = face.claims(ours, "due", ttl=LONG_S), face.claims(theirs, "due", ttl=LONG_S)
    calls = []

    def verify(won: list[dict[str, int]]) -> list[dict[str, int]]:
        calls.append([row["id"] for row in won])
        return [dict(row) for row in reversed(won) if row["id"] % 2]

    busy = await face.do(others.take, [3])
    rows = [{"id": number} for number in range(6)]
    taken = await face.do(claims.take, rows, key=lambda row: row["id"], verify=verify)
    async with face.holding(taken) as batch:
        equal(calls, [[0, 1, 2, 4, 5]], "what verify was given")
        equal(([row["id"] for row in batch.won], batch.left), ([1, 5], batch.won), "won, in the order given; left")
        equal([row["id"] for row in batch.stale], [0, 2, 4], "stale")
        await face.do((await all_won(face, others, [4])).release)
    await face.do(busy.release)

    def fail(won: object) -> list[dict[str, int]]:
        raise ZeroDivisionError

    with raises(ZeroDivisionError):
        await face.do(claims.take, rows, key=lambda row: row["id"], verify=fail)
    await all_free(face, others, range(6), "after verify has failed")


@anywhere("claims")
async def no_more_is_won_than_asked_for(face: Face) -> None:
    """With ``limit``, so many are won as are free and no more; the rest is left for others."""
    ours, theirs = face.client(), face.client()
    first = await face.do(face.claims(ours, "few", ttl=LONG_S).take, range(20), limit=3)
    equal((first.won, first.busy), ([0, 1, 2], []), "the first three")
    second = await face.do(face.claims(theirs, "few", ttl=LONG_S).take, range(20), limit=5)
    equal((second.won, second.busy), ([3, 4, 5, 6, 7], [0, 1, 2]), "the next five")
    third = await face.do(face.claims(ours, "few", ttl=LONG_S).take, range(9), limit=5)
    equal(third.won, [8], "when there are not so many")
    for batch in (first, second, third):
        await face.do(batch.release)
    await all_free(face, face.claims(ours, "few", ttl=LONG_S), range(20), "afterwards")


@anywhere("claims, P4")
async def the_loop_stops_before_the_deadline(face: Face) -> None:
    """The loop over a batch stops a margin before its deadline, and what is left is given back; nothing is lost."""
    ours, theirs = face.client(), face.client()
    ttl = face.short_ttl + 1
    batch = await face.do(face.claims(ours, "deadline", ttl=ttl, margin=ttl / 2).take, range(3))
    first = await following(face, batch)
    equal((first.value, batch.remaining() > 0, batch.deadline is not None), (0, True, True), "the first item")
    await until(lambda: first.remaining() <= ttl / 2, "half of the ttl has gone by")
    equal((await following(face, batch), batch.left), (None, [1, 2]), "the next item; what is left")
    await face.do(batch.release)
    equal((batch.left, batch.lost), ([1, 2], []), "given back; lost")
    await all_free(face, face.claims(theirs, "deadline", ttl=LONG_S), range(3), "for others")


@anywhere("claims, P4")
async def what_is_late_is_lost(face: Face) -> None:
    """An item whose time is over cannot be finished: it says LeaseLost, and the batch counts it and its like lost."""
    ours, theirs = face.client(), face.client()
    batch = await face.do(face.claims(ours, "late", ttl=face.short_ttl).take, ["a", "b", "c"])
    item = await following(face, batch)
    other = await all_won(face, face.claims(theirs, "late", ttl=LONG_S), ["a"], face.short_ttl + PATIENCE_S)
    equal((item.held, batch.remaining()), (False, 0.0), "the item meanwhile")
    with raises(LeaseLost):
        item.done()
    equal((await following(face, batch), batch.lost), (None, ["a", "b", "c"]), "the next item; what is lost")
    await face.do(batch.release)
    equal((batch.left, other.items[0].held), ([], True), "left; the claim of who took it over")
    await face.do(other.release)
    equal(other.lost, [], "what that has lost")


@anywhere("claims, P4")
async def what_nobody_began_in_time_is_lost(face: Face) -> None:
    """What was not finished when the time was over is counted lost at the end of the batch: it was not given back."""
    ours, theirs = face.client(), face.client()
    batch = await face.do(face.claims(ours, "unbegun", ttl=face.short_ttl).take, ["a", "b", "c", "d"])
    batch.items[3].done()
    equal((await following(face, batch)).value, "a", "the item at hand")
    other = await all_won(face, face.claims(theirs, "unbegun", ttl=LONG_S), ["b"], face.short_ttl + PATIENCE_S)
    await face.do(batch.release)
    equal((batch.left, batch.lost), ([], ["a", "b", "c"]), "left; lost")
    equal(other.items[0].held, True, "the claim of another")
    await face.do(other.release)
    equal(other.lost, [], "what that has lost")


@anywhere("claims, P9")
async def what_is_won_beyond_the_limit_is_given_back(face: Face) -> None:
    """When more could be had than were wanted, because the first were busy, the rest is free for others at once."""
    ours, theirs = face.client(), face.client()
    claims, others = face.claims(ours, "beyond", ttl=LONG_S), face.claims(theirs, "beyond", ttl=LONG_S)
    busy = await face.do(others.take, ["a", "b", "c"])
    batch = await face.do(claims.take, list("abcdefgh"), limit=1)
    equal((batch.won, batch.busy), (["d"], ["a", "b", "c"]), "won, and busy")
    rest = await face.do(others.take, list("defgh"))
    equal((rest.won, rest.busy), (list("efgh"), ["d"]), "what others win then, and what is busy to them")
    for each in (busy, batch, rest):
        await face.do(each.release)


@case("claims, P8")
async def what_was_broken_is_found_lost(face: Face) -> None:
    """An item that an operator broke meanwhile is counted lost once the store has been told of its end."""
    ours, theirs = face.client(), face.client()
    for begun, left in ((True, []), (False, ["b"])):
        batch = await face.do(ours.claims("broken", ttl=LONG_S).take, ["a", "b"])
        token = (await shown(face, theirs, "broken/a")).fencing_token
        equal(await face.do(theirs.break_lease, "broken/a", fencing_token=token, now=True), True, "broken")
        equal(await everything(face, batch) if begun else [*"ab"], ["a", "b"], "worked, as nobody has told")
        await face.do(batch.release)
        equal((batch.left, batch.lost), (left, ["a"]), "left, and lost")


@anywhere("claims")
async def a_renewed_batch_lasts(face: Face) -> None:
    """With ``renew`` a batch is held for as long as it lasts; without, it ends at its deadline by itself."""
    ours, theirs = face.client(), face.client()
    ttl = max(3, face.short_ttl)  # for a busy machine to renew in
    renewed = await face.do(face.claims(ours, "renewed", ttl=ttl, renew=True, margin=0).take, range(3))
    fixed = await face.do(face.claims(ours, "fixed", ttl=ttl).take, range(3))
    other = await all_won(face, face.claims(theirs, "fixed", ttl=LONG_S), [0], ttl + PATIENCE_S)
    await until(lambda: not any(item.held for item in fixed.items), "the fixed batch is over")
    equal(all(item.held for item in renewed.items), True, "the renewed batch")
    late = await face.do(face.claims(theirs, "renewed", ttl=LONG_S).take, range(3))
    equal(late.busy, [0, 1, 2], "its items, for others")
    for thing in (other, renewed, fixed):
        await face.do(thing.release)


@anywhere("claims")
async def a_stream_goes_on_until_it_is_stopped(face: Face) -> None:
    """A stream works what is found, looks again when nothing was, and ends when it is told to, giving back the rest."""
    ours, theirs = face.client(), face.client()
    others = face.claims(theirs, "stream", ttl=LONG_S)
    found: list[list[int]] = [[1, 2], [], [], [3, 4, 5]]
    stop = threading.Event()

    def fetch() -> list[int]:
        return found.pop(0) if found else []

    stream = face.claims(ours, "stream", ttl=LONG_S).stream(fetch, n=10, idle=0.01, stop=stop)
    values = [(await following(face, stream)).value for _ in range(4)]
    equal(values, [1, 2, 3, 4], "in the order found")
    equal((await face.do(others.take, [5])).busy, [5], "what is still to come, for others")
    stop.set()
    equal(await following(face, stream), None, "after it was stopped")
    await all_free(face, others, [1, 2, 3, 4, 5], "afterwards")
    stream = face.claims(ours, "stream", ttl=LONG_S).stream(lambda: [6, 7], idle=0.01)
    equal((await following(face, stream)).value, 6, "of another stream")
    await closed(face, stream)
    await all_free(face, others, [6, 7], "after it was closed")


@anywhere("P2")
async def a_later_batch_has_a_greater_token(face: Face) -> None:
    """The token of a batch is the greatest of its items', and smaller than that of a later one that has all of them."""
    client = face.client()
    claims = face.claims(client, "block", ttl=LONG_S)
    tokens = []
    for items in (["b"], ["a", "b"], ["a", "b", "c"]):
        async with face.holding(await face.do(claims.take, items)) as batch:
            equal(batch.token, max(item.fencing_token for item in batch.items), "the token of a batch")
            tokens.append(batch.token)
    equal(tokens, sorted(set(tokens)), "one after the other")
    async with face.holding(await face.do(claims.take, [])) as batch:
        equal(batch.token, None, "of nothing")


@anywhere("claims")
async def what_failed_is_free_again(face: Face) -> None:
    """``fail()`` frees an item and notes it in ``failed``; with ``retry_in``, others get it after that time."""
    ours, theirs = face.client(), face.client()
    batch = await face.do(face.claims(ours, "failing", ttl=LONG_S).take, ["a", "b", "c"])
    first, second, third = batch.items
    first.fail(ZeroDivisionError("why"))
    first.fail()
    second.fail("later", retry_in=LONG_S)
    for bad in ({"error": 5}, {"retry_in": -1}, {"retry_in": float("nan")}):
        with raises(InvalidOption):
            third.fail(**bad)
    equal((batch.failed, batch.left, batch.lost), (["a", "b"], ["c"], []), "failed, left, lost")
    others = face.claims(theirs, "failing", ttl=LONG_S)
    await face.do((await all_won(face, others, ["a"])).release)
    await face.do(batch.release)
    async with face.holding(await face.do(others.take, list("abc"))) as other:
        equal((other.won, other.busy), (["a", "c"], ["b"]), "won by others, and busy")
    equal(batch.failed, ["a", "b"], "failed, afterwards")
    later = await face.do(others.take, ["a"])
    later.items[0].fail(retry_in=0.2)
    await face.do((await all_won(face, others, ["a"])).release)


@case("P20, P25")
async def bad_claims_are_refused_at_once(face: Face) -> None:
    """Sources, keys, limits and times that cannot be are refused before anything is sent; taking nothing sends none."""
    client = face.idle_client()
    for source in ("", "a\n", "\ud800", "x" * 256):
        with raises(InvalidName):
            client.claims(source)
    bad: list[Callable[[], Any]] = [
        lambda: client.claims("a", ttl=0),
        lambda: client.claims("a", ttl=10, margin=10),
        lambda: client.claims("a", margin=-1),
        lambda: client.claims("a", info={"x": object()}),
        lambda: client.claims("a", max_tries=0),
        lambda: client.claims("a", max_tries=True),
        lambda: client.claims("a", max_tries=2.0),
        lambda: client.claims("a").stream([1]),
        lambda: client.claims("a").stream(list, n=0),
        lambda: client.claims("a").stream(list, idle=0),
        lambda: client.claims("a").stream(list, stop=1),
    ]
    for make in bad:
        with raises(InvalidOption):
            make()
    claims = client.claims("a", ttl=LONG_S)
    for items in ([""], ["\x00"], ["x" * 254], [1.5], [None], ["fine", b"bytes"]):
        with raises(InvalidName):
            await face.do(claims.take, items)
    for how in ({"limit": 0}, {"limit": 1.5}, {"limit": True}, {"key": "id"}):
        with raises(InvalidOption):
            await face.do(claims.take, [1], **how)
    async with face.holding(await face.do(claims.take, [])) as batch:
        equal((len(batch), batch.won, batch.deadline, batch.remaining()), (0, [], None, 0.0), "of nothing")
