"""How leases, pauses and times look on the command line: tables, sentences and JSON."""

from __future__ import annotations

import os
import sys

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli.streams import columns_of, cut, plain
from dibs.names import lasting, people_call

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from dibs.client import Client
    from dibs.desk import LeaseRecord
    from dibs.pausing import Pause

# So many characters are shown of what somebody gave as info, however narrow the terminal is.
INFO_MIN = 12
# Indents of values in values take up the square of how deeply those are nested.
INDENTED_DEPTH_MAX = 100
NESTING = (dict, list, tuple)
# Of two planes for private use: the characters that stand for cells while a table is laid out, and what fills them up.
PRIVATE_USE = 0xF0000
PADDING = "\U00100000"
# These columns stand to the right.
RIGHT = {
    "SLOT", "LEFT", "TOKEN", "WAITING", "FOR", "GRANTS/S",
    "ID", "READY", "LATER", "CLAIMED", "DEAD", "OLDEST", "PRIORITY", "TRIES", "CRASHES", "WORKERS", "NEEDED", "BUSY",
    "COUNT", "A SECOND", "MEDIAN MS", "P99 MS",
}  # fmt: skip


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def prefix_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefix",
        metavar="PREFIX",
        nargs="?",
        default="",
        # As `dibs pause` and `dibs wait` want it, where it tells a prefix from a name.
        type=lambda text: text.removesuffix("*"),
        help="only names that start with this (with or without a * at its end)",
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns under their headers; numbers and times stand to the right."""
    from tabulate import tabulate

    aligned = ["right" if header in RIGHT else "left" for header in headers]
    cells = [list(headers), *([plain(str(cell)) for cell in row] for row in rows)]

    def shown() -> str:
        # tabulate counts characters, not columns. What differs in that is laid out as something as wide that it counts
        # right, and is put in its place afterwards. (No cell has a character of that plane: it would be escaped.)
        stand_ins: dict[str, str] = {}

        def laid_out(cell: str) -> str:
            width = columns_of(cell)
            if width == len(cell):
                return cell
            stand_in = chr(PRIVATE_USE + len(stand_ins)).ljust(max(width, 1), PADDING)
            stand_ins[stand_in[0]] = cell if width else f" {cell}"  # marks of no letter
            return stand_in

        rows = [[laid_out(cell) for cell in row] for row in cells]
        # A name is a name, also when it looks like a number. Headers that tabulate knows as such get two columns more.
        text = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=aligned)
        if not stand_ins:
            return text
        return "".join(stand_ins.get(char, char) for char in text if char != PADDING)

    text = shown()
    width = terminal_width()
    if width is None or headers[-1] != "INFO":
        return text
    room = max(width - text.partition("\n")[0].index("INFO"), INFO_MIN)
    for row in cells:
        if columns_of(row[-1]) > room:
            row[-1] = f"{cut(row[-1], room - 1)}…"
    return shown()


def terminal_width() -> int | None:
    """How many columns there are to be read in; None where stdout is no terminal, and a program may want it all."""
    if not sys.stdout.isatty():
        return None
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stdout.fileno()).columns) or None
    except (OSError, ValueError):
        return None


def lease_row(record: LeaseRecord) -> tuple[object, ...]:
    """Under NAME, SLOT, HOLDER, SINCE, LEFT, TOKEN, WAITING, INFO."""
    return (
        record.name,
        record.slot,
        people_call(record.holder),
        local(record.acquired_at),
        lasting(record.expires_in),
        record.fencing_token,
        record.waiting or "",
        "" if record.info is None else json_text(record.info),
    )


def local(moment: datetime) -> str:
    """A moment as the people of this machine tell it."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


def lease_json(record: LeaseRecord, pauses: Sequence[Pause] = ()) -> dict[str, Any]:
    return {
        "name": record.name,
        "slot": record.slot,
        "take": record.take,
        "holder": record.holder,
        "fencing_token": record.fencing_token,
        "acquired_at": record.acquired_at.isoformat(),
        "expires_at": record.expires_at.isoformat(),
        "expires_in": round(record.expires_in, 3),
        "waiting": record.waiting,
        "info": record.info,
        "paused": next((pause_json(pause) for pause in pauses if pause.covers(record.name)), None),
    }


def pause_json(pause: Pause) -> dict[str, Any]:
    return {
        "name": pause.name,
        "note": pause.note,
        "by": pause.by,
        "since": pause.since.isoformat(),
        "until": pause.until.isoformat(),
        "expires_in": round(pause.expires_in, 3),
    }


def pauses_of(client: Client) -> list[Pause]:
    """The pauses in force; none where there cannot be any."""
    return client.pauses() if client._desk.address.capabilities.pause else []


def pause_of(client: Client, names: Iterable[str]) -> str | None:
    """What to tell whoever was refused one of these names by an operator, and not because others have it."""
    pauses = pauses_of(client)
    return next((str(pause) for name in names for pause in pauses if pause.covers(name)), None)


def print_pauses(pauses: Sequence[Pause]) -> None:
    """Beneath a table, if there are any."""
    if pauses:
        print("", *(plain(str(pause)) for pause in pauses), sep="\n")


def json_text(value: object) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


def print_json_line(value: object) -> None:
    """A line of JSON, readable where the encoding of stdout has the letters for it."""
    import json

    text = json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() not in ("utf-8", "utf8"))
    if not text.isprintable():  # JSON may hold what does something to a terminal (C1, bidi), and has an escape for it
        text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
    print(text, flush=True)


def print_json(value: object) -> None:
    """Indented, for people; in one line where a payload is nested so deeply that there would be little but indents."""
    import json

    level: list[Any] = [value]
    for _ in range(INDENTED_DEPTH_MAX):
        outer = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, NESTING))
        level = [inner for each in outer for inner in each]
    print(json.dumps(value, indent=None if level else 2))
