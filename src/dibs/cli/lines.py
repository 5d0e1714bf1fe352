"""Jobs from lines of standard input, as many as come, with a bar that shows how far it is on a long one."""

from __future__ import annotations

import json
import os
import sys

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli import INTERRUPTED, UNWRITABLE, USAGE, CommandError, exit_code
from dibs.cli.streams import can_be_drawn_on
from dibs.clock import boot_now
from dibs.errors import DibsError
from dibs.jobs import PAYLOAD_BYTES_MAX, PUT_MAX
from dibs.names import counted
from dibs.new_jobs import PUT_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dibs.queue import Queue

_READ_BYTES = 2**20
assert _READ_BYTES + PAYLOAD_BYTES_MAX < PUT_BYTES_MAX
# The bar appears after this long, and is drawn again so often.
BAR_AFTER_S = 1.0
BAR_EVERY_S = 0.2
BAR_COLUMNS = 30


def json_value(text: str | bytes) -> Any:
    """The value; ValueError or RecursionError for what is no JSON. (To Python, NaN and Infinity are.)"""
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"there is no {word} in JSON")


def lines_of(fd: int) -> Iterator[list[bytes]]:
    """The lines of a file, as many at a time as are there to be read: what comes slowly does not wait for more."""
    rest = b""
    while data := os.read(fd, _READ_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > PAYLOAD_BYTES_MAX:
            lines.append(rest)  # refused like any other that is too long
            rest = b""
        for start in range(0, len(lines), PUT_MAX):
            yield lines[start : start + PUT_MAX]
    if rest:
        yield [rest]


def put_lines(queue: Queue, parts: Iterator[list[bytes]], as_bytes: bool, options: dict[str, Any]) -> int:
    """Put a job for every line that is not empty; how many. Raises CommandError, and says how many lines were put."""
    bar = Bar(0)
    count = seen = 0
    try:
        for lines in parts:
            payloads, wrong = _payloads(lines, seen, as_bytes)
            if payloads:
                _put(queue, payloads, options, seen, len(lines))
            count += len(payloads)
            if wrong is not None:
                raise wrong
            seen += len(lines)
            bar.show(count, sum(map(len, lines)) + len(lines))
    except KeyboardInterrupt:
        bar.clear()
        raise CommandError(INTERRUPTED, f"interrupted; {_were_put(seen)}, and perhaps some after that") from None
    except OSError as error:
        raise CommandError(UNWRITABLE, f"cannot read the lines: {error.strerror}; {_were_put(seen)}") from None
    finally:
        bar.clear()
    return count


def _payloads(lines: list[bytes], seen: int, as_bytes: bool) -> tuple[list[Any], CommandError | None]:
    """What the lines carry, up to the first that is wrong."""
    payloads: list[Any] = []
    for number, line in enumerate(lines, seen + 1):
        try:
            if len(line) > PAYLOAD_BYTES_MAX:
                raise ValueError(f"longer than {PAYLOAD_BYTES_MAX:,} bytes")
            if line.strip():
                payloads.append(line if as_bytes else json_value(line))
        except (ValueError, RecursionError) as error:
            what = "cannot be put" if as_bytes or len(line) > PAYLOAD_BYTES_MAX else "is no JSON"
            return payloads, CommandError(USAGE, f"line {number:,} {what}: {error}; {_were_put(number - 1)}")
    return payloads, None


def _put(queue: Queue, payloads: list[Any], options: dict[str, Any], seen: int, lines: int) -> None:
    try:
        queue.put_many(payloads, **options)
    except DibsError as error:
        unsure = (
            f"; whether the next {counted(lines, 'line')} too is unknown"
            if getattr(error, "maybe_applied", False)
            else ""
        )
        message = f"{error}; {_were_put(seen)}{unsure}"
        raise CommandError(exit_code(error), message) from None


def _were_put(lines: int) -> str:
    """Up to which line; what stands behind it is to be put yet."""
    if not lines:
        return "no line was put"
    return "the first line was put" if lines == 1 else f"the first {lines:,} lines were put"


class Bar:
    """How far it is, on stderr when that is a terminal: in parts of a file, or as a count of what comes by a pipe."""

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        self._done = 0
        self._next_at = boot_now() + BAR_AFTER_S
        self._began_at = boot_now()
        self._shown = False
        self._wanted = can_be_drawn_on(sys.stderr)

    def show(self, count: int, more_bytes: int) -> None:
        """So many jobs were put, from so many more bytes."""
        self._done += more_bytes
        now = boot_now()
        if not self._wanted or now < self._next_at:
            return
        self._next_at = now + BAR_EVERY_S
        self._shown = True
        pace = f"{counted(count, 'job')}, {count / max(now - self._began_at, 0.001):,.0f} a second"
        if self._size:
            part = min(1.0, self._done / self._size)
            full = int(part * BAR_COLUMNS)
            pace = f"[{'#' * full}{' ' * (BAR_COLUMNS - full)}] {part:4.0%}  {pace}"
        sys.stderr.write(f"\r{pace}\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        """Leave no trace."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False
