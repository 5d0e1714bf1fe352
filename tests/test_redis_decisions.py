"""Who gets permits on Redis: the script decides and writes what Python does, and answers as the memory store does."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from dibs.connecting import locate
from dibs.store import LINE_GRACE_S, PERMITS_MAX, Acquire, Granted, Held, Mismatch, Outcome
from dibs.stores.permits import Grant, Holding, State, Waiting, decide
from tests import test_store_machine as machine
from tests.servers.redis import RedisServer
from tests.test_redis import opened
from tests.test_redis_permits import FREE, IDLE_KEEP_MS, assert_counted, make_over, now_on, rows_of
from tests.waits import soon


class Kept(NamedTuple):
    """What is kept of a name: its state, rows whose time is over, how many slots were in use; perhaps not the set."""

    state: State
    over: tuple[tuple[int, str, int], ...] = ()
    last_slot: int = 0
    with_set: bool = True


@st.composite
def names_kept(draw: st.DrawFn) -> Kept:
    """What may be kept of a name. Who waits is alive or dead by a wide margin, as the server's time goes on."""
    permits = draw(st.sampled_from([None, 0, 2, 3, 5, PERMITS_MAX]))
    slots = draw(st.lists(st.sampled_from(["held", "held", "over", "free"]), max_size=7)) if permits else []
    if not {"held", "over"} & set(slots):
        slots = []
    ends = draw(st.permutations([30.0 + 10 * place for place in range(len(slots))]))
    mine = draw(st.sampled_from([None, None, *(slot for slot, kind in enumerate(slots, 1) if kind != "free")]))
    holdings, over = [], []
    for slot, kind in enumerate(slots, 1):
        claim, take = "me" if slot == mine else f"a-{slot}", draw(st.integers(1, 3))
        if kind == "held":
            holdings.append(Holding(slot, claim, take, f"h {slot}", slot, 1000.0, ends[slot - 1]))
        elif kind == "over":
            over.append((slot, claim, take))
    if holdings and holdings[-1].claim_id != "me" and draw(st.booleans()):
        holdings[-1] = holdings[-1]._replace(claim_id="")  # it was broken, or is kept
    line = [
        Waiting(10 * place, f"w-{place}", draw(st.integers(1, 3)), draw(st.sampled_from([0.1, 60.0])))
        for place in range(1, draw(st.integers(1, 5)))
    ]
    with_set = draw(st.sampled_from([True, True, False]))
    return Kept(State(permits, 7, holdings, line), tuple(over), len(slots), with_set)


@settings(max_examples=400)
@given(
    name=names_kept(),
    permits=st.sampled_from([2, 3, 5, PERMITS_MAX]),
    take=st.integers(1, 3),
    resize=st.booleans(),
    claim=st.sampled_from(["me", "me", "w-1", "w-3"]),
    ticket=st.sampled_from([None, 5, 10, 20, 25, 45]),
    waits=st.booleans(),
)
@example(Kept(State(3, 7, [], [Waiting(10, "w-1", 2, 0.1)])), 3, 2, False, "me", None, True)
@example(Kept(State(3, 7, [], [Waiting(10, "w-1", 2, 60.0)])), 3, 2, False, "me", None, True)
@example(Kept(State(None, 7, [], [])), 2, 3, False, "me", None, True)
def test_the_script_decides_as_python_does(
    redis: RedisServer,
    name: Kept,
    permits: int,
    take: int,
    resize: bool,
    claim: str,
    ticket: int | None,
    waits: bool,
) -> None:
    """acquire_permits.lua gives the outcome of `permits.decide` for any state of a name, and writes what it says."""
    state, key = name.state, "dibs:lease:{n:x}"
    request = Acquire("n:x", claim, 45, "h", None, "w" if waits else None, ticket, permits, take, resize)
    with redis.client(db=3) as look, opened(redis.url()[:-1] + "3") as store:
        look.flushdb()
        began = time.monotonic()
        lay_out(look, name)
        before = rows_of(look, key, 9)
        wanted = decide(state, request)
        outcome: Outcome
        (outcome,) = store.act([request], soon())
        took = time.monotonic() - began
        rows = rows_of(look, key, 9)
        line = look.zrange("dibs:line:{n:x}", 0, -1, withscores=True)
        kept = look.hget(key, "permits")
        if state.permits != 0:
            assert_counted(look, key)
        if isinstance(wanted, Mismatch):
            assert outcome == wanted
            assert rows == before
            assert kept == (str(state.permits) if state.permits else None)
        elif isinstance(wanted, Grant):
            assert isinstance(outcome, Granted)
            assert outcome.slot == wanted.slot
            if wanted.again is not None:
                assert (outcome.fencing_token, outcome.acquired_at) == wanted.again[4:6]
            row = rows.pop(wanted.slot)
            assert (row["claim_id"], row["take"]) == (claim, str(wanted.take))
            assert row["fencing_token"] == str(outcome.fencing_token)
            assert sorted(rows) == sorted(h.slot for h in state.holdings if h.slot != wanted.slot)
            assert all(row == before[slot] for slot, row in rows.items())
            assert kept == str(wanted.permits)
            assert claim not in dict(line)
            place = min([10**9 if ticket is None else ticket, *(w.ticket for w in state.line if w.claim_id == claim)])
            if wanted.again is None:
                left = [w.claim_id for w in state.line if w.ticket < place and w.claim_id != claim]
                alive = [w.claim_id for w in state.line if w.silent_for < LINE_GRACE_S]
                assert [who for who, score in line if score < place] == [who for who in left if who in alive]
        else:
            assert isinstance(outcome, Held)
            assert rows == {holding.slot: before[holding.slot] for holding in state.holdings}
            assert (outcome.holder, outcome.acquired_at, outcome.ahead) == (
                wanted.holder,
                wanted.acquired_at,
                wanted.ahead,
            )
            if wanted.holder is not None:
                assert outcome.fencing_token == wanted.fencing_token
            assert wanted.free_in - took - 0.01 <= outcome.free_in <= wanted.free_in + 0.01
            assert kept == str(permits)
            own = next((w.ticket for w in state.line if w.claim_id == claim), None)
            if waits and (own is not None or ticket is not None):
                assert outcome.ticket == (own if own is not None else ticket)
            assert (claim in dict(line)) == (waits or own is not None)


def lay_out(look: Any, name: Kept) -> None:
    """Write what is kept of a name, as the store does."""
    now, key, state = now_on(look), "dibs:lease:{n:x}", name.state
    if state.permits == 0:
        times = {"acquired_at": now, "expires_at": now + 60}
        look.hset(key, mapping={"claim_id": "l-1", "holder": "h", "fencing_token": 7, **times})
    rows = [(h.slot, h.claim_id, h.take, h.fencing_token, h.holder, now + h.ends_in) for h in state.holdings]
    rows += [(slot, claim, take, 100 + slot, "gone", now - slot) for slot, claim, take in name.over]
    head: dict[str, Any] = {}
    slots: dict[Any, float] = {slot: slot - FREE for slot in range(1, name.last_slot + 1)}
    for slot, claim, take, token, holder, until in rows:
        row = {"claim_id": claim, "holder": holder, "fencing_token": token, "take": take}
        look.hset(f"{key}{slot}", mapping=row | {"acquired_at": 1000.0, "expires_at": f"{until:.6f}"})
        slots[slot] = float(f"{until:.6f}")
        head |= {f"token:{token}": slot, **({f"claim:{claim}": slot} if claim else {})}
    if state.permits:
        taken = sum(take for _, _, take, _, _, _ in rows)
        if rows:
            look.hset(key, mapping={"permits": state.permits, "taken": taken, "last_slot": name.last_slot, **head})
        else:
            look.hset(key, mapping={"permits": state.permits, "free_since": now})
            look.pexpire(key, IDLE_KEEP_MS)
    if slots and name.with_set:
        look.zadd(f"{key}:slots", slots)
    for waiter in state.line:
        look.zadd("dibs:line:{n:x}", {waiter.claim_id: waiter.ticket})
        look.hset("dibs:waiters:{n:x}", waiter.claim_id, f"{now - waiter.silent_for:.6f} {waiter.take} w")


class RedisComparison(machine.PermitComparison):
    """Redis beside the memory store, which is made to forget a lock that nobody holds or waits for, as Redis does."""

    look: Any
    keys: str

    def key(self, name: str) -> str:
        return f"{self.keys}:lease:{{{self.prefix}{name}}}"

    def act(self, *requests: Any) -> None:
        for request in requests:
            self.forget()
            super().act(self.alone(request))
        self.forget()

    def forget(self) -> None:
        shelf = self.ours._shelf
        for name, permit in list(shelf.permits.items()):
            if permit.claim_id is None and name not in shelf.lines:
                shelf.token_floor = max(shelf.token_floor, shelf.permits.pop(name).fencing_token)

    @rule(client=st.integers(0, 5), name=machine.names, limit=st.integers(1, 7), take=st.sampled_from([1, 1, 2, 4]))
    def resize(self, client: int, name: str, limit: int, take: int) -> None:
        self.act(self.acquiring(client, name, limit, take, resize=True))

    @rule(name=machine.names, which=st.integers(0, 6))
    def time_is_over(self, name: str, which: int) -> None:
        """One who holds a permit is not heard of until its time is over."""
        pool = self.ours._shelf.pools.get(self.prefix + name)
        holdings = pool.holdings if pool is not None else {}
        held = sorted(slot for slot, (_, permit) in holdings.items() if permit.claim_id is not None)
        if held:
            slot = held[which % len(held)]
            holdings[slot][1].expires_at = self.ours._shelf.now() - 0.001
            make_over(self.look, self.key(name), slot)

    @rule(name=machine.names)
    def lose_set(self, name: str) -> None:
        self.look.delete(f"{self.key(name)}:slots")

    @invariant()
    def all_is_counted(self) -> None:
        keys = [self.key(name) for name in machine.NAMES] if hasattr(self, "theirs") else []
        pipeline = self.look.pipeline(transaction=False)
        for key in keys:
            pipeline.hget(key, "last_slot").zcard(f"{key}:slots")
        told = pipeline.execute()
        for key, last_slot, slots in zip(keys, told[::2], told[1::2], strict=True):
            if last_slot is not None and int(last_slot) == slots:
                assert_counted(self.look, key)


@pytest.mark.parametrize("part", range(2))  # where many share a processor, all in one takes minutes
def test_redis_answers_on_permits_as_memory_does(redis: RedisServer, redis_url: str, part: int) -> None:
    """The Redis store gives the memory store's outcomes for locks and names with permits, whatever is asked."""
    with redis.client() as look:
        how = {
            "open_store": staticmethod(locate(redis_url)[0].open),
            "look": look,
            "keys": redis_url.partition("prefix=")[2],
        }
        compared = type("Comparison", (RedisComparison,), how)
        run_state_machine_as_test(compared, settings=settings(max_examples=100, stateful_step_count=40, deadline=None))
