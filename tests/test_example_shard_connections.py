"""The example of the page *Never exhaust a shard's connections*, on two real databases that allow few connections."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import dibs
from examples.shard_connections.shards import Shards
from tests.servers.postgres import PostgresServer

RUN = Path(__file__).parent.parent / "examples" / "shard_connections" / "run.py"
# What a shard allows, and what all programs together ask for: a closed connection counts until its backend has ended.
ALLOWED = 8
LIMIT = 4
ROLE = "shard_app"


@pytest.fixture
def shards(postgres: PostgresServer) -> Iterator[list[str]]:
    """Two databases that refuse the ninth connection of a role without privileges."""
    if not postgres.psql("SELECT 1 FROM pg_roles WHERE rolname = %s", (ROLE,)):
        postgres.create_user(ROLE)
    urls = [postgres.create_database() for _ in range(2)]
    names = [url.rpartition("/")[2] for url in urls]
    for name in names:
        postgres.psql(f'ALTER DATABASE "{name}" CONNECTION LIMIT {ALLOWED}')
    yield [postgres.url(name, user=ROLE) for name in names]
    for url in urls:
        postgres.drop_database(url)


def run(folder: Path, *args: str) -> tuple[int, int, int]:
    """How many visits there were, how many refusals, and how many connections a shard had at most."""
    environment = {**os.environ, "DIBS_URL": f"sqlite:///{folder}/permits.db"}
    done = subprocess.run([sys.executable, RUN, *args], env=environment, capture_output=True, text=True, timeout=100)
    found = re.search(r": (\d+) visits, (\d+) connections refused, at most (\d+) at a shard", done.stdout)
    assert found, done.stdout + done.stderr
    assert done.returncode == (0 if found[2] == "0" else 1), done.stderr
    return int(found[1]), int(found[2]), int(found[3])


def test_no_connection_is_refused(shards: list[str], tmp_path: Path) -> None:
    """Sixty threads of three processes, two shards: every visit is made, and no connection is refused."""
    visits, refused, most = run(tmp_path, "--rounds", "1", "--limit", str(LIMIT), *shards)
    assert (visits, refused) == (60, 0)
    assert 1 < most <= ALLOWED


def test_the_naive_version_is_refused(shards: list[str], tmp_path: Path) -> None:
    """The same without a semaphore: connections are refused, and visits are missing."""
    visits, refused, _ = run(tmp_path, "--rounds", "1", "--naive", *shards)
    assert refused > 0
    assert visits + refused == 60


def test_nested_use_takes_one_permit_and_one_connection(shards: list[str], sqlite_url: str) -> None:
    """A thread that asks again inside its block gets its connection, also when there is no permit left."""
    with dibs.connect(sqlite_url) as client:
        ours = Shards(client, shards, 1)
        with ours.connection(0) as outer, ours.connection(0) as inner:
            assert inner is outer
            assert client.semaphore("shard/0", 1).available() == 0
            others: list[psycopg.Connection] = []

            def other() -> None:
                with ours.connection(0) as connection:
                    others.append(connection)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join(0.3)
            assert thread.is_alive(), "another thread has a permit of its own to wait for"
            with ours.connection(1) as second:
                assert second is not outer
        thread.join(10)
        assert others
        assert others[0] is not outer
        assert client.semaphore("shard/0", 1).available() == 1
