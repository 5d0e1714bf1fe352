"""``dibs bench``: what it prints, that it is refused what makes no sense, and that it leaves nothing behind."""

import json
import os
import pty
import re
import signal
import sqlite3
import threading
from array import array
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

import dibs as library
from dibs.cli import main
from dibs.cli.bench import _told_apart
from dibs.cli.bench_figures import Figures, Samples, figures_of
from dibs.cli.bench_works import PREFIX, WORKS, Work
from dibs.urls import split_url
from tests.command_line import PATIENCE_S, Dibs, until
from tests.servers.redis import RedisServer

# Long enough for each work to be done once, and for one that has been begun to be interrupted.
SHORT = ("--seconds", "50ms")
LONG = ("--seconds", "60")


def rows_of(shown: str) -> dict[str, list[str]]:
    """The table that stands in what was printed, by the names of the works."""
    cells = [re.split(r" {2,}", line) for line in shown.splitlines()]
    return {row[0]: row[1:] for row in cells if row[0] in WORKS}


def password_in(url: str) -> str:
    password = split_url(url).password
    assert password
    return password


def nothing_is_held(url: str) -> bool:
    with library.connect(url) as client:
        return client.leases() == [] and (not client.capabilities.queue or client.queues() == [])


# -- what it tells -----------------------------------------------------------------------------------------------------


def test_for_people(dibs: Dibs) -> None:
    """The store, then a line for each work with numbers, then what follows from them; nothing on stderr."""
    done = dibs("bench", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    store, facts, _, head, *_ = done.stdout.splitlines()
    assert store == dibs("doctor").stdout.splitlines()[0]
    assert facts.startswith("SQLite, durable; reached in ")
    assert os.uname().nodename in facts
    assert re.split(" {2,}", head) == ["WORK", "WHAT", "COUNT", "A SECOND", "MEDIAN MS", "P99 MS"]
    rows = rows_of(done.stdout)
    assert list(rows) == list(WORKS)
    for what, *numbers in rows.values():
        assert what
        assert len([float(number.replace(",", "")) for number in numbers]) == 4
    assert "\nA lock takes " in done.stdout
    assert re.search(
        r"\nA second, from this one process: up to .* locks, .* in batches, .* of one name\.\n", done.stdout
    )


def test_for_programs(dibs: Dibs) -> None:
    """One object: where it was measured, and for each work raw numbers in seconds that fit to each other."""
    done = dibs("bench", "--json", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert [work["work"] for work in told["works"]] == list(WORKS)
    assert (told["store"], told["kind"], told["durable"]) == (dibs.url, "SQLite", True)
    assert (told["complete"], told["seconds"], told["host"]) == (True, 0.05, os.uname().nodename)
    assert told["version"] == library.__version__
    assert told["connect_s"] > 0
    for work in told["works"]:
        assert work["unsupported"] is None
        assert work["count"] > 0
        assert work["per_second"] > 0
        assert 0 < work["least_s"] <= work["median_s"] <= work["p99_s"] <= work["most_s"]


def test_only_some_works(dibs: Dibs) -> None:
    """Those that are named, once each and in their own order, also when the option is given twice."""
    done = dibs("bench", "--only", "queue", "lock", "--json", "--only", "lock", *SHORT)
    assert [work["work"] for work in json.loads(done.stdout)["works"]] == ["lock", "queue"]


@pytest.mark.parametrize("store", ["postgres_url", "redis_url"])
def test_on_a_server(store: str, dibs: Dibs, request: pytest.FixtureRequest) -> None:
    """Each work is measured there, no password is shown, and nothing stays held."""
    url: str = request.getfixturevalue(store)
    done = dibs("--url", url, "bench", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(rows_of(done.stdout)) == list(WORKS)
    assert "not on this store" not in done.stdout
    assert password_in(url) not in done.stdout
    with library.connect(url) as client:
        assert done.stdout.splitlines()[0] == client._desk.address.shown
    assert nothing_is_held(url)


def test_what_a_store_does_not_have_is_shown(memcached_url: str, dibs: Dibs) -> None:
    """As not being there, with the reason in JSON; when nothing else was asked for, it is exit 78."""
    done = dibs("--url", memcached_url, "bench", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of(done.stdout)
    assert list(rows) == list(WORKS)
    assert {name for name, row in rows.items() if row == ["not on this store"]} == {"semaphore", "queue"}
    done = dibs("--url", memcached_url, "bench", "--only", "queue", "--json", *SHORT)
    (queue,) = json.loads(done.stdout)["works"]
    assert queue["median_s"] is None
    assert "keeps no queues" in queue["unsupported"]
    assert (done.returncode, done.stderr) == (78, "dibs: none of this is on memcached\n")


def test_leases_that_are_watched(redis_url: str, dibs: Dibs) -> None:
    """With takeover=observe it measures locks, which are all there is then."""
    done = dibs("--url", f"{redis_url}&takeover=observe", "bench", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of(done.stdout)
    assert {name for name, row in rows.items() if row == ["not on this store"]} == {"semaphore", "queue"}


def test_memory_is_measured(dibs: Dibs) -> None:
    """It tells what dibs itself takes; both clients of the hand-over see one memory."""
    done = dibs("--url", "memory://", "bench", *SHORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("memory://\nmemory, not durable; ")
    assert list(rows_of(done.stdout)) == list(WORKS)


# -- what is left ------------------------------------------------------------------------------------------------------


def test_nothing_stays_but_rows_of_free_names(dibs: Dibs) -> None:
    """No lease, no job, no queue; as many rows as the help says, all under one prefix, which a purge deletes."""
    with library.connect(dibs.url) as client, client.lock("nightly"):
        assert dibs("bench", *SHORT).returncode == 0
        assert [lease.name for lease in client.leases()] == ["nightly"]
    assert nothing_is_held(dibs.url)
    assert json.loads(dibs("queues", "--json").stdout) == []
    with closing(sqlite3.connect(dibs.folder / "locks.db")) as db:
        names = [name for (name,) in db.execute("SELECT name FROM dibs_lease WHERE name NOT LIKE '%:nightly'")]
    prefixes = {re.match(rf"default:{PREFIX}\w+/", name) for name in names}
    assert None not in prefixes
    assert len({found[0] for found in prefixes if found}) == 1
    assert 100 < len(names) < 1200
    purged = int(dibs("purge", "--older-than", "0").stdout.split()[1])
    assert purged > len(names)  # the semaphore, and "nightly"


# (A ping holds nothing, and new names come to an end soon.)
@pytest.mark.parametrize("work", [name for name in WORKS if name not in ("ping", "new")])
@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_nothing(
    work: str, signum: int, code: int, dibs: Dibs, client: library.Client
) -> None:
    """Ctrl-C is exit 130 without a word, SIGTERM 143; neither a lease nor a job is left."""
    process = dibs.start("bench", "--only", work, *LONG)
    seen: Callable[[], Any] = client.queues if work == "queue" else lambda: client.leases(PREFIX)
    until(seen)
    process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (code, "", "")
    assert nothing_is_held(dibs.url)


def test_what_was_measured_before_is_shown(
    dibs: Dibs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When it is interrupted, or the store goes away, with the exit code of that."""
    for error, code, said in (
        (KeyboardInterrupt(), 130, ""),
        (library.StoreUnavailable("gone"), 69, "dibs: gone\n"),
    ):

        def fail(_place: object, error: BaseException = error) -> Samples:
            raise error

        monkeypatch.setitem(WORKS, "threads", Work("fails", fail))
        assert main(["--url", dibs.url, "bench", *SHORT]) == code
        out, err = capsys.readouterr()
        assert (list(rows_of(out)), err) == (["ping", "lock", "new"], said)
        assert main(["--url", dibs.url, "bench", "--json", *SHORT]) == code
        told = json.loads(capsys.readouterr().out)
        assert (told["complete"], len(told["works"])) == (False, 3)
    assert nothing_is_held(dibs.url)


@pytest.mark.parametrize("work", ["lock", "threads", "queue", "handover"])
def test_a_store_that_goes_away(work: str, own_redis: RedisServer, dibs: Dibs) -> None:
    """Exit 69 with one line, two where a job may be left, and no thread that goes on."""
    url = own_redis.url()
    more = "&" if "?" in url else "?"
    process = dibs.start("--url", f"{url}{more}patience=0.2&request_timeout=1", "bench", "--only", work, *LONG)
    with library.connect(url) as client:
        seen: Callable[[], Any] = client.queues if work == "queue" else lambda: client.leases(PREFIX)
        until(lambda: process.poll() is not None or seen())
    own_redis.kill()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (69, "")
    assert all(line.startswith("dibs: ") for line in err.splitlines())
    assert [line for line in err.splitlines() if "a job may be left" in line] == err.splitlines()[: work == "queue"]
    assert len(err.splitlines()) == 1 + (work == "queue")


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        (("--seconds", "0"), "--seconds is at least 0.05 s, not 0"),
        (("--seconds", "1h"), "--seconds is at most 60 s, not 3,600"),
        (("--seconds", "soon"), "'soon' is no duration"),
        (("--only", "locks"), "there is no work 'locks' (did you mean 'lock'?): there are ping, lock, new, "),
        (("--only",), "expected at least one argument"),
        (("lock",), "'lock' is one argument too many"),
    ],
)
def test_what_makes_no_sense_is_64(dibs: Dibs, words: tuple[str, ...], said: str) -> None:
    """One line that says what is wrong, before the store is touched."""
    done = dibs("bench", *words)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert list(dibs.folder.iterdir()) == []


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_store_that_cannot_be_reached_is_69(dibs: Dibs, more: tuple[str, ...]) -> None:
    """One line, and no table."""
    done = dibs("--url", "redis://127.0.0.1:1", "bench", *more)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (69, "", 1)


def test_a_store_that_is_not_set_up_is_78(dibs: Dibs) -> None:
    """A file that is no database."""
    (dibs.folder / "locks.db").write_text("these are no locks" * 100)
    done = dibs("bench")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)


@pytest.mark.parametrize("what", [(f"{PREFIX}*",), ("*",), ("--queue", f"{PREFIX}*")])
def test_what_is_paused_is_not_measured(dibs: Dibs, what: tuple[str, ...]) -> None:
    """It says at once who paused it, instead of waiting for names that are not to be had."""
    assert dibs("pause", *what, "--note", "new disks").returncode == 0
    done = dibs("bench", *LONG)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (75, "", 1)
    assert "new disks" in done.stderr


# -- on a terminal -----------------------------------------------------------------------------------------------------


def test_a_terminal_is_shown_how_far_it_is(dibs: Dibs) -> None:
    """On stderr: which work, and for how long still. No trace of it is left."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 1024):
                shown.extend(data)
        except OSError:  # the terminal's other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    done = dibs("bench", "--only", "ping", "lock", *SHORT, capture_output=False, stdout=-1, stderr=theirs)
    os.close(theirs)
    reader.join(PATIENCE_S)
    os.close(ours)
    assert done.returncode == 0
    assert list(rows_of(done.stdout)) == ["ping", "lock"]
    assert shown == b"\rping (1 of 2), 0 s left\x1b[K\rlock (2 of 2), 0 s left\x1b[K\r\x1b[K"


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "times, median, p99",
    [([3.0], 3.0, 3.0), ([4.0, 2.0], 3.0, 4.0), ([9.0, 1.0, 2.0], 2.0, 9.0), (range(1, 101), 50.5, 99.0)],
)
def test_figures(times: Any, median: float, p99: float) -> None:
    """The median lies between the two in the middle; the 99th percentile is a time that was measured."""
    samples = Samples(array("d", times), 2.0)
    count = len(samples.times)
    assert figures_of(samples) == Figures(count, count / 2, median, p99, min(samples.times), max(samples.times))


@pytest.mark.parametrize(
    "ping_s, said",
    [
        (0.0001, ". Two pings, the way there and dibs itself, are 20% of it: most of it is the store's own work."),
        (0.00025, " are 50% of it: about half is the store's own work."),
        (0.0004, " are 80% of it: the most."),
        (0.0007, ", no more than two pings: the way there, and dibs itself."),
    ],
)
def test_where_the_time_goes(ping_s: float, said: str) -> None:
    """Two pings are the way of the two requests of a lock; what is left is the store's."""
    ping, lock = (figures_of(Samples(array("d", [seconds]), seconds)) for seconds in (ping_s, 0.001))
    told = _told_apart(ping, lock)
    assert told.startswith("A lock takes 1.00 ms")
    assert told.endswith(said)
