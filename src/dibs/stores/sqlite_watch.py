"""How waiters on SQLite learn that a name may be free: a counter is raised by every commit of another connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dibs.clock import boot_now
from dibs.store import LINE_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Collection

    from dibs.stores.sqlite_file import SQLiteFile


class SQLiteWatch:
    """Looks at the counter, and reads rows only when it moved."""

    interval_s: float | None = 0.001

    def __init__(self, file: SQLiteFile, address: str) -> None:
        self._file = file
        # Claim ids begin with the id of their client, which is the address of its waiters.
        self._mine = address + "-"
        with file.in_use:
            self._seen = self._version()

    def _version(self) -> int:
        return int(self._file.open().execute("PRAGMA data_version").fetchone()[0])

    def fileno(self) -> int | None:
        return None

    def changed(self, names: Collection[str]) -> Collection[str]:
        with self._file.in_use:
            return self._changed(names)

    def _changed(self, names: Collection[str]) -> Collection[str]:
        version = self._version()
        if version == self._seen:
            return ()
        self._seen = version
        file = self._file
        db, now = file.open(), boot_now()
        free: list[str] = []
        for name in names:
            values = {"name": name, "boot": file.boot, "now": now, "alive": now - LINE_GRACE_S}
            row = db.execute(file.sql["peek"], values).fetchone()
            if row is None or row[2]:  # no lock
                row = db.execute(file.sql["peek_pool"], values).fetchone()
            # Worth asking when nobody holds it and the first in line is one of ours (or the line is empty).
            if row is None or (row[0] and (row[1] is None or row[1].startswith(self._mine))):
                free.append(name)
        return free

    def close(self) -> None:
        with self._file.in_use:
            self._file.close()
