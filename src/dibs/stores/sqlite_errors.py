"""SQLite's errors as dibs's own, told apart by their codes."""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.store import StoreBusy

if TYPE_CHECKING:
    import sqlite3

# sqlite3 tells its error codes since Python 3.11; before, these exact texts of SQLite's own table stand for them.
_CODES_BY_TEXT = {
    "database is locked": 5,
    "database table is locked": 6,
    "attempt to write a readonly database": 8,
    "disk I/O error": 10,
    "database disk image is malformed": 11,
    "database or disk is full": 13,
    "unable to open database file": 14,
    "file is not a database": 26,
}
_MISTAKE, _BUSY, _LOCKED, _PERM, _READONLY, _CORRUPT, _CANTOPEN, _AUTH, _NOTADB = 1, 5, 6, 3, 8, 11, 14, 23, 26
# SQLite has one code for every mistake in a statement; what is missing, its text tells alone.
_MISSING = ("no such table", "no such column", "no such index")


def primary_code(error: Exception) -> int:
    """SQLite's code, without what it adds to it; 1 for a mistake in the statement."""
    code = getattr(error, "sqlite_errorcode", None)
    return (_CODES_BY_TEXT.get(str(error), 1) if code is None else int(code)) & 0xFF


def is_missing(error: sqlite3.Error) -> bool:
    """Whether a table, column or index was not there."""
    return primary_code(error) == _MISTAKE and str(error).startswith(_MISSING)


def _can_open() -> bool:
    """Whether this process may have another file descriptor."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def translated(error: sqlite3.Error, path: str) -> StoreBusy | SetupRequired | StoreUnavailable:
    """The error dibs raises for one of SQLite's about the file at ``path``."""
    primary = primary_code(error)
    if primary in (_BUSY, _LOCKED):
        return StoreBusy(str(error))
    text = f"SQLite file {path!r}: {error}"
    if primary == _CANTOPEN and not _can_open():
        return StoreUnavailable(f"{text}: this process has too many open files", maybe_applied=False)
    if primary == _CANTOPEN and os.path.isdir(path):
        return SetupRequired(f"{text}: it is a folder. Name a file in it")
    if primary in (_PERM, _READONLY, _AUTH, _CANTOPEN):
        return SetupRequired(f"{text}. This user must be able to write the file and its folder")
    if primary in (_CORRUPT, _NOTADB):
        return SetupRequired(f"{text}. Name another file, or restore this one")
    if is_missing(error):
        again = "setup --history 100" if str(error).endswith("_history") else "setup"
        return SetupRequired(f"{text}. `dibs {again}` makes it again")
    return StoreUnavailable(text, maybe_applied=False)
