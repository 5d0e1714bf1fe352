"""Who waits for a name on ZooKeeper: coming, standing, going, and the signs of life of those ahead.

A waiter is an ephemeral sequential node, named by its claim (and by how many permits it waits for), whose number is its
place. The line decides who asks first, never who holds. It is the same for locks and for names with permits; who may
pass whom is decided by those who grant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from dibs.clock import boot_now
from dibs.store import LINE_GRACE_S
from dibs.stores.zookeeper_link import ABSENT, NOT_EMPTY, No, Session
from dibs.stores.zookeeper_nodes import Nodes, Waiter, quoted, waiter_node, waiters
from dibs.stores.zookeeper_pool import Place, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline
    from dibs.store import Acquire, Release
    from dibs.stores.zookeeper_link import Flights, Operation

# Waiters before an asker that are looked at for signs of life.
SIGNS_MAX = 64
# After the grace of a free name, a waiter behind others asks again at least this often, to see signs of life in time.
LOOK_AGAIN_S = 0.7
# What is remembered of lines; beyond it the observations begin anew, which can only delay a line.
MEMORY_MAX = 10_000


class Sign(NamedTuple):
    """What is known of a waiter that is there."""

    waiter: Waiter
    #: Seconds since it asked, as far as this process has seen.
    silent_for: float
    #: Of its node; None when nobody looked.
    version: int | None


class Line:
    def __init__(self, pool: Pool, nodes: Nodes, make_nodes: Callable[[Session, str], Flights]) -> None:
        self._pool = pool
        self._nodes = nodes
        self._acl = pool.settings.acl
        self._make_nodes = make_nodes

    # -- who is alive ---------------------------------------------------------------------------------------------

    def kept_for(self, session: Session, ahead: Sequence[Waiter]) -> Flights:
        """How long a free lock is kept for those before the asker; not more than 0 when none of them is alive."""
        pool = self._pool
        self._forget()
        stats = yield [session.exists(waiter.path) for waiter in ahead[:SIGNS_MAX]]
        there = [stat for stat in stats if stat is not None]
        if not there:
            return 0.0
        now = boot_now()
        # While the same node is at the front nobody of the line was granted the name: it was free all the time.
        free_since = pool.fronts.setdefault(there[0].czxid, now)
        asked_at = free_since
        for stat in there:
            asked_at = max(asked_at, self._seen(stat, now, free_since))
        kept_for = asked_at + LINE_GRACE_S - now
        return min(kept_for, LINE_GRACE_S if now < free_since + LINE_GRACE_S else LOOK_AGAIN_S)

    def signs(self, name: str, session: Session, ahead: Sequence[Waiter]) -> Flights:
        """A ``Sign`` of each of these who is there. Those seen for the first time may have asked just now."""
        self._forget()
        looked = ahead[:SIGNS_MAX]
        stats = yield [session.exists(waiter.path) for waiter in looked]
        now = boot_now()
        found = []
        for waiter, stat in zip(looked, stats, strict=True):
            if stat is not None:
                asked_at = self._seen(stat, now, now)
                own = self._pool.places.get((name, unquote(waiter.claim)))
                if own is not None and own.path == waiter.path:
                    asked_at = own.asked_at  # of this process, which knows
                found.append(Sign(waiter, now - asked_at, stat.version))
        return found + [Sign(waiter, 0.0, None) for waiter in ahead[SIGNS_MAX:]]

    def _seen(self, stat: object, now: float, first_seen: float) -> float:
        """When the waiter of this node asked, as far as its node has been seen to change."""
        pool = self._pool
        version, changed_at = pool.signs.get(stat.czxid, (stat.version, first_seen))  # type: ignore[attr-defined]
        if version != stat.version:  # type: ignore[attr-defined]
            changed_at = now
        pool.signs[stat.czxid] = stat.version, changed_at  # type: ignore[attr-defined]
        return changed_at

    def _forget(self) -> None:
        for remembered in (self._pool.fronts, self._pool.signs):
            if len(remembered) > MEMORY_MAX:
                remembered.clear()

    # -- coming, standing, going ----------------------------------------------------------------------------------

    def enter(self, request: Acquire, session: Session, number: int | None, *, new: bool) -> Flights:
        """Make the waiter's node; a waiter that was passed over gets the one it had."""
        line = self._nodes.line(request.name)
        node = waiter_node(line, request.claim_id, number, request.take if request.permits else 0)
        operations: list[Operation] = [("create", line, b"", self._acl)] if new else []
        (done,) = yield [session.multi([*operations, ("create", node, b"", self._acl, True, number is None)])]
        if type(done) is No and new and done.at == 0 and done.why == ABSENT:
            yield from self._make_nodes(session, "the nodes of dibs are missing, and this login may not")

    def change(self, request: Acquire, session: Session, own: Waiter) -> Flights:
        """Make the waiter's node say how many permits it wants now, in the place that it has."""
        node = waiter_node(self._nodes.line(request.name), request.claim_id, own.number, request.take)
        yield [session.multi([("delete", own.path), ("create", node, b"", self._acl, True, False)])]

    def stand(
        self,
        request: Acquire,
        session: Session,
        own: Waiter,
        ahead: Sequence[Waiter],
        *,
        alone: bool,
        sign: bool,
        seen: Sequence[str] | None = None,
    ) -> Flights:
        """Watch what is next to change, with a ``sign`` of life if wanted; False when it changed meanwhile.

        That is the node before the own one, or if there is none, the nodes of those who hold; ``seen`` are the ones
        that were there when it was decided that the waiter has to wait.
        """
        pool, key = self._pool, (request.name, request.claim_id)
        place = pool.places.get(key)
        if place is None or place.path != own.path or place.session.over:
            place = pool.places[key] = Place(*key, request.wake or "", own.path, session)
        place.first, place.alone = not ahead, alone
        flight = [session.multi([("set_data", own.path, b"")])] if sign else []
        target = ahead[-1].path if ahead else self._nodes.permit(request.name)
        if place.armed == target:
            if flight:
                yield flight
            return True
        place.armed = target
        # Also where there are no children: such a watch rings for the end of a node, and not for a sign of life.
        *_, still = yield [*flight, session.children(target, pool.alarm(place))]
        if type(still) is not No and (ahead or (set(still) == set(seen) if seen is not None else still)):
            return True
        place.armed = None
        return False

    def left(self, request: Acquire, session: Session, *, alone: bool | None = None) -> None:
        """Its node went with the grant. Nobody waits for the rest: where somebody has come meanwhile, it fails."""
        place = self._pool.places.pop((request.name, request.claim_id), None)
        if (place is not None and place.alone) if alone is None else alone:
            session.multi([("delete", self._nodes.line(request.name))])

    def leave(self, request: Release, deadline: Deadline) -> Flights:
        pool, line = self._pool, self._nodes.line(request.name)
        place = pool.places.pop((request.name, request.claim_id), None)
        session = place.session if place is not None and place.session.connected else pool.any_session(deadline)
        (names,) = yield [session.children(line)]
        if type(names) is No:
            return
        claim = quoted(request.claim_id)
        own: list[Operation] = [("delete", waiter.path) for waiter in waiters(line, names) if waiter.claim == claim]
        if own:
            alone = len(own) == len(names)
            (done,) = yield [session.multi([*own, ("delete", line)] if alone else own)]
            if type(done) is No and done.why == NOT_EMPTY:
                yield [session.multi(own)]
