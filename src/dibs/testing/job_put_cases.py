"""Conformance cases on puts whose answer was lost, so that they are repeated: their jobs are there once."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.jobs import BACK, DONE, KEEP, LATER, RAISE, READY, REPLACE, RETRY, Finished, NewJob
from dibs.testing.case import claims, equal, until
from dibs.testing.job_bench import Queue, case, ids, payloads

if TYPE_CHECKING:
    from dibs.testing.case import Bench


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
def a_repeated_put_tells_what_it_found(bench: Bench) -> None:
    """Repeated with its id, a put tells the jobs that it has kept, or replaced, as well, and changes nothing more."""
    queue = Queue(bench)
    old, other = queue.put(NewJob("old", key="a"), NewJob("old", key="b"))
    keep, replace = claims(2)
    new = [NewJob("1"), NewJob("2", key="a"), NewJob("3", key="c"), NewJob("4")]
    put = queue.put(*new, on_conflict=KEEP, put_id=keep)
    equal((put[1], len(set(put))), (old, 4), "the job that was kept, and how many there are")
    equal(queue.elsewhere().put(*new, on_conflict=KEEP, put_id=keep), put, "the ids of the repeated put")
    new = [NewJob("5"), NewJob("6", key="b", priority=1)]
    put = queue.put(*new, on_conflict=REPLACE, put_id=replace)
    equal(put[1], other, "the job that was replaced")
    equal(payloads(queue.taken(1)), ["6"], "what is taken first")
    equal(queue.elsewhere().put(*new, on_conflict=REPLACE, put_id=replace), put, "the ids, while it is being worked")
    equal(queue.counts(), (5, 0, 1, 0), "ready, later, claimed, dead")


@case("P17")
def a_put_is_told_by_its_queue_as_well(bench: Bench) -> None:
    """Puts with one id to two queues are two puts."""
    queue, (mine,) = Queue(bench), claims(1)
    other = Queue(bench, bench.name(), queue.connection)
    for keyed in (None, "k"):
        new = NewJob("1", key=keyed)
        first, second = queue.put(new, put_id=mine + str(keyed)), other.put(new, put_id=mine + str(keyed))
        equal((queue.put(new, put_id=mine + str(keyed)), other.put(new, put_id=mine + str(keyed))), (first, second),
              "the ids of both, repeated")  # fmt: skip
    equal((queue.counts(), other.counts()), ((2, 0, 0, 0), (2, 0, 0, 0)), "ready, later, claimed, dead of each")


@case("P17, unique keys")
def a_repeated_put_with_keys_is_one(bench: Bench) -> None:
    """A put that has replaced or kept jobs is told the same ids when repeated, also if one was claimed meanwhile."""
    queue, (mine,) = Queue(bench), claims(1)
    (job,) = queue.put(NewJob("1", key="k"))
    new = [NewJob("2"), NewJob("3", key="l"), NewJob("4", 9, key="k"), NewJob("5")]
    put = queue.put(*new, on_conflict=REPLACE, put_id=mine)
    equal(put[2], job, "the id of the one that was replaced")
    taken = queue.taken(1)
    equal(payloads(taken), ["4"], "what is taken first")
    equal(queue.elsewhere().put(*new, on_conflict=REPLACE, put_id=mine), put, "the ids of the repeated put")
    equal(queue.counts(), (3, 0, 1, 0), "ready, later, claimed, dead")
    equal(queue.finish(taken), Finished(), "the end of the one that was claimed")
    kept = [NewJob("8", key="l"), NewJob("9", key="n"), NewJob("10")]
    put = queue.put(*kept, on_conflict=KEEP, put_id=mine + "-1")
    equal(queue.put(*kept, on_conflict=KEEP, put_id=mine + "-1"), put, "the ids of a repeated put that keeps one")
    (job,) = queue.put(NewJob("6", key="m"))
    only = [NewJob("7", key="m")]
    equal(queue.put(*only, on_conflict=REPLACE, put_id=mine + "-2"), [job], "the id of the only one of a put")
    taken = queue.taken(100)
    equal(queue.put(*only, on_conflict=REPLACE, put_id=mine + "-2"), [job], "the id, told again while it is worked")
    queue.finish(taken, RETRY, delay=60.0, note="e")
    queue.put(*only, on_conflict=REPLACE, put_id=mine + "-3")
    found = queue.job(job)
    equal((found.state, found.tries), (READY, 0), "another put that replaces it")


@case("P17, unique keys")
def a_put_repeated_late_is_one_put(bench: Bench) -> None:
    """Told by its id as long as its jobs have not ended: claimed, given back, failed, crashed or waiting for a try."""
    queue = Queue(bench)
    for key, on_conflict in ((None, RAISE), ("k", RAISE), ("k", KEEP), ("k", REPLACE)):
        (mine,) = claims(1)
        new = [NewJob("1", key=key), NewJob("2", group="g")]
        put = queue.put(*new, on_conflict=on_conflict, put_id=mine)

        def repeated(when: str) -> None:
            again = queue.elsewhere().put(*new, on_conflict=on_conflict, put_id=mine)  # noqa: B023 - called at once
            equal(again, put, f"the ids of a put with key {key!r}, repeated when its jobs {when}")  # noqa: B023
            equal(sum(queue.counts()), 2, f"how many jobs there are of a put repeated when they {when}")

        taken = queue.taken(2)
        repeated("are claimed")
        queue.finish(taken, BACK)
        repeated("were given back")
        queue.finish(queue.taken(2), RETRY, note="e")
        repeated("have failed, and are ready")
        taken = queue.taken(2, bench.short_ttl)
        until(lambda: [queue.job(job).state for job in put] == [READY, READY], "the claim has not expired")  # noqa: B023
        repeated("are what a dead worker had")
        queue.finish(queue.taken(2), RETRY, delay=60.0, note="e")
        equal([queue.job(job).state for job in put], [LATER, LATER], "the states of what waits for its next try")
        repeated("wait for their next try")
        queue.cancel(*put)


@case("P17")
def a_put_repeated_after_some_were_done(bench: Bench) -> None:
    """What is done is not put again while others of its put are there; once all have ended they may be."""
    queue, (mine,) = Queue(bench), claims(1)
    put = queue.put("1", "2", put_id=mine)
    queue.finish(queue.taken(), DONE)
    queue.finish(queue.taken(), RETRY, note="e")
    queue.put("1", "2", put_id=mine)
    taken = queue.taken(10)
    equal((ids(taken), payloads(taken)), ((put[1],), ["2"]), "what there is to do")
    queue.finish(taken)
    queue.put("1", "2", put_id=mine)  # jobs run at least once
