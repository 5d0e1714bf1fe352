"""Claims on what a query finds in the database of the leases: what is found, by whom, and what the database refuses."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import psycopg
import pytest

import dibs
from dibs import searching
from dibs.owners import this_thread
from tests.between import Between
from tests.callers import raw
from tests.servers.postgres import PostgresServer

URLS = ["sqlite_url", "postgres_url", "mysql_url"]
if find_spec("MySQLdb"):
    URLS.append("mysqlclient_url")
DUE = "SELECT id FROM event WHERE due AND id >= {} ORDER BY id"


class Shop:
    """A database with events in it, of which some are due, and clients who keep their leases there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.plain = url.partition("?")[0]
        #: Where a parameter goes.
        self.mark = "?" if url.startswith("sqlite") else "%s"
        self.due = DUE.format(self.mark)
        if url.startswith("mysql"):  # which heeds an order beside a limit alone
            self.due += " LIMIT 100000"
        self._open: list[Any] = []
        self.run(
            "CREATE TABLE event (id INTEGER PRIMARY KEY, kind VARCHAR(40), due INTEGER NOT NULL)".replace(
                "due INTEGER", "due BOOLEAN"
            )
        )
        values = ",".join(f"({number}, 'kind {number}', TRUE)" for number in range(100))
        self.run(f"INSERT INTO event VALUES {values}")

    def run(self, sql: str) -> list[Any]:
        with closing(raw(self.plain)) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
        return list(rows)

    def client(self, **options: Any) -> dibs.Client:
        client = dibs.connect(self.url, **options)
        self._open.append(client)
        return client

    def close(self) -> None:
        for thing in self._open:
            thing.close()


@pytest.fixture(params=URLS, ids=[url.partition("_")[0] for url in URLS])
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    shop = Shop(request.getfixturevalue(request.param))
    yield shop
    shop.close()


def test_what_is_due_and_free_is_found(shop: Shop) -> None:
    """Up to n of what the query yields and nobody holds, in its order; the next taker finds what is behind them."""
    ours, theirs = shop.client(), shop.client()
    held = theirs.lock("event/11").acquire()
    with ours.claims("event").take(query=shop.due, params=[10], n=3) as batch:
        assert (batch.won, batch.busy, batch.stale) == ([10, 12, 13], [], [])
        assert [item.name for item in batch.items] == ["event/10", "event/12", "event/13"]
        with theirs.claims("event").take(query=shop.due, params=(10,), n=2) as other:
            assert other.won == [14, 15]
        for item in batch:
            shop.run(f"UPDATE event SET due = FALSE WHERE id = {item.value}")
    assert held is not None
    held.release()
    with theirs.claims("event").take(query=shop.due, params=(10,), n=4) as other:
        assert other.won == [11, 14, 15, 16]
    with theirs.claims("event").take(query=shop.due, params=(1000,)) as other:
        assert (other.won, other.busy, other.token) == ([], [], None)


def test_rows_are_tuples_of_what_python_has_for_them(shop: Shop) -> None:
    """Of several columns an item is a tuple, the key first; a text is a key, too; what a query contains is its own."""
    claims = shop.client().claims("event")
    percent = "%" if shop.mark == "?" else "%%"
    query = (
        f"SELECT kind, id, 1.5 AS half, NULL AS missing, id {percent} 10 AS digit FROM event"
        f" WHERE kind = {shop.mark} -- a note; with a semicolon"
    )
    with claims.take(query=query, params=["kind 7"]) as batch:
        ((kind, number, half, missing, digit),) = batch.won
        assert (kind, number, float(half), missing, digit) == ("kind 7", 7, 1.5, None, 7)
        assert batch.items[0].name == "event/kind 7"
    with claims.take(query="SELECT id FROM event WHERE kind LIKE 'kind 3%' ORDER BY id;") as batch:
        assert sorted(batch.won) == [3, *range(30, 40)]
    for text in ("it's", 'a "b"', "a\\b", "ünï 💡", "%s", "a%b", "`x`"):
        with claims.take(query=f"SELECT id, {shop.mark} AS b FROM event WHERE id = 1", params=(text,)) as batch:
            assert batch.won == [(1, text)]
        with claims.take(query=f"SELECT {shop.mark} AS key_of_it", params=(text,)) as batch:
            assert (batch.won, batch.items[0].name) == ([text], f"event/{text}")


def test_many_takers_work_each_event_once(shop: Shop) -> None:
    """Of several who take at the same moment, and mark what they have done, each event is worked by exactly one."""
    worked: Counter[int] = Counter()
    together = threading.Barrier(4)

    def work(client: dibs.Client) -> None:
        together.wait()
        claims = client.claims("event")
        while True:
            with claims.take(query=shop.due, params=(0,), n=7) as batch:
                for item in batch:
                    worked[item.value] += 1
                    shop.run(f"UPDATE event SET due = FALSE WHERE id = {item.value}")
            if not batch.won and not batch.busy:
                return

    threads = [threading.Thread(target=work, args=(shop.client(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert worked == Counter(range(100))


def test_what_was_done_before_the_claim_is_stale(shop: Shop) -> None:
    """What somebody worked and freed between the look and the claim is given back, and never handed out."""
    between = Between(shop.url)
    done: list[str] = []

    def finish(requests: Any) -> None:
        if not done and len(requests) == 3:  # the claims: after the query, and before they reach the store
            done.extend(shop.run("UPDATE event SET due = FALSE WHERE id IN (10, 12)") or ["done"])

    with between.client() as client:
        client.ping()
        between.before = finish
        with client.claims("event").take(query=shop.due, params=(10,), n=3) as batch:
            assert (done, batch.won, batch.stale) == (["done"], [11], [10, 12])
        assert not client.leases("event/")


def test_the_value_is_that_of_the_second_look(shop: Shop) -> None:
    """An item is what the query said after the claim: nobody else works it from then on."""
    between = Between(shop.url)
    changed: list[int] = []

    def change(requests: Any) -> None:
        if not changed and requests:
            changed.append(1)
            shop.run("UPDATE event SET kind = 'changed' WHERE id = 10")

    with between.client() as client:
        client.ping()
        between.before = change
        query = f"SELECT id, kind FROM event WHERE id = {shop.mark}"
        with client.claims("event").take(query=query, params=(10,)) as batch:
            assert (changed, batch.won) == ([1], [(10, "changed")])


def test_when_the_second_look_fails_nothing_is_held(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was claimed is given back when it cannot be looked at again."""
    find, looks = searching._find, []

    def failing(core: Any, query: Any) -> Any:
        looks.append(query.only)
        if query.only is not None:
            raise dibs.StoreUnavailable("the second look")
        return (yield from find(core, query))

    monkeypatch.setattr(searching, "_find", failing)
    client = shop.client()
    with pytest.raises(dibs.StoreUnavailable, match="the second look"):
        client.claims("event").take(query=shop.due, params=(97,))
    assert looks == [None, [97, 98, 99]]
    assert not client.leases("event/")


def test_steps_that_are_closed_in_the_second_look_hold_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends them between two steps, a Ctrl-C, is not to wait for an answer: what was claimed is given back."""
    looks = []

    def found(core: Any, query: Any, find: Any = searching._find) -> Any:
        looks.append(query.only)
        return find(core, query)

    monkeypatch.setattr(searching, "_find", found)
    client = shop.client()
    steps = client.claims("event")._core.take(this_thread(), None, None, None, shop.due, 10, (97,), None)
    session, ask, timeout = next(steps)
    while len(looks) < 2:
        session, ask, timeout = steps.send(session.wait(ask, timeout))
    steps.close()
    assert not client.leases("event/")


def test_who_was_too_late_looks_again(shop: Shop) -> None:
    """When others claim all that was found before the claim, the next look finds what is behind those."""
    between = Between(shop.url)
    other = shop.client()
    batches: list[dibs.Batch[Any]] = []

    def claim(requests: Any) -> None:
        if len(batches) < searching.LOOKS_MAX - 1 and requests:
            batches.append(other.claims("event").take(query=shop.due, params=(0,), n=2))

    with between.client() as client:
        client.ping()
        between.before = claim
        with client.claims("event").take(query=shop.due, params=(0,), n=2) as batch:
            first = 2 * (searching.LOOKS_MAX - 1)
            assert batch.won == [first, first + 1]
        between.before = lambda requests: None
    for batch in batches:
        batch.release()


def test_a_stream_of_a_query(shop: Shop) -> None:
    """A worker without end takes its items from a query; in tasks, too."""
    stop = threading.Event()
    values = []
    for item in shop.client().claims("event").stream(query=shop.due, params=(90,), n=4, idle=0.01, stop=stop):
        values.append(item.value)
        shop.run(f"UPDATE event SET due = FALSE WHERE id = {item.value}")
        if len(values) == 10:
            stop.set()
    assert values == list(range(90, 100))

    async def main() -> list[Any]:
        async with dibs.connect_async(shop.url) as client:
            claims = client.claims("event", max_tries=2)
            async with await claims.take(query=shop.due, params=(80,), n=2, verify=lambda won: won[1:]) as batch:
                found: list[Any] = [batch.won, batch.stale]
            async for item in claims.stream(query=shop.due, params=(80,), n=5):
                found.append(item.value)
                break
            return found

    assert asyncio.run(main()) == [[81], [80], 80]


def test_verify_returns_rows_as_it_was_given_them(shop: Shop) -> None:
    """Of a query of several columns: those rows, or what stands in their first column."""
    query = shop.due.replace("id FROM", "id, kind FROM")
    claims = shop.client().claims("event")
    due: list[Callable[[list[Any]], list[Any]]] = [lambda won: won[1:], lambda won: [row[0] for row in won[1:]]]
    for verify in due:
        with claims.take(query=query, params=(97,), verify=verify) as batch:
            assert batch.won == [(98, "kind 98"), (99, "kind 99")]
            assert batch.stale == [(97, "kind 97")]


def test_verify_returns_uuids(postgres_url: str) -> None:
    """A key that a query has as a UUID is one to verify, too."""
    one = uuid.UUID(int=1)
    with dibs.connect(postgres_url) as client:
        query = f"SELECT CAST('{one}' AS uuid)"
        with client.claims("event").take(query=query, verify=lambda won: won) as batch:
            assert batch.won == [one]


@pytest.mark.parametrize(
    "query, words",
    [
        ("SELEKT id FROM event", "(?i)syntax"),
        ("SELECT id FROM nothing", "(?i)nothing"),
        ("SELECT nothing FROM event", "(?i)nothing"),
        ("DELETE FROM event", "(?i)syntax|error"),
        ("SELECT id FROM event) AS x", "(?i)syntax"),
    ],
)
def test_what_the_database_refuses_is_told(shop: Shop, query: str, words: str) -> None:
    """A query that cannot run is a wrong option, told in the database's words; the client goes on working."""
    client = shop.client()
    with pytest.raises(dibs.InvalidOption, match=words):
        client.claims("event").take(query=query)
    with client.claims("event").take(query=shop.due, params=(98,)) as batch:
        assert batch.won == [98, 99]
    assert not client.leases("event/")


@pytest.mark.parametrize("value", ["CAST('infinity' AS timestamptz)", "CAST('0044-03-15 BC' AS date)"])
def test_what_python_has_no_value_for_is_told(postgres_url: str, value: str) -> None:
    """A time without end is common in PostgreSQL; that it cannot be had is told, and nothing is claimed."""
    with dibs.connect(postgres_url) as client:
        claims = client.claims("event")
        with pytest.raises(dibs.InvalidOption, match="what Python has no value for"):
            claims.take(query=f"SELECT 1, {value}")
        assert not client.leases("event/")
        with claims.take(query=f"SELECT 1, CAST({value} AS text)") as batch:
            assert len(batch) == 1


def test_params_that_do_not_fit_are_told(shop: Shop) -> None:
    """Too few parameters, too many, or of a type that the database does not know: a wrong option, each time."""
    claims = shop.client().claims("event")
    for params in ((1, 2), (object(),)) if shop.mark == "?" else ((1, 2),):
        with pytest.raises(dibs.InvalidOption):
            claims.take(query=shop.due, params=params)
    with pytest.raises(dibs.InvalidOption):
        claims.take(query=f"SELECT id FROM event WHERE id = {shop.mark} OR id = {shop.mark}", params=(1,))
    named = ":first" if shop.mark == "?" else "%(first)s"
    with claims.take(query=DUE.format(named), params={"first": 99}) as batch:
        assert batch.won == [99]


def test_a_query_that_takes_too_long_is_ended(shop: Shop) -> None:
    """A query that does not come back by the client's request_timeout is no answer, and nothing is held."""
    slow = {  # longer than any request may take
        "p": "SELECT 1 AS id FROM pg_sleep(5)",
        "m": "SELECT SLEEP(5) AS id",
        "s": "WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT max(id) AS id FROM c",
    }[shop.url[0]]
    client = shop.client(request_timeout=1.5, patience=0)
    client.setup()
    began = time.monotonic()
    with pytest.raises(dibs.StoreUnavailable):
        client.claims("event").take(query=slow)
    assert time.monotonic() - began < 4
    assert not shop.client().leases("event/")


def test_a_key_that_cannot_be_one_is_told(shop: Shop) -> None:
    """A first column that is no key is named, and how it should be."""
    claims = shop.client().claims("event")
    with pytest.raises(dibs.InvalidName, match="a key is a str, an int or a date, not NoneType"):
        claims.take(query="SELECT NULL AS id")
    with claims.take(query="SELECT id FROM event WHERE id = 1 UNION ALL SELECT 1 AS id") as batch:
        assert batch.won == [1]


def test_bad_calls_are_refused_at_once(sqlite_url: str) -> None:
    """What cannot be meant is refused before anything is sent."""
    with dibs.connect(sqlite_url) as client:
        claims = client.claims("event")
        bad: list[dict[str, Any]] = [
            {},
            {"query": ""},
            {"query": 1},
            {"query": "SELECT 1", "n": 0},
            {"query": "SELECT 1", "n": True},
            {"query": "SELECT 1", "n": searching.FOUND_MAX + 1},
            {"query": "SELECT 1", "params": "1"},
            {"query": "SELECT 1", "params": 1},
            {"query": "SELECT 1", "limit": 1},
            {"query": "SELECT 1", "items": [1]},
            {"query": "SELECT 1", "key": str},
        ]
        for given in bad:
            with pytest.raises(dibs.InvalidOption):
                claims.take(**given)
        for given in ({"query": ""}, {"query": "SELECT 1", "fetch": list}, {"query": "SELECT 1", "key": str}):
            with pytest.raises(dibs.InvalidOption):
                claims.stream(**given)


def test_other_stores_run_no_queries() -> None:
    """Where leases are not kept in an SQL database, a query is Unsupported at once, and it is said what to do."""
    with dibs.connect("memory://") as client, pytest.raises(dibs.Unsupported, match="or give take the items"):
        client.claims("event").take(query="SELECT 1")


# -- PostgreSQL -------------------------------------------------------------------------------------------------------


def test_uuids_are_keys(postgres_url: str) -> None:
    """A column of UUIDs is a key: its text names the lock."""
    one = uuid.uuid4()
    with dibs.connect(postgres_url) as client, client.claims("u").take(query=f"SELECT '{one}'::uuid, 'x'") as batch:
        assert batch.won == [(one, "x")]
        assert batch.items[0].key == str(one)


def test_a_query_writes_nothing(postgres_url: str) -> None:
    """A query that calls a function which writes is refused by the database."""
    with psycopg.connect(postgres_url.partition("?")[0], autocommit=True) as admin:
        admin.execute("CREATE TABLE noted (id integer)")
        admin.execute(
            "CREATE FUNCTION noting() RETURNS integer LANGUAGE sql AS 'INSERT INTO noted VALUES (1) RETURNING id'"
        )
        with dibs.connect(postgres_url) as client, pytest.raises(dibs.InvalidOption, match="read-only"):
            client.claims("event").take(query="SELECT noting()")
        assert admin.execute("SELECT count(*) FROM noted").fetchone() == (0,)


def test_rows_that_are_held_are_passed_over_by_index(postgres: PostgresServer, postgres_url: str) -> None:
    """A query by an index stays one: what is held is looked up row by row, and no more rows are read than needed."""
    from dibs.queries import Query
    from dibs.stores import postgres_query, postgres_wire

    plain = postgres_url.partition("?")[0]
    with psycopg.connect(plain, autocommit=True) as admin, dibs.connect(plain) as client:
        admin.execute("CREATE TABLE big (id integer PRIMARY KEY, due boolean)")
        admin.execute("INSERT INTO big SELECT i, true FROM generate_series(1, 50000) i")
        admin.execute("ANALYZE big")
        with client.claims("big").take(range(1, 500)):
            query = Query("SELECT id FROM big WHERE due ORDER BY id", (), "default:big/", 10)
            held = postgres_query.held(query, "dibs_lease", postgres_wire.literal)
            sql = postgres_query.statement(query, held, postgres_wire.literal)
            plan = "\n".join(row[0] for row in admin.execute("EXPLAIN (ANALYZE) " + sql))
            assert "Index Scan using big_pkey" in plan, plan
            assert "dibs_lease_pkey" in plan, plan
            assert "Rows Removed by Filter: 499" in plan, plan
