"""Claims: several real programs on one list, deaths, lost answers, outages, forks, signals, dropped batches."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import dibs
from dibs.steps import Steps
from dibs.store import GONE, Acquire, Release, Request
from dibs.tries import DeadItem
from tests.between import Between, Holdup
from tests.servers.memcached import MemcachedServer
from tests.test_api import in_a_fork, in_a_thread
from tests.waits import eventually


@pytest.fixture
def client(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


@pytest.fixture
def other(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


# -- several programs -------------------------------------------------------------------------------------------------

WORKER = """
import json, sys, time, dibs
url, journal, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
claims = dibs.connect(url).claims("rows", ttl=2)
done = []
def worked():
    return {json.loads(line)["row"] for line in open(journal)}
def due(rows):
    finished = worked()
    return [row for row in rows if row not in finished]
print("ready", flush=True)
sys.stdin.readline()
while rows := due(range(first, first + count)):
    with claims.take(rows, verify=due, limit=20) as batch:
        for item in batch:
            with open(journal, "a") as file:
                file.write(json.dumps({"row": item.value, "by": first, "token": item.fencing_token}) + "\\n")
            if sys.argv[5] == "dies" and len(done) == 5:
                print("stuck", flush=True)
                sys.stdin.readline()
            done.append(item.value)
    if not batch.won:
        time.sleep(0.02)  # the dead one's are held until their ttl is over
"""


def start(url: str, journal: Path, first: int, how: str, ttl: float) -> subprocess.Popen[str]:
    """A program with the 80 rows from ``first`` on its list."""
    script = WORKER.replace("ttl=2", f"ttl={ttl}")
    return subprocess.Popen(
        [sys.executable, "-c", script, url, str(journal), str(first), "80", how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("store", ["sqlite", "postgres", "memcached"])
def test_overlapping_programs_work_each_row_once(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Three programs with overlapping lists, of which one is killed, work every row, and none twice."""
    url = request.getfixturevalue(f"{store}_url")
    journal = tmp_path / "journal"
    journal.touch()
    ttl = 3 if store == "memcached" else 2
    workers = [start(url, journal, first, how, ttl) for first, how in ((0, "lives"), (30, "lives"), (60, "dies"))]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        assert workers[2].stdout is not None
        assert workers[2].stdout.readline() == "stuck\n"
        workers[2].kill()
        for worker in workers[:2]:
            assert worker.wait(60) == 0
        rows = [json.loads(line)["row"] for line in journal.read_text().splitlines()]
        twice = [row for row, times in Counter(rows).items() if times > 1]
        assert not twice
        # What the dead one had claimed of their lists came back by its ttl.
        assert set(range(110)) <= set(rows)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_items_that_are_no_keys_say_how_to_get_one(client: dibs.Client) -> None:
    """Rows are what a newcomer passes first."""
    with pytest.raises(
        dibs.InvalidName, match=r"not dict: .*; say what tells one item from the others: key=lambda item"
    ):
        client.claims("orders").take([{"id": 1}])
    with client.claims("orders").take([{"id": 1}], key=lambda row: row["id"]) as batch:
        assert len(batch) == 1


def test_a_thousand_are_one_call(sqlite_url: str) -> None:
    """A thousand items travel to the store in one call, and what is left of them in another."""
    between = Between(sqlite_url)
    with between.client() as client:
        with client.claims("rows").take(range(1000)) as batch:
            assert len(batch) == 1000
            assert [len(call) for call in between.calls] == [1000]
        assert [len(call) for call in between.calls] == [1000, 1000]
        assert batch.left == list(range(1000))
        assert batch.lost == []


def test_no_more_is_asked_for_than_is_wanted(sqlite_url: str) -> None:
    """A take asks for as many as are missing at its limit; where all of those were busy, for twice as many."""
    between = Between(sqlite_url)
    with between.client(ttl=20) as client, dibs.connect(sqlite_url, ttl=20) as other:
        with client.claims("rows").take(range(100), limit=3) as batch:
            assert batch.won == [0, 1, 2]
            assert [len(call) for call in between.calls] == [3]
        with other.claims("rows").take(range(7)):
            between.calls.clear()
            with client.claims("rows").take(range(100), limit=1) as batch:
                assert batch.won == [7]
                asked = [sum(type(request) is Acquire for request in call) for call in between.calls]
                assert asked[:4] == [1, 2, 4, 8]


# -- outages ----------------------------------------------------------------------------------------------------------


def test_a_server_that_is_down_is_told(own_memcached: MemcachedServer) -> None:
    """A memcached that cannot be reached is an error, also for the first item ever: never "busy"."""
    url = own_memcached.url()
    with dibs.connect(url, request_timeout=1, patience=0.5) as client:
        with client.claims("rows", ttl=5).take(range(10)) as batch:
            assert len(batch) == 10
        own_memcached.kill()
        with pytest.raises(dibs.StoreUnavailable):
            client.claims("rows", ttl=5).take(range(10))
    with dibs.connect(url, request_timeout=1, patience=0.5) as fresh, pytest.raises(dibs.StoreUnavailable):
        fresh.claims("rows", ttl=5).take(["first"])


def test_grants_whose_answer_was_lost_are_given_back(sqlite_url: str) -> None:
    """When the answer to a take is lost for good, the take raises, and what the store had granted is given back."""
    between = Between(sqlite_url)
    cut = threading.Event()

    def lose(requests: Sequence[Request]) -> None:
        if not cut.is_set() and any(isinstance(request, Acquire) for request in requests):
            raise dibs.StoreUnavailable("the answer was lost")

    with between.client(patience=0.2, request_timeout=0.5) as client, dibs.connect(sqlite_url) as other:
        client.ping()
        between.after = lose
        with pytest.raises(dibs.StoreUnavailable, match="the answer was lost"):
            client.claims("rows").take(range(5))
        cut.set()
        eventually(lambda: not other.leases("rows/"), "given back")


def test_items_whose_release_is_unknown_are_not_lost(sqlite_url: str) -> None:
    """A release whose answer was lost is repeated; that the store then says Gone makes nothing lost."""
    between = Between(sqlite_url)
    lost: list[int] = []

    def lose(requests: Sequence[Request]) -> None:
        if not lost and any(isinstance(request, Release) for request in requests):
            lost.append(1)
            raise dibs.StoreUnavailable("the answer was lost")

    between.after = lose
    with between.client() as client:
        with client.claims("rows").take(range(5)) as batch:
            for _ in batch:
                pass
        assert (batch.lost, batch.left, lost) == ([], [], [1])


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_batch_that_is_dropped_ends_by_its_ttl(client: dibs.Client, other: dibs.Client) -> None:
    """A batch that nobody holds any more is not renewed; a warning says so, and its ttl frees it."""
    batches = [client.claims("rows", ttl=3, renew=True).take(range(3))]
    assert len(batches[0]) == 3
    with pytest.warns(ResourceWarning, match="dropped without release"):
        batches.clear()
    assert not other.claims("rows").take(range(3)).won
    eventually(lambda: not other.leases("rows/"), "the ttl has freed them")


def test_closing_the_client_gives_everything_back(client: dibs.Client, other: dibs.Client) -> None:
    """A client that is closed in the middle gives back what is left; the batch counts nothing as lost."""
    batch = client.claims("rows").take(range(3))
    next(batch)
    client.close()
    assert not other.leases("rows/")
    assert next(batch, None) is None
    batch.release()


@pytest.mark.parametrize("how", ["client", "batch"])
def test_what_was_given_back_cannot_be_finished(how: str, client: dibs.Client, other: dibs.Client) -> None:
    """Who says late how an item has ended, which its batch or client gave back, hears that others may be at it."""
    batch = client.claims("rows").take(range(4))
    done, failed, skipped, left = batch.items
    done.done()
    failed.fail()
    skipped.skip()
    end = client.close if how == "client" else batch.release
    end()
    with other.claims("rows").take([3]) as taken:
        assert taken.won == [3]
        for late in (left.done, left.fail):
            with pytest.raises(dibs.LeaseLost, match="'rows/3' was given back unfinished: others may have claimed it"):
                late()
    left.skip()  # which says what has happened
    for item in (done, failed, skipped):
        for again in (item.done, item.fail, item.skip):
            again()


@pytest.mark.parametrize("how", ["done", "fail"])
def test_what_is_given_back_just_as_it_ends_is_not_finished(
    how: str, client: dibs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another thread closes the client between the last look at the item and its end, its worker is told so."""
    batch = client.claims("rows").take([1])
    (item,) = batch.items
    end = dibs.Item._end

    def late(*arguments: Any) -> None:
        in_a_thread(client.close)
        end(*arguments)

    monkeypatch.setattr(dibs.Item, "_end", late)
    with pytest.raises(dibs.LeaseLost, match="'rows/1' was given back unfinished: others may have claimed it"):
        getattr(item, how)()
    assert batch.lost == batch.failed == []


def test_what_is_given_back_just_as_the_loop_comes_to_it_is_left(
    client: dibs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another thread closes the client while the loop looks at its next item, that is left, and not lost."""
    batch = client.claims("rows").take([1])
    held = inspect.getattr_static(dibs.Item, "held").fget

    def late(item: dibs.Item[int]) -> bool:
        in_a_thread(client.close)
        return bool(held(item))

    monkeypatch.setattr(dibs.Item, "held", property(late))
    assert next(batch, None) is None
    assert batch.left == [1]
    assert batch.lost == []


def test_a_fork_holds_nothing(client: dibs.Client) -> None:
    """In a forked child the items of a batch are not held, and ending the batch there gives nothing back."""
    with client.claims("rows").take(range(3)) as batch:
        item = next(batch)

        def child() -> None:
            assert not item.held
            assert next(batch, None) is None

        in_a_fork(child)

        def ending() -> None:
            with batch:
                pass

        in_a_fork(ending)
        in_a_fork(batch.release)
        assert item.held
        assert len(client.leases("rows/")) == 3


def test_ctrl_c_in_a_take_gives_back(sqlite_url: str, other: dibs.Client) -> None:
    """Ctrl-C while a take is under way leaves nothing held."""
    between = Between(sqlite_url)
    holdup = Holdup(lambda requests: any(isinstance(request, Acquire) for request in requests))
    between.after = holdup

    def interrupt() -> None:
        assert holdup.reached.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        holdup.go_on()

    with between.client() as client:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.claims("rows").take(range(50))
        thread.join()
        eventually(lambda: not other.leases("rows/"), "given back")


def test_cancelling_a_take_gives_back(sqlite_url: str, other: dibs.Client) -> None:
    """A task that is cancelled while its take is under way leaves nothing held."""
    between = Between(sqlite_url)
    holdup = Holdup(lambda requests: any(isinstance(request, Acquire) for request in requests))
    between.after = holdup

    async def main() -> None:
        async with between.async_client() as client:
            task = asyncio.create_task(client.claims("rows").take(range(50)))
            assert await asyncio.to_thread(holdup.reached.wait, 10)
            task.cancel()
            holdup.go_on()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    eventually(lambda: not other.leases("rows/"), "given back")


def test_a_cancelled_loop_gives_back_what_is_left(sqlite_url: str, other: dibs.Client) -> None:
    """A task that is cancelled in the middle of a batch gives back the item at hand and what is left."""

    async def main() -> None:
        seen: list[Any] = []
        at_work = asyncio.Event()
        async with dibs.connect_async(sqlite_url) as client:

            async def work() -> None:
                async with await client.claims("rows").take(range(3)) as batch:
                    seen.append(batch)
                    async for _ in batch:
                        at_work.set()
                        await asyncio.Event().wait()

            task = asyncio.create_task(work())
            await at_work.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert seen[0].left == [0, 1, 2]
            assert not await client.leases("rows/")

    asyncio.run(main())


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_of_async_functions(sqlite_url: str) -> None:
    """In tasks, fetch and verify may be async; a stream that is closed early gives back what is left."""

    async def main() -> None:
        async def fetch() -> list[str]:
            return ["a", "b", "c"]

        async def verify(won: list[str]) -> list[str]:
            return [value for value in won if value != "b"]

        async with dibs.connect_async(sqlite_url) as client:
            stream = client.claims("files").stream(fetch, verify=verify)
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    assert item.value == "a"
                    assert [record.name for record in await client.leases("files/")] == ["files/a", "files/c"]
                    break
            assert not await client.leases("files/")

    asyncio.run(main())


def test_a_stream_whose_client_is_closed_ends(sqlite_url: str) -> None:
    """A stream that finds nothing when its client is closed says so, and does not look again and again without end."""
    looks = []

    def look() -> list[str]:
        looks.append(1)
        assert len(looks) == 1, "it goes on looking"
        return []

    with dibs.connect(sqlite_url) as threads:
        threads.ping()

        def fetch() -> list[str]:
            threads.close()
            return look()

        with pytest.raises(dibs.StoreUnavailable, match="this dibs client is closed"):
            next(threads.claims("none").stream(fetch))

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as tasks:
            await tasks.ping()

            async def fetch() -> list[str]:
                await tasks.close()
                return look()

            with pytest.raises(dibs.StoreUnavailable, match="this dibs client is closed"):
                await anext(tasks.claims("none").stream(fetch))

    looks.clear()
    asyncio.run(main())


def test_a_stream_pauses_when_there_is_nothing(client: dibs.Client) -> None:
    """A stream that finds nothing looks again after its pause, and stops in the middle of a long one when told to."""
    looks: list[float] = []
    stop = threading.Event()

    def fetch() -> list[int]:
        looks.append(time.monotonic())
        if len(looks) == 3:
            threading.Timer(0.1, stop.set).start()
        return []

    began = time.monotonic()
    assert list(client.claims("none").stream(fetch, idle=0.2, stop=lambda: len(looks) >= 3)) == []
    assert looks[2] - looks[0] >= 2 * 0.15 - 0.01
    looks.clear()
    stop.clear()
    threading.Timer(0.3, stop.set).start()
    assert list(client.claims("none").stream(fetch, idle=60, stop=stop)) == []
    assert time.monotonic() - began < 30


# -- tries ------------------------------------------------------------------------------------------------------------


KILLED = """
import dibs, os, signal, sys
with dibs.connect(sys.argv[1]) as client:
    batch = client.claims("rows", ttl=1.5, max_tries=2).take(["poison"])
    assert batch.won == ["poison"], batch
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_item_that_kills_its_workers_is_dead(sqlite_url: str, client: dibs.Client) -> None:
    """A worker that is killed with an item in hand has paid for its try; after the last, nobody gets the item."""
    for _ in range(2):
        eventually(lambda: not client.leases("rows/"), "the ttl of the one before is over")
        killed = subprocess.run([sys.executable, "-c", KILLED, sqlite_url], check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
    eventually(lambda: not client.leases("rows/"), "the ttl of the last is over")
    claims = client.claims("rows", max_tries=2)
    with claims.take(["poison", "fine"]) as batch:
        assert (batch.won, batch.busy) == (["fine"], ["poison"])
    assert [(item.key, item.tries, item.error) for item in claims.dead()] == [("poison", 2, None)]


def test_a_tally_is_settled_before_its_item_is_free(sqlite_url: str) -> None:
    """Tries cost one call more with a take, and nothing is released before its tally has been answered."""
    between = Between(sqlite_url)
    with between.client() as client:
        with client.claims("rows", max_tries=3).take(range(500)) as batch:
            assert [len(call) for call in between.calls] == [500, 500]
            batch.items[0].done()
            batch.items[1].fail("why")
        seen: set[str] = set()
        for call in between.calls[2:]:
            names = {request.name for request in call}
            assert not {name.partition("/")[2] for name in names if "~" not in name} - seen
            seen |= {name.partition("/")[2] for name in names if "~" in name}
        assert (batch.lost, batch.failed, len(seen)) == ([], [1], 500)
        with client.claims("rows", max_tries=1).take(range(3)) as batch:
            assert (batch.won, batch.busy) == ([0, 2], [1])


def test_tries_whose_answer_was_lost_cost_nothing(sqlite_url: str) -> None:
    """When it stays unknown whether tries were counted, the take raises, and they are taken back with the claims."""
    between = Between(sqlite_url)
    cut = threading.Event()

    def lose(requests: Sequence[Request]) -> None:
        if not cut.is_set() and any(isinstance(request, Acquire) and "~tries" in request.name for request in requests):
            raise dibs.StoreUnavailable("the answer was lost")

    with between.client(patience=0.2, request_timeout=0.5) as client, dibs.connect(sqlite_url) as other:
        client.ping()
        between.after = lose
        claims = client.claims("rows", max_tries=1)
        with pytest.raises(dibs.StoreUnavailable, match="the answer was lost"):
            claims.take(range(5))
        cut.set()
        eventually(lambda: not other.leases("rows/"), "given back")
        with claims.take(range(5)) as batch:
            assert batch.won == list(range(5))


def test_what_an_item_failed_with_is_kept_as_text(client: dibs.Client) -> None:
    """Of any error as much is kept as every store can keep; of the info of the claims, what there is room for."""
    for error, told in (("x\0y\ud800", "x\ufffdy?"), ("é" * 400, "é" * 300), (ValueError("v"), "ValueError: v")):
        claims = client.claims("rows", max_tries=1)
        claims.take([1]).items[0].fail(error)
        eventually(lambda claims=claims: bool(claims.dead()), "dead")  # type: ignore[misc]
        assert [item.error for item in claims.dead()] == [told]
        assert claims.revive([1]) == 1
    full = client.claims("rows", max_tries=1, info={"x": "y" * 4000})
    full.take([1]).items[0].fail("z" * 300)
    eventually(lambda: bool(full.dead()), "dead")
    assert [item.error for item in full.dead()] == [None]
    for info in ({"dead": 1}, {"x": "y" * 4080}):
        with pytest.raises(dibs.InvalidOption):
            client.claims("rows", max_tries=1, info=info)


@pytest.mark.parametrize("items", ["abc", b"abc", {"a": 1}, 17])
def test_take_wants_several_items(client: dibs.Client, items: Any) -> None:
    """A text is one key, and not one for each of its letters; so are those that ``fetch`` returns."""
    with pytest.raises(dibs.InvalidOption, match=r"items are several, as in take\(\["):
        client.claims("orders").take(items)
    with pytest.raises(dibs.InvalidOption, match=r"items are several, as in take\(\["):
        next(iter(client.claims("orders").stream(lambda: items)))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"verify": [1]}, "verify is a function"),
        ({"key": "id"}, "key is a function"),
        ({"params": (1,)}, "params are of a query"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_is_claimed(
    client: dibs.Client, options: dict[str, Any], words: str
) -> None:
    """Whether one takes or streams; what is a query's alone is not passed over in silence."""
    claims = client.claims("orders")
    with pytest.raises(dibs.InvalidOption, match=words):
        claims.take([], **options)
    with pytest.raises(dibs.InvalidOption, match=words):
        claims.stream(list, **options)
    with pytest.raises(dibs.InvalidOption, match="limit says how many"):
        claims.take([1, 2, 3], n=2)  # type: ignore[call-overload]
    with pytest.raises(dibs.InvalidOption, match="keys is a list"):
        claims.revive(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("told", [None, True, "12", 1])
def test_verify_returns_what_is_due(client: dibs.Client, other: dibs.Client, told: Any) -> None:
    """Forgotten, or answered for each item as a filter does, that is said in its words; and nothing stays held."""
    with pytest.raises(dibs.InvalidOption, match="verify returns what is still due of the list"):
        client.claims("orders").take([1, 2], verify=lambda won: told)
    assert not other.leases("orders/")


def test_an_error_that_cannot_be_told_is_a_failure_all_the_same(client: dibs.Client, other: dibs.Client) -> None:
    """Whether an item has failed does not depend on the __str__ of somebody's exception."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    claims = client.claims("orders", max_tries=1)
    with claims.take([1]) as batch:
        next(batch).fail(Mute())
    assert [item.error for item in claims.dead()] == ["Mute: (its text could not be had: RuntimeError)"]


def test_ctrl_c_while_tries_are_counted_gives_back(sqlite_url: str, other: dibs.Client) -> None:
    """Ctrl-C while tries are being counted leaves nothing held, and has cost none."""
    between = Between(sqlite_url)
    holdup = Holdup(lambda requests: any("~tries" in request.name for request in requests))
    between.after = holdup

    def interrupt() -> None:
        assert holdup.reached.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        holdup.go_on()

    with between.client() as client:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.claims("rows", max_tries=1).take(range(50))
        thread.join()
        eventually(lambda: not other.leases("rows/"), "given back")
    with other.claims("rows", max_tries=1).take(range(50)) as batch:
        assert (len(batch), batch.busy) == (50, [])


def test_what_an_old_holder_sends_late_forgets_no_tries(client: dibs.Client, other: dibs.Client) -> None:
    """The end of a tally that arrives when another counts on finds another claim there, and changes nothing."""
    client.ping()
    old = client.claims("rows", ttl=0.6, max_tries=2).take([1])
    (late,) = old.items
    eventually(lambda: not other.leases("rows/"), "expired")
    with other.claims("rows", max_tries=2).take([1]) as batch:
        assert late._try is not None
        assert late._hold.first is not None
        session = client._desk.session()
        for request in (Release(late._try.name, late._try.claim_id), late._hold.first):
            ask = session.new_ask(request)
            session.queue(ask)
            assert session.wait(ask, 5)
            assert ask.outcome == GONE
        next(batch).fail()
    assert [item.tries for item in other.claims("rows").dead()] == [2]
    old.release()


def test_a_fork_counts_nothing(client: dibs.Client, other: dibs.Client) -> None:
    """In a forked child an item can neither be done nor fail, and its tries stay what they are."""
    with client.claims("rows", max_tries=1).take([1, 2]) as batch:

        def child() -> None:
            for end in (batch.items[0].done, batch.items[1].fail):
                with pytest.raises(dibs.LeaseLost, match="not to its fork"):
                    end()

        in_a_fork(child)
        assert [item.held for item in batch.items] == [True, True]
        batch.items[0].done()
    assert not other.claims("rows").dead()
    with other.claims("rows", max_tries=1).take([1, 2]) as batch:
        assert batch.won == [1, 2]


def test_what_is_over_before_it_is_counted_costs_no_try(sqlite_url: str, other: dibs.Client) -> None:
    """A take that was held up for longer than its ttl counts nothing: others may have won the items since."""
    with other.claims("rows", max_tries=3).take([1]) as first:
        first.items[0].fail()
    between = Between(sqlite_url)

    def hold_up(requests: Sequence[Request]) -> None:
        if any("~tries" in request.name for request in requests):
            time.sleep(1.2)  # a ttl is over by time alone

    between.before = hold_up
    with between.client() as client, client.claims("rows", ttl=1, max_tries=3).take([1]) as late:
        assert not late.items[0].held
        with other.claims("rows", max_tries=3).take([1]) as batch:
            (item,) = batch.items
            assert item._try is not None
            assert item._try.tries == 2


def test_an_item_that_another_has_revived_keeps_its_new_tries(
    client: dibs.Client, other: dibs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two who revive at once, the slower one leaves alone what somebody has won again meanwhile."""
    claims = client.claims("rows", max_tries=2)
    for _ in range(2):
        with claims.take([1]) as batch:
            batch.items[0].fail()
    stale = claims.dead()
    assert [item.key for item in stale] == ["1"]
    assert other.claims("rows").revive() == 1
    with claims.take([1]) as batch:

        def listing(*_: object) -> Steps[list[DeadItem]]:
            yield from ()
            return stale

        monkeypatch.setattr("dibs.tries.listing", listing)
        assert other.claims("rows").revive() == 0
        monkeypatch.undo()
        batch.items[0].fail()
    with claims.take([1]) as batch:
        batch.items[0].fail()
    assert [item.tries for item in claims.dead()] == [2]


def test_what_the_end_of_the_client_gave_back_is_left(client: dibs.Client) -> None:
    """Who goes by ``batch.left`` does again what was not finished, whoever has given it back."""
    with client.claims("rows").take(range(4)) as batch:
        batch.items[0].done()
        batch.items[1].skip()
        client.close()
        assert batch.left == [2, 3]
    assert (batch.left, batch.lost) == ([2, 3], [])


def test_a_failure_that_came_too_late_is_lost(client: dibs.Client, other: dibs.Client) -> None:
    """An item that failed, and was found gone when it was given back, is lost and nothing else."""
    with client.claims("rows").take([1, 2]) as batch:
        record = other.holder("rows/1")
        assert record is not None
        other.break_lease("rows/1", fencing_token=record.fencing_token, now=True)
        for item in batch.items:
            item.fail()
    assert (batch.failed, batch.lost, batch.left) == ([2], [1], [])
