"""Waiting for a name: who of this process asks next, and when.

Callers that would wait for one name stand in a *line of this process*, in order of arrival, and only the first of them
asks the store (which has a line of its own among processes), or some along with it (``dibs.along``). (Takers of jobs
who may have different ones, since they keep to different limits of groups, stand in different lines. So do those who
ask for a name with another number of permits: they are told, or change it.) The first is in one of three states:

* *asking*: its request is in the claim lane; a hint that comes meanwhile makes it ask once more;
* *asleep*: it was told Held, or knows, as whoever stood before it was just granted; it is in ``_asleep`` and on the
  heap until a hint, its ``wake_at``, or a release in this process (``nudge``) sends it asking, along with the release;
* settled: granted, failed or withdrawn; it has left the line and the next is asking.

One thread serves all sleepers of a session: it waits for the store's hints and the earliest ``wake_at`` at once, and
carries what is due through the claim lane in one call. A hint only makes it ask earlier: with all hints lost, a waiter
asks again within ``POLL_MAX_S``.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from heapq import heappop, heappush

from dibs._typing import TYPE_CHECKING
from dibs.along import Along
from dibs.ask import JOBS, LEASES, Ask
from dibs.errors import StoreUnavailable
from dibs.hints import Hints
from dibs.overdue import Overdue
from dibs.store import LINE_GRACE_S, PIN_LOOK_S, Held
from dibs.threads import begin, is_known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from dibs.clock import Bell, Clock
    from dibs.lane import Lane
    from dibs.store import Store
    from dibs.wishes import AcquireAsk

# A waiter asks again after a random time between these two, unless it has a reason to ask before.
POLL_MIN_S = 0.7
POLL_MAX_S = 1.0
# … at a multiple of this after the first who did, so that a thousand who wait for a name each ask in twenty calls a
# second, and not in a thousand.
POLL_BEAT_S = 0.05
# Whoever is alive in line asks within the time a free name is kept for it.
assert POLL_MAX_S < LINE_GRACE_S
# No waiter asks sooner than this after it was told Held, or after who stood before it in this process was granted,
# unless there is something new.
ASK_AGAIN_MIN_S = 0.001
# … except after a hint for jobs: it may stand for more than was there to see when it came.
LOOK_AGAIN_S = 0.01
# Names of which is known when the last hint came; if there are more, all are forgotten, and somebody may poll once.
HINTS_MAX = 1_000
# Where hints must be looked for, the pause between looks is this part of the time waited so far …
LOOK_PART = 0.02
# … between the watch's own interval and this many times that.
LOOK_GROWTH_MAX = 16
# When a caller's time is over, what was answered within so long is true now: later, the next answer was asked for.
FRESH_S = 1.5
assert FRESH_S > POLL_MAX_S
# The thread and its watch are kept this long without anybody waiting.
IDLE_S = 10.0
# Who holds something and has waited for this long is looked after in another way, too (dibs.notes).
NOTE_AFTER_S = 0.25


class Waiting:
    def __init__(
        self,
        clock: Clock,
        mutex: AbstractContextManager[object],
        lane: Lane,
        open_store: Callable[[], Store],
        address: str,
        request_timeout_s: float,
        patience_s: float,
        *,
        together: bool = False,
    ) -> None:
        self._clock = clock
        self._mutex = mutex
        self._lane = lane
        self._open_store = open_store
        self.address = address
        self._request_timeout_s = request_timeout_s
        self._patience_s = patience_s
        #: Who is first in each line, and those behind, where there are any.
        self._first: dict[str, AcquireAsk] = {}
        self._behind: dict[str, OrderedDict[AcquireAsk, None]] = {}
        #: The lines for a name that are not called after it: those for permits, and seldom others.
        self._others: dict[str, set[str]] = {}
        #: Who is asked for along with the first; None where that would take a call to the store longer.
        self._along = Along(self._ask) if together else None
        self._asleep: dict[str, AcquireAsk] = {}
        self._overdue = Overdue()
        #: When the last hint for a name came, whoever waited for it then.
        self._hinted_at: dict[str, float] = {}
        self._heap: list[tuple[float, int, AcquireAsk]] = []
        self._pushes = 0
        self._wake_at = float("-inf")
        #: When the first of all asked again because nothing had happened. (At random, so that clients have beats of
        #: their own.)
        self._first_poll_at: float | None = None
        self._bell: Bell | None = None
        self._closing = False
        self._ended = Ask(None, float("inf"))

    # -- the line of this process (called under the mutex) --------------------------------------------------------

    def enter(self, ask: AcquireAsk) -> None:
        """Take the last place in line; the first in line asks at once."""
        key = ask.line
        if key in self._first:
            self._behind.setdefault(key, OrderedDict())[ask] = None
            return
        name = ask.request[0]
        if key is not name and key != name:
            self._others.setdefault(name, set()).add(key)
        self._first[key] = ask
        self._lane.put(ask)

    def nudge(self, key: str) -> None:
        """The name is released in this process: let who waits first for it ask in the same call, or once more."""
        if not self._first:
            return
        for line in self._lines_for(key):
            ask = self._asleep.get(line)
            if ask is not None:
                self._ask_first(ask)  # before it is no longer asleep, so that a Ctrl-C in between does not forget it
                self._asleep.pop(line, None)
            elif line in self._first:
                first = self._first[line]
                if first.under_way and first.kind == LEASES:
                    first.released = True  # refused, it asks again in the call that has the release
                else:
                    first.hinted = True  # it is asking, and may be refused before the release gets there
                if self._along is not None and line in self._behind:
                    self._along.released(first, self._behind[line])

    def _lines_for(self, key: str) -> tuple[str, ...]:
        others = self._others.get(key)
        return (key,) if others is None else (key, *others)

    def leave_line(self, ask: AcquireAsk, *, granted: bool = False) -> None:
        """Give up the place in line, to whoever is next.

        Called again after a Ctrl-C in the middle of it, it finishes what was begun.
        """
        key = ask.line
        if self._overdue.asks:
            self._overdue.forget(ask)
        if self._asleep.get(key) is ask:
            del self._asleep[key]
        first = self._first.get(key)
        if first is None:
            return
        behind = self._behind.get(key) if self._behind else None
        if behind is not None:
            if first is not ask:
                behind.pop(ask, None)
            elif behind:
                first = self._first[key] = next(iter(behind))  # before it leaves its place: a Ctrl-C forgets nobody
            behind.pop(first, None)
            if not behind:
                del self._behind[key]
        if first is ask:
            if self._others:
                self._forget_line(key, ask.request.name)
            if self._along is not None:
                self._along.forget(key)
            del self._first[key]
            return
        if first.in_lane or first.along or first.settled or key in self._asleep:
            return
        hold = ask.hold if granted else None
        if hold is not None and not first.terms.permits and first.kind == LEASES:
            # It is of this process, and may be over before the store could have said what is said here.
            held = Held(ask.request.holder, *hold.granted[:2], ask.request.ttl)
            self._overdue.tell(key, held)
            if first.settled:
                return
            now = first.heard_at = self._clock.now()
            first.seen, first.wake_at = held, now + ASK_AGAIN_MIN_S
            with suppress(StoreUnavailable):  # there can be no thread to wake it
                self._sleep(first, now)
                return
        self._ask_first(first, granted=granted)

    def ask_anew(self, ask: AcquireAsk) -> None:
        """What it was granted came too late to be trusted: it asks for it with another claim.

        It is the first in line, or had left it when it was granted, before a Ctrl-C: then it takes the last place.
        """
        if ask.along:
            self._stay(ask)
        elif self._first.get(ask.line) is not ask:
            self.leave_line(ask)
            self.enter(ask)
        else:
            self._lane.put(ask)

    def _forget_line(self, key: str, name: str) -> None:
        others = self._others.get(name)
        if others is not None:
            others.discard(key)
            if not others:
                self._others.pop(name, None)

    def _ask_first(self, first: AcquireAsk, *, granted: bool = False) -> None:
        """Send the first in line asking, and those who are to go along with it."""
        if first.request.wake is None:  # it was asked for along with another
            first.request = first.request._replace(wake=self.address)
        self._ask(first)
        if self._along is not None and first.line in self._behind:
            self._along.join(first, self._behind[first.line], granted=granted)

    def _stay(self, ask: AcquireAsk) -> None:
        """It was asked for along with the first, for nothing: it stays in its place, which may be the first by now.

        Or it had left the line when it was about to fail, before a Ctrl-C: then it takes the last place.
        """
        ask.along = False  # before all else, so that whoever comes next after a Ctrl-C does not take it for asked
        if ask.dropped or ask.settled:
            return
        ask.t0 = None  # the claim certainly holds nothing
        if self._first.get(ask.line) is ask:
            self._ask_first(ask)
        elif ask not in self._behind.get(ask.line, ()):
            self.enter(ask)

    def _ask(self, ask: AcquireAsk) -> None:
        # Each attempt may be repeated for the whole patience; t0 stays that of the first attempt of the claim, except
        # after a Held: then the claim certainly holds nothing, and trust may count from the next attempt.
        ask.t0 = None
        ask.give_up_at = self._clock.now() + self._patience_s
        self._lane.put(ask)

    def hurry(self, ask: AcquireAsk) -> None:
        """The ask's time is over. What the first in line was told just now, or else is told next, is its answer."""
        first = self._first.get(ask.line)
        if ask.settled or first is None:
            return
        if self._clock.now() - first.heard_at <= FRESH_S:
            ask.heard, ask.seen = True, first.seen
        else:
            self._overdue.add(ask)

    def seen(self, key: str) -> Held | None:
        """What the first in line for a name was told last."""
        first = self._first.get(key)
        return None if first is None else first.seen

    def behind(self, key: str) -> int:
        """How many wait behind the first in a line."""
        return len(self._behind.get(key, ()))

    def hinted_at(self, name: str) -> float:
        """When the last hint for a name came."""
        return self._hinted_at.get(name, float("-inf"))

    def everybody(self) -> list[AcquireAsk]:
        """All who wait (the session refuses them when it closes)."""
        return [*self._first.values(), *(ask for behind in self._behind.values() for ask in behind)]

    def fall_asleep(self, ask: AcquireAsk, held: Held) -> None:
        """The store said Held: sleep until there is a reason to ask again."""
        self._overdue.tell(ask.line, held)
        if self._along is not None:
            self._along.went_ill(ask.line)
        if self._first.get(ask.line) is not ask or ask.request.wake is None:
            self._stay(ask)
            return
        if ask.dropped or ask.settled:
            return
        if held.ticket is not None:
            ask.request = ask.request._replace(ticket=held.ticket)
        now = ask.heard_at = self._clock.now()
        if ask.released:
            self._ask_first(ask)
            ask.released = False  # last, so that after a Ctrl-C it rather asks once more
            return
        pause = POLL_MIN_S + (POLL_MAX_S - POLL_MIN_S - POLL_BEAT_S) * self._clock.jitter()
        if self._first_poll_at is None:
            self._first_poll_at = now + pause
        pause += (self._first_poll_at - now - pause) % POLL_BEAT_S
        if ask.hinted:
            ask.hinted, pause = False, LOOK_AGAIN_S if ask.kind == JOBS else 0.0
        free_in = PIN_LOOK_S if held.free_in <= 0 and held.holder is not None else held.free_in
        ask.wake_at = now + max(ASK_AGAIN_MIN_S, min(free_in, pause, held.again_in))
        self._sleep(ask, now)

    def _sleep(self, ask: AcquireAsk, now: float) -> None:
        """Until its ``wake_at``, unless there is a reason to ask before."""
        self._pushes += 1
        heappush(self._heap, (ask.wake_at, self._pushes, ask))
        bell = self._bell
        if bell is None:
            if not self._closing:
                self._bell = begin(self._clock, "dibs-wait", self._run)
        elif ask.wake_at < self._wake_at or float("-inf") < self._wake_at <= now:
            bell.ring()  # also a thread that has overslept: time-outs do not go on while the machine sleeps, clocks do
        self._asleep[ask.line] = ask  # last, so that after a Ctrl-C nobody sleeps whom nothing wakes

    # -- the thread -----------------------------------------------------------------------------------------------

    def close(self) -> Ask:
        """End the thread and its watch. Settled when they are over."""
        with self._mutex:
            self._closing = True
            if self._bell is not None:
                self._bell.ring()
                return self._ended
        self._ended.settle(None)
        return self._ended

    def _run(self, bell: Bell) -> None:
        if not is_known(self, bell):
            return
        hints = Hints(self._clock, self._lane, self._open_store, self.address, self._request_timeout_s)
        busy_at = self._clock.now()
        while True:
            now = self._clock.now()
            with self._mutex:
                due = self._collect(now, ())
                names = self._names()
                if names or due:
                    busy_at = now
                elif self._closing or now - busy_at >= IDLE_S:
                    self._bell = None
                    break
                next_at = self._heap[0][0] if self._heap else now + IDLE_S
                if hints.interval_s is not None and names:
                    next_at = min(next_at, now + self._look_pause(hints.interval_s, now))
                # Whoever falls asleep rings a thread that was idle: how long it was to wait tells nothing, if the
                # machine has slept since.
                self._wake_at = float("-inf") if due else next_at if names else float("inf")
            if due:
                self._lane.drive(due[-1])
                continue
            if names and hints.missing(now):
                if hints.open(now):
                    with self._mutex:  # what happened before the watch was open was not told: ask once more
                        due = self._collect(now, names)
                    if due:
                        self._lane.drive(due[-1])
                continue
            bell.wait(max(0.0, next_at - now), hints.fileno())
            if hints.interval_s is not None:
                with self._mutex:  # who fell asleep meanwhile is looked for, too: a change is told only once
                    names = self._names()
            # Also when nobody waits any more: a hint left unread would keep the descriptor readable.
            changed = hints.changed(names)
            if changed:
                with self._mutex:
                    due = self._collect(self._clock.now(), changed)
                if due:
                    self._lane.drive(due[-1])
                    self._clock.sleep(0)  # let whoever was granted go on before this thread looks around
        hints.close()
        bell.close()
        if self._closing:
            self._ended.settle(None)

    def _names(self) -> list[str]:
        """What the sleepers wait for. The caller holds the mutex."""
        return list({ask.request.name: None for ask in self._asleep.values()})

    def _look_pause(self, interval_s: float, now: float) -> float:
        """How long not to look: short for those who came just now, longer for those who are used to waiting."""
        latest = max(ask.started_at - ask.waited_s for ask in self._asleep.values())
        return min(max((now - latest) * LOOK_PART, interval_s), interval_s * LOOK_GROWTH_MAX)

    def _collect(self, now: float, changed: Iterable[str]) -> list[AcquireAsk]:
        """Send everybody asking who is due or whose name changed. The caller holds the mutex."""
        due: list[AcquireAsk] = []
        if len(self._hinted_at) > HINTS_MAX:
            self._hinted_at.clear()
        self._hinted_at.update(dict.fromkeys(changed, now))
        for key in [line for name in changed for line in self._lines_for(name)]:
            ask = self._asleep.pop(key, None)
            if ask is not None:
                ask.hinted = ask.kind == JOBS
                due.append(ask)
            elif key in self._first:
                first = self._first[key]
                first.hinted = first.in_lane and first.t0 is not None  # it may have been refused before that
        while self._heap and (self._heap[0][0] <= now or not self._sleeps(*self._heap[0])):
            wake_at, _, ask = heappop(self._heap)
            if self._sleeps(wake_at, 0, ask):
                del self._asleep[ask.line]
                due.append(ask)
        for ask in due:
            self._ask_first(ask)
        return due

    def _sleeps(self, wake_at: float, _push: int, ask: AcquireAsk) -> bool:
        return self._asleep.get(ask.line) is ask and ask.wake_at == wake_at
