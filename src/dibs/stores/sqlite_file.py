"""One connection to an SQLite file, which is opened anew whenever the file, or one beside it, has become another.

Whoever uses it holds ``in_use`` from before ``open`` until after the last use of what that brought.
"""

from __future__ import annotations

import os
import sqlite3
from errno import EDQUOT, EMFILE, ENFILE, ENOENT, ENOSPC

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.clock import RealClock, boot_id, boot_now
from dibs.errors import SetupRequired, StoreUnavailable, Unsupported
from dibs.store import StoreBusy
from dibs.stores import sqlite_inodes, sqlite_sql
from dibs.stores.sqlite_errors import is_missing, translated
from dibs.stores.sqlite_forks import FORKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.clock import Deadline

_T = TypeVar("_T")
# How long a fork waits for a request under way: they last well under a millisecond.
FORK_WAIT_S = 1.0
# How often a connection in use makes sure that the files at its path are still those it has open.
LOOK_AT_FILE_S = 0.05
# Pages in the log before SQLite writes them back to the file, with two syncs: 4 MiB of log.
CHECKPOINT_PAGES = 4096
SQLITE_MIN = (3, 35, 0)
# Other kinds of shared file systems exist; these are the ones whose locks are known not to hold between machines.
NETWORK_FILE_SYSTEMS = frozenset(
    (
        "nfs nfs4 cifs smb smb2 smb3 smbfs 9p afs ceph glusterfs lustre gfs2 ocfs2 beegfs fuse.sshfs fuse.glusterfs"
    ).split()
)


class SQLiteFile:
    def __init__(self, path: str, table: str, private: bool) -> None:
        self.path = path
        #: The option by which all tables are named.
        self.table = table
        #: Nobody but this user may read it.
        self.private = private
        #: Held during every use of the connection, so that a fork can wait for its end.
        self.in_use = RealClock.mutex()
        #: Of which boot of the machine times are, as rows number it.
        self.boot = 0
        #: Every token that is granted is greater.
        self.floor = 0
        #: The tables by what the statements call them, the statements, and what makes the tables.
        self.names = sqlite_sql.names(table)
        self.sql = sqlite_sql.statements(self.names)
        self.schema = sqlite_sql.SCHEMA.format(**self.names)
        self._meta_table = table + "_meta"
        self._db: sqlite3.Connection | None = None
        self._fork_waits = False
        #: What is at the path without links, and which files were there and beside it when it was opened.
        self._real = path
        self._files: sqlite_inodes.Files | None = None
        self._look_at = 0.0
        #: Whether this SQLite has the functions for JSON; None before somebody has looked.
        self.has_json: bool | None = None
        #: Commits of the connection wait for the disk.
        self._synced = False

    def open(self, deadline: Deadline | None = None, *, mend: bool = False) -> sqlite3.Connection:
        """The connection, opened anew when a file at the path is no longer the one that was opened.

        What a new file or a new boot needs waits for others until the deadline; without one, not at all. To ``mend``
        makes what is missing, and takes a file over that was another machine's.
        """
        db, now = self._db, boot_now()
        if db is not None:
            if now < self._look_at and not mend:
                return db
            if self._is_current() and not mend:
                self._look_at = now + LOOK_AT_FILE_S
                return db
            # Replaced or deleted under us: others already use what is at the path now. Leases of which nothing is there
            # are unknown, and so their renewals say Gone.
            self.close()
        if sqlite3.sqlite_version_info < SQLITE_MIN:
            raise Unsupported(f"dibs needs SQLite 3.35 or later; this Python has {sqlite3.sqlite_version}")
        self._make()
        FORKS.add(self)
        self._real = os.path.realpath(self.path)
        self._leave_what_is_gone()
        try:
            db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(db, deadline, mend)
            except BaseException:
                db.close()
                raise
        except sqlite3.Error as error:
            raise self.translated(error) from error
        self._files = sqlite_inodes.at(self.path, self._real)
        self._look_at = now + LOOK_AT_FILE_S
        self._synced = False
        self._db = db
        return db

    def _make(self) -> None:
        path = self.path
        if os.path.exists(path):
            return
        folder = os.path.dirname(path) or "."
        try:
            if self.private:
                os.makedirs(folder, mode=0o700, exist_ok=True)
            # SQLite gives its -wal and -shm files the mode of the database: 0600, since it says who works on what.
            sqlite_inodes.make(os.path.realpath(path))  # a link that leads nowhere yet may be there
        except OSError as error:
            text = f"cannot make the SQLite file {path!r}: {error.strerror}"
            if error.errno in (EMFILE, ENFILE, ENOSPC, EDQUOT):
                raise StoreUnavailable(text, maybe_applied=False) from error
            remedy = "Make its folder" if error.errno == ENOENT else "Make its folder writable"
            raise SetupRequired(
                f"{text}. {remedy}, or name another file in the URL (sqlite:////absolute/path.db) or in $DIBS_URL"
            ) from error

    def _leave_what_is_gone(self) -> None:
        """Close what else this process has open of files that are not there any more: a new connection would share it.

        SQLite has one view of the log for all connections of a process to a file.
        """
        for other in FORKS.others(self):
            if other._real == self._real and not other._is_current():
                if not other.in_use.acquire(blocking=False):
                    raise StoreBusy(f"SQLite file {self.path!r}: another connection of this process is to be closed")
                try:
                    other.close()
                finally:
                    other.in_use.release()
        if sqlite_inodes.still_uses_what_is_gone(self._real):
            raise StoreUnavailable(
                f"SQLite file {self.path!r}: its -wal or -shm was removed while this program has the file open on a "
                "connection of its own: close that, and see to it that nobody removes them",
                maybe_applied=False,
            )

    def _prepare(self, db: sqlite3.Connection, deadline: Deadline | None, mend: bool) -> None:
        kind = file_system(self.path)
        if kind in NETWORK_FILE_SYSTEMS:
            raise Unsupported(
                f"{self.path!r} lies on a network file system ({kind}), where SQLite's locks do not hold "
                "between machines; use a local file, or a database server for more than one machine"
            )
        this_boot = boot_id()
        if this_boot is None:
            raise Unsupported("this system tells no boot id, which SQLite leases need: use a database server")
        db.execute("PRAGMA synchronous=NORMAL")
        # The fsync of macOS leaves what was written in the drive's cache. Elsewhere these two do nothing.
        db.execute("PRAGMA fullfsync=ON")
        db.execute("PRAGMA checkpoint_fullfsync=ON")
        db.execute("PRAGMA busy_timeout=0")
        db.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        while mend or not self._is_set_up(db, this_boot):
            from dibs.stores import sqlite_boots

            try:
                sqlite_boots.begin(self, db, deadline, this_boot, moved_here=mend)
                break
            except sqlite3.OperationalError as error:
                if deadline is None or deadline.remaining() <= 0 or type(translated(error, self.path)) is not StoreBusy:
                    raise
        self.boot = self.meta(db, "boot")
        self.floor = self.meta(db, "token_floor")

    def _is_set_up(self, db: sqlite3.Connection, this_boot: str) -> bool:
        """Whether the tables are there, for this boot. (``VACUUM INTO`` leaves its copies in another mode.)"""
        return (
            self.has_table(db, self._meta_table)
            and self.meta(db, "boot_id") == this_boot
            and self.meta(db, "version") == str(sqlite_sql.VERSION)
            and db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        )

    def refuse_newer(self, db: sqlite3.Connection) -> None:
        """Raise TablesNewer, if a later dibs has changed the tables."""
        from dibs.stores.tables import refuse_newer

        if self.has_table(db, self._meta_table):
            refuse_newer(self.meta(db, "version"), sqlite_sql.VERSION)

    def has_table(self, db: sqlite3.Connection, name: str) -> bool:
        found = db.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone()
        return bool(found[0])

    def meta(self, db: sqlite3.Connection, key: str) -> Any:
        row = db.execute(self.sql["get_meta"], (key,)).fetchone()
        if key in ("boot", "token_floor"):
            return 0 if row is None else int(row[0])
        return None if row is None else row[0]

    def sync(self, db: sqlite3.Connection, synced: bool) -> None:
        """From now on commits wait for the disk, or do not."""
        if synced != self._synced:
            db.execute(f"PRAGMA synchronous={'FULL' if synced else 'NORMAL'}")
            self._synced = synced

    def transaction(
        self,
        db: sqlite3.Connection,
        run: Callable[[sqlite3.Connection], _T],
        *,
        begin: str = "BEGIN IMMEDIATE",
        synced: bool = False,
    ) -> _T:
        """Run it in a transaction, as a whole or not at all; ``synced``: the commit waits for the disk."""
        try:
            self.sync(db, synced)
            db.execute(begin)
            result = run(db)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            raise self.translated(error) from error
        except BaseException:  # interrupted: not half done, and not left open
            self.roll_back()
            raise
        return result

    def _is_current(self) -> bool:
        """Whether what was opened, if anything, is what is at the path and beside it."""
        if self._db is None:
            return True
        there = sqlite_inodes.at(self.path, self._real)
        return there is not None and there == self._files

    def roll_back(self) -> None:
        db = self._db
        if db is not None and db.in_transaction:
            try:
                db.execute("ROLLBACK")
            except sqlite3.Error:
                self.close()

    def translated(self, error: sqlite3.Error) -> Exception:
        """The error dibs raises for one of SQLite's. The transaction, if any, is over afterwards."""
        self.roll_back()
        meant = translated(error, self.path)
        if isinstance(meant, StoreUnavailable):
            self.close()
        elif is_missing(error) and self._db is not None:
            try:
                self.refuse_newer(self._db)
            except SetupRequired as newer:
                return newer
            except sqlite3.Error:
                pass
        return meant

    def close(self) -> None:
        current = self._is_current()
        db, self._db = self._db, None
        if db is not None:
            if not current:
                # The last connection writes its log back to the file when it is closed, unless it is interrupted. A
                # log that was removed must not be: others may have written to the file since.
                db.interrupt()
            db.close()

    def before_fork(self) -> None:
        """Finish what is under way and close (see dibs.stores.sqlite_forks)."""
        self._fork_waits = self.in_use.acquire(timeout=FORK_WAIT_S)
        if self._fork_waits:
            self.close()

    def after_fork(self) -> None:
        """In parent and child: go on, with a connection of each one's own."""
        if self._fork_waits:
            self.in_use.release()


def file_system(path: str) -> str | None:
    """The type of the file system the path lies on, where the kernel tells (Linux)."""
    real = os.path.realpath(path)
    best, kind = "", None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                point = before.split(" ")[4].replace("\\040", " ")
                if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
                    best, kind = point, after.split(" ", 1)[0]
    except (OSError, IndexError):
        return None
    return kind
