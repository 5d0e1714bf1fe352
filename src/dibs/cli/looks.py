"""How leases, pauses and times look on the command line: tables, sentences and JSON."""

from __future__ import annotations

import os
import sys

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli.streams import plain
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
# These columns stand to the right.
RIGHT = {
    "SLOT", "LEFT", "TOKEN", "WAITING", "FOR", "GRANTS/S",
    "ID", "READY", "LATER", "CLAIMED", "DEAD", "OLDEST", "PRIORITY", "TRIES", "CRASHES", "WORKERS", "NEEDED", "BUSY",
    "COUNT", "A SECOND", "MEDIAN MS", "P99 MS",
}  # fmt: skip


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns under their headers; numbers and times stand to the right."""
    from tabulate import tabulate

    aligned = ["right" if header in RIGHT else "left" for header in headers]
    cells = [list(headers), *([plain(str(cell)) for cell in row] for row in rows)]

    def shown() -> str:
        # A name is a name, also when it looks like a number. Headers that tabulate knows as such get two columns more.
        return tabulate(cells, tablefmt="plain", disable_numparse=True, colalign=aligned)

    text = shown()
    width = terminal_width()
    if width is None or headers[-1] != "INFO":
        return text
    room = max(width - text.partition("\n")[0].index("INFO"), INFO_MIN)
    for row in cells:
        if len(row[-1]) > room:
            row[-1] = f"{row[-1][: room - 1]}…"
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

    print(json.dumps(value, ensure_ascii=sys.stdout.encoding.lower() not in ("utf-8", "utf8")), flush=True)


def print_json(value: object) -> None:
    import json

    json.dump(value, sys.stdout, indent=2)
    print()
