"""Tests that failed for a reason that is not theirs: they are run again, and that is told.

There are two such reasons: the machine was kept from running (`standstill`), and a server of the tests ended by itself,
as a database with a mistake of its own does. Without one, a test that fails is a failure. With one it is run again, up
to ``AGAIN`` times, and the summary names it, the reason, and what had failed. Chaos (also of queues)
and simulation are never run again: nothing that happens to a machine may make those fail.
"""

from __future__ import annotations

import time

import pytest
from _pytest.runner import runtestprotocol

from tests.servers.server import ended_by_themselves
from tests.standstill import Moment, kept_from_running, moment

AGAIN = 2
NEVER = ("test_chaos", "test_queue_chaos", "test_simulation")
_KEY = "run again"
_told: list[tuple[str, str]] = []


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test, and again what failed for a reason that is not its own."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    earlier = []
    start = time.monotonic()
    for attempt in range(AGAIN + 1):
        began = moment()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = [report for report in reports if report.failed]
        # What has run into pytest-timeout's limit would run without one.
        over = time.monotonic() - start >= float(item.config.getini("timeout") or "inf")
        if not failed or attempt == AGAIN or over or item.path.stem in NEVER:
            break
        reason = _reason(began)
        if not reason:
            break
        earlier.append(f"{reason}; {failed[0].longreprtext.strip().splitlines()[-1]}")
    for report in reports:
        if earlier and report.when == "call":
            report.user_properties.append((_KEY, "\n".join(earlier)))
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reason(since: Moment) -> str:
    """Why what failed need not be the test's fault; empty when it is."""
    return "; ".join(reason for reason in (kept_from_running(since), *ended_by_themselves(since.at)) if reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _told.extend((report.nodeid, str(why)) for key, why in report.user_properties if key == _KEY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _told:
        terminalreporter.section("run again, as what had failed was not theirs")
        for nodeid, why in _told:
            terminalreporter.write_line(f"{nodeid}: {why}")
