"""The recipes of docs/how-to/take-over-from-another-lock.md, as they stand there, between processes of all deployments.

As a program (`python -m tests.test_interop …`) this module is one such process: it takes its lock again and again and
says when it was inside, and whether anybody else was.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
import redis as redis_py
from filelock import FileLock, Timeout

import dibs
from tests.servers.process import free_port
from tests.servers.redis import RedisServer
from tests.test_docs import DOCS, ROOT, blocks

NAME = "report"
NUMBER = 4711
PHASE_S = 2.5


def recipes() -> dict[str, Any]:
    """The functions that the page defines."""
    page = DOCS / "how-to" / "take-over-from-another-lock.md"
    namespace: dict[str, Any] = {"__name__": "recipes"}
    for block in blocks(page):
        if block.language == "python" and "@contextmanager" in block.text:
            definition = block.text.partition("\nclient = ")[0]
            exec(compile("\n" * block.line + definition, str(page), "exec"), namespace)
    return namespace


class Kind(NamedTuple):
    """A lock to take over from: as it is taken today, and together with dibs. ``place`` is its file or URL."""

    old: Callable[..., AbstractContextManager[Any]]
    both: Callable[..., AbstractContextManager[Any]]


def file_kind() -> Kind:
    both = recipes()["dibs_and_file"]
    return Kind(FileLock, lambda client, place, **how: both(client, NAME, place, **how))


def redis_kind() -> Kind:
    def old(place: str) -> Any:
        return redis_py.Redis.from_url(place).lock(f"lock:{NAME}", timeout=20, sleep=0.02)

    def taken(client: dibs.Client, place: str, **how: Any) -> Any:
        return recipes()["dibs_and_redis"](client, redis_py.Redis.from_url(place), NAME, **how)

    return Kind(old, taken)


def advisory_kind() -> Kind:
    @contextmanager
    def old(place: str) -> Iterator[None]:
        with psycopg.connect(place, autocommit=True) as connection:
            connection.execute("SELECT pg_advisory_lock(%s)", [NUMBER])
            yield

    both = recipes()["dibs_and_advisory"]
    return Kind(old, lambda client, place, **how: both(client, NAME, place, NUMBER, **how))


KINDS = {"filelock": file_kind, "redis-py": redis_kind, "pg_advisory_lock": advisory_kind}


class Setting(NamedTuple):
    """Where the old lock and dibs are."""

    kind: str
    place: str
    url: str

    def both(self, client: dibs.Client, **how: Any) -> AbstractContextManager[Any]:
        return KINDS[self.kind]().both(client, self.place, **how)

    def old(self) -> AbstractContextManager[Any]:
        return KINDS[self.kind]().old(self.place)

    def start(self, deployment: str, marker: Path, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.test_interop", *self, deployment, str(marker), str(seconds)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(params=KINDS)
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    """Each kind of old lock, with dibs on the store that is at hand there."""
    if request.param == "filelock":
        return Setting(request.param, str(tmp_path / "report.lock"), request.getfixturevalue("sqlite_url"))
    if request.param == "redis-py":
        server: RedisServer = request.getfixturevalue("redis")
        with server.client() as client:
            client.delete(f"lock:{NAME}")
        return Setting(request.param, server.url(), request.getfixturevalue("redis_url"))
    url = request.getfixturevalue("postgres_url")
    return Setting(request.param, url, url)


# -- one process of a deployment --------------------------------------------------------------------------------------


def process(kind: str, place: str, url: str, deployment: str, marker: str, seconds: str) -> None:
    """Visit for so long. Says `in` for each visit, `overlap` when somebody else was inside, `met` for each warning."""
    told = logging.Handler()
    told.emit = lambda record: print("met", flush=True)  # type: ignore[method-assign]
    logging.getLogger("migration").addHandler(told)
    setting = Setting(kind, place, url)
    with dibs.connect(url) as client:
        enter: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "old": setting.old,
            "both": lambda: setting.both(client),
            "new": lambda: client.lock(NAME),
        }
        print("ready", flush=True)
        input()
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            with enter[deployment]():
                try:
                    os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    print("overlap", flush=True)
                else:
                    print("in", flush=True)
                    time.sleep(random.random() * 0.01)
                    os.unlink(marker)
            time.sleep(random.random() * 0.04)


def run(setting: Setting, marker: Path, *deployments: str) -> list[tuple[str, list[str]]]:
    """Two processes of each deployment at once; what each of them said."""
    started = [(deployment, setting.start(deployment, marker, PHASE_S)) for deployment in deployments * 2]
    for _, process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for _, process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [(deployment, process.communicate(timeout=60)[0].split()) for deployment, process in started]
    assert [process.returncode for _, process in started] == [0] * len(started)
    return said


def test_nobody_is_inside_with_another_while_deployments_change(setting: Setting, tmp_path: Path) -> None:
    """0 beside 1, then 1 beside 2: nobody ever meets another inside, everybody comes in, and 1 tells when it met 0."""
    for deployments in (("old", "both"), ("both", "new")):
        said = run(setting, tmp_path / "inside", *deployments)
        assert not [words for _, words in said if "overlap" in words]
        for deployment in deployments:
            assert sum(words.count("in") for which, words in said if which == deployment) >= 5
        met = sum(words.count("met") for _, words in said)
        assert (met > 0) == ("old" in deployments), "who holds dibs and finds the old lock taken has met an old process"


def test_that_could_be_seen(tmp_path: Path, sqlite_url: str) -> None:
    """The control: 0 beside 2, which have no lock in common, do meet inside."""
    said = run(Setting("filelock", str(tmp_path / "report.lock"), sqlite_url), tmp_path / "inside", "old", "new")
    assert any("overlap" in words for _, words in said)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_old_lock_that_cannot_be_had_gives_dibs_back(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """When the second lock cannot be had in time, an error says so, the first is given back, and the old one stays."""
    with dibs.connect(setting.url) as client:
        with setting.old():
            with pytest.raises((Timeout, dibs.LockTimeout, psycopg.errors.LockNotAvailable)):
                with setting.both(client, timeout=1):
                    raise AssertionError("inside with an old process")
            assert "an old process holds" in caplog.text
            assert client.holder(NAME) is None
        with setting.both(client, timeout=1):
            assert client.holder(NAME) is not None
        assert client.holder(NAME) is None


def test_a_busy_dibs_leaves_the_old_lock_alone(setting: Setting) -> None:
    """When the first lock cannot be had, the second is not even asked for."""
    with dibs.connect(setting.url) as client, dibs.connect(setting.url) as other:
        with client.lock(NAME):
            with pytest.raises(dibs.LockTimeout):
                with setting.both(other, timeout=0):
                    raise AssertionError("inside with a new process")
            with setting.old():
                pass


def test_an_error_inside_gives_both_back(setting: Setting) -> None:
    """An error of the work gives both locks back and comes out as it is."""
    with dibs.connect(setting.url) as client:
        with pytest.raises(ZeroDivisionError):
            with setting.both(client):
                raise ZeroDivisionError
        assert client.holder(NAME) is None
        with setting.old():
            pass


def test_a_lost_lease_is_told_and_gives_the_old_lock_back(setting: Setting) -> None:
    """A lease lost at work is told by check(), and by the end of the block; the old lock is free again after it."""

    def work(client: dibs.Client) -> None:
        with setting.both(client) as held:
            lease = held[0] if isinstance(held, tuple) else held
            client.break_lease(NAME, fencing_token=lease.fencing_token, now=True)
            with pytest.raises(dibs.LeaseLost):
                lease.renew()
            with pytest.raises(dibs.LeaseLost):
                lease.check()

    with dibs.connect(setting.url) as client:
        with pytest.raises(dibs.LeaseLost):
            work(client)
        with setting.old():
            pass


def test_what_a_killed_process_held_is_free_in_the_end(setting: Setting, tmp_path: Path) -> None:
    """After kill -9 of a process that holds both, dibs is free after its ttl; a file and a connection at once."""
    url = f"{setting.url}{'&' if '?' in setting.url else '?'}ttl=1"
    marker = tmp_path / "inside"
    marker.touch()  # so that it says `overlap`, and holds both locks for a moment again and again
    process = setting._replace(url=url).start("both", marker, 60)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "overlap\n"
    process.kill()
    process.wait()
    process.stdout.close()
    with dibs.connect(setting.url) as client:
        began = time.monotonic()
        if setting.kind == "redis-py":  # its lifetime is a minute
            redis_py.Redis.from_url(setting.place).delete(f"lock:{NAME}")
        with setting.both(client, timeout=10):
            assert time.monotonic() - began < 5


def test_a_redis_that_is_away_gives_dibs_back(sqlite_url: str) -> None:
    """When the old lock's server cannot be reached, its error comes out and dibs is given back."""
    setting = Setting("redis-py", f"redis://127.0.0.1:{free_port()}/0", sqlite_url)
    with dibs.connect(sqlite_url) as client:
        with pytest.raises(redis_py.exceptions.ConnectionError):
            with setting.both(client):
                raise AssertionError("inside without the old lock")
        assert client.holder(NAME) is None


def test_a_redis_lock_that_expired_is_told(redis: RedisServer, sqlite_url: str) -> None:
    """The old lock's time-out goes on while one works: an old process comes in, and reacquire() and the end tell."""
    setting = Setting("redis-py", redis.url(), sqlite_url)

    def work(client: dibs.Client) -> None:
        with setting.both(client, lifetime=0.3) as (lease, old):
            time.sleep(0.5)
            with setting.old():
                with pytest.raises(redis_py.exceptions.LockNotOwnedError):
                    old.reacquire()
                lease.check()

    with dibs.connect(sqlite_url) as client:
        with pytest.raises(redis_py.exceptions.LockNotOwnedError):
            work(client)
        assert client.holder(NAME) is None
        with setting.old():
            pass


def test_a_redis_lock_is_kept_by_reacquiring(redis: RedisServer, sqlite_url: str) -> None:
    """Steps shorter than its lifetime, with reacquire() at each, keep old processes out for as long as it takes."""
    setting = Setting("redis-py", redis.url(), sqlite_url)
    with dibs.connect(sqlite_url) as client, setting.both(client, lifetime=1) as (lease, old):
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            lease.check()
            old.reacquire()
            time.sleep(0.1)
            with redis.client() as plain:
                assert not plain.lock(f"lock:{NAME}", timeout=1).acquire(blocking=False)


def test_the_shell_recipe_excludes_filelock(sqlite_url: str, tmp_path: Path) -> None:
    """`dibs run NAME -- flock FILE COMMAND` and a program with filelock exclude each other."""
    path = tmp_path / "report.lock"
    command = [
        sys.executable,
        "-m",
        "dibs",
        "--url",
        sqlite_url,
        "run",
        NAME,
        "--",
        "flock",
        "-n",
        str(path),
        "echo",
        "x",
    ]
    with FileLock(path):
        assert subprocess.run(command, capture_output=True, text=True).stdout == ""
    assert subprocess.run(command, capture_output=True, text=True).stdout == "x\n"


if __name__ == "__main__":
    process(*sys.argv[1:])
