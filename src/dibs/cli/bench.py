"""``dibs bench``: how fast are locks here, in the user's own store, from the machine it is run on?

What is measured is in ``dibs.cli.bench_works``, what times amount to in ``dibs.cli.bench_figures``; here it is told.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentTypeError
from contextlib import contextmanager

from dibs._typing import TYPE_CHECKING, Any
from dibs._version import __version__
from dibs.cli import BUSY, MISCONFIGURED, SIGNALLED, CommandError, connect, duration, say
from dibs.cli.bench_figures import Figures, figures_of
from dibs.cli.bench_works import BATCH, NEW_NAMES_MAX, PREFIX, WORKS, Place
from dibs.cli.looks import json_option, pauses_of, print_json, table
from dibs.cli.streams import can_be_drawn_on, plain
from dibs.errors import Unsupported, did_you_mean
from dibs.names import check_seconds

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from types import FrameType
    from typing import NoReturn

    from dibs.client import Client

SECONDS_DEFAULT = 1.5
SECONDS_MIN = 0.05
SECONDS_MAX = 60.0
HEADERS = ("WORK", "WHAT", "COUNT", "A SECOND", "MEDIAN MS", "P99 MS")
# A lock is two requests at least.
LOCK_TRIPS = 2
# What takes this part of the time takes most of it.
MOSTLY_PART = 0.6
# What remains: the names that are new each time, those of a batch, and a few.
ROWS = NEW_NAMES_MAX + BATCH


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"""\
Measure how fast locks are in your store from this machine: is it the network or the database, and how many a second?

Each work is done again and again for a time, by this one process and as fast as the store takes it, which others who
use it will feel: not on a production database at noon. It uses names that nobody else has, {PREFIX}…, and gives all
of them back, also when it is interrupted. Where rows of free names are kept, {ROWS:,} or so remain, until `dibs purge`
deletes them, with those of others that have been free for as long."""
    parser.epilog = f"""\
works, together {SECONDS_DEFAULT * len(WORKS):g} s:
{chr(10).join(f"  {name:<11}{work.what}" for name, work in WORKS.items())}

examples:
  dibs bench                                    the default store
  dibs --url postgresql://app@db/prod bench     another one, from this machine
  dibs bench --only ping lock --seconds 10      is it the network or the database? longer, so more exactly
  dibs bench --json > here.json                 the numbers, to compare with those of another store or machine
  dibs --url memory:// bench                    what dibs itself takes, without any store

A lock is two requests at least, so no less than two pings: what it takes beyond them is the store's own work. A SECOND
of threads counts all of them together, of batch batches, of handover what one busy name can take, between two clients
of this one process. COUNT is how often it was measured: of less than a hundred, P99 is the slowest. When it is
interrupted, or the store goes away, it shows what it has. memory:// is measured, too: what dibs itself takes.
"""
    parser.add_argument(
        "--seconds",
        type=duration,
        default=SECONDS_DEFAULT,
        metavar="T",
        help=f"time for each work, up to {SECONDS_MAX:g} s (default: {SECONDS_DEFAULT:g}s)",
    )
    parser.add_argument(
        "--only", type=_work, nargs="+", action="extend", metavar="WORK", help="only these works (default: all)"
    )
    json_option(parser)


def _work(name: str) -> str:
    if name not in WORKS:
        raise ArgumentTypeError(f"there is no work {name!r}{did_you_mean(name, WORKS)}: there are {', '.join(WORKS)}")
    return name


ARGUMENTS = {"bench": _arguments}


def bench(args: argparse.Namespace) -> int:
    """``dibs bench``."""
    check_seconds("--seconds", args.seconds, least=SECONDS_MIN, most=SECONDS_MAX)
    works = [name for name in WORKS if args.only is None or name in args.only]
    report: Report | None = None
    try:
        with _cleanly(), connect(args) as client, _Progress() as progress:
            report = Report(client, args.seconds)
            place = Place(client, args.seconds)
            _refuse_paused(client, place)
            try:
                for number, name in enumerate(works):
                    left_s = (len(works) - number) * args.seconds
                    progress.show(f"{name} ({number + 1} of {len(works)}), {left_s:.0f} s left")
                    report.add(name, place)
                report.complete = True
            finally:
                for line in place.left:
                    say(line)
    finally:
        if report is not None and report.results:
            if args.json:
                print_json(report.as_json())
            else:
                print(report.text())
    if all(isinstance(result, Unsupported) for result in report.results.values()):
        raise CommandError(MISCONFIGURED, f"none of this is on {report.store}")
    return 0


@contextmanager
def _cleanly() -> Iterator[None]:
    """Other signals that end it do what Ctrl-C does, which is heard wherever it comes (``dibs.cli.ctrl_c``)."""
    came: list[int] = []

    def end(signum: int, _frame: FrameType | None) -> NoReturn:
        came.append(signum)
        raise KeyboardInterrupt

    ours = [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in ours:
        signal.signal(signum, end)
    try:
        yield
    except KeyboardInterrupt:
        if came:
            raise SystemExit(SIGNALLED + came[0]) from None
        raise
    finally:
        for signum in ours:
            signal.signal(signum, signal.SIG_DFL)


def _refuse_paused(client: Client, place: Place) -> None:
    names = (place.name(""), f"queue/{place.name('')}")
    for pause in pauses_of(client):
        if any(pause.covers(name) for name in names):
            raise CommandError(BUSY, str(pause))


class Report:
    """What was measured, where, and what follows from it."""

    def __init__(self, client: Client, seconds: float) -> None:
        clock = client._desk.session().clock
        self.began_at = clock.wall()
        self.shown = client._desk.address.shown
        self.host = os.uname().nodename
        self.load = os.getloadavg()[0]
        self.processors = os.cpu_count() or 1
        self.seconds = seconds
        before = clock.now()
        offered = client.capabilities
        self.connect_s = clock.now() - before
        self.store, self.durable = offered.store, offered.durable
        self.results: dict[str, Figures | Unsupported] = {}
        self.complete = False

    def add(self, name: str, place: Place) -> None:
        """Measure one more."""
        try:
            self.results[name] = figures_of(WORKS[name].run(place))
        except Unsupported as error:
            self.results[name] = error

    def text(self) -> str:
        durable = "durable" if self.durable else "not durable"
        return "\n".join(
            [
                plain(self.shown),
                plain(
                    f"{self.store}, {durable}; reached in {_ms(self.connect_s)} ms from {self.host} "
                    f"(load {self.load:.1f}, {self.processors} processors)"
                ),
                "",
                table(HEADERS, [_row(name, result) for name, result in self.results.items()]),
                *self._conclusions(),
            ]
        )

    def _conclusions(self) -> list[str]:
        figures = {name: result for name, result in self.results.items() if isinstance(result, Figures)}
        lines = []
        if "ping" in figures and "lock" in figures:
            lines.append(_told_apart(figures["ping"], figures["lock"]))
        rates = []
        several = [name for name in ("lock", "threads") if name in figures]
        if several:
            best = max(several, key=lambda name: figures[name].per_second)
            rates.append(f"up to {_rate(figures[best].per_second)} locks")
        if "batch" in figures:
            rates.append(f"{_rate(BATCH * figures['batch'].per_second)} names in batches")
        if "handover" in figures:
            rates.append(f"{_rate(figures['handover'].per_second)} hand-overs of one name")
        if rates:
            lines.append(f"A second, from this one process: {', '.join(rates)}.")
        return ["", *lines] if lines else []

    def as_json(self) -> dict[str, Any]:
        from datetime import datetime, timezone

        return {
            "store": self.shown,
            "kind": self.store,
            "durable": self.durable,
            "host": self.host,
            "processors": self.processors,
            "load": round(self.load, 2),
            "version": __version__,
            "at": datetime.fromtimestamp(self.began_at, timezone.utc).isoformat(),
            "seconds": self.seconds,
            "connect_s": self.connect_s,
            "complete": self.complete,
            "works": [_as_json(name, result) for name, result in self.results.items()],
        }


def _told_apart(ping: Figures, lock: Figures) -> str:
    """Where the time of a lock goes."""
    part = LOCK_TRIPS * ping.median_s / lock.median_s
    if part >= 1:
        return f"A lock takes {_ms(lock.median_s)} ms, no more than two pings: the way there, and dibs itself."
    most = (
        "the most" if part >= MOSTLY_PART
        else "most of it is the store's own work" if part <= 1 - MOSTLY_PART
        else "about half is the store's own work"
    )  # fmt: skip
    pings = f"Two pings, the way there and dibs itself, are {part:.0%} of it"
    return f"A lock takes {_ms(lock.median_s)} ms. {pings}: {most}."


def _row(name: str, result: Figures | Unsupported) -> Sequence[object]:
    if isinstance(result, Unsupported):
        return name, "not on this store", "", "", "", ""
    return (
        name,
        WORKS[name].what,
        f"{result.count:,}",
        _rate(result.per_second),
        _ms(result.median_s),
        _ms(result.p99_s),
    )


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:,.1f}"


def _as_json(name: str, result: Figures | Unsupported) -> dict[str, Any]:
    unsupported = str(result) if isinstance(result, Unsupported) else None
    numbers = dict.fromkeys(Figures._fields) if isinstance(result, Unsupported) else result._asdict()
    return {"work": name, "what": WORKS[name].what, **numbers, "unsupported": unsupported}


class _Progress:
    """What is being measured, on stderr when that is a terminal; afterwards there is no trace of it."""

    def __init__(self) -> None:
        self._wanted = can_be_drawn_on(sys.stderr)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write("\r\x1b[K")

    def show(self, text: str) -> None:
        self._write(f"\r{text}\x1b[K")

    def _write(self, text: str) -> None:
        if self._wanted:
            sys.stderr.write(text)
            sys.stderr.flush()
