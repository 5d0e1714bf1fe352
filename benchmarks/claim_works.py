"""Works on claims: a thousand ids of something else are claimed in one call and released again; ids a second."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial

import psycopg
import pymemcache

import dibs
from benchmarks.harness import Bench, Target, Unit
from benchmarks.postgres import make_raw_rows
from tests.servers.memcached import MemcachedServer

IDS_PER_S = Unit("ids/s", more_is_better=True)
IDS = 1000
TTL_S = 30
CASE = "1000 ids claimed and released"

# The raw pair of ``pg-lone``, for many rows at once.
RAW_CLAIM = """\
UPDATE raw_lock SET claim_id = %s, token = token + 1, expires = clock_timestamp() + interval '30 s'
WHERE name = ANY (%s) AND (claim_id IS NULL OR expires <= clock_timestamp()) RETURNING name, token"""
RAW_RELEASE = """\
WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
UPDATE raw_lock SET claim_id = NULL FROM relaxed WHERE name = ANY (%s) AND claim_id = %s"""


def pg_claims(bench: Bench) -> None:
    """One process claims a thousand ids and releases them, over and over, on PostgreSQL; ids a second.

    dibs: ``batch = claims.take(ids)``, ``batch.release()``. The reference is two raw statements with arrays, an UPDATE
    of the free rows and one that frees them (without waiting for the disk, as dibs does), on rows that are there
    already.
    """
    ids = list(range(IDS))
    with (
        bench.database() as url,
        dibs.connect(url) as client,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        names = [f"orders/{number}" for number in ids]
        make_raw_rows(url, names)
        claims = itertools.count()

        def raw() -> None:
            claim_id = f"raw-{next(claims)}"
            rows = connection.execute(RAW_CLAIM, (claim_id, names), prepare=True).fetchall()
            connection.execute(RAW_RELEASE, ([row[0] for row in rows], claim_id), prepare=True)

        bench.race(
            CASE,
            IDS_PER_S,
            {
                "dibs": partial(_over_and_over, _dibs_claims(client, ids), bench.round_s),
                "raw statements": partial(_over_and_over, raw, bench.round_s),
            },
            [Target(30_000.0)],
        )


def memcached_claims(bench: Bench) -> None:
    """One process claims a thousand ids and releases them, over and over, on memcached; ids a second.

    dibs: ``batch = claims.take(ids)``, ``batch.release()``. The peer calls pymemcache's ``add`` with a ttl and
    ``delete`` for one id after the other, waiting for each answer; it has no token, and deletes what may be another's.
    """
    ids = list(range(IDS))
    server = bench.started(MemcachedServer)
    raw = pymemcache.Client(("127.0.0.1", server.port), no_delay=True)
    names = [f"raw/{number}" for number in ids]

    def one_by_one() -> None:
        for name in names:
            assert raw.add(name, b"mine", TTL_S, noreply=False)
        for name in names:
            assert raw.delete(name, noreply=False)

    with dibs.connect(server.url()) as client:
        bench.race(
            CASE,
            IDS_PER_S,
            {
                "dibs": partial(_over_and_over, _dibs_claims(client, ids), bench.round_s),
                "add, delete each": partial(_over_and_over, one_by_one, bench.round_s),
            },
            [Target(3.0, "add, delete each")],
        )


def _dibs_claims(client: dibs.Client, ids: Sequence[int]) -> Callable[[], None]:
    claims = client.claims("orders", ttl=TTL_S)

    def once() -> None:
        batch = claims.take(ids)
        assert len(batch.won) == len(ids)
        batch.release()

    return once


def _over_and_over(claim_and_release: Callable[[], None], seconds: float) -> list[float]:
    done = 0
    start = time.perf_counter()
    while (took := time.perf_counter() - start) < seconds:
        claim_and_release()
        done += IDS
    return [done / took]
