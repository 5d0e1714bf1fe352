"""The demo and its feed checker, run as a user runs them, and the rule that a late writer is refused."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from examples.feed_checker import Entry, Report, Superseded, read_feed

EXAMPLES = Path(__file__).parent.parent / "examples"
FEEDS = ["harbour.rss.xml", "observatory.atom.xml"]
FEED = "news.xml"
ONE, TWO = Entry("tag:1", "One"), Entry("tag:2", "Two")


@pytest.fixture
def report(tmp_path: Path) -> Iterator[Report]:
    with closing(Report(str(tmp_path / "report.db"))) as report:
        yield report


def reported(folder: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(folder / "report.db")) as db:
        return db.execute("SELECT entry, token FROM reported ORDER BY rowid").fetchall()


def start_demo(folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(folder), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo.py")],
        env=environment,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def left_over(folder: Path) -> list[str]:
    """The processes whose environment names the folder: the demo's workers inherit it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def test_the_demo_keeps_what_it_promises(tmp_path: Path) -> None:
    """A worker killed and a worker frozen while holding the lock leave each entry reported exactly once."""
    with start_demo(tmp_path) as demo:
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    assert "tokens rise strictly: yes" in output
    assert "entries published 40, reported 40, twice 0, missed 0" in output
    takeover = re.search(r"take-over after the kill: ([0-9.]+) s", output)
    assert takeover, output
    assert float(takeover[1]) <= 3
    assert "late write refused by its fencing token: yes" in output
    assert "killed with -9" in output
    assert "\033" not in output, "colours are for terminals"
    assert max(len(line) for line in output.splitlines() if not line.startswith("store")) <= 80
    assert left_over(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C ends the demo and its workers, and removes its folder."""
    with start_demo(tmp_path) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if "holds the lock, " in line)
        assert len(left_over(tmp_path)) == 5
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate()
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert left_over(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_late_writer_is_refused(report: Report, tmp_path: Path) -> None:
    """Once a later holder has begun its turn, an earlier one can write nothing any more."""
    assert report.begin_turn(FEED, 1, "a") == set()
    report.add(FEED, 1, ONE)
    assert report.begin_turn(FEED, 2, "b") == {ONE.key}
    for late_write in (
        lambda: report.add(FEED, 1, TWO),
        lambda: report.end_turn(FEED, 1),
        lambda: report.begin_turn(FEED, 1, "a"),
    ):
        with pytest.raises(Superseded, match="token 1 is older than 2"):
            late_write()
    report.add(FEED, 2, TWO)
    report.end_turn(FEED, 2)
    assert reported(tmp_path) == [(ONE.key, 1), (TWO.key, 2)]


def test_the_tokens_of_two_feeds_are_compared_apart(report: Report) -> None:
    """A token is of one lock: another feed's higher token supersedes nobody."""
    report.begin_turn(FEED, 1, "a")
    report.begin_turn("other.xml", 5, "b")
    report.add(FEED, 1, ONE)
    assert report.begin_turn("other.xml", 6, "a") == set()


@pytest.mark.parametrize("name", FEEDS)
def test_the_shipped_feeds_are_whole(name: str) -> None:
    """Each has 40 entries, each with a key of its own and a title, oldest first."""
    entries = read_feed(str(EXAMPLES / "feeds" / name))
    assert len({entry.key for entry in entries}) == len(entries) == 40
    assert all(entry.title and "<" not in entry.title for entry in entries)
    assert entries[0].title in {"Buoy 7 off station", "Dome motor greased, squeak gone"}


def test_an_entry_that_a_feed_lists_twice_is_read_once(tmp_path: Path) -> None:
    """Feeds list an edited entry again under its id; entries without an id go by their link."""
    feed = tmp_path / "feed.xml"
    feed.write_text(
        "<rss version='2.0'><channel>"
        "<item><title>New</title><guid>a</guid></item>"
        "<item><title>Linked</title><link>b</link></item>"
        "<item><title>Old</title><guid>a</guid></item>"
        "</channel></rss>"
    )
    assert read_feed(str(feed)) == [Entry("a", "New"), Entry("b", "Linked")]
