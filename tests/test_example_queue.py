"""Two examples: a pool of workers on auditable events, and scripts that select overlapping rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    """What an example says, which must say that all is well."""
    done = subprocess.run(
        [sys.executable, *command], cwd=EXAMPLES, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("ok")
    return done.stdout


def test_audit_events() -> None:
    """Every event is audited once and in order, though a worker is killed and another frozen."""
    said = run("audit_events/run.py", "--events", "200")
    assert "200 of 200 events audited, 0 twice, 0 out of order" in said


def test_overlapping_scripts() -> None:
    """No row is worked twice, on SQLite and on memcached, and a server that is down is told."""
    said = run("overlapping_scripts/run.py", "--rows", "20000", "--limit", "500")
    assert said.count(" 0 of them worked twice") == 2
    assert "nothing was claimed, so nothing is worked" in said
