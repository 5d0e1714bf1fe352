"""The files of an SQLite database, made and told apart without being opened here.

SQLite's locks on a file belong to the process: they are gone as soon as it closes *any* descriptor of that file. Who
comes next then takes itself for the only user, and on leaving removes the two files beside it, -wal and -shm.
"""

from __future__ import annotations

import os
import stat
from errno import EINVAL, ENOSYS, ENOTSUP, EPERM

# Device and inode of the database, its -wal and its -shm.
Files = tuple[tuple[int, int], ...]
_FDS = "/proc/self/fd"


def make(path: str) -> None:
    """Make an empty file for this user alone, unless there is one."""
    try:
        try:
            os.mknod(path, 0o600 | stat.S_IFREG)
        except OSError as error:
            if error.errno not in (EPERM, EINVAL, ENOSYS, ENOTSUP):
                raise
            _make_elsewhere(path)  # macOS lets nobody but root do the other
    except FileExistsError:
        pass


def _make_elsewhere(path: str) -> None:
    """Make it under another name: what is at the path may be in use as soon as it is there."""
    made = f"{path}.{os.urandom(8).hex()}"
    os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        os.link(made, path)
    finally:
        os.unlink(made)


def at(path: str, real: str) -> Files | None:
    """Which files are there now; None where one is missing. ``real`` is the path without links, where SQLite's are."""
    try:
        there = (os.stat(path), os.stat(real + "-wal"), os.stat(real + "-shm"))
    except OSError:
        return None
    return tuple([(each.st_dev, each.st_ino) for each in there])


def still_uses_what_is_gone(real: str) -> bool:
    """Whether this process has the file open, and beside it one that was removed since (Linux tells).

    Not where it has open what was replaced by the file: what is gone is then that one's.
    """
    gone = {f"{real}{end} (deleted)" for end in ("-wal", "-shm")}
    try:
        fds = os.listdir(_FDS)
    except OSError:
        return False
    opened = set()
    for fd in fds:
        try:
            opened.add(os.readlink(f"{_FDS}/{fd}"))
        except OSError:  # closed since
            pass
    return real in opened and f"{real} (deleted)" not in opened and not gone.isdisjoint(opened)
