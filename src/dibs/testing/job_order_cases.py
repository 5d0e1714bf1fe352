"""Conformance cases on the contract of stores that keep queues: the order of jobs, groups, and unique keys."""

from __future__ import annotations

import time
from functools import partial

from dibs.jobs import (
    BACK,
    DEAD,
    DONE,
    KEEP,
    LATER,
    LOOK_BACK_S,
    READY,
    REPLACE,
    RETRY,
    Finished,
    KeyTaken,
    NewJob,
    Taken,
)
from dibs.testing.case import PATIENCE_S, Bench, equal, together, until
from dibs.testing.job_bench import Queue, case, ids, nothing, payloads

# More jobs than a take looks through before it looks for those of other groups.
BACKLOG = 700


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
def what_is_given_back_has_its_place(bench: Bench) -> None:
    """Jobs that were given back are the next that are taken, the urgent ones as well as the others behind them."""
    for group_limit in (0, 1):
        queue = Queue(bench)
        queue.put(NewJob("now", 7), *"abcd")
        for _ in range(2):
            taken = queue.taken(2, group_limit=group_limit)
            queue.finish(taken, BACK)
            equal(payloads(taken), ["now", "a"], f"the first two, with a limit of {group_limit}")
        equal(queue.payloads(1, group_limit=group_limit), ["now"], "one that was given back")
        equal(queue.payloads(3, group_limit=group_limit), ["a", "b", "c"], "the other, and who comes after it")


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
def groups_that_stand_before_others(bench: Bench) -> None:
    """When a job of a group has ended, the next of it is taken before what stands behind it."""

    def in_turn() -> bool:
        queue = Queue(bench)
        queue.put(*[NewJob(f"in {number}", group="g") for number in range(4)], *map(str, range(BACKLOG)))
        seen: list[str | bytes] = []
        for _ in range(4):
            taken = queue.taken(2, group_limit=1)
            seen += payloads(taken)
            queue.finish(taken)
        return seen == ["in 0", "0", "in 1", "1", "in 2", "2", "in 3", "3"]

    # A store may look there later while it takes long to look, as everything does on a busy machine.
    until(in_turn, "jobs of a group are passed over")


@case("the order of jobs")
def groups_with_a_limit(bench: Bench) -> None:
    """With a limit of n at most n jobs of a group are claimed at a time, also over many connections at once."""
    queue = Queue(bench)
    put = queue.put(*[NewJob(str(number), group="g") for number in range(12)])
    takes = together(partial(queue.elsewhere().take, 2, group_limit=3) for _ in range(5))
    had = [job for outcome in takes if isinstance(outcome, Taken) for job in ids(outcome)]
    had += ids(outcome) if isinstance(outcome := queue.take(5, group_limit=3), Taken) else ()
    equal(sorted(had), put[:3], "what five connections have of a group with a limit of 3")


@case("the order of jobs")
def groups_that_get_an_older_job(bench: Bench) -> None:
    """A job that joins its group before one that is worked, revived or replaced, waits until that one has ended."""
    queue = Queue(bench)
    dead, live = queue.put(NewJob("dead", group="g", max_tries=1), NewJob("live", group="g"))
    elsewhere = queue.put(NewJob("elsewhere", key="k", delay=3600))
    queue.finish(queue.taken(10, group_limit=1), DEAD, note="e")
    worked = queue.taken(10, group_limit=1)
    equal(ids(worked), (live,), "the next of the group")
    equal(queue.revive(dead), 1, "revived")
    nothing(queue.take(10, group_limit=1), "the revived job, while a later one is worked")
    (h,) = queue.put(NewJob("h", group="h"))
    of_h = queue.taken(10, group_limit=1)
    equal(ids(of_h), (h,), "of another group")
    equal(queue.put(NewJob("elsewhere", key="k", group="h"), on_conflict=REPLACE), elsewhere, "what was replaced")
    nothing(queue.take(10, group_limit=1), "the replaced job, while a later one of its new group is worked")
    queue.finish(worked)
    equal(ids(queue.taken(10, group_limit=1)), (dead,), "when the later one is done")
    queue.finish(of_h)
    equal(list(ids(queue.taken(10, group_limit=1))), elsewhere, "when that of its new group is done")


@case("the order of jobs")
def groups_behind_a_long_one(bench: Bench) -> None:
    """However many jobs of a busy group stand before them, jobs of other groups are taken, in their order."""
    queue = Queue(bench)
    first, second, third, *_ = queue.put(*[NewJob(str(number), group="long") for number in range(BACKLOG)])
    worked = queue.taken(10, group_limit=1)
    equal(ids(worked), (first,), "of a long group")
    b1, b2, b3, c1, urgent = queue.put(*[NewJob(name, group=name[0]) for name in ("b1", "b2", "b3", "c1")], NewJob("u"))
    equal(ids(queue.taken(1, group_limit=1)), (b1,), "what comes first behind it")
    _until_had(queue, {c1, urgent}, 1, "of another group, and of none")
    nothing(queue.take(10, group_limit=1), "when all groups are busy")
    _until_had(queue, {second, b2}, 2, "with a greater limit")
    nothing(queue.take(10, group_limit=2), f"before {b3}, while two of each group are worked")
    equal(queue.finish(worked), Finished(), "the end of the first")
    _until_had(queue, {third}, 2, "its successor")


def _until_had(queue: Queue, wanted: set[int], group_limit: int, what: str) -> None:
    """Take until there is as much as is wanted, and see that it is that."""
    had: list[int] = []
    while len(had) < len(wanted):
        had += ids(queue.until_taken(what, n=10, group_limit=group_limit))
    equal(sorted(had), sorted(wanted), what)


@case("the order of jobs")
def groups_whose_first_waits(bench: Bench) -> None:
    """A job that waits for its next try keeps all of its group waiting, and nobody else."""
    queue = Queue(bench)
    queue.put(*[NewJob(str(number), group="long") for number in range(BACKLOG)])
    (other,) = queue.put(NewJob("other", group="other"))
    queue.finish(queue.taken(1, group_limit=1), RETRY, delay=3600, note="e")
    equal(ids(queue.taken(10, group_limit=1)), (other,), "of another group")
    free_in = nothing(queue.take(10, group_limit=1), "of a group whose first waits").free_in
    assert free_in < 3601, f"told to come back in {free_in} s"


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
