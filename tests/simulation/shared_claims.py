"""Worlds in which threads end items that another thread of their process has claimed, while that works them.

All is checked that is checked of claims. Of threads that say at the same time how an item ends, one is heard; to the
others it is as if they had come a moment later.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from dibs.errors import LeaseLost
from dibs.hold import HELD, RELEASED
from tests.simulation.claim_books import ClaimChecker
from tests.simulation.claims import ClaimProgram, Failed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dibs.batch import Item
    from tests.simulation.claim_books import Work
    from tests.simulation.claims import SimBatch


class SharedClaimProgram(ClaimProgram):
    def _round(self) -> None:
        rand, works = self.world.random, self.host.works
        if not works or rand() < 0.4:
            super()._round()
            return
        self._maybe_interrupt()
        for _ in range(1 + int(3 * rand())):
            if works:
                self._end_anothers(works[int(rand() * len(works))])

    def _end_anothers(self, work: Work) -> None:
        item = work.item
        assert item is not None
        try:
            if self.world.random() < 0.3:
                self._meet(item)
            self._say_of(work, item, implicit=False)
        except Failed:
            self.note("does not end %s", work.tenure.claim_id)
        except LeaseLost as error:
            self.note("is told: %s", str(error))

    def _work_all(self, batch: SimBatch, in_order: bool) -> None:
        with self._known_to_all(batch.works):
            super()._work_all(batch, in_order)

    def _work_on(self, item: Item[str], *, implicit: bool) -> None:
        works = [work for work in self.works if work.item is item and work not in self.host.works]
        with self._known_to_all(works):
            super()._work_on(item, implicit=implicit)

    @contextmanager
    def _known_to_all(self, works: list[Work]) -> Iterator[None]:
        self.host.works += works
        try:
            yield
        finally:
            for work in works:
                self.host.works.remove(work)


class SharedClaimChecker(ClaimChecker):
    ENDS_ALONE = False

    def ending(self, work: Work, how: str) -> None:
        if work.tenure.hold.state == HELD:
            work.hows.add(how)
        super().ending(work, how)

    def told_item_lost(self, work: Work) -> None:
        hold = work.tenure.hold
        if "left" in work.hows or work.tenure.session.closed:
            return  # the end of its batch has given it back unfinished
        super().told_item_lost(work)
        if hold.state == RELEASED and work.tenure.claim_id not in self._gone and not work.interrupted:
            self.world.broken(f"batch: {work.key} was ended by {work.said()}, and another thread was told it was lost")
