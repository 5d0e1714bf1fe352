"""Conformance cases on the contract of stores that keep queues: no job is lost, its claim alone ends it, tries count.

Each is a function of a ``Bench``. A claim that is to expire is waited for: a case asks until it has.
"""

from __future__ import annotations

import time
from functools import partial

from dibs.jobs import (
    BACK,
    CRASHES_MAX,
    DEAD,
    DONE,
    PAYLOAD_BYTES_MAX,
    PUT_MAX,
    READY,
    REPLACE,
    RETRY,
    Finish,
    Finished,
    KeyTaken,
    NewJob,
    Put,
    PutDone,
    Take,
    Taken,
)
from dibs.testing.case import Bench, claims, equal, rising, together, until
from dibs.testing.job_bench import Queue, case, ids, nothing, payloads
from dibs.testing.lookalikes import LOOKALIKES

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


@case("P17")
def a_large_put_may_replace_as_many(bench: Bench) -> None:
    """Ten thousand jobs are replaced by one put as well, within the time of one request."""
    queue = Queue(bench)
    new = [NewJob(str(number), key=str(number), priority=number % 3) for number in range(PUT_MAX)]
    put = queue.put(*new)
    equal(queue.put(*new, on_conflict=REPLACE), put, "the ids of those that were replaced")
    equal(queue.counts(), (PUT_MAX, 0, 0, 0), "ready, later, claimed, dead")
    equal(payloads(queue.taken(3)), ["2", "5", "8"], "the first of them")


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
    taken = queue.taken(1, 2 * bench.short_ttl)
    end = time.monotonic() + 2.2 * bench.short_ttl
    while time.monotonic() < end:
        extended = queue.extend(taken, 5 * bench.short_ttl)
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
    # Over a connection that has taken nothing yet, and does not look on from where it took something last.
    queue = queue.elsewhere()
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
