"""Tests that failed beside others: each has to pass three times by itself, or the run has failed.

`make test` runs more tests at once than there are processors, and most of them keep appointments in real time: a lease
of a second is renewed in time, a waiter is served before it gives up. A crowd can make one late. So, when everything
has run, what failed is run again with the machine to itself, ``ROUNDS`` times, and the summary shows what had failed
in the crowd, traceback and all. (CPython's own test runner calls that ``--rerun``.) A test that is wrong once more, or
more than ``MOST`` tests, or one that hung or took its process with it, or one that no lateness may make fail
(``tests.again.NEVER``), fails the run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import NEVER

ROUNDS = 3
MOST = 10
# What has run for this part of pytest-timeout's limit has hung (the limit counts what no phase of a test does).
HUNG_PART = 0.9
_took: dict[str, float] = {}
_failed: set[str] = set()
_told: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what failed, and for how long each has run."""
    crashed = report.when not in ("setup", "call", "teardown")  # the worker with it, as xdist tells
    _took[report.nodeid] = float("inf") if crashed else _took.get(report.nodeid, 0.0) + report.duration
    if report.failed:
        _failed.add(report.nodeid)


def may_pass_alone(config: pytest.Config) -> bool:
    """What failed did so beside others, and everything else has run."""
    hung_s = float(config.getini("timeout") or "inf") * HUNG_PART
    return (
        0 < len(_failed) <= MOST
        and not hasattr(config, "workerinput")
        and (config.getoption("numprocesses", None) or 0) > 1
        and not config.getoption("maxfail")
        and all(Path(test.partition("::")[0]).stem not in NEVER and _took[test] < hung_s for test in _failed)
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Run what failed by itself, if that can be the crowd's fault."""
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not may_pass_alone(session.config):
        return
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", *sorted(_failed)]
    if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
        terminal.write_line(
            f"\nrunning by themselves, {ROUNDS} times, what failed beside others: {' '.join(sorted(_failed))}"
        )
    for _ in range(ROUNDS):
        ran = subprocess.run(command, cwd=session.config.rootpath, capture_output=True, text=True, check=False)
        if ran.returncode:
            _told.append(f"A test that failed in the crowd has failed by itself, too:\n{ran.stdout}{ran.stderr}")
            return
    _told.extend(
        f"{test}: failed beside others (see above), and passed {ROUNDS} times by itself" for test in sorted(_failed)
    )
    session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _told:
        terminalreporter.section("run by itself")
        for line in _told:
            terminalreporter.write_line(line)
