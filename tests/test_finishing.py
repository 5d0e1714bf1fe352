"""Jobs that one process takes and another ends: ``batch.leave()`` and ``queue.finish(id, token)``, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import dibs


@pytest.fixture
def client(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url) as client:
        yield client


@pytest.fixture
def other(sqlite_url: str) -> Iterator[dibs.Client]:
    """Another client of the same store: it knows of the claims only what it is told."""
    with dibs.connect(sqlite_url) as client:
        yield client


def left(client: dibs.Client, payload: Any = 1, **options: Any) -> tuple[int, int]:
    """The id and the token of a job that was put, taken and left."""
    queue = client.queue("q")
    queue.put(payload, **options)
    with queue.take() as batch:
        batch.leave()
        (job,) = batch.won
        assert not job.held
        assert batch.left == []
        return job.id, job.fencing_token


def test_ends_by_token_are_counted(client: dibs.Client) -> None:
    """They are in the load of the process that tells them, for ``queue.stats()`` and the advice to see."""
    queue = client.queue("q")
    queue.finish(*left(client))
    queue.finish(*left(client), outcome="dead")
    queue.finish(*left(client), outcome="skipped")
    with pytest.raises(dibs.LeaseLost):
        queue.finish(1, 1)
    told = queue._core.load().told()
    assert [told[what] for what in ("taken", "ended", "returned", "late")] == [3, 2, 1, 1]


def test_what_is_left_stays_claimed(client: dibs.Client, other: dibs.Client) -> None:
    """Neither the end of the block nor that of the client gives it back."""
    job, _token = left(client)
    client.close()
    record = other.queue("q").job(job)
    assert record is not None
    assert record.state == "claimed"


def test_a_left_job_is_not_renewed(sqlite_url: str) -> None:
    """It is handed out again when its ttl is over, however long the process that left it lives."""
    with dibs.connect(sqlite_url) as client:
        queue = client.queue("q", ttl=1)
        queue.put(1)
        batch = queue.take()
        batch.leave()
        with queue.take(timeout=20) as again:
            assert [job.tries for job in again.won] == [2]
        assert len(batch) == 1


def test_jobs_that_were_finished_before_are_not_left(client: dibs.Client) -> None:
    """Only what is held still stays claimed."""
    queue = client.queue("q")
    queue.put_many(range(3))
    with queue.take(3) as batch:
        batch.won[0].done()
        batch.won[1].skip()
        batch.leave()
    depth = queue.depth()
    assert (depth.ready, depth.claimed) == (1, 1)


def test_ends_by_id_and_token(client: dibs.Client, other: dibs.Client) -> None:
    """Done, failed, dead and skipped, as by the job itself; with the pause of its try unless another is said."""
    queue = other.queue("q", keep_results=60)
    job, token = left(client)
    queue.finish(job, token, {"rows": 3})
    assert queue.wait(job) == {"rows": 3}
    job, token = left(client)
    queue.finish(job, token, outcome="skipped")
    (ready,) = queue.jobs("ready")
    assert (ready.id, ready.tries) == (job, 0)
    queue.cancel(job)
    job, token = left(client)
    queue.finish(job, token, outcome="failed", error=ValueError("no such mailbox"))
    (later,) = queue.jobs("later")
    assert later.error == "ValueError: no such mailbox"
    assert 0.5 < (later.due_at - later.created_at).total_seconds() < 10
    job, token = left(client)
    queue.finish(job, token, outcome="dead", error="never")
    assert [(dead.id, dead.error) for dead in queue.dead()] == [(job, "never")]
    job, token = left(client, max_tries=1)
    queue.finish(job, token, outcome="failed", error="the last try", retry_in=5)
    assert queue.dead()[0].id == job


def test_a_late_or_wrong_end_is_refused(client: dibs.Client, other: dibs.Client) -> None:
    """With another token, for another job, twice, or after a cancel: LeaseLost, and nothing is changed (P18)."""
    queue = other.queue("q")
    job, token = left(client)
    for wrong_job, wrong_token in ((job, token + 1), (job + 1, token)):
        with pytest.raises(dibs.LeaseLost, match="nothing was changed"):
            queue.finish(wrong_job, wrong_token)
    with pytest.raises(dibs.LeaseLost):
        other.queue("another").finish(job, token)
    record = queue.job(job)
    assert record is not None
    assert record.state == "claimed"
    queue.finish(job, token)
    with pytest.raises(dibs.LeaseLost):
        queue.finish(job, token, outcome="failed", error="late")
    job, token = left(client)
    queue.cancel(job)
    with pytest.raises(dibs.LeaseLost):
        queue.finish(job, token)


@pytest.mark.parametrize(
    "how",
    [
        {"outcome": "finished"},
        {"outcome": "skipped", "result": 1},
        {"outcome": "failed", "result": 1},
        {"outcome": "done", "error": "x"},
        {"outcome": "skipped", "error": "x"},
        {"outcome": "dead", "retry_in": 5},
        {"outcome": "failed", "retry_in": -1},
        {"outcome": "failed", "error": 3},
        {"result": float("nan")},
        {"token": 0},
        {"token": "1"},
        {"token": 2**63},
        {"id": "1"},
        {"id": 0},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(client: dibs.Client, how: dict[str, Any]) -> None:
    """Before anything is sent."""
    with pytest.raises(dibs.InvalidOption):
        client.queue("q").finish(**{"id": 1, "token": 1, **how})


def test_the_same_for_tasks(sqlite_url: str) -> None:
    """``batch.leave()``, and ``await queue.finish(…)``."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client, dibs.connect_async(sqlite_url) as other:
            await client.queue("q").put(1)
            async with await client.queue("q").take() as batch:
                batch.leave()
                (job,) = batch.won
            queue = other.queue("q", keep_results=60)
            with pytest.raises(dibs.LeaseLost):
                await queue.finish(job.id, job.fencing_token + 1)
            await queue.finish(job.id, job.fencing_token, "result")
            assert await queue.wait(job.id) == "result"

    asyncio.run(main())
