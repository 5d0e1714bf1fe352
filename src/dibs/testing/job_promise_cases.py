"""Conformance cases on what a store that keeps queues promises where one job meets another: the corners of P17 to P19.

What is repeated late, replaced, revived, said of another queue, or comes after a crash. The plain ways of a job are in
``job_cases``.
"""

from __future__ import annotations

import time

from dibs._typing import TYPE_CHECKING
from dibs.jobs import (
    BACK,
    CANCELLED,
    CLAIMED,
    CRASHES_MAX,
    DEAD,
    DONE,
    KEEP,
    LATER,
    NOTHING_CLAIMED,
    READY,
    REPLACE,
    RETRY,
    Extend,
    Finish,
    Finished,
    KeyTaken,
    NewJob,
)
from dibs.testing.case import claims, equal, rising, until
from dibs.testing.job_bench import Queue, case, ids, listening, nothing

if TYPE_CHECKING:
    from dibs.testing.case import Bench


def crashed(queue: Queue, job: int, times: int = 1) -> None:
    """Let so many claims on a job that is ready, and no other, expire."""
    for _ in range(times):
        equal(ids(queue.taken(1, queue.bench.short_ttl)), (job,), "the job whose claim is to expire")
        until(lambda: queue.job(job).state == READY, "the claim has not expired")


# -- P18: only the current claim --------------------------------------------------------------------------------------


@case("P18, P20")
def acts_are_on_jobs_of_their_queue(bench: Bench) -> None:
    """Whatever names a job by its id names its queue as well; said of another queue it changes nothing."""
    queue = Queue(bench)
    other = Queue(bench, bench.name(), queue.connection)
    other.put("0")
    (job,) = queue.put(NewJob("1", max_tries=1))
    taken = queue.taken(1)
    before = queue.job(job)
    for end in (DONE, RETRY, BACK, DEAD):
        outcome = other.act(Finish(other.name, (job,), taken.fencing_token, end))[0]
        equal(outcome, Finished((job,)), f"{end}, said of another queue")
    equal(other.act(Extend(other.name, (job,), taken.fencing_token, 3600))[0].gone, (job,), "an extension said so")
    equal(other.cancel(job), [], "a cancellation said so")
    equal(queue.job(job), before, "the claimed job")
    queue.finish(taken, DEAD, note="e")
    equal((other.revive(job), other.revive()), (0, 0), "revived of another queue")
    equal((other.forget(job), other.forget()), (0, 0), "forgotten of another queue")
    equal(queue.counts(), (0, 0, 0, 1), "ready, later, claimed, dead")


@case("P18")
def of_several_ends_the_first_counts(bench: Bench) -> None:
    """When one call brings several ends of a job, the first one counts, in whichever request it stands."""
    queue = Queue(bench)
    for first, second, left in ((DONE, RETRY, 0), (DONE, DONE, 0), (BACK, DONE, 1), (RETRY, DONE, 1)):
        (job,) = queue.put("1")
        token = queue.taken().fencing_token
        outcomes = queue.act(*[Finish(queue.name, (job,), token, end) for end in (first, second)])
        equal(outcomes, [Finished(), Finished((job,))], f"{first}, and {second} after it in the same call")
        equal(queue.counts(), (left, 0, 0, 0), f"ready, later, claimed, dead after {first} and {second}")
        queue.cancel(job)


@case("P18")
def a_token_is_greater_than_all_before(bench: Bench) -> None:
    """The token of a claim is greater than all earlier ones of each of its jobs, not only of the first."""
    queue = Queue(bench)
    (old,) = queue.put("1")
    tokens = []
    for number in range(5):
        taken = queue.taken()
        tokens.append(taken.fencing_token)
        queue.finish(taken, BACK)
        (young,) = queue.put(NewJob("2", 9))
        taken = queue.taken(2)
        equal(ids(taken), (young, old), f"the jobs of claim {number}, of which the first is new")
        tokens.append(taken.fencing_token)
        queue.finish(taken, DONE, [young])
        queue.finish(taken, BACK, [old])
    rising(tokens, "the tokens of the older job")


@case("P18")
def no_extension_ends_a_claim_earlier(bench: Bench) -> None:
    """A claim that was extended for long stays in force for that long, whatever shorter extension comes after."""
    queue = Queue(bench)
    (long, short) = queue.put("1", "2")
    taken = queue.taken(2, bench.short_ttl)
    mine = queue.act(Extend(queue.name, (long,), taken.fencing_token, 60))[0]
    equal(mine.gone, (), "jobs that an extension did not find")
    queue.act(Extend(queue.name, (long,), taken.fencing_token, bench.short_ttl / 2))
    until(lambda: queue.job(short).state == READY, "the claim that was not extended has not expired")
    equal(queue.job(long).state, CLAIMED, "the state of the one that was extended")
    equal(queue.finish(taken, DONE, [long]), Finished(), "its end")


@case("P18")
def a_repeated_take_of_an_expired_claim_is_a_new_one(bench: Bench) -> None:
    """A take repeated after its claim has expired claims anew: another token, another try, and a crash more."""
    queue, (mine,) = Queue(bench), claims(1)
    (job,) = queue.put("1")
    old = queue.taken(1, bench.short_ttl, claim=mine)
    until(lambda: queue.job(job).state == READY, "the claim has not expired")
    new = queue.taken(1, 60, claim=mine)
    rising([old.fencing_token, new.fencing_token], "the tokens of the two")
    equal((new.jobs[0].tries, new.jobs[0].crashes), (2, 1), "tries and crashes")
    equal(queue.finish(old), Finished((job,)), "the end by the first")
    equal(queue.finish(new), Finished(), "the end by the second")


@case("P18")
def a_repeated_take_tells_what_is_left(bench: Bench) -> None:
    """A take repeated after some of its jobs have ended is told of the others, and with none left claims anew."""
    queue, (mine,) = Queue(bench), claims(1)
    put = queue.put(*"1234")
    first = queue.taken(3, claim=mine)
    queue.finish(first, DONE, put[:1])
    queue.finish(first, RETRY, put[1:2], delay=60.0, note="e")
    again = queue.taken(3, claim=mine)
    equal((ids(again), again.fencing_token), ((put[2],), first.fencing_token), "what is left, and its token")
    queue.finish(first, BACK, put[2:3])
    new = queue.taken(3, claim=mine)
    equal((ids(new), new.jobs[0].tries), (tuple(put[2:]), 1), "a new claim, and the first try again")
    assert new.fencing_token > first.fencing_token, (first, new)


@case("P9, P19")
def a_take_of_none_claims_nothing(bench: Bench) -> None:
    """A take of no jobs is told what its claim has, over any connection, and otherwise nothing; it claims none."""
    queue, (mine, other) = Queue(bench), claims(2)
    queue.put(*"123")
    for group_limit in (0, 1):
        equal(queue.take(0, claim=mine, group_limit=group_limit), NOTHING_CLAIMED, "what a claim is told that has none")
    equal(queue.counts(), (3, 0, 0, 0), "ready, later, claimed, dead")
    taken = queue.taken(2, claim=mine)
    for again in (queue, queue.elsewhere()):
        equal(again.take(0, claim=mine), taken, "what it is told of what it has")
        equal(again.take(0, claim=other), NOTHING_CLAIMED, "what another claim is told")
    equal(queue.counts(), (1, 0, 2, 0), "ready, later, claimed, dead")
    queue.finish(taken, BACK)
    equal(queue.take(0, claim=mine), NOTHING_CLAIMED, "what it is told when it has given them back")
    equal(queue.counts(), (3, 0, 0, 0), "ready, later, claimed, dead")
    equal([job.tries for job in queue.taken(3).jobs], [1, 1, 1], "the tries")


# -- P17: puts --------------------------------------------------------------------------------------------------------


@case("P18, unique keys")
def what_is_replaced_begins_anew(bench: Bench) -> None:
    """A job that is replaced is due when the put says, has no crash against it, and its old claim ends nothing."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob("1", key="k", group="g"))
    crashed(queue, job)
    queue.finish(queue.taken(), RETRY, note="e")
    old = queue.taken(1, bench.short_ttl)
    until(lambda: queue.job(job).state == READY, "the claim has not expired")
    (next_in_group,) = queue.put(NewJob("2", group="g"))
    queue.put(NewJob("3", key="k", group="h", delay=3600), on_conflict=REPLACE)
    equal(queue.job(job).state, LATER, "the state of a job that was replaced by one that is due later")
    for end in (DONE, BACK):
        equal(queue.finish(old, end), Finished((job,)), f"{end} by the claim there was before")
    taken = queue.taken(10, group_limit=1)
    equal(ids(taken), (next_in_group,), "what is the first of the group that was left")
    equal((queue.job(job).tries, queue.job(job).crashes), (0, 0), "tries and crashes of the job that was replaced")
    queue.put(NewJob("4", 9, key="k", group="h"), on_conflict=REPLACE)
    (behind,) = queue.put(NewJob("5", group="h"))
    taken = queue.taken(10, group_limit=1)
    equal((ids(taken), taken.jobs[0].tries, taken.jobs[0].crashes), ((job,), 1, 0), "the job, its tries and crashes")
    rising([old.fencing_token, taken.fencing_token], "the tokens of its claims")
    queue.finish(taken)
    equal(ids(queue.taken(10, group_limit=1)), (behind,), "what is behind it in its new group")


@case("P17, unique keys")
def a_key_belongs_to_who_lives(bench: Bench) -> None:
    """The key of a job that was revived is taken again, and is free again when that job has ended."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob("1", key="k"))
    queue.finish(queue.taken(), DEAD, note="e")
    equal(queue.revive(job), 1, "revived")
    equal(queue.try_put(NewJob("2", key="k")), KeyTaken("k", job, False), "a put with its key")
    equal(queue.put(NewJob("2", key="k"), on_conflict=KEEP), [job], "a put that keeps it")
    queue.finish(queue.taken())
    (second,) = queue.put(NewJob("3", key="k"))
    equal(ids(queue.taken(10)), (second,), "who has the key then")


@case("P17, unique keys")
def of_dead_jobs_with_one_key_the_first_is_revived(bench: Bench) -> None:
    """Of several dead jobs that have the same key the first is revived; the others stay dead."""
    queue = Queue(bench)
    dead = []
    for payload in "123":
        dead += queue.put(NewJob(payload, key="k"))
        queue.finish(queue.taken(), DEAD, note="e")
    equal(queue.revive(), 1, "revived of three with one key")
    equal([queue.job(job).state for job in dead], [READY, DEAD, DEAD], "their states")
    equal(ids(queue.taken(10)), tuple(dead[:1]), "who has the key")
    equal(queue.revive(*dead[1:]), 0, "revived while the first lives")


@case("P17")
def what_ended_long_enough_ago_is_forgotten(bench: Bench) -> None:
    """Forgetting what ended some time ago leaves what ended since, and whatever has not ended."""
    queue = Queue(bench)
    live = queue.put("1", NewJob("2", delay=60))
    (dead,) = queue.put(NewJob("3", 9))
    queue.finish(queue.taken(), DEAD, note="e")
    equal((queue.forget(older_than=3600), queue.forget(dead, older_than=3600)), (0, 0), "what ended an hour ago")
    equal(queue.forget(*live), 0, "what has not ended")
    equal(queue.counts(), (1, 1, 0, 1), "ready, later, claimed, dead")
    time.sleep(0.1)  # so that it ended some time ago
    equal(queue.forget(older_than=0.05), 1, "what ended a moment ago")
    equal(queue.counts(), (1, 1, 0, 0), "ready, later, claimed, dead")


@case("the order of jobs")
def what_is_due_first_comes_first(bench: Bench) -> None:
    """Of jobs with one priority that are due, the one that has been due for longest comes first."""
    queue = Queue(bench)
    now = time.time()
    for payload, ago in (("c", 1000), ("a", 3000), ("b", 2000), ("d", 500)):
        queue.put(NewJob(payload, at=now - ago))
    queue.put(NewJob("e"), NewJob("0", 1))
    equal([job.payload for job in queue.jobs_in(READY)], list("0abcde"), "the list")
    equal(queue.payloads(3), list("0ab"), "the first three")
    equal(queue.payloads(3, group_limit=1), list("cde"), "the rest")


@case("see and mend queues")
def the_last_error_stays(bench: Bench) -> None:
    """A job that failed once and was done then, or cancelled, is kept with what it failed with."""
    queue = Queue(bench)
    put = queue.put("1", "2")
    queue.finish(queue.taken(2), RETRY, note="e")
    equal([job.error for job in queue.jobs_in(READY)], ["e", "e"], "the errors of those that are to be tried again")
    queue.finish(queue.taken(1), DONE, note="1", keep=60.0)
    queue.cancel(put[1], keep=60.0)
    equal([(job.state, job.error, job.result) for job in map(queue.job, put)],
          [(DONE, "e", "1"), (CANCELLED, "e", None)], "states, errors and results")  # fmt: skip


@case("see and mend queues")
def cancelled_jobs_are_kept_for_a_time(bench: Bench) -> None:
    """A cancelled job is kept for as long as was said, and is then gone without a purge; not at all if that is 0."""
    queue = Queue(bench)
    put = queue.put("1", "2", "3")
    for job, keep in zip(put, (60.0, 0.05, 0.0), strict=True):
        equal(queue.cancel(job, keep=keep), [job], "what was cancelled")
    equal(queue.found(put[2]), None, "one that is not to be kept")

    def forgotten() -> bool:
        queue.cancel(*queue.put("4"), keep=60.0)
        return queue.found(put[1]) is None

    until(forgotten, "what was kept for a moment is there for ever")
    equal(queue.job(put[0]).state, CANCELLED, "what was kept for longer")


@case("P23")
def hints_of_what_came_back(bench: Bench) -> None:
    """Where the store signals, whoever watches for a queue is told of jobs that were given back, failed, or revived."""
    queue = Queue(bench)
    (job,) = queue.put("1")
    with listening(queue) as told:
        for end in (BACK, RETRY, DEAD):
            taken = queue.until_taken("the job")
            nothing(queue.take(), "an empty queue")
            with told(f"what came {end}"):
                queue.finish(taken, end, note=None if end == BACK else "e")
                if end == DEAD:
                    equal(queue.revive(job), 1, "revived")


@case("P23")
def hints_of_room_in_a_group(bench: Bench) -> None:
    """Where the store signals, whoever watches is told when the first of a group has ended: the next has its turn."""
    queue = Queue(bench)
    queue.put(*(NewJob(str(i), group="g", max_tries=1) for i in range(6)))
    with listening(queue) as told:
        for end in (DONE, "kept", RETRY, DEAD, CANCELLED):
            taken = queue.until_taken("the first of the group", group_limit=1)
            nothing(queue.take(group_limit=1), "a group that is worked")
            with told(f"room: {end}"):
                if end == CANCELLED:
                    queue.cancel(*ids(taken))
                elif end == "kept":
                    queue.finish(taken, DONE, keep=60.0)
                else:
                    queue.finish(taken, end, note=None if end == DONE else "e")


# -- P19: tries and crashes -------------------------------------------------------------------------------------------


@case("P19")
def crashes_are_not_forgiven(bench: Bench) -> None:
    """What a job's worker says in time, a failure or that it gives the job back, takes no crash from it."""
    queue = Queue(bench)
    (job,) = queue.put("1")
    crashed(queue, job)
    for end in (BACK, RETRY):
        taken = queue.taken()
        equal(taken.jobs[0].crashes, 1, f"its crashes before {end}")
        equal(queue.finish(taken, end), Finished(), end)
    equal((queue.job(job).crashes, queue.taken().jobs[0].crashes), (1, 1), "its crashes after them")


@case("P19")
def the_last_failure_is_the_end(bench: Bench) -> None:
    """A job that fails on its last try is dead at once, whatever the delay; one that has tries left waits for it."""
    queue = Queue(bench)
    put = queue.put(NewJob("1", max_tries=1), NewJob("2", max_tries=2), "3")
    equal(queue.finish(queue.taken(3), RETRY, delay=60.0, note="e"), Finished(), "their failure")
    equal([queue.job(job).state for job in put], [DEAD, LATER, LATER], "their states")
    equal(queue.counts(), (0, 2, 0, 1), "ready, later, claimed, dead")


@case("P19")
def what_is_revived_has_no_crashes(bench: Bench) -> None:
    """A job that was revived has all its tries and no crash against it; no old claim ends it."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob("1", group="g", max_tries=CRASHES_MAX + 1))
    crashed(queue, job, CRASHES_MAX)
    old = queue.taken()
    equal(old.jobs[0].crashes, CRASHES_MAX, "its crashes")
    queue.finish(old, DEAD, note="e")
    equal(queue.job(job).crashes, CRASHES_MAX, "the crashes of the dead one")
    equal(queue.revive(), 1, "revived")
    put = queue.put("2", NewJob("3", group="g"))
    taken = queue.taken(10, group_limit=1)
    equal(sorted(ids(taken)), [job, put[0]], "what is claimed together: of the group the first alone")
    mine = next(told for told in taken.jobs if told.id == job)
    equal((mine.tries, mine.crashes), (1, 0), "its tries and crashes")
    equal(queue.finish(old, DONE, [job]), Finished((job,)), "an end by the claim there was before")
    rising([old.fencing_token, taken.fencing_token], "the tokens of its claims")


@case("P19")
def who_failed_before_dies_of_the_crash(bench: Bench) -> None:
    """A job that failed, and then ended its worker on the last try, is dead with the error that says so."""
    queue = Queue(bench)
    (job,) = queue.put(NewJob("1", max_tries=2))
    queue.finish(queue.taken(), RETRY, note="first")
    crashed(queue, job)
    (urgent,) = queue.put(NewJob("2", 9))
    equal(ids(queue.taken(10)), (urgent,), "what is taken, besides a job without tries left")
    nothing(queue.take(10), "jobs without tries left")  # which a take that finds others may pass over
    dead = queue.job(job)
    equal((dead.state, dead.tries, dead.crashes), (DEAD, 2, 1), "its state, tries and crashes")
    assert dead.error != "first", "a dead job says what it died of"
    equal(queue.jobs_in(DEAD)[0].error, dead.error, "what the list says")
    (job,) = queue.put(NewJob("3", max_tries=CRASHES_MAX))
    crashed(queue, job, CRASHES_MAX)
    (urgent,) = queue.put(NewJob("4", 9))
    equal(ids(queue.taken(10)), (urgent,), "what is taken, besides one that has only crashed")
    nothing(queue.take(10), "jobs without tries left")  # which a take that finds others may pass over
    equal((queue.job(job).state, queue.job(job).crashes), (DEAD, CRASHES_MAX), "its state and crashes")
