"""Leases that move between real processes: through a pipe and the environment, past deaths, and past lost answers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dibs
from dibs.errors import StoreUnavailable
from dibs.hold import Hold
from dibs.lease import Lease
from dibs.session import Session
from dibs.store import Renew, Transfer
from tests.between import Between
from tests.test_api import in_a_fork
from tests.waits import eventually

TTL_S = 3.0
# What nobody renews must last until its adopter has started, on a machine that has much else to do.
EXPORTED_S = 8.0
# What an end by the ttl may take beyond it: the store's resolution, one poll, and a machine that is busy.
SLACK_S = 8.0

ADOPTER = """
import json, os, sys, dibs
client = dibs.connect(sys.argv[1], ttl=float(sys.argv[2]))
if "STATE" in os.environ:
    state = json.loads(os.environ["STATE"])
else:
    client.ping()  # to start and to connect may take longer than the ttl of what is exported then
    print('"ready"', flush=True)
    state = json.loads(sys.stdin.readline())
lease = client.adopt(state)
print(json.dumps([lease.fencing_token, lease.slot, lease.held, lease.claim_id]), flush=True)
for line in sys.stdin:
    if line == "export\\n":
        print(json.dumps(lease.export()), flush=True)
    elif line == "check\\n":
        print(json.dumps(lease.held), flush=True)
    else:
        lease.release()
        break
"""
EXPORTER = """
import json, sys, dibs
client = dibs.connect(sys.argv[1], ttl=float(sys.argv[2]))
lease = client.lock("moving").acquire(timeout=10)
print(json.dumps(lease.export()), flush=True)
sys.stdin.readline()
"""

STORES = ["sqlite_url", "postgres_url", "mysql_url", "redis_url", "memcached_url", "etcd_url", "zookeeper_url"]


class Process(subprocess.Popen[str]):
    """A process that takes part, and says what it sees."""

    def __init__(self, program: str, *args: str, **env: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", program, *args]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})

    def says(self) -> Any:
        assert self.stdout is not None
        return json.loads(self.stdout.readline())

    def told(self, line: str) -> None:
        assert self.stdin is not None
        self.stdin.write(f"{line}\n")
        self.stdin.flush()


@pytest.fixture
def process() -> Iterator[Callable[..., Process]]:
    """Starts processes that are ended after the test."""
    started: list[Process] = []

    def start(*args: str, **env: str) -> Process:
        started.append(Process(*args, **env))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


@pytest.fixture(params=STORES, ids=[store.partition("_")[0] for store in STORES])
def url(request: pytest.FixtureRequest) -> str:
    """A new, empty place where leases are kept."""
    return str(request.getfixturevalue(request.param))


def ends(client: dibs.Client, name: str) -> float:
    """Seconds until somebody else gets the name."""
    began = time.monotonic()
    lease = client.lock(name).acquire(timeout=TTL_S + SLACK_S)
    assert lease is not None, f"{name!r} was not free within {TTL_S + SLACK_S} s"
    lease.release()
    return time.monotonic() - began


def test_a_child_adopts(url: str, process: Callable[..., Process]) -> None:
    """The parent's lease is over at once, the child's has a greater token; when that dies, the ttl frees the name."""
    with dibs.connect(url, ttl=TTL_S) as client:
        lease = client.lock("moving").acquire(timeout=10)
        assert lease is not None
        child = process(ADOPTER, url, str(TTL_S))
        assert child.says() == "ready"
        state = lease.export()
        assert not lease.held
        child.told(json.dumps(state))
        token, slot, held, claim = child.says()
        assert (slot, held) == (1, True)
        assert token > lease.fencing_token
        assert claim != lease.claim_id
        record = client.holder("moving")
        assert record is not None
        assert int(record.holder.split("/")[1]) == child.pid
        assert client.lock("moving").acquire(timeout=0) is None
        with pytest.raises(dibs.LeaseLost, match="was exported"):
            lease.check()
        child.kill()
        child.wait()
        assert ends(client, "moving") <= TTL_S + SLACK_S


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_the_exporter_may_end(url: str, end: str, process: Callable[..., Process]) -> None:
    """The lease outlives the process that exported it, before it is adopted and afterwards, whatever sessions end."""
    exporter = process(EXPORTER, url, str(EXPORTED_S))
    state = exporter.says()
    if end == "killed":
        exporter.kill()
    else:
        exporter.told("end")
    exporter.wait()
    child = process(ADOPTER, url, str(TTL_S), STATE=json.dumps(state))
    token, *_ = child.says()
    assert token > state["fencing_token"]
    with dibs.connect(url) as client:
        until = time.monotonic() + EXPORTED_S + 2
        while time.monotonic() < until:
            record = client.holder("moving")
            assert record is not None, "the adopter's lease ended with the exporter's session"
            assert record.fencing_token == token
            time.sleep(0.3)
        child.told("check")
        assert child.says() is True
        child.told("release")
        child.wait()
        assert ends(client, "moving") < TTL_S


def test_there_and_back_again(url: str, process: Callable[..., Process]) -> None:
    """A lease may move on as often as one likes; each token is greater than the one before."""
    with dibs.connect(url, ttl=10) as client:
        lease = client.lock("moving").acquire(timeout=10)
        assert lease is not None
        tokens = [lease.fencing_token]
        child = process(ADOPTER, url, "10", STATE=json.dumps(lease.export()))
        tokens.append(child.says()[0])
        child.told("export")
        state = child.says()
        child.told("check")
        assert child.says() is False
        with client.adopt(state) as again:
            tokens.append(again.fencing_token)
        assert tokens == sorted(set(tokens))
        assert client.holder("moving") is None


# -- what can go wrong ------------------------------------------------------------------------------------------------


def test_no_renewal_after_an_export(sqlite_url: str) -> None:
    """``export`` waits for a renewal under way; when it has returned, none of that lease reaches the store any more."""
    between = Between(sqlite_url)
    under_way, go_on = threading.Event(), threading.Event()

    def hold_up(requests: Any) -> None:
        if any(isinstance(request, Renew) for request in requests):
            under_way.set()
            assert go_on.wait(10)

    with between.client(ttl=0.6) as client, dibs.connect(sqlite_url) as other:
        lease = client.lock("renewed").acquire()
        assert lease is not None
        between.before = hold_up
        assert under_way.wait(10)
        states: list[dict[str, Any]] = []
        exporting = threading.Thread(target=lambda: states.append(lease.export()))
        exporting.start()
        time.sleep(0.1)
        assert not lease.held  # the trust was over before the renewal was
        assert not states
        go_on.set()
        exporting.join(10)
        adopted = other.adopt(states[0])
        seen = len(between.calls)
        time.sleep(0.6)
        renewals = [r for call in between.calls[seen:] for r in call if isinstance(r, Renew)]
        assert not renewals
        adopted.check()
        adopted.release()


def test_an_adoption_whose_answer_is_lost(sqlite_url: str) -> None:
    """The transfer is repeated with the same claim, and granted again with the same token."""
    between = Between(sqlite_url)
    lost: list[Any] = []

    def lose(requests: Any) -> None:
        if any(isinstance(request, Transfer) for request in requests) and len(lost) < 2:
            lost.append(requests)
            raise StoreUnavailable("the answer was lost")

    with dibs.connect(sqlite_url) as client, between.client() as other:
        assert other.holder("lost") is None  # the store was reached once
        lease = client.lock("lost").acquire()
        assert lease is not None
        between.after = lose
        with other.adopt(lease.export()) as adopted:
            assert len(lost) == 2
            assert adopted.fencing_token == lease.fencing_token + 1
            adopted.renew()


def test_an_adoption_that_is_never_answered(sqlite_url: str) -> None:
    """StoreUnavailable; what may have been granted is given back as soon as the store is there again."""
    between = Between(sqlite_url)

    def away(requests: Any) -> None:
        if any(isinstance(request, Transfer) for request in requests):
            raise StoreUnavailable("the answer was lost")

    with dibs.connect(sqlite_url) as client, between.client(patience=0.3) as other:
        assert other.holder("unknown") is None
        lease = client.lock("unknown").acquire()
        assert lease is not None
        between.after = away
        with pytest.raises(dibs.StoreUnavailable):
            other.adopt(lease.export())
        eventually(lambda: client.holder("unknown") is None, "it is given back")


def test_what_was_given_back_on_its_way_is_no_lease(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sleeps just then may find out first that it is over: whoever adopts it is told."""
    shipped = Lease.__init__

    def over_by_then(lease: Lease, session: Session, hold: Hold, name: str) -> None:
        session.keeper.give_back(hold)  # as the renewer does
        shipped(lease, session, hold, name)

    with dibs.connect(sqlite_url) as client:
        lease = client.lock("a").acquire()
        assert lease is not None
        state = lease.export()
        monkeypatch.setattr(Lease, "__init__", over_by_then)
        with pytest.raises(dibs.LeaseLost, match="slept until it had ended"):
            client.adopt(state)
        monkeypatch.undo()
        with client.lock("a", timeout=10):
            pass


def test_a_fork_exports_nothing(sqlite_url: str) -> None:
    """A forked child cannot give away what its parent holds; what the parent exports it can adopt."""
    with dibs.connect(sqlite_url) as client:
        lease = client.lock("forked").acquire()
        assert lease is not None

        def export() -> None:
            with pytest.raises(dibs.LeaseLost, match="not to its fork"):
                lease.export()

        in_a_fork(export)
        lease.check()
        state = lease.export()

        def adopt() -> None:
            client.adopt(state).release()

        in_a_fork(adopt)
        assert client.holder("forked") is None


def test_two_threads_export(sqlite_url: str) -> None:
    """Of two that export one lease at the same moment, one has the state, and the other does not take it back."""
    with dibs.connect(sqlite_url) as client:
        for number in range(30):
            lease = client.lock(f"two/{number}").acquire()
            assert lease is not None
            states: list[dict[str, Any]] = []
            barrier = threading.Barrier(2)

            def export(
                lease: dibs.Lease = lease, states: list[dict[str, Any]] = states, barrier: threading.Barrier = barrier
            ) -> None:
                barrier.wait(10)
                try:
                    states.append(lease.export())
                except dibs.LeaseLost:
                    pass

            threads = [threading.Thread(target=export) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert len(states) == 1
            client.adopt(states[0]).release()


def test_the_loss_is_not_told(sqlite_url: str) -> None:
    """``on_lost`` is not called and ``lost`` is not set: it was given away. Whoever waits for ``lost`` goes on."""
    told: list[str] = []
    with dibs.connect(sqlite_url) as client:
        lease = client.lock("given", on_lost=lambda: told.append("lost")).acquire()
        assert lease is not None
        waiter = threading.Thread(target=lambda: told.append(str(lease.lost.wait(20))))
        waiter.start()
        time.sleep(0.1)
        state = lease.export()
        waiter.join(5)
        assert told == ["False"]
        adopted = client.adopt(state, on_lost=lambda: told.append("adopter"))
        client.break_lease("given", fencing_token=adopted.fencing_token)
        with pytest.raises(dibs.LeaseLost):
            adopted.renew()
        eventually(lambda: told == ["False", "adopter"], "the adopter's loss is told")


def test_cancelled_anywhere(sqlite_url: str) -> None:
    """Wherever a task is cancelled that exports or adopts: the name is free at once, or after the ttl at the latest."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=1) as client, dibs.connect_async(sqlite_url, ttl=1) as other:
            for point in range(12):
                name = f"cancelled/{point}"
                lease = await client.lock(name).acquire()
                assert lease is not None

                async def move(lease: dibs.AsyncLease = lease) -> None:
                    await (await other.adopt(await lease.export())).release()

                moving = asyncio.get_running_loop().create_task(move())
                for _ in range(point):
                    await asyncio.sleep(0 if point % 2 else 0.0005)
                moving.cancel()
                try:
                    await moving
                except asyncio.CancelledError:
                    pass
                if lease.held:
                    await lease.release()
                free = await client.lock(name).acquire(timeout=1 + SLACK_S)
                assert free is not None, f"cancelled at point {point}"
                await free.release()

    asyncio.run(main())


def test_what_others_see_of_a_holder_does_not_tell_its_claims() -> None:
    """Who could guess a claim could adopt the lease: a part is in nothing that is shown, and no other client's."""
    with dibs.connect("memory://") as client, dibs.connect("memory://") as other:
        with client.lock("x") as lease, other.lock("x") as theirs:
            hidden, others = (set(each.claim_id.split("-")) - set(each.holder.split("/")) for each in (lease, theirs))
            assert {len(part) for part in hidden} == {1, 16}  # and the number
            assert len(hidden & others) == 1
