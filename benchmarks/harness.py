"""The harness: runs contestants in turns, keeps every sample, and says what became of the targets.

A *work* is a function of a ``Bench``; it sets up its contestants and races them. A *race* runs all contestants once a
round, for several rounds, each round beginning with another one, so that a machine that grows slower or faster does so
for everybody. A contestant's round gives one sample or many; medians are taken over the samples of all rounds.

What is measured is the works' business, what is printed ``report``'s.
"""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tests.servers.postgres import PostgresServer
    from tests.servers.server import Server

ROUNDS_MIN = 5
ROUNDS_DEFAULT = 9

S = TypeVar("S", bound="Server")

# One round of one contestant: its samples, in the unit of the race.
Round = Callable[[], Sequence[float]]


class Unit(NamedTuple):
    """What a sample counts, and which way is better."""

    text: str
    more_is_better: bool


PAIRS_PER_S = Unit("pairs/s", more_is_better=True)
MS = Unit("ms", more_is_better=False)


class Target(NamedTuple):
    """What dibs is to reach: a multiple of a peer's median, or with ``peer`` None a figure in the race's unit."""

    bound: float
    peer: str | None = None


class Race(NamedTuple):
    """One comparison that was run. The first contestant is dibs, the others are what it is compared with."""

    work: str
    case: str
    unit: Unit
    samples: dict[str, list[float]]
    targets: tuple[Target, ...]

    def ratio(self, peer: str) -> float:
        """The median of dibs as a multiple of the peer's median; 1 of dibs itself."""
        subject = next(iter(self.samples))
        if peer == subject:  # (which may be 0: so many were out of order, say)
            return 1.0
        return median(self.samples[subject]) / median(self.samples[peer])

    def reached(self, target: Target) -> float:
        """The figure that the target bounds."""
        if target.peer is None:
            return median(next(iter(self.samples.values())))
        return self.ratio(target.peer)

    def met(self, target: Target) -> bool:
        reached = self.reached(target)
        return reached >= target.bound if self.unit.more_is_better else reached <= target.bound


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """The middle half of the samples: the first and the third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, high


def p99(samples: Sequence[float]) -> float | None:
    """The 99th percentile, or None where there are too few samples to speak of one."""
    return quantiles(samples, n=100, method="inclusive")[98] if len(samples) >= 100 else None


class Bench:
    """What a work is given: how thorough to be, private servers and folders, and ``race``."""

    def __init__(self, *, quick: bool, rounds: int, server_made: Callable[[Server], None]) -> None:
        self.quick = quick
        self.rounds = rounds
        #: How long a contestant is timed in one round, where a round is a stretch of time.
        self.round_s = 0.2 if quick else 0.6
        self.races: list[Race] = []
        self.work = ""
        self._servers: dict[type[Server], Server] = {}
        self._server_made = server_made
        self._line_width = 0

    # What works stand on

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder on the disk that the private server uses too, removed afterwards."""
        path = Path(tempfile.mkdtemp(prefix="dibs-bench-", dir="/tmp"))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def started(self, kind: type[S]) -> S:
        """The private server of this kind that all works share, started when the first work needs it."""
        server = self._servers.get(kind)
        if server is None:
            self.progress(f"starting a private {kind.NAME}")
            server = self._servers[kind] = kind()
            self._server_made(server)
        assert isinstance(server, kind)
        return server

    @property
    def server(self) -> PostgresServer:
        """The private PostgreSQL, durable as shipped."""
        from tests.servers.postgres import PostgresServer

        return self.started(PostgresServer)

    @contextmanager
    def database(self) -> Iterator[str]:
        """The URL of a new empty database, dropped afterwards."""
        # What earlier works left to be written must not be written in this one's time.
        self.server.psql("CHECKPOINT")
        url = self.server.create_database()
        try:
            yield url
        finally:
            self.server.drop_database(url)

    def close(self) -> None:
        """Stop the servers."""
        for server in self._servers.values():
            server.close()

    # Racing

    def race(
        self,
        case: str,
        unit: Unit,
        contestants: Mapping[str, Round],
        targets: Sequence[Target] = (),
        *,
        rounds: int | None = None,
        between: Callable[[], object] | None = None,
    ) -> None:
        """Run the contestants in turns and keep what came out; the first is dibs.

        Each runs a round that does not count, to warm up. ``between`` is called before every other one, untimed.
        """
        who = list(contestants)
        samples: dict[str, list[float]] = {name: [] for name in who}
        for name in who:
            self.progress(f"{case}: {name} warms up")
            contestants[name]()
        rounds = self.rounds if rounds is None else rounds
        for number in range(rounds):
            first = number % len(who)
            for name in who[first:] + who[:first]:
                self.progress(f"{case}: round {number + 1} of {rounds}: {name}")
                if between is not None:
                    between()
                gc.collect()  # nobody pays for another's garbage
                samples[name] += contestants[name]()
        self.races.append(Race(self.work, case, unit, samples, tuple(targets)))

    # Telling

    def progress(self, text: str) -> None:
        """Say on stderr what is going on: on a terminal in one line that is written over, else when a work begins."""
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            line = f"{self.work}: {text}"[: columns - 1]
            print("\r" + line.ljust(self._line_width), end="", file=sys.stderr, flush=True)
            self._line_width = len(line)

    def begin(self, work: str) -> None:
        self.work = work
        if not sys.stderr.isatty():
            print(work, file=sys.stderr, flush=True)

    def clear_progress(self) -> None:
        if sys.stderr.isatty() and self._line_width:
            print("\r" + " " * self._line_width + "\r", end="", file=sys.stderr, flush=True)
            self._line_width = 0


# The clock is read after this many pairs, so that reading it costs nothing.
PAIRS_AT_ONCE = 20


def lone_thread(pair: Callable[[str], object], names: Iterable[str], seconds: float) -> list[float]:
    """Call ``pair`` for one name after the other in this thread, over and over, for so many seconds; pairs a second."""
    endless = cycle(names)
    done = 0
    start = time.perf_counter()
    while True:
        for name in islice(endless, PAIRS_AT_ONCE):
            pair(name)
        done += PAIRS_AT_ONCE
        took = time.perf_counter() - start
        if took >= seconds:
            return [done / took]
