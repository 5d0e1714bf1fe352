"""`make demo`: four feed checkers share one feed; one is killed with -9, one is frozen, and nothing goes wrong.

The workers are the program beside this file, run as anybody would run it. The demo lets a real feed grow, does the
harm, shows what the workers say, and in the end judges by what is in the feed and in the report, not by what was said.
"""

from __future__ import annotations

import argparse
import io
import os
import queue
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from urllib.parse import quote

import dibs

try:
    import feedparser
except ImportError:
    sys.exit("The demo reads feeds with feedparser: pip install feedparser, or let `make demo` do it.")

HERE = Path(__file__).resolve().parent
FEED = "news.xml"
LOCK = f"feed-check/{FEED}"

WORKERS = 4
TTL_S = 2.0
WORK_S = 0.25  # what a worker needs for one entry
PUBLISH_FIRST, PUBLISH_STEP, PUBLISH_EVERY_S = 4, 3, 1.0  # 40 entries in 12 s
KILL_AFTER_S, FREEZE_AFTER_S = 3.0, 2.0
TAKEOVER_MAX_S = TTL_S + 1.0  # the ttl, and a moment for a busy machine
GIVE_UP_S = 45.0  # usually it takes 15

COLOURS = {"worker 1": 36, "worker 2": 33, "worker 3": 35, "worker 4": 34, "demo": 1, "ok": 32, "WRONG": 31}


class Line(NamedTuple):
    """What a worker said."""

    worker: str
    token: int
    event: str
    detail: str


class Turn(NamedTuple):
    """A turn as the workers wrote it down at the resource."""

    token: int
    worker: str
    began: float
    ended: float | None
    reported: int


# In the order in which they were written, so that the tokens have something to prove.
TURNS = """
    SELECT token, worker, began, ended, (SELECT count(*) FROM reported WHERE reported.token = turn.token)
    FROM turn ORDER BY rowid"""


class Interrupted(Exception):
    """A signal asked for the end."""


class GaveUp(Exception):
    """Something that had to happen did not."""


# -- the feed, which grows --------------------------------------------------------------------------------------------


class Feed:
    """A feed file that shows more and more of the shipped one, newest first, as feeds do."""

    def __init__(self, shipped: Path, path: Path) -> None:
        text = shipped.read_text(encoding="utf-8")
        found = list(re.finditer(r"[ \t]*<(item|entry)[ >].*?</\1>\n?", text, re.DOTALL))
        if not found:
            sys.exit(f"{shipped} has no <item> and no <entry>: it is no RSS or Atom feed.")
        self._head, self._tail = text[: found[0].start()], text[found[-1].end() :]
        self._entries = [match.group() for match in found]
        self._path = path
        self.total = len(self._entries)
        self.published = 0

    def publish(self, count: int) -> None:
        self.published = min(self.published + count, self.total)
        shown = self._entries[self.total - self.published :]
        new = self._path.with_suffix(".new")
        new.write_text(self._head + "".join(shown) + self._tail, encoding="utf-8")
        new.replace(self._path)  # in one step: nobody ever reads half a feed

    def shown(self) -> io.BytesIO:
        return io.BytesIO(self._path.read_bytes())


# -- what one sees ----------------------------------------------------------------------------------------------------


class Screen:
    """Prints lines with the time since the start, cut to the width of the terminal."""

    def __init__(self) -> None:
        self.began = time.time()
        self._width = max(60, min(100, shutil.get_terminal_size((80, 24)).columns))
        dull = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._coloured = not dull
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # titles may hold what an old terminal cannot show

    def paint(self, text: str, colour: str) -> str:
        return f"\033[{COLOURS[colour]}m{text}\033[0m" if self._coloured and colour in COLOURS else text

    def log(self, who: str, text: str) -> None:
        room = self._width - 17
        text = text if len(text) <= room else text[: room - 1] + "…"
        print(f"{time.time() - self.began:5.1f}  {self.paint(f'{who:<8}', who)}  {text}", flush=True)

    def verdict(self, good: bool, what: str) -> bool:
        mark = "ok" if good else "WRONG"
        print(f"{self.paint(f'{mark:<5}', mark)}  {what}")
        return good


# -- the workers ------------------------------------------------------------------------------------------------------


class Crew:
    """The worker processes, and one stream of what they say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.lines: queue.Queue[Line] = queue.Queue()

    def start(self, worker: str) -> None:
        command = [sys.executable, str(HERE / "feed_checker.py"), "--worker", worker, "--feed", FEED]
        command += ["--out", "report.db", "--every", "0.3", "--work", str(WORK_S), "--ttl", str(TTL_S)]
        # Should the demo itself be killed with -9, the workers end by themselves.
        command += ["--seconds", str(2 * GIVE_UP_S)]
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C in the terminal reaches the demo alone, which ends them all
        )
        self.processes[f"worker {worker}"] = process
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for text in output:
                worker, token, event, detail = text.rstrip("\n").split("\t")
                self.lines.put(Line(worker, int(token.removeprefix("token ")), event, detail))

    def signal(self, worker: str, number: signal.Signals) -> None:
        self.processes[worker].send_signal(number)

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        ends = time.monotonic() + 3
        for process in self.processes.values():
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# -- the story --------------------------------------------------------------------------------------------------------


class Demo:
    def __init__(self, folder: Path, shipped: Path) -> None:
        self.screen = Screen()
        self.feed = Feed(shipped, folder / FEED)
        self.crew = Crew(folder)
        self.report = folder / "report.db"
        self.client = dibs.connect()
        self.interrupted = 0
        self.reported = 0
        self.next_publish = 0.0
        self.gives_up_at = time.monotonic() + GIVE_UP_S
        self.killed = self.frozen = Line("nobody", 0, "", "")
        self.killed_at = 0.0
        self.refused: list[int] = []

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """A signal's handler: it only takes a note, so that nothing is ever left half done."""
        self.interrupted = number

    def play(self) -> None:
        for number in range(1, WORKERS + 1):
            self.crew.start(str(number))
        log = self.screen.log

        self.go_on(KILL_AFTER_S)
        self.killed = self.catch()
        self.crew.signal(self.killed.worker, signal.SIGKILL)
        self.killed_at = time.time()
        log("demo", f"KILL -9 {self.killed.worker} in the middle of its work")
        self.wait_for("holds", after=self.killed.token)
        log("demo", f"taken over {time.time() - self.killed_at:.1f} s after the kill (the ttl is {TTL_S:g} s)")

        self.go_on(FREEZE_AFTER_S)
        self.frozen = self.catch()
        log("demo", f"FREEZE {self.frozen.worker} in the middle of its work")
        self.wait_for("holds", after=self.frozen.token)
        self.crew.signal(self.frozen.worker, signal.SIGCONT)
        log("demo", f"WAKE {self.frozen.worker}, which goes on as if nothing had happened")
        self.wait_for("refused", token=self.frozen.token)

        for _ in self.lines():
            if self.feed.published == self.feed.total and self.reported >= self.feed.total:
                break
        self.go_on(0.5)  # time enough to report something twice

    def lines(self, seconds: float = GIVE_UP_S) -> Iterator[Line]:
        """Let the show go on, and hand out what the workers say as it is printed."""
        ends = min(time.monotonic() + seconds, self.gives_up_at)
        while time.monotonic() < ends:
            if self.interrupted:
                raise Interrupted
            if all(process.poll() is not None for process in self.crew.processes.values()):
                raise GaveUp("all workers have ended")
            if time.monotonic() >= self.next_publish and self.feed.published < self.feed.total:
                self.publish()
            try:
                line = self.crew.lines.get(timeout=0.05)
            except queue.Empty:
                continue
            self.reported += line.event == "reported"
            if line.event == "refused":
                self.refused.append(line.token)
            if line.event == "reported":
                self.screen.log(line.worker, f"  reported: {line.detail}")
            elif line.event == "holds":
                self.screen.log(line.worker, f"holds {line.detail}, token {line.token}")
            elif line.event != "works on":
                self.screen.log(line.worker, f"{line.event}: {line.detail}")
            yield line
        if time.monotonic() >= self.gives_up_at:
            raise GaveUp(f"after {GIVE_UP_S:g} s")

    def publish(self) -> None:
        before = self.feed.published
        self.feed.publish(PUBLISH_STEP if before else PUBLISH_FIRST)
        self.next_publish = time.monotonic() + PUBLISH_EVERY_S
        self.screen.log("feed", f"{self.feed.published - before} new entries, {self.feed.published} in all")

    def go_on(self, seconds: float) -> None:
        for _ in self.lines(seconds):
            pass

    def wait_for(self, event: str, *, token: int | None = None, after: int = 0) -> None:
        for line in self.lines():
            if line.event == event and line.token > after and (token is None or line.token == token):
                return

    def catch(self) -> Line:
        """Stop a worker in the middle of its turn. The store of the locks itself says that it holds the lock."""
        begun = 0
        for line in self.lines():
            if line.event == "reported":
                begun = line.token
            elif line.event == "works on" and line.token == begun:  # its second or third entry
                self.crew.signal(line.worker, signal.SIGSTOP)
                held = self.client.holder(LOCK)
                if held is not None and held.fencing_token == line.token:
                    self.screen.log(line.worker, f"  works on: {line.detail}")
                    self.screen.log("store", f"token {held.fencing_token} is held by {held.holder}")
                    return line
                self.crew.signal(line.worker, signal.SIGCONT)  # too late, it had just let go: the next one, then
        raise GaveUp("no worker could be caught at work")

    # -- the judgement ----------------------------------------------------------------------------------------------

    def judge(self) -> bool:
        """Compare the feed with the report, and look at the order of the turns; print both; say whether all is well."""
        with closing(sqlite3.connect(self.report)) as db:
            turns = [Turn(*row) for row in db.execute(TURNS)]
            reported = Counter(entry for (entry,) in db.execute("SELECT entry FROM reported"))
            (last_write_of_frozen,) = db.execute(
                "SELECT max(at) FROM reported WHERE token = ?", (self.frozen.token,)
            ).fetchone()
        published = Counter(
            entry.get("id") or entry.get("link") for entry in feedparser.parse(self.feed.shown()).entries
        )
        self.show(turns)

        tokens = [turn.token for turn in turns]
        rising = len(tokens) > 1 and all(one < other for one, other in pairwise(tokens))
        twice = sum(count - 1 for count in reported.values())
        missed = len(published - reported)
        complete = len(published) == self.feed.total == len(reported) and not twice and not missed
        takeover_s = self.began_after(turns, self.killed) - self.killed_at if self.killed.token else float("inf")
        in_time = 0 <= takeover_s <= TAKEOVER_MAX_S
        # The lock alone must do for everybody else: a second refusal would mean that two had been let in at once.
        fenced = self.refused == [self.frozen.token] and last_write_of_frozen < self.began_after(turns, self.frozen)

        verdict = self.screen.verdict
        return all(
            [
                verdict(rising, f"tokens rise strictly: {'yes' if rising else 'no'}"),
                verdict(
                    complete,
                    f"entries published {self.feed.total}, reported {reported.total()}, twice {twice}, missed {missed}",
                ),
                verdict(in_time, f"take-over after the kill: {takeover_s:.1f} s (ttl {TTL_S:g} s)"),
                verdict(fenced, f"late write refused by its fencing token: {'yes' if fenced else 'no'}"),
            ]
        )

    @staticmethod
    def began_after(turns: list[Turn], line: Line) -> float:
        """When the next turn after that of ``line`` began."""
        return next((turn.began for turn in turns if turn.token > line.token), float("inf"))

    def show(self, turns: list[Turn]) -> None:
        """Who held the lock when, as the resource has written it down."""
        fate = {self.killed.token: "killed with -9", self.frozen.token: "frozen, then refused"}
        print("\nWho held the lock, and when (seconds since the start):\n")
        print(f"{'token':>7}  {'holder':<8}  {'from':>6}  {'until':>6}  {'reported':>8}")
        quiet = 0
        for turn in turns:
            if not turn.reported and turn.token not in fate:
                quiet += 1
                continue
            ended = turn.ended or (self.killed_at if turn.token == self.killed.token else None)
            until = f"{ended - self.screen.began:6.2f}" if ended else f"{'–':>6}"
            who = self.screen.paint(f"worker {turn.worker}", f"worker {turn.worker}")
            row = f"{turn.token:>7}  {who}  {turn.began - self.screen.began:6.2f}  {until}  {turn.reported:>8}"
            print(f"{row}  {fate.get(turn.token, '')}".rstrip())
        print(f"\n{quiet} more turns, in which there was nothing new, are left out.\n")

    def end(self) -> None:
        self.crew.end()
        self.client.close()


def run(folder: Path, shipped: Path) -> int:
    demo = Demo(folder, shipped)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, demo.interrupt)
    print(f"{WORKERS} processes run examples/feed_checker.py and share one growing feed,")
    print(f"{shipped.name}. One is killed with -9, one is frozen: while they hold the lock.\n")
    print(f"lock   {LOCK}, ttl {TTL_S:g} s")
    print(f"store  {os.environ['DIBS_URL']}")
    print("       (a temporary file: your own dibs data is not touched)\n")
    try:
        demo.play()
    except Interrupted:
        print("\ninterrupted: the workers are being ended")
        return 128 + demo.interrupted
    except GaveUp as reason:
        print(f"\ngave up: {reason}")
    finally:
        demo.end()
    return 0 if demo.judge() else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Four feed checkers, one lock, one kill -9, one late writer.")
    parser.add_argument(
        "--feed", type=Path, default=HERE / "feeds" / "harbour.rss.xml", help="another RSS or Atom file"
    )
    shipped = parser.parse_args().feed
    if not shipped.is_file():
        parser.error(f"there is no file {shipped}")
    with tempfile.TemporaryDirectory(prefix="dibs-demo-") as name:
        # What dibs.connect() without arguments reads, here and in the workers.
        os.environ["DIBS_URL"] = f"sqlite:///{quote(name)}/locks.db"
        try:
            return run(Path(name), shipped)
        except BrokenPipeError:  # whoever read the output has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


if __name__ == "__main__":
    sys.exit(main())
