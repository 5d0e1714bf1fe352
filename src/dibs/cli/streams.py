"""The standard streams of this process, whatever it was started with: closed, full, read by nobody, in any encoding.

An answer that could not be written is not an answer, so no command exits 0 then. What stands in an answer was chosen by
others, and moves no cursor.
"""

from __future__ import annotations

import os
import sys

from dibs._typing import TYPE_CHECKING
from dibs.names import plain as plain  # noqa: PLC0414 - so mypy knows that others have it from here

if TYPE_CHECKING:
    from typing import TextIO


def prepare() -> None:
    """Before any other file is opened: let none of ours get a number that others take for stdin, stdout or stderr.

    What was closed stays so for a command that is run, and cannot be read or written by dibs either.
    """
    for fd, wrong_way in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, wrong_way)
    if sys.stdout is None:  # print() would take that for success
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process runs
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # it is what Python made of the file, and nobody's StringIO
        reconfigure(errors="backslashreplace")


def flush(stream: TextIO | None) -> OSError | None:
    """Write what is left to be written; what was in the way of it."""
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        drop(stream)
        return error
    return None


def drop(stream: TextIO) -> None:
    """Let what could not be written go nowhere: the interpreter would try again at its end, and make that code 120."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)
    except OSError:  # it is no file, but what somebody who calls main() has put there
        pass


def can_be_drawn_on(stream: TextIO | None) -> bool:
    """Whether it is a terminal that does what escape sequences say, which those of some editors do not."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def columns_of(text: str) -> int:
    """How many columns of a terminal it takes: wide characters take two, and marks on the letter before them none."""
    if text.isascii():
        return len(text)
    from unicodedata import category, east_asian_width

    return sum(0 if category(c) in ("Mn", "Me") else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, columns: int) -> str:
    """As much of it as so many columns take."""
    if text.isascii():
        return text[:columns]
    taken = 0
    for end, char in enumerate(text):
        taken += columns_of(char)
        if taken > columns:
            return text[:end]
    return text
