"""Permits on Redis: what is kept of them, what damage to it does and what a take costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import dibs
from dibs.store import (
    ANY_SLOT,
    GONE,
    LINE_GRACE_S,
    PERMITS_MAX,
    RELEASED,
    Acquire,
    Granted,
    Held,
    Mismatch,
    Release,
    Renew,
    Renewed,
    Store,
    Transfer,
)
from tests.servers.redis import RedisServer
from tests.test_redis import opened
from tests.waits import soon

# How much lower than any time a free slot's number stands in the set of a name's slots.
FREE = 10**10
IDLE_KEEP_MS = 2 * 3600 * 1000


@pytest.fixture
def prefix(redis_url: str) -> str:
    return redis_url.partition("prefix=")[2]


def now_on(look: Any) -> float:
    seconds, micros = look.time()
    return float(seconds + micros / 1e6)


def rows_of(look: Any, key: str, slots: int) -> dict[int, dict[str, str]]:
    """The rows of these many slots, of those that have one."""
    pipeline = look.pipeline(transaction=False)
    for slot in range(1, slots + 1):
        pipeline.hgetall(f"{key}{slot}")
    return {slot: row for slot, row in enumerate(pipeline.execute(), 1) if row}


def assert_counted(look: Any, key: str) -> None:
    """What is kept to find a name's rows says what they say; without any it is forgotten after a while."""
    pipeline = look.pipeline(transaction=False)
    pipeline.hgetall(key).zrange(f"{key}:slots", 0, -1, withscores=True).pttl(key).pttl(f"{key}:slots")
    head, scores, head_kept, slots_kept = pipeline.execute()
    last = int(head.get("last_slot", 0))
    rows = rows_of(look, key, last)
    slots = {int(slot): score for slot, score in scores}
    assert slots == {
        slot: float(rows[slot]["expires_at"]) if slot in rows else slot - FREE for slot in range(1, last + 1)
    }
    assert int(head.get("taken", 0)) == sum(int(row["take"]) for row in rows.values())
    found = {field: int(value) for field, value in head.items() if ":" in field}
    claims = {f"claim:{row['claim_id']}": slot for slot, row in rows.items() if row["claim_id"]}
    assert found == claims | {f"token:{row['fencing_token']}": slot for slot, row in rows.items()}
    if rows:
        assert (head_kept, slots_kept) == (-1, -1)
    else:
        assert set(head) <= {"permits", "free_since"}
        assert 0 < head_kept <= IDLE_KEEP_MS


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_permits_are_hashes_that_people_can_read(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """The name's own key says how many permits there are and who has which; each slot has a row like a lock's."""
    key = f"{prefix}:lease:{{default:gpu}}"
    with dibs.connect(redis_url) as client, redis.client() as look:
        semaphore = client.semaphore("gpu", 3, info={"why": "test"})
        first, second = semaphore.acquire(), semaphore.acquire()
        assert first is not None
        assert second is not None
        assert look.hgetall(key) == {
            "permits": "3",
            "taken": "2",
            "last_slot": "2",
            **{f"claim:{lease.claim_id}": str(lease.slot) for lease in (first, second)},
            **{f"token:{lease.fencing_token}": str(lease.slot) for lease in (first, second)},
        }
        row = look.hgetall(f"{key}2")
        assert (row["holder"], row["fencing_token"]) == (second.holder, str(second.fencing_token))
        assert (row["take"], row["info"]) == ("1", '{"why":"test"}')
        assert look.zscore(f"{key}:slots", 2) == float(row["expires_at"])
        assert (look.ttl(key), look.ttl(f"{key}1"), look.ttl(f"{key}2")) == (-1, -1, -1)
        first.release()
        assert (look.exists(f"{key}1"), look.hget(key, "last_slot"), look.ttl(key)) == (0, "2", -1)
        assert_counted(look, key)
        second.release()
        # Nobody holds one: the number of permits is known for a while, so that another number is still told.
        assert sorted(look.keys(f"{prefix}:*")) == [key, f"{prefix}:token"]
        assert (sorted(look.hgetall(key)), look.hget(key, "permits")) == (["free_since", "permits"], "3")
        assert 0 < look.pttl(key) <= IDLE_KEEP_MS
        with semaphore:
            assert look.ttl(key) == -1
        assert client.purge(0) == 1
        assert look.keys(f"{prefix}:*") == [f"{prefix}:token"]


def test_deleting_the_name_ends_all_its_permits(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """Rows of slots whose name is gone count for nothing: they are neither renewed nor in anybody's way."""
    with opened(redis_url) as store:
        asked = [Acquire("n:x", f"a-{i}", 60, "h", "{}", permits=3) for i in range(3)]
        store.act(asked, soon())
        redis.ask("DEL", f"{prefix}:lease:{{n:x}}")
        assert store.act([Renew("n:x", "a-1", 60, 2), Release("n:x", "a-2", 3)], soon()) == [GONE, GONE]
        first, second = (Acquire("n:x", f"b-{i}", 60, "h", permits=2) for i in range(2))
        assert [o.slot for o in store.act([first, second], soon()) if isinstance(o, Granted)] == [1, 2]
        assert store.act([Renew("n:x", "a-1", 60, 2), Renew("n:x", "a-2", 60, 3)], soon()) == [GONE, GONE]
        assert [(lease.slot, lease.info) for lease in store.leases("n:", "n;", soon())] == [(1, None), (2, None)]


def test_dead_holders_of_permits_leave_nothing(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """Rows of permits whose time is over go with the next grant, or with a purge of those that are free long enough."""
    with opened(redis_url) as store:
        asked = [Acquire("n:x", f"a-{i}", 0.05, "h", permits=5) for i in range(5)]
        store.act([*asked, Acquire("n:y", "a-1", 0.05, "h", permits=5)], soon())
        time.sleep(0.1)  # their time is over
        assert store.leases("n:", "n;", soon()) == []
        store.act([Acquire("n:x", "b-1", 60, "h", permits=5)], soon())
        with redis.client() as look:
            key = f"{prefix}:lease:{{n:x}}"
            assert sorted(look.keys(f"{key}*")) == [key, f"{key}1", f"{key}:slots"]
            assert_counted(look, key)
            assert look.hget(key, "last_slot") == "1"
        assert (store.purge("", "\U0010ffff", 3600, soon()), store.purge("", "\U0010ffff", 0, soon())) == (0, 1)
        with redis.client() as look:
            assert not look.keys(f"{prefix}:lease:{{n:y}}*")


def test_a_lock_and_permits_in_one_call(redis_url: str) -> None:
    """Asked for in one call as a lock and as permits, a name is what it was first; only a name that is free changes."""
    with opened(redis_url) as store:
        lock, pool = Acquire("n:x", "a-1", 60, "h"), Acquire("n:x", "a-2", 60, "h", permits=2)
        outcomes = store.act([lock, pool, Release("n:x", "a-1"), pool, lock], soon())
        assert [type(outcome).__name__ for outcome in outcomes] == "Granted Mismatch Released Granted Mismatch".split()
        assert (outcomes[1], outcomes[4]) == (Mismatch(0), Mismatch(2))
        assert len(store.leases("n:", "n;", soon())) == 1
        other = Acquire("n:y", "a-1", 60, "h")
        outcomes = store.act([other, Release("n:y", "a-1", 2), Renew("n:y", "a-1", 60, 2)], soon())
        assert outcomes[1:] == [GONE, GONE]
        assert store.act([Release("n:y", "a-1", ANY_SLOT)], soon()) == [RELEASED]
        store.act([other, Acquire("n:y", "b-1", 60, "h", None, "b"), Release("n:y", "a-1")], soon())
        assert store.act([pool._replace(name="n:y")], soon()) == [Mismatch(0)]  # somebody waits for the lock
        store.act([Release("n:y", "b-1", 1, 0)], soon())
        assert isinstance(store.act([pool._replace(name="n:y")], soon())[0], Granted)


def test_a_grant_that_leaves_permits_wakes_the_next(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """A release tells the first in line who still asks; its grant tells the next as long as permits are left."""
    with opened(redis_url) as store, redis.client() as look, look.pubsub() as listener:
        store.act([], soon())
        listener.psubscribe(f"{prefix}:wake:*")

        def heard() -> list[str]:
            messages = iter(lambda: listener.get_message(timeout=0.1), None)
            return [m["channel"].rpartition(":")[2] for m in messages if m["type"] == "pmessage"]

        def asking(who: str, take: int = 1) -> Acquire:
            return Acquire("n:x", f"{who}-1", 60, "h", None, who, permits=3, take=take)

        def acquire(who: str) -> bool:
            return isinstance(store.act([asking(who)], soon())[0], Granted)

        store.act([asking("a", 3), asking("dead")], soon())
        time.sleep(LINE_GRACE_S + 0.1)  # who has not asked again is dead
        store.act([asking("b"), asking("c"), asking("d"), asking("e")], soon())
        assert heard() == []
        store.act([Release("n:x", "a-1")], soon())
        assert heard() == ["b"]
        assert (acquire("b"), heard()) == (True, ["c"])
        assert (acquire("c"), heard()) == (True, ["d"])
        assert (acquire("d"), heard()) == (True, [])
        store.act([asking("f")], soon())
        store.act([Release("n:x", "e-1", ANY_SLOT, 0)], soon())  # who gives up its place may have held others back
        assert heard() == ["f"]
        second = store.leases("n:x", "n:x\x01", soon())[1]
        assert store.break_lease("n:x", second.fencing_token, True, soon())
        assert heard() == ["f"]


def test_out_of_memory_permits_can_be_given_back(own_redis: RedisServer) -> None:
    """Under OOM no permit is granted; those there are can be renewed, seen, and given back in part or whole."""
    with opened(own_redis.url()) as store:
        store.act([Acquire("n:x", f"a-{i}", 60, "h", permits=5, take=2) for i in range(2)], soon())
        own_redis.ask("CONFIG", "SET", "maxmemory", "1kb")
        for name in ("n:x", "n:new"):
            (outcome,) = store.act([Acquire(name, "b-1", 60, "h", permits=5)], soon())
            assert isinstance(outcome, dibs.StoreUnavailable)
            assert not outcome.maybe_applied
        assert isinstance(store.act([Renew("n:x", "a-1", 70, 2)], soon())[0], Renewed)
        (fewer,) = store.act([Acquire("n:x", "a-0", 60, "h", permits=5, take=1)], soon())
        assert isinstance(fewer, Granted)
        assert [(lease.slot, lease.take) for lease in store.leases("n:", "n;", soon())] == [(1, 1), (2, 2)]
        assert store.act([Release("n:x", "a-1", 2), Release("n:x", "a-0", 1, None, 60, "{}")], soon()) == [RELEASED] * 2
        with own_redis.client() as look:
            assert_counted(look, "dibs:lease:{n:x}")
        own_redis.ask("CONFIG", "SET", "maxmemory", "0")
        assert [(lease.slot, lease.info) for lease in store.leases("n:", "n;", soon())] == [(1, "{}")]
        assert isinstance(store.act([Acquire("n:x", "b-1", 60, "h", permits=5, take=4)], soon())[0], Granted)


def test_out_of_memory_a_refused_acquire_changes_nothing(own_redis: RedisServer) -> None:
    """Under OOM an acquire leaves all as it is, those whose time is over included; whoever holds one can end it."""
    with opened(own_redis.url()) as store, own_redis.client() as look:
        store.act([Acquire("n:x", f"a-{i}", 60, "h", permits=9) for i in range(5)], soon())
        store.act([Acquire("n:x", f"b-{i}", 0.05, "h", permits=9) for i in range(3)], soon())
        store.act([Release("n:x", "a-1", 2)], soon())
        time.sleep(0.1)  # the time of three of them is over
        own_redis.ask("CONFIG", "SET", "maxmemory", "1kb")

        def everything() -> dict[str, Any]:
            return {key: look.dump(key) for key in look.scan_iter()}

        before = everything()
        moved = Transfer("n:x", "t-1", 60, "h", "a-0", None, 1, 9)
        for request in (Acquire("n:x", "c-1", 60, "h", permits=9), moved):
            (outcome,) = store.act([request], soon())
            assert isinstance(outcome, dibs.StoreUnavailable)
        assert everything() == before
        tokens = [lease.fencing_token for lease in store.leases("n:", "n;", soon())]
        assert store.break_lease("n:x", tokens[0], False, soon())
        assert store.break_lease("n:x", tokens[0], True, soon())
        assert store.act([Release("n:x", "a-2", 3)], soon()) == [RELEASED]
        assert isinstance(store.act([Renew("n:x", "a-3", 70, 4)], soon())[0], Renewed)
        assert_counted(look, "dibs:lease:{n:x}")
        own_redis.ask("CONFIG", "SET", "maxmemory", "0")


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_key_that_is_not_ours_in_a_slot(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """A key of another type where a slot's row should be is left alone; whoever would need that slot is told."""
    with opened(redis_url) as store, redis.client() as look:
        store.act([Acquire("n:x", f"a-{i}", 60, "h", permits=4) for i in range(2)], soon())
        for slot in (2, 4):
            look.delete(f"{prefix}:lease:{{n:x}}{slot}")
            look.set(f"{prefix}:lease:{{n:x}}{slot}", "by somebody")
        asked = [Acquire(name, f"b-{i}", 60, "h", permits=4) for i in (1, 2) for name in ("n:x", "n:y")]
        outcomes: list[Any] = list(store.act(asked, soon()))
        assert [outcome.slot for outcome in (outcomes[0], outcomes[1], outcomes[3])] == [3, 1, 2]
        assert isinstance(outcomes[2], dibs.SetupRequired)
        assert store.act([Renew("n:x", "a-1", 60, 2), Release("n:x", "a-1", ANY_SLOT)], soon()) == [GONE, GONE]
        assert [lease.slot for lease in store.leases("n:x", "n:x\x01", soon())] == [1, 3]
        make_over(look, f"{prefix}:lease:{{n:x}}", 2)
        assert isinstance(store.act([asked[2]], soon())[0], dibs.SetupRequired)
        assert store.act([Release("n:x", "a-0", 1), Release("n:x", "b-1", 3)], soon()) == [RELEASED] * 2
        for slot in (2, 4):
            assert look.get(f"{prefix}:lease:{{n:x}}{slot}") == "by somebody"


def make_over(look: Any, key: str, slot: int) -> None:
    """Let the time of a slot be over."""
    until = f"{now_on(look) - 0.001:.6f}"
    if look.type(f"{key}{slot}") == "hash":
        look.hset(f"{key}{slot}", "expires_at", until)
    look.zadd(f"{key}:slots", {str(slot): until})


def test_a_deleted_row_counts_until_its_time_is_over(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """Who deletes the row of a slot ends the lease; its permits come back when its time is over, and not before."""
    key = f"{prefix}:lease:{{n:x}}"
    with opened(redis_url) as store, redis.client() as look:
        store.act([Acquire("n:x", f"a-{i}", 60, "h", permits=4, take=2) for i in range(2)], soon())
        look.delete(f"{key}1")
        assert store.act([Renew("n:x", "a-0", 60, 1), Release("n:x", "a-0", ANY_SLOT)], soon()) == [GONE, GONE]
        assert [lease.slot for lease in store.leases("n:", "n;", soon())] == [2]
        asked = Acquire("n:x", "b-1", 60, "h", permits=4)
        assert isinstance(store.act([asked], soon())[0], Held)
        assert isinstance(store.act([asked._replace(claim_id="a-0", take=2)], soon())[0], Held)
        make_over(look, key, 1)
        outcomes = store.act([asked, asked._replace(claim_id="a-0", take=2)], soon())
        assert [type(outcome) for outcome in outcomes] == [Granted, Held]
        assert_counted(look, key)


@pytest.mark.parametrize("ended", [1, 2, 3])
def test_a_lost_set_is_counted_anew(redis: RedisServer, redis_url: str, prefix: str, ended: int) -> None:
    """Without the set of slots, whoever has a row keeps its permits and its slot, and every verb does its work."""
    key = f"{prefix}:lease:{{n:x}}"
    with opened(redis_url) as store, redis.client() as look:
        asked = [Acquire("n:x", f"a-{i}", 60, "h", permits=4) for i in range(4)]
        store.act(asked, soon())
        store.act([Release("n:x", "a-3", 4)], soon())
        more = Acquire("n:x", "b-1", 60, "h", permits=3, resize=True)
        for lose in (lambda: look.delete(f"{key}:slots"), lambda: look.zrem(f"{key}:slots", 2)):
            lose()
            assert isinstance(store.act([more], soon())[0], Held)
            assert_counted(look, key)
        look.delete(f"{key}:slots")
        assert [lease.slot for lease in store.leases("n:", "n;", soon())] == [1, 2, 3]
        assert store.purge("", "\U0010ffff", 0, soon()) == 0
        look.delete(f"{key}:slots")
        assert isinstance(store.act([Renew("n:x", "a-1", 60, 2)], soon())[0], Renewed)
        assert store.act([Release("n:x", f"a-{ended - 1}", ended)], soon()) == [RELEASED]
        (outcome,) = store.act([more], soon())
        assert isinstance(outcome, Granted)
        assert outcome.slot == ended
        assert_counted(look, key)
        look.delete(f"{key}:slots", *(f"{key}{slot}" for slot in (1, 2, 3)))
        assert store.purge("", "\U0010ffff", 0, soon()) == 1
        assert look.keys(f"{prefix}:*") == [f"{prefix}:token"]


def test_what_is_left_of_a_deleted_name_goes_with_the_next_grant(
    redis: RedisServer, redis_url: str, prefix: str
) -> None:
    """Rows and slots whose name was deleted by hand are deleted when the name is used again."""
    key = f"{prefix}:lease:{{n:x}}"
    with opened(redis_url) as store, redis.client() as look:
        store.act([Acquire("n:x", f"a-{i}", 60, "h", permits=4) for i in range(4)], soon())
        look.delete(key)
        store.act([Acquire("n:x", "b-1", 60, "h", permits=2)], soon())
        assert sorted(look.keys(f"{key}*")) == [key, f"{key}1", f"{key}:slots"]
        assert_counted(look, key)


# -- what it costs ----------------------------------------------------------------------------------------------------


def test_the_work_does_not_grow_with_the_holders(own_redis: RedisServer) -> None:
    """Every verb runs as many commands among 600 who hold permits as among 20."""

    def commands(store: Store, name: str, held: int) -> list[dict[str, int]]:
        def asking(claim: str, **how: Any) -> Acquire:
            return Acquire(name, claim, 60, "h", **{"permits": held + 1, **how})

        def counted(act: Callable[[], object]) -> dict[str, int]:
            look.config_resetstat()
            act()
            statistics = look.info("commandstats")
            ran = {command.removeprefix("cmdstat_"): told["calls"] for command, told in statistics.items()}
            return {command: calls for command, calls in ran.items() if command not in ("info", "config|resetstat")}

        def of(request: Any) -> dict[str, int]:
            return counted(lambda: store.act([request], soon()))

        for start in range(0, held, 100):
            store.act([asking(f"a-{i}") for i in range(start, min(held, start + 100))], soon())
        store.act([Release(name, "a-4", 5)], soon())
        tokens = [lease.fencing_token for lease in store.leases(name, name + "\x01", soon())]
        return [
            of(asking("b-1")),
            of(asking("b-1")),
            of(asking("b-2")),
            of(asking("b-3")),
            of(asking("b-3", permits=2)),
            of(Renew(name, "a-7", 70, 8)),
            of(Transfer(name, "b-5", 70, "h", "a-7", None, 8, held + 1)),
            of(Release(name, "b-1", 5)),
            of(Release(name, "b-2", ANY_SLOT)),
            of(Release(name, "b-3", ANY_SLOT)),
            of(Release(name, "a-8", 9, None, 60)),
            counted(lambda: store.break_lease(name, tokens[10], False, soon())),
            counted(lambda: store.break_lease(name, tokens[10], True, soon())),
            counted(lambda: store.break_lease(name, 1, True, soon())),
        ]

    with opened(own_redis.url()) as store, own_redis.client() as look:
        commands(store, "n:warm", 20)  # the server learns the scripts
        assert commands(store, "n:many", 600) == commands(store, "n:few", 20)


def test_a_crowd_that_is_over_at_once_is_counted_out(redis: RedisServer, redis_url: str, prefix: str) -> None:
    """More rows than one command takes words: counted anew when the set is lost, and counted out by the next grant."""
    key = f"{prefix}:lease:{{n:x}}"
    with opened(redis_url) as store, redis.client() as look:
        asked = [Acquire("n:x", f"a-{i}", 60, "h", permits=PERMITS_MAX) for i in range(1201)]
        store.act(asked, soon(60))
        look.delete(f"{key}:slots")
        store.act(asked[:1], soon())
        assert_counted(look, key)
        for slot in range(2, 1202):
            make_over(look, key, slot)
        (outcome,) = store.act([asked[0]._replace(claim_id="b-1")], soon())
        assert isinstance(outcome, Granted)
        assert outcome.slot == 2
        assert_counted(look, key)
        assert look.hget(key, "taken") == "2"
