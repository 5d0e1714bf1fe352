"""Elections with real processes that die and freeze, interrupted and cancelled candidates, and misuse."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

import dibs
import dibs.campaign
from dibs.clock import RealClock
from dibs.connecting import locate
from dibs.desk import DEFAULTS, Desk
from dibs.notes import MARK
from dibs.standby import SEAT_TTL_S
from dibs.store import Release, Transfer
from dibs.stores.sqlite import SQLiteStore
from dibs.succession import SPARE_S
from dibs.testing.client_bench import task, until
from dibs.testing.faces import FACES, Place
from dibs.waiting import NOTE_AFTER_S
from tests.between import Between
from tests.test_api import in_a_fork
from tests.waits import eventually

TTL_S = 1.5
# What a standby may take beyond the ttl: one poll, and a machine that is busy with other tests.
SLACK_S = 3.0

CANDIDATE = """
import os, signal, sys, dibs
url, value, ttl, standby_max = sys.argv[1:]
client = dibs.connect(url, ttl=float(ttl))
print("ready", flush=True)
try:
    term = client.election("chief", value=value, standby_max=int(standby_max) or None).campaign()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
    sys.exit()
print("leads", term.number, flush=True)
for line in sys.stdin:
    if line == "freeze\\n":
        os.kill(os.getpid(), signal.SIGSTOP)
    if line.startswith("resign "):
        _, to, timeout = line.split()
        print("offers", flush=True)
        print("resigned", term.resign(to=to, timeout=float(timeout)), term.held, flush=True)
        continue
    try:
        term.check()
    except dibs.LeaseLost:
        print("lost", flush=True)
    else:
        print("acts", term.number, flush=True)
"""


class Candidate(subprocess.Popen[str]):
    """A process that campaigns, and says what becomes of it."""

    def __init__(self, url: str, value: str, ttl: float = TTL_S, standby_max: int = 0) -> None:
        command = [sys.executable, "-W", "ignore", "-c", CANDIDATE, url, value, str(ttl), str(standby_max)]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.says() == "ready"

    def says(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().rstrip("\n")

    def told(self, line: str) -> None:
        assert self.stdin is not None
        self.stdin.write(f"{line}\n")
        self.stdin.flush()

    def wins(self) -> int:
        """The number of its term, once it leads."""
        word, _, number = self.says().partition(" ")
        assert word == "leads"
        return int(number)


@pytest.fixture
def candidates() -> Iterator[list[Candidate]]:
    """Processes that are ended after the test, frozen or not."""
    started: list[Candidate] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def client(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


@pytest.fixture
def other(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


def won(election: dibs.Election, timeout: float | None = 10) -> dibs.Term:
    term = election.campaign(timeout)
    assert term is not None
    return term


def state(pid: int) -> str:
    """What the kernel says of a process: "R" when it runs, "S" when it sleeps."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def waiting(client: dibs.Client, name: str) -> int:
    record = client.holder(name)
    return -1 if record is None else record.waiting


def client_of(url: str, away: threading.Event, **options: float) -> dibs.Client:
    """A client whose store answers nothing while ``away`` is set."""
    address = locate(url)[0]

    def open_store() -> Any:
        store = address.open()

        def sometimes(act: Callable[..., Any]) -> Callable[..., Any]:
            def answered(*args: Any) -> Any:
                if away.is_set():
                    raise dibs.StoreUnavailable("away", maybe_applied=False)
                return act(*args)

            return answered

        store.leases = sometimes(store.leases)  # type: ignore[method-assign]
        store.act = sometimes(store.act)  # type: ignore[method-assign]
        return store

    return dibs.Client(Desk(address._replace(open=open_store), **{"info": None, **DEFAULTS, **options}))


# -- leaders that die and freeze --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_a_standby_leads_soon_after_kill_9(
    store: str, request: pytest.FixtureRequest, candidates: list[Candidate]
) -> None:
    """A leader killed with -9 is followed by a standby within its ttl, with a greater number; observers see both."""
    url = request.getfixturevalue("sqlite_url" if store == "sqlite" else "postgres_url")
    with dibs.connect(url) as looker:
        leaders = looker.election("chief").observe()
        candidates += [leader := Candidate(url, "one")]
        first = leader.wins()
        candidates += [standby := Candidate(url, "two")]
        eventually(lambda: waiting(looker, "chief") == 1, "the standby does not stand by")
        seen = [next(leaders)]
        began = time.monotonic()
        leader.kill()
        second = standby.wins()
        took = time.monotonic() - began
        assert took < TTL_S + SLACK_S
        assert second > first
        while seen[-1] is None or seen[-1].value != "two":
            seen.append(next(leaders))
        assert [(each.number, each.value) for each in seen if each is not None] == [(first, "one"), (second, "two")]
        assert seen[-1].holder.split("/")[1] == str(standby.pid)


def test_a_frozen_leader_finds_its_term_lost_before_it_acts(sqlite_url: str, candidates: list[Candidate]) -> None:
    """A leader stopped for longer than its ttl, and replaced, is told of the loss by the first look at its term."""
    candidates += [leader := Candidate(sqlite_url, "one")]
    first = leader.wins()
    candidates += [standby := Candidate(sqlite_url, "two")]
    leader.told("act")
    assert leader.says() == f"acts {first}"
    with dibs.connect(sqlite_url) as looker:
        leaders = looker.election("chief").observe()
        before = next(leaders)
        leader.told("freeze")
        second = standby.wins()
        assert second > first
        leader.send_signal(signal.SIGCONT)
        assert leader.says() == "lost"
        standby.told("act")
        assert standby.says() == f"acts {second}"
        after = next(seen for seen in leaders if seen is not None)
        assert before is not None
        assert [(before.number, before.value), (after.number, after.value)] == [(first, "one"), (second, "two")]


@pytest.mark.parametrize("store", ["sqlite", "postgresql", "etcd", "zookeeper"])
def test_a_leader_hands_over_to_another_process(
    store: str, request: pytest.FixtureRequest, candidates: list[Candidate]
) -> None:
    """The candidate that the leader names leads, out of its turn and under a greater number; the other is next."""
    url = request.getfixturevalue({"postgresql": "postgres_url"}.get(store, f"{store}_url"))
    with dibs.connect(url) as looker:
        candidates += [leader := Candidate(url, "one", 4)]
        first = leader.wins()
        candidates += [other := Candidate(url, "two", 4)]
        eventually(lambda: waiting(looker, "chief") == 1, "the other does not stand by")
        candidates += [heir := Candidate(url, "three", 4)]
        eventually(lambda: waiting(looker, "chief") == 2, "the heir does not stand by")
        leader.told("resign three 20")
        second = heir.wins()
        assert [leader.says(), leader.says()] == ["offers", "resigned True False"]
        leader.told("act")
        assert leader.says() == "lost"
        eventually(lambda: waiting(looker, "chief") == 1, "the heir has not left the line")
        heir.told("act")
        assert heir.says() == f"acts {second}"
        heir.kill()
        third = other.wins()
        assert first < second < third


def test_a_leader_that_dies_while_it_offers(sqlite_url: str, candidates: list[Candidate]) -> None:
    """An offer whose maker was killed ends by its ttl, and the next in line leads; its heir may still come first."""
    with dibs.connect(sqlite_url) as looker:
        candidates += [leader := Candidate(sqlite_url, "one")]
        first = leader.wins()
        candidates += [standby := Candidate(sqlite_url, "two")]
        eventually(lambda: waiting(looker, "chief") == 1, "the standby does not stand by")
        leader.told("resign nobody 1")
        assert leader.says() == "offers"
        eventually(lambda: looker.election("chief").leader() is None, "the term is not offered")
        leader.kill()
        began = time.monotonic()
        assert standby.wins() > first
        assert time.monotonic() - began < 1 + SPARE_S + SLACK_S
        candidates += [heir := Candidate(sqlite_url, "three")]
        standby.told("resign three 60")
        assert standby.says() == "offers"
        eventually(lambda: looker.election("chief").leader() is None, "the term is not offered")
        standby.kill()
        assert heir.wins() > first


def test_a_successor_that_is_not_seen_at_first(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That nobody is seen to lead is looked at once more: some stores show nobody while a lease changes hands."""
    shown, looks = SQLiteStore.leases, count(1)

    def blinking(store: SQLiteStore, *asked: Any) -> Any:
        is_ours = store is ours._desk.session().lane._store
        return [] if is_ours and next(looks) % 2 else shown(store, *asked)

    with dibs.connect(sqlite_url) as ours, dibs.connect(sqlite_url) as theirs, ThreadPoolExecutor(1) as pool:
        term = won(ours.election("chief", value="one"))
        standby = pool.submit(won, theirs.election("chief", value="two"))
        eventually(lambda: waiting(ours, "chief") == 1, "the standby does not stand by")
        monkeypatch.setattr(SQLiteStore, "leases", blinking)
        assert term.resign(to="two", timeout=10)
        assert standby.result(10).value == "two"


def test_a_successor_that_is_quicker_than_the_answer(sqlite_url: str) -> None:
    """The answer to the offer is lost, and before the store is asked again the offer has been taken up."""
    between = Between(sqlite_url)

    def lose(requests: Sequence[Any]) -> None:
        if isinstance(requests[0], Transfer):
            between.after = lambda requests: None
            assert standby.result(10).value == "two"
            raise dibs.StoreUnavailable("the connection was lost", maybe_applied=True)

    with between.client() as ours, dibs.connect(sqlite_url) as theirs, ThreadPoolExecutor(1) as pool:
        term = won(ours.election("chief", value="one"))
        standby = pool.submit(won, theirs.election("chief", value="two"))
        eventually(lambda: waiting(ours, "chief") == 1, "the standby does not stand by")
        between.after = lose
        assert term.resign(to="two", timeout=10)
        assert (term.held, standby.result(10).held) == (False, True)
        assert not term.lost.is_set()


def test_a_dead_standby_makes_room(client: dibs.Client, sqlite_url: str, candidates: list[Candidate]) -> None:
    """The seat of a standby that was killed is free again within seconds, whatever its ttl."""
    term = won(client.election("chief"))
    candidates += [standby := Candidate(sqlite_url, "two", 60, standby_max=1)]
    eventually(lambda: waiting(client, "chief") == 1, "the standby does not stand by")
    election = client.election("chief", standby_max=1)
    began = time.monotonic()
    assert election.campaign(timeout=30) is None
    assert time.monotonic() - began < SLACK_S  # refused, and told at once
    standby.kill()
    standby.wait()
    terms: list[dibs.Term] = []

    def stand_by() -> None:
        while not terms:  # refused for as long as the seat lasts
            another = election.campaign()
            if another is not None:
                terms.append(another)

    thread = threading.Thread(target=stand_by)
    thread.start()
    eventually(lambda: waiting(client, "chief") == 2, "there is no room", SEAT_TTL_S + SLACK_S)  # with the dead one
    term.resign()
    thread.join(10)
    terms[0].resign()


def test_ctrl_c_while_standing_by_leaves_the_line(
    client: dibs.Client, sqlite_url: str, candidates: list[Candidate]
) -> None:
    """A standby interrupted by Ctrl-C, which lives on, is not waited for."""
    term = won(client.election("chief"))
    candidates += [standby := Candidate(sqlite_url, "two")]
    eventually(lambda: waiting(client, "chief") == 1, "the standby does not stand by")
    standby.send_signal(signal.SIGINT)
    assert standby.says() == "interrupted"
    eventually(lambda: waiting(client, "chief") == 0, "the interrupted standby still stands by")
    term.resign()
    won(client.election("chief"), timeout=0).resign()


def test_ctrl_c_ends_observing_at_once(sqlite_url: str) -> None:
    """Ctrl-C interrupts an observer in the middle of its pause."""
    program = (
        "import sys, dibs\n"
        "leaders = dibs.connect(sys.argv[1]).election('x').observe(60)\n"
        "try:\n"
        "    print(next(leaders), flush=True)\n"
        "    next(leaders)\n"
        "except KeyboardInterrupt: print('interrupted', flush=True)\n"
    )
    command = [sys.executable, "-c", program, sqlite_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        eventually(lambda: state(process.pid) == "S", "it does not come to its pause")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5


def test_a_fork_leads_nothing_and_may_be_elected(client: dibs.Client) -> None:
    """In a forked child a term is not held and the child is a candidate of its own; observers go on in both."""
    election = client.election("forked", value=1)
    leaders = election.observe()
    assert next(leaders) is None
    term = won(election)

    def child() -> None:
        assert not term.held
        assert term.lost.is_set()
        assert election.campaign(timeout=0) is None
        seen = next(leaders)
        assert seen is not None
        assert seen.number == term.number
        mine = won(client.election("the child's", value=2), timeout=5)
        assert mine.number == mine.fencing_token
        assert mine.resign()
        client.close()

    in_a_fork(child)
    assert term.held
    assert next(leaders) == election.leader()
    term.resign()


def test_a_lead_that_threads_share_ends_each_ones_own_term(client: dibs.Client) -> None:
    """Each ``with`` block of one ``lead()`` object resigns the term that it won, whoever leaves first."""
    election = client.election("shared")
    lead = election.lead()
    led, leave = threading.Event(), threading.Event()
    numbers: list[int] = []

    def second() -> None:
        with lead as term:
            numbers.append(term.number)
            led.set()
            assert leave.wait(20)
            numbers.append(term.number if term.held else 0)

    thread = threading.Thread(target=second)
    with lead as term:
        thread.start()
        eventually(lambda: waiting(client, "shared") == 1, "it stands by")
        assert term.resign()
        assert led.wait(20)
    leader = election.leader()
    assert leader is not None
    assert leader.number == numbers[0] > term.number
    leave.set()
    thread.join(20)
    assert numbers == [leader.number] * 2
    assert election.leader() is None


# -- terms and values -------------------------------------------------------------------------------------------------


def test_a_term_is_a_lease(client: dibs.Client) -> None:
    """A term is renewed, released, copied and shown like any lease; a copy holds nothing."""
    election = client.election("lease", value=[1])
    term = won(election)
    assert isinstance(term, dibs.Lease)
    assert "Term 'lease' token 1, held" in repr(term)
    term.renew(5)
    assert term.ttl == 5
    for duplicate in (copy.copy(term), pickle.loads(pickle.dumps(term))):
        assert not duplicate.held
        assert duplicate.fencing_token == term.number
    with term:
        assert election.leader() == dibs.Leader(1, [1], term.holder, term.acquired_at)
    assert election.leader() is None
    assert term.resign() is True
    assert repr(election) == "<dibs.Election 'lease'>"


def test_a_value_goes_with_other_info(sqlite_url: str) -> None:
    """The value stands beside the info of the election, or of the client, whose own "value" is not taken for it."""
    with dibs.connect(sqlite_url, info={"service": "a", "value": "the service's"}) as client:
        for options, info in (
            ({"value": 0}, {"service": "a", "value": 0}),
            ({}, {"service": "a"}),
            ({"value": 1, "info": {"b": 2}}, {"b": 2, "value": 1}),
            ({"info": {"b": 2}}, {"b": 2}),
        ):
            with client.election("info", **options).lead() as term:
                assert term.info == info
                leader = client.election("info").leader()
                assert leader is not None
                assert leader.value == term.value == options.get("value")


def test_a_holder_with_other_info_is_a_leader_without_value(client: dibs.Client) -> None:
    """A lock of the election's name counts as a leader that says nothing."""
    election = client.election("mixed")
    with client.lock("mixed", info={"x": 1}) as lease:
        leader = election.leader()
        assert leader is not None
        assert (leader.number, leader.value) == (lease.fencing_token, None)
        with pytest.raises(dibs.WouldDeadlock, match="resign first"):
            election.campaign()


def test_a_successor_is_known_by_its_value_as_json(client: dibs.Client, other: dibs.Client) -> None:
    """Also where keys of it are numbers, which are strings in JSON, or where the program has changed it since."""
    value: dict[Any, Any] = {1: "a", "b": [2]}
    leader = won(client.election("keys", value="before"))
    with ThreadPoolExecutor() as pool:
        successor = pool.submit(won, other.election("keys", value=value))
        eventually(lambda: waiting(client, "keys") == 1, "nobody stands by")
        value["b"].append(3)
        assert leader.resign(to={"b": [2], 1: "a"}, timeout=10)
        term = successor.result(10)
    assert term.value == {"1": "a", "b": [2]}
    assert not term.resign(to=value, timeout=0)
    with pytest.raises(dibs.LeaseLost, match="was resigned, and offered"):
        term.check()


# -- being called, for threads ----------------------------------------------------------------------------------------


def test_on_lost_is_called_while_on_elected_still_works(client: dibs.Client, other: dibs.Client) -> None:
    """The loss is told at once, in another thread, before another leads; ``run`` waits for both functions."""
    stop, order = threading.Event(), []
    threads: list[threading.Thread] = []

    def on_elected(term: dibs.Term) -> None:
        threads.append(threading.current_thread())
        other.break_lease("told", fencing_token=term.number)
        assert stop.wait(10)
        assert not term.held
        order.append("stopped")

    def on_lost(term: dibs.Term) -> None:
        threads.append(threading.current_thread())
        order.append("lost")
        assert other.election("told").campaign(timeout=0) is None, "another could win before the loss was told"
        stop.set()
        time.sleep(0.2)  # for the other function and ``run`` to come to their ends, if they did not wait for this one
        order.append("told")

    with pytest.raises(dibs.LeaseLost, match="told"):
        client.election("told", ttl=TTL_S).run(on_elected, on_lost)
    assert (order[0], sorted(order)) == ("lost", ["lost", "stopped", "told"])
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_a_loss_that_shows_only_at_the_end_is_told(client: dibs.Client, other: dibs.Client) -> None:
    """When it is the resignation that finds the term gone, ``on_lost`` is called all the same, once."""
    told: list[dibs.Term] = []

    def on_elected(term: dibs.Term) -> None:
        other.break_lease("gone", fencing_token=term.number, now=True)

    election = client.election("gone")
    with pytest.raises(dibs.LeaseLost):
        election.run(on_elected, told.append)
    assert [term.held for term in told] == [False]
    with pytest.raises(dibs.LeaseLost):
        election.run(on_elected)


def test_another_lease_that_is_lost_is_not_the_term(client: dibs.Client, other: dibs.Client) -> None:
    """LeaseLost of some other lease ends ``run`` as any error does: the term is resigned, and not told to be lost."""
    told: list[dibs.Term] = []

    def on_elected(term: dibs.Term) -> None:
        with client.lock("inner") as lease:
            other.break_lease("inner", fencing_token=lease.fencing_token, now=True)
        raise AssertionError("the loss of the inner lease was not told")

    with pytest.raises(dibs.LeaseLost, match="inner"):
        client.election("outer").run(on_elected, told.append, forever=True)
    assert not told
    assert client.election("outer").leader() is None


def test_an_error_in_on_lost_is_shown_and_ends_nothing(client: dibs.Client, other: dibs.Client) -> None:
    """A bug in ``on_lost`` is told as that of any thread, and ``run`` goes on to raise LeaseLost."""
    seen: list[Any] = []

    def on_elected(term: dibs.Term) -> None:
        other.break_lease("bug", fencing_token=term.number)
        assert term.lost.wait(10)

    def on_lost(_: dibs.Term) -> None:
        raise ZeroDivisionError

    hook, threading.excepthook = threading.excepthook, lambda args: seen.append(args.exc_type)
    try:
        with pytest.raises(dibs.LeaseLost):
            client.election("bug", ttl=0.6).run(on_elected, on_lost)
    finally:
        threading.excepthook = hook
    assert seen == [ZeroDivisionError]


def test_an_error_in_on_lost_at_the_end_ends_nothing_either(sqlite_url: str, other: dibs.Client) -> None:
    """The same where the loss shows only when the term is resigned: it is told in a thread of its own, too."""
    between = Between(sqlite_url)

    def resigned_unsuspectingly(requests: Sequence[Any]) -> None:
        if any(isinstance(request, Release) for request in requests):
            threads = threading.enumerate
            eventually(lambda: all(each.name != "dibs-on-lost" for each in threads()), "it waits for a loss still")

    between.before = resigned_unsuspectingly
    seen: list[Any] = []
    terms: list[int] = []

    def on_elected(term: dibs.Term) -> None:
        terms.append(term.number)
        if len(terms) == 3:
            raise StopIteration("enough")
        other.break_lease("late", fencing_token=term.number, now=True)

    def on_lost(_: dibs.Term) -> None:
        seen.append(threading.current_thread())
        raise ZeroDivisionError

    hook, threading.excepthook = threading.excepthook, lambda args: seen.append(args.exc_type)
    try:
        with between.client() as client, pytest.raises(StopIteration, match="enough"):
            client.election("late").run(on_elected, on_lost, forever=True)
        eventually(lambda: seen.count(ZeroDivisionError) == 2, "the errors were not shown")
    finally:
        threading.excepthook = hook
    assert threading.current_thread() not in seen


def test_a_run_that_cannot_begin_its_thread_leads_no_more(
    client: dibs.Client, other: dibs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ``on_lost`` could not be called for want of a thread, ``on_elected`` is not, and the term is given back."""
    election = client.election("threadless")
    assert election.leader() is None  # the threads of the client are there
    spawn = RealClock.spawn

    def refusing(name: str, run: Callable[[], None]) -> None:
        if name == "dibs-on-lost":
            raise RuntimeError("can't start new thread")
        spawn(name, run)

    monkeypatch.setattr(RealClock, "spawn", staticmethod(refusing))
    with pytest.raises(RuntimeError, match="new thread"):
        election.run(lambda _: pytest.fail("it was called"), lambda _: None)
    term = other.election("threadless").campaign(timeout=10)
    assert term is not None, "it leads still"
    term.resign()


def test_functions_that_cannot_be_called_are_refused(client: dibs.Client) -> None:
    """``run`` refuses what it could not call, or what would run after the term, before it campaigns."""

    async def coroutine(_: object) -> None: ...

    def generator(_: object) -> Iterator[int]:
        yield 1

    election = client.election("refused")
    wrong: list[tuple[Any, Any]] = [(coroutine, None), (generator, None), (print, coroutine), (print, 7), (None, None)]
    for functions in wrong:
        with pytest.raises(TypeError):
            election.run(*functions)

    async def main() -> None:
        async with dibs.connect_async("memory://") as client:
            for functions in [(print, None), (coroutine, 7), (None, None)]:
                with pytest.raises(TypeError):
                    await client.election("refused").run(*functions)  # type: ignore[arg-type]

    asyncio.run(main())


@pytest.mark.parametrize("kind", FACES)
def test_who_would_lead_for_ever_outlives_an_outage(
    kind: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs that the store is away and that it is back, and leads in its turn; without ``forever`` it is told."""
    monkeypatch.setattr(dibs.campaign, "AWAY_S", 0.01)

    class Enough(Exception):
        pass

    asked: list[object] = []

    def away(requests: Sequence[Any]) -> None:
        asked.append(requests)
        raise dibs.StoreUnavailable("it is away", maybe_applied=False)

    async def main() -> None:
        between = Between(sqlite_url)
        face = FACES[kind](Place(between.address._replace(open=between.open)))
        election = face.client(patience=0).election("chief")

        async def reign(term: object) -> None:
            raise Enough

        def on_elected(term: object) -> None:
            raise Enough

        elected = reign if kind == "tasks" else on_elected
        with dibs.connect(sqlite_url, namespace=face.namespace) as other, other.lock("chief"):
            running = task(face.do(election.run, elected, forever=True))
            await until(lambda: getattr(other.holder("chief"), "waiting", 0), "it stands by")
            between.before = away
            await until(lambda: "election 'chief': the store is away, trying again: it is away" in caplog.text, "told")
            more = len(asked) + 3
            await until(lambda: len(asked) >= more, "it asks again")
            between.before = lambda requests: None
            await until(lambda: "election 'chief': the store is back" in caplog.text, "told")
            await until(lambda: getattr(other.holder("chief"), "waiting", 0), "it stands by")
        with pytest.raises(Enough):
            await running
        assert caplog.text.count("it is away") == 1, "however often it asked"
        logged = len(caplog.records)  # without forever, nothing is
        between.before = away
        with pytest.raises(dibs.StoreUnavailable):
            await face.do(election.run, elected)
        between.before = lambda requests: None
        assert len(caplog.records) == logged
        await face.close()

    asyncio.run(main())


# -- being called, for tasks ------------------------------------------------------------------------------------------


def test_a_task_that_lost_its_term_is_cancelled_then_told(sqlite_url: str) -> None:
    """``on_elected`` is cancelled by the loss, then ``on_lost`` is called; with ``forever`` the next term begins."""

    async def main() -> None:
        order: list[str] = []
        async with dibs.connect_async(sqlite_url, ttl=0.6) as client, dibs.connect_async(sqlite_url) as other:

            async def on_elected(term: dibs.AsyncTerm) -> None:
                order.append("elected")
                if len(order) > 6:
                    raise ValueError("enough")
                await other.break_lease("tasks", fencing_token=term.number)
                try:
                    await asyncio.Event().wait()
                finally:
                    order.append("cancelled")

            async def on_lost(term: dibs.AsyncTerm) -> None:
                assert not term.held
                await asyncio.sleep(0)  # others run meanwhile
                order.append("lost")

            with pytest.raises(ValueError, match="enough"):
                await client.election("tasks").run(on_elected, on_lost, forever=True)
            assert order == ["elected", "cancelled", "lost", "elected", "cancelled", "lost", "elected"]
            assert await client.election("tasks").leader() is None
            order.clear()
            with pytest.raises(dibs.LeaseLost):
                await client.election("tasks").run(on_elected)

    asyncio.run(main())


def test_a_cancelled_run_resigns(sqlite_url: str) -> None:
    """Whoever cancels ``run`` gets CancelledError, and somebody else may lead at once."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url) as other:
            inside = asyncio.Event()

            async def on_elected(_: dibs.AsyncTerm) -> None:
                inside.set()
                await asyncio.Event().wait()

            def on_lost(term: dibs.AsyncTerm) -> None:
                raise AssertionError(f"{term!r} was not lost")

            run = asyncio.get_running_loop().create_task(client.election("run").run(on_elected, on_lost))
            await inside.wait()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            term = await other.election("run").campaign(timeout=0)
            assert term is not None
            async with term:
                assert (await client.election("run").leader()) is not None

    asyncio.run(main())


@pytest.mark.parametrize("priority", [0, -1], ids=["standby", "reserve"])
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_cancelling_a_campaign_anywhere_leaves_nothing_held(sqlite_url: str, held: bool, priority: int) -> None:
    """A candidate cancelled at any moment leads nothing, stands in no line, and delays nobody."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url, ttl=20) as other:
            election, rival = client.election("cancelled", priority=priority), other.election("cancelled")
            for number in range(20):
                leader = await rival.campaign(timeout=5) if held else None
                candidate = asyncio.get_running_loop().create_task(election.campaign())
                for _ in range(number):  # it is cancelled at a later point each time
                    await asyncio.sleep(0 if number < 10 else 0.001)
                if leader is not None and number % 2:
                    await leader.resign()
                candidate.cancel()
                try:
                    term = await candidate
                except asyncio.CancelledError:
                    term = None
                for each in (term, leader):
                    if each is not None:
                        await each.resign()
                again = await rival.campaign(timeout=2)
                assert again is not None, f"try {number}: the cancelled candidate leads or stands by"
                for _ in range(100):
                    record = await other.holder("cancelled")
                    if record is not None and record.waiting == 0:
                        break
                    await asyncio.sleep(0.01)
                assert record is not None
                assert record.waiting == 0, f"try {number}: the cancelled candidate stands in line"
                await again.resign()

    asyncio.run(main())


def test_cancelling_at_each_await_point_resigns(sqlite_url: str) -> None:
    """Cancelled at its first, second, … await point, ``async with election.lead()`` leaves nobody leading."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url, ttl=20) as other:
            for point in range(8):

                async def block() -> None:
                    async with client.election("points").lead() as term:
                        assert term.held
                        await asyncio.sleep(0)

                leading = asyncio.get_running_loop().create_task(block())
                turns = 0
                while not leading.done():
                    if turns == point:
                        leading.cancel()
                    await asyncio.sleep(0.001 if turns % 2 else 0)  # on to the next point, some of them in the lane
                    turns += 1
                assert leading.cancelled() or leading.exception() is None
                term = await other.election("points").campaign(timeout=2)
                assert term is not None, f"cancelled at point {point}: it still leads"
                await term.resign()

    asyncio.run(main())


# -- reserves and standbys --------------------------------------------------------------------------------------------


def test_a_reserve_of_a_client_that_closes_is_told(sqlite_url: str, other: dibs.Client) -> None:
    """A reserve that waits while its client is closed gets StoreUnavailable at once, as every waiter does."""
    term = won(other.election("closing"))
    client = dibs.connect(sqlite_url)
    errors: list[BaseException] = []

    def campaign() -> None:
        try:
            client.election("closing", priority=-1).campaign()
        except dibs.StoreUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=campaign)
    thread.start()
    eventually(lambda: client._desk.session()._sleeps, "the reserve does not wait")
    client.close()
    thread.join(5)
    assert [str(error) for error in errors] == ["this dibs client was closed while waiting"]
    term.resign()


@pytest.mark.parametrize("options", [{"priority": -1}, {"standby_max": 3}], ids=str)
def test_a_campaign_ends_in_time_when_the_store_is_away(options: dict[str, Any], sqlite_url: str) -> None:
    """A campaign with a time-out ends within that and one request time-out, whatever the client's patience."""
    broken = threading.Event()
    with client_of(sqlite_url, broken, patience=30, request_timeout=0.5) as client:
        election = client.election("away", **options)
        assert election.leader() is None
        broken.set()
        began = time.monotonic()
        with pytest.raises(dibs.StoreUnavailable):
            election.campaign(timeout=0.3)
        assert time.monotonic() - began < 0.3 + 0.5 + SLACK_S
        broken.clear()


def test_a_standby_whose_time_is_over_does_not_carry_its_last_release_itself(
    client: dibs.Client, sqlite_url: str
) -> None:
    """It has waited for an answer as long as it may, and the call that gives its seat back may take as long again."""
    between, go_on = Between(sqlite_url), threading.Event()
    term = won(client.election("slow"))
    with between.client(request_timeout=0.5) as other:

        def before(requests: Sequence[Any]) -> None:
            if any(type(request) is Release for request in requests):
                go_on.wait(30)

        between.before = before
        campaign = threading.Thread(target=lambda: other.election("slow", standby_max=1).campaign(timeout=0.3))
        campaign.start()
        try:
            eventually(lambda: not campaign.is_alive(), "it waits for the release")
        finally:
            go_on.set()
        campaign.join(10)
    term.resign()


def test_a_term_ends_with_its_client(sqlite_url: str) -> None:
    """When the client is closed by another thread, ``run`` hears of it at once, and nobody is told of a loss."""
    client = dibs.connect(sqlite_url, ttl=60)
    told: list[dibs.Term] = []

    def on_elected(term: dibs.Term) -> None:
        threading.Timer(0.2, client.close).start()
        assert not term.lost.wait(30)
        term.check()

    began = time.monotonic()
    with pytest.raises(dibs.LeaseLost, match="was released"):
        client.election("closing").run(on_elected, told.append, forever=True)
    assert time.monotonic() - began < 10
    assert not told


def test_a_refused_standby_stands_in_no_line(client: dibs.Client, other: dibs.Client) -> None:
    """A candidate turned away by ``standby_max`` leaves no trace, and says who leads and how many stand by."""
    term = won(client.election("full"))
    with pytest.raises(dibs.LockTimeout, match=r"'full' is led by .* \(term 1\), and 0 candidates stand by already"):
        other.election("full", standby_max=0).lead().__enter__()
    assert waiting(client, "full") == 0
    term.resign()


def test_a_standby_in_its_seat_writes_no_notes(sqlite_url: str, client: dibs.Client) -> None:
    """A standby waits for as long as it takes and holds nothing that others wait for: it is looked after by nobody."""
    between = Between(sqlite_url)
    term = won(client.election("calm"))
    with between.client() as other:
        standby = threading.Thread(target=lambda: won(other.election("calm", standby_max=2), None).resign())
        standby.start()
        eventually(lambda: waiting(client, "calm") == 1, "it stands by")
        time.sleep(NOTE_AFTER_S + 0.5)
        names = {request.name.partition(":")[0] for requests in between.calls for request in requests}
        assert not any(MARK.rstrip(":") in name for name in names), names
        term.resign()
        standby.join(10)
        assert not standby.is_alive()


# -- looking on -------------------------------------------------------------------------------------------------------


def test_an_observer_reads_at_most_once_a_second(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often leaders change, an observer asks the store once in its interval, and not to the same rhythm."""
    from dibs.stores.sqlite import SQLiteStore

    reads: list[float] = []
    leases = SQLiteStore.leases

    def counted(store: Any, *args: Any) -> Any:
        if not args[0].endswith("~paused"):  # whoever is a candidate looks for pauses
            reads.append(time.monotonic())
        return leases(store, *args)

    with dibs.connect(sqlite_url) as looker, dibs.connect(sqlite_url, ttl=20) as client:
        looker.ping()  # its interval begins with the asking
        monkeypatch.setattr(SQLiteStore, "leases", counted)
        leaders = looker.election("busy").observe()
        seen = [next(leaders)]
        for _ in range(2):
            with client.election("busy").lead():
                seen.append(next(leaders))
        looker.close()
        assert list(leaders) == []
    pauses = [later - earlier for earlier, later in pairwise(reads)]
    assert len(seen) == len(reads) == 3
    assert all(1.0 <= pause < 1.3 + SLACK_S for pause in pauses)


def test_an_observer_outlives_an_outage(sqlite_url: str) -> None:
    """StoreUnavailable is raised to whoever asks for the next leader; asked again, the observer goes on as before."""
    broken = threading.Event()
    with client_of(sqlite_url, broken, patience=0.2) as client, dibs.connect(sqlite_url) as other:
        leaders = client.election("outage").observe()
        assert next(leaders) is None
        broken.set()
        with pytest.raises(dibs.StoreUnavailable, match="away"):
            next(leaders)
        broken.clear()
        with other.election("outage", value="x").lead():
            seen = next(leaders)
            assert seen is not None
            assert seen.value == "x"


def test_an_observer_is_closed_from_outside(sqlite_url: str) -> None:
    """``close()`` from another thread, or task, ends the loop at once; so does the client's."""
    with dibs.connect(sqlite_url) as client:
        leaders = client.election("closed").observe(60)
        threading.Timer(0.3, leaders.close).start()
        began = time.monotonic()
        assert list(leaders) == [None]
        assert time.monotonic() - began < 10
        leaders = client.election("closed").observe(60)
        assert next(iter(leaders)) is None
        threading.Timer(0.3, client.close).start()
        assert list(leaders) == []
        assert list(client.election("closed").observe()) == []

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            leaders = client.election("closed").observe(60)
            asyncio.get_running_loop().call_later(0.3, leaders.close)
            assert [leader async for leader in leaders] == [None]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_cancelled_observer_misses_nothing(sqlite_url: str) -> None:
    """A task cancelled while it waits for the next leader can ask again, and is told then."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client:
            leaders = client.election("patient").observe()
            assert await anext(leaders) is None
            async with client.election("patient", value=1).lead():
                for number in range(25):
                    try:
                        leader = await asyncio.wait_for(anext(leaders), 0.0005 * number + (number > 20))
                        break
                    except asyncio.TimeoutError:
                        continue
                assert leader is not None
                assert json.dumps(leader.value) == "1"

    asyncio.run(main())


def test_observing_holds_nothing(client: dibs.Client) -> None:
    """A process that only observes is neither a candidate nor in line."""
    leaders = client.election("looked at").observe()
    term = won(client.election("looked at"))
    assert next(leaders) is not None
    assert waiting(client, "looked at") == 0
    assert os.getpid() == int(term.holder.split("/")[1])
    term.resign()
