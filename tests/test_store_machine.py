"""Stores under any sequence of acts: the memory store against a model of what must never happen, the others against it.

The model knows nothing of lines or outcomes' details; it only remembers who holds what until when, and the greatest
token of each name. The comparison uses long ttls, so time decides nothing in it; but for waiters, who are given up when
they have not asked for a while.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.store import (
    ANY_SLOT,
    LINE_GRACE_S,
    Acquire,
    Gone,
    Granted,
    Held,
    Mismatch,
    Release,
    Released,
    Renew,
    Renewed,
    StoreBusy,
    Transfer,
)
from dibs.stores.memory import RENEWED_S, MemoryStore, Shelf
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer

CLOCK = RealClock()
NAMES = ["a", "b", "c"]
CLIENTS = range(4)
# After how long a waiter may be passed over, at the earliest: etcd's (``etcd_pool_view.SEEN_FIRST_S``), with a margin.
SOON_GIVEN_UP_S = 0.9

names = st.sampled_from(NAMES)
clients = st.sampled_from(CLIENTS)


def deadline() -> Deadline:
    return Deadline(CLOCK, CLOCK.now() + 10)


# -- safety, whatever the time ----------------------------------------------------------------------------------------


class Safety(RuleBasedStateMachine):
    """The memory store under a clock that the test moves, and what must be true of any store."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.shelf = Shelf(now=lambda: self.now)
        self.stores = [MemoryStore(self.shelf) for _ in CLIENTS]
        self.claims = {(client, name): f"c{client}-0{name}" for client in CLIENTS for name in NAMES}
        self.numbers = itertools.count(1)
        # name: the claim in force, its token, and when it ends.
        self.live: dict[str, tuple[str, int, float]] = {}
        self.highest: dict[str, int] = {}
        self.token_of: dict[str, int] = {}
        self.ended: set[str] = set()
        self.tickets: dict[str, int] = {}

    def act(self, client: int, request: Any) -> Any:
        (outcome,) = self.stores[client].act([request], deadline())
        return outcome

    def in_force(self, name: str) -> tuple[str, int, float] | None:
        live = self.live.get(name)
        return live if live is not None and live[2] > self.now else None

    @rule(client=clients, name=names, ttl=st.sampled_from([0.5, 2.0, 30.0]), waits=st.booleans())
    def acquire(self, client: int, name: str, ttl: float, waits: bool) -> None:
        claim = self.claims[client, name]
        if claim in self.ended:  # a session never asks again with a claim it has seen end
            claim = self.claims[client, name] = f"c{client}-{next(self.numbers)}"
        ticket = self.tickets.get(claim)
        outcome = self.act(
            client, Acquire(name, claim, ttl, f"h{client}", None, f"c{client}" if waits else None, ticket)
        )
        live = self.in_force(name)
        if isinstance(outcome, Granted):
            token = outcome.fencing_token
            assert live is None or live[0] == claim, "a name in force was granted to another claim"
            if claim in self.token_of:
                assert token == self.token_of[claim], "a claim changed its token"
            else:
                assert token > self.highest.get(name, 0), "a token did not rise"
            self.highest[name] = max(token, self.highest.get(name, 0))
            self.token_of[claim] = token
            until = self.now + ttl if live is None else max(live[2], self.now + ttl)  # a repetition never shortens
            self.live[name] = (claim, token, until)
            self.tickets.pop(claim, None)
        else:
            assert isinstance(outcome, Held)
            assert live is None or live[0] != claim, "the holder was refused"
            if live is not None:
                assert (outcome.holder, outcome.fencing_token) == (f"h{live[0][1]}", live[1])
                assert outcome.free_in == pytest.approx(live[2] - self.now)
            else:
                assert outcome.holder is None
                assert 0 <= outcome.free_in <= LINE_GRACE_S + 1e-6
            if waits:
                assert outcome.ticket is not None
                assert ticket in (None, outcome.ticket), "a waiter changed its ticket"
                self.tickets[claim] = outcome.ticket

    @rule(client=clients, name=names, ttl=st.sampled_from([0.5, 2.0, 30.0]))
    def renew(self, client: int, name: str, ttl: float) -> None:
        claim, live = self.claims[client, name], self.in_force(name)
        outcome = self.act(client, Renew(name, claim, ttl))
        if live is not None and live[0] == claim:
            assert isinstance(outcome, Renewed)
            # However short, it moves the end: whoever watches the lease sees that it was renewed.
            self.live[name] = (claim, live[1], max(live[2] + RENEWED_S, self.now + ttl))
        else:
            assert isinstance(outcome, Gone)

    @rule(client=clients, name=names, give_up=st.booleans())
    def release(self, client: int, name: str, give_up: bool) -> None:
        claim, live = self.claims[client, name], self.in_force(name)
        ticket = self.tickets.get(claim) if give_up else None
        outcome = self.act(client, Release(name, claim, 1, ticket))
        if ticket is not None:
            del self.tickets[claim]
        if live is not None and live[0] == claim:
            assert isinstance(outcome, Released)
            del self.live[name]
            self.ended.add(claim)
        else:
            assert isinstance(outcome, Gone)

    @rule(giver=clients, client=clients, name=names, ttl=st.sampled_from([0.5, 2.0, 30.0]), again=st.booleans())
    def transfer(self, giver: int, client: int, name: str, ttl: float, again: bool) -> None:
        source, live = self.claims[giver, name], self.in_force(name)
        claim = self.claims[client, name] if again else f"c{client}-{next(self.numbers)}"
        if source == claim:
            return
        outcome = self.act(client, Transfer(name, claim, ttl, f"h{client}", source))
        if live is not None and live[0] == claim:  # repeated, whatever it was from
            assert isinstance(outcome, Granted)
            assert outcome.fencing_token == live[1], "a claim changed its token"
            self.live[name] = (claim, live[1], max(live[2], self.now + ttl))
        elif live is not None and live[0] == source:
            assert isinstance(outcome, Granted)
            assert outcome.fencing_token > self.highest[name], "a token did not rise"
            self.live[name] = (claim, outcome.fencing_token, self.now + ttl)
            self.highest[name] = self.token_of[claim] = outcome.fencing_token
            self.ended.add(source)
            if self.claims[client, name] not in self.tickets:
                self.claims[client, name] = claim
        else:
            assert isinstance(outcome, Gone)

    @rule(client=clients, name=names, keep=st.sampled_from([0.5, 3.0, 50.0]))
    def release_and_keep(self, client: int, name: str, keep: float) -> None:
        claim, live = self.claims[client, name], self.in_force(name)
        outcome = self.act(client, Release(name, claim, 1, None, keep, "{}"))
        if live is not None and live[0] == claim:
            assert isinstance(outcome, Released)
            self.live[name] = (f"c{claim[1]}-kept", live[1], self.now + keep)
            self.ended.add(claim)
        else:
            assert isinstance(outcome, Gone)

    @rule(name=names, now=st.booleans(), stale=st.booleans())
    def break_lease(self, name: str, now: bool, stale: bool) -> None:
        live = self.in_force(name)
        token = self.highest.get(name, 0) - stale
        broken = self.stores[0].break_lease(name, token, now, deadline())
        assert broken == (live is not None and live[1] == token)
        if broken and live is not None:
            self.ended.add(live[0])
            if now:
                del self.live[name]
            else:
                self.live[name] = (f"c{live[0][1]}-broken", live[1], live[2])

    @rule(older_than=st.sampled_from([0.0, 1.0, 60.0]))
    def purge(self, older_than: float) -> None:
        self.stores[1].purge("", "\U0010ffff", older_than, deadline())
        # A row that is gone is a claim that is gone: the store may not know it again.
        for name, (claim, _, ends) in list(self.live.items()):
            if ends <= self.now:
                self.ended.add(claim)
                del self.live[name]

    @rule(seconds=st.sampled_from([0.001, 0.4, LINE_GRACE_S, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.forget_expired()

    def forget_expired(self) -> None:
        for name, (claim, _, ends) in list(self.live.items()):
            if ends <= self.now:
                self.ended.add(claim)
                del self.live[name]

    @invariant()
    def what_is_shown_is_what_is_held(self) -> None:
        shown: dict[str, Any] = {
            lease.name: (lease.fencing_token, lease.expires_in)
            for lease in self.stores[0].leases("", "\U0010ffff" * 64, deadline())
        }
        held = {
            n: (live[1], pytest.approx(live[2] - self.now)) for n in NAMES if (live := self.in_force(n)) is not None
        }
        assert shown == held


def test_nothing_that_must_not_happen_happens() -> None:
    """At most one claim in force per name, tokens rise over grants and stay over retries, Gone changes nothing."""
    run_state_machine_as_test(Safety, settings=settings(max_examples=150, stateful_step_count=40))


# -- the same answers -------------------------------------------------------------------------------------------------


class Different(AssertionError):
    """The two stores have answered differently."""


def same(theirs: Any, ours: Any, what: str) -> None:
    if theirs != ours:
        raise Different(f"{what}: memory says {ours}, the store {theirs}")


class Comparison(RuleBasedStateMachine):
    """One store beside the memory store: the same acts must have the same outcomes.

    Tokens are compared by the order of grants of a name, tickets by their order in a line; their values differ.
    """

    open_store: Callable[[], Any]
    serial = itertools.count()

    @initialize()
    def begin(self) -> None:
        self.prefix = f"m{next(self.serial)}:"
        self.begun = CLOCK.now()
        self.over = False
        self.ours = MemoryStore(Shelf())
        self.theirs = type(self).open_store()
        self.numbers = itertools.count(1)
        self.claims: dict[tuple[int, str], str] = {}
        self.tickets: dict[str, tuple[int, int]] = {}
        self.waits_for: dict[str, str] = {}
        self.grants: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})

    def teardown(self) -> None:
        if hasattr(self, "theirs"):
            self.theirs.close()

    def patiently(self, act: Callable[[], Any]) -> Any:
        for _ in range(1000):
            try:
                return act()
            except StoreBusy:
                CLOCK.sleep(0.002)
        return act()

    @contextmanager
    def compared(self) -> Iterator[None]:
        """What differs after so long may be a waiter whom one store has given up, and the other not yet.

        The rest of such an example does nothing. (To reject it would not do: it is not so again when it is repeated.)
        """
        try:
            yield
        except Different:
            if CLOCK.now() - self.begun < SOON_GIVEN_UP_S:
                raise
            self.over = True

    def claim(self, client: int, name: str, fresh: bool = False) -> str:
        if fresh or (client, name) not in self.claims:
            self.claims[client, name] = f"client{client}-{next(self.numbers)}"
        return self.claims[client, name]

    def token(self, side: int, name: str, token: int) -> int:
        """Which grant of the name had this token: 1 for the first."""
        grants = self.grants[side].setdefault(name, [])
        if token not in grants:
            assert not grants or token > grants[-1], (
                f"{'memory' if side == 0 else 'the store'}: tokens {grants}, then {token}"
            )
            grants.append(token)
        return grants.index(token) + 1

    def plain(self, side: int, name: str, outcome: Any) -> tuple[Any, ...]:
        if isinstance(outcome, Granted):
            return ("Granted", self.token(side, name, outcome.fencing_token))
        if isinstance(outcome, Held):
            assert outcome.free_in >= 0
            grant = None if outcome.holder is None else self.token(side, name, outcome.fencing_token)
            waits = outcome.ticket is not None
            return ("Held", outcome.holder, grant, waits, outcome.ahead and waits)
        return (type(outcome).__name__,)

    def act(self, *requests: Any) -> None:
        if not self.over:
            with self.compared():
                self._act(requests)

    def alone(self, request: Any) -> Any:
        """The request as it is sent by itself: a claim that was granted before it in the same call waits no more."""
        waits = isinstance(request, (Acquire, Release)) and request.ticket is not None
        return request._replace(ticket=None) if waits and request.claim_id not in self.tickets else request

    def _act(self, requests: tuple[Any, ...]) -> None:
        ours, theirs = list(requests), list(requests)
        for index, request in enumerate(requests):
            pair = self.tickets.get(request.claim_id)
            if isinstance(request, (Acquire, Release)) and request.ticket is not None:
                assert pair is not None
                ours[index], theirs[index] = request._replace(ticket=pair[0]), request._replace(ticket=pair[1])
        seen_ours = self.ours.act(ours, deadline())
        seen_theirs = self.patiently(lambda: self.theirs.act(theirs, deadline()))
        plain_ours = [self.plain(0, r.name, o) for r, o in zip(requests, seen_ours, strict=True)]
        plain_theirs = [self.plain(1, r.name, o) for r, o in zip(requests, seen_theirs, strict=True)]
        same(plain_theirs, plain_ours, f"after {requests}")
        for request, one, other in zip(requests, seen_ours, seen_theirs, strict=True):
            if isinstance(one, Held) and one.ticket is not None:
                self.waits_for[request.claim_id] = request.name
                before = self.tickets.setdefault(request.claim_id, (one.ticket, other.ticket))
                same((one.ticket, other.ticket), before, "a waiter changed its ticket")
            elif isinstance(request, (Acquire, Release)) and (isinstance(one, Granted) or isinstance(request, Release)):
                self.tickets.pop(request.claim_id, None)
        for request in requests:
            line = [pair for claim, pair in self.tickets.items() if self.waits_for[claim] == request.name]
            same([pair[1] for pair in sorted(line)], sorted(pair[1] for pair in line), "tickets in different orders")

    def acquiring(self, client: int, name: str) -> Acquire:
        claim = self.claim(client, name)
        # Clients 0 and 1 never wait, 2 to 5 always do, as one lock object with its timeout would.
        wake = f"client{client}" if client >= 2 else None
        info = f'{{"client":{client}}}' if client % 2 else None
        return Acquire(
            self.prefix + name, claim, 3600.0, f"h{client}", info, wake, 0 if claim in self.tickets else None
        )

    @rule(client=st.integers(0, 5), name=names)
    def acquire(self, client: int, name: str) -> None:
        self.act(self.acquiring(client, name))

    @rule(client=st.integers(0, 5), name=names)
    def renew(self, client: int, name: str) -> None:
        self.act(Renew(self.prefix + name, self.claim(client, name), 3600.0))

    @rule(client=st.integers(0, 5), name=names)
    def release(self, client: int, name: str) -> None:
        claim = self.claim(client, name)
        self.act(Release(self.prefix + name, claim, 1, 0 if claim in self.tickets else None))
        self.claim(client, name, fresh=True)

    @rule(client=st.integers(0, 5), name=names, info=st.sampled_from([None, '{"once":"ü"}']))
    def release_and_keep(self, client: int, name: str, info: str | None) -> None:
        claim = self.claim(client, name)
        ticket = 0 if claim in self.tickets else None
        self.act(Release(self.prefix + name, claim, 1, ticket, 3600.0, info))
        self.claim(client, name, fresh=True)

    def transferring(self, giver: int, client: int, name: str) -> Transfer:
        claim, source = f"client{client}-{next(self.numbers)}", self.claim(giver, name)
        # (The info is that of the client's acquires: not every store writes it anew when a claim repeats itself.)
        info = self.acquiring(client, name).info
        return Transfer(self.prefix + name, claim, 3600.0, f"h{client}", source, info)

    @rule(giver=st.integers(0, 5), client=st.integers(0, 5), name=names, times=st.integers(1, 2))
    def transfer(self, giver: int, client: int, name: str, times: int) -> None:
        """To a new claim of a client, which may be in line with another meanwhile; perhaps sent twice."""
        request = self.transferring(giver, client, name)
        for _ in range(times):
            self.act(request)
        if self.claims.get((client, name)) not in self.tickets:
            self.claims[client, name] = request.claim_id

    @rule(
        acts=st.lists(
            st.tuples(st.integers(0, 5), names, st.sampled_from("arxk")), unique_by=lambda a: a[1], min_size=2
        )
    )
    def vector(self, acts: list[tuple[int, str, str]]) -> None:
        """One call with requests for different names."""
        requests: list[Any] = []
        for client, name, verb in acts:
            claim = self.claim(client, name)
            if verb == "a":
                requests.append(self.acquiring(client, name))
            elif verb == "r":
                requests.append(Renew(self.prefix + name, claim, 3600.0))
            else:
                ticket, keep = 0 if claim in self.tickets else None, 3600.0 if verb == "k" else 0.0
                requests.append(Release(self.prefix + name, claim, 1, ticket, keep, "{}" if keep else None))
        self.act(*requests)
        for client, name, verb in acts:
            if verb in "xk":
                self.claim(client, name, fresh=True)

    @rule(holder=st.integers(0, 5), client=st.integers(0, 5), name=names)
    def hand_over(self, holder: int, client: int, name: str) -> None:
        """A release and an acquire of the same name in one call, as sessions send them."""
        if holder == client:
            return
        claim = self.claim(holder, name)
        ticket = 0 if claim in self.tickets else None
        self.act(Release(self.prefix + name, claim, 1, ticket), self.acquiring(client, name))
        self.claim(holder, name, fresh=True)

    @rule(name=names, now=st.booleans(), stale=st.integers(0, 3))
    def break_lease(self, name: str, now: bool, stale: int) -> None:
        key = self.prefix + name
        grants = [self.grants[side].get(key, []) for side in (0, 1)]
        if not grants[0] or self.over:
            return
        place = -1 if stale else 0
        ours = self.ours.break_lease(key, grants[0][place], now, deadline())
        theirs = self.patiently(lambda: self.theirs.break_lease(key, grants[1][place], now, deadline()))
        with self.compared():
            same(theirs, ours, "broken")

    @rule()
    def purge(self) -> None:
        self.ours.purge("", "\U0010ffff", 0, deadline())
        self.patiently(lambda: self.theirs.purge("", "\U0010ffff", 0, deadline()))

    @invariant()
    def the_same_is_shown(self) -> None:
        if not hasattr(self, "theirs") or self.over:
            return
        with self.compared():
            same(self.shown(1, self.theirs), self.shown(0, self.ours), "leases that are shown")

    def shown(self, side: int, store: Any) -> list[tuple[Any, ...]]:
        leases = self.patiently(partial(store.leases, self.prefix, self.prefix + "\U0010ffff" * 64, deadline()))
        return [
            (x.name, x.slot, x.holder, self.token(side, x.name, x.fencing_token), x.info, x.waiting) for x in leases
        ]


def compare(open_store: Callable[[], Any], examples: int) -> None:
    machine = type("Comparison", (Comparison,), {"open_store": staticmethod(open_store)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow], deadline=None
        ),
    )


class PermitComparison(Comparison):
    """The same for names with permits, beside one that is a lock; limits, weights and slots are compared, too."""

    LIMITS = (2, 3)

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.slots: dict[str, int] = {}

    def plain(self, side: int, name: str, outcome: Any) -> tuple[Any, ...]:
        if isinstance(outcome, Granted):
            return (*super().plain(side, name, outcome), outcome.slot)
        return (*super().plain(side, name, outcome), outcome.permits if isinstance(outcome, Mismatch) else None)

    def acquiring(self, client: int, name: str, limit: int = 3, take: int = 1, resize: bool = False) -> Acquire:
        request = super().acquiring(client, name)
        if name == NAMES[0]:
            return request  # a lock, most of the time
        return request._replace(permits=limit, take=min(take, limit), resize=resize)

    @rule(
        client=st.integers(0, 5),
        name=names,
        limit=st.sampled_from(LIMITS),
        take=st.sampled_from([1, 1, 1, 2, 3]),
        resize=st.booleans(),
    )
    def acquire_permits(self, client: int, name: str, limit: int, take: int, resize: bool) -> None:
        self.act(self.acquiring(client, name, limit, take, resize))

    @rule(
        name=st.sampled_from(NAMES[1:]),
        asked=st.lists(
            st.tuples(
                st.integers(0, 5), st.sampled_from((2, 3, 3, 3)), st.sampled_from([1, 1, 1, 2, 3]), st.booleans()
            ),
            min_size=2,
            max_size=6,
        ),
    )
    def many_of_one_name(self, name: str, asked: list[tuple[int, int, int, bool]]) -> None:
        """One call in which several claims ask for permits of one name, some of them twice."""
        requests = [self.acquiring(client, name, limit, take, resize) for client, limit, take, resize in asked]
        # (Who is refused is told whose lease ends first.)
        self.act(*[request._replace(ttl=3600.0 + 9 * place) for place, request in enumerate(requests)])

    @rule(client=st.integers(0, 5), name=names, limit=st.sampled_from((0, *LIMITS)))
    def mix_up(self, client: int, name: str, limit: int) -> None:
        """A lock taken for permits, or the other way round: whichever the name is first, it stays."""
        self.act(self.acquiring(client, name)._replace(permits=limit, take=1, resize=False))

    @rule(client=st.integers(0, 5), name=names, slot=st.sampled_from([ANY_SLOT, ANY_SLOT, 1, 2, 3]))
    def release_slot(self, client: int, name: str, slot: int) -> None:
        if name == NAMES[0]:
            slot = 1
        claim = self.claim(client, name)
        self.act(Release(self.prefix + name, claim, slot, 0 if claim in self.tickets else None))
        self.claim(client, name, fresh=True)

    @rule(client=st.integers(0, 5), name=names, slot=st.integers(1, 4))
    def renew_slot(self, client: int, name: str, slot: int) -> None:
        self.act(Renew(self.prefix + name, self.claim(client, name), 3600.0, slot))

    @rule(
        giver=st.integers(0, 5),
        client=st.integers(0, 5),
        name=names,
        slot=st.sampled_from([1, 1, 2, 3]),
        limit=st.sampled_from([0, 3]),
    )
    def transfer_slot(self, giver: int, client: int, name: str, slot: int, limit: int) -> None:
        request = self.transferring(giver, client, name)._replace(slot=slot, permits=limit)
        self.act(request)
        if self.claims.get((client, name)) not in self.tickets:
            self.claims[client, name] = request.claim_id


def compare_permits(open_store: Callable[[], Any], examples: int) -> None:
    machine = type("PermitComparison", (PermitComparison,), {"open_store": staticmethod(open_store)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow], deadline=None
        ),
    )


def test_sqlite_answers_as_memory_does(sqlite_url: str) -> None:
    """The SQLite store gives the memory store's outcomes, tokens and order in line, whatever is asked."""
    compare(locate(sqlite_url)[0].open, 400)


def test_postgresql_answers_as_memory_does(postgres: PostgresServer, postgres_url: str) -> None:
    """The PostgreSQL store gives the memory store's outcomes, tokens and order in line, whatever is asked."""
    compare(locate(postgres_url)[0].open, 100)


def test_sqlite_answers_on_permits_as_memory_does(sqlite_url: str) -> None:
    """The SQLite store gives the memory store's outcomes for names with permits, limits and slots included."""
    compare_permits(locate(sqlite_url)[0].open, 400)


def test_postgresql_answers_on_permits_as_memory_does(postgres: PostgresServer, postgres_url: str) -> None:
    """The PostgreSQL store gives the memory store's outcomes for names with permits, limits and slots included."""
    compare_permits(locate(postgres_url)[0].open, 100)


def test_mariadb_answers_on_permits_as_memory_does(mysql: MariaDBServer, mysql_url: str) -> None:
    """The MySQL store gives the memory store's outcomes for names with permits, limits and slots included."""
    compare_permits(locate(mysql_url)[0].open, 60)
