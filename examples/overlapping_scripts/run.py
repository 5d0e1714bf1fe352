"""Three scripts on one table of a million rows, with claims in memcached and in a side table of SQLite.

At the end it looks whether any row was worked twice. Then the memcached server is stopped, and a script says so. Exits
with 1 if anything is wrong. Takes about half a minute; without a memcached and its driver on this machine, only SQLite
is tried.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = ("unpaid", "abroad", "large")


def make_table(path: Path, rows: int) -> None:
    """The shop's own table."""
    shop = sqlite3.connect(path)
    shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, paid INTEGER, country TEXT, amount INTEGER)")
    shop.executemany(
        "INSERT INTO orders VALUES (?, ?, ?, ?)",
        ((n, n % 7 == 0, ("AT", "DE", "CZ", "IT")[n % 4], n * 37 % 1000) for n in range(1, rows + 1)),
    )
    shop.commit()
    shop.close()


def script(name: str, *arguments: object) -> subprocess.Popen[str]:
    """One of the three."""
    command = [sys.executable, str(HERE / "script.py"), name, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def work(store: str, table: Path, results: Path, limit: int) -> bool:
    """Let all three work at the same time; whether none worked a row of another's."""
    notes = sqlite3.connect(results)
    notes.execute("PRAGMA journal_mode = WAL")
    notes.execute("PRAGMA synchronous = OFF")
    notes.execute("CREATE TABLE worked (id INTEGER NOT NULL, script TEXT NOT NULL)")  # a row worked twice stands twice
    notes.execute("CREATE INDEX by_id ON worked (id)")
    notes.commit()
    began = time.monotonic()
    running = [script(name, store, table, results, "--limit", limit) for name in SCRIPTS]
    for one in running:
        print("  " + one.communicate()[0].strip())
    rows, different = notes.execute("SELECT count(*), count(DISTINCT id) FROM worked").fetchone()
    notes.close()
    print(f"  {rows} rows in {time.monotonic() - began:.1f} s, {rows - different} of them worked twice")
    return rows == different > 0 and all(one.returncode == 0 for one in running)


def main(rows: int, limit: int) -> int:
    """Run it; 0 when all is as it should be."""
    with tempfile.TemporaryDirectory(prefix="overlapping-scripts-") as name:
        folder = Path(name)
        table = folder / "shop.db"
        make_table(table, rows)
        print(f"{rows:,} rows; three scripts, up to {limit:,} rows each")
        print("claims in a side table of SQLite:")
        fine = work(f"sqlite:///{folder}/claims.db", table, folder / "sqlite.db", limit)
        program = shutil.which("memcached")
        if program is None or find_spec("pymemcache") is None:
            missing = "memcached on this machine" if program is None else "pymemcache (pip install '.[memcached]')"
            print(f"no {missing}: the other half is left out")
            return 0 if fine else 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen([program, "-l", "127.0.0.1", "-p", str(port), "-m", "64", "-u", "nobody"])
        try:
            store = f"memcached://127.0.0.1:{port}"
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.02)
            print("claims in memcached:")
            fine = work(store, table, folder / "memcached.db", limit) and fine
        finally:
            server.terminate()
            server.wait()
        print("and with memcached stopped:")
        late = script("large", store, table, folder / "memcached.db")
        said = late.communicate()[0].strip()
        print("  " + said)
        fine = fine and late.returncode == 69 and "nothing was claimed" in said
        print("ok" if fine else "WRONG")
        return 0 if fine else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--limit", type=int, default=5_000, help="rows that each script works at most")
    given = parser.parse_args()
    sys.exit(main(given.rows, given.limit))
