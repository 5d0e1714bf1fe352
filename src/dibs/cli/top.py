"""``dibs top``: who holds what, again and again, in a terminal that is left as it was found.

A look asks the store for its leases; how many grants a second there were is read from the fencing tokens of two looks,
so what is shown costs the holders nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections import deque

from dibs._typing import TYPE_CHECKING, Any
from dibs.absence import Absence
from dibs.cli import SIGNALLED, connect, duration, say
from dibs.cli.looks import (
    json_option,
    json_text,
    lease_json,
    pause_json,
    pauses_of,
    prefix_argument,
    print_json_line,
    table,
)
from dibs.cli.streams import can_be_drawn_on, cut, plain
from dibs.errors import StoreUnavailable
from dibs.names import check_seconds, lasting, people_call

if TYPE_CHECKING:
    import argparse
    from types import FrameType
    from typing import NoReturn

    from dibs.client import Client
    from dibs.desk import LeaseRecord
    from dibs.pausing import Pause

INTERVAL_DEFAULT_S = 2.0
INTERVAL_MIN_S = 0.1
INTERVAL_MAX_S = 24 * 3600.0
# Grants a second are those of this time, or of the time between two looks if that is longer.
RATE_S = 10.0
# Names whose last tokens are kept, for it may run for months. (More that are held at a time are shown all the same.)
NAMES_MAX = 100_000
HEADERS = ("NAME", "SLOT", "HOLDER", "FOR", "LEFT", "WAITING", "GRANTS/S", "INFO")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Show who holds what, for how long, how many wait, and how often names change hands, until q or Ctrl-C is pressed. Names
that somebody waits for come first. Where stdout is no terminal, or TERM=dumb, one table is printed."""
    parser.epilog = f"""\
examples:
  dibs top                                      everything in the namespace, every two seconds
  dibs top deploy/ --interval 500ms             names that start with deploy/, twice a second
  dibs top --once                               one look
  dibs top --once --json | jq .waiting          how many wait, for a monitor
  dibs top --json --interval 10s | tee log      a line of JSON every ten seconds, but while the store is away

GRANTS/S is counted over {RATE_S:g} s, from the fencing tokens; on etcd and ZooKeeper, whose tokens are numbers of the
whole cluster, a name counts once a look.
"""
    prefix_argument(parser)
    parser.add_argument(
        "--interval", type=duration, default=INTERVAL_DEFAULT_S, metavar="T", help="time between looks (default: 2s)"
    )
    parser.add_argument("--once", action="store_true", help="look once")
    json_option(parser)


ARGUMENTS = {"top": _arguments}


def top(args: argparse.Namespace) -> int:
    """``dibs top``."""
    check_seconds("--interval", args.interval, least=INTERVAL_MIN_S, most=INTERVAL_MAX_S)
    live = not args.once and not args.json and can_be_drawn_on(sys.stdout)
    with connect(args) as client:
        looks = Looks(client, args.prefix)
        looks.look()  # what is wrong from the start ends it, before the terminal is changed
        if live:
            with Screen() as screen:
                _watch(looks, screen, args.interval)
        elif args.json:
            _print_lines(looks, args.interval, args.once)
        else:
            print(looks.text())
    return 0


def _watch(looks: Looks, screen: Screen, interval_s: float) -> None:
    trouble = ""
    while True:
        screen.show(f"dibs top  {looks.summary()}  {looks.shown}", trouble or looks.text())
        if screen.pressed(interval_s) == b"q":
            return
        try:
            looks.look()
            trouble = ""
        except StoreUnavailable as error:
            trouble = str(error)


def _print_lines(looks: Looks, interval_s: float, once: bool) -> None:
    session = looks.client._desk.session()
    absence = Absence(session, say)
    while True:
        if absence.since is None:
            print_json_line(looks.as_json())
        if once:
            return
        session.wait(session.pause(), interval_s)
        try:
            looks.look()
            absence.over()
        except StoreUnavailable as error:
            if not absence.borne(error):
                raise


class Looks:
    """What was seen of the leases, now and during the last seconds."""

    def __init__(self, client: Client, prefix: str) -> None:
        self.client = client
        self._prefix = prefix
        self.shown = client._desk.address.shown
        self._counts = client._desk.address.capabilities.fencing_token.startswith("strict")
        self._clock = client._desk.session().clock
        self._leases: list[LeaseRecord] = []
        self._pauses: list[Pause] = []
        #: The last token of each name, and when and how often names changed hands since the look before.
        self._tokens: dict[str, int] = {}
        self._grants: deque[tuple[float, dict[str, int]]] = deque()
        self._rates: dict[str, float] = {}

    def look(self) -> None:
        """Ask the store."""
        leases = self.client.leases(self._prefix)
        self._pauses = [p for p in pauses_of(self.client) if p.covers(self._prefix) or p.name.startswith(self._prefix)]
        now = self._clock.now()
        tokens: dict[str, int] = {}
        for lease in leases:
            tokens[lease.name] = max(lease.fencing_token, tokens.get(lease.name, 0))
        changes = {
            name: token - self._tokens[name] if self._counts else 1
            for name, token in tokens.items()
            if token > self._tokens.get(name, token)
        }
        self._grants.append((now, changes))
        # Of the look that is the oldest, only the moment counts.
        while len(self._grants) > 2 and self._grants[1][0] <= now - RATE_S:
            self._grants.popleft()
        elapsed = now - self._grants[0][0]
        self._rates = {}
        if elapsed > 0:
            for _, grants in list(self._grants)[1:]:
                for name, count in grants.items():
                    self._rates[name] = self._rates.get(name, 0.0) + count / elapsed
        for name, token in tokens.items():
            self._tokens.pop(name, None)  # so that those that were not seen for the longest stand first
            self._tokens[name] = token
        while len(self._tokens) > NAMES_MAX:
            del self._tokens[next(iter(self._tokens))]
        self._leases = sorted(
            leases, key=lambda lease: (-lease.waiting, -self._rates.get(lease.name, 0.0), lease.name, lease.slot)
        )

    def summary(self) -> str:
        """All of it in a line."""
        waiting = {lease.name: lease.waiting for lease in self._leases}
        return (
            f"{len(self._leases)} held, {sum(waiting.values())} waiting, {sum(self._rates.values()):.1f} grants/s, "
            f"{len(self._pauses)} paused"
        )

    def text(self) -> str:
        """The table, and the pauses above it, with a line between."""
        lines = [plain(str(pause)) for pause in self._pauses]
        if self._leases:
            lines += [""] if lines else []
            lines.append(table(HEADERS, map(self._row, self._leases)))
        elif not lines:
            lines.append("No leases.")
        return "\n".join(lines)

    def _row(self, lease: LeaseRecord) -> tuple[object, ...]:
        rate = self._rates.get(lease.name)
        return (
            lease.name,
            lease.slot,
            people_call(lease.holder),
            lasting(_held_for(lease)),
            lasting(lease.expires_in),
            lease.waiting or "",
            "" if rate is None else f"{rate:.1f}",
            "" if lease.info is None else json_text(lease.info),
        )

    def as_json(self) -> dict[str, Any]:
        two = len(self._grants) > 1
        return {
            "held": len(self._leases),
            "waiting": sum({lease.name: lease.waiting for lease in self._leases}.values()),
            "grants_per_s": round(sum(self._rates.values()), 3) if two else None,
            "leases": [
                {
                    **lease_json(lease, self._pauses),
                    "held_for": round(_held_for(lease), 3),
                    "grants_per_s": round(self._rates.get(lease.name, 0.0), 3) if two else None,
                }
                for lease in self._leases
            ],
            "pauses": [pause_json(pause) for pause in self._pauses],
        }


def _held_for(lease: LeaseRecord) -> float:
    """Seconds, by the store's clock alone: its end tells what that showed when it was asked."""
    return max(0.0, (lease.expires_at - lease.acquired_at).total_seconds() - lease.expires_in)


class Screen:
    """The terminal, while it is ours: a screen of its own, no cursor, keys without Return; afterwards as before."""

    def __init__(self) -> None:
        self._keys = os.isatty(0)
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Screen:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            self._handlers[signum] = signal.signal(signum, _end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._stop)
        self._take()
        return self

    def __exit__(self, *exc: object) -> None:
        self._give_back()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def show(self, head: str, text: str) -> None:
        """Draw anew: what is too wide or too long for the terminal is cut."""
        size = os.get_terminal_size(1)
        width, height = size.columns or 80, size.lines or 24  # one that does not know its size says 0
        lines = [head, "", *text.splitlines()]
        if len(lines) > height:
            lines[height - 1 :] = [f"… and {len(lines) - height + 1} lines more"]
        # Others chose the names: nothing in them may move the cursor.
        plain = (cut("".join(c if c.isprintable() else "?" for c in line), width) for line in lines)
        sys.stdout.write("\x1b[H" + "\x1b[K\r\n".join(plain) + "\x1b[J")
        sys.stdout.flush()

    def pressed(self, seconds: float) -> bytes:
        """The key that is pressed within so many seconds, if any."""
        ready = select.select([0] if self._keys else [], [], [], seconds)[0]
        return os.read(0, 1) if ready else b""

    def _take(self) -> None:
        if self._keys:
            import termios
            import tty

            self._before = termios.tcgetattr(0)
            tty.setcbreak(0)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")

    def _give_back(self) -> None:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if self._before is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def _stop(self, signum: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal, and we get it back with `fg`."""
        self._give_back()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        signal.signal(signum, self._stop)
        self._take()


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(SIGNALLED + signum)
