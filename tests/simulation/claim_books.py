"""What may not happen to items that are claimed, and to their tallies.

Each item is a lease, of which everything is checked that is checked of leases. The tallies are kept by the store beside
them, and here as well: each change of one must have a reason.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from dibs.hold import HELD, LOST
from dibs.store import Acquire, Gone, Granted, Release, Released, Transfer
from tests.simulation.checker import Checker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from dibs.batch import BatchFacts, Item
    from dibs.store import Outcome, Request
    from tests.simulation.network import Call
    from tests.simulation.process import Process
    from tests.simulation.programs import SimSession
    from tests.simulation.remembered import Tenure
    from tests.simulation.world import World

SOURCE = "red"
KEYS = ("a", "b", "c", "d")
RETRY_IN_MAX_S = 2.0
_ITEMS = f"default:{SOURCE}/"
_TALLIES = f"default~tries:{SOURCE}/"


class Work:
    """An item that a program has won, and what it says of it."""

    def __init__(self, item: Item[str], tenure: Tenure) -> None:
        self.key = item._key
        self.tenure = tenure
        self.item: Item[str] | None = item
        #: How its program has ended it, or is about to: "done", "skip", "fail", "left"; nothing while it is at work.
        #: Of threads that say so at the same time, each.
        self.hows: set[str] = set()
        self.told_lost = False
        self.retry_in = math.inf
        #: It was about to say so: it may also be left.
        self.interrupted = False
        #: Where tries count: which one this is, and under which claim.
        self.tries = 0
        self.tried: str | None = None

    def said(self) -> str:
        return " and ".join(sorted(self.hows)) or "nothing"


class Tally(NamedTuple):
    """What the store has of an item's tries."""

    claim_id: str
    tries: int


class ClaimChecker(Checker):
    """What claims promise besides what the locks of their items promise."""

    operated = f"{SOURCE}/{KEYS[0]}"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.max_tries = (2, None, 1, 3)[world.seed % 4]
        self.tallies: dict[str, Tally] = {}
        #: By the claim of its lease, and by that of its try.
        self.works: dict[str, Work] = {}
        self.tried: dict[str, Work] = {}
        #: Leases whose release the store has confirmed.
        self.released: set[str] = set()
        #: Until when nobody gets an item that has failed, and which are dead.
        self.kept: dict[str, float] = {}
        self.dead: set[str] = set()
        #: Whose tally was changed, since it was handed out last, by who did not hold it any more, or by a late request.
        self.late: set[str] = set()
        #: How often releases were sent, and which were found gone by the first.
        self._sends: dict[str, int] = {}
        self._gone: set[str] = set()
        #: How many revivals are under way, and when the last one ended.
        self._revivals: Counter[SimSession] = Counter()
        self._revived_at: dict[SimSession, float] = {}

    # -- the store ------------------------------------------------------------------------------------------------

    def sent(self, call: Call, requests: Sequence[Request]) -> None:
        super().sent(call, [request for request in requests if not _is_tally(request)])
        for request in requests:
            if isinstance(request, Release):
                self._sends[request.claim_id] = self._sends.get(request.claim_id, 0) + 1

    def answered(self, call: Call) -> None:
        super().answered(call)
        if call.error is None and call.requests:
            for request, outcome in zip(call.requests, call.answer, strict=True):
                if isinstance(request, Release) and type(outcome) is Gone and self._sends[request.claim_id] == 1:
                    work = self.works.get(request.claim_id)
                    ending = None if work is None else work.tenure.hold.ending
                    if ending is None or not ending.settled:  # else nobody waits for it any more
                        self._gone.add(request.claim_id)

    def applied(self, call: Call, request: Request, holder: str | None, outcome: Outcome) -> None:
        if _is_tally(request):
            self._tally_changes(call, request, outcome)
            return
        super().applied(call, request, holder, outcome)
        if isinstance(request, Release) and type(outcome) is Released:
            self._released(request)

    def _tally_changes(self, call: Call, request: Request, outcome: Outcome) -> None:
        key = request.name[len(_TALLIES) :]
        before = self.tallies.get(key)
        if type(outcome) in (Granted, Released) and (call.over or not self._has(call.process, key, before)):
            self.late.add(key)
        if isinstance(request, Acquire) and type(outcome) is Granted:
            self.tallies[key] = Tally(request.claim_id, _tries(request.info))
            if before is not None and before != self.tallies[key]:
                self.world.broken(f"tries: the tally of {key} is begun anew, and was {before}")
        elif isinstance(request, Transfer) and type(outcome) is Granted:
            assert before is not None
            after = self.tallies[key] = Tally(request.claim_id, _tries(request.info))
            if after.claim_id == before.claim_id:
                return
            if after.tries == before.tries:
                self._because(key, before, "fail")
            elif after.tries == before.tries - 1:
                self._because(key, before, "skip", "left")
            elif after.tries != before.tries + 1:
                self.world.broken(f"tries: {before} of {key} becomes {after}")
        elif isinstance(request, Release) and type(outcome) is Released:
            assert before is not None
            self._because(key, before, "done", *(("skip", "left") if before.tries == 1 else ()))
            del self.tallies[key]

    def _has(self, process: Process, key: str, tally: Tally | None) -> bool:
        """Whether who changes this tally of an item still holds that, under the same claim where one is known."""
        work = None if tally is None else self.tried.get(tally.claim_id)
        holders = [claim_id for name, claim_id in self._rows() if name == _ITEMS + key and claim_id]
        if work is not None:
            return work.tenure.claim_id in holders
        return any(self.claims[claim_id].process is process for claim_id in holders)

    def _because(self, key: str, tally: Tally, *hows: str) -> None:
        """That a try is not counted any more, or with an error, has one of these reasons."""
        work = self.tried.get(tally.claim_id)
        if work is None:  # it was never handed out
            if "skip" not in hows:
                self.world.broken(f"tries: {tally} of {key} ends as {hows[0]}, and nobody has had it")
        elif not work.hows & {*hows} and not ((work.interrupted or work.tenure.session.closed) and "left" in hows):
            self.world.broken(f"tries: {tally} of {key} ends as {' or '.join(hows)}; its program said {work.said()}")

    def _released(self, request: Release) -> None:
        claim_id, key = request.claim_id, request.name[len(_ITEMS) :]
        self.released.add(claim_id)
        tally, work = self.tallies.get(key), self.works.get(claim_id)
        if work is not None and request.keep:
            self.kept[key] = self.world.now + work.retry_in
        if request.keep > RETRY_IN_MAX_S:
            self.dead.add(key)
            self.kept[key] = 0.0
            counted = tally is not None and self.max_tries is not None and tally.tries >= self.max_tries
            if not counted and key not in self.late:
                self.world.broken(f"tries: {key} is dead, and {tally} were counted of {self.max_tries}")
            elif work is not None and "fail" not in work.hows:
                self.world.broken(f"tries: {key} is dead, and its program said {work.said()}")
        elif (
            work is not None
            and work.tried is not None
            and not (key in self.late or work.interrupted)
            and work.tenure.hold.state != LOST
            and self._sure()
        ):
            finish = work.tenure.hold.finish
            failed = finish is not None and finish.failed
            hows = [how for how in work.hows or ("left",) if (how == "fail") == failed]
            tries = [0 if how == "done" else work.tries - (how != "fail") for how in hows]
            if (0 if tally is None else tally.tries) not in tries and not work.tenure.session.closed:
                self.world.broken(f"tries: {key} is free, {work.said()}, and its tally is {tally}, not {tries}")

    def _sure(self) -> bool:
        """Whether nothing goes wrong, nor is interrupted at places where a step may be left out."""
        return self.calm

    def _let_in(self, request: Acquire | Transfer, outcome: Granted, trusting: Any) -> None:
        super()._let_in(request, outcome, trusting)
        key = request.name[len(_ITEMS) :]
        if self.world.now < self.kept.get(key, 0.0):
            self.world.broken(f"retry_in: {request.claim_id} gets {key} before {self.kept[key]:.4f}")
        if key in self.dead:
            self.world.broken(f"tries: {request.claim_id} gets {key}, which is dead")

    def lease_broken(self, name: str, token: int, now: bool) -> None:
        if not name.startswith(_TALLIES):
            key = name[len(_ITEMS) :]
            if now:
                self.kept.pop(key, None)
                self.dead.discard(key)
                self.late.add(key)  # whoever counts a try of it just now may take that back when another has it
            super().lease_broken(name, token, now)
            return
        key = name[len(_TALLIES) :]
        if key not in self.dead and any(row == _ITEMS + key for row, _ in self._rows()):
            self.world.broken(f"tries: the tally of {key} is taken away, and it is not dead")
        self.tallies.pop(key, None)

    def _left_in_store(self) -> list[tuple[str, str]]:
        return [(name, claim_id) for name, claim_id in self._rows() if claim_id or name[len(_ITEMS) :] not in self.dead]

    def _rows(self) -> list[tuple[str, str]]:
        return [row for row in super()._left_in_store() if row[0].startswith(_ITEMS)]

    # -- the programs ---------------------------------------------------------------------------------------------

    def not_acquired(self, who: object, session: SimSession) -> None:
        asks = self.attempts[who].asks
        super().not_acquired(who, session)
        self._are_given_back([ask.request.claim_id for ask in asks], session)

    def _are_given_back(self, claims: list[str], session: SimSession) -> None:
        """These items are in nobody's batch, or in one whose block is over: soon they are free.

        Who is interrupted may keep a lease; of items nobody has got the batch.
        """
        if self._sure() and not session.closed:
            self.world.at(self.world.now + self.slack_s, self._all_given_back, claims, session, self.world.now)

    def _all_given_back(self, claims: list[str], session: SimSession, since: float) -> None:
        if self._revived_at.get(session, 0.0) > since:  # and its lane was busy with that
            self.world.at(self.world.now + self.slack_s, self._all_given_back, claims, session, self.world.now)
            return
        left = {claim_id for _, claim_id in self._left_in_store() if claim_id and not self.claims[claim_id].late}
        for claim_id in left.intersection(claims):
            work = self.works.get(claim_id)
            if work is None:
                self.world.broken(f"P9 the take of {claim_id} is over, and it still holds the item")
            elif work.tenure.hold.state != LOST:  # (who was at work may hold on to what is lost)
                self.world.broken(f"P9 the block of {claim_id} is over, and it still holds the item")

    def has_batch(
        self, who: object, session: SimSession, batch: BatchFacts[str], keys: list[str], limit: int | None
    ) -> list[Work]:
        """A take of these returned this."""
        attempt = self._over(who, session)
        items = batch._items  # and no code of dibs runs here: nothing is interrupted
        had = {item._hold.claim_id for item in items}
        others = [ask for ask in attempt.asks if ask.request.claim_id not in had]
        for ask in others:
            self._withdrawn(attempt.process, session, ask)
        self._are_given_back([ask.request.claim_id for ask in others], session)
        works = []
        for item in items:
            work = Work(item, self._given(attempt.process, session, item._hold, 0.0, []))
            works.append(work)
            self.works[work.tenure.claim_id] = work
            if work.tenure.stillborn:  # and the store may have been told so before anybody had the item
                self.releasing(work.tenure)
            if item._try is not None:
                self._tried(work, item._try.claim_id, item._try.tries)
            elif self.max_tries is not None and self._is_held(work.tenure):
                self.world.broken(f"tries: {work.key} is handed out, and was not counted")
        won = [item._value for item in items]
        all_told = [*won, *batch.busy, *batch.stale]
        asked = keys if limit is None else [key for key in keys if key in all_told]
        if sorted(all_told) != sorted(asked) or (limit is not None and len(won) > limit):
            self.world.broken(f"batch: of {keys}, limit {limit}, it has {won}, {batch.busy} and {batch.stale}")
        return works

    def _is_held(self, tenure: Tenure) -> bool:
        held = tenure.hold.state == HELD and tenure.process.clock.boot() < tenure.hold.trusted_until
        return held and self._counts(tenure)

    def _tried(self, work: Work, claim_id: str, tries: int) -> None:
        work.tries = tries
        work.tried = claim_id
        self.tried[claim_id] = work
        if self.max_tries is None or tries > self.max_tries:
            self.world.broken(f"tries: {work.key} is handed out for the {tries}th of {self.max_tries} tries")
        tally = self.tallies.get(work.key)
        if not self._is_held(work.tenure):
            return
        if work.key not in self.late and tally != (claim_id, tries):
            self.world.broken(f"tries: {work.key} is handed out as try {tries} of {claim_id}, counted is {tally}")
        self.late.discard(work.key)

    @contextmanager
    def reviving(self, session: SimSession) -> Iterator[None]:
        """Around a revival, which may keep the lane of its client for much longer than one call."""
        self._revivals[session] += 1
        self._revived_at[session] = math.inf
        try:
            yield
        finally:
            self._revivals[session] -= 1
            if not self._revivals[session]:
                self._revived_at[session] = self.world.now

    def told_dead(self, key: str, tries: int) -> None:
        """An item is in the list of the dead."""
        if self.max_tries is None or tries < self.max_tries:
            self.world.broken(f"tries: {key} is said to be dead after {tries}")

    def ending(self, work: Work, how: str) -> None:
        """An item is about to end, as its program says; what was said first counts."""
        if not work.hows:
            work.hows = {how}
        self.releasing(work.tenure)

    def all_ending(self, works: list[Work]) -> None:
        """The block of their batch is about to end."""
        for work in works:
            self.ending(work, "left")
        if works:
            self._are_given_back([work.tenure.claim_id for work in works], works[0].tenure.session)

    def told_item_lost(self, work: Work) -> None:
        """The program heard from an item that it had been lost."""
        work.told_lost = True

    def told_ended(self, work: Work, item: Item[str]) -> None:
        """It was said how an item ends, and nothing was raised."""
        if item._is_left() and not work.tenure.session.closed:
            self.world.broken(f"batch: {work.key} has ended, as its program was told, and it is left")

    def batch_over(self, batch: BatchFacts[str], works: list[Work]) -> None:
        """The block of a batch was left without an error."""
        lost, left, failed = set(batch.lost), set(batch.left), set(batch.failed)
        if lost & left or lost & failed or left & failed:
            self.world.broken(f"batch: {lost} are lost, {left} left, {failed} failed")
        for work in works:
            hold = work.tenure.hold
            how = "lost" if work.key in lost else "left" if work.key in left else "fail" if work.key in failed else ""
            if work.told_lost and how != "lost":
                self.world.broken(f"batch: {work.key} was told to be lost, and it is {how or 'finished'}")
            closed = work.tenure.session.closed  # that has given back what was not finished by then
            expected = {"" if each in ("done", "skip") else each for each in work.hows}
            if how not in {"lost", *expected} and not ((closed or work.interrupted) and how == "left"):
                self.world.broken(f"batch: {work.key} was {work.said()}, and it is {how or 'finished'}")
            confirmed, gone = work.tenure.claim_id in self.released, work.tenure.claim_id in self._gone
            if (gone and how != "lost" and not closed) or (confirmed and how == "lost" and hold.state != LOST):
                self.world.broken(f"batch: {work.key} is {how or 'finished'}, and the store says {confirmed}")
            if how != "lost":
                self.release_returned(work.tenure, confirmed)


def _is_tally(request: Request) -> bool:
    return request.name.startswith(_TALLIES)


def _tries(info: str | None) -> int:
    return int(json.loads(info or "{}")["tries"])
