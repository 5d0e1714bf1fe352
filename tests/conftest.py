"""Fixtures for every test: stores that are real and private. A server that cannot be had is a failure that says why."""

import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.servers.postgres import PostgresServer

# Real stores answer when they answer; a test that hangs is ended by pytest-timeout.
hypothesis.settings.register_profile("dibs", deadline=None, print_blob=True)
hypothesis.settings.load_profile("dibs")


@pytest.fixture(autouse=True, scope="session")
def signals_as_shipped() -> None:
    """What the tests start must not ignore signals only because nohup or a job runner made the tests ignore them."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A URL of an SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path}/locks.db"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The PostgreSQL that all tests share, started when the first one asks. Do not stop it: take `own_postgres`."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """The superuser's URL of a new empty database, dropped after the test with whatever is still connected to it."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL for this test alone, to be stopped, killed and paused at will."""
    with PostgresServer() as server:
        yield server
