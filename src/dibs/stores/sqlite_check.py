"""What an SQLite file leaves of dibs's promises."""

from __future__ import annotations

import os
import sqlite3
import stat

from dibs._typing import TYPE_CHECKING
from dibs.errors import StoreUnavailable
from dibs.store import Finding
from dibs.stores.sqlite_file import file_system

if TYPE_CHECKING:
    from dibs.clock import Deadline
    from dibs.stores.sqlite_file import SQLiteFile


def findings(file: SQLiteFile, deadline: Deadline) -> list[Finding]:
    """What ``dibs doctor`` says."""
    db = file.open(deadline)
    try:
        mode = db.execute("PRAGMA journal_mode").fetchone()[0]
        mode_bits = stat.S_IMODE(os.stat(file.path).st_mode)
    except sqlite3.Error as error:
        raise file.translated(error) from error
    except OSError as error:
        raise StoreUnavailable(f"SQLite file {file.path!r}: {error.strerror}", maybe_applied=False) from error
    found = [
        Finding("reachable", True, f"{file.path} (SQLite {sqlite3.sqlite_version})"),
        Finding("survives a crash of any process", mode == "wal", f"journal_mode={mode}"),
        Finding("tokens rise across power cuts", True, f"boot {file.boot} of this file, floor {file.floor}"),
        Finding("one machine only", True, f"the file lies on {file_system(file.path) or 'a local file system'}"),
    ]
    if file.private:
        found.append(Finding("private to this user", not mode_bits & 0o077, f"file mode {mode_bits:04o}"))
    return found
