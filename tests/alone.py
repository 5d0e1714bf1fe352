"""Tests that failed beside others: each has to pass three times by itself, or the run has failed.

`make test` runs more tests at once than there are processors, and most of them keep appointments in real time: a lease
of a second is renewed in time, a waiter is served before it gives up. A crowd can make one late. So, when everything
has run, what failed is run again with the machine to itself, ``ROUNDS`` times, and the summary shows what had failed
in the crowd, traceback and all. (CPython's own test runner calls that ``--rerun``.) A test that is wrong once more, or
more than ``MOST`` tests, or one that hung, or one that no lateness may make fail (``tests.again.NEVER``), fails the
run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import NEVER

ROUNDS = 3
MOST = 5
_failed: dict[str, float] = {}
_told: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what failed, and for how long it had run."""
    if report.failed:
        _failed[report.nodeid] = max(report.duration, _failed.get(report.nodeid, 0.0))


def may_pass_alone(config: pytest.Config) -> bool:
    """What failed did so beside others, and everything else has run."""
    limit_s = float(config.getini("timeout") or "inf")
    return (
        0 < len(_failed) <= MOST
        and not hasattr(config, "workerinput")
        and (config.getoption("numprocesses", None) or 0) > 1
        and not config.getoption("maxfail")
        and all(Path(test.partition("::")[0]).stem not in NEVER and took < limit_s for test, took in _failed.items())
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Run what failed by itself, if that can be the crowd's fault."""
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not may_pass_alone(session.config):
        return
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", *_failed]
    if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
        terminal.write_line(f"\nrunning by themselves, {ROUNDS} times, what failed beside others: {' '.join(_failed)}")
    for _ in range(ROUNDS):
        ran = subprocess.run(command, cwd=session.config.rootpath, capture_output=True, text=True, check=False)
        if ran.returncode:
            _told.append(f"A test that failed in the crowd has failed by itself, too:\n{ran.stdout}{ran.stderr}")
            return
    _told.extend(f"{test}: failed beside others (see above), and passed {ROUNDS} times by itself" for test in _failed)
    session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _told:
        terminalreporter.section("run by itself")
        for line in _told:
            terminalreporter.write_line(line)
