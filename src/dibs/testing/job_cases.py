"""Conformance cases on the contract of stores that keep queues: puts, takes, ends, order, and what operators see.

Each is a function of a ``Bench``. A claim that is to expire is waited for: a case asks until it has.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from dibs.clock import Deadline
from dibs.jobs import (
    BACK,
    CANCELLED,
    CLAIMED,
    CRASHES_MAX,
    DEAD,
    DONE,
    ERROR_CHARS_MAX,
    KEEP,
    LATER,
    LOOK_BACK_S,
    PAYLOAD_BYTES_MAX,
    READY,
    REPLACE,
    RETRY,
    Extend,
    Extended,
    Finish,
    Finished,
    KeyTaken,
    NewJob,
    Put,
    PutDone,
    Take,
    Taken,
)
from dibs.store import Held
from dibs.testing.case import PATIENCE_S, STORE_CASES, Bench, claims, equal, rising, together, until
from dibs.testing.store_cases import LOOKALIKES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.jobs import Depth, JobRequest, Jobs, JobStore, StoredJob
    from dibs.store import Capabilities
    from dibs.testing.case import Connection


def queues(capabilities: Capabilities) -> bool:
    return capabilities.queue


case = partial(STORE_CASES.case, promised=queues)


class Queue:
    """One queue of the store under test, over one connection."""

    def __init__(self, bench: Bench, name: str | None = None, connection: Connection | None = None) -> None:
        self.bench = bench
        self.connection = connection or bench.open()
        self.name = bench.name() if name is None else name
        self.jobs: Jobs = cast("JobStore", self.connection.store).jobs

    def elsewhere(self) -> Queue:
        """The same queue over another connection."""
        return Queue(self.bench, self.name)

    def act(self, *requests: JobRequest) -> list[Any]:
        outcomes: list[Any] = self._patiently(lambda deadline: self.jobs.act(requests, deadline))
        equal(len(outcomes), len(requests), "outcomes of one call")
        return outcomes

    def _patiently(self, act: Callable[[Deadline], Any]) -> Any:
        return self.connection._patiently(act)

    def put(self, *jobs: NewJob | str | bytes, on_conflict: str = "raise", put_id: str | None = None) -> list[int]:
        """Put jobs that must be taken in; their ids."""
        outcome = self.try_put(*jobs, on_conflict=on_conflict, put_id=put_id)
        assert isinstance(outcome, PutDone), f"a put was refused: {outcome}"
        return list(outcome.ids)

    def try_put(self, *jobs: NewJob | str | bytes, on_conflict: str = "raise", put_id: str | None = None) -> Any:
        new = tuple(job if isinstance(job, NewJob) else NewJob(job) for job in jobs)
        return self.act(Put(self.name, put_id or os.urandom(8).hex(), new, on_conflict))[0]

    def take(self, n: int = 1, ttl: float = 60, *, claim: str | None = None, group_limit: int = 0) -> Taken | Held:
        """What a take is told, whatever it is."""
        claim = claim or claims(1)[0]
        outcome: Taken | Held = self.act(Take(self.name, claim, n, ttl, f"host/{claim[:12]}", group_limit))[0]
        return outcome

    def taken(self, n: int = 1, ttl: float = 60, **options: Any) -> Taken:
        """What is taken, of which there must be something."""
        outcome = self.take(n, ttl, **options)
        assert isinstance(outcome, Taken), f"nothing was to be had: {outcome}; {self.depth()}"
        return outcome

    def until_taken(self, what: str, **options: Any) -> Taken:
        """Ask until there is something, as when a claim is to expire."""

        def attempt() -> Taken | None:
            outcome = self.take(**options)
            return outcome if isinstance(outcome, Taken) else None

        return until(attempt, what)

    def finish(self, taken: Taken, end: str = DONE, ids: Sequence[int] | None = None, **fields: Any) -> Finished:
        of_all = tuple(job.id for job in taken.jobs)
        request = Finish(self.name, of_all if ids is None else tuple(ids), taken.fencing_token, end, **fields)
        outcome: Finished = self.act(request)[0]
        return outcome

    def extend(self, taken: Taken, ttl: float = 60) -> Extended:
        outcome: Extended = self.act(Extend(self.name, ids(taken), taken.fencing_token, ttl))[0]
        return outcome

    def job(self, job: int) -> StoredJob:
        found = self.found(job)
        assert found is not None, f"job {job} is not in the store"
        return found

    def found(self, job: int) -> StoredJob | None:
        found: StoredJob | None = self._patiently(lambda deadline: self.jobs.find(self.name, job, deadline))
        return found

    def jobs_in(self, state: str, limit: int = 100) -> list[StoredJob]:
        found: list[StoredJob] = self._patiently(lambda deadline: self.jobs.jobs_in(self.name, state, limit, deadline))
        return found

    def depth(self) -> Depth | None:
        found: list[Depth] = self._patiently(lambda deadline: self.jobs.depths(self.name, self.name + "\x01", deadline))
        equal([depth.name for depth in found][:1], [self.name] if found else [], "whose depth is told")
        return found[0] if found else None

    def counts(self) -> tuple[int, int, int, int]:
        """Ready, later, claimed, dead."""
        depth = self.depth()
        return (0, 0, 0, 0) if depth is None else depth[1:5]

    def cancel(self, *of: int, keep: float = 0.0) -> list[int]:
        cancelled: list[int] = self._patiently(lambda deadline: self.jobs.cancel(self.name, of, keep, deadline))
        return cancelled

    def revive(self, *of: int) -> int:
        revived: int = self._patiently(lambda deadline: self.jobs.revive(self.name, of or None, deadline))
        return revived

    def forget(self, *of: int, older_than: float = 0.0) -> int:
        forgotten: int = self._patiently(lambda deadline: self.jobs.forget(self.name, of or None, older_than, deadline))
        return forgotten

    def payloads(self, n: int = 100, **options: Any) -> list[str | bytes]:
        outcome = self.take(n, **options)
        return [job.payload for job in outcome.jobs] if isinstance(outcome, Taken) else []


def ids(taken: Taken) -> tuple[int, ...]:
    return tuple(job.id for job in taken.jobs)


def payloads(taken: Taken) -> list[str | bytes]:
    return [job.payload for job in taken.jobs]


def nothing(outcome: object, what: str) -> Held:
    assert isinstance(outcome, Held), f"{what}: {outcome}"
    return outcome


# -- P17: nothing is lost ---------------------------------------------------------------------------------------------


@case("P17")
def a_job_is_taken_and_done(bench: Bench) -> None:
    """What was put is ready, then claimed by whoever takes it, and gone when it is done."""
    queue = Queue(bench)
    (job,) = queue.put('{"to": "ada"}')
    equal(queue.counts(), (1, 0, 0, 0), "ready, later, claimed, dead after a put")
    taken = queue.taken()
    equal(ids(taken), (job,), "the job that was taken")
    equal(taken.jobs[0].payload, '{"to": "ada"}', "its payload")
    equal((taken.jobs[0].tries, taken.jobs[0].crashes), (1, 0), "its tries and crashes")
    assert taken.fencing_token > 0, taken
    assert abs(taken.acquired_at - time.time()) < 3600, f"acquired_at is no Unix time: {taken.acquired_at}"
    assert abs(taken.jobs[0].created_at - time.time()) < 3600, f"created_at is no Unix time: {taken.jobs[0]}"
    equal(queue.counts(), (0, 0, 1, 0), "ready, later, claimed, dead after a take")
    nothing(queue.elsewhere().take(), "the only job, claimed by another")
    equal(queue.finish(taken), Finished(), "its end")
    equal(queue.counts(), (0, 0, 0, 0), "ready, later, claimed, dead after its end")
    equal(queue.found(job), None, "a job that is done")


@case("P17")
def payloads_are_kept_as_they_are(bench: Bench) -> None:
    """JSON text and bytes come back as they were, whatever is in them, up to the limit."""
    given: list[str | bytes] = [
        "null",
        '""',
        "\"\\u0000 é 🔒 '' % {} \\\\\"",
        b"",
        b"\x00\xff\x80'%",
        bytes(range(256)),
    ]
    given += ["x" * PAYLOAD_BYTES_MAX, b"\xff" * PAYLOAD_BYTES_MAX]
    queue = Queue(bench)
    put = queue.put(*given)
    taken = queue.taken(100)
    equal(ids(taken), tuple(put), "the jobs in their order")
    for job, payload in zip(taken.jobs, given, strict=True):
        assert job.payload == payload, f"{payload[:40]!r}… came back as {job.payload[:40]!r}…"
        assert type(job.payload) is type(payload)


@case("P17, P20")
def queues_keep_apart(bench: Bench) -> None:
    """Jobs, keys and groups of queues whose names look alike have nothing to do with each other."""
    base = bench.name()
    connection = bench.open()
    names = [base + text for text in LOOKALIKES if len((base + text).encode()) <= 255]
    of = [Queue(bench, name, connection) for name in names]
    for queue in of:
        queue.put(NewJob(f'"{len(queue.name)}"', key="k", group="g"))
    for queue in of:
        equal(queue.payloads(5, group_limit=1), [f'"{len(queue.name)}"'], f"what is in {queue.name!r}")


@case("P17")
def keys_and_groups_are_told_apart(bench: Bench) -> None:
    """Keys that look alike are different keys, and groups that look alike are different groups."""
    queue = Queue(bench)
    put = queue.put(*[NewJob("1", key=text, group=text) for text in LOOKALIKES])
    equal(len(set(put)), len(LOOKALIKES), "jobs with as many different keys")
    taken = queue.taken(1000, group_limit=1)
    equal([(job.key, job.group) for job in taken.jobs], [(text, text) for text in LOOKALIKES], "keys and groups")


@case("P17")
def a_put_is_all_or_nothing(bench: Bench) -> None:
    """When one job of a put is refused for its key, none of them is put."""
    queue = Queue(bench)
    (first,) = queue.put(NewJob("1", key="k"))
    refused = queue.try_put("2", NewJob("3", key="k"), "4")
    equal(refused, KeyTaken("k", first, False), "a put whose key a live job has")
    equal(queue.counts(), (1, 0, 0, 0), "ready, later, claimed, dead")
    queue.taken()
    equal(queue.try_put(NewJob("3", key="k")), KeyTaken("k", first, True), "a put whose key a claimed job has")


@case("P17")
def ten_thousand_in_one_put(bench: Bench) -> None:
    """Ten thousand jobs are put at once, and taken in their order."""
    queue = Queue(bench)
    put = queue.put(*[NewJob(str(number)) for number in range(10_000)])
    rising(put, "ids in the order of the put")
    taken = queue.taken(1000)
    equal(payloads(taken), [str(number) for number in range(1000)], "the first thousand")
    equal(queue.finish(taken), Finished(), "their end")
    equal(queue.counts(), (9000, 0, 0, 0), "ready, later, claimed, dead")
    equal(payloads(queue.taken(1))[0], "1000", "the next")


@case("P17, P5")
def a_repeated_put_is_one_put(bench: Bench) -> None:
    """A put repeated with its id, over any connection, puts nothing more and tells the same ids."""
    queue = Queue(bench)
    new = [NewJob("1"), NewJob("2", priority=5), NewJob("3", delay=60), NewJob("4", key="k")]
    (mine,) = claims(1)
    put = queue.put(*new, put_id=mine)
    equal(queue.elsewhere().put(*new, put_id=mine), put, "the ids of the repeated put")
    equal(queue.counts(), (3, 1, 0, 0), "ready, later, claimed, dead")
    queue.taken(100)
    equal(queue.put(*new, put_id=mine), put, "the ids of the put repeated after a take")
    equal(queue.counts(), (0, 1, 3, 0), "ready, later, claimed, dead")


@case("P17, P5")
def a_repeated_take_is_one_take(bench: Bench) -> None:
    """A take repeated by its claim, over any connection, is told the same jobs with the same token and tries."""
    queue, (mine,) = Queue(bench), claims(1)
    queue.put(*"12345")
    first = queue.taken(2, 5, claim=mine)
    for again in (queue, queue.elsewhere()):
        repeated = again.taken(2, 60, claim=mine)
        equal(repeated, first, "the answer to the repeated take")
    expires_at = queue.job(first.jobs[0].id).expires_at or 0.0
    assert expires_at > first.acquired_at + 50, f"a repeated take moves the end: {expires_at - first.acquired_at}"
    equal(queue.counts(), (3, 0, 2, 0), "ready, later, claimed, dead")


@case("P17")
def each_job_goes_to_one(bench: Bench) -> None:
    """Many takers at once, over many connections: each job is taken by exactly one of them."""
    queue = Queue(bench)
    put = queue.put(*[str(number) for number in range(300)])

    def work(mine: Queue) -> list[int]:
        had: list[int] = []
        while isinstance(outcome := mine.take(7), Taken):
            had += ids(outcome)
            equal(mine.finish(outcome), Finished(), "an end")
        return had

    had = together(partial(work, queue.elsewhere()) for _ in range(6))
    # Whoever finds only what others have locked or claimed stops; what is left is taken by the last to look.
    rest = work(queue)
    equal(sorted([job for some in had for job in some] + rest), put, "what was taken by anybody")
    equal(queue.counts(), (0, 0, 0, 0), "ready, later, claimed, dead")


@case("P17")
def requests_of_one_call_are_carried_out_by_kind(bench: Bench) -> None:
    """Of one call the ends come first, then the puts, then the takes; each has its own outcome in its own place."""
    queue = Queue(bench)
    (first,) = queue.put(NewJob("1", key="k"))
    taken = queue.taken()
    (mine,) = claims(1)
    outcomes = queue.act(
        Take(queue.name, mine, 5, 60, "host/x"),
        Put(queue.name, f"{mine}-1", (NewJob("2", key="k"),)),
        Put(queue.name, f"{mine}-2", (NewJob("3", key="k"),)),
        Put(queue.name, f"{mine}-3", (NewJob("4"),)),
        Finish(queue.name, (first,), taken.fencing_token, DONE),
        Finish(queue.name, (first,), taken.fencing_token + 1, DONE),
    )
    assert isinstance(outcomes[0], Taken), outcomes[0]
    equal(payloads(outcomes[0]), ["2", "4"], "what was put in the same call")
    equal([type(outcome) for outcome in outcomes[1:4]], [PutDone, KeyTaken, PutDone], "the puts")
    equal(outcomes[4:], [Finished(), Finished((first,))], "the ends")


# -- P18: only the current claim --------------------------------------------------------------------------------------


@case("P18")
def an_end_counts_once(bench: Bench) -> None:
    """A job is ended once; every later end by the same claim is gone and changes nothing."""
    queue = Queue(bench)
    for end, options in ((DONE, {}), (RETRY, {"delay": 60.0, "note": "boom"}), (BACK, {}), (DEAD, {"note": "boom"})):
        queue.put("1")
        taken = queue.taken()
        equal(queue.finish(taken, end, **options), Finished(), f"the first end: {end}")
        before = queue.counts()
        for again in (DONE, RETRY, BACK, DEAD):
            equal(queue.finish(taken, again), Finished(ids(taken)), f"{again} after {end}")
        equal(queue.extend(taken).gone, ids(taken), f"an extension after {end}")
        equal(queue.counts(), before, f"ready, later, claimed, dead after everything that came after {end}")
        queue.cancel(*ids(taken))
        queue.forget()


@case("P18")
def a_late_end_is_refused(bench: Bench) -> None:
    """Once a claim has expired and another has taken the job, nothing the first one does works."""
    queue = Queue(bench)
    (job,) = queue.put("1")
    old = queue.taken(1, bench.short_ttl)
    new = queue.elsewhere().until_taken("the job of a claim that expired")
    equal(ids(new), (job,), "the job that was taken again")
    rising([old.fencing_token, new.fencing_token], "the tokens of its claims")
    equal((new.jobs[0].tries, new.jobs[0].crashes), (2, 1), "tries and crashes of a job whose claim expired")
    for end in (DONE, RETRY, BACK, DEAD):
        equal(queue.finish(old, end), Finished((job,)), f"a late {end}")
    equal(queue.extend(old).gone, (job,), "a late extension")
    equal(queue.counts(), (0, 0, 1, 0), "ready, later, claimed, dead")
    equal(queue.finish(new), Finished(), "the end by whoever has it")


@case("P18")
def an_expired_claim_ends_nothing(bench: Bench) -> None:
    """Once a claim has expired it ends nothing, also while nobody has taken the job."""
    queue = Queue(bench)
    (job,) = queue.put("1")
    taken = queue.taken(1, bench.short_ttl)
    until(lambda: queue.job(job).state == READY, "the claim has not expired")
    equal(queue.finish(taken), Finished((job,)), "an end by an expired claim")
    equal(queue.extend(taken).gone, (job,), "an extension by an expired claim")
    equal(queue.job(job).state, READY, "its state")


@case("P18")
def some_of_a_claim(bench: Bench) -> None:
    """The jobs of a claim are ended in any order and way; those that were not its own are named."""
    queue = Queue(bench)
    put = queue.put(*"12345")
    taken = queue.taken(4)
    equal(queue.finish(taken, DONE, put[1:2]), Finished(), "the end of one")
    equal(queue.finish(taken, RETRY, put[0:3], note="e"), Finished((put[1],)), "of three, of which one was done")
    equal(queue.finish(taken, DONE, put[3:]), Finished((put[4],)), "of two, of which one was never claimed")
    equal(queue.finish(taken, DONE, [10**15]), Finished((10**15,)), "of one that is not there")
    equal(queue.counts(), (3, 0, 0, 0), "ready, later, claimed, dead")


@case("P18")
def tokens_rise_for_each_job(bench: Bench) -> None:
    """Each claim on a job has a greater token than all before, also beside jobs that were claimed less often."""
    queue = Queue(bench)
    (first,) = queue.put("1")
    tokens = []
    for number in range(5):
        queue.put(str(number))
        taken = queue.taken(10)
        assert first in ids(taken), taken
        tokens.append(taken.fencing_token)
        equal(queue.finish(taken, BACK), Finished(), "giving all back")
    rising(tokens, "the tokens of one job")
    taken = queue.taken(10)
    queue.finish(taken, DEAD)
    queue.revive()
    rising([*tokens, taken.fencing_token, queue.taken(10).fencing_token], "the tokens of a job that was revived")


@case("P18")
def extended_claims_last(bench: Bench) -> None:
    """A claim that is extended outlives its first time, and no extension shortens it."""
    queue = Queue(bench)
    (job,) = queue.put("1")
    taken = queue.taken(1, bench.short_ttl)
    end = time.monotonic() + 2 * bench.short_ttl
    while time.monotonic() < end:
        extended = queue.extend(taken, bench.short_ttl)
        equal(extended.gone, (), "jobs that an extension did not find")
        time.sleep(bench.short_ttl / 5)  # the renewals of a worker that lives
    nothing(queue.elsewhere().take(), "a job whose claim is extended")
    extended = queue.extend(taken, 60)
    assert extended.expires_at > taken.acquired_at + 50, extended
    queue.extend(taken, 1)
    expires_at = queue.job(job).expires_at or 0.0
    assert expires_at > taken.acquired_at + 50, f"an extension shortened the claim: {expires_at - taken.acquired_at}"
    equal(queue.finish(taken), Finished(), "its end")


# -- P19: tries -------------------------------------------------------------------------------------------------------


@case("P19")
def tries_are_counted_at_the_claim(bench: Bench) -> None:
    """A job that fails has as many tries as it was given; then it is dead, with its last error."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob("1", max_tries=3))
    for number in (1, 2, 3):
        taken = queue.taken()
        equal(taken.jobs[0].tries, number, "the number of the try")
        equal(queue.finish(taken, RETRY, note=f"error {number}"), Finished(), "a failure")
    nothing(queue.take(), "a job without tries left")
    dead = queue.job(job)
    equal((dead.state, dead.error, dead.tries), (DEAD, "error 3", 3), "state, error and tries")
    equal(queue.counts(), (0, 0, 0, 1), "ready, later, claimed, dead")
    equal([job.id for job in queue.jobs_in(DEAD)], [job], "the dead")


@case("P19")
def a_job_given_back_costs_no_try(bench: Bench) -> None:
    """A job that is given back is as it was, in its place in the order, and its try is not counted."""
    queue = Queue(bench)
    put = queue.put(NewJob("1", max_tries=1), "2")
    for _ in range(5):
        taken = queue.taken(1)
        equal((ids(taken), taken.jobs[0].tries), ((put[0],), 1), "the first job, and its try")
        equal(queue.finish(taken, BACK), Finished(), "giving it back")


@case("P19")
def a_job_that_ends_its_worker_ends_dead(bench: Bench) -> None:
    """A job whose claims all expire is dead after its tries, with an error that says so."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob("1", max_tries=2))
    queue.taken(1, bench.short_ttl)
    queue.until_taken("the job of a claim that expired", ttl=bench.short_ttl)

    def buried() -> bool:
        nothing(queue.take(), "a job without tries left")
        return queue.job(job).state == DEAD

    until(buried, "a job that ended its worker twice, of two tries, is not dead")
    dead = queue.job(job)
    equal((dead.tries, dead.crashes), (2, 2), "its tries and crashes")
    assert dead.error, "a dead job says why"


@case("P19")
def a_job_that_crashed_is_claimed_alone(bench: Bench) -> None:
    """A job whose claim has expired twice is claimed alone, and so no neighbour shares its fate."""
    queue = Queue(bench)
    (bad,) = queue.put("0")
    for _ in range(CRASHES_MAX):
        queue.until_taken("a job whose claim expired", ttl=bench.short_ttl)
    put = queue.put("1", "2")
    until(lambda: queue.job(bad).state == READY, "the claim has not expired")
    alone = queue.taken(10)
    equal((ids(alone), alone.jobs[0].crashes), ((bad,), CRASHES_MAX), "the job that crashed, and its crashes")
    equal(ids(queue.taken(10)), tuple(put), "its neighbours, after it")


@case("P19")
def a_crashed_neighbour_is_left_for_the_next(bench: Bench) -> None:
    """A take that has others already leaves a job that crashed often for a take of its own."""
    queue = Queue(bench)
    (bad,) = queue.put("0")
    for _ in range(CRASHES_MAX):
        queue.until_taken("a job whose claim expired", ttl=bench.short_ttl)
    first = queue.put(NewJob("1", priority=1))
    until(lambda: queue.job(bad).state == READY, "the claim has not expired")
    (last,) = queue.put("2")
    equal(ids(queue.taken(10)), (*first, last), "the take of the others")
    equal(ids(queue.taken(10)), (bad,), "the take of the one that crashed")


# -- order ------------------------------------------------------------------------------------------------------------


@case("the order of jobs")
def the_order_of_jobs(bench: Bench) -> None:
    """Jobs are taken by priority, the greatest first, and else in the order in which they were put."""
    queue = Queue(bench)
    for payload, priority in (("c", 0), ("e", -1), ("a", 100), ("d", 0), ("b", 1), ("f", -100)):
        queue.put(NewJob(payload, priority))
    equal([job.payload for job in queue.jobs_in(READY)], list("abcdef"), "the list")
    equal(queue.payloads(4), list("abcd"), "the first four")
    queue.put(NewJob("now", 50))
    equal(queue.payloads(4), ["now", "e", "f"], "an urgent one that came later, and the rest")


@case("the order of jobs")
def an_urgent_job_passes_the_others(bench: Bench) -> None:
    """A job of a greater priority is taken next, however many were taken before it came."""
    queue = Queue(bench)
    queue.put(*[NewJob(str(number)) for number in range(50)])
    for _ in range(5):
        equal(queue.finish(queue.taken(5)), Finished(), "the end of some")
        queue.put(NewJob("urgent", 1))
        taken = queue.taken(5)
        equal(payloads(taken)[0], "urgent", "what is taken first")
        queue.finish(taken)


@case("the order of jobs")
def what_was_passed_over_is_found(bench: Bench) -> None:
    """A job before those that were taken last is found soon: one that was given back, one whose claim expired."""
    queue = Queue(bench)
    put = queue.put(*[str(number) for number in range(200)])
    first, second = queue.taken(2), queue.taken(2, bench.short_ttl)
    queue.finish(queue.taken(10))
    queue.finish(first, BACK)
    seen: list[int] = []

    def both() -> bool:
        taken = queue.taken(1)
        seen.extend(ids(taken))
        queue.finish(taken, DONE)
        time.sleep(LOOK_BACK_S / 10)  # for the store to look back
        return {*put[:4]} <= {*seen}

    until(both, f"jobs {put[:4]} are passed over")
    equal(ids(second), tuple(put[2:4]), "whose claim expired")


@case("the order of jobs")
def delayed_jobs(bench: Bench) -> None:
    """A job with a delay, or a time, is not taken before; whoever finds nothing is told when it is due."""
    queue = Queue(bench)
    (soon,) = queue.put(NewJob("soon", delay=bench.short_ttl))
    (far,) = queue.put(NewJob("far", at=time.time() + 3600))
    (past,) = queue.put(NewJob("past", at=time.time() - 3600))
    equal(queue.counts(), (1, 2, 0, 0), "ready, later, claimed, dead")
    equal([job.id for job in queue.jobs_in(LATER)], [soon, far], "those that are due later")
    equal(ids(queue.taken(10)), (past,), "what is due")
    free_in = nothing(queue.take(), "a delayed job").free_in
    assert 0 <= free_in <= bench.short_ttl + 0.01, f"told to come back in {free_in} s, due in {bench.short_ttl}"
    began = time.monotonic()
    taken = queue.until_taken("a job that is due", n=10)
    equal(ids(taken), (soon,), "what is due then")
    assert time.monotonic() - began < bench.short_ttl + PATIENCE_S / 2
    equal(queue.finish(taken, RETRY, delay=3600.0, note="e"), Finished(), "a failure, to be tried in an hour")
    equal(queue.counts(), (0, 2, 1, 0), "ready, later, claimed, dead")
    due_in = queue.job(soon).due_at - time.time()
    assert 3500 < due_in < 3700, f"a retry in an hour is due in {due_in} s"


@case("the order of jobs")
def told_when_a_claim_expires(bench: Bench) -> None:
    """Whoever finds nothing is told when the first claim expires; of an empty queue nothing is known."""
    queue = Queue(bench)
    equal(nothing(queue.take(), "an empty queue").free_in, float("inf"), "when to come back to an empty queue")
    queue.put("1", "2")
    queue.taken(1, 30)
    queue.taken(1, 60)
    free_in = nothing(queue.take(), "two claimed jobs").free_in
    assert 20 < free_in <= 30.01, f"told to come back in {free_in} s, the first claim expires in 30"


@case("the order of jobs")
def groups_in_order(bench: Bench) -> None:
    """With a limit of 1 the jobs of a group are taken one after the other, in their order, whatever their priority."""
    queue = Queue(bench)
    for number, priority in ((1, 0), (2, 5), (3, 0)):
        queue.put(NewJob(f"a{number}", priority, group="a"), NewJob(f"b{number}", priority, group="b"))
    queue.put("free")
    for number in (1, 2, 3):
        taken = queue.taken(10, group_limit=1)
        mine = [job for job in taken.jobs if job.group is not None]
        equal(sorted(map(str, (job.payload for job in mine))), [f"a{number}", f"b{number}"], "one of each group")
        nothing(queue.elsewhere().take(10, group_limit=1), "the next of each group, while these are worked")
        failed = [job.id for job in mine if job.payload == f"a{number}"]
        queue.finish(taken, RETRY, failed, delay=0.0, note="e")
        (job,) = failed
        again = queue.until_taken("a job that failed", n=10, group_limit=1)
        equal(ids(again), (job,), "the one that failed, before its successors")
        queue.finish(again)
        queue.finish(taken)


@case("the order of jobs")
def groups_with_a_limit(bench: Bench) -> None:
    """With a limit of n at most n jobs of a group are claimed at a time, also over many connections at once."""
    queue = Queue(bench)
    put = queue.put(*[NewJob(str(number), group="g") for number in range(12)])
    takes = together(partial(queue.elsewhere().take, 2, group_limit=3) for _ in range(5))
    had = [job for outcome in takes if isinstance(outcome, Taken) for job in ids(outcome)]
    had += ids(outcome) if isinstance(outcome := queue.take(5, group_limit=3), Taken) else ()
    equal(sorted(had), put[:3], "what five connections have of a group with a limit of 3")


# -- keys -------------------------------------------------------------------------------------------------------------


@case("unique keys")
def a_key_is_unique_while_its_job_lives(bench: Bench) -> None:
    """A live job's key is refused; once it has ended, in whatever way, the key is free."""
    queue = Queue(bench)
    for end in (DONE, DEAD):
        (job,) = queue.put(NewJob("1", key="k"))
        equal(queue.try_put(NewJob("2", key="k")), KeyTaken("k", job, False), "a second job with the key")
        taken = queue.taken()
        equal(queue.finish(taken, RETRY, note="e"), Finished(), "a failure")
        equal(queue.try_put(NewJob("2", key="k")), KeyTaken("k", job, False), "a second one after a failure")
        queue.finish(queue.until_taken("the job again"), end, note=None if end == DONE else "e", keep=60.0)
    (job,) = queue.put(NewJob("3", key="k"))
    equal(queue.cancel(job), [job], "the live one, cancelled")
    queue.put(NewJob("4", key="k"))


@case("unique keys")
def keep_what_has_the_key(bench: Bench) -> None:
    """With KEEP the live job stays as it is, and its id is told; the others of the put are put."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob("1", key="k"))
    put = queue.put(NewJob("2", key="k", priority=9), NewJob("3", key="l"), NewJob("4"), on_conflict=KEEP)
    equal(put[0], job, "the id told for the one that was left out")
    equal(queue.payloads(), ["1", "3", "4"], "what there is")
    equal(queue.put(NewJob("5", key="k"), on_conflict=KEEP), [job], "the id of a claimed one")


@case("unique keys")
def replace_what_has_the_key(bench: Bench) -> None:
    """With REPLACE the live job becomes what was put, under its own id; one that is claimed is not replaced."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob('"1"', key="k", max_tries=1, delay=3600))
    put = queue.put(NewJob(b"2", 9, key="k", group="g"), NewJob("3"), on_conflict=REPLACE)
    equal(put[0], job, "the id of the one that was replaced")
    found = queue.job(job)
    equal((found.payload, found.priority, found.group, found.max_tries), (b"2", 9, "g", 0), "what it has become")
    taken = queue.taken(1)
    equal(ids(taken), (job,), "the one that was replaced, due at once")
    refused = queue.try_put(NewJob("4", key="k"), on_conflict=REPLACE)
    equal(refused, KeyTaken("k", job, True), "replacing a claimed one")
    equal(queue.finish(taken, RETRY, note="e"), Finished(), "its failure")
    queue.put(NewJob("5", key="k"), on_conflict=REPLACE)
    found = queue.job(job)
    equal((found.payload, found.tries, found.error), ("5", 0, None), "payload, tries and error of what failed before")


# -- operators --------------------------------------------------------------------------------------------------------


@case("see and mend queues")
def jobs_are_shown(bench: Bench) -> None:
    """A job is shown with all there is to know of it, in whichever state."""
    queue, (mine,) = Queue(bench), claims(1)
    (job,) = queue.put(NewJob('{"a": 1}', 7, key="k", group="g", max_tries=4))
    shown = queue.job(job)
    equal(shown[1:8], (READY, '{"a": 1}', 7, 0, 4, 0, shown.fencing_token), "a ready job")
    equal((shown.key, shown.group, shown.holder), ("k", "g", None), "key, group and holder of a ready job")
    taken = queue.taken(claim=mine)
    shown = queue.job(job)
    equal((shown.state, shown.fencing_token, shown.tries), (CLAIMED, taken.fencing_token, 1), "a claimed job")
    equal(shown.holder, f"host/{mine[:12]}", "the holder of a claimed job")
    assert shown.expires_at is not None
    assert 50 < shown.expires_at - time.time() < 70, f"a claim of 60 s ends in {shown.expires_at - time.time()} s"
    queue.finish(taken, RETRY, delay=60.0, note="x" * ERROR_CHARS_MAX)
    shown = queue.job(job)
    equal((shown.state, len(shown.error or "")), (LATER, ERROR_CHARS_MAX), "a job that failed")
    equal([found.id for state in (READY, CLAIMED, DEAD) for found in queue.jobs_in(state)], [], "other lists")
    equal(queue.elsewhere().job(job), shown, "what another connection sees")
    equal(Queue(bench, bench.name()).found(job), None, "a job of another queue")


@case("see and mend queues")
def results_are_kept(bench: Bench) -> None:
    """A job done with ``keep`` stays with its result until that time is over, and is then gone without a purge."""
    queue = Queue(bench)
    (kept,) = queue.put("1")
    queue.finish(queue.taken(), DONE, note='{"sent": true}', keep=60.0)
    shown = queue.job(kept)
    equal((shown.state, shown.result), (DONE, '{"sent": true}'), "a job that was kept")
    assert shown.ended_at is not None
    equal(queue.counts(), (0, 0, 0, 0), "ready, later, claimed, dead")
    (short,) = queue.put("2")
    queue.finish(queue.taken(), DONE, note="2", keep=0.05)
    equal([job.id for job in queue.jobs_in(DONE)][-1:], [kept], "the first that was done")
    time.sleep(0.1)  # its time is over

    def forgotten() -> bool:
        queue.put("3")
        queue.finish(queue.taken(), DONE, keep=60.0)
        return queue.found(short) is None

    until(forgotten, "what was kept for a moment is there for ever")
    equal(queue.job(kept).state, DONE, "what was kept for longer")
    equal(queue.forget(older_than=3600.0), 0, "what ended an hour ago")
    equal(queue.forget(kept), 1, "what is to be forgotten")
    equal(queue.found(kept), None, "what was forgotten")


@case("see and mend queues")
def cancelled_jobs(bench: Bench) -> None:
    """A cancelled job is taken by nobody and ended by nobody, also when it was claimed."""
    queue = Queue(bench)
    put = queue.put("1", "2", "3")
    taken = queue.taken(1)
    equal(sorted(queue.cancel(put[0], put[1], 10**15, keep=60.0)), put[:2], "those that were live")
    equal(queue.cancel(*put[:2]), [], "cancelled again")
    equal(queue.finish(taken), Finished((put[0],)), "the end of a cancelled job")
    equal(queue.extend(taken).gone, (put[0],), "an extension of a cancelled job")
    equal([job.id for job in queue.jobs_in(CANCELLED)][::-1], put[:2], "those that were cancelled")
    equal(queue.payloads(), ["3"], "what is left")


@case("see and mend queues")
def dead_jobs_are_revived(bench: Bench) -> None:
    """A dead job is kept until somebody revives it, with all its tries, or forgets it."""
    queue = Queue(bench)
    put = queue.put(*[NewJob(text, key=text, max_tries=1) for text in "123"])
    queue.finish(queue.taken(3), DEAD, note="e")
    equal(sorted(job.id for job in queue.jobs_in(DEAD)), put, "the dead")
    equal(queue.revive(put[0]), 1, "one that was revived")
    taken = queue.taken(3)
    equal((ids(taken), taken.jobs[0].tries), ((put[0],), 1), "the one that was revived, at its first try")
    queue.put(NewJob("4", key="2"))
    equal(queue.revive(), 1, "revived of two, of which one's key is taken")
    equal(sorted(map(str, queue.payloads())), ["3", "4"], "what is ready now")
    equal([job.id for job in queue.jobs_in(DEAD)], [put[1]], "the one that stays dead")
    equal(queue.forget(), 1, "what was forgotten")
    equal(queue.counts(), (0, 0, 3, 0), "ready, later, claimed, dead")


@case("see and mend queues")
def depths_by_prefix(bench: Bench) -> None:
    """Queues are listed by prefix with how deep they are; the age is that of the oldest ready job."""
    base = bench.name()
    connection = bench.open()
    first, second = Queue(bench, base + "a", connection), Queue(bench, base + "b", connection)
    first.put("1", NewJob("2", delay=60))
    second.put("3")
    second.taken()
    depths = connection._patiently(lambda deadline: second.jobs.depths(base, base + "\U0010ffff", deadline))
    equal([depth[:5] for depth in depths], [(base + "a", 1, 1, 0, 0), (base + "b", 0, 0, 1, 0)], "the depths")
    equal([depth.oldest_s < 60 for depth in depths], [True, True], "how old the oldest is")
    time.sleep(0.05)  # the age grows
    later = first.depth()
    assert later is not None
    assert later.oldest_s >= 0.04, later


@case("P23")
def hints_for_takers(bench: Bench) -> None:
    """Where the store signals, whoever watches for a queue is told when something is put."""
    queue, address = Queue(bench), claims(1)[0].partition("-")[0]
    watch = bench.open().watch(address)
    if watch is None:
        return
    try:
        nothing(queue.take(), "an empty queue")
        list(watch.changed([queue.name]))
        time.sleep(0.05)  # so that this put is not taken for one of those before
        queue.put("1")
        until(lambda: queue.name in watch.changed([queue.name]), "the watch was not told of a put")
    finally:
        watch.close()
