"""ZooKeeper: a permit is a directory, its holder the one ephemeral node in it, through kazoo.

::

    /dibs/lease/default:digest%2F42,1                 the permit: name and a 1; data: holder, info, ttl
    /dibs/lease/default:digest%2F42,1/c-4c53…-7       ephemeral, named by the claim: it holds
    /dibs/line/default:digest%2F42/w-91aa…-3,0000000004    ephemeral sequential: it waits

*Why a grant is atomic.* Whoever makes the directory and its own node in it, in one transaction, holds the name; a
second cannot make the directory again. A directory without a node is free, because its holder's session has ended: it
is replaced in one transaction as well, which fails when somebody was faster. After a release nothing is left of a name.

*Why nobody harms the next holder.* Renewal and release name the claim's own node and its version, and a path with
another's claim is another path. (A lock whose holders share one path cannot be deleted safely: every node begins with
version 0.) An answer that was lost is found again by the claim in the path. Breaking a lease writes to the holder's
node, so that its next renewal finds another version, and looks.

*The token* is the zxid of the transaction that made the directory: one number for all names, rising for ever, also
across restarts and failovers; renewals do not touch it. *The clock* is the servers' count of a session's time-out, and
no wall clock at all; how leases with ttls of their own fit into sessions is told in ``zookeeper_pool``.

*The line.* Whoever waits makes a sequential node, named by its claim, and watches one thing: the permit when nobody
stands before it, else the node before its own. So a release wakes one waiter, and costs the same however many wait. A
newcomer's transaction makes and deletes the directory of the line, and so fails when there is one. The numbers are
ZooKeeper's and may overflow; they are compared as serial numbers. The line only decides who asks first: a waiter that
has not asked for ``LINE_GRACE_S`` is passed over, as its session may live on long after it. Since when a name is free
and who has asked (it writes to its node then) is what this client has seen; there is no clock to ask.

*Names with permits* have a ledger at the place of that directory: see ``zookeeper_permits``. What is said here of the
holder's node holds for each of theirs.

*Not promised:* two clients may see a waiter pass at slightly different times; a waiter that was passed over while the
line became empty and filled again comes back somewhere in it, not to its old place. While a process is dead but its
session is not over, its names stay taken for up to two and a half ticks more than the ttl.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dibs.clock import boot_now
from dibs.errors import DibsError, InvalidOption, SetupRequired, StoreUnavailable
from dibs.store import (
    ANY_SLOT,
    GONE,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Held,
    Mismatch,
    Outcome,
    Release,
    Renew,
    Renewed,
    Request,
    StoreAddress,
    StoreBusy,
    StoredLease,
    Transfer,
)
from dibs.stores import zookeeper_check
from dibs.stores.zookeeper_ledger import entries, holder_of, ledger_of, told_of
from dibs.stores.zookeeper_line import Line
from dibs.stores.zookeeper_link import ABSENT, SLACK_TICKS, No, Operation, Session, Settings, answer
from dibs.stores.zookeeper_nodes import (
    BROKEN,
    Nodes,
    before,
    broken,
    claim_of,
    holder_node,
    in_order,
    kept_node,
    packed,
    quoted,
    unbroken,
    unpacked,
    waiters,
)
from dibs.stores.zookeeper_permits import Permits
from dibs.stores.zookeeper_pool import FOREVER, Grant, PipeWatch, Pool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ssl import SSLContext
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.stores.zookeeper_link import Flights

TICK_MS_DEFAULT = 2000
# The servers' own default: maxSessionTimeout is this many ticks.
SESSION_MAX_TICKS = 20
# How long a lease may outlast its ttl when its process died: the slack, and the servers' rounding up to a tick.
RESOLUTION_TICKS = SLACK_TICKS + 1
PORT_DEFAULT = 2181
# Verbs under way at once; more of a vector wait for these.
WINDOW = 100
# How often one request looks again because others were faster, before its caller is told to ask again.
TRIES = 8


class ZooKeeperStore:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._nodes = Nodes(pool.settings.root)
        self._acl = pool.settings.acl
        self._line = Line(pool, self._nodes, self._make_nodes)
        self._permits = Permits(pool, self._nodes, self._line, self._make_nodes, self._found, self._extend)
        self._closed = False
        pool.enter()

    @property
    def capabilities(self) -> Capabilities:
        return _capabilities(self._pool.settings)

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        if not requests:
            self._ask(self._pool.any_session(deadline).exists(self._nodes.root), deadline)
            return []
        outcomes: list[Any] = [GONE] * len(requests)
        for numbers in _rounds(requests):
            for first in range(0, len(numbers), WINDOW):
                window = numbers[first : first + WINDOW]
                verbs = [self._verb(requests[number], deadline) for number in window]
                for number, outcome in zip(window, self._fly(verbs, deadline), strict=True):
                    outcomes[number] = outcome
        if None in outcomes:
            if len(outcomes) == 1:
                raise StoreBusy("others were faster every time")
            # Others of the vector were answered, and a release must not be repeated: this one is told to ask again.
            outcomes = [Held(None, 0, 0.0, 0.0) if outcome is None else outcome for outcome in outcomes]
        return outcomes

    def _verb(self, request: Request, deadline: Deadline) -> Flights:
        if type(request) is Acquire:
            if request.permits:
                return self._permits.acquire(request, deadline)
            return self._acquire(request, deadline)
        if type(request) is Renew:
            return self._renew(request, deadline)
        if type(request) is Transfer:
            return self._transfer(request, deadline)
        assert type(request) is Release
        return self._release(request, deadline)

    def _fly(self, verbs: list[Flights], deadline: Deadline) -> list[Any]:
        """Run verbs side by side: the first flight of each is on its way before the first answer is waited for."""
        root = self._nodes.root
        results: list[Any] = [None] * len(verbs)
        under_way: list[tuple[int, Flights, list[Any]]] = []
        try:
            for index, verb in enumerate(verbs):
                _advance(index, verb, None, under_way, results)
            while under_way:
                flights, under_way = under_way, []
                for index, verb, flight in flights:
                    answers: list[Any] | DibsError
                    try:
                        answers = [answer(asked, root, deadline) for asked in flight]
                    except DibsError as error:
                        answers = error  # the verb may know better what it means
                    _advance(index, verb, answers, under_way, results)
        except StoreUnavailable as error:
            # Whatever this one was told: others of the vector may have been done.
            error.maybe_applied = error.maybe_applied or len(verbs) > 1
            raise
        finally:
            for verb in verbs:
                verb.close()
        return results

    def _run(self, verb: Flights, deadline: Deadline) -> Any:
        return self._fly([verb], deadline)[0]

    def _ask(self, asked: Any, deadline: Deadline) -> Any:
        return answer(asked, self._nodes.root, deadline)

    # -- acquire --------------------------------------------------------------------------------------------------

    def _acquire(self, request: Acquire, deadline: Deadline) -> Flights:
        """Try to take the name, look at what is in the way, and line up, until it is had or there is a refusal."""
        pool, ttl = self._pool, request.ttl
        permit = self._nodes.permit(request.name)
        path = holder_node(permit, request.claim_id)
        known = pool.grants.get(path)
        if known is not None and known.of_ledger:
            (there,) = yield [known.session.get(permit)]
            ledger = None if type(there) is No else ledger_of(there[0])
            if ledger is not None:
                return Mismatch(ledger.permits)
        elif known is not None and known.told is not None:
            if (yield from self._extend(known, ttl, deadline)):
                return known.told
            if pool.grants.get(path) is known and not known.session.over:
                # Broken, or its time is over: nobody gets the name before the warden has ended it.
                told, left = known.told, max(0.0, known.until - boot_now())
                return Held(known.words["holder"], told.fencing_token, told.acquired_at, left)
        session = pool.session_for(ttl, deadline)
        # Noted before it is sent, so that the warden ends it, too, when nobody hears that it was granted.
        grant = Grant(permit, path, session, {"holder": request.holder, "info": request.info, "ttl": ttl})
        pool.grants[path] = grant
        try:
            return (yield from self._try(request, grant, deadline))
        finally:
            if grant.told is None and grant.until == FOREVER:
                grant.until = boot_now() + ttl

    def _try(self, request: Acquire, grant: Grant, deadline: Deadline) -> Flights:
        pool, ttl, session, permit, path = self._pool, request.ttl, grant.session, grant.permit, grant.path
        held: Held | Mismatch
        line = self._nodes.line(request.name)
        take: list[Operation] = [
            ("create", permit, b"", self._acl),
            ("create", path, repr(ttl).encode(), self._acl, True),
            ("set_data", permit, packed(grant.words)),  # its answer tells the zxid and the time of the transaction
        ]
        place = pool.places.get((request.name, request.claim_id))
        attempt: list[Operation] | None = None
        if place is not None:
            place.asked_at = boot_now()
            if place.first:
                attempt = [*take, ("delete", place.path)]
        elif request.ticket is None:
            # Nobody may be waiting: a directory that can be made was not there.
            attempt = [("create", line, b"", self._acl), ("delete", line), *take]
        for _ in range(TRIES):
            if attempt is not None:
                (done,) = yield [session.multi(attempt)]
                if type(done) is list:
                    self._granted(grant, next(result for result in done if hasattr(result, "czxid")))
                    self._line.left(request, session)
                    return grant.told
                if done.why == ABSENT and attempt[done.at][0] == "create":
                    yield from self._make_nodes(session, "the nodes of dibs are missing, and this login may not")
                    continue
                attempt = None
            there, mine, names = yield [session.get(permit), session.get(path), session.children(line)]
            ledger = ledger_of(there[0]) if type(there) is tuple else None
            if ledger is not None:
                held = Mismatch(ledger.permits)
                break
            found = self._found(grant, ttl, there, mine)
            if found is not None:
                # Granted before, and the answer was lost; or granted to this claim through another client.
                pool.grants[path] = found
                if (yield from self._extend(found, ttl, deadline)):
                    return found.told
                pool.grants[path] = grant
                continue
            everybody = [] if type(names) is No else waiters(line, names)
            own = next((waiter for waiter in everybody if waiter.claim == quoted(request.claim_id)), None)
            others = [waiter for waiter in everybody if waiter is not own]
            number = own.number if own is not None else request.ticket - 1 if request.ticket else None
            ahead = in_order([w for w in others if number is None or before(w.number, number)])
            ticket = None if own is None else own.number + 1
            if type(there) is tuple and there[1].numChildren > 0:
                seen, stat = unpacked(there[0]), there[1]
                behind = own is not None and bool(ahead)
                held = Held(seen["holder"], stat.czxid, stat.ctime / 1000, seen["ttl"], ticket, behind)
            else:
                kept_for = (yield from self._line.kept_for(session, ahead)) if ahead else 0.0
                if kept_for <= 0:
                    attempt = [("delete", permit), *take] if type(there) is tuple else list(take)
                    attempt += [("delete", waiter.path) for waiter in ([own] if own is not None else []) + ahead]
                    if type(names) is list and len(names) == len(ahead) + (own is not None):
                        attempt.append(("delete", line))
                    continue
                held = Held(None, 0, 0.0, kept_for, ticket, True)
            if request.wake is None:
                break
            if own is None:
                yield from self._line.enter(request, session, number, new=type(names) is No)
                continue
            free = held.holder is None  # then those behind want to know who is alive
            if (yield from self._line.stand(request, session, own, ahead, alone=not others, sign=free)):
                break
        else:
            held = Held(None, 0, 0.0, 0.0, None if place is None else request.ticket, False)
        if pool.grants.get(path) is grant:
            del pool.grants[path]
        return held

    def _granted(self, grant: Grant, stat: Any) -> None:
        """Note what the server told of a new grant."""
        if grant.session.over:
            raise StoreUnavailable("ZooKeeper: the session expired while a lease was granted in it")
        now = boot_now()
        grant.version = 0
        grant.told = Granted(stat.czxid, stat.ctime / 1000)
        grant.until = now + grant.words["ttl"]
        self._pool.server_ahead_s = stat.mtime / 1000 - now

    def _found(self, asked: Grant, ttl: float, there: Any, mine: Any) -> Grant | None:
        """A grant of the claim that this pool knew nothing of, to be extended at once; None where there is none."""
        if type(there) is No or type(mine) is No or mine[0].startswith(BROKEN):
            return None
        ledger = ledger_of(there[0])
        found = Grant(asked.permit, asked.path, asked.session, unpacked((mine if ledger else there)[0]))
        found.told = Granted(there[1].czxid, there[1].ctime / 1000)
        if ledger is not None:
            entry = ledger.held.get(claim_of(asked.path))
            if entry is None:
                return None
            found.of_ledger, found.take = True, entry.take
            found.told = told_of(entry, there[1], found.words, mine[1])
            found.words["at"] = found.told.acquired_at  # which is to be told when its node was moved
        found.until = boot_now() + ttl
        self._owned(found, mine[1])
        return found

    def _owned(self, grant: Grant, stat: Any) -> None:
        """Note in which session the holder's node really is."""
        grant.version = stat.version
        grant.foreign = True
        for session in list(self._pool.sessions.values()):
            if session.id == stat.ephemeralOwner and not session.over:
                grant.session, grant.foreign = session, False

    # -- renew and release ----------------------------------------------------------------------------------------

    def _renew(self, request: Renew, deadline: Deadline) -> Flights:
        pool = self._pool
        permit = self._nodes.permit(request.name)
        path = holder_node(permit, request.claim_id)
        grant = pool.grants.get(path)
        known = grant is not None and grant.told is not None
        if not known:
            session = pool.any_session(deadline)
            there, mine = yield [session.get(permit), session.get(path)]
            grant = self._found(Grant(permit, path, session, {}), request.ttl, there, mine)
        if grant is None or request.slot != grant.told.slot:
            return GONE
        if not known:
            pool.grants[path] = grant
        return (yield from self._extend(grant, request.ttl, deadline)) or GONE

    def _extend(self, grant: Grant, ttl: float, deadline: Deadline) -> Flights:
        """Let a grant last for ``ttl`` from now; None when it is over.

        Always a write, which only the leader and a majority can answer: a follower that was left behind would go on
        answering reads of a session that is over.
        """
        pool, path = self._pool, grant.path
        for _ in range(TRIES):
            if (grant.session.over and not grant.foreign) or boot_now() >= grant.until:
                return None
            stays = not grant.foreign and ttl * 1000 <= grant.session.ttl_ms + 0.5
            session = grant.session.ready(deadline) if stays else pool.session_for(ttl, deadline)
            if grant.version is None:
                (mine,) = yield [session.get(path)]
                if type(mine) is No:
                    return pool.forget(grant)
                if mine[0].startswith(BROKEN):
                    return None
                self._owned(grant, mine[1])
                continue
            lasts = max(ttl, grant.until - boot_now())
            text, words = grant.text(lasts), grant.words
            operations: list[Operation]
            if stays:
                operations = [("set_data", path, text, grant.version)]
            else:
                operations = [("delete", path, grant.version), ("create", path, text, self._acl, True)]
            if ttl > words["ttl"] or not stays:
                words = {**words, "ttl": lasts}
                if not grant.of_ledger:
                    operations.append(("set_data", grant.permit, packed(words)))
                elif not stays:
                    operations.append(("set_data", path, text))  # to be told the time, as of the others
            (done,) = yield [session.multi(operations)]
            if type(done) is No:
                if done.why == ABSENT:
                    return pool.forget(grant)
                grant.version = None  # written by a renewal whose answer was lost, or broken: look
                continue
            stat = done[0] if stays else done[-1]
            if stays and stat.ephemeralOwner != session.id:
                # It was moved by a request whose answer was lost, or by another client.
                self._owned(grant, stat)
                continue
            with pool.mutex:  # the warden may have begun to end it while this was under way
                if session.over or grant.ending is not None or pool.grants.get(path) is not grant:
                    return None
                grant.session, grant.foreign, grant.words = session, False, words
                grant.version = stat.version if stays or grant.of_ledger else 0
                now = boot_now()
                grant.until = max(grant.until, now + ttl)
                pool.server_ahead_s = stat.mtime / 1000 - now
            return Renewed(stat.mtime / 1000 + grant.until - now)
        raise StoreUnavailable("ZooKeeper: others wrote to the same lease all the time")

    def _release(self, request: Release, deadline: Deadline) -> Flights:
        pool = self._pool
        if request.ticket is not None:
            yield from self._line.leave(request, deadline)
        permit = self._nodes.permit(request.name)
        path = holder_node(permit, request.claim_id)
        grant = pool.grants.get(path)
        if grant is not None and (grant.session.over or (grant.told is not None and boot_now() >= grant.until)):
            return GONE
        session = grant.session.ready(deadline) if grant is not None else pool.any_session(deadline)
        version, words, slot, of_ledger = None, {}, 1, False
        if grant is not None and grant.told is not None:
            version, words, slot, of_ledger = grant.version, grant.words, grant.told.slot, grant.of_ledger
        for _ in range(TRIES):
            if version is None:
                there, mine = yield [session.get(permit), session.get(path)]
                if type(there) is No or type(mine) is No:
                    if grant is not None:
                        pool.forget(grant)
                    return GONE
                if mine[0].startswith(BROKEN):
                    return GONE  # and the name stays taken until its time is over
                ledger = ledger_of(there[0])
                of_ledger = ledger is not None
                version, words = mine[1].version, unpacked((mine if of_ledger else there)[0])
                if ledger is not None:
                    entry = ledger.held.get(quoted(request.claim_id))
                    if entry is None:
                        return GONE
                    slot = entry.slot
                    words["at"] = told_of(entry, there[1], words, mine[1]).acquired_at
            if request.slot not in (ANY_SLOT, slot):
                return GONE
            operations: list[Operation] = [("delete", path, version)]
            kept: Grant | None = None
            if request.keep > 0:
                # In a session that outlasts the time, so that it is kept also when this process ends meanwhile.
                session = pool.session_for(max(request.keep, _ttl_min(pool.settings)), deadline, exactly=False)
                node = kept_node(permit, request.claim_id)
                kept_words = {**words, "ttl": request.keep}
                if request.info is not None:
                    kept_words["info"] = request.info
                kept = pool.grants[node] = Grant(permit, node, session, kept_words)
                kept.of_ledger = of_ledger
                operations.append(("create", node, kept.text(request.keep), self._acl, True))
                if not of_ledger:
                    operations.append(("set_data", permit, packed(kept.words)))
            elif not of_ledger:
                operations.append(("delete", permit))
            try:
                (done,) = yield [session.multi(operations)]
            finally:
                if kept is not None:
                    kept.until = boot_now() + request.keep
            if type(done) is list:
                if grant is not None:
                    pool.forget(grant)
                if of_ledger and kept is None:
                    self._permits.ended(permit, request.claim_id)
                return RELEASED
            if kept is not None:
                pool.forget(kept)
            if done.why == ABSENT:
                if grant is not None:
                    pool.forget(grant)
                return GONE
            version = None
        raise StoreUnavailable("ZooKeeper: others wrote to the same lease all the time")

    def _transfer(self, request: Transfer, deadline: Deadline) -> Flights:
        """Put a node of our session in the place of the holder's, in a permit made anew: its zxid is the token."""
        pool, ttl = self._pool, request.ttl
        permit = self._nodes.permit(request.name)
        source, path = holder_node(permit, request.from_claim), holder_node(permit, request.claim_id)
        known, given = pool.grants.get(path), pool.grants.get(source)
        if known is not None and known.told is not None:
            if (yield from self._extend(known, ttl, deadline)):
                return known.told
            pool.forget(known)  # it held once, and may be given it again
        if given is not None and (given.session.over or boot_now() >= given.until):
            return GONE  # its time is over, and the warden about to end it
        session = pool.session_for(ttl, deadline)
        # Noted before it is sent, as for an acquire.
        grant = Grant(permit, path, session, {"holder": request.holder, "info": request.info, "ttl": ttl})
        pool.grants[path] = grant
        try:
            return (yield from self._try_transfer(request, grant, source, deadline))
        finally:
            if grant.told is None and grant.until == FOREVER:
                grant.until = boot_now() + ttl

    def _try_transfer(self, request: Transfer, grant: Grant, source: str, deadline: Deadline) -> Flights:
        pool, session, permit, path, ttl = self._pool, grant.session, grant.permit, grant.path, request.ttl
        for _ in range(TRIES):
            there, mine, held = yield [session.get(permit), session.get(path), session.get(source)]
            if type(there) is tuple and type(mine) is tuple and not mine[0].startswith(BROKEN):
                # Transferred before, and the answer was lost.
                found = self._found(grant, ttl, there, mine)
                if found is None:
                    continue
                pool.grants[path] = found
                return found.told if (yield from self._extend(found, ttl, deadline)) else GONE
            if type(there) is No or type(held) is No or held[0].startswith(BROKEN):
                pool.forget(grant)
                return GONE
            ledger = ledger_of(there[0])
            if (ledger is not None) != bool(request.permits):
                pool.forget(grant)
                return GONE
            if ledger is not None:
                moved = yield from self._permits.transfer(request, grant, source, there, held[1])
                if moved is None:
                    pool.forget(grant)
                    return GONE
                if moved:
                    self._given_away(source)
                    return grant.told
                continue
            operations: list[Operation] = [
                ("delete", source, held[1].version),
                ("delete", permit),
                ("create", permit, b"", self._acl),
                ("create", path, repr(ttl).encode(), self._acl, True),
                ("set_data", permit, packed(grant.words)),
            ]
            (done,) = yield [session.multi(operations)]
            if type(done) is list:
                self._granted(grant, done[-1])
                self._given_away(source)
                return grant.told
        raise StoreUnavailable("ZooKeeper: others wrote to the same lease all the time")

    def _given_away(self, source: str) -> None:
        given = self._pool.grants.get(source)
        if given is not None:
            self._pool.forget(given)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        session = self._pool.any_session(deadline)
        nodes = self._ask(session.children(self._nodes.leases), deadline)
        wanted = []
        for node in [] if type(nodes) is No else nodes:  # nobody has held anything yet
            text, _, one = node.rpartition(",")
            name = unquote(text)
            if one == "1" and first <= name < before:
                wanted.append(name)
        wanted.sort()
        found: list[StoredLease] = []
        for start in range(0, len(wanted), WINDOW):
            seen = [self._stored(session, name) for name in wanted[start : start + WINDOW]]
            found += [lease for leases in self._fly(seen, deadline) for lease in leases]
        return found

    def _stored(self, session: Session, name: str) -> Flights:
        """The leases on a name."""
        permit, line = self._nodes.permit(name), self._nodes.line(name)
        there, nodes, names = yield [session.get(permit), session.children(permit), session.children(line)]
        if type(there) is No or type(nodes) is No or not nodes:
            return []
        waiting = 0 if type(names) is No else len(waiters(line, names))
        ledger = ledger_of(there[0])
        if ledger is not None:
            held = entries(ledger, nodes)
            return (yield from self._permits.stored(session, permit, name, held, there[1], waiting))
        (holder,) = yield [session.get(f"{permit}/{nodes[0]}")]
        if type(holder) is No:
            return []
        words, stat = unpacked(there[0]), there[1]
        _, renewed_at_ms = unbroken(holder[0], holder[1].mtime)
        ends = self._pool.ends(renewed_at_ms / 1000, words["ttl"])
        return [StoredLease(name, 1, words["holder"], stat.czxid, stat.ctime / 1000, *ends, words["info"], waiting)]

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        session = self._pool.any_session(deadline)
        return bool(self._run(self._break(session, self._nodes.permit(name), fencing_token, now), deadline))

    def _break(self, session: Session, permit: str, fencing_token: int, now: bool) -> Flights:
        for _ in range(TRIES):
            there, nodes = yield [session.get(permit), session.children(permit)]
            if type(there) is No or type(nodes) is No or not nodes:
                return False
            ledger = ledger_of(there[0])
            node: str | None = nodes[0]
            if ledger is not None:
                node = holder_of(ledger, there[1], nodes, fencing_token)
            elif there[1].czxid != fencing_token:
                node = None
            if node is None:
                return False
            path = f"{permit}/{node}"
            if now:
                ends = [("delete", path)] if ledger is not None else [("delete", path), ("delete", permit)]
                (done,) = yield [session.multi(ends)]
            else:
                (holder,) = yield [session.get(path)]
                if type(holder) is No:
                    continue
                if node.startswith("k-") or holder[0].startswith(BROKEN):
                    return True
                text = broken(holder[0], holder[1].mtime)
                (done,) = yield [session.multi([("set_data", path, text, holder[1].version)])]
            if type(done) is list:
                return True
        raise StoreUnavailable("ZooKeeper: the lease changed all the time", maybe_applied=False)

    def purge(self, older_than: float, deadline: Deadline) -> int:
        session = self._pool.any_session(deadline)
        return int(self._run(self._purge(session, older_than), deadline))

    def _purge(self, session: Session, older_than: float) -> Flights:
        """Released names leave nothing; names whose holder died leave a directory, and so may a line."""
        (done,) = yield [session.multi([("set_data", self._nodes.leases, b"")])]
        if type(done) is No:
            return 0
        before_ms = done[0].mtime - older_than * 1000  # by the server's clock
        count = 0
        for above in (self._nodes.leases, self._nodes.lines):
            (nodes,) = yield [session.children(above)]
            paths = [] if type(nodes) is No else [f"{above}/{node}" for node in nodes]
            for start in range(0, len(paths), WINDOW):
                window = paths[start : start + WINDOW]
                stats = yield [session.exists(path) for path in window]
                old = [
                    (path, stat)
                    for path, stat in zip(window, stats, strict=True)
                    if stat is not None and stat.mtime <= before_ms
                ]
                deletions = [[("delete", path)] for path, stat in old if not stat.numChildren]
                deletions += yield from self._permits.idle(
                    session, [path for path, stat in old if stat.numChildren == 1]
                )
                answers = yield [session.multi(operations) for operations in deletions]
                count += sum(type(done) is list for done in answers)
        return count

    # -- set up, and check ----------------------------------------------------------------------------------------

    def setup(self, deadline: Deadline) -> None:
        session = self._pool.any_session(deadline)
        self._run(self._make_nodes(session, "this login may not"), deadline)

    def _make_nodes(self, session: Session, may_not: str) -> Flights:
        paths = self._nodes.all()
        there = yield [session.exists(path) for path in paths]
        for path, stat in zip(paths, there, strict=True):
            if stat is None:
                try:
                    yield [session.multi([("create", path, b"", self._acl)])]
                except SetupRequired as refused:
                    raise SetupRequired(
                        f"{may_not} make {path} ({refused}). Let somebody who may run `dibs setup`, or what "
                        "`dibs schema` prints"
                    ) from refused

    def schema(self) -> str:
        login = self._pool.settings.login
        lines = ["# for zkCli.sh"]
        if login:
            lines.append(f"addauth digest {login.partition(':')[0]}:PASSWORD")
        lines += [f'create {path} ""{" auth::cdrwa" if login else ""}' for path in self._nodes.all()]
        return "\n".join(lines) + "\n"

    def check(self, deadline: Deadline) -> list[Finding]:
        self.setup(deadline)
        session = self._pool.any_session(deadline)
        acls = self._ask(session.acls(self._nodes.leases), deadline)
        return zookeeper_check.findings(session, self._pool.settings, [] if type(acls) is No else acls[0])

    # -- the rest -------------------------------------------------------------------------------------------------

    def watch(self, address: str, deadline: Deadline) -> PipeWatch:
        return self._pool.listen(address)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.leave()


def _advance(index: int, verb: Flights, answers: Any, under_way: list[Any], results: list[Any]) -> None:
    """Let a verb take its answers, and note its next flight or its outcome."""
    try:
        flight = verb.throw(answers) if isinstance(answers, DibsError) else verb.send(answers)
        under_way.append((index, verb, flight))
    except StopIteration as end:
        results[index] = end.value


def _rounds(requests: Sequence[Request]) -> list[list[int]]:
    """The places of the requests, in rounds in each of which every name is asked for once."""
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for index, request in enumerate(requests):
        number = seen.get(request.name, 0)
        seen[request.name] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds


# -- the address ---------------------------------------------------------------------------------------------------


def _ttl_min(settings: Settings) -> float:
    return settings.tick_ms / 1000


def _capabilities(settings: Settings) -> Capabilities:
    return Capabilities(
        store="ZooKeeper",
        survives_restart="yes, and failover",
        fencing_token="zxid",
        clock="the servers' count of a session's time-out; no wall clock",
        waiting_line="FIFO",
        signal="watch",
        queue=False,
        durable=True,
        ttl_min_s=_ttl_min(settings),
        ttl_max_s=(settings.session_max_ms - settings.slack_ms) / 1000,
        resolution_s=RESOLUTION_TICKS * settings.tick_ms / 1000,
        margin_s=0.010,
        permits=True,
    )


OPTIONS = ("tickTime", "maxSessionTimeout", "tls", "ssl_ca", "ssl_cert", "ssl_key")


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``zookeeper://user:password@host:2181,host:2181/chroot`` points; the chroot is ``/dibs`` unless given.

    The query may say the servers' ``tickTime`` and ``maxSessionTimeout`` (ms, as in zoo.cfg) where they are not 2000
    and 20 ticks; ``tls=true``, ``ssl_ca``, ``ssl_cert``, ``ssl_key`` are for a secureClientPort.
    """
    hosts = tuple(_host_and_port(part) for part in url.netloc.rpartition("@")[2].split(","))
    root = "/" + unquote(url.path).strip("/")
    parts = root[1:].split("/")
    if root == "/":
        root = "/dibs"
    elif not all(parts) or {".", "..", "zookeeper"} & set(parts) or not root.isprintable():
        raise InvalidOption(f"{root!r} is no path for nodes of ZooKeeper")
    tick_ms = _milliseconds("tickTime", options.pop("tickTime", None), TICK_MS_DEFAULT)
    session_max_ms = _milliseconds(
        "maxSessionTimeout", options.pop("maxSessionTimeout", None), SESSION_MAX_TICKS * tick_ms
    )
    if session_max_ms < 4 * tick_ms:
        raise InvalidOption(f"maxSessionTimeout={session_max_ms} is less than four ticks of {tick_ms} ms")
    login = None
    if url.username is not None or url.password is not None:
        if not url.username or not url.password:
            raise InvalidOption("a login in a ZooKeeper URL is user:password, both of them")
        login = f"{unquote(url.username)}:{unquote(url.password)}"
    settings = Settings(hosts, root, login, _tls(options), tick_ms, session_max_ms)
    pools: dict[int, Pool] = {}

    def open_store() -> ZooKeeperStore:
        # A pool for each process: in a forked child the parent's stays here untouched, connections and all.
        pid = os.getpid()
        pool = pools.get(pid)
        if pool is None:
            pool = pools.setdefault(pid, Pool(settings))
        return ZooKeeperStore(pool)

    return StoreAddress(f"zookeeper://{','.join(hosts)}{root}", _capabilities(settings), open_store)


def _host_and_port(text: str) -> str:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(PORT_DEFAULT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host) != host.startswith("["):
        raise InvalidOption(f"{text!r} is no server: zookeeper://host:2181,host:2181/chroot")
    return f"{host}:{port}"


def _milliseconds(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdigit() or not 10 <= int(text) <= 86_400_000:
        raise InvalidOption(f"{option}={text!r} is no number of milliseconds, as it stands in zoo.cfg")
    return int(text)


def _tls(options: dict[str, str]) -> SSLContext | None:
    wanted = options.pop("tls", "false")
    if wanted not in ("true", "false"):
        raise InvalidOption(f"tls={wanted!r} is neither true nor false")
    ca, cert, key = (options.pop(option, None) for option in ("ssl_ca", "ssl_cert", "ssl_key"))
    if wanted == "false":
        if ca or cert or key:
            raise InvalidOption("ssl_ca, ssl_cert and ssl_key need tls=true")
        return None
    if (cert is None) != (key is None):
        raise InvalidOption("ssl_cert and ssl_key go together")
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise InvalidOption(f"ssl_ca, ssl_cert or ssl_key cannot be used: {error}") from None
    return context
