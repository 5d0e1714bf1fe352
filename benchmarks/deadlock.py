"""A work on deadlocks: how long it takes until two who wait for each other are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dibs
from benchmarks.crowd import answer, crowd
from benchmarks.harness import MS, Bench, Target

WAIT_S = 0.3
GIVE_UP_S = 30.0
CYCLES_A_ROUND = 3


def deadlock(bench: Bench) -> None:
    """Two processes hold a lock each and ask for the other's: from the second's asking to ``WouldDeadlock``, in ms."""
    with bench.folder() as folder, bench.database() as postgres_url:
        for case, url in (("SQLite", f"sqlite:///{folder}/dibs.db"), ("PostgreSQL", postgres_url)):
            with crowd(2, _crossing_process, url) as ends:

                def cycles(ends: list[Any] = ends) -> list[float]:
                    return [_cycle(ends) for _ in range(CYCLES_A_ROUND)]

                bench.race(case, MS, {"dibs": cycles}, [Target(2000.0)])


def _cycle(ends: list[Any]) -> float:
    names = ["left", "right"]
    for end, name in zip(ends, names, strict=True):
        end.send(("hold", name))
        answer(end)
    for end, name in zip(ends, reversed(names), strict=True):
        end.send(("cross", name))
        time.sleep(WAIT_S)
    crossed: list[tuple[float, float, bool]] = [answer(end) for end in ends]
    closed_at = max(began_at for began_at, _, _ in crossed)
    told_at = [ended_at for _, ended_at, told in crossed if told]
    assert told_at, f"nobody was told in {GIVE_UP_S:g} s"
    return (min(told_at) - closed_at) * 1000


def _crossing_process(url: str) -> Callable[[str, str], object]:
    client = dibs.connect(url)
    held: list[dibs.Lease] = []

    def do(verb: str, name: str) -> object:
        if verb == "hold":
            lease = client.lock(name).acquire()
            assert lease is not None
            held.append(lease)
            return None
        began_at = time.monotonic()
        other, told = None, False
        try:
            other = client.lock(name).acquire(timeout=GIVE_UP_S)
        except dibs.WouldDeadlock:
            told = True
        ended_at = time.monotonic()
        for lease in (*held, other):
            if lease is not None:
                lease.release()
        held.clear()
        return began_at, ended_at, told

    return do
