"""Two examples: a pool of workers on auditable events, and scripts that select overlapping rows."""

from __future__ import annotations

import contextlib
import runpy
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
# Nearly always in the middle of writing.
WRITER = """
import sqlite3, sys, time
product = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
product.execute("CREATE TABLE written (number INTEGER)")
print("writes", flush=True)
while True:
    product.execute("BEGIN IMMEDIATE")
    time.sleep(0.2)
    product.execute("COMMIT")
    time.sleep(0.05)
"""


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


def test_no_worker_is_frozen_while_it_writes(tmp_path: Path) -> None:
    """A worker that is stopped in the middle of a transaction would keep all others out of the file."""
    freeze = runpy.run_path(str(EXAMPLES / "audit_events" / "run.py"))["freeze"]
    database = tmp_path / "product.db"
    worker = subprocess.Popen([sys.executable, "-c", WRITER, str(database)], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "writes\n"
        for _ in range(5):
            freeze(worker, database)
            with contextlib.closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
            worker.send_signal(signal.SIGCONT)
    finally:
        worker.kill()
        worker.communicate()


def test_overlapping_scripts() -> None:
    """No row is worked twice, on SQLite and on memcached, and a server that is down is told."""
    said = run("overlapping_scripts/run.py", "--rows", "20000", "--limit", "500")
    assert said.count(" 0 of them worked twice") == 2
    assert "nothing was claimed, so nothing is worked" in said
