"""PgBouncer in transaction mode in front of PostgreSQL: claims and queues keep there what they promise.

All cases of the conformance suite hold behind a pooler. Here are those in which a plan, a setting or a connection of
one's own could make a difference: without them plans are other ones, and nothing is prepared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import asyncpg
import psycopg
import pytest

import dibs
from dibs.connecting import locate
from dibs.testing.conformance import Run, runs
from tests.servers.postgres import PgBouncer, PostgresServer
from tests.test_claims_columns_cases import Tables
from tests.waits import eventually
from tests.yard import Yard

CHOSEN = {
    # the contract of queues
    "each_job_goes_to_one",
    "ten_thousand_in_one_put",
    "an_end_counts_once",
    "a_repeated_take_is_one_take",
    "groups_in_order",
    "groups_with_a_limit",
    "groups_behind_a_long_one",
    "replace_what_has_the_key",
    "a_repeated_put_with_keys_is_one",
    "cancelled_jobs",
    "dead_jobs_are_revived",
    "results_are_kept",
    # queues as their users see them
    "a_late_done_is_refused",
    "a_take_waits_for_a_job",
    "run_works_as_many_at_once_as_told",
    "run_drains_when_it_is_stopped",
    # claims, kept as leases
    "of_several_takers_each_item_has_one",
    "what_is_left_is_given_back",
    "a_renewed_batch_lasts",
    "an_item_that_never_succeeds_is_dead",
}
RUNS = [run for run in runs() if run.case.name in CHOSEN and run.face != "tasks"]


@pytest.fixture(scope="module")
def pooler(postgres: PostgresServer) -> Iterator[PgBouncer]:
    with PgBouncer(postgres) as pooler:

        def answers() -> bool:
            try:
                psycopg.connect(pooler.url("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                return False
            return True

        eventually(answers, "the pooler does not answer")
        yield pooler


@pytest.fixture
def pooled_url(pooler: PgBouncer, postgres_url: str) -> str:
    """A new, empty database, through the pooler."""
    return pooler.url(postgres_url.rpartition("/")[2])


def test_the_chosen_cases_are_there() -> None:
    """None was renamed."""
    assert {run.case.name for run in RUNS} == CHOSEN


@pytest.mark.parametrize("run", [pytest.param(run, id=run.case.name) for run in RUNS])
def test_case(run: Run, pooled_url: str) -> None:
    """As without a pooler."""
    assert run.on(locate(pooled_url)[0])


def test_claims_in_columns(pooled_url: str) -> None:
    """They keep the promises of claims, too."""
    yard = Yard(pooled_url)
    address, _ = locate(yard.url)
    for run in runs():
        if run.face == "threads" and run.case.anywhere:
            assert run.on(address, Tables(yard).claims)
    yard.close()


def test_transactions_of_asyncpg(pooled_url: str) -> None:
    """Its connections are entered there, too, as it must be told to prepare nothing for later."""

    async def work(client: dibs.AsyncClient, number: int) -> None:
        connection = await asyncpg.connect(pooled_url, statement_cache_size=0)
        for _ in range(10):
            async with client.lock(f"x{number % 3}") as lease, connection.transaction():
                await lease.guard(connection)
                await connection.execute("SELECT 1")
        await connection.close()

    async def main() -> None:
        async with dibs.connect_async(pooled_url) as client:
            await asyncio.gather(*(work(client, number) for number in range(6)))

    asyncio.run(main())


def test_what_waits_for_a_locked_table_is_given_up_by_the_server(pooled_url: str, postgres_url: str) -> None:
    """Nothing is granted afterwards to who does not wait any more, and no connections of the server pile up."""
    with dibs.connect(pooled_url, request_timeout=0.5, patience=0.5) as client, psycopg.connect(postgres_url) as other:
        client.setup()
        waiting = (
            "SELECT count(*) FROM pg_locks WHERE NOT granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        for act in (lambda: client.lock("a").acquire(timeout=0), client.setup):
            other.execute("LOCK TABLE dibs_lease IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(dibs.StoreUnavailable):
                act()
            eventually(lambda: other.execute(waiting).fetchone() == (0,), "the server still waits")
            other.rollback()
        with client.lock("a", timeout=0):
            pass


def test_transactions_are_isolated_as_dibs_needs_it(pooled_url: str, postgres_url: str) -> None:
    """Whatever they are by default in that database."""
    with psycopg.connect(postgres_url, autocommit=True) as other:
        name = postgres_url.rpartition("/")[2]
        other.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'")
    with dibs.connect(pooled_url, request_timeout=60) as client:  # seventeen megabytes, beside other tests
        with client.semaphore("s", 2), client.rwlock("rw").write():
            queue = client.queue("a", ttl=30, group_limit=1)
            queue.put_many([b"x" * 2**20] * 17)
            queue.put(1, group="g", key="k")
        with queue.take(18) as batch:
            for job in batch:
                job.done()
        assert len(batch.won) == 18
