"""What is particular to queues in Redis: answers as memory's, what is kept, memory, rights, crashes, clusters."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import dibs
from dibs.connecting import locate
from dibs.jobs import (
    BACK,
    CLAIMED,
    DEAD,
    DONE,
    ENDS,
    KEEP,
    LATER,
    ON_CONFLICT,
    READY,
    RETRY,
    STATES,
    Extend,
    Extended,
    Finish,
    Finished,
    JobRequest,
    Jobs,
    JobStore,
    KeyTaken,
    NewJob,
    Put,
    PutDone,
    Take,
    Taken,
)
from dibs.store import Held
from dibs.testing import check_store
from tests.job_queues import finishing, ids
from tests.servers.redis import RedisCluster, RedisServer
from tests.test_redis import catch_up, replica_of
from tests.waits import soon

#: A claim that has expired when the next request is made.
MOMENT_S = 0.001


@contextmanager
def opened(url: str) -> Iterator[Jobs]:
    store = locate(url)[0].open()
    try:
        yield cast("JobStore", store).jobs
    finally:
        store.close()


@pytest.fixture
def jobs(redis_url: str) -> Iterator[Jobs]:
    with opened(redis_url) as jobs:
        yield jobs


@pytest.fixture
def prefix(redis_url: str) -> str:
    return redis_url.partition("prefix=")[2]


def act(jobs: Jobs, *requests: JobRequest) -> list[Any]:
    return list(jobs.act(requests, soon()))


def put(jobs: Jobs, *new: NewJob | str, name: str = "n:q", put_id: str | None = None) -> list[int]:
    made = tuple(job if isinstance(job, NewJob) else NewJob(job) for job in new)
    (outcome,) = act(jobs, Put(name, put_id or os.urandom(8).hex(), made))
    assert isinstance(outcome, PutDone), outcome
    return list(outcome.ids)


def take(jobs: Jobs, n: int = 1, ttl: float = 60.0, *, name: str = "n:q", group_limit: int = 0) -> Any:
    return act(jobs, Take(name, os.urandom(8).hex(), n, ttl, "h", group_limit))[0]


def finish(jobs: Jobs, taken: Taken, end: str = DONE, name: str = "n:q", **fields: Any) -> Any:
    return act(jobs, finishing(taken, end, name=name, **fields))[0]


# -- the answers ------------------------------------------------------------------------------------------------------


class Comparison:
    """Redis and memory are asked the same, whatever comes; each knows the jobs by ids of its own."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.stores = [locate(url)[0].open(), locate(f"memory://{url.rpartition('=')[2]}-{seed}")[0].open()]
        self.sides: list[Any] = [cast("JobStore", store).jobs for store in self.stores]
        self.names = [f"{seed}:a", f"{seed}:a", f"{seed}:b"]
        #: Ids by side, in the order in which they became known.
        self.known: list[list[int]] = [[], []]
        #: Of each claim its queue, its tokens on both sides, and its jobs.
        self.claims: list[tuple[str, str, list[int], list[int]]] = []
        self.count = 0
        #: What was asked, for whoever has to find out why the answers differ.
        self.said: list[Any] = []

    def walk(self, steps: int) -> None:
        verbs = [self.put] * 3 + [self.take] * 5 + [self.take_again] + [self.finish] * 5 + [self.cancel, self.mend]
        try:
            for step in range(steps):
                self.random.choice(verbs)()
                if step % 4 == 0 or step == steps - 1:
                    self.see()
        finally:
            for store in self.stores:
                store.close()

    def place(self, side: int, job: int) -> int:
        if job not in self.known[side]:
            self.known[side].append(job)
        return self.known[side].index(job)

    def both(self, requests: Sequence[JobRequest]) -> list[Any]:
        """The outcomes of both, which are alike in everything but ids, tokens and times."""
        outcomes = [self.sides[side].act([request], soon())[0] for side, request in enumerate(requests)]
        self.said.append((requests[0], outcomes[0]))
        seen = [self.plain(side, outcome) for side, outcome in enumerate(outcomes)]
        assert seen[0] == seen[1], self.said
        return outcomes

    def plain(self, side: int, outcome: Any) -> Any:
        if isinstance(outcome, (Finished, Extended)):
            return [self.place(side, job) for job in outcome.gone]
        if isinstance(outcome, PutDone):
            return [self.place(side, job) for job in outcome.ids]
        if isinstance(outcome, KeyTaken):
            return outcome.key, self.place(side, outcome.id), outcome.claimed
        if isinstance(outcome, Taken):
            return [(self.place(side, job.id), *job[1:5], *job[6:]) for job in outcome.jobs]
        assert isinstance(outcome, Held)
        return "nothing"

    def fresh(self) -> str:
        self.count += 1
        return f"{self.names[0]}-{self.count}"

    def new_job(self, keys: list[str]) -> NewJob:
        choice = self.random.choice
        key = keys.pop() if keys and self.random.random() < 0.5 else None
        payloads: list[str | bytes] = ["1", '"a b"', b"\x00\xff "]
        payload, priority = choice(payloads), choice([0, 0, 0, 7, -3])
        # A job of a group that is found without tries makes room for the next at once in memory, and in Redis a moment
        # later; so those of groups have no limit here.
        if choice([True, False]):
            return NewJob(payload, priority, key=key, group=choice(["g", "h i"]))
        tries, at = choice([0, 1, 2, 3]), choice([None, None, 5.0])
        return NewJob(payload, priority, choice([0.0, 0.0, 0.0, 1000.0]), at, key, max_tries=tries)

    def put(self) -> None:
        keys = ["k", "k l", "-", "%20", "="]
        self.random.shuffle(keys)
        new = tuple(self.new_job(keys) for _ in range(self.random.choice([1, 1, 2, 5])))
        request = Put(self.random.choice(self.names), self.fresh(), new, self.random.choice(ON_CONFLICT))
        redis, _ = self.both((request, request))
        assert self.sides[0].act([request], soon())[0] == redis, (self.said, "repeated")

    def take(self) -> None:
        choice = self.random.choice
        ttl = choice([60.0, 60.0, MOMENT_S])
        name, limit = choice(self.names), choice([0, 1, 1, 1, 2])
        request = Take(name, self.fresh(), choice([1, 1, 2, 5]), ttl, "h o", limit)
        outcomes = self.both((request, request))
        self.note(name, request.claim_id, outcomes)
        if ttl == MOMENT_S:
            time.sleep(3 * MOMENT_S)  # until the claim has certainly ended
        elif isinstance(outcomes[0], Held) and limit == 0:
            assert outcomes[0].free_in == pytest.approx(outcomes[1].free_in, abs=1)

    def note(self, name: str, claim: str, outcomes: list[Any]) -> None:
        if isinstance(outcomes[0], Taken):
            found = [self.place(0, job) for job in ids(outcomes[0])]
            self.claims.append((name, claim, [outcome.fencing_token for outcome in outcomes], found))

    def take_again(self) -> None:
        if self.claims:
            name, claim, _, _ = self.random.choice(self.claims[-3:])
            request = Take(name, claim, 2, 60, "h o")
            self.note(name, claim, self.both((request, request)))

    def finish(self) -> None:
        if not self.claims:
            return
        choice = self.random.choice
        name, _, tokens, places = choice(self.claims[-4:])
        chosen = [place for place in places if choice([True, True, False])]
        end, later, note = choice([*ENDS, "extend"]), choice([0.0, 0.0, 1000.0]), choice([None, '"n o"'])
        requests: list[JobRequest] = []
        for side in (0, 1):
            jobs = tuple(self.known[side][place] for place in chosen)
            if end == "extend":
                requests.append(Extend(name, jobs, tokens[side], 60.0))
            else:
                requests.append(Finish(name, jobs, tokens[side], end, note, later, later))
        self.both(requests)

    def some(self) -> list[int]:
        return self.random.sample(range(len(self.known[0])), min(3, len(self.known[0])))

    def cancel(self) -> None:
        name, places, keep = self.random.choice(self.names), self.some(), self.random.choice([0.0, 1000.0])
        seen = []
        for side in (0, 1):
            found = self.sides[side].cancel(name, [self.known[side][place] for place in places], keep, soon())
            seen.append(sorted(self.place(side, job) for job in found))
        self.said.append(("cancel", name, places, seen))
        assert seen[0] == seen[1], self.said

    def mend(self) -> None:
        name, places = self.random.choice(self.names), self.random.choice([None, self.some()])
        verb = self.random.choice(["revive", "revive", "forget"])
        seen = []
        for side in (0, 1):
            chosen = None if places is None else [self.known[side][place] for place in places]
            more = (0.0, soon()) if verb == "forget" else (soon(),)
            seen.append(getattr(self.sides[side], verb)(name, chosen, *more))
        self.said.append((verb, name, places, seen))
        assert seen[0] == seen[1], self.said

    def see(self) -> None:
        for name in self.names[1:]:
            for state in STATES:
                seen = []
                for side in (0, 1):
                    shown = self.sides[side].jobs_in(name, state, 100, soon())
                    seen.append([self.shown(side, job) for job in shown])
                assert seen[0] == seen[1], (self.said, name, state)
            depths = [self.sides[side].depths(name, name + "\x01", soon()) for side in (0, 1)]
            assert [depth[:5] for depth in depths[0]] == [depth[:5] for depth in depths[1]], self.said
            assert [depth.oldest_s for depth in depths[0]] == pytest.approx([d.oldest_s for d in depths[1]], abs=1)

    def shown(self, side: int, job: Any) -> Any:
        there = (job.fencing_token > 0, job.expires_at is None, job.ended_at is None)
        return self.place(side, job.id), *job[1:7], *job[10:13], job.error is None, job.result, there


@pytest.mark.parametrize("seed", range(40))
def test_redis_answers_on_jobs_as_memory_does(redis_url: str, seed: int) -> None:
    """The Redis store gives the memory store's outcomes for jobs, and shows the same, whatever is asked."""
    Comparison(redis_url, seed).walk(80)


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_queue_leaves_no_trace(redis: RedisServer, jobs: Jobs, prefix: str) -> None:
    """Keys of live jobs have no time to live; when the last job is gone the queue's head alone is left, for a day."""
    put(jobs, NewJob("1", key="k", group="g", max_tries=2), NewJob("2", 5, delay=60.0), "3")
    with redis.client() as look:
        taken = take(jobs, 5, group_limit=1)
        finish(jobs, taken, RETRY, note="e")
        keys = look.keys(f"{prefix}:*")
        assert {look.ttl(key) for key in keys} == {-1}
        assert look.hget(f"{prefix}:queue:{{n:q}}:keys", "=k") == str(ids(taken)[0])
        assert look.hget(f"{prefix}:queue:{{n:q}}:jobs", f"{ids(taken)[0]}:payload") == "j1"
        finish(jobs, take(jobs, 5, group_limit=1), DONE, keep=0.05)
        jobs.cancel("n:q", [job.id for job in jobs.jobs_in("n:q", LATER, 10, soon())], 0.0, soon())
        time.sleep(0.1)  # its time is over
        assert jobs.jobs_in("n:q", DONE, 10, soon()) == []  # whoever looks forgets what was kept for long enough
        take(jobs)
        assert look.keys(f"{prefix}:*") == [f"{prefix}:queue:{{n:q}}"]
        assert 0 < look.ttl(f"{prefix}:queue:{{n:q}}") <= 24 * 3600
        put(jobs, "4")
        assert look.ttl(f"{prefix}:queue:{{n:q}}") == -1


def test_forgotten_scripts_are_sent_again(redis: RedisServer, jobs: Jobs) -> None:
    """SCRIPT FLUSH at any moment: the next call works, and its requests are carried out in their order."""
    for _ in range(2):
        redis.ask("SCRIPT", "FLUSH")
        first, then = act(
            jobs, Take("n:q", os.urandom(8).hex(), 1, 60, "h"), Put("n:q", os.urandom(8).hex(), (NewJob("1"),))
        )
        assert isinstance(first, Taken)
        assert isinstance(then, PutDone)
        redis.ask("SCRIPT", "FLUSH")
        assert finish(jobs, first) == Finished()


def test_an_old_worker_ends_no_job_that_came_after_the_data_was_lost(redis: RedisServer, jobs: Jobs) -> None:
    """After FLUSHALL no id and no token is given again, so what a worker says of a lost job is gone."""
    (old,) = put(jobs, "1")
    taken = take(jobs)
    with redis.client() as look:
        for key in look.scan_iter("*queue:{n:q}*"):
            look.delete(key)
    (new,) = put(jobs, "2")
    again = take(jobs)
    assert (new > old, again.fencing_token > taken.fencing_token) == (True, True)
    assert finish(jobs, taken) == Finished((old,))
    assert finish(jobs, again) == Finished()


def test_a_clock_that_was_set_back(redis: RedisServer, jobs: Jobs, prefix: str) -> None:
    """Ids and tokens go on from the last ones when the server's clock is behind them."""
    put(jobs, "1")
    ahead = time.time_ns() // 1000 + 3600 * 10**6
    redis.ask("HSET", f"{prefix}:queue:{{n:q}}", "last_id", ahead)
    assert put(jobs, "2", "3") == [ahead + 1, ahead + 2]
    taken = take(jobs)
    finish(jobs, taken, RETRY)
    key = f"{prefix}:queue:{{n:q}}:jobs"
    row = redis.ask("HGET", key, ids(taken)[0])
    redis.ask("HSET", key, ids(taken)[0], row.replace(str(taken.fencing_token), str(ahead)))
    assert take(jobs, 5).fencing_token == ahead + 1


def test_within_is_refused(jobs: Jobs) -> None:
    """A job of Redis is in no transaction of a database, and that is said."""
    with pytest.raises(dibs.InvalidOption, match="in no transaction"):
        next(jobs.within(Put("n:q", "p", (NewJob("1"),)), "postgresql", None, soon()))


def test_puts_are_hinted_rarely(redis: RedisServer, jobs: Jobs, prefix: str) -> None:
    """Of many puts at once one is told to those who wait, and of one that comes later again."""
    with redis.client() as look, look.pubsub() as listener:
        act(jobs, Take("n:q", "c", 1, 60, "h"))
        listener.subscribe(f"{prefix}:wake:queues")
        act(jobs, *[Put("n:q", f"p-{number}", (NewJob("1"),)) for number in range(100)])
        time.sleep(0.05)  # longer than hints are left out for
        put(jobs, "2")
        heard = [m["data"] for m in iter(lambda: listener.get_message(timeout=0.1), None) if m["type"] == "message"]
    assert f"{prefix}:queue:{{n:q}}" == heard[0]
    assert 2 <= len(heard) <= 10


# -- what is large ----------------------------------------------------------------------------------------------------


def test_a_take_of_large_payloads_brings_fewer(jobs: Jobs) -> None:
    """Payloads of more than 16 MiB do not travel in one answer; what is left is there for the next take."""
    new = [NewJob(b"x" * 2**20) for _ in range(20)]
    made = put(jobs, *new)
    first, second = take(jobs, 20), take(jobs, 20)
    assert ids(first) + ids(second) == tuple(made)
    assert len(first.jobs) == 15  # beside each payload a letter is kept that says whether it is text
    assert (first.jobs[0].payload, second.jobs[-1].tries) == (new[0].payload, 1)


def test_many_jobs_behind_the_first_of_their_group(redis: RedisServer, jobs: Jobs, prefix: str) -> None:
    """Jobs that wait for their group are looked at once; a take of any other limit still finds them."""
    put(jobs, *[NewJob("g", group="g") for _ in range(3000)])
    (other,) = put(jobs, "1")
    first = take(jobs, 2, group_limit=1)
    found = set(ids(first))
    while other not in found:
        found.update(ids(take(jobs, 2, group_limit=1)))
    assert len(found) == 2
    assert redis.ask("ZCARD", f"{prefix}:queue:{{n:q}}:parked:0") == 2999
    assert jobs.depths("n:q", "n:q\x01", soon())[0][1:4] == (2999, 0, 2)
    waits = take(jobs, 5, group_limit=1)
    assert isinstance(waits, Held)
    assert waits.free_in > 50
    assert len(take(jobs, 5, group_limit=3).jobs) == 2
    finish(jobs, first)
    assert len(take(jobs, 1000).jobs) == 1000
    assert jobs.depths("n:q", "n:q\x01", soon())[0][1:3] == (1997, 0)
    assert [job.state for job in jobs.jobs_in("n:q", READY, 5, soon())] == [READY] * 5


def test_many_claims_that_expire_at_once(jobs: Jobs) -> None:
    """When thousands of claims expire, they are put back over several runs, and what is urgent comes first."""
    made = put(jobs, *[NewJob("1") for _ in range(3000)], NewJob("urgent", -1))
    act(jobs, *[Take("n:q", f"c-{number}", 1000, 0.5, "h") for number in range(3)], Take("n:q", "c-3", 1, 0.5, "h"))
    put(jobs, NewJob("more urgent", 1))
    time.sleep(0.6)  # until the claims have certainly ended
    assert [job.payload for job in take(jobs, 2).jobs] == ["more urgent", "1"]
    assert jobs.depths("n:q", "n:q\x01", soon())[0].claimed == 2
    assert take(jobs).jobs[0].id == made[1]


# -- out of memory ----------------------------------------------------------------------------------------------------


def test_out_of_memory_only_puts_fail(own_redis: RedisServer) -> None:
    """Under OOM no job is put, and it is said why; those there are can be taken, extended, ended, and seen."""
    with opened(own_redis.url()) as jobs:
        made = put(jobs, *[NewJob("1", key=str(number), group="g", max_tries=2) for number in range(6)])
        own_redis.ask("CONFIG", "SET", "maxmemory", "1kb")
        again = Put("n:q", "p-9", (NewJob("2"), NewJob("3", key="0")), "replace")
        (refused,) = act(jobs, again)
        assert isinstance(refused, dibs.StoreUnavailable)
        assert not refused.maybe_applied
        assert "out of memory" in str(refused)
        assert act(jobs, Put("n:q", "p-8", (NewJob("2", key="0"),), "keep")) == [PutDone((made[0],))]
        assert not isinstance(act(jobs, Put("n:q", "p-7", (NewJob("2", key="0"),), "replace"))[0], PutDone)
        first = act(jobs, Take("n:q", "c-1", 2, 60, "h", 2))[0]
        assert act(jobs, Take("n:q", "c-1", 2, 70, "h", 2)) == [first]
        assert act(jobs, Extend("n:q", made[:2], first.fencing_token, 80))[0].gone == ()  # type: ignore[arg-type]
        assert finish(jobs, first, RETRY, note="e") == Finished()
        assert finish(jobs, take(jobs, 2, group_limit=2), DEAD, note="e") == Finished()
        assert jobs.revive("n:q", None, soon()) == 2
        assert jobs.cancel("n:q", made[5:], 60.0, soon()) == made[5:]
        assert finish(jobs, take(jobs, 9), DONE, note="{}", keep=60.0) == Finished()
        assert jobs.forget("n:q", None, 0.0, soon()) == 6
        own_redis.ask("CONFIG", "SET", "maxmemory", "0")
        assert isinstance(act(jobs, again)[0], PutDone)


def test_evicting_servers_are_told(own_redis: RedisServer) -> None:
    """Where Redis may evict keys at will, `doctor` says that a queue may be lost."""
    own_redis.ask("CONFIG", "SET", "maxmemory", "1gb")
    own_redis.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    store = locate(own_redis.url())[0].open()
    try:
        (told,) = (finding for finding in store.check(soon()) if "evicted" in finding.promise)
        assert not told.kept
        assert "queue" in told.detail
        assert not store.capabilities.durable
        assert "queues" in store.capabilities.survives_restart
    finally:
        store.close()


def test_a_key_that_is_not_ours_fails_alone(redis: RedisServer, jobs: Jobs, prefix: str) -> None:
    """A key of another type where a queue should be: whoever wants that queue is told, its neighbours get theirs."""
    redis.ask("SET", f"{prefix}:queue:{{n:spoilt}}", "by somebody")
    spoilt, fine = act(jobs, *[Put(name, "p", (NewJob("1"),)) for name in ("n:spoilt", "n:fine")])
    assert isinstance(spoilt, dibs.SetupRequired)
    assert "n:spoilt" in str(spoilt)
    assert isinstance(fine, PutDone)
    redis.ask("SET", f"{prefix}:queue:{{n:torn}}:claimed", "by somebody")
    put(jobs, "1", name="n:torn")
    torn, fine = act(jobs, *[Take(name, "c", 1, 60, "h") for name in ("n:torn", "n:fine")])
    assert isinstance(torn, dibs.SetupRequired)
    assert isinstance(fine, Taken)
    with pytest.raises(dibs.SetupRequired, match="prefix="):
        jobs.jobs_in("n:torn", READY, 1, soon())


# -- crashes ----------------------------------------------------------------------------------------------------------


def test_a_server_killed_with_9_loses_no_job(own_redis: RedisServer) -> None:
    """kill -9 with appendfsync=always: what was put and taken is there afterwards, and a put repeated is one put."""
    new = [NewJob(str(number), key=str(number)) for number in range(20)]
    with opened(own_redis.url()) as jobs:
        made = put(jobs, *new, put_id="p-1")
        first = take(jobs, 5)
        finish(jobs, first._replace(jobs=first.jobs[:2]))
    own_redis.kill()
    own_redis.start()
    with opened(own_redis.url()) as jobs:
        assert put(jobs, *new, put_id="p-1") == made
        assert jobs.depths("n:q", "n:q\x01", soon())[0][1:5] == (15, 0, 3, 0)
        assert finish(jobs, first) == Finished(ids(first)[:2])
        assert ids(take(jobs, 100)) == tuple(made[5:])


def work(url: str, journal: str) -> None:
    """A worker process: takes a few jobs at a time, and writes down what it has ended.

    (Not into a queue that it shares with others: whoever is killed with that one's lock stops them all.)
    """
    with opened(url) as jobs, open(journal, "a", encoding="ascii", buffering=1) as done:
        while True:
            taken = take(jobs, 3, 0.5)
            if not isinstance(taken, Taken):
                time.sleep(0.01)  # before another look
                continue
            time.sleep(0.005)  # the work
            gone = finish(jobs, taken).gone
            for job in taken.jobs:
                if job.id not in gone:
                    done.write(f"{job.id}\n")


def test_workers_that_are_killed_lose_no_job(redis_url: str, jobs: Jobs, tmp_path: Path) -> None:
    """Of four worker processes two are killed with jobs in hand: every job is ended once, and none is left."""
    made = put(jobs, *[str(number) for number in range(300)])
    spawn = multiprocessing.get_context("spawn")
    journals = [tmp_path / f"worker-{number}" for number in range(4)]
    workers = [spawn.Process(target=work, args=(redis_url, str(journal)), daemon=True) for journal in journals]

    def ended() -> list[int]:
        lines = "".join(journal.read_text("ascii") for journal in journals if journal.exists()).splitlines()
        return [int(line) for line in lines]

    for worker in workers:
        worker.start()
    until = time.monotonic() + 20
    while len(ended()) < 30:
        assert time.monotonic() < until, "the workers do not begin"
        time.sleep(0.005)  # before another look
    for worker in workers[:2]:
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
    crashed = jobs.depths("n:q", "n:q\x01", soon())[0].claimed
    for worker in workers[:2]:
        worker.kill()
    until = time.monotonic() + 20
    while jobs.depths("n:q", "n:q\x01", soon()):
        assert time.monotonic() < until, jobs.depths("n:q", "n:q\x01", soon())
        time.sleep(0.02)  # before another look
    time.sleep(0.2)  # for the last of them to write down what it has ended
    for worker in workers[2:]:
        worker.terminate()
    told = ended()
    assert len(told) == len(set(told)), "a job was ended twice"
    assert set(told) <= set(made)
    # What the killed ones had ended and not told is no more than they had in hand.
    assert len(made) - len(told) <= 6 + crashed


# -- many servers -----------------------------------------------------------------------------------------------------


def test_queues_of_a_cluster() -> None:
    """Queues of one call are on all nodes of a cluster, each whole on one; hints reach whoever watches."""
    with RedisCluster() as cluster:
        store = locate(cluster.url())[0].open()
        jobs = cast("JobStore", store).jobs
        names = [f"n:{number}" for number in range(20)]
        puts = [Put(name, "p", (NewJob("1", key="k", group="g"), NewJob("2"))) for name in names]
        assert all(isinstance(outcome, PutDone) for outcome in act(jobs, *puts))
        takes = act(jobs, *[Take(name, "c", 5, 60, "h", 1) for name in names])
        assert [len(taken.jobs) for taken in takes] == [2] * 20
        assert {node.ask("DBSIZE") > 0 for node in cluster.nodes} == {True}
        assert [depth.claimed for depth in jobs.depths("n:", "n;", soon())] == [2] * 20
        ends = [Finish(name, ids(taken), taken.fencing_token, BACK) for name, taken in zip(names, takes, strict=True)]
        assert act(jobs, *ends) == [Finished()] * 20
        assert [job.state for job in jobs.jobs_in("n:3", READY, 5, soon())] == [READY] * 2
        store.close()
        only = ["hints_for_takers", "a_repeated_take_is_one_take", "results_are_kept", "depths_by_prefix"]
        assert check_store(cluster.url(), only=only) == len(only)


def test_too_few_replicas(own_redis: RedisServer) -> None:
    """With `min_replicas` nothing counts that too few replicas have: what was taken is given back."""
    with opened(own_redis.url()) as jobs:
        put(jobs, NewJob("1", max_tries=1))
    with opened(f"{own_redis.url()}?min_replicas=1") as jobs:
        for request in (Put("n:q", "p", (NewJob("2"),)), Take("n:q", "c", 1, 60, "h")):
            with pytest.raises(dibs.StoreUnavailable, match="min_replicas=1") as caught:
                jobs.act([request], soon(0.5))
            assert caught.value.maybe_applied
    with opened(own_redis.url()) as jobs:
        shown = jobs.jobs_in("n:q", READY, 5, soon())
        assert [(job.payload, job.tries) for job in shown] == [("1", 0), ("2", 0)]
        assert jobs.jobs_in("n:q", CLAIMED, 5, soon()) == []


def test_what_is_repeated_waits_for_replicas(own_redis: RedisServer) -> None:
    """With `min_replicas` what is said of jobs on another connection waits for replicas, though it finds all done."""
    job, keyed = NewJob("1"), NewJob("2", key="k")
    with replica_of(own_redis) as replica, opened(own_redis.url()) as careless, ExitStack() as stack:
        stores = [stack.enter_context(opened(f"{own_redis.url()}?min_replicas=1")) for _ in range(5)]
        for jobs in stores:
            jobs.depths("n:", "n;", soon())  # connects, which publishes something, and so is a write of this connection
        catch_up(own_redis)
        with replica.paused():
            put(careless, keyed)
            careless.act([Put("n:q", "p", (job,))], soon())
            (taken,) = careless.act([Take("n:q", "c", 1, 60, "h")], soon())
            assert isinstance(taken, Taken)
            own = [taken.jobs[0].id]
            careless.act([Put("n:last", "p", (job,))], soon())
            (last,) = careless.act([Take("n:last", "c", 1, 60, "h")], soon())
            assert isinstance(last, Taken)
            ending = Finish("n:last", (last.jobs[0].id,), last.fencing_token, DONE)
            careless.act([ending], soon())
            repeated: list[JobRequest] = [
                Put("n:q", "p", (job,)),
                Put("n:q", "p2", (keyed,), KEEP),
                Put("n:q", "p3", (keyed,)),
                Extend("n:q", tuple(own), taken.fencing_token, 30),
                ending,
            ]
            for request, jobs in zip(repeated, stores, strict=True):
                with pytest.raises(dibs.StoreUnavailable, match="min_replicas=1"):
                    jobs.act([request], soon(0.5))
