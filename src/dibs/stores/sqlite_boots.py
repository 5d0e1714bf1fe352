"""What an SQLite file is told once in every boot of its machine: that a new one has begun, before anything is granted.

``dibs.stores.sqlite`` says what rests on it. The first boot that a file sees is the one in which its tables are made.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING
from dibs.clock import boot_now, wall_now
from dibs.errors import SetupRequired
from dibs.stores.sqlite_sql import VERSION, numbered

if TYPE_CHECKING:
    import sqlite3

    from dibs.clock import Deadline
    from dibs.stores.sqlite_file import SQLiteFile

# More than are granted of one name in a boot: what a power cut takes from the file lies below the new floor.
TOKENS_PER_BOOT = 2**40
PAGE_BYTES = 1024
# What SQLite can be told to wait at most.
WAIT_MAX_MS = 2**31 - 1
# Who waits to write down a new boot looks again after so long whether another has done so. (SQLite itself would try ten
# times a second to write; where many do, they are always faster.)
LOOK_AGAIN_S = 0.02


def begin(
    file: SQLiteFile, db: sqlite3.Connection, deadline: Deadline | None, this_boot: str, *, moved_here: bool
) -> None:
    """Make the tables that are missing, and write down durably that a new boot has begun, if one has.

    Raises SQLite's error where others are in the way for ``LOOK_AGAIN_S``.
    """

    def be_patient(most_s: float = LOOK_AGAIN_S) -> None:
        # The whole set-up needs other connections to be out of the way for moments only; SQLite waits for them here.
        wait_s = 0.0 if deadline is None else min(deadline.remaining(), most_s)
        db.execute(f"PRAGMA busy_timeout={int(min(wait_s * 1000, WAIT_MAX_MS))}")

    be_patient()
    # Every commit writes whole pages to the log: small ones, as a lease is small. (Only a new file takes the size.)
    db.execute(f"PRAGMA page_size={PAGE_BYTES}")
    mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
        raise SetupRequired(f"{file.path!r} cannot be put into WAL mode (it is in {mode} mode)")
    db.execute("PRAGMA synchronous=FULL")
    be_patient()
    db.execute("BEGIN IMMEDIATE")
    try:
        file.refuse_newer(db)
        missing = not all(file.has_table(db, file.table + end) for end in ("", "_pool"))
        for statement in file.schema.split(";\n"):
            if statement.strip():
                db.execute(statement)
        last_boot = file.meta(db, "boot_id")
        db.execute(file.sql["set_meta"], ("version", str(VERSION)))
        if last_boot != this_boot:
            here, there = _machine_id(), file.meta(db, "machine_id")
            if here and there and here != there and not moved_here:
                raise SetupRequired(
                    f"{file.path!r} was last used on another machine. Two machines cannot share an SQLite file: "
                    "use a database server for that. If the file has moved here for good, run `dibs setup` once"
                )
            if last_boot is None:
                # Of a file whose table with these is lost, go on with what the others tell: tokens must not repeat, and
                # processes at work, which know the old number of the boot, must not be of another opinion than ours.
                boot, highest = db.execute(file.sql["last_known"]).fetchone()
                floor = highest + TOKENS_PER_BOOT if highest else 0
            else:
                boot = file.meta(db, "boot") + 1
                floor = file.meta(db, "token_floor") + TOKENS_PER_BOOT
            for key, value in (
                ("boot_id", this_boot),
                ("machine_id", here),
                ("boot", str(boot)),
                ("token_floor", str(floor)),
            ):
                db.execute(file.sql["set_meta"], (key, value))
            db.execute(file.sql["clear_line"])
            db.execute(file.sql["carry_over"], numbered((boot, boot_now(), wall_now(), boot - 1)))
        if last_boot is not None and missing:
            # A table that was dropped took tokens with it.
            floor = file.meta(db, "token_floor") + TOKENS_PER_BOOT
            db.execute(file.sql["set_meta"], ("token_floor", str(floor)))
            db.execute(file.sql["lift_pools"], (floor,))
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    if last_boot is None:
        # A file that was just made must not vanish in a power cut and begin again with token 1.
        be_patient(WAIT_MAX_MS / 1000)
        db.execute("PRAGMA wal_checkpoint(FULL)")
        folder = os.open(os.path.dirname(os.path.abspath(file.path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("PRAGMA busy_timeout=0")


def _machine_id() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError):
            continue
    return ""
