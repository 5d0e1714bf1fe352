"""Who waits for a name on ZooKeeper: coming, standing, going, and the signs of life of those ahead.

A waiter is an ephemeral sequential node, named by its claim (and by how many permits it waits for), whose number is its
place. The line decides who asks first, never who holds. It is the same for locks and for names with permits; who may
pass whom is decided by those who grant.
"""

from __future__ import annotations

from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
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

# So many of the waiters before an asker are looked at together for signs of life; more of them while these are dead.
SIGNS_MAX = 64
# The most that one look takes: when so many are dead, they are deleted, and those behind them are the next look's. (Who
# looks for longer than the grace would itself be taken for dead.)
LOOK_MAX = 16 * SIGNS_MAX
# Otherwise the dead are deleted together with a grant, as many as fit into a request (jute.maxbuffer, 1 MB as shipped).
DELETE_BYTES_MAX = 500_000
# Of each deletion, besides its path.
DELETION_BYTES = 20
# How exactly it is known when a waiter has asked.
HEARD_S = 0.1
# After the grace of a free name, a waiter behind others asks again at least this often, to see signs of life in time.
LOOK_AGAIN_S = 0.7
# Names whose lines are remembered; beyond it the observations begin anew, which can only delay a line.
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
        """How long a free lock is kept for those before the asker; and if that is not more than 0, the dead there."""
        pool = self._pool
        if len(pool.fronts) > MEMORY_MAX:
            pool.fronts.clear()
        free_since: float | None = None
        dead: list[Sign] = []
        for first in range(0, len(ahead), SIGNS_MAX):
            if first >= LOOK_MAX:
                yield from self._clear(session, dead)
                return LOOK_AGAIN_S, []
            seen = yield from self._seen(session, ahead[first : first + SIGNS_MAX])
            if not seen:
                continue
            now = boot_now()
            if free_since is None:
                # While the same node is at the front nobody of the line was granted the name: it was free all the time.
                free_since = pool.fronts.setdefault(seen[0][1].czxid, now)
            kept_for = max(free_since, *(asked_at for *_, asked_at in seen)) + LINE_GRACE_S - now
            if kept_for > 0:
                return min(kept_for, LINE_GRACE_S if now < free_since + LINE_GRACE_S else LOOK_AGAIN_S), []
            dead += [Sign(waiter, now - asked_at, stat.version) for waiter, stat, asked_at in seen]
        return 0.0, dead

    def signs(self, name: str, session: Session, ahead: Sequence[Waiter], room: int) -> Flights:
        """A ``Sign`` of each of these who is there. Those seen for the first time may have asked just now.

        So may those who were not looked at: it is not gone on when those found alive want more than ``room``, the
        permits there are besides those of the asker, or are the greater part.
        """
        found: list[Sign] = []
        alive = wanted = 0
        for first in range(0, len(ahead), SIGNS_MAX):
            if first >= LOOK_MAX:
                yield from self._clear(session, [sign for sign in found if sign.silent_for >= LINE_GRACE_S])
            if (first and wanted > room) or 2 * alive > first or first >= LOOK_MAX:
                return found + [Sign(waiter, 0.0, None) for waiter in ahead[first:]]
            seen = yield from self._seen(session, ahead[first : first + SIGNS_MAX])
            now = boot_now()
            for waiter, stat, asked_at in seen:
                own = self._pool.places.get((name, unquote(waiter.claim)))
                if own is not None and own.path == waiter.path:
                    asked_at = own.asked_at  # noqa: PLW2901 - of this process, which knows
                found.append(Sign(waiter, now - asked_at, stat.version))
                if now - asked_at < LINE_GRACE_S:
                    alive, wanted = alive + 1, wanted + (waiter.take or 1)
        return found

    def _seen(self, session: Session, some: Sequence[Waiter]) -> Flights:
        """Those of these who are there, with the stats of their nodes and when they asked, as far as is known here."""
        pool = self._pool
        stats = yield [session.exists(waiter.path) for waiter in some]
        zxid, now = session.zxid, boot_now()  # in this order
        seen = [
            (waiter, stat, next((heard_at for heard_at, heard in pool.heard if stat.mzxid <= heard), now))
            for waiter, stat in zip(some, stats, strict=True)
            if stat is not None
        ]
        # Noted for later looks, and no more of it than tells who has been silent for the grace.
        heard = pool.heard
        if len(heard) > 1 and heard[-2][0] > now - HEARD_S:
            heard = heard[:-1]
        while len(heard) > 1 and heard[1][0] <= now - LINE_GRACE_S:
            heard = heard[1:]
        pool.heard = (*heard, (now, zxid))
        return seen

    def _clear(self, session: Session, dead: Sequence[Sign]) -> Flights:
        """Take these from the line, as a grant would; should one of them ask meanwhile, none."""
        operations = self.clearing(dead)
        if operations:
            yield [session.multi(operations)]

    def clearing(self, dead: Sequence[Sign]) -> list[Operation]:
        """What deletes these, if none of them asks meanwhile; as many as one transaction takes."""
        operations: list[Operation] = []
        size = 0
        for sign in dead:
            size += len(sign.waiter.path) + DELETION_BYTES
            if size > DELETE_BYTES_MAX:
                break
            operations.append(("delete", sign.waiter.path, sign.version))
        return operations

    # -- coming, standing, going ----------------------------------------------------------------------------------

    def enter(
        self, request: Acquire, session: Session, number: int | None, *, new: bool, behind: Sequence[Waiter] = ()
    ) -> Flights:
        """Make the waiter's node; a waiter that had a place before gets that one.

        ``behind`` is who stands right behind that, and may have been the first. It finds its node changed then.
        """
        line = self._nodes.line(request.name)
        node = waiter_node(line, request.claim_id, number, request.take if request.permits else 0)
        operations: list[Operation] = [("create", line, b"", self._acl)] if new else []
        operations += [("set_data", waiter.path, b"") for waiter in behind]
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
                _signed(place, (yield flight))
            return True
        place.armed = target
        # Also where there are no children: such a watch rings for the end of a node, and not for a sign of life.
        *signs, still = yield [*flight, session.children(target, pool.alarm(place))]
        _signed(place, signs)
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


def _signed(place: Place, answers: Sequence[Any]) -> None:
    """Its signs of life have changed its node."""
    for done in answers:
        if type(done) is list:
            place.version = done[0].version
