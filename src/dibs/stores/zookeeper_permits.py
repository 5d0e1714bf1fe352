"""Names with permits on ZooKeeper: semaphores, and locks for readers and writers.

::

    /dibs/lease/default:shard%2F1,1                   the ledger: how many permits and grants, who was granted which
    /dibs/lease/default:shard%2F1,1/i-5f0c…           named after the ledger's seal, so that no two ledgers are one
    /dibs/lease/default:shard%2F1,1/c-4c53…-7         ephemeral, named by the claim: it holds; data: holder, info, ttl
    /dibs/line/default:shard%2F1/w-91aa…-3,2,0000000004   it waits for two permits

The ledger stands where the directory of a lock would stand, so a name is one or the other, and a lock is granted in one
transaction that fails where there is a ledger.

*Why a grant is atomic.* Whoever decides reads the ledger and then the nodes of those who hold, decides
(``dibs.stores.permits``), and writes the ledger and its own node in one transaction, which fails unless the ledger is
the very one that was read: the same seal, the same version. So between the reading and the grant nobody else was
granted anything; those who ended meanwhile only make room. A decision that lost begins anew; another one has won.

*Who holds* is who has a node. It is ephemeral, in a session as long as the ttl, renewed, released, broken, moved and
ended as the node of a lock's holder is (``zookeeper``, ``zookeeper_pool``), without a look at the ledger. What the
ledger says of somebody who has no node any more is dropped by the next grant.

*The token* is the zxid that made the ledger and the number of grants before this one. It rises with every grant; and as
each grant is a transaction, it never exceeds the grant's own zxid, so that whatever is made at the name's place later,
a lock or another ledger, begins above it.

*The line* is that of locks. Everybody in it writes to its node when it asks, as it counts as alive only if it has asked
within ``LINE_GRACE_S``. Only the first watches those who hold, each of the others the one before it: a release wakes
one, and whoever is granted and leaves the line the next.

The ledger stays when nobody holds, as it keeps the limit, until a purge.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import boot_now
from dibs.errors import StoreUnavailable
from dibs.store import LINE_GRACE_S, Acquire, Granted, Held, Mismatch, StoredLease, Transfer
from dibs.stores.permits import Grant as Decision
from dibs.stores.permits import decide
from dibs.stores.zookeeper_ledger import Entry, View, ledger_of, seal_node, told_of, written
from dibs.stores.zookeeper_line import Line, Sign
from dibs.stores.zookeeper_link import ABSENT, No, Session
from dibs.stores.zookeeper_nodes import BROKEN, Nodes, claim_of, holder_node, quoted, unbroken, unpacked
from dibs.stores.zookeeper_pool import Grant, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline
    from dibs.stores.zookeeper_link import Flights, Operation
    from dibs.stores.zookeeper_renewals import Renewals

# How often one request decides anew because others were faster. Each time one of them was granted what it asked for.
TRIES = 64
# Who has fewer waiters than this before it looks whether they are alive also while there is nothing to be had, so that
# those who die then are passed as soon as there is.
FRONT = 4
# Of so many of those who hold it is looked at when they end, for who is refused.
HOLDERS_SEEN_MAX = 16
# Ledgers that are remembered; beyond it everything is forgotten, which costs a look each.
MEMORY_MAX = 1000
# More holders than this no ledger has: it must fit into a request (jute.maxbuffer, 1 MB as shipped).
HOLDERS_MAX = 10_000


class Known:
    """What a ledger was after a grant of this store, for the next."""

    def __init__(self, data: bytes, stat: Any, nodes: set[str], *, alone: bool) -> None:
        self.data = data
        self.stat = stat
        #: Of those who hold, as far as they have not given back through this store.
        self.nodes = nodes
        #: Nobody else decided since the grant before it, and nobody waited: it is worth trying.
        self.alone = alone


class Permits:
    """What is particular to names with permits; the rest of their verbs are those of locks."""

    def __init__(
        self,
        pool: Pool,
        nodes: Nodes,
        line: Line,
        make_nodes: Callable[[Session, str], Flights],
        renewals: Renewals,
    ) -> None:
        self._pool = pool
        self._nodes = nodes
        self._line = line
        self._acl = pool.settings.acl
        self._make_nodes = make_nodes
        self._renewals = renewals
        #: By the path of the ledger.
        self._known: dict[str, Known] = {}

    # -- acquire --------------------------------------------------------------------------------------------------

    def acquire(self, request: Acquire, deadline: Deadline) -> Flights:
        """The outcome; None where others were faster every time."""
        pool = self._pool
        permit = self._nodes.permit(request.name)
        path = holder_node(permit, request.claim_id)
        known = pool.grants.get(path)
        if known is not None and known.told is not None:
            if not known.of_ledger:
                return Mismatch(0)
            if (yield from self._renewals.extend(known, request.ttl, deadline)):
                return (yield from self._keep(known, request.take))
            if pool.grants.get(path) is known and not known.session.over:
                return known.refusal()
        place = pool.places.get((request.name, request.claim_id))
        if place is not None:
            place.asked_at = boot_now()
        with pool.asking(request, permit, path, deadline, of_ledger=True) as grant:
            outcome = yield from self._try(request, grant, deadline)
        if grant.told is None and pool.grants.get(path) is grant:
            del pool.grants[path]
        return outcome

    def _try(self, request: Acquire, grant: Grant, deadline: Deadline) -> Flights:
        """Look, decide and write, or line up, until it is decided."""
        session, permit, line = grant.session, grant.permit, self._nodes.line(request.name)
        claim = quoted(request.claim_id)
        for number in range(TRIES):
            answers = self._guess(request, permit) if number == 0 else None
            guessed = answers is not None
            if answers is None:
                answers = yield [session.get(permit), session.children(permit), session.children(line)]
            view = View(request, line, answers)
            if view.changing():
                continue
            if view.is_lock():
                return Mismatch(0)
            if f"c-{claim}" in view.held:
                outcome = yield from self._again(request, grant, answers[0], view.held[f"c-{claim}"], deadline)
                if outcome is not None:
                    return outcome
                continue
            ahead = view.line.ahead
            signs = [Sign(waiter, 0.0, None) for waiter in ahead]
            room = view.left(request.permits) - request.take
            if ahead and (room >= 0 or len(ahead) < FRONT):
                signs = yield from self._line.signs(request.name, session, ahead, room)
            decision = decide(view.state(signs), request._replace(claim_id=claim, ticket=None))
            if guessed and not isinstance(decision, Decision):
                continue  # it has to be looked at
            if isinstance(decision, Mismatch):
                return decision
            if isinstance(decision, Decision):
                if f"k-{claim}" in view.held or len(view.held) >= HOLDERS_MAX:
                    return Held(None, view.stat.czxid, 0.0, LINE_GRACE_S)
                if (yield from self._grant(request, grant, view, decision, signs)):
                    return grant.told
                self._known.pop(permit, None)
                continue
            held = yield from self._refused(request, session, permit, view, decision, signs)
            if held is not None:
                return held
        return None

    def _again(self, request: Acquire, grant: Grant, there: Any, entry: Entry, deadline: Deadline) -> Flights:
        """What becomes of a claim that holds; None where its node was not there, or has changed.

        Granted before, and the answer was lost; or granted to this claim through another client.
        """
        pool, path = self._pool, grant.path
        (mine,) = yield [grant.session.get(path)]
        if type(mine) is tuple and mine[0].startswith(BROKEN):
            words = unpacked(unbroken(mine[0], 0)[0])
            told = told_of(entry, there[1], words, mine[1])
            return Held(words["holder"], told.fencing_token, told.acquired_at, LINE_GRACE_S)
        found = self._renewals.found(grant, request.ttl, there, mine)
        if found is None:
            return None
        pool.grants[path] = found
        if (yield from self._renewals.extend(found, request.ttl, deadline)):
            return (yield from self._keep(found, request.take))
        pool.grants[path] = grant
        return None

    def _refused(
        self, request: Acquire, session: Session, permit: str, view: View, decision: Held, signs: Sequence[Sign]
    ) -> Flights:
        """Line up, or show there that it still asks, if it wants to wait; None where it has to be looked at anew."""
        assert view.ledger is not None
        if view.ledger.permits != request.permits:
            (done,) = yield [session.multi(written(permit, view.after(request.permits), view.stat.version))]
            if type(done) is No:
                return None
        own = view.line.own
        if request.wake is not None and own is None:
            yield from self._line.enter(request, session, view.line.number, new=not view.line.there)
            return None
        if request.wake is not None and own is not None and own.take != request.take:
            yield from self._line.change(request, session, own)
            return None
        held = yield from self._refusal(session, permit, decision, view, signs)
        if request.wake is None or own is None:
            return held
        alone, seen = not view.line.others, view.nodes
        stands = yield from self._line.stand(request, session, own, view.line.ahead, alone=alone, sign=True, seen=seen)
        return held._replace(ticket=own.number + 1) if stands else None

    def _guess(self, request: Acquire, permit: str) -> list[Any] | None:
        """What a look would tell if nobody else had decided since; the transaction finds out whether it is so.

        Only when everybody who held has given back, through this store: so nobody holds, as long as it is so.
        """
        known = self._known.get(permit)
        if known is None or not known.alone or known.nodes or request.ticket is not None:
            return None
        return [(known.data, known.stat), [], No(ABSENT)]

    def ended(self, permit: str, claim_id: str) -> None:
        """The claim has given its permits back."""
        known = self._known.get(permit)
        if known is not None:
            known.nodes.discard(f"c-{quoted(claim_id)}")

    def _grant(self, request: Acquire, grant: Grant, view: View, decision: Decision, signs: Sequence[Sign]) -> Flights:
        """Write a decision; False when it no longer holds."""
        session, permit, line = grant.session, grant.permit, self._nodes.line(request.name)
        ledger = view.after(decision.permits)
        entry = Entry(decision.slot, decision.take, ledger.grants)
        ledger = ledger._replace(grants=ledger.grants + 1, held=ledger.held | {quoted(request.claim_id): entry})
        data = ledger.packed()
        operations: list[Operation] = []
        if view.ledger is not None:
            operations += written(permit, ledger, view.stat.version)
        else:
            # (What a lock's dead holder left has no nodes in it, or the transaction fails.)
            operations += [("delete", permit)] if view.stat is not None else []
            operations.append(("create", permit, data, self._acl))
            operations.append(("create", seal_node(permit, ledger.seal), b"", self._acl))
            operations.append(("set_data", permit, data))  # its answer tells the zxid and the time
        operations.append(("create", grant.path, grant.text(request.ttl), self._acl, True))
        dead = [sign for sign in signs if sign.version is not None and sign.silent_for >= LINE_GRACE_S]
        cleared = self._line.clearing(dead)
        operations += cleared
        if view.line.own is not None:
            operations.append(("delete", view.line.own.path))
        elif not view.line.there:
            # Nobody may be waiting, also where this server does not know of it yet: the line can be made.
            operations += [("create", line, b"", self._acl), ("delete", line)]
        (done,) = yield [session.multi(operations)]
        if type(done) is No:
            if done.why == ABSENT and operations[done.at][0] == "create":
                yield from self._make_nodes(session, "the nodes of dibs are missing, and this login may not")
            return False
        if session.over:
            raise StoreUnavailable("ZooKeeper: the session expired while permits were granted in it")
        stat = next(result for result in done if hasattr(result, "czxid"))
        now = boot_now()
        grant.take, grant.version = decision.take, 0
        grant.words = {**grant.words, "at": stat.mtime / 1000}
        grant.told = Granted(stat.czxid + entry.number, stat.mtime / 1000, entry.slot)
        grant.until = now + request.ttl
        self._pool.server_ahead_s = stat.mtime / 1000 - now
        if len(self._known) >= MEMORY_MAX:
            self._known.clear()
        last = self._known.get(permit)
        alone = last is not None and view.stat is not None and last.stat.version == view.stat.version
        nodes = {*view.held, f"c-{quoted(request.claim_id)}"}
        self._known[permit] = Known(data, stat, nodes, alone=alone and not view.line.there)
        self._line.left(request, session, alone=view.line.there and len(view.line.others) == len(cleared))
        return True

    def _keep(self, grant: Grant, take: int) -> Flights:
        """Give back the permits above ``take``, if any; None where others were faster every time, or it has ended."""
        session, permit, claim = grant.session, grant.permit, claim_of(grant.path)
        for _ in range(TRIES):
            if take >= grant.take:
                return grant.told
            (there,) = yield [session.get(permit)]
            ledger = None if type(there) is No else ledger_of(there[0])
            entry = None if ledger is None else ledger.held.get(claim)
            if ledger is None or entry is None:
                break
            less = min(take, entry.take)
            ledger.held[claim] = entry._replace(take=less)
            # (While it holds: another grant to the same claim might have been for less.) A node that comes and goes
            # rings for whoever waits first.
            ring = f"{permit}/r-{claim}"
            rings: list[Operation] = [("create", ring, b"", self._acl), ("delete", ring)]
            operations = [*written(permit, ledger, there[1].version), ("check", grant.path, -1), *rings]
            (done,) = yield [session.multi(operations)]
            if type(done) is list:
                grant.take = less
            elif done.why == ABSENT:
                break
        return None

    def transfer(self, request: Transfer, grant: Grant, source: str, there: Any, held: Any) -> Flights:
        """Give what the node at ``source`` holds to a grant; False when it changed, None when it holds nothing."""
        session, permit = grant.session, grant.permit
        ledger = ledger_of(there[0])
        entry = None if ledger is None else ledger.held.pop(claim_of(source), None)
        if ledger is None or entry is None or entry.slot != request.slot:
            return None
        moved = entry._replace(number=ledger.grants)
        after = ledger._replace(grants=ledger.grants + 1, held=ledger.held | {claim_of(grant.path): moved})
        # (A new node writes its words as those of a ledger's holder.)
        grant.of_ledger = True
        operations = [
            *written(permit, after, there[1].version),
            ("delete", source, held.version),
            ("create", grant.path, grant.text(request.ttl), self._acl, True),
        ]
        (done,) = yield [session.multi(operations)]
        if type(done) is No:
            return False
        if session.over:
            raise StoreUnavailable("ZooKeeper: the session expired while permits were granted in it")
        self._known.pop(permit, None)
        stat, now = done[1], boot_now()
        grant.take, grant.version = moved.take, 0
        grant.words = {**grant.words, "at": stat.mtime / 1000}
        grant.told = Granted(stat.czxid + moved.number, stat.mtime / 1000, moved.slot)
        grant.until = now + request.ttl
        self._pool.server_ahead_s = stat.mtime / 1000 - now
        return True

    def _refusal(self, session: Session, permit: str, decision: Held, view: View, signs: Sequence[Sign]) -> Flights:
        """Who has it, and for how long, as far as it can be told."""
        if decision.holder is None:
            # Kept for those ahead: of them those who do not ask are passed.
            patience = [LINE_GRACE_S - sign.silent_for for sign in signs if sign.silent_for < LINE_GRACE_S]
            return decision._replace(free_in=max(patience, default=LINE_GRACE_S))
        leases = yield from self.stored(
            session, permit, "", dict(list(view.held.items())[:HOLDERS_SEEN_MAX]), view.stat
        )
        if not leases:
            return decision._replace(free_in=0.0)  # they ended just now
        first = min(leases, key=lambda lease: lease.expires_in)
        return Held(first.holder, first.fencing_token, first.acquired_at, first.expires_in, None, decision.ahead)

    # -- what operators see and do --------------------------------------------------------------------------------

    def stored(
        self, session: Session, permit: str, name: str, held: dict[str, Entry], stat: Any, waiting: int = 0
    ) -> Flights:
        """The leases behind these entries of a ledger, in the order of their slots."""
        answers = yield [session.get(f"{permit}/{node}") for node in held]
        leases = []
        for entry, mine in zip(held.values(), answers, strict=True):
            if type(mine) is not No:
                text, renewed_at_ms = unbroken(mine[0], mine[1].mtime)
                words = unpacked(text)
                told = told_of(entry, stat, words, mine[1])
                leases.append(
                    StoredLease(
                        name,
                        entry.slot,
                        words["holder"],
                        told.fencing_token,
                        told.acquired_at,
                        *self._pool.ends(renewed_at_ms / 1000, words["ttl"]),
                        words["info"],
                        waiting,
                        entry.take,
                    )
                )
        return sorted(leases)

    def idle(self, session: Session, permits: Sequence[str]) -> Flights:
        """The transactions that delete those of these nodes which are ledgers that nobody needs."""
        answers = yield [session.get(permit) for permit in permits]
        found: list[tuple[str, list[Operation]]] = []
        for permit, there in zip(permits, answers, strict=True):
            ledger = None if type(there) is No else ledger_of(there[0])
            if ledger is not None:
                # (Fails when somebody decides meanwhile, or holds.)
                seal: Operation = ("delete", seal_node(permit, ledger.seal))
                found.append((self._nodes.line_of(permit), [seal, ("delete", permit, there[1].version)]))
        lines = yield [session.children(line) for line, _ in found]
        return [deletion for (_, deletion), names in zip(found, lines, strict=True) if type(names) is No or not names]
