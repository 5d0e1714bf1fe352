"""What PostgreSQL is sent in one round trip, and what is told of it when a part of that has gone wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import psycopg
import pytest

from dibs.connecting import locate
from dibs.errors import StoreUnavailable
from dibs.store import GONE, RELEASED, Acquire, Granted, Release, Renew, Renewed, StoreBusy
from dibs.stores import postgres_link
from tests.waits import soon

NAMES = [f"n{number}" for number in range(6)]
# Refuses what would happen to a row of this name, as a server in trouble does: for a while.
TRIGGER = """
CREATE FUNCTION trouble() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.name = TG_ARGV[0] AND (NEW.claim_id IS NULL) = (TG_ARGV[1] = 'release') THEN
        RAISE EXCEPTION 'trouble' USING ERRCODE = TG_ARGV[2];
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER trouble BEFORE UPDATE ON dibs_lease FOR EACH ROW EXECUTE FUNCTION trouble({})
"""
numbers = count()


def asked(name: str) -> Acquire:
    return Acquire(name, f"c-{next(numbers)}", 60, "h")


@pytest.fixture
def store(postgres_url: str) -> Iterator[Any]:
    """A store all of whose names have rows, and whose statements are prepared."""
    store = locate(postgres_url)[0].open()
    for some in (NAMES, NAMES[:1], NAMES[:1]):
        held = holding(store, *some)
        assert store.act(held, soon()) == [RELEASED] * len(held)
    yield store
    store.close()


def holding(store: Any, *names: str) -> list[Release]:
    """Take these; what gives them back."""
    requests = [asked(name) for name in names]
    outcomes = store.act(requests, soon())
    assert all(type(outcome) is Granted for outcome in outcomes), outcomes
    return [Release(r.name, r.claim_id, outcome.slot) for r, outcome in zip(requests, outcomes, strict=True)]


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each round trip."""
    seen: list[int] = []
    results = postgres_link.Connection._results

    def counted(self: Any, *args: Any) -> Any:
        seen.append(1)
        return results(self, *args)

    monkeypatch.setattr(postgres_link.Connection, "_results", counted)
    return seen


@pytest.mark.parametrize("of_each", [1, 3])
def test_releases_travel_with_what_follows(store: Any, flights: list[int], of_each: int) -> None:
    """What is given back and what is asked for or renewed at the same moment takes one round trip."""
    given, kept = holding(store, *NAMES[:of_each]), holding(store, NAMES[of_each])[0]
    store.act([*holding(store, NAMES[-1]), asked(NAMES[-2])], soon())  # prepares the statements
    renewal = Renew(kept.name, kept.claim_id, 60, kept.slot)
    store.act([renewal], soon())
    flights.clear()
    others = [f"{name}-other" for name in NAMES[:of_each]]
    assert store.act([*given, asked(NAMES[-1])], soon())[:-1] == [RELEASED] * of_each
    assert len(flights) == 1
    flights.clear()
    again = holding(store, *NAMES[:of_each])
    assert len(flights) == 1
    flights.clear()
    *released, renewed = store.act([*again, renewal], soon())
    assert (released, type(renewed), len(flights)) == ([RELEASED] * of_each, Renewed, 1)
    assert store.act(again, soon()) == [GONE] * of_each
    assert all(type(outcome) is Granted for outcome in store.act([asked(name) for name in others], soon()))


def test_a_release_is_durable_as_it_was_and_a_grant_is(store: Any, postgres_url: str) -> None:
    """That a release does not wait for the disk is for its transaction alone: the grant beside it does."""
    given = holding(store, NAMES[0])
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE seen (claim text, commit text)")
        connection.execute(
            "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO seen VALUES (NEW.claim_id, current_setting('synchronous_commit')); RETURN NULL; END $$"
        )
        # At the end of the transaction, when a statement has set what it sets.
        connection.execute(
            "CREATE CONSTRAINT TRIGGER look AFTER UPDATE ON dibs_lease DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW EXECUTE FUNCTION look()"
        )
        grant = asked(NAMES[1])
        store.act([*given, grant], soon())
        assert dict(connection.execute("SELECT claim, commit FROM seen").fetchall()) == {
            None: "off",
            grant.claim_id: "on",
        }


@pytest.mark.parametrize("code, told", [("40001", StoreBusy), ("53100", StoreUnavailable)])
@pytest.mark.parametrize("at", ["release", "grant"])
def test_a_part_that_fails_leaves_the_rest_in_doubt(
    store: Any, postgres_url: str, at: str, code: str, told: type[Exception]
) -> None:
    """One of two fails, as it can for a moment, and the other is done: the error says so, and both can be repeated."""
    given, grant = holding(store, NAMES[0]), asked(NAMES[1])
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(TRIGGER.format(f"'{NAMES[at == 'grant']}', '{at}', '{code}'"))
        with pytest.raises(told, match="trouble") as caught:
            store.act([*given, grant], soon())
        assert caught.value.maybe_applied  # type: ignore[attr-defined]
        rows: dict[str, str | None] = dict(connection.execute("SELECT name, claim_id FROM dibs_lease").fetchall())
        assert (rows[NAMES[0]] is None) is (at == "grant")
        assert (rows[NAMES[1]] == grant.claim_id) is (at == "release")
        with pytest.raises(told) as caught:  # alone it has done nothing
            store.act(given if at == "release" else [grant], soon())
        assert not caught.value.maybe_applied  # type: ignore[attr-defined]
        connection.execute("DROP TRIGGER trouble ON dibs_lease")
    released, granted = store.act([*given, grant], soon())
    assert released == (RELEASED if at == "release" else GONE)
    assert type(granted) is Granted
    assert store.act([asked(NAMES[2])], soon())
