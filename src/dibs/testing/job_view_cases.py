"""Conformance cases on the contract of stores that keep queues: what is seen and mended, and hints."""

from __future__ import annotations

import time

from dibs.jobs import CANCELLED, CLAIMED, DEAD, DONE, ERROR_CHARS_MAX, LATER, READY, RETRY, Finished, NewJob
from dibs.testing.case import Bench, claims, equal, until
from dibs.testing.job_bench import Queue, case, ids, listening, nothing


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
    queue = Queue(bench)
    nothing(queue.take(), "an empty queue")
    with listening(queue) as told, told("a put"):
        queue.put("1")
