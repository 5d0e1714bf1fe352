"""What is printed and written of the races: the machine, the versions, the table, and the same as JSON."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Race, Target, Unit, p99, spread

PACKAGES = (
    "asyncmy",
    "asyncpg",
    "chancy",
    "diskcache",
    "etcd-sdk-python",
    "etcd3gw",
    "fasteners",
    "filelock",
    "huey",
    "kazoo",
    "litequeue",
    "mysqlclient",
    "pals",
    "pgqueuer",
    "pika",
    "portalocker",
    "pottery",
    "procrastinate",
    "psycopg",
    "pylibmc",
    "pymemcache",
    "psycopg-binary",
    "psycopg-pool",
    "PyMySQL",
    "python-redis-lock",
    "redis",
    "sherlock",
    "SQLAlchemy",
    "tooz",
)
SYNCS = 50
# What a page has its figures between.
PAGE_BEGIN = "<!-- figures: begin -->"
PAGE_END = "<!-- figures: end -->"


def machine(folder: Path) -> dict[str, str]:
    """What the figures depend on; ``folder`` is on the disk that the databases use."""
    facts = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "dibs": f"{_version('dibs')}, {_commit()}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "SQLite": sqlite3.sqlite_version,
        "processor": f"{os.cpu_count()} × {_processor()}",
        "system": f"{platform.system()} {platform.release()}",
        "load": f"{os.getloadavg()[0]:.2f} before the start (on an idle machine near 0)",
        "disk": f"{_file_system(folder)}; 8 KiB appended and made durable in {_sync_ms(folder):.2f} ms (median)",
    }
    facts["packages"] = ", ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        check=False,
        capture_output=True,
        text=True,
    )
    return f"commit {described.stdout.strip()}" if described.returncode == 0 else "no commit known"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _file_system(folder: Path) -> str:
    shown = subprocess.run(["df", "--output=fstype", str(folder)], check=False, capture_output=True, text=True)
    return shown.stdout.split()[-1] if shown.returncode == 0 else "unknown file system"


def _sync_ms(folder: Path) -> float:
    """What this disk takes for the least a durable commit needs."""
    took = []
    with open(folder / "sync", "wb", buffering=0) as file:
        for _ in range(SYNCS):
            file.write(bytes(8192))
            before = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - before) * 1000)
    return median(took)


def table(races: list[Race]) -> str:
    """The races as text: a line for dibs and a line for each it is compared with."""
    from tabulate import tabulate

    lines: list[list[str]] = []
    for race in races:
        for who, samples in race.samples.items():
            first = not lines or who == next(iter(race.samples))
            target = next((target for target in race.targets if target.peer == (None if first else who)), None)
            high = p99(samples)
            lines.append(
                [
                    race.work if first else "",
                    race.case if first else "",
                    who,
                    f"{_number(median(samples))} {race.unit.text}",
                    " – ".join(_number(value) for value in spread(samples)),
                    "" if high is None or race.unit.more_is_better else _number(high),
                    "" if first else f"{race.ratio(who):.2f} ×",
                    "" if target is None else _bound(target, race.unit),
                    "" if target is None else ("met" if race.met(target) else "NOT MET"),
                ]
            )
    head = ["work", "case", "who", "median", "middle half", "p99", "dibs is", "target", ""]
    right = ("left", "left", "left", "right", "right", "right", "right", "left", "left")
    return tabulate(lines, head, tablefmt="github", disable_numparse=True, colalign=right)


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bound(target: Target, unit: Unit) -> str:
    sign = "≥" if unit.more_is_better else "≤"
    return f"{sign} {target.bound:g} {unit.text if target.peer is None else '×'}"


def as_json(
    facts: dict[str, str], arguments: dict[str, Any], races: list[Race], failed: dict[str, str]
) -> dict[str, Any]:
    """Everything that was seen, each sample included."""
    return {
        "machine": facts,
        "arguments": arguments,
        "failed": failed,
        "races": [
            {
                "work": race.work,
                "case": race.case,
                "unit": race.unit.text,
                "contestants": [
                    {
                        "who": who,
                        "median": median(samples),
                        "quartiles": spread(samples),
                        "p99": p99(samples),
                        "dibs_is": race.ratio(who),
                        "samples": samples,
                    }
                    for who, samples in race.samples.items()
                ],
                "targets": [
                    {
                        "bound": target.bound,
                        "at": "least" if race.unit.more_is_better else "most",
                        "peer": target.peer,
                        "reached": race.reached(target),
                        "met": race.met(target),
                    }
                    for target in race.targets
                ],
            }
            for race in races
        ],
    }


def print_facts(facts: dict[str, str]) -> None:
    print(_facts(facts))
    sys.stdout.flush()


def _facts(facts: dict[str, str]) -> str:
    width = max(map(len, facts))
    return "\n".join(f"{key:{width}}  {value}" for key, value in facts.items())


def has_marks(page: Path) -> bool:
    """Whether there is a page with a place for the figures."""
    return page.is_file() and PAGE_END in page.read_text("utf-8").partition(PAGE_BEGIN)[2]


def write_page(page: Path, facts: dict[str, str], races: list[Race]) -> None:
    """Put the facts and the table into a page, in place of those between its marks."""
    before, _, rest = page.read_text("utf-8").partition(PAGE_BEGIN)
    after = rest.partition(PAGE_END)[2]
    shown = f"\n```text\n{_facts(facts)}\n```\n\n{table(races)}\n\n"
    page.write_text(before + PAGE_BEGIN + "\n" + shown + PAGE_END + after, "utf-8")
