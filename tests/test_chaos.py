"""Real servers, real processes and real faults on one time line, some seconds on each store; see ``tests/chaos``.

``python -m tests.chaos --seconds 600 --store postgres`` does so for longer, with another seed each time you say.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.bugs import BUGS
from tests.chaos.checker import judge
from tests.chaos.faults import Fault
from tests.chaos.history import Event
from tests.chaos.run import KINDS, run

SECONDS = 6.0
# In one of so many a planted mistake must show; of six at once on two cores, 5 of 36 missed the one that hides best.
RUNS = 5


@pytest.mark.timeout(400)  # it goes on until every fault has done something
@pytest.mark.parametrize("kind", KINDS)
def test_every_promise_is_kept(kind: str, tmp_path: Path) -> None:
    """Clients killed, stopped, cancelled and forked, the server frozen and killed, the network spoiled."""
    verdict = run(kind, tmp_path, SECONDS, seed=1)
    assert verdict.passed, "\n".join([*verdict.broken, *verdict.missing, str(verdict.counts)])


@pytest.mark.timeout(400)
def test_without_a_fence_writes_are_lost(tmp_path: Path) -> None:
    """The control: the same faults on counters that take whatever comes. (With the fence, none are.)"""
    verdict = run(
        "sqlite", tmp_path, SECONDS, seed=2, fenced=False, programs=["lock"], floors={"lost writes": 1, "granted": 50}
    )
    assert verdict.passed, "\n".join([*verdict.broken, *verdict.missing, str(verdict.counts)])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug])
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    """What cannot find a mistake that was made on purpose finds none.

    One run can miss it: what a cancelled caller was granted and left is free again when a fault kills the last process
    that had some. So a run is short, and there are as many as it takes, with another seed each.
    """
    floors = {"cancelled": 30} if "cancelled" in bug else {"lost over a stop": 3}
    seen = []
    for seed in range(3, 3 + RUNS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        verdict = run("sqlite", folder, SECONDS, seed, bug=bug, programs=["lock"], floors=floors)
        if verdict.passed is False:
            return
        seen.append(verdict.counts)
    pytest.fail(f"{RUNS} runs have not found it: {seen}")


# -- the checker itself -----------------------------------------------------------------------------------------------


def grant(
    who: str, begin: float, end: float, *, token: int = 1, slot: int = 1, take: int = 1, mode: str = "one"
) -> Any:
    name = "pool" if mode == "permits" else "red"
    return [
        Event(begin, "granted", who, {"mode": mode, "names": {name: [token, slot]}, "take": take}),
        Event(begin, "held", who, {}),
        Event(end, "held", who, {}),
    ]


CLEAN: dict[str, list[Event]] = {
    "one after the other": [*grant("1.1", 0, 1, token=1), *grant("2.1", 1.1, 2, token=2)],
    "readers": [*grant("1.1", 0, 2, token=1, mode="reader"), *grant("2.1", 1, 3, token=2, mode="reader")],
    "permits": [*grant("1.1", 0, 2, token=2, take=3, mode="permits"), *grant("2.1", 1, 3, slot=2, mode="permits")],
}
BROKEN: dict[str, tuple[str, list[Event]]] = {
    "two inside": ("P1", [*grant("1.1", 0, 1.2, token=1), *grant("2.1", 1.1, 2, token=2)]),
    "a token again": ("P2", [*grant("1.1", 0, 1, token=2), *grant("2.1", 1.1, 2, token=2)]),
    "a smaller token": ("P2", [*grant("1.1", 0, 1, token=3), *grant("2.1", 1.1, 2, token=2)]),
    "a writer among readers": (
        "P15",
        [*grant("1.1", 0, 2, mode="reader"), *grant("2.1", 1, 3, token=2, mode="writer")],
    ),
    "a slot twice": ("P14", [*grant("1.1", 0, 2, mode="permits"), *grant("2.1", 1, 3, token=2, mode="permits")]),
    "too many permits": (
        "P14",
        [*grant("1.1", 0, 2, take=3, mode="permits"), *grant("2.1", 1, 3, token=2, slot=2, take=2, mode="permits")],
    ),
    "an answer that is late": (
        "P11",
        [Event(0, "asked", "1.1", {"names": ["red"], "limit": 0.5}), Event(9, "refused", "1.1", {})],
    ),
    "what a client saw itself": ("held again", [Event(0, "broken", "1.1", {"text": "it is held again"})]),
}


@pytest.mark.parametrize("events", CLEAN.values(), ids=CLEAN)
def test_a_clean_history_passes(events: list[Event]) -> None:
    verdict = judge(sorted(events), [], {"granted": 2})
    assert verdict.passed, verdict


@pytest.mark.parametrize("promise, events", BROKEN.values(), ids=BROKEN)
def test_a_broken_promise_is_told(promise: str, events: list[Event]) -> None:
    verdict = judge(sorted(events, key=lambda event: event.at), [], {})
    assert verdict.passed is False
    assert [text for text in verdict.broken if promise in text], verdict.broken


def test_too_little_is_no_pass() -> None:
    """Unknown is its own answer; so is a name that is never free again."""
    verdict = judge(CLEAN["readers"], [], {"killed in hand": 1})
    assert verdict.passed is None
    assert verdict.missing == ["killed in hand: 0 of 1"]
    assert judge([], [], {}, ["red"]).passed is False


def test_what_faults_did_is_counted() -> None:
    """A process killed with a lease in hand, and one that lost its own while it stood still."""
    events = [*grant("1.1", 0, 1), *grant("2.1", 3, 4, token=2), Event(7, "lost", "2.1", {})]
    verdict = judge(events, [Fault("kill", 1.05, 1.05, 1), Fault("stop", 4, 6.9, 2)], {})
    assert verdict.passed
    assert verdict.counts & Counter({"killed in hand": 1, "lost over a stop": 1}) == Counter(
        {"killed in hand": 1, "lost over a stop": 1}
    )


def test_a_stopped_client_may_answer_late() -> None:
    """P11 counts no time for which the process stood still."""
    events = BROKEN["an answer that is late"][1]
    assert judge(events, [Fault("stop", 0.1, 8, 1)], {}).passed
