"""A feed checker to be run in as many copies as you like: each entry of the feed is reported exactly once.

The lock decides whose turn it is, so that the work is done by one worker at a time and moves to another when a worker
dies. It cannot stop a worker that was frozen after its last look at the lease and wakes up in someone else's turn. That
is what the fencing token is for: the report itself refuses a token older than one it has seen.

    python feed_checker.py --feed https://example.org/news.xml --out report.db
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import dibs

try:
    import feedparser
except ImportError:
    sys.exit("The feed checker reads feeds with feedparser: pip install feedparser (`make demo` does it for you).")


class Entry(NamedTuple):
    key: str
    title: str


def read_feed(feed: str) -> list[Entry]:
    """The entries of an RSS or Atom feed, a file or a URL, oldest first. Raises OSError when it cannot be read."""
    if feed.startswith(("http://", "https://")):
        with urlopen(feed, timeout=10) as answer:
            content = answer.read()
    else:
        content = Path(feed).read_bytes()
    entries = {}
    for found in reversed(feedparser.parse(io.BytesIO(content)).entries):  # feeds put the newest first
        key = found.get("id") or found.get("link") or found.get("title", "")  # not every entry has an id
        entries[key] = Entry(key, found.get("title", key))
    return list(entries.values())


class Superseded(Exception):
    """A later holder of the lock has been here; the work of the earlier one is refused."""


class Report:
    """The protected resource: what was reported, and whose turn it was. It checks the fencing token at every write.

    There is no UNIQUE on the entries, because most resources (a mailbox, a printer) have none: what keeps an entry from
    being reported twice is the lock and the token.
    """

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None)
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS turn"
            " (feed TEXT, token INTEGER, worker TEXT, began REAL, ended REAL, PRIMARY KEY (feed, token))"
        )
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS reported (feed TEXT, entry TEXT, title TEXT, token INTEGER, at REAL)"
        )

    @contextmanager
    def _fenced(self, feed: str, token: int) -> Iterator[sqlite3.Connection]:
        """One transaction: it begins by comparing the token with the latest, and is applied wholly or not at all."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            (latest,) = self._db.execute("SELECT max(token) FROM turn WHERE feed = ?", (feed,)).fetchone()
            if latest is not None and token < latest:
                raise Superseded(f"token {token} is older than {latest}, the latest seen here")
            yield self._db

    def begin_turn(self, feed: str, token: int, worker: str) -> set[str]:
        """Shut out earlier holders, and only then look at what they reported: from here on it cannot change."""
        with self._fenced(feed, token) as db:
            db.execute("INSERT INTO turn VALUES (?, ?, ?, ?, NULL)", (feed, token, worker, time.time()))
            return {entry for (entry,) in db.execute("SELECT entry FROM reported WHERE feed = ?", (feed,))}

    def add(self, feed: str, token: int, entry: Entry) -> None:
        """Report an entry. The row is the report and the mark "reported" in one: a crash leaves both or neither."""
        with self._fenced(feed, token) as db:
            db.execute("INSERT INTO reported VALUES (?, ?, ?, ?, ?)", (feed, *entry, token, time.time()))

    def end_turn(self, feed: str, token: int) -> None:
        with self._fenced(feed, token) as db:
            db.execute("UPDATE turn SET ended = ? WHERE feed = ? AND token = ?", (time.time(), feed, token))

    def close(self) -> None:
        self._db.close()


def take_turn(lease: dibs.Lease, report: Report, args: argparse.Namespace) -> None:
    """Report what is new, but only a few at a time, so that the others get their turn."""
    token = lease.fencing_token
    known = report.begin_turn(args.feed, token, args.worker)
    new = [entry for entry in read_feed(args.feed) if entry.key not in known][: args.limit]
    if new:
        say(args, token, "holds", f"the lock, {len(new)} to report")
    for entry in new:
        lease.check()  # rather LeaseLost here than work that will be refused
        say(args, token, "works on", entry.title)
        time.sleep(args.work)  # here a real checker fetches the page, or writes the mail
        report.add(args.feed, token, entry)
        say(args, token, "reported", entry.title)
    report.end_turn(args.feed, token)


def say(args: argparse.Namespace, token: int, event: str, detail: str) -> None:
    """A line for people, in columns that a program can take apart."""
    columns = f"worker {args.worker}", f"token {token}", event, " ".join(detail.split())
    print("\t".join(columns), flush=True)


def work(args: argparse.Namespace) -> None:
    """Take turn after turn, whatever happens in one of them."""
    until = time.monotonic() + args.seconds
    report = Report(args.out)
    with dibs.connect() as client:
        # The name is the lock: all workers must spell the feed alike.
        lock = client.lock(f"feed-check/{args.feed}", ttl=args.ttl, info={"worker": args.worker})
        while time.monotonic() < until:
            token = 0
            try:
                with lock as lease:  # waits for its turn, keeps the lease alive, gives it back
                    token = lease.fencing_token
                    take_turn(lease, report, args)
            except Superseded as refusal:
                say(args, token, "refused", str(refusal))
            except dibs.LeaseLost as loss:
                say(args, token, "lost", str(loss))
            except OSError as error:  # the feed cannot be read, or the store of the locks is away: next time, perhaps
                say(args, token, "failed", str(error))
            time.sleep(args.every)
    report.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Report each new entry of a feed once, however many workers run.")
    parser.add_argument("--feed", required=True, help="an RSS or Atom feed: a file or a URL")
    parser.add_argument("--out", required=True, help="the SQLite file that keeps the report")
    parser.add_argument("--worker", default=str(os.getpid()), help="what to call this worker (default: its pid)")
    parser.add_argument("--every", type=float, default=2, help="seconds to wait between turns")
    parser.add_argument("--work", type=float, default=0.5, help="seconds that the work on an entry takes")
    parser.add_argument("--limit", type=int, default=3, help="entries to report in one turn")
    parser.add_argument("--ttl", type=float, default=10, help="seconds after which a dead worker's lock is free")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    args = parser.parse_args()
    # SIGTERM ends the worker as Ctrl-C does: by an exception, so that the lock is given back on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        work(args)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
