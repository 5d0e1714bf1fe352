"""How many workers a queue needs: what follows from what is counted, and what is said of real loads."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from weakref import ref

import pytest

import dibs
from dibs.advice import CLAIMS, DATABASE, NOTHING, TARGET_USE, WORK, advise
from dibs.load import COUNTED, WINDOW_S
from dibs.owners import ThreadOwner

numbers = itertools.count()


def told(seconds: float = 60.0, workers: int = 1, depths: Any = ((0.0, 0),), **counted: float) -> dict[str, Any]:
    """What one process tells."""
    return {
        "queue": "q",
        "seconds": seconds,
        "workers": workers,
        "depths": depths,
        **dict.fromkeys(COUNTED, 0),
        **counted,
    }


def test_as_many_as_the_work_needs() -> None:
    """Ten jobs a second of half a second keep five busy; with the target use that takes seven, however many work."""
    for workers in (2, 7, 50):
        advice = advise("q", [told(workers=workers, taken=600, ended=600, held_s=300)], WINDOW_S)
        assert advice.needed == 7
        assert advice.use == pytest.approx(5 / workers)
        assert "10 jobs arrive a second, and each takes 500 ms of work" in advice.why


def test_several_processes_are_added_up() -> None:
    """What several processes tell is one load."""
    ones = [told(workers=2, taken=200, ended=200, held_s=100) for _ in range(3)]
    assert (
        advise("q", ones, WINDOW_S)[:3]
        == advise("q", [told(workers=6, taken=600, ended=600, held_s=300)], WINDOW_S)[:3]
    )


def test_a_queue_that_grows_needs_more() -> None:
    """What piles up has arrived, too: by the line through how deep it was seen to be."""
    depths = [(at, 5 * at) for at in range(0, 60, 5)]
    advice = advise("q", [told(workers=5, taken=600, ended=600, held_s=300, depths=depths)], WINDOW_S)
    assert advice.arrival_rate == pytest.approx(15)
    assert (advice.needed, advice.binds, advice.depth) == (10, WORK, 275)
    assert advice.why.endswith("There are 5: add 5")
    shrinking = [(at, 600 - 10 * at) for at in range(0, 60, 5)]
    advice = advise("q", [told(workers=5, taken=600, ended=600, held_s=300, depths=shrinking)], WINDOW_S)
    assert advice.arrival_rate == pytest.approx(0)
    assert advice.needed == 1


def test_what_came_back_has_not_arrived() -> None:
    """Tries that failed cost work, but are no new jobs."""
    advice = advise("q", [told(taken=1200, returned=600, ended=600, held_s=300)], WINDOW_S)
    assert advice.arrival_rate == pytest.approx(10)
    assert advice.held_s == pytest.approx(0.5)


def test_what_binds() -> None:
    """Work, the store, or takers in each other's way; nothing when there are enough."""
    quick: dict[str, Any] = {"taken": 60, "ended": 60, "held_s": 0.6}
    assert advise("q", [told(**quick)], WINDOW_S).binds == NOTHING
    assert advise("q", [told(**quick, won=10, raced=90)], WINDOW_S).binds == CLAIMS
    assert advise("q", [told(**quick, take_s=50)], WINDOW_S).binds == DATABASE
    assert advise("q", [told(taken=60, ended=60, held_s=59)], WINDOW_S).binds == WORK


@pytest.mark.parametrize("known", [[], [told(seconds=2.0)], [told(depths=())]], ids=["nobody", "too short", "no depth"])
def test_too_little_is_known(known: list[dict[str, Any]]) -> None:
    """Whoever knows too little says so."""
    advice = advise("q", known, WINDOW_S)
    assert advice.needed is None
    assert "ask again" in advice.why


@pytest.mark.parametrize("workers", [3, 12, 48])
def test_a_known_load(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that needs six workers is told as six, give or take one, by three, by twelve and by forty-eight.

    (Where the machine is too slow to sleep for a tenth of a second, or to put in time, it needs what that then needs.)
    """
    window_s, held_s = 6.0, 0.1
    monkeypatch.setattr("dibs.queue_core.WINDOW_S", window_s)
    rate = 6 * TARGET_USE / held_s
    with dibs.connect(f"memory://advice-{next(numbers)}") as client:
        queue, over = client.queue("q"), threading.Event()
        puts: list[float] = []
        works: list[tuple[float, float]] = []

        def put() -> None:
            due = time.monotonic()
            while not over.wait(max(0.0, due - time.monotonic())):
                queue.put("job")
                puts.append(time.monotonic())
                due += 1 / rate

        def work(job: dibs.Job) -> None:
            began = time.monotonic()
            time.sleep(held_s)  # the work
            works.append((began, time.monotonic() - began))

        threads = [
            threading.Thread(target=put),
            threading.Thread(target=lambda: queue.run(work, workers=workers, stop=over, drain_timeout=0)),
        ]
        for thread in threads:
            thread.start()
        try:
            time.sleep(window_s * 1.2)  # it says what it has seen in its window
            advice, stats = queue.advice(), queue.stats()
            since = time.monotonic() - window_s
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert advice.needed is not None
    lasted = [seconds for began, seconds in works if began > since]
    needed = sum(at > since for at in puts) / window_s * sum(lasted) / len(lasted) / TARGET_USE
    assert abs(advice.needed - needed) < 1.5, (advice, needed)
    assert advice.workers == workers
    assert (advice.binds == WORK) is (workers == 3)
    assert stats.taken > 0  # (in one window: what ended in it may have been taken before)
    assert stats.ended > 0
    assert (stats.queue, stats.processes, stats.workers) == ("q", 1, workers)
    assert stats.asked == stats.won + stats.empty


def test_one_thread_after_another_is_one_worker() -> None:
    """Threads that the system gives the same number have not worked at the same time: they are one worker."""
    with dibs.connect(f"memory://advice-{next(numbers)}") as client:
        load = client.queue("q")._core.load()
        threads = ThreadOwner(), ThreadOwner()
        for thread in threads:
            load.taker(ref(thread))
        assert load.told()["workers"] == 1
