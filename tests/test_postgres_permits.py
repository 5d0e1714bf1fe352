"""Permits on PostgreSQL: what is decided in one statement, and who in line is told by a release or a grant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.store import ANY_SLOT, RELEASED, TOLD_MAX, Acquire, Granted, Held, Release
from dibs.stores.postgres import PostgresStore

NAME = "yard"


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store: Any = locate(postgres_url)[0].open()
    yield store
    store.close()


@pytest.fixture
def told(postgres_url: str) -> Iterator[Callable[[], list[str]]]:
    """Who of the waiters A, B, C … was told since the last call."""
    with psycopg.connect(postgres_url, autocommit=True) as listener:
        for waiter in "ABCD":
            listener.execute(f'LISTEN "dibs_{waiter}"')
        listener.execute("LISTEN marker")

        def told() -> list[str]:
            listener.execute("NOTIFY marker")  # which comes after whatever was committed before
            found: list[str] = []
            for notification in listener.notifies(timeout=10):
                if notification.channel == "marker":
                    return sorted(found)
                assert notification.payload == NAME
                found.append(notification.channel.removeprefix("dibs_"))
            raise AssertionError("the marker did not come")

        yield told


def deadline() -> Deadline:
    return Deadline(RealClock(), RealClock.now() + 10)


def acquire(store: PostgresStore, *asks: tuple[str, int], permits: int = 4, ticket: int | None = None) -> list[Any]:
    """Ask for so many permits for each claim in one call; those in upper case wait."""
    return store.act(
        [
            Acquire(NAME, claim, 60.0, "h/1/x", None, claim if claim.isupper() else None, ticket, permits, take)
            for claim, take in asks
        ],
        deadline(),
    )


def release(store: PostgresStore, *claims: str) -> None:
    assert store.act([Release(NAME, claim, ANY_SLOT) for claim in claims], deadline()) == [RELEASED] * len(claims)


def line_up(store: PostgresStore, *asks: tuple[str, int], permits: int = 4) -> None:
    for ask in asks:
        assert isinstance(acquire(store, ask, permits=permits)[0], Held)


def without_transactions(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Forbid the long way; the round trips from now on."""
    flights: list[Any] = []
    run_all = store._connection.run_all

    def counted(statements: Any, deadline: Deadline) -> Any:
        flights.append(statements)
        return run_all(statements, deadline)

    def forbidden(*given: Any) -> Any:
        raise AssertionError("a transaction was begun")

    monkeypatch.setattr(store._connection, "run_all", counted)
    monkeypatch.setattr(store._connection, "transaction", forbidden)
    return flights


def test_a_release_tells_all_for_whom_there_is_enough(store: PostgresStore, told: Callable[[], list[str]]) -> None:
    """Two permits that come back in one call are told of to the first two in line, and to nobody else."""
    acquire(store, ("a", 1), ("b", 1), ("c", 2))
    line_up(store, ("A", 1), ("B", 1), ("C", 1))
    assert told() == []
    release(store, "a", "b")
    assert told() == ["A", "B"]


def test_a_release_tells_all_for_whom_there_is_enough_by_now(
    store: PostgresStore, told: Callable[[], list[str]]
) -> None:
    """What others gave back before, and nobody has taken yet, is counted: each release tells one more."""
    acquire(store, ("a", 1), ("b", 1), ("c", 2))
    line_up(store, ("A", 1), ("B", 1), ("C", 1))
    for claim, slot, expected in ("a", 1, ["A"]), ("b", 2, ["A", "B"]):
        assert store.act([Release(NAME, claim, slot)], deadline()) == [RELEASED]
        assert told() == expected


def test_the_first_in_line_is_told_in_any_case(store: PostgresStore, told: Callable[[], list[str]]) -> None:
    """Who wants more than there is yet is told of each release, as two at the same moment do not see each other."""
    acquire(store, ("a", 1), ("b", 1), ("c", 2))
    line_up(store, ("A", 2), ("B", 1))
    release(store, "a")
    assert told() == ["A"]  # and not B, who is behind it
    release(store, "b")
    assert told() == ["A"]


def test_a_grant_that_leaves_permits_tells_all_for_whom_they_are(
    store: PostgresStore, told: Callable[[], list[str]]
) -> None:
    """Who takes its permits from the line tells those behind it, as many as there is enough for."""
    acquire(store, ("a", 4))
    line_up(store, ("A", 1), ("B", 2), ("C", 1), ("D", 1))
    release(store, "a")
    assert told() == ["A", "B", "C"]
    assert isinstance(acquire(store, ("A", 1))[0], Granted)
    assert told() == ["B", "C"]


def test_no_more_are_told_than_a_number_allows(store: PostgresStore, postgres_url: str) -> None:
    """A release of very many permits tells ``TOLD_MAX`` of those in line; who of them is granted tells more."""
    many = TOLD_MAX + 20
    acquire(store, ("a", many), permits=many)
    with psycopg.connect(postgres_url, autocommit=True) as listener:
        for number in range(many):
            listener.execute(f'LISTEN "dibs_W{number}"')
        # In one call, as those who have not asked for LINE_GRACE_S count as dead, and are not told.
        lined_up = acquire(store, *((f"W{number}", 1) for number in range(many)), permits=many)
        assert all(isinstance(outcome, Held) for outcome in lined_up)
        release(store, "a")
        first = [notification.channel for notification in listener.notifies(timeout=10, stop_after=TOLD_MAX)]
        assert first == [f"dibs_W{number}" for number in range(TOLD_MAX)]
        assert isinstance(acquire(store, ("W0", 1), permits=many)[0], Granted)
        more = [notification.channel for notification in listener.notifies(timeout=10, stop_after=TOLD_MAX)]
        assert more == [f"dibs_W{number}" for number in range(1, TOLD_MAX + 1)]


def test_who_leaves_the_line_makes_way(store: PostgresStore, told: Callable[[], list[str]]) -> None:
    """Where one that wants more than there is gives up, those behind it for whom there is enough are told."""
    acquire(store, ("a", 3))
    line_up(store, ("A", 4), ("B", 1), ("C", 1))
    assert told() == []
    store.act([Release(NAME, "A", ticket=0)], deadline())
    assert told() == ["B"]
    store.act([Release(NAME, "C", ticket=0)], deadline())
    assert told() == ["B"]


def test_who_leaves_the_line_of_a_lock_makes_way_if_it_is_free(
    store: PostgresStore, told: Callable[[], list[str]]
) -> None:
    """The next in line is told where the first, for whom a free lock is kept, gives up; not while somebody holds it."""
    acquire(store, ("a", 1), permits=0)
    line_up(store, ("A", 1), ("B", 1), ("C", 1), permits=0)
    store.act([Release(NAME, "A", ticket=0)], deadline())
    assert told() == []
    release(store, "a")
    assert told() == ["B"]
    store.act([Release(NAME, "B", ticket=0)], deadline())
    assert told() == ["C"]


def test_a_release_does_not_tell_who_leaves_with_it(store: PostgresStore, told: Callable[[], list[str]]) -> None:
    """A waiter that gives up in the very call in which a permit comes back is not taken for the next in line."""
    acquire(store, ("a", 4))
    line_up(store, ("A", 1), ("B", 4))
    store.act([Release(NAME, "a", ANY_SLOT), Release(NAME, "A", ticket=0)], deadline())
    assert told() == ["B"]


def test_who_is_refused_lines_up_in_the_same_statement(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps a wanted name locked while a client reads and writes: refusals and places in line need no look."""
    acquire(store, ("a", 4))
    flights = without_transactions(store, monkeypatch)
    refused = acquire(store, ("A", 1))[0]
    # It hoped for the best, asked behind whoever asks at this moment, and once more when it was in line.
    assert len(flights) == 3
    assert (refused.holder, refused.ahead) == ("h/1/x", False)
    behind, *along = acquire(store, ("B", 1), ("b", 1), ("c", 1))
    assert len(flights) == 4
    assert behind.ahead
    assert behind.ticket > refused.ticket
    assert [(one.ticket, one.ahead) for one in along] == [(None, True), (None, True)]
    again = acquire(store, ("A", 1), ticket=refused.ticket)[0]
    assert (again.ticket, again.ahead) == (refused.ticket, False)
    assert len(flights) == 5
    release(store, "a")
    granted = acquire(store, ("A", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1))
    assert [type(one) for one in granted] == [Granted, Granted, Granted, Held, Held]  # one is kept for B
    assert (granted[-1].holder, granted[-1].ahead) == (None, True)


def test_a_name_that_was_full_is_asked_for_in_one_round_trip(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was refused asks with the statement that can refuse for a while, waiting or not; other names as before."""
    acquire(store, ("a", 4))
    flights = without_transactions(store, monkeypatch)
    for _ in range(3):
        assert isinstance(acquire(store, ("b", 1))[0], Held)
    assert len(flights) == 4
    assert len(store._pools._close_times) == 1


def test_a_release_that_nobody_was_told_of_is_not_missed(
    store: PostgresStore, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release looks whether anybody waits when it begins; who lines up before it is committed asks once more."""
    acquire(store, ("a", 4))
    acquire(store, ("b", 1))  # so that the next asks with the statement that can refuse
    run_all = store._connection.run_all
    with psycopg.connect(postgres_url) as releasing:
        # What a release writes, which has found nobody in line and is not committed yet.
        releasing.execute("UPDATE dibs_lease SET claim_id = NULL, expires_at = clock_timestamp() WHERE claim_id = 'a'")
        flights = []

        def with_release(statements: Any, deadline: Deadline) -> Any:
            flights.append(statements)
            if len(flights) == 2:
                releasing.commit()
            return run_all(statements, deadline)

        monkeypatch.setattr(store._connection, "run_all", with_release)
        assert [type(one) for one in acquire(store, ("A", 1))] == [Granted]
        assert len(flights) == 2


def test_what_a_call_asks_for_is_decided_in_its_order(store: PostgresStore) -> None:
    """Who lines up, and is followed by one that gives permits back, is not granted them by the same call."""
    acquire(store, ("a", 3))
    waiting, fewer = acquire(store, ("A", 2), ("a", 2))
    assert (type(waiting), type(fewer)) == (Held, Granted)
    assert [type(one) for one in acquire(store, ("A", 2), ticket=waiting.ticket)] == [Granted]


def test_a_place_that_was_lost_is_taken_again(store: PostgresStore, postgres_url: str) -> None:
    """Who was passed over, and left the line so, comes back to its old place with the refusal."""
    acquire(store, ("a", 4))
    first, second = acquire(store, ("A", 1))[0], acquire(store, ("B", 1))[0]
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("DELETE FROM dibs_lease_line WHERE claim_id = 'A'")
    back = acquire(store, ("A", 1), ticket=first.ticket)[0]
    assert back.ticket == first.ticket < second.ticket
    release(store, "a")
    assert [type(one) for one in acquire(store, ("B", 4))] == [Held]
    assert [type(one) for one in acquire(store, ("A", 1))] == [Granted]
