"""What a history says about the promises, and about whether it says anything.

A *span* is the time for which a lease was certainly believed in: from the moment at which its grant was in hand to the
last look that found it held. Two spans of what excludes each other may not overlap (P1, P14, P15, P16), and one that
begins after another has ended has the greater token (P2), except of what is shared: there a grant may be heard of late.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from tests.chaos.client import POOL_LIMIT, REQUEST_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.faults import Fault
    from tests.chaos.history import Event

# Around a broken promise, this much of the time line is shown.
AROUND_S = 0.5
LINES_MAX = 60
# An answer may be later than promised by what a busy machine needs to wake the one who waits.
SLACK_S = 2.0
# A lease that was seen held this shortly before its process was killed was in hand then.
IN_HAND_S = 0.1


class Span(NamedTuple):
    """For how long one lease on one name was believed in."""

    name: str
    mode: str
    token: int
    slot: int
    take: int
    begin: float
    end: float
    who: str

    def __str__(self) -> str:
        return f"{self.who} ({self.mode}, token {self.token}, slot {self.slot}) {self.begin:.4f} to {self.end:.4f}"


class Verdict(NamedTuple):
    """``passed`` is None when the history does not say enough."""

    broken: list[str]
    #: What was not reached of what has to happen for a pass.
    missing: list[str]
    counts: Counter[str]

    @property
    def passed(self) -> bool | None:
        return False if self.broken else None if self.missing else True


def spans(events: Sequence[Event]) -> list[Span]:
    begun: dict[str, Event] = {}
    last: dict[str, float] = {}
    for event in events:
        if event.what == "granted":
            begun[event.who] = event
        elif event.what == "held" and event.who in begun:
            last[event.who] = event.at
    return [
        Span(name, event.facts["mode"], token, slot, event.facts["take"], event.at, last[who], who)
        for who, event in begun.items()
        if who in last
        for name, (token, slot) in event.facts["names"].items()
    ]


def judge(
    events: Sequence[Event],
    faults: Sequence[Fault],
    floors: dict[str, int],
    stuck: Sequence[str] = (),
    more: Mapping[str, int] = MappingProxyType({}),
) -> Verdict:
    """stuck: names that nobody could get when all was calm again; more: what was counted beside the history."""
    found = spans(events)
    broken = [f"P7, P9: {name!r} was not to be had when everybody had gone" for name in stuck]
    broken += [
        _told(f"{event.who}: {event.facts['text']}", event.at, events) for event in events if event.what == "broken"
    ]
    by_name: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(found, key=lambda span: span.begin):
        by_name[span.name].append(span)
    for name, these in by_name.items():
        broken += [_told(f"{name!r}: {text}", at, events) for at, text in (*_overlaps(these), *_tokens(these))]
    broken += [_told(text, at, events) for at, text in _late_answers(events, faults)]
    counts = Counter(event.what for event in events)
    counts.update(_bites(events, found, faults))
    counts.update(more)
    missing = [f"{what}: {counts[what]} of {least}" for what, least in floors.items() if counts[what] < least]
    return Verdict(broken, missing, counts)


def _overlaps(these: Sequence[Span]) -> list[tuple[float, str]]:
    broken = []
    inside: list[Span] = []
    for span in these:
        inside = [other for other in inside if other.end >= span.begin]
        for other in inside:
            if span.mode == other.mode == "permits":
                if span.slot == other.slot:
                    broken.append((span.begin, f"P14: a slot was held twice: {other} and {span}"))
            elif not span.mode == other.mode == "reader":
                broken.append((span.begin, f"P1, P15: two were inside: {other} and {span}"))
        if span.mode == "permits" and sum(other.take for other in (*inside, span)) > POOL_LIMIT:
            broken.append((span.begin, f"P14: more than {POOL_LIMIT} permits: {[str(s) for s in (*inside, span)]}"))
        inside.append(span)
    return broken


def _tokens(these: Sequence[Span]) -> list[tuple[float, str]]:
    """P2, of what excludes: who comes later has the greater token."""
    broken = []
    alone = [span for span in these if span.mode in ("one", "writer")]
    for before, after in itertools.pairwise(alone):
        if after.token <= before.token:
            broken.append((after.begin, f"P2: a token did not rise: {before}, then {after}"))
    return broken


def _late_answers(events: Sequence[Event], faults: Sequence[Fault]) -> list[tuple[float, str]]:
    """P11: an answer comes within the limit and one request's time, but for the time a process was stopped."""
    asked: dict[str, Event] = {}
    broken = []
    for event in events:
        if event.what == "asked":
            asked[event.who] = event
        elif event.what in ("granted", "refused", "failed") and event.who in asked:
            ask = asked.pop(event.who)
            if ask.facts["limit"] is None:
                continue
            stopped = sum(
                max(0.0, min(event.at, fault.end) - max(ask.at, fault.begin))
                for fault in faults
                if fault.what == "stop" and fault.pid == ask.pid
            )
            late = event.at - ask.at - ask.facts["limit"] - REQUEST_TIMEOUT_S - stopped
            if late > SLACK_S:
                broken.append((event.at, f"P11: {ask.who} was answered {late:.2f} s too late: {ask}"))
    return broken


def _bites(events: Sequence[Event], found: Sequence[Span], faults: Sequence[Fault]) -> Counter[str]:
    """How often faults did what they were meant to do."""
    bites: Counter[str] = Counter()
    ended = {event.who for event in events if event.what in ("ended", "lost")}
    for fault in faults:
        bites[fault.what] += 1
        if fault.what == "kill":
            bites["killed in hand"] += any(
                span.who not in ended and span.who.startswith(f"{fault.pid}.") and span.end > fault.begin - IN_HAND_S
                for span in found
            )
    stops = [fault for fault in faults if fault.what == "stop"]
    for event in events:
        if event.what == "lost":
            bites["lost over a stop"] += any(
                fault.pid == event.pid and fault.begin < event.at and event.at < fault.end + 1 for fault in stops
            )
    return bites


def _told(text: str, at: float, events: Sequence[Event]) -> str:
    """With the time line around it."""
    near = [event for event in events if abs(event.at - at) < AROUND_S and event.what != "held"]
    near.sort(key=lambda event: abs(event.at - at))
    lines = sorted(near[:LINES_MAX], key=lambda event: event.at)
    return "\n".join([text, *(f"    {event}" for event in lines)])
