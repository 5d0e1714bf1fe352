"""One file per name decides who holds it: the name's baton, passed on by ``rename``. Nothing here knows of dibs.

*The baton.* A name has a folder, and in it one file whose own name says everything that decides:
``baton.<token>.<granted>.<until>.<claim>``. Every change is one ``rename`` of the baton from exactly what was read to
what it shall be. The file server does renames one at a time, and a rename uses its source up: of all who read the same
state one succeeds, and the others find the file gone and look again. No two states of a name are ever called the same
(tokens rise; under one token the expiry rises until it is given up, once), so whoever slept through ten holders finds
its source gone as well. A lock file that is removed and made anew has no such rule: of two who both saw it expire, the
second removes the lock of the first.

*The link count.* There must be one baton a name, for ever. A founder makes a file of its own, ``new.<random>``, and
links it to the fixed name ``founded``, which succeeds once. The ``new`` file whose link count is 2 is the baton,
whether or not its founder got the reply, or lived to read it.

*Lost replies.* A rename that was done and is repeated by the NFS client finds its source gone. So the folder is looked
at, where only this request can have made a file of that name.

*Crashes.* Each single step leaves the folder valid. What lies about then belongs to somebody who lost or died, and
nothing can make it count any more; the next holder removes it.

*The clock* is the file server's alone: ``utime`` without a time lets the server put its own on a folder of ours, where
it is read. (A folder, since servers may let clients keep the times of files.)
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import NamedTuple

# A time stamp that a file system with coarse ones cannot keep, and how coarse they may be.
TRIAL_STAMP_NS = 1_000_000_000_123_456_789
COARSE_NS = 1_000_000
# How often something is tried again that others were quicker to change: each time one of them has got on.
TRIES = 100
FREE = "free"
# Behind the claim of a lease that cannot be renewed any more but keeps the name until it expires (broken, or min_hold).
KEPT = "-kept"


class OthersWereQuicker(OSError):
    """So often that the folder is more likely damaged."""


class Baton(NamedTuple):
    """What a baton's file name says. Times are nanoseconds of the server's clock."""

    token: int
    granted_ns: int
    until_ns: int
    claim: str

    def __str__(self) -> str:
        return f"baton.{self.token}.{self.granted_ns}.{self.until_ns}.{self.claim}"

    def in_force(self, now_ns: int) -> bool:
        return self.claim != FREE and now_ns < self.until_ns

    @property
    def details(self) -> str:
        """The file that says in words who the holder is. It is written before a baton says so, and by nobody else."""
        return f"claim.{self.token}.{self.claim.removesuffix(KEPT)}"


NO_BATON = Baton(0, 0, 0, FREE)


class Seen(NamedTuple):
    """A folder at one moment: its baton, which file that is ("" before there is one), and all that lay there."""

    baton: Baton
    file: str
    entries: list[str]


def look(folder: str) -> Seen:
    """The baton now. (An NFS client asks the server whenever a folder is opened.)"""
    for _ in range(TRIES):
        try:
            entries = os.listdir(folder)
        except FileNotFoundError:
            entries = []
        batons = [(baton, entry) for entry in entries if (baton := _parsed(folder, entry))]
        if len(batons) == 1:
            return Seen(*batons[0], entries)
        if "founded" not in entries:
            return Seen(NO_BATON, "", entries)
        # The baton was renamed while the folder was being read, and seen twice or not at all.
    raise OthersWereQuicker(f"there is no baton to be seen in {folder!r}")


def _parsed(folder: str, entry: str) -> Baton | None:
    """The baton that this file is, if it is one."""
    kind, *fields = entry.split(".")
    if kind == "baton":
        token, granted_ns, until_ns, claim = fields
        return Baton(int(token), int(granted_ns), int(until_ns), claim)
    if kind == "new":
        with suppress(FileNotFoundError):
            if os.stat(os.path.join(folder, entry)).st_nlink == 2:
                return NO_BATON
    return None


def found(folder: str, name: str) -> None:
    """Make the name's baton, unless somebody else does."""
    with suppress(FileExistsError):
        os.mkdir(folder)  # and not what it lies in: where that is gone, the share is not mounted
    with suppress(FileExistsError):
        os.symlink(name.encode(), os.path.join(folder, "called").encode())  # leads nowhere, and is made at once
    new = os.path.join(folder, f"new.{os.urandom(8).hex()}")
    write(new, "")
    # Refused when there is one: by another, who may have removed our file since, or by us, when this is the answer to a
    # repetition. So the answer is of no use, and the link count tells.
    with suppress(FileExistsError, FileNotFoundError):
        os.link(new, os.path.join(folder, "founded"))


def called(folder: str) -> str | None:
    """The name that a folder is for; None when its founder got no further."""
    try:
        return os.readlink(os.path.join(folder, "called").encode()).decode()
    except FileNotFoundError:
        return None


def swap(folder: str, file: str, after: Baton) -> bool:
    """Turn the baton that was seen into ``after``; False when it is not that any more."""
    try:
        os.rename(os.path.join(folder, file), os.path.join(folder, str(after)))
    except FileNotFoundError:
        return str(after) in os.listdir(folder)  # it was done, and this answers a repetition
    return True


def tidy(folder: str, before: Seen, after: Baton) -> None:
    """After a grant: remove what can never count any more, now that the baton it started from is used up."""
    for entry in before.entries:
        if entry.startswith("new.") or (token_of(entry) <= after.token and entry != after.details):
            remove(folder, entry)


def token_of(entry: str) -> float:
    """The token that a file of details is about; of any other file, one that never comes."""
    return int(entry.split(".")[1]) if entry.startswith("claim.") else float("inf")


class ServerClock:
    """The file server's time, by a folder of our own that the server stamps."""

    def __init__(self, clocks: str) -> None:
        self._folder = os.path.join(clocks, os.urandom(8).hex())
        with suppress(FileExistsError):  # nobody else makes it: this answers a repetition
            os.mkdir(self._folder)
        os.utime(self._folder, ns=(TRIAL_STAMP_NS, TRIAL_STAMP_NS))
        #: Whether the file system keeps time stamps that are fine enough to tell the time by.
        self.fine = abs(os.stat(self._folder).st_mtime_ns - TRIAL_STAMP_NS) <= COARSE_NS

    def now_ns(self) -> int:
        os.utime(self._folder)
        return os.stat(self._folder).st_mtime_ns

    def close(self) -> None:
        with suppress(OSError):
            os.rmdir(self._folder)


def has_links(folder: str) -> bool:
    """Whether hard links can be made there, and are counted."""
    one, two = (f"links.{os.urandom(8).hex()}" for _ in range(2))
    write(os.path.join(folder, one), "")
    with suppress(OSError):
        os.link(os.path.join(folder, one), os.path.join(folder, two))
    counted = os.stat(os.path.join(folder, one)).st_nlink == 2
    remove(folder, two)
    remove(folder, one)
    return counted


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:  # closing it sends it to the server
        file.write(text)


def replace(folder: str, entry: str, text: str) -> None:
    """Write a file that others may be reading."""
    draft = os.path.join(folder, f"new.{entry}")
    write(draft, text)
    os.replace(draft, os.path.join(folder, entry))


def read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def remove(folder: str, entry: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, entry))


def sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what some file systems say that have nothing to sync in a folder
            raise
    finally:
        os.close(fd)
