"""Notices when the host of a virtual machine keeps it from running.

It can do so for seconds, or for half of all the time. No lease of a second outlasts the one, nor do eight tests at once
keep their appointments in the other; a test that fails then says something about the machine, and nothing about dibs.
So a process on each processor does nothing but sleep, and writes down when it was kept from waking for ``STILL_S``; and
the kernel counts, as *steal*, the time in which a processor would have run and was not let.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

# Far more than processes wait for each other where tests keep both processors busy (0.13 s at most, with ten at once).
STILL_S = 0.5
# A share of the processors' time. A host that is not overbooked takes 0.00 to 0.02 of it.
STOLEN = 0.15
STAT = Path("/proc/stat")
_JOURNAL = "DIBS_TEST_STANDSTILLS"
# A watcher for each processor. It ends with the process that started it.
WATCH = """
import os, sys, time
journal, still, parent = sys.argv[1], float(sys.argv[2]), os.getppid()
processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
for processor in processors[1:]:
    if os.fork() == 0:
        break
else:
    processor = processors[0]
if processor is not None:
    os.sched_setaffinity(0, [processor])
first = os.getppid()
while os.getppid() == first:
    before = time.monotonic()
    time.sleep(0.05)
    after = time.monotonic()
    if after - before > still:
        with open(journal, "a") as file:
            file.write(f"{before} {after}\\n")
"""
_watchers: list[subprocess.Popen[bytes]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Begin to watch, where the workers are started from."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    handle, journal = tempfile.mkstemp(prefix="dibs-standstills-")
    os.close(handle)
    os.environ[_JOURNAL] = journal
    _watchers.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCH, journal, str(STILL_S)]))


def pytest_unconfigure() -> None:
    while _watchers:
        watcher = _watchers.pop()
        watcher.kill()
        watcher.wait()
        Path(os.environ.pop(_JOURNAL)).unlink(missing_ok=True)


class Moment(NamedTuple):
    """When it was, on the monotonic clock, and what the kernel had counted by then."""

    at: float
    stolen: int
    ticks: int


def moment(counted: str | None = None) -> Moment:
    """Now. Where nobody counts what is stolen, nothing is."""
    if counted is None:
        counted = STAT.read_text() if STAT.exists() else "cpu 0 0 0 0 0 0 0 0"
    # User and nice, system, idle, waiting for disks, two kinds of interrupts, stolen; guests are in user and nice.
    ticks = [int(number) for number in counted.split("\n", 1)[0].split()[1:9]]
    return Moment(time.monotonic(), ticks[7], sum(ticks))


def kept_from_running(since: Moment, now: Moment | None = None) -> str:
    """How the host kept the machine from running since then, if it did so to an extent that fails tests; or nothing."""
    now = now or moment()
    stolen = (now.stolen - since.stolen) / max(1, now.ticks - since.ticks)
    stood_s = _stood_still(since.at)
    if stood_s >= STILL_S:
        return f"the machine stood still for {stood_s:.1f} s"
    return f"the machine's host took {stolen:.0%} of its time" if stolen >= STOLEN else ""


def _stood_still(since: float) -> float:
    """For how long the machine stood still, at most, since then on the monotonic clock; in seconds."""
    journal = os.environ.get(_JOURNAL)
    if journal is None:
        return 0.0
    time.sleep(0.2)  # who was woken last has yet to write it down
    spans = [line.split() for line in Path(journal).read_text().splitlines()]
    return max((float(end) - max(float(begin), since) for begin, end in spans if float(end) > since), default=0.0)
