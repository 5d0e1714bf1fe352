"""``dibs wait`` and ``dibs history``: when a name is free, and who had it before."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli import BUSY, CommandError, connect, duration, whole
from dibs.cli.looks import json_option, json_text, local, print_json, table
from dibs.names import check_name, lasting, people_call
from dibs.steps import run

if TYPE_CHECKING:
    import argparse

    from dibs.client import Client
    from dibs.desk import LeaseRecord
    from dibs.history import HistoryRecord

# `dibs wait` looks this often, at first and later.
LOOK_MIN_S = 0.1
LOOK_MAX_S = 1.0
LIMIT_DEFAULT = 20


def _wait_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Wait until nobody holds NAME (with a * at its end: any name that begins so), and take nothing. Somebody may hold it
again a moment later: to have it yourself, use `dibs run`; to keep it free, `dibs pause` it before. A name that is kept
(--min-hold, --once-per) counts as held."""
    parser.epilog = """\
examples:
  dibs wait nightly && shutdown now             when the job is over
  dibs wait nightly --timeout 10m               ten minutes at most; then exit 75, and say who holds it
  dibs wait nightly --timeout 0 && echo free    look once
  dibs pause 'deploy/*' && dibs wait 'deploy/*' stop new ones, and let the others finish
"""
    parser.add_argument("name", metavar="NAME|PREFIX*", help="what nobody shall hold any more")
    parser.add_argument("--timeout", type=duration, metavar="T", help="how long to wait (default: for ever)")


def _history_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Show who held NAME, newest first: since when, for how long, and how it ended. The store writes that down once
`dibs setup --history N` told it to keep the last N grants of each name (SQLite, PostgreSQL, MySQL and MariaDB)."""
    parser.epilog = """\
examples:
  dibs setup --history 100                      first, and once: keep the last hundred of each name
  dibs history nightly                          who had it, and when
  dibs history nightly -n 1                     who has it, or had it last
  dibs history nightly --json | jq '.[] | select(.ending == "expired")'
                                                holders that died, or could not renew in time

ENDED is "released" by its holder, "expired" since nobody had renewed it, "broken" by an operator, or "transferred" by
its holder to whoever comes next.
"""
    parser.add_argument("name", metavar="NAME", help="the name of the lock")
    parser.add_argument(
        "-n", "--limit", type=whole, default=LIMIT_DEFAULT, metavar="N", help=f"so many (default: {LIMIT_DEFAULT})"
    )
    json_option(parser)


ARGUMENTS = {"wait": _wait_arguments, "history": _history_arguments}


def wait(args: argparse.Namespace) -> int:
    """``dibs wait``."""
    name = check_name(args.name)
    with connect(args) as client:
        session = client._desk.session()
        began = session.clock.now()
        pause_s = LOOK_MIN_S
        while records := _holders(client, name):
            left_s = pause_s
            if args.timeout is not None:
                left_s = began + args.timeout - session.clock.now()
                if left_s <= 0:
                    more = f" (and {len(records) - 1} more)" if len(records) > 1 else ""
                    raise CommandError(BUSY, f"{records[0]}{more}")
            session.wait(session.pause(), min(pause_s, left_s))
            pause_s = min(2 * pause_s, LOOK_MAX_S)
    return 0


def _holders(client: Client, name: str) -> list[LeaseRecord]:
    if name.endswith("*"):
        return client.leases(name[:-1])
    return run(client._desk.leases_of(name))


def history(args: argparse.Namespace) -> int:
    """``dibs history``."""
    with connect(args) as client:
        records = client.history(args.name, args.limit)
    if args.json:
        print_json([_as_json(record) for record in records])
    elif not records:
        print(f"No grant of {args.name!r} is written down.")
    else:
        headers = ("SINCE", "FOR", "ENDED", "SLOT", "HOLDER", "TOKEN", "INFO")
        print(table(headers, map(_row, records)))
    return 0


def _row(record: HistoryRecord) -> tuple[Any, ...]:
    lasted = "" if record.ended_at is None else lasting((record.ended_at - record.acquired_at).total_seconds())
    info = "" if record.info is None else json_text(record.info)
    ending = record.ending or "holds it"
    return (
        local(record.acquired_at),
        lasted,
        ending,
        record.slot,
        people_call(record.holder),
        record.fencing_token,
        info,
    )


def _as_json(record: HistoryRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "slot": record.slot,
        "holder": record.holder,
        "fencing_token": record.fencing_token,
        "acquired_at": record.acquired_at.isoformat(),
        "ended_at": None if record.ended_at is None else record.ended_at.isoformat(),
        "ending": record.ending,
        "info": record.info,
    }
