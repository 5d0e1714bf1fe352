"""Waiting notes: how the processes that use a store know of each other's waits, so that a ring of them is told.

Whoever holds something and has waited for ``NOTE_AFTER_S`` for something else leaves a *note* in the store: a short
lease on a name of its own, ``namespace~waiting:number`` (no namespace has a ``~``), whose info says what is waited for
and what is held. Callers that hold nothing leave none, and pay nothing. No note decides anything about a lease.

*What a note is worth.* It says what was true when it was written, so it is written anew every ``BEAT_S``, with a count
of the *beats*, and the next beat is written only after the one before is known to have been kept. Whoever saw beat n
and later sees beat n + 2 knows: that one was written after the first look, and so at the first look the waiter was
there. When this holds of a whole ring since it was first seen, and the leases it speaks of are still in force under the
same tokens, then all of them waited for each other at that moment. That does not pass by itself; so there is no false
alarm, whoever died, gave up or was stopped meanwhile, and whatever the clocks say.

*Who is told.* The youngest of a ring, by the time of its first note as the store counts it; all who look at the same
notes choose the same one, and each process tells only its own.

One thread does this for all waiters of a session, through the claim lane. It begins with the first and ends after a
while without any. What it knows of waiters changes under the session's mutex, or in that thread alone.
"""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING, Any
from dibs.ask import Act, Ask
from dibs.deadlock import age, as_said, in_turn, reached, ring_of, stuck
from dibs.errors import WouldDeadlock
from dibs.hold import HELD
from dibs.note import Note, called, spelled_out, understood
from dibs.store import Acquire, Granted, Held, Release
from dibs.threads import begin, is_known
from dibs.waiting import NOTE_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dibs.clock import Bell, Deadline
    from dibs.hold import Hold
    from dibs.session import Session
    from dibs.store import Outcome, Request, Store
    from dibs.wishes import AcquireAsk

# A note is written anew this often, and ends by itself this long after its process died (or the store's shortest ttl).
BEAT_S = 0.25
NOTE_TTL_S = 4.0
# Where very many of a process wait, their beats are slower: at most so much of its time goes into each.
BEAT_EACH_S = 0.001
# So many beats after the first look prove that a waiter was there at it.
PROOF_BEATS = 2
# A ring is told within this of its closing …
TOLD_WITHIN_S = 2.0
# … which leaves some time for the requests themselves: the wait for the first note, its look, the beats, the last look.
LOOK_MIN_S = 0.2
assert NOTE_AFTER_S + LOOK_MIN_S + PROOF_BEATS * BEAT_S + LOOK_MIN_S < TOLD_WITHIN_S - 0.5
# What ends by itself within this, a limited wait or a lease that is not renewed, is no part of a ring.
SOON_S = 2.0
# A ring closes when somebody begins to wait, so the youngest looks often for this long. After that, once in a while.
YOUNG_S = 2.0
LOOK_S = 1.6
# However long a look takes, the pause after it is so many times that.
LOOK_PART = 5.0
# New waiters gather for this long, to go in one call.
GATHER_S = 0.02
# So many notes are written by one call.
BEATS_MAX = 400
# Numbers of notes are drawn by lot: from 1 to the first of these, which doubles up to the second where they are taken.
NUMBERS_MIN = 32
NUMBERS_MAX = 2**20
TRIES = 8
# So many names are looked at to make sure of a ring.
NAMES_MAX = 100
# The thread is kept this long without anybody to look after.
IDLE_S = 10.0

MARK = "~waiting:"


class _Waiter:
    """One ask that has a note, or will have. ``claim_id`` is of the note in force, None when there is none for sure."""

    __slots__ = ("ask", "beat", "beat_at", "claim_id", "id", "key", "ring", "since", "until", "young_until")

    def __init__(self, ask: AcquireAsk, until: float) -> None:
        self.ask = ask
        #: When it gives up by itself.
        self.until = until
        self.id = ""
        self.key = ""
        self.claim_id: str | None = None
        self.beat = 0
        self.beat_at = float("-inf")
        self.since: float | None = None
        #: The ring that it was seen in, and the beat of each at that moment.
        self.ring: dict[str, int] = {}
        self.young_until = float("inf")


class Notes:
    def __init__(self, session: Session, namespace: str) -> None:
        self._session = session
        self._clock = session.clock
        self._mutex = session.mutex
        self._prefix = f"{namespace}{MARK}"
        self._names = f"{namespace}:"
        limits = session.address.capabilities
        self._ttl = min(max(NOTE_TTL_S, limits.ttl_min_s), limits.ttl_max_s)
        self._waiters: dict[AcquireAsk, _Waiter] = {}
        self._numbers = NUMBERS_MIN
        self._ids = 0
        self._looked_at = float("-inf")
        self._look_at = float("-inf")
        self._bell: Bell | None = None
        #: The beats on their way.
        self._sent: Ask | None = None
        self._closing = False
        self._ended = Ask(None, float("inf"))

    # -- called by those who wait ---------------------------------------------------------------------------------

    def add(self, ask: AcquireAsk, until: float) -> None:
        """Look after an ask, whose owner holds something, until it is settled."""
        if until - self._clock.now() <= SOON_S:
            return
        with self._mutex:
            if self._closing or ask.settled or ask.dropped:
                return
            if self._bell is None:
                self._bell = begin(self._clock, "dibs-notes", self._run)
            else:
                self._bell.ring()
            self._waiters[ask] = _Waiter(ask, until)

    def withdraw(self) -> list[Ask]:
        """The session closes: take all notes back. The caller holds the mutex; returns what to wait for."""
        self._closing = True
        if self._sent is not None and not self._sent.settled:  # what has not left yet stays here
            self._sent.dropped = True
            self._sent.settle(None)
        waiters, self._waiters = list(self._waiters.values()), {}
        return [release for waiter in waiters if (release := self._take_back(waiter)) is not None]

    def close(self) -> Ask:
        """End the thread. Settled when it is over."""
        with self._mutex:
            if self._bell is not None:
                self._bell.ring()
                return self._ended
        self._ended.settle(None)
        return self._ended

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self, bell: Bell) -> None:
        if not is_known(self, bell):
            return
        busy_at = self._clock.now()
        while True:
            now = self._clock.now()
            with self._mutex:
                self._let_go(now)
                if self._waiters:
                    busy_at = now
                elif self._closing or now - busy_at >= IDLE_S:
                    self._bell = None
                    break
                due = [waiter for waiter in self._waiters.values() if waiter.beat_at <= now + GATHER_S]
            self._session.lane.start()
            for start in range(0, len(due), BEATS_MAX):
                self._beat(due[start : start + BEATS_MAX])
            if self._waiters and self._clock.now() >= self._look_at:
                self._look()
            bell.wait(self._pause(busy_at))
            if self._waiters:
                self._clock.sleep(GATHER_S)
        bell.close()
        if self._closing:
            self._ended.settle(None)

    def _pause(self, busy_at: float) -> float:
        """How long there is nothing to do unless the bell rings."""
        with self._mutex:
            times = [waiter.beat_at - GATHER_S for waiter in self._waiters.values()]
        at = min(self._look_at, *times) if times else busy_at + IDLE_S
        return max(0.0, at - self._clock.now())

    def _let_go(self, now: float) -> None:
        """Take back the notes of those who wait no longer, or not much longer. The caller holds the mutex."""
        for ask, waiter in list(self._waiters.items()):
            if ask.settled or ask.dropped or waiter.until - now <= SOON_S:
                del self._waiters[ask]
                self._take_back(waiter)

    def _take_back(self, waiter: _Waiter) -> Ask | None:
        if waiter.claim_id is None:
            return None
        release = self._owed(Release(waiter.key, waiter.claim_id))
        waiter.claim_id = None
        return release

    def _owed(self, release: Release) -> Ask:
        """Have a note taken back, also when that is late. The caller holds the mutex."""
        ask = Ask(release, self._clock.now() + self._session.patience_s)
        ask.owed = True
        self._session.lane.put(ask)
        return ask

    # -- writing --------------------------------------------------------------------------------------------------

    def _beat(self, due: list[_Waiter]) -> None:
        """Write the notes of these. A number that somebody else has is given up for another."""
        session = self._session
        for _ in range(TRIES):
            now = self._clock.now()
            with self._mutex:
                holds = [self._held_by(waiter.ask.owner, now) for waiter in due]
            notes = [self._note(waiter, held) for waiter, held in zip(due, holds, strict=True)]
            requests: list[Request] = []
            sent: list[tuple[_Waiter, int]] = []
            with self._mutex:
                for waiter, note in zip(due, notes, strict=True):
                    waiter.beat_at = now + max(BEAT_S, BEAT_EACH_S * len(self._waiters))
                    # Only of those who wait at this moment, after the answer to their last beat: see the head.
                    if self._waits(waiter):
                        if waiter.claim_id is not None:
                            requests.append(Release(waiter.key, waiter.claim_id))
                        waiter.claim_id = None if note is None else note.claim_id
                        if note is not None:
                            sent.append((waiter, len(requests)))
                            requests.append(note)
                if not requests:
                    return
                act = self._sent = Act(partial(_written, requests), now + BEAT_S)
                session.lane.put(act)
            if not session.wait(act, session.request_timeout_s):
                act.dropped = True
            outcomes = act.outcome
            if outcomes is None:  # nobody knows what was done: the notes before are to be taken back, too
                outcomes = [None] * len(requests)
                with self._mutex:
                    for request in requests:
                        if type(request) is Release:
                            self._owed(request)
            due = [waiter for waiter, place in sent if not self._kept(waiter, outcomes[place])]
            if not due:
                return

    def _waits(self, waiter: _Waiter) -> bool:
        return waiter.ask in self._waiters and not (waiter.ask.settled or waiter.ask.dropped)

    def _still_wait(self, ring: Sequence[Note], mine: dict[str, _Waiter]) -> bool:
        return all(self._waits(mine[note.id]) for note in ring if note.id in mine)

    def _held_by(self, owner: object, now: float) -> list[Hold]:
        """What an owner holds and would go on holding for as long as it waits. The caller holds the mutex.

        (Of what users know: nobody waits for a name of dibs's own, such as the seat of a standby.)
        """
        holds = [hold for hold in self._session.holdings.owned.get(owner, ()) if hold.key.startswith(self._names)]
        return [hold for hold in holds if hold.state == HELD and not hold.orphan and _lasts(hold) - now > SOON_S]

    def _note(self, waiter: _Waiter, holds: Sequence[Hold]) -> Acquire | None:
        """The next beat; None when there is nothing to say."""
        session = self._session
        if not holds:
            return None
        if not waiter.key:
            waiter.key = f"{self._prefix}{1 + int(self._clock.jitter() * self._numbers)}"
        if not waiter.id:
            self._ids += 1
            waiter.id, waiter.beat = f"{session.client_id}/{self._ids}", 0
        waiter.beat += 1
        asked, held = waiter.ask.request, tuple((hold.key, hold.granted.fencing_token) for hold in holds)
        by = called(waiter.ask.owner)
        note = Note(
            waiter.id,
            waiter.beat,
            waiter.since,
            session.holder,
            by,
            asked.name,
            asked.permits,
            asked.take,
            held,
        )
        info = note.info(self._names)
        return Acquire(waiter.key, session.new_claim(), self._ttl, session.holder, info)

    def _kept(self, waiter: _Waiter, outcome: object) -> bool:
        """Note the answer to a beat; False when another number must be tried."""
        if type(outcome) is Granted:
            if waiter.beat == 1:
                now = self._clock.now()
                waiter.young_until = now + YOUNG_S
                self._look_at = min(self._look_at, max(now, self._looked_at + LOOK_MIN_S))
                if waiter.since is None:
                    waiter.since = outcome.acquired_at
            return True
        with self._mutex:
            if type(outcome) is not Held:  # nobody knows whether it was kept, so the chain of beats is broken
                self._take_back(waiter)
            waiter.claim_id = None
        waiter.key = waiter.id = ""
        if type(outcome) is Held:
            self._numbers = min(2 * self._numbers, NUMBERS_MAX)
        return type(outcome) is not Held

    # -- reading --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read all notes, and tell those of this process who are the youngest of a ring."""
        session = self._session
        self._looked_at = self._clock.now()
        with self._mutex:
            mine = {waiter.id: waiter for waiter in self._waiters.values() if waiter.claim_id is not None}
        if not mine:
            self._look_at = self._looked_at + LOOK_S
            return
        act = session.new_act(lambda store, deadline: self._read(store, mine, deadline))
        session.queue(act)
        if not session.wait(act, session.request_timeout_s):
            act.dropped = True
        suspected = False
        now = self._clock.now()
        if act.outcome is not None:
            notes, leases = act.outcome
            graph = stuck(notes, leases)
            for waiter in mine.values():
                ring = ring_of(graph, waiter.id)
                # (A waiter that only waits for itself, with a time limit, was told of it when it asked.)
                if len(ring) > 1:
                    suspected = True
                    self._tell(waiter, [note for note in notes if note.id in ring], graph, mine)
        often = suspected or any(now < waiter.young_until for waiter in mine.values())
        pause_s = LOOK_MIN_S if suspected else BEAT_S if often else LOOK_S
        self._look_at = now + max(pause_s, LOOK_PART * (now - self._looked_at))

    def _read(self, store: Store, mine: Collection[str], deadline: Deadline) -> tuple[list[Note], dict[str, Any]]:
        """All notes, and the leases of the names that matter, if those who are mine may be stuck."""
        rows = store.leases(self._prefix, self._prefix + "\U0010ffff", deadline)
        # (A note that moves may be seen twice.)
        latest = {note.id: note for note in sorted(understood(rows, self._names), key=age)}
        notes = list(latest.values())
        maybe = stuck(notes, as_said(notes))
        names = sorted({latest[note_id].waits for note_id in reached(maybe, mine)})
        if len(names) > NAMES_MAX:
            return notes, {}
        leases = {}
        for name in names:
            found = store.leases(name, name + "\x01", deadline)
            leases[name] = {lease.fencing_token: lease.take for lease in found}
        return notes, leases

    def _tell(
        self, waiter: _Waiter, ring: Sequence[Note], graph: dict[str, set[str]], mine: dict[str, _Waiter]
    ) -> None:
        """Raise WouldDeadlock in a waiter, if it is the youngest and all the others are proven to be there."""
        if waiter.ring.keys() != {note.id for note in ring}:
            waiter.ring = {note.id: note.beat for note in ring}
        for note in ring:
            proven = note.id in mine or note.beat >= waiter.ring[note.id] + PROOF_BEATS
            if not proven or note.since is None:
                return
        if max(ring, key=age).id != waiter.id:
            return
        lines = spelled_out(in_turn(ring, graph), self._names)
        asked = waiter.ask.request.name[len(self._names) :]
        text = (
            f"waiting for {asked!r} would never end: " + ", ".join(lines) + ". This caller, who began to wait last, is "
            "told. Release what it holds and begin anew; take names in the same order everywhere, or together with "
            "multilock()"
        )
        with self._mutex:
            if self._still_wait(ring, mine):
                waiter.ask.failed(WouldDeadlock(text, cycle=tuple(lines)))
                self._waiters.pop(waiter.ask, None)
                self._take_back(waiter)
        self._session.lane.start()


def _written(requests: Sequence[Request], store: Store, deadline: Deadline) -> list[Outcome]:
    return store.act(requests, deadline)


def _lasts(hold: Hold) -> float:
    """The boot-clock time until which a hold goes on by itself."""
    return hold.ends_at if hold.terms.renew else min(hold.trusted_until, hold.ends_at)
