"""A batch: the items that one take has won, and what becomes of each of them.

An item is in one of these states, and leaves the first only once:

* *left*: won and not finished. It is held until the deadline, which is common to the batch, or renewed with it;
* *finished*: by ``done()``, ``fail()`` or ``skip()``, or because the loop over the batch moved on. Its release is on
  its way, and nobody waits for it until the batch ends;
* *given back*: it was left when the batch ended, or ``verify`` found it stale;
* *lost*: it was not held any more when it was to be worked, finished, or given back.

Nothing is remembered of an item that was finished: that it need not be done again is for the caller's data to say. Only
how often it was tried in vain is, where tries count (``dibs.tries``).
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress

from dibs._typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar
from dibs.door import door_to
from dibs.errors import LeaseLost
from dibs.guarding import converse, release_after_commit
from dibs.hold import HELD, LOST, Finish
from dibs.lease import LeaseFacts
from dibs.names import check_seconds
from dibs.store import Gone, Release
from dibs.tries import error_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from datetime import datetime

    from dibs.door import Door
    from dibs.guarding import Talk
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.tries import Tries, Try

V = TypeVar("V")


class Ends:
    """How the items of one batch end; shared by the batch and its items, so that neither keeps the other alive."""

    __slots__ = ("holds", "lost", "session", "tries")

    def __init__(self, session: Session, tries: Tries | None = None) -> None:
        self.session = session
        self.tries = tries
        #: What was granted, by the keys of its items; without what has ended in a transaction, which waits by itself.
        self.holds: dict[str, Hold] = {}
        #: The keys of what was not held any more when it was to be worked, or ended.
        self.lost: set[str] = set()

    def __reduce__(self) -> NoReturn:
        raise TypeError("claimed items cannot be pickled or copied: this process holds them; give another their keys")

    def release(self, *items: Item[Any]) -> None:
        """Send the releases of items on their way, in one call. The caller starts the lane."""
        if not self.forked():
            self.session.keeper.release_all([item._hold for item in items])
            self.lost.update(item.key for item in items if item._hold.state == LOST)

    def forked(self) -> bool:
        """Whether this is a forked child, which holds nothing of it, and whose lane is its parent's."""
        return self.session.pid != os.getpid()

    def settling(self) -> Steps[None]:
        """Wait until the store has answered to every release, and learn what had been lost by then."""
        if self.forked():
            return
        for key, hold in list(self.holds.items()):
            ask = hold.ending
            # Of what was lost it is known, and where the caller's own transaction is open, the answer waits for that.
            if ask is None or hold.state == LOST or (hold.pins and hold.waits_for_us()):
                continue
            if not ask.settled:
                yield self.session, ask.echo(), None
            # After trouble, Gone may be the trace of a first attempt whose answer was lost.
            if isinstance(ask.outcome, Gone) and not ask.maybe_applied:
                self.lost.add(key)


class Item(LeaseFacts, Generic[V]):
    """One item of a batch, as won: a lease on ``source/key`` with the ``value`` that was given to ``take``."""

    __slots__ = ("_ends", "_key", "_refused", "_try", "_value")

    def __init__(self, session: Session, hold: Hold, name: str, key: str, value: V, ends: Ends) -> None:
        super().__init__(session, hold, name)
        self._key = key
        self._value = value
        self._ends = ends
        ends.holds[key] = hold
        #: Where tries count: this one.
        self._try: Try | None = None
        #: With what a transaction has refused to end it, and nobody has said again how it ends.
        self._refused: str | None = None

    @property
    def key(self) -> str:
        """What tells it from the others of its source."""
        return self._key

    @property
    def value(self) -> V:
        """What was given to ``take``."""
        return self._value

    def done(self, connection: Any = None) -> None:
        """It is finished: free it. Does not wait for the store. May be called twice.

        connection: end it with the transaction that is open there, the caller's own: nobody gets the item before that
        has ended, and its tries are forgotten if it is committed. What the transaction writes and the end of the claim
        are so one: of two who worked the item, only one commits. Once in a transaction, after the work and before the
        commit; what ``lease.guard`` says of connections and errors holds here.

        Raises LeaseLost when it was not held any more, or was given back unfinished (by the end of its batch, or
        ``client.close``): others may have claimed it since. With a connection also when it was finished before, and its
        transaction must be rolled back then.
        """
        if connection is not None:
            door = door_to(connection)
            converse(self._done_in(door), door)
        elif not self._has_ended():
            tries, counted = self._ends.tries, self._try
            self._end_as(Finish() if tries is None or counted is None else tries.done(counted))

    def _done_in(self, door: Door) -> Talk[None]:
        tally = None if self._try is None else Release(self._try.name, self._try.claim_id)
        try:
            yield from release_after_commit(self, door, tally)
            self._hold.finish = self._hold.finish or Finish()
            self._ends.holds.pop(self._key, None)
        except LeaseLost:
            if self._hold.state == LOST:
                self._ends.lost.add(self._key)
            raise
        except BaseException as error:
            self._refused = error_text(error)
            raise

    def skip(self) -> None:
        """It is not this caller's to do: free it, as it was. Does not wait for the store. May be called twice.

        Raises LeaseLost when it was not held any more: others may have claimed it since.
        """
        if not self._given_back:
            self._end(Finish(first=self._hold.first))
            if not self._given_back:  # also by another thread in that moment
                self._check_ended()

    def fail(self, error: BaseException | str | None = None, *, retry_in: Seconds = 0) -> None:
        """It was tried in vain: free it for the next try, and note it in ``batch.failed``. May be called twice.

        Where tries count (``max_tries``), it is dead when this was the last one: nobody gets it until it is revived.
        error: what is told of it in ``claims.dead()``: an exception or a text, of which 300 characters are kept.
        retry_in: seconds for which nobody gets it, this caller included. Does not wait for the store.

        Raises LeaseLost as ``done``.
        """
        limits = self._session.address.capabilities
        keep = check_seconds("retry_in", retry_in, most=limits.ttl_max_s)
        text = error_text(error)
        if self._has_ended():
            return
        tries, counted = self._ends.tries, self._try
        if tries is None or counted is None:
            self._end_as(Finish(keep, failed=True))
        else:
            self._end_as(tries.failed(self._session, counted, keep, text))

    def _has_ended(self) -> bool:
        """Whether its worker has said before how it ends. What others may be at is not finished by saying so late."""
        if not self._given_back:
            return False
        self._check_ended()
        return True

    def _end_as(self, finish: Finish) -> None:
        """End it so, unless another thread has said in the same moment how it ends."""
        self._end(finish)
        self._check_ended()

    def _is_left(self) -> bool:
        """Whether nobody has finished it; it may have been given back."""
        return self._hold.finish is None and self._hold.state != LOST

    def _has_failed(self) -> bool:
        return self._hold.finish is not None and self._hold.finish.failed

    def _was_lost(self) -> bool:
        """Whether it was not held any more when it was to be worked, finished, or given back."""
        return self._key in self._ends.lost

    def _check_ended(self) -> None:
        """Raise LeaseLost unless its worker has said how it ends."""
        if self._hold.finish is not None:
            return
        if self._given_back:  # by the end of its batch, or with its client
            raise LeaseLost(f"{self._name!r} was given back unfinished: others may have claimed it since")
        self._ends.lost.add(self._key)
        raise LeaseLost(self._why())


class BatchFacts(Generic[V]):
    """What was won of what was given, and what became of it."""

    __slots__ = ("__weakref__", "_busy", "_current", "_ends", "_items", "_margin_s", "_rest", "_stale")

    def __init__(self, items: list[Item[V]], busy: list[V], ends: Ends, margin_s: float) -> None:
        self._items = items
        self._rest = deque(items)
        self._current: Item[V] | None = None
        self._ends = ends
        self._margin_s = margin_s
        self._busy = busy
        self._stale: list[V] = []

    def __reduce__(self) -> NoReturn:
        self._ends.__reduce__()

    @property
    def items(self) -> list[Item[V]]:
        """The leases of what was won, for callers that do not iterate."""
        return list(self._items)

    @property
    def won(self) -> list[V]:
        """Of what was given: what this batch claimed, in the order given; without what was stale."""
        return [item.value for item in self._items]

    @property
    def busy(self) -> list[V]:
        """Of what was given: what others hold, and what an operator has paused (``client.pauses()`` says what)."""
        return self._busy

    @property
    def stale(self) -> list[V]:
        """Of what was given: what was won, and given back because ``verify`` did not find it due any more.

        With ``mode="columns"`` also what has no row, and so cannot be claimed.
        """
        return self._stale

    @property
    def left(self) -> list[V]:
        """Of what was won: what is not finished. Once the batch has ended: what was given back unfinished."""
        # The end of a lease may be noticed only when it is given back. (What ``client.close`` gave back is left, too.)
        return [item.value for item in self._items if item._is_left() and not item._was_lost()]

    @property
    def lost(self) -> list[V]:
        """Of what was won: what was not held any more when it was to be worked, finished, or given back."""
        return [item.value for item in self._items if item._was_lost()]

    @property
    def failed(self) -> list[V]:
        """Of what was won: what was freed by ``fail()``."""
        # As above.
        return [item.value for item in self._items if item._has_failed() and not item._was_lost()]

    @property
    def token(self) -> int | None:
        """The greatest fencing token of its items; None of an empty batch.

        A later batch that has won all the items of this one, and perhaps more, has a greater token. Of batches that
        share only some, either may have the greater one: what an item writes is fenced by ``item.fencing_token``.
        """
        return max((item.fencing_token for item in self._items), default=None)

    @property
    def deadline(self) -> datetime | None:
        """When the store lets others have what is not finished by then, by its clock; None of an empty batch."""
        return min((item.expires_at for item in self._items), default=None)

    def remaining(self) -> float:
        """Seconds for which everything that is left can be relied on; 0 when nothing is left, or it is over."""
        return min((item.remaining() for item in self._unfinished()), default=0.0)

    def _unfinished(self) -> list[Item[V]]:
        current = [] if self._current is None else [self._current]
        return [item for item in (*current, *self._rest) if item._hold.state == HELD]

    def _keep_due(self, due: Collection[str]) -> None:
        """Give back what is not due any more, by the keys of what is. Nothing is waited for."""
        stale = [item for item in self._items if item.key not in due]
        if stale:
            self._give_back(stale)  # first: after a Ctrl-C in it all are given back
            self._stale += [item.value for item in stale]
            self._items = [item for item in self._items if item.key in due]
            self._rest = deque(self._items)

    def _give_back(self, items: Iterable[Item[V]]) -> None:
        if self._ends.forked():
            return
        try:
            self._ends.release(*items)
            self._ends.session.lane.start()
        except BaseException:  # Ctrl-C, also in front of the first line of that
            self._ends.session.lane.start()
            raise

    def _finish(self) -> None:
        """Finish the item at hand, if that has not been done. If it was lost, that stands in ``lost``.

        It has failed if a transaction has refused to end it: what was to be committed with its end has been undone.
        """
        item = self._current
        if item is not None:
            with suppress(LeaseLost):
                if item._refused is None:
                    item.done()
                else:
                    item.fail(item._refused)
            self._current = None  # last: after a Ctrl-C it is given back with the rest

    def _move_on(self) -> Item[V] | None:
        """Finish the item at hand; the next one, or None at the end."""
        self._finish()
        while self._rest:
            item = self._rest[0]
            held = item.held  # asked first: ``client.close`` may give it back at any moment
            if item._given_back:  # finished by somebody who did not iterate, say
                self._rest.popleft()
            elif not held:
                self._ends.lost.add(item.key)
                self._rest.popleft()
            elif item.remaining() <= self._margin_s:
                break
            else:
                self._current = item  # first, as above
                self._rest.popleft()
                return item
        return None

    def _ending(self) -> Steps[None]:
        """Give back what is left, in one call, and wait for the answers to every release."""
        # Also those that were lost: nobody is at work on them any more.
        self._give_back([*self._unfinished(), *(item for item in self._items if item._hold.state == LOST)])
        self._current = None
        yield from self._ends.settling()

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._items)} won, {len(self.left)} left, {len(self._busy)} busy>"
