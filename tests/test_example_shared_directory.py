"""The example store of `examples/shared_directory`: every promise, and every step at which something can go wrong.

It is installed as pip would do it, by an entry point in a folder on the path, and reached by its URL.
"""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dibs
from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.store import (
    GONE,
    RELEASED,
    Acquire,
    Gone,
    Granted,
    Held,
    Outcome,
    Release,
    Released,
    Renew,
    Renewed,
    Request,
    Transfer,
)
from dibs.testing import check_store
from dibs.testing.conformance import Run, runs

EXAMPLE = Path(__file__).parent.parent / "examples" / "shared_directory"
NAME = "default:x"


@pytest.fixture(autouse=True, scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What must be on the path for dibs to find the example; it is there during these tests."""
    entry = re.search(r'^directory = "(.+)"$', (EXAMPLE / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert entry is not None
    site = tmp_path_factory.mktemp("site-packages")
    info = site / "dibs_shared_directory-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dibs-shared-directory\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[dibs.stores]\ndirectory = {entry[1]}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.syspath_prepend(str(EXAMPLE))
        yield f"{EXAMPLE}:{site}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A directory that is set up."""
    url = f"directory://{tmp_path}/share"
    with dibs.connect(url) as client:
        client.setup()
    return url


def deadline() -> Deadline:
    return Deadline(RealClock(), RealClock.now() + 60)


# -- every promise ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [pytest.param(run, id=f"{run.face}-{run.case.name}") for run in runs()])
def test_case(run: Run, url: str) -> None:
    """The example keeps every promise of the conformance suite that it declares."""
    run.on(locate(url)[0])


def test_it_is_checked_by_its_url(url: str) -> None:
    """`check_store` takes the URL of a store that an entry point brings."""
    assert check_store(url, only=["grant_then_held", "first_come_first_served"]) == 1


# -- several processes ------------------------------------------------------------------------------------------------

WORKER = """
import os, random, sys, time
import dibs

url, log, number = sys.argv[1:]
pause = random.Random(int(number))
fd = os.open(log, os.O_WRONLY | os.O_APPEND)

def say(word, token):
    os.write(fd, f"{time.clock_gettime(time.CLOCK_MONOTONIC):.6f} {os.getpid()} {token} {word}\\n".encode())

with dibs.connect(url, ttl=1) as client:
    while True:
        with client.lock(f"hammered/{pause.randrange(2)}", timeout=30) as lease:
            say(f"{lease.name} in", lease.fencing_token)
            time.sleep(pause.random() * 0.01)
            if lease.held:
                say(f"{lease.name} out", lease.fencing_token)
"""


def test_processes_that_are_killed_exclude_each_other(url: str, path: str, tmp_path: Path) -> None:
    """Of many processes, some killed at any moment, at most one is inside, and tokens rise in the order of entering."""
    log = tmp_path / "log"
    log.touch()
    env = {**os.environ, "PYTHONPATH": path}
    workers: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        command = [sys.executable, "-c", WORKER, url, str(log), str(len(workers))]
        workers.append(subprocess.Popen(command, env=env))

    killed_at: dict[int, float] = {}
    try:
        for _ in range(4):
            start()
        for _ in range(5):
            time.sleep(0.5 + random.random())
            victim = random.choice([worker for worker in workers if worker.pid not in killed_at])
            victim.kill()
            victim.wait()
            killed_at[victim.pid] = time.clock_gettime(time.CLOCK_MONOTONIC)
            start()
        time.sleep(1.5)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
    assert {worker.returncode for worker in workers} == {-signal.SIGKILL}
    for name in ("hammered/0", "hammered/1"):
        visits: list[tuple[float, int, int]] = []
        left: dict[int, float] = {}
        for line in log.read_text().splitlines():
            at, by, number, where, word = line.split()
            if where == name and word == "in":
                visits.append((float(at), int(by), int(number)))
            elif where == name:
                left[int(number)] = float(at)
        visits.sort()
        assert len(visits) > 20, "too little happened to prove anything"
        for (_, pid, token), (entered, _, next_token) in pairwise(visits):
            assert next_token > token
            assert left.get(token, killed_at.get(pid, float("inf"))) <= entered, (
                f"two were inside: {token}, {next_token}"
            )


# -- every step at which something can go wrong -----------------------------------------------------------------------

# What the example asks of the file system; what of it changes something that an NFS client would ask for again.
CALLS = frozenset(("fsync", "link", "listdir", "mkdir", "open", "rename", "stat", "symlink", "unlink", "utime"))
REPEATED = frozenset(("link", "mkdir", "rename", "symlink", "unlink"))
Call = Callable[[], Any]


class Crash(BaseException):
    """A process ends here."""


class FileSystem:
    """The file system as the example sees it, where something can happen at the n-th call; and a clock set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from dibs_shared_directory import baton, store

        self.now_ns = 10**18
        self._count = 0
        self._happening: tuple[int, Callable[[str, Call], Any]] | None = None
        for module in (baton, store):
            monkeypatch.setattr(module, "os", self)
        monkeypatch.setattr(baton, "open", self._counted("open", open), raising=False)
        monkeypatch.setattr(baton.ServerClock, "now_ns", lambda clock: self.now_ns)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in CALLS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._count += 1
            if self._happening is None or self._count != self._happening[0]:
                return real(*args, **kwargs)
            happens, self._happening = self._happening[1], None
            return happens(name, lambda: real(*args, **kwargs))

        return call

    def at(self, number: int, happens: Callable[[str, Call], Any]) -> None:
        """Let ``happens`` make the n-th call from now, or not make it."""
        self._count, self._happening = 0, (number, happens)

    def nothing_more(self) -> bool:
        """Let nothing happen any more; False when it has happened."""
        waited, self._happening = self._happening is not None, None
        return waited

    def later(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FileSystem:
    return FileSystem(monkeypatch)


class Place:
    """A new share, and one name on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._address = locate(f"directory://{folder}")[0]
        self._address.open().setup(deadline())

    def act(self, *requests: Request) -> list[Outcome]:
        """As a process of its own."""
        return self._address.open().act(requests, deadline())

    def batons(self) -> list[str]:
        """The files that count as batons; there may never be two."""
        names = [path for path in self.folder.glob("names/*/*") if path.name.startswith(("baton.", "new."))]
        return [path.name for path in names if path.stat().st_nlink == 2]

    def kinds(self) -> list[str]:
        """What lies in the name's folder."""
        return sorted(path.name.partition(".")[0] for path in self.folder.glob("names/*/*"))


def acquire(claim: str) -> Acquire:
    return Acquire(NAME, f"{claim}-1", 5.0, f"host/1/{claim}")


def unused(place: Place, files: FileSystem) -> None:
    """The name was never used."""


def released(place: Place, files: FileSystem) -> None:
    place.act(acquire("before"), Release(NAME, "before-1"))


def expired(place: Place, files: FileSystem) -> None:
    place.act(acquire("before"))
    files.later(6)


def mine(place: Place, files: FileSystem) -> None:
    """The name is held by the claim that acts, for 4 s more."""
    place.act(acquire("a"))
    files.later(1)


Before = Callable[[Place, FileSystem], None]
FIRST_TOKEN: dict[Before, int] = {unused: 1, released: 2, expired: 2, mine: 1}
ACTS: dict[str, tuple[Before, Request]] = {
    "acquire-unused": (unused, acquire("a")),
    "acquire-released": (released, acquire("a")),
    "acquire-expired": (expired, acquire("a")),
    "acquire-mine": (mine, acquire("a")),
    "renew": (mine, Renew(NAME, "a-1", 5.0)),
    "release": (mine, Release(NAME, "a-1")),
    "release-later": (mine, Release(NAME, "a-1", 1, None, 2.0)),
}
every_act = pytest.mark.parametrize("before, act", ACTS.values(), ids=ACTS)


def each_step(
    files: FileSystem, folder: Path, before: Before, act: Request, happens: Callable[[Place, str, Call], Any]
) -> Iterator[tuple[Place, Outcome | BaseException]]:
    """The act in a new place, with something happening at its first call, then at its second, and so on to its last."""
    number = 0
    while True:
        number += 1
        place = Place(folder / str(number))
        before(place, files)
        files.at(number, partial(happens, place))
        outcome: Outcome | BaseException
        try:
            (outcome,) = place.act(act)
        except (Crash, dibs.DibsError) as error:
            outcome = error
        if files.nothing_more():
            assert number > 4
            return
        yield place, outcome
        assert len(place.batons()) == 1


@every_act
def test_a_crash_at_any_step(before: Before, act: Request, files: FileSystem, tmp_path: Path) -> None:
    """Wherever a process ends, others have the name at the latest after its ttl, under a greater token."""

    def crash(place: Place, name: str, call: Call) -> None:
        raise Crash

    for place, _ in each_step(files, tmp_path, before, act, crash):
        (other,) = place.act(acquire("b"))
        if isinstance(other, Held):
            # It had been granted before it ended, or had not been released yet.
            assert other.fencing_token == FIRST_TOKEN[before]
            assert 0 < other.free_in <= 5
            files.later(other.free_in)
            (other,) = place.act(acquire("b"))
            assert other == Granted(FIRST_TOKEN[before] + 1, files.now_ns / 1e9)
        assert isinstance(other, Granted)
        assert place.act(Renew(NAME, "a-1", 5), Release(NAME, "a-1"), Release(NAME, "b-1")) == [GONE, GONE, RELEASED]
        # After one more grant nothing lies about.
        assert place.act(acquire("c")) == [Granted(other.fencing_token + 1, files.now_ns / 1e9)]
        assert place.kinds() == ["baton", "called", "claim", "founded"]


@every_act
def test_a_step_that_is_repeated(before: Before, act: Request, files: FileSystem, tmp_path: Path) -> None:
    """A change whose reply was lost, and which the NFS client repeats, is answered as if nothing had happened."""

    def twice(place: Place, name: str, call: Call) -> Any:
        if name in REPEATED:
            call()
        return call()

    for place, outcome in each_step(files, tmp_path, before, act, twice):
        assert type(outcome) is {Acquire: Granted, Renew: Renewed, Release: Released}[type(act)]
        if isinstance(outcome, Granted):
            assert outcome.fencing_token == FIRST_TOKEN[before]
            assert place.act(acquire("b")) == [Held("host/1/a", outcome.fencing_token, outcome.acquired_at, 5.0)]


@every_act
def test_a_step_with_an_unknown_end(before: Before, act: Request, files: FileSystem, tmp_path: Path) -> None:
    """A call that was done, but answered by an error, is neither yes nor no; repeating the request finds out."""

    def done_but(place: Place, name: str, call: Call) -> Any:
        result = call()
        if name == "open" and not isinstance(result, int):
            result.close()
        raise OSError(errno.EIO, "no reply")

    for place, first in each_step(files, tmp_path, before, act, done_but):
        if isinstance(first, BaseException):
            assert isinstance(first, dibs.StoreUnavailable)
            assert first.maybe_applied
        again, after = place.act(act, acquire("b"))
        if isinstance(act, Acquire):
            assert isinstance(again, Granted)
            assert again.fencing_token == FIRST_TOKEN[before]
            assert isinstance(after, Held)
        elif isinstance(act, Renew):
            assert isinstance(again, Renewed)
            assert isinstance(after, Held)
        else:
            assert isinstance(again, (Gone, Released))
            assert isinstance(act, Release)
            assert isinstance(after, Held if act.keep else Granted)


@every_act
def test_sleep_at_any_step(before: Before, act: Request, files: FileSystem, tmp_path: Path) -> None:
    """Whoever sleeps at any step while others come and go harms nobody when it wakes up: one claim holds, the last."""
    met: list[Outcome] = []

    def others_come_and_go(place: Place, name: str, call: Call) -> Any:
        if before is mine:
            files.later(4.5)  # the lease ends meanwhile, unless it has just been renewed
        met.clear()
        for claim in "bcd":
            met.extend(place.act(acquire(claim)))
            if claim != "d":
                place.act(Release(NAME, f"{claim}-1"))
        return call()

    for place, outcome in each_step(files, tmp_path, before, act, others_come_and_go):
        holders = [claim for claim in "abcd" if place.act(Renew(NAME, f"{claim}-1", 5.0)) != [GONE]]
        tokens = [other.fencing_token for other in met if isinstance(other, Granted)]
        if tokens:
            # They were let in, one after the other. Whoever slept either was not, or had been before them, and let go.
            assert len(tokens) == 3
            assert all(later == earlier + 1 for earlier, later in pairwise(tokens))
            assert holders == ["d"]
            assert not isinstance(outcome, (Granted, Renewed))
        else:
            # It had done its work before it slept.
            assert all(isinstance(other, Held) for other in met)
            assert holders == ([] if isinstance(act, Release) else ["a"])
            assert isinstance(outcome, {Acquire: Granted, Renew: Renewed, Release: Released}[type(act)])


@pytest.mark.parametrize("ends", ["crash", "repeated", "unknown"])
def test_a_transfer_that_ends_at_any_step(ends: str, files: FileSystem, tmp_path: Path) -> None:
    """Whatever becomes of a step of a transfer, one of two claims holds; sent again, it is granted with one token."""

    def happens(place: Place, name: str, call: Call) -> Any:
        if ends == "crash":
            raise Crash
        result = call() if ends == "unknown" or name not in REPEATED else (call(), call())[1]
        if ends == "unknown":
            if name == "open" and not isinstance(result, int):
                result.close()
            raise OSError(errno.EIO, "no reply")
        return result

    def given(place: Place, files: FileSystem) -> None:
        place.act(acquire("given"))

    act = Transfer(NAME, "a-1", 5.0, "host/1/a", "given-1")
    for place, outcome in each_step(files, tmp_path, given, act, happens):
        if isinstance(outcome, BaseException):
            holders = [claim for claim in ("given-1", "a-1") if place.act(Renew(NAME, claim, 5.0)) != [GONE]]
            assert len(holders) == 1
        (again,) = place.act(act)
        assert isinstance(again, Granted)
        assert again.fencing_token == 2
        assert place.act(Renew(NAME, "given-1", 5.0), Release(NAME, "given-1"), Release(NAME, "a-1")) == [
            GONE,
            GONE,
            RELEASED,
        ]
        assert place.act(acquire("c")) == [Granted(3, files.now_ns / 1e9)]
        assert place.kinds() == ["baton", "called", "claim", "founded"]


# -- the share --------------------------------------------------------------------------------------------------------


def test_a_share_that_is_not_mounted_is_not_made_up(tmp_path: Path) -> None:
    """Without `dibs setup` nothing is made: a mount that is missing must not become a directory of this machine."""
    url = f"directory://{tmp_path}/share"
    with dibs.connect(url) as client:
        with pytest.raises(dibs.SetupRequired, match="mounted"):
            client.lock("x").acquire(timeout=0)
        assert not (tmp_path / "share").exists()
        client.setup()
        lease = client.lock("x", ttl=1).acquire(timeout=0)
        assert lease is not None
        (tmp_path / "share").rename(tmp_path / "gone")
        with pytest.raises(dibs.SetupRequired, match="mounted"):
            client.lock("y").acquire(timeout=0)
        assert lease.lost.wait(10)
        assert not (tmp_path / "share").exists()
        (tmp_path / "gone").rename(tmp_path / "share")
        again = client.lock("x").acquire(timeout=10)
        assert again is not None
        assert again.fencing_token == lease.fencing_token + 1


def test_the_clocks_of_clients_decide_nothing(url: str, path: str) -> None:
    """A client whose wall clock is a day ahead lets nobody in before the file server's time, and shuts nobody out."""
    ahead = textwrap.dedent(
        """
        import sys, time
        real = time.time
        time.time = lambda: real() + 86400
        import dibs, dibs.clock
        assert dibs.clock.wall_now() - real() > 86000
        with dibs.connect(sys.argv[1]) as client:
            assert client.lock("held").acquire(timeout=0) is None
            lease = client.lock("theirs", ttl=1, renew=False).acquire(timeout=0)
            time.sleep(1.1)
            assert client.lock("theirs").acquire(timeout=0)
        """
    )
    with dibs.connect(url) as client, client.lock("held", ttl=20):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ahead, url],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert not [
        line
        for module in (EXAMPLE / "dibs_shared_directory").glob("*.py")
        for line in module.read_text("utf-8").splitlines()
        if re.match(r"\s*(import|from) (time|datetime)\b", line)
    ], "the example reads a clock of the client"


def test_coarse_time_stamps_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files keep whole seconds only, Unsupported is raised: such a clock would end leases too soon."""
    stat = os.stat

    def whole_seconds(path: Any, **how: Any) -> Any:
        found = stat(path, **how)
        return type("Coarse", (), {"st_mtime_ns": found.st_mtime_ns // 10**9 * 10**9, "st_mode": found.st_mode})

    with dibs.connect(url) as client:
        monkeypatch.setattr(os, "stat", whole_seconds)
        with pytest.raises(dibs.Unsupported, match="coarse"):
            client.lock("x").acquire(timeout=0)
        monkeypatch.undo()
    assert list(Path(url.removeprefix("directory://"), "clocks").iterdir()) == []


def test_the_command_line_takes_its_url(url: str, path: str) -> None:
    """`dibs` works on a store that an entry point brings, and `dibs doctor` shows its findings."""
    env = {**os.environ, "PYTHONPATH": path, "DIBS_URL": url}
    cli = [sys.executable, "-m", "dibs"]
    ran = subprocess.run([*cli, "run", "x", "--", "sh", "-c", "echo $DIBS_FENCING_TOKEN"], env=env, capture_output=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"1\n", b"")
    doctor = subprocess.run([*cli, "doctor"], env=env, capture_output=True, text=True)
    assert doctor.returncode == 0, doctor
    for promise in ("reachable", "exclusion", "durable"):
        assert f"\nok    {promise}: " in doctor.stdout
    required = subprocess.run([*cli, "doctor", "--require", "waiting_line"], env=env, capture_output=True, text=True)
    assert required.returncode == 1, required


@pytest.mark.parametrize("wrong", ["directory://host/share", "directory:///", "directory://", "directory:///x?table=y"])
def test_a_wrong_url_is_refused(wrong: str) -> None:
    """A URL with a host, without a folder, or with an option is InvalidOption."""
    with pytest.raises(dibs.InvalidOption):
        dibs.connect(wrong)


def test_purge_leaves_the_baton(url: str) -> None:
    """After a purge a name is a folder with its baton; clocks that nobody has read for a day are gone."""
    root = Path(url.removeprefix("directory://"))
    stale = root / "clocks" / "stale"
    stale.mkdir()
    os.utime(stale, (1e9, 1e9))
    with dibs.connect(url) as client:
        for _ in range(3):
            with client.lock("x"):
                for used in root.glob("clocks/*"):  # as another's purge would after a day
                    if used != stale:
                        used.rmdir()
        assert client.purge(0) == 1
        assert client.purge(0) == 0
        assert not stale.exists()
        left = sorted(path.name.partition(".")[0] for path in root.glob("names/*/*"))
        assert left == ["baton", "called", "founded"]
        with client.lock("x") as lease:
            assert lease.fencing_token == 4
    assert list((root / "clocks").iterdir()) == []
