"""The conformance suite on every store, through every face. What a store promises is written in `dibs.testing`."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count

import pytest

from dibs.connecting import locate
from dibs.errors import SetupRequired
from dibs.store import StoreAddress
from dibs.stores import memory
from dibs.testing import check_store
from dibs.testing.conformance import Run, runs

# Stores other than memory, by the fixture that gives the URL of a new, empty place.
STORES = [
    "memory",
    "sqlite_url",
    "postgres_url",
    "mysql_url",
    "redis_url",
    "memcached_url",
    "etcd_url",
    "zookeeper_url",
]
# mysqlclient must be compiled (scripts/setup_mysqlclient.sh tries to); PyMySQL is always tested.
if find_spec("MySQLdb"):
    STORES.append("mysqlclient_url")
_numbers = count()


@pytest.fixture(params=STORES, ids=[store.partition("_")[0] for store in STORES])
def address(request: pytest.FixtureRequest) -> Iterator[StoreAddress]:
    """A new, empty place where leases are kept."""
    if request.param == "memory":
        yield memory.address(f"conformance-{next(_numbers)}")
    else:
        yield locate(request.getfixturevalue(request.param))[0]


@pytest.mark.parametrize("run", [pytest.param(run, id=f"{run.face}-{run.case.name}") for run in runs()])
def test_case(run: Run, address: StoreAddress) -> None:
    """Every store keeps every promise it declares."""
    run.on(address)


def test_every_case_says_what_it_proves() -> None:
    """A case has a sentence and a promise, and is either for the contract or for both faces."""
    everything = list(runs())
    assert all(run.case.sentence.endswith(".") and run.case.promise for run in everything)
    faces = {face: {run.case.name for run in everything if run.face == face} for face in ("store", "threads", "tasks")}
    assert faces["threads"] == faces["tasks"]
    assert not faces["store"] & faces["threads"]


def test_a_store_is_checked_by_its_url(sqlite_url: str) -> None:
    """`check_store` takes a URL, an address or a function, and the names of the cases that matter."""
    wanted = ["grant_then_held", "not_now_is_a_value"]
    assert check_store(sqlite_url, only=wanted) == 3
    assert check_store(locate(sqlite_url)[0], only=wanted[:1]) == 1
    assert check_store(lambda: locate(sqlite_url)[0], only=wanted[:1]) == 1
    with pytest.raises(ValueError, match="no such case: no_such_case"):
        check_store(sqlite_url, only=["no_such_case"])


def test_a_broken_promise_is_named(sqlite_url: str) -> None:
    """A store that forgets what it granted fails with the case, the promise and what was seen."""
    address = locate(sqlite_url)[0]

    def forgetful() -> object:
        store = address.open()
        act = store.act
        store.act = lambda requests, deadline: [act([r], deadline)[0] for r in requests if not hasattr(r, "holder")]  # type: ignore[method-assign]
        return store

    with pytest.raises(AssertionError, match=r"(?s)grant_then_held \(store, on sqlite:.*breaks P1\. .*But: outcomes"):
        check_store(address._replace(open=forgetful), only=["grant_then_held"])  # type: ignore[arg-type]


def test_an_actor_that_fails_is_told_of(sqlite_url: str) -> None:
    """Where somebody cannot take part in a ring, the case fails with their error instead of waiting for them."""
    address = locate(sqlite_url)[0]

    def refusing() -> object:
        store = address.open()

        def act(requests: object, deadline: object) -> object:
            raise SetupRequired("the tables are gone")

        store.act = act  # type: ignore[method-assign, assignment]
        return store

    cases = ["two_who_wait_for_each_other", "a_run_and_a_lock_who_wait_for_each_other"]
    for case in cases:
        with pytest.raises(AssertionError, match=r"(?s)breaks the rings.*But: SetupRequired\(.*the tables are gone"):
            check_store(address._replace(open=refusing), only=[case])  # type: ignore[arg-type]


def test_a_python_without_assertions_proves_nothing(sqlite_url: str) -> None:
    """Under `python -O` every case would pass: the suite says so instead."""
    code = f"from dibs.testing import check_store; check_store({sqlite_url!r}, only=['grant_then_held'])"
    ran = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "RuntimeError: the conformance suite checks with assert" in ran.stderr
