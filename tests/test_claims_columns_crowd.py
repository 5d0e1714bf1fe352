"""A crowd of processes on one table whose rows keep their claims: one is killed, one is stopped for longer than its
claims last; nobody works a row while another may, every row is worked once, and who comes late is refused."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.yard import Yard, until

ROWS = 90
WORKERS = 3
ROOT = Path(__file__).parent.parent


class Turn(NamedTuple):
    """A time in which a worker might work a row, by the clock that all processes of a machine share."""

    token: int
    begin: float
    end: float


class Crowd:
    """The workers, and what they have told."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.processes: list[subprocess.Popen[str]] = []
        self.lines: list[list[str]] = []
        self._readers: list[threading.Thread] = []

    def start(self, role: str) -> int:
        """Begin one; its number."""
        command = [sys.executable, "-m", "tests.crowd_worker", self.url, role]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines: list[str] = []

        def read() -> None:
            assert process.stdout is not None
            lines.extend(process.stdout)

        self.processes.append(process)
        self.lines.append(lines)
        self._readers.append(threading.Thread(target=read))
        self._readers[-1].start()
        return len(self.processes) - 1

    def go(self, number: int) -> None:
        stdin = self.processes[number].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    def is_ready(self, number: int) -> bool:
        assert self.processes[number].poll() is None, "it ended before it had begun"
        return bool(self.told(number, "ready"))

    def told(self, number: int, what: str) -> list[list[str]]:
        return [words for words in map(str.split, list(self.lines[number])) if words[0] == what]

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

    def turns(self) -> dict[str, list[Turn]]:
        """By row."""
        turns: dict[str, list[Turn]] = defaultdict(list)
        for number in range(len(self.processes)):
            ends = {(row, token): float(at) for _, row, token, at in self.told(number, "done")}
            for _, row, token, begin, end in self.told(number, "begun"):
                turns[row].append(Turn(int(token), float(begin), min(float(end), ends.get((row, token), 1e99))))
        return turns


@pytest.mark.parametrize("fixture", ["sqlite_url", "postgres_url", "mysql_url"])
def test_a_crowd_works_each_row_once(fixture: str, request: pytest.FixtureRequest) -> None:
    """With one of them killed and one stopped for too long, each row has one worker at a time, and one effect."""
    yard = Yard(request.getfixturevalue(fixture))
    yard.run("ALTER TABLE event ADD COLUMN worked INTEGER NOT NULL DEFAULT 0")
    yard.run(f"INSERT INTO event (id, kind, due) VALUES {','.join(f'({n}, 0, TRUE)' for n in range(21, ROWS + 1))}")
    crowd = Crowd(yard.plain)
    try:
        killed, stopped, *others = (crowd.start(role) for role in ("killed", "stopped", *["worker"] * WORKERS))
        until(lambda: all(crowd.is_ready(number) for number in (killed, stopped, *others)), 60)
        for number in (killed, stopped):
            crowd.go(number)
        until(lambda: crowd.processes[killed].poll() is not None, 60)
        until(lambda: state_of(crowd.processes[stopped]) == "T", 60)
        for number in others:
            crowd.go(number)
        _wait(crowd, others)
        assert yard.run("SELECT count(*) FROM event WHERE due") == [(0,)]  # also what those two had
        crowd.processes[stopped].send_signal(signal.SIGCONT)
        _wait(crowd, [stopped])
    finally:
        crowd.end()
    assert crowd.processes[killed].returncode == -signal.SIGKILL
    assert [crowd.processes[number].returncode for number in (stopped, *others)] == [0] * (WORKERS + 1)
    assert yard.run("SELECT worked, count(*) FROM event GROUP BY worked") == [(1, ROWS)]
    assert yard.run("SELECT count(*) FROM event WHERE dibs_claim IS NOT NULL") == [(0,)]
    assert [words[1] for words in crowd.told(stopped, "late")] == [crowd.told(stopped, "begun")[0][1]]
    assert not crowd.told(stopped, "done")
    turns = crowd.turns()
    assert len(turns) == ROWS
    for row, of_row in turns.items():
        of_row.sort()
        for before, after in itertools.pairwise(of_row):
            assert before.token < after.token, f"row {row}: {of_row}"
            assert before.end <= after.begin, f"row {row} had two workers at once: {of_row}"
    taken_over = [row for _, row, *_ in (*crowd.told(killed, "begun"), *crowd.told(stopped, "begun"))]
    assert all(len(turns[row]) >= 2 for row in taken_over)
    yard.close()


def _wait(crowd: Crowd, numbers: list[int]) -> None:
    """Until these have ended."""
    until(lambda: all(crowd.processes[number].poll() is not None for number in numbers), 60)


def state_of(process: subprocess.Popen[str]) -> str:
    """As the kernel tells it: T is stopped."""
    assert process.poll() is None, "it ended before it was stopped"
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
