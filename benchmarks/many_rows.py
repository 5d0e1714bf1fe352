"""Works on PostgreSQL with very many rows: renewing 100,000 leases, and one lock among ten million rows."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from typing import TypeVar

import psycopg

import dibs
from benchmarks.harness import MS, Bench, Round, Target, lone_thread
from dibs.clock import Deadline, RealClock, boot_now
from dibs.connecting import locate
from dibs.pending import BATCH_MAX
from dibs.renewer import RENEW_MAX
from dibs.store import Acquire, Renew, Renewed

T = TypeVar("T")

# Renewals are for TTL_S, in either way; the leases are acquired for long enough to wait for their first one.
TTL_S = 30.0
HOLD_S = 3600.0
FILL_AT_ONCE = 200_000
KEPT_NAMES = 500
ANEW_NAMES = 20_000  # more than a round gets through
# Calls of the store's contract, which are no lane's here, have all the time they want.
REQUEST_LIMIT_S = 60.0

RAW_RENEW = """\
UPDATE raw_renew AS l SET expires_at = clock_timestamp() + interval '30 s'
FROM unnest(%s::text[], %s::text[]) AS a (name, claim_id)
WHERE l.name = a.name AND l.slot = 1 AND l.claim_id = a.claim_id AND l.expires_at > clock_timestamp()"""


def pg_renew(bench: Bench) -> None:
    """One round of renewals, as the renewal lane sends it, for 10,000 and for 100,000 leases of one process; in ms.

    dibs: the store's ``act`` with a Renew for each lease, in calls of at most ``RENEW_MAX``, on one connection. The
    peer: one prepared ``UPDATE … FROM unnest(…)`` for all of them through psycopg, on a copy of the table, which has
    the same primary key and no other index. Both tables are vacuumed before each round.
    """
    _race_renewals(bench, 10_000, 60.0)
    _race_renewals(bench, 100_000, 600.0)


def _race_renewals(bench: Bench, leases: int, bound: float) -> None:
    renewals = [Renew(f"bench:job/{number}", f"bench-{number}", TTL_S) for number in range(leases)]
    names = [renewal.name for renewal in renewals]
    claim_ids = [renewal.claim_id for renewal in renewals]
    with (
        bench.database() as url,
        psycopg.connect(url, autocommit=True) as connection,
        closing(locate(url)[0].open()) as store,
    ):
        bench.progress(f"making {leases:,} leases")
        for chunk in _chunks(renewals, BATCH_MAX):
            store.act([Acquire(lease.name, lease.claim_id, HOLD_S, "benchmark") for lease in chunk], _deadline())
        connection.execute("CREATE TABLE raw_renew (LIKE dibs_lease INCLUDING ALL) WITH (fillfactor = 70)")
        connection.execute("INSERT INTO raw_renew SELECT * FROM dibs_lease")

        def dibs_round() -> list[float]:
            before = time.perf_counter()
            outcomes = [outcome for chunk in _chunks(renewals, RENEW_MAX) for outcome in store.act(chunk, _deadline())]
            took_ms = (time.perf_counter() - before) * 1000
            assert all(type(outcome) is Renewed for outcome in outcomes)
            return [took_ms]

        def raw_round() -> list[float]:
            before = time.perf_counter()
            renewed = connection.execute(RAW_RENEW, (names, claim_ids), prepare=True).rowcount
            took_ms = (time.perf_counter() - before) * 1000
            assert renewed == leases
            return [took_ms]

        bench.race(
            f"{leases:,} leases",
            MS,
            {"dibs": dibs_round, "raw UPDATE … FROM unnest": raw_round},
            [Target(bound)],
            between=lambda: connection.execute("VACUUM dibs_lease, raw_renew"),
        )


def pg_10m(bench: Bench) -> None:
    """One thread, dibs's lock: a table of very many rows beside one of few; ms for a pair.

    One database has 1,000 rows in ``dibs_lease``, the other 10 million (with --quick 200,000), vacuumed and analysed,
    on the same server with its default ``shared_buffers``, which hold a fraction of the large table; the system's
    cache holds the rest where there is memory for it. In the first case 500 names, picked from the whole table, are
    used again and again, as where most rows are of names long forgotten. In the second each name is picked anew, so
    that nearly every pair in the large table touches pages that no pair before it has touched; PostgreSQL logs such a
    page whole. In the third no name has a row yet, so each acquire makes one.
    """
    few, many = 1_000, 200_000 if bench.quick else 10_000_000
    with (
        bench.database() as few_url,
        bench.database() as many_url,
        dibs.connect(few_url) as few_client,
        dibs.connect(many_url) as many_client,
    ):
        _fill(bench, few_client, few_url, few)
        _fill(bench, many_client, many_url, many)
        bench.server.psql("CHECKPOINT")
        tables = {f"{many:,} rows": (many_client, many), f"{few:,} rows": (few_client, few)}

        def timed(client: dibs.Client, names: Iterable[str]) -> list[float]:
            def pair(name: str) -> None:
                with client.lock(name):
                    pass

            return [1000 / rate for rate in lone_thread(pair, names, bench.round_s)]

        def some(rows: int, names: int) -> list[str]:
            return [f"job/{row}" for row in random.sample(range(rows), names)]

        def kept(client: dibs.Client, rows: int) -> Round:
            return partial(timed, client, some(rows, KEPT_NAMES))

        def picked_anew(client: dibs.Client, rows: int) -> Round:
            return lambda: timed(client, some(rows, min(rows, ANEW_NAMES)))

        def never_seen(client: dibs.Client, rows: int) -> Round:
            names = (f"new/{number}" for number in itertools.count())
            return lambda: timed(client, itertools.islice(names, ANEW_NAMES))

        for case, round_of in (("500 names", kept), ("names picked anew", picked_anew), ("new names", never_seen)):
            contestants = {who: round_of(client, rows) for who, (client, rows) in tables.items()}
            bench.race(case, MS, contestants, [Target(1.2, f"{few:,} rows")])


def _fill(bench: Bench, client: dibs.Client, url: str, rows: int) -> None:
    """Rows as released leases leave them, made in SQL."""
    client.setup()
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(0, rows, FILL_AT_ONCE):
            bench.progress(f"making rows: {first:,} of {rows:,}")
            connection.execute(
                "INSERT INTO dibs_lease (name, slot, acquired_at, expires_at, fencing_token)"
                " SELECT 'default:job/' || i, 1, clock_timestamp(), clock_timestamp(), 1"
                " FROM generate_series(%s::bigint, %s::bigint) AS i",
                (first, min(first + FILL_AT_ONCE, rows) - 1),
            )
        bench.progress(f"vacuuming {rows:,} rows")
        connection.execute("VACUUM ANALYZE dibs_lease")


def _chunks(items: list[T], size: int) -> list[list[T]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _deadline() -> Deadline:
    return Deadline(RealClock(), boot_now() + REQUEST_LIMIT_S)
