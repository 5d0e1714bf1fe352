"""Claims kept in three columns of the user's own table: who has a row, for how long, and what the user's own
transactions on it see of that."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

import dibs
from dibs.columns import migration_sql
from tests.between import Between
from tests.callers import KINDS, Caller, later, raw
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.test_once import Machine
from tests.yard import LONG_S, ROWS, URLS, Yard, until

SHORT_S = 1.0


@pytest.fixture(params=URLS, ids=[url.partition("_")[0] for url in URLS])
def yard(request: pytest.FixtureRequest) -> Iterator[Yard]:
    yard = Yard(request.getfixturevalue(request.param))
    yield yard
    yard.close()


# -- who has a row ----------------------------------------------------------------------------------------------------


def test_rows_are_claimed_where_they_stand(yard: Yard) -> None:
    """A claim raises the row's token and says who has it; done clears that, and the token stays."""
    claims = yard.claims()
    with claims.take([3, 5, 4]) as batch:
        assert (batch.won, batch.busy, batch.stale, batch.token) == ([3, 5, 4], [], [], 1)
        item = batch.items[0]
        assert (item.name, item.key, item.fencing_token, item.held) == ("event/3", "3", 1, True)
        token, claim, ends = yard.row(3)
        assert token == 1
        assert item.claim_id in claim
        assert item.holder.rpartition("/")[0] in claim
        assert ends is not None
        assert yard.row(6) == (None, None, None)
        batch.items[0].done()
        batch.items[1].skip()
        until(lambda: yard.row(3) == yard.row(5) == (1, None, None))
        assert yard.row(4)[1] is not None
    assert yard.row(4) == (1, None, None)
    assert (batch.left, batch.lost) == ([4], [])
    with claims.take([4]) as batch:
        assert batch.token == 2
    assert not claims._core._desk.session().holdings.held


def test_a_query_finds_and_claims(yard: Yard) -> None:
    """Up to n of what the query yields and nobody has claimed, in its order; the next taker finds those behind them."""
    ours, theirs = yard.claims(), yard.claims()
    with theirs.take([2]), ours.take(query=yard.due, n=3) as batch:
        assert batch.won == [(1, "1"), (3, "3"), (4, "4")]
        with theirs.take(query=yard.due, n=2) as other:
            assert [number for number, _ in other.won] == [5, 6]
        for item in batch:
            yard.run(f"UPDATE event SET due = FALSE WHERE id = {item.value[0]}")
    with theirs.take(query=yard.due, n=2) as other:
        assert [number for number, _ in other.won] == [2, 5]


def test_two_clients_win_disjoint_rows(yard: Yard) -> None:
    """Of rows that several claim at once, in any order, each is won by one; nobody waits for anybody."""
    clients = [yard.client() for _ in range(4)]
    together = threading.Barrier(len(clients))
    batches: list[dibs.Batch[int]] = []

    def take(client: dibs.Client, numbers: list[int]) -> None:
        together.wait()
        batches.append(yard.claims(client).take(numbers))

    numbers = list(range(1, ROWS + 1))
    threads = [
        threading.Thread(target=take, args=(client, numbers if place % 2 else numbers[::-1]))
        for place, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    won = [number for batch in batches for number in batch.won]
    assert len(batches) == 4
    assert len(won) == len(set(won))
    for batch in batches:
        assert sorted(batch.won + batch.busy) == numbers
        batch.release()
    with yard.claims().take(numbers) as batch:
        assert batch.won == numbers


def test_many_takers_work_each_row_once(yard: Yard) -> None:
    """Of several who take by a query and mark what they have done, each row is worked by exactly one."""
    worked: Counter[int] = Counter()
    together = threading.Barrier(3)

    def work(client: dibs.Client) -> None:
        together.wait()
        claims = yard.claims(client)
        while True:
            with claims.take(query=yard.due, n=3) as batch:
                for item in batch:
                    worked[item.value[0]] += 1
                    yard.run(f"UPDATE event SET due = FALSE WHERE id = {item.value[0]}")
            if not batch.won and not yard.run("SELECT 1 FROM event WHERE due"):
                return

    threads = [threading.Thread(target=work, args=(yard.client(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert worked == Counter(range(1, ROWS + 1))


def test_an_expired_claim_is_taken_over(yard: Yard) -> None:
    """A claim that has ended is another's, under a greater token; what its old holder does late is refused."""
    ours, theirs = yard.claims(ttl=SHORT_S), yard.claims()
    ours.take([99]).release()  # so that the claim itself is quick
    batch = ours.take([1, 2])
    until(lambda: not batch.items[0].held)
    taken: list[dibs.Batch[int]] = []

    def take() -> bool:
        taken.append(theirs.take([1]))
        return bool(len(taken[-1]))

    until(take)
    with taken[-1] as other:
        assert other.token == 2
        with pytest.raises(dibs.LeaseLost):
            batch.items[0].done()
        batch.release()
        assert set(batch.lost) - {2} == {1}
        assert other.items[0].held
        assert other.items[0].claim_id in yard.row(1)[1]
    assert yard.row(1) == (2, None, None)


def test_what_the_store_ended_is_lost(yard: Yard) -> None:
    """A claim that somebody else took from the row is noticed by its renewal, and its done changes nothing."""
    with yard.claims(ttl=3, renew=True).take([1, 2]) as batch:
        first, second = batch.items
        yard.run("UPDATE event SET dibs_token = 7, dibs_claim = 'x else/1', dibs_until = NULL WHERE id = 1")
        until(lambda: not first.held)
        assert second.held
        with pytest.raises(dibs.LeaseLost):
            first.done()
        assert yard.row(1) == (7, "x else/1", None)
    assert batch.lost == [1]
    with yard.claims(ttl=LONG_S).take([1]) as batch:
        assert batch.token == 8
        yard.run("UPDATE event SET dibs_token = 9, dibs_claim = NULL, dibs_until = NULL WHERE id = 1")
        batch.items[0].done()  # it is told at the end of the batch: nobody waited
    assert batch.lost == [1]


def test_claims_are_renewed(yard: Yard) -> None:
    """A batch that is renewed lasts as long as it is worked; others find its rows busy all the while."""
    claims, theirs = yard.claims(ttl=3, renew=True), yard.claims()
    claims.take([99]).release()  # so that the claim itself is quick
    with claims.take([1, 2]) as batch:
        ends = yard.row(1)[2]
        by = time.monotonic() + 4
        while time.monotonic() < by:
            assert theirs.take([1, 2]).busy == [1, 2]
            time.sleep(0.05)
        assert all(item.held for item in batch.items)
        assert yard.row(1)[2] > ends
        assert [item.fencing_token for item in batch.items] == [1, 1]
    assert (batch.lost, batch.left) == ([], [1, 2])


def test_a_failed_row_is_kept(yard: Yard) -> None:
    """After ``fail(retry_in=…)`` nobody gets the row for that long; who had it stays visible."""
    claims = yard.claims()
    with claims.take([1, 2]) as batch:
        batch.items[0].fail("no luck", retry_in=30)
        batch.items[1].fail()
    assert batch.failed == [1, 2]
    with claims.take([1, 2]) as batch:
        assert (batch.won, batch.busy) == ([2], [1])
    token, claim, ends = yard.row(1)
    assert token == 1
    assert claim.endswith(f"/{os.getpid()}")
    assert ends is not None


def test_what_has_no_row_is_stale(yard: Yard) -> None:
    """A key without a row, also one that its column cannot hold, is stale; the others are claimed."""
    with yard.claims().take([1, 777, "x", "99999999999999999999999", 2]) as batch:
        assert (batch.won, batch.busy) == ([1, 2], [])
        assert batch.stale == [777, "x", "99999999999999999999999"]
    with yard.claims().take([777]) as batch:
        assert (batch.won, batch.stale, batch.token) == ([], [777], None)


def test_a_row_that_is_made_anew_begins_its_tokens_again(yard: Yard) -> None:
    """Tokens are the row's: deleted under a claim, that is lost; inserted again, the next claim has token 1."""
    with yard.claims().take([1]) as batch:
        yard.run("DELETE FROM event WHERE id = 1")
        yard.run("INSERT INTO event (id, kind, due) VALUES (1, 'new', TRUE)")
        with yard.claims().take([1]) as other:
            assert other.token == 1
        batch.items[0].done()
    assert batch.lost == [1]


def test_other_clients_in_other_namespaces_claim_the_same_rows(yard: Yard) -> None:
    """The row is claimed, by whatever name: of another source or namespace, and beside leases of the same name."""
    with yard.claims().take([1]):
        other = yard.client(namespace="other")
        with other.claims("anything", mode="columns", table="event", key="id").take([1, 2]) as batch:
            assert (batch.won, batch.busy) == ([2], [1])
        with yard.client().claims("event").take([1]) as leases:
            assert leases.won == [1]
    client = yard.client()
    with client.lock("event/1"), yard.claims(client).take([1]) as batch:
        assert batch.won == [1]
        with client.lock("event/2", timeout=0):
            pass


def test_a_pause_keeps_claims_out(yard: Yard) -> None:
    """New claims of a source that is paused, or of one of its rows, are refused; a resume lets them in."""
    claims = yard.claims(client := yard.client())

    def busy() -> list[int]:
        with claims.take([1, 2]) as batch:
            return batch.busy

    for name, expected in (("event/*", [1, 2]), ("event/1", [1])):
        client.pause(name)
        assert busy() == expected
        client.resume(name)
        until(lambda: not busy())


def test_the_second_look_gives_back_what_is_not_due(yard: Yard) -> None:
    """What somebody worked and freed between the look and the claim is given back, and never handed out."""
    between = Between(yard.url)
    done: list[int] = []

    def finish(requests: Any) -> None:
        if not done and len(requests) == 3:  # the claims: after the query, and before they reach the store
            done.append(1)
            yard.run("UPDATE event SET due = FALSE WHERE id IN (1, 3)")

    with between.client() as client:
        client.ping()
        between.before = finish
        with yard.claims(client).take(query=yard.due, n=3) as batch:
            assert (done, batch.won, batch.stale) == ([1], [(2, "2")], [(1, "1"), (3, "3")])
        assert yard.row(1) == yard.row(3) == (1, None, None)


def test_a_repeated_request_finds_its_own_claim(yard: Yard) -> None:
    """A claim whose answer was lost is asked for again and granted under the same token; its release likewise."""
    between = Between(yard.url)
    losses: list[int] = []

    def lose(requests: Any) -> None:
        if len(losses) < 2:
            losses.append(len(requests))
            raise dibs.StoreUnavailable("the answer was lost")

    with between.client() as client:
        client.ping()
        between.after = lose
        with yard.claims(client).take([1, 2]) as batch:
            assert (losses, batch.won, batch.token) == ([2, 2], [1, 2], 1)
            losses.clear()
        assert (batch.lost == [] and losses == [2, 1]) or losses == [2, 2]
        assert yard.row(1) == yard.row(2) == (1, None, None)


def test_one_call_carries_claims_of_both_kinds(yard: Yard) -> None:
    """What travels in one call, claims on rows and leases, is answered each by its own."""
    client = yard.client()
    threads = []
    won: list[Any] = []

    def claim(number: int) -> None:
        with yard.claims(client).take([number]) as batch, client.lock(f"l{number}") as lease:
            won.append((batch.won, lease.held))

    for number in range(1, ROWS + 1):
        threads.append(threading.Thread(target=claim, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert sorted(won) == [([number], True) for number in range(1, ROWS + 1)]


def test_tasks_claim_rows(yard: Yard) -> None:
    """The same in tasks: claimed, worked, given back, streamed."""

    async def main() -> list[Any]:
        async with dibs.connect_async(yard.url) as client:
            claims = client.claims("event", mode="columns", ttl=LONG_S)
            async with await claims.take([1, 2, 999]) as batch:
                found: list[Any] = [batch.won, batch.stale]
                async for item in batch:
                    item.done()
            async for item in claims.stream(query=yard.due, n=2):
                found.append(item.value)
                break
            return found

    assert asyncio.run(main()) == [[1, 2], [999], (1, "1")]
    until(lambda: yard.row(1)[1] is None)


WORKER = """
import sys, time, dibs
with dibs.connect(sys.argv[1]).claims("event", mode="columns", ttl=3).take([1, 2]) as batch:
    print(batch.token, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_worker_had_is_taken_over(yard: Yard) -> None:
    """A process that is killed between take and done frees its rows by its ttl, to the next token."""
    with subprocess.Popen([sys.executable, "-c", WORKER, yard.url], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"1\n"
        claims = yard.claims()
        assert claims.take([1, 2]).busy == [1, 2]
        worker.send_signal(signal.SIGKILL)
    taken: list[dibs.Batch[int]] = []

    def take() -> bool:
        taken.append(claims.take([1, 2]))
        return taken[-1].won == [1, 2]

    until(take)
    with taken[-1] as batch:
        assert batch.token == 2


# -- the user's own transactions --------------------------------------------------------------------------------------


@pytest.fixture(params=["postgres_url", "mysql_url"], ids=["postgres", "mysql"])
def served(request: pytest.FixtureRequest) -> Iterator[Yard]:
    """A yard in a database that has locks on rows."""
    yard = Yard(request.getfixturevalue(request.param))
    yield yard
    yard.close()


def test_a_row_that_a_transaction_has_locked_is_busy(served: Yard) -> None:
    """What a transaction of the user's has locked is busy at once, and claimed when that has ended."""
    claims = served.claims()
    claims.take([9]).release()
    with closing(raw(served.plain)) as connection:
        connection.cursor().execute("UPDATE event SET kind = 'x' WHERE id = 1")
        began = time.monotonic()
        with claims.take([1, 2]) as batch:
            assert (batch.won, batch.busy) == ([2], [1])
        assert time.monotonic() - began < 5  # (a lock would be waited for as long as the transaction lasts)
        connection.rollback()
        with claims.take([1, 2]) as batch:
            assert batch.won == [1, 2]


def test_a_renewal_does_not_wait_for_a_transaction(served: Yard) -> None:
    """While a transaction has one row locked, the others are renewed; it goes on when that ends in time."""
    with closing(raw(served.plain)) as connection, served.claims(ttl=6, renew=True).take([1, 2]) as batch:
        (first,), (second,) = served.run("SELECT dibs_until FROM event WHERE id IN (1, 2) ORDER BY id")
        connection.cursor().execute("UPDATE event SET kind = 'x' WHERE id = 1")
        until(lambda: served.row(2)[2] > second)
        assert served.row(1)[2] == first
        connection.commit()
        until(lambda: served.row(1)[2] > first)
        assert all(item.held for item in batch.items)
        connection.cursor().execute("UPDATE event SET kind = 'y' WHERE id = 1")
        with later(0.3, connection.commit):
            batch.items[0].done()  # its release passes over the row until the transaction has ended
        until(lambda: served.row(1) == (1, None, None))
    assert batch.lost == []


def test_a_release_that_waits_for_a_row_keeps_nobody_waiting(served: Yard) -> None:
    """While a release is asked for again and again, other calls go on; in the end it is left to the ttl."""
    client = served.client(patience=6)
    with closing(raw(served.plain)) as connection:
        batch = served.claims(client).take([1, 2])
        connection.cursor().execute("UPDATE event SET kind = 'x' WHERE id = 1")
        batch.items[0].done()
        ask = batch.items[0]._hold.ending
        assert ask is not None
        until(lambda: ask.trouble is not None)
        for number in range(10):
            with client.lock(f"other/{number}"), served.claims(client).take([3 + number]) as other:
                assert other.won == [3 + number]
        assert not ask.settled
        batch.items[1].done()
        batch.release()  # returns when the store has answered, or patience is over
        assert isinstance(ask.error, dibs.StoreUnavailable)
        assert batch.lost == []
        connection.rollback()
    assert served.row(1)[1] is not None
    assert served.row(2) == (1, None, None)


def test_a_claim_that_a_transaction_outlasts_is_told(served: Yard) -> None:
    """A row that a transaction keeps locked for longer than the ttl is lost, and it is said why."""
    with closing(raw(served.plain)) as connection, served.claims(ttl=3, renew=True).take([1]) as batch:
        connection.cursor().execute("UPDATE event SET kind = 'x' WHERE id = 1")
        until(lambda: not batch.items[0].held)
        with pytest.raises(dibs.LeaseLost, match="a transaction has locked its row"):
            batch.items[0].check()


@pytest.fixture(params=KINDS)
def caller(request: pytest.FixtureRequest) -> Iterator[tuple[Yard, Caller]]:
    fixture, connect = KINDS[request.param]
    yard = Yard(request.getfixturevalue(fixture))
    caller = connect(yard.url)
    yield yard, caller
    caller.close()
    yard.close()


def test_done_in_a_committed_transaction(caller: tuple[Yard, Caller]) -> None:
    """The effect and the end of the claim are one commit: before it nobody gets the row, after it everybody may."""
    yard, mine = caller
    with yard.claims().take([1]) as batch:
        item = next(batch)
        mine.run("UPDATE event SET due = FALSE WHERE id = 1")
        item.done(connection=mine.given)
        assert not item.held
        with yard.client(patience=0.5) as other:
            try:
                assert not yard.claims(other).take([1]).won
            except dibs.StoreUnavailable:  # SQLite lets nobody write meanwhile
                assert yard.dialect == "sqlite"
        mine.commit()
        assert yard.row(1) == (1, None, None)
        with yard.claims().take([1]) as other_batch:
            assert other_batch.token == 2
    assert (batch.left, batch.lost) == ([], [])
    assert [bool(due) for (due,) in yard.run("SELECT due FROM event WHERE id = 1")] == [False]


def test_done_in_a_rolled_back_transaction(caller: tuple[Yard, Caller]) -> None:
    """Rolled back, the row is due as before, and free for the next soon after."""
    yard, mine = caller
    with yard.claims().take([1]) as batch:
        item = next(batch)
        mine.run("UPDATE event SET due = FALSE WHERE id = 1")
        item.done(connection=mine.given)
        mine.rollback()
        claims, taken = yard.claims(), []

        def take() -> bool:
            taken.append(claims.take([1]))
            return bool(len(taken[-1]))

        until(take)
        assert taken[-1].token == 2
        taken[-1].release()
    assert [bool(due) for (due,) in yard.run("SELECT due FROM event WHERE id = 1")] == [True]
    assert batch.lost == []


def test_a_late_done_cannot_be_committed(caller: tuple[Yard, Caller]) -> None:
    """Who lost the claim is told before the commit, by the row."""
    yard, mine = caller
    with yard.claims().take([1]) as batch:
        item = next(batch)
        yard.run("UPDATE event SET dibs_token = 2, dibs_claim = 'x else/1' WHERE id = 1")
        with pytest.raises(dibs.LeaseLost):
            item.done(connection=mine.given)
        mine.rollback()
    assert batch.lost == [1]
    assert yard.row(1)[:2] == (2, "x else/1")


def test_a_row_is_done_after_its_ttl(caller: tuple[Yard, Caller]) -> None:
    """From done on, others are kept out until the transaction has ended, also when its ttl is over before that."""
    yard, mine = caller
    claims = yard.claims(ttl=2)
    claims.take([2]).release()  # connected, and the table known
    with claims.take([1]) as batch:
        item = next(batch)
        item.done(connection=mine.given)
        time.sleep(2.1)  # the ttl, by any clock
        with yard.client(patience=0.5) as other:
            try:
                assert not yard.claims(other).take([1]).won
            except dibs.StoreUnavailable:
                assert yard.dialect == "sqlite"
        mine.run("UPDATE event SET kind = 'mine' WHERE id = 1")
        mine.commit()
    assert yard.run("SELECT kind FROM event WHERE id = 1") == [("mine",)]
    assert yard.row(1) == (1, None, None)


def test_without_a_transaction_it_is_said(served: Yard) -> None:
    """A connection in autocommit pins nothing, which is told, and the item is held still."""
    with closing(raw(served.plain)) as connection:
        if served.dialect == "mysql":
            connection.autocommit(True)
        else:
            connection.autocommit = True
        with served.claims().take([1]) as batch:
            item = next(batch)
            with pytest.raises(dibs.InvalidOption, match="no transaction open"):
                item.done(connection=connection)
            assert item.held


def test_tasks_finish_rows_in_their_transactions(postgres_url: str) -> None:
    """In tasks, done with a connection is awaited."""
    yard = Yard(postgres_url)

    async def main() -> None:
        async with dibs.connect_async(postgres_url) as client:
            connection = await psycopg.AsyncConnection.connect(yard.plain)
            async with await client.claims("event", mode="columns").take([1]) as batch:
                async for item in batch:
                    await item.done(connection=connection)
                    await connection.commit()
            assert (batch.left, batch.lost) == ([], [])
            await connection.close()

    asyncio.run(main())
    assert yard.row(1) == (1, None, None)


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", URLS)
def test_missing_columns_are_told(fixture: str, request: pytest.FixtureRequest) -> None:
    """Without the columns: SetupRequired with the command and the statement; once they are there, it goes on."""
    yard = Yard(request.getfixturevalue(fixture), columns=False)
    claims = yard.claims()
    for given in ({"items": [1]}, {"query": yard.due}):
        with pytest.raises(dibs.SetupRequired, match="dibs schema --claims event") as told:
            claims.take(**given)
        assert "ALTER TABLE" in str(told.value)
    client = yard.client()
    with client.lock("x"):  # what was wrong was of the table alone
        pass
    yard.migrate("event")
    with claims.take([1]) as batch:
        assert batch.won == [1]
        for column in ("dibs_token", "dibs_claim", "dibs_until"):
            yard.run(f"ALTER TABLE event DROP COLUMN {column}")
    with pytest.raises(dibs.SetupRequired, match="dibs schema --claims event"):
        claims.take([2])
    yard.close()


def test_what_is_no_such_table_or_key_is_told(yard: Yard) -> None:
    """A table that is not there, a column that is not there or not unique: InvalidOption, naming it."""
    client = yard.client()
    with pytest.raises(dibs.InvalidOption, match="no table 'nothing'"):
        client.claims("nothing", mode="columns").take([1])
    for key in ("nothing", "kind"):
        with pytest.raises(dibs.InvalidOption, match=f"key='{key}' is no column of 'event' that has a unique index"):
            yard.claims(client, key=key).take(["1"])
    with yard.claims(client).take([1]) as batch:
        assert batch.won == [1]


def test_keys_of_other_types(yard: Yard) -> None:
    """A key may be a text with any characters, a date, and on PostgreSQL a UUID; it is compared exactly."""
    texts = ["a b", "it's", 'q"q', "back\\slash", "ünï 💡", "%s", "A", "a", "7"]
    kind = "VARCHAR(40)"
    if yard.dialect == "mysql":
        kind += " CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci"
        texts.remove("A")
    yard.run(f"CREATE TABLE texts (code {kind} NOT NULL, day DATE, CONSTRAINT codes UNIQUE (code))")
    yard.run("CREATE UNIQUE INDEX days ON texts (day)")
    yard.migrate("texts")
    with closing(raw(yard.plain)) as connection:
        mark = "?" if yard.dialect == "sqlite" else "%s"
        for place, text in enumerate(texts, 1):
            connection.cursor().execute(
                f"INSERT INTO texts (code, day) VALUES ({mark}, {mark})", (text, f"2026-11-{place:02}")
            )
        connection.commit()
    client = yard.client()
    for number in (1, 2):
        with client.claims("texts", mode="columns", key="code").take([*texts, "not there"]) as batch:
            assert (batch.won, batch.stale, batch.token) == (texts, ["not there"], number)
    if yard.dialect != "sqlite":
        with client.claims("texts", mode="columns", key="code").take(["b", "A "]) as batch:
            assert batch.won == []
    with client.claims("texts", mode="columns", key="day", ttl=LONG_S).take(query="SELECT day FROM texts") as batch:
        assert len(batch) == len(texts)
        assert batch.items[0].key.startswith("2026-11-")


def test_names_that_need_quotes(yard: Yard) -> None:
    """Tables and columns with any printable names, and in other schemas, are found by them."""
    table = 'Odd "table`; %s {x}'
    mark = "`" if yard.dialect == "mysql" else '"'

    def quoted(name: str) -> str:
        return mark + name.replace(mark, mark * 2) + mark

    key = "the key's %d \"{id}`"
    with closing(raw(yard.plain)) as connection:
        cursor = connection.cursor()
        cursor.execute(f"CREATE TABLE {quoted(table)} ({quoted(key)} INTEGER PRIMARY KEY)")
        cursor.execute(f"INSERT INTO {quoted(table)} VALUES (1), (2)")
        connection.commit()
    yard.migrate(table)
    claims = yard.client().claims("odd", mode="columns", table=table, key=key)
    query = f"SELECT {quoted(key)} FROM {quoted(table)} ORDER BY 1"
    with claims.take(query=query, n=1) as batch, claims.take([1, 2, 3]) as other:
        assert (len(batch), len(other), other.stale) == (1, 1, [3])
        with closing(raw(yard.plain)) as connection:
            connection.cursor().execute(f"UPDATE {quoted(table)} SET {quoted(key)} = {quoted(key)}")
            if yard.dialect != "sqlite":
                connection.rollback()
            else:
                connection.commit()
            cursor = connection.cursor()
            if yard.dialect == "sqlite":
                cursor.execute("BEGIN IMMEDIATE")
            batch.items[0].done(connection=connection)
            connection.commit()
    with claims.take([1, 2]) as batch:
        assert batch.won == [1, 2]


def test_identifiers_are_checked_before_anything_is_sent() -> None:
    """What cannot be a name, a mode or an option of it is refused where the claims are described."""
    client = dibs.connect("postgresql://nobody@127.0.0.1:1/nothing")
    bad: list[dict[str, Any]] = [
        {"mode": "rows"},
        {"table": "event"},
        {"key": "id"},
        {"mode": "columns", "table": ""},
        {"mode": "columns", "table": "a.b.c"},
        {"mode": "columns", "table": "a."},
        {"mode": "columns", "table": "a\nb"},
        {"mode": "columns", "table": 5},
        {"mode": "columns", "key": ""},
        {"mode": "columns", "key": "x" * 70},
        {"mode": "columns", "max_tries": 3},
        {"mode": "columns", "info": {"a": 1}},
    ]
    for given in bad:
        with pytest.raises(dibs.InvalidOption):
            client.claims("event", **given)
    with pytest.raises(dibs.InvalidOption, match="is none of"):
        migration_sql("oracle", "event")
    with dibs.connect("memory://") as other, pytest.raises(dibs.Unsupported, match="no tables"):
        other.claims("event", mode="columns")


def test_a_table_that_refuses_is_told(yard: Yard) -> None:
    """A trigger that refuses the claim is told in its words, to the claimer alone."""
    if yard.dialect == "postgresql":
        yard.run("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'not so'; END$$")
        yard.run("CREATE TRIGGER no BEFORE UPDATE ON event FOR EACH ROW EXECUTE FUNCTION no()")
    elif yard.dialect == "mysql":
        yard.run(
            "CREATE TRIGGER no BEFORE UPDATE ON event FOR EACH ROW SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not so'"
        )
    else:
        yard.run("CREATE TRIGGER no BEFORE UPDATE ON event BEGIN SELECT RAISE(ABORT, 'not so'); END")
    client = yard.client()
    with pytest.raises(dibs.InvalidOption, match="not so"):
        yard.claims(client).take([1])
    with client.lock("x"):
        pass


def test_items_of_columns_have_no_tries(yard: Yard) -> None:
    """None of them is ever dead, which is told instead of an empty list of those of another mode."""
    claims = yard.claims()
    for ask in (claims.dead, claims.revive):
        with pytest.raises(dibs.Unsupported, match="counts no tries"):
            ask()


def test_a_key_that_grows_is_looked_at_anew(postgres_url: str) -> None:
    """A column made wider while a client is at work holds its greater keys from the next call on."""
    yard, big = Yard(postgres_url), 2**40
    with yard.client() as client:
        claims = yard.claims(client)
        with claims.take([1, big]) as batch:
            assert (batch.won, batch.stale) == ([1], [big])
        yard.run("ALTER TABLE event ALTER COLUMN id TYPE bigint")
        yard.run(f"INSERT INTO event VALUES ({big}, 'big', TRUE)")
        with claims.take([1, big]) as batch:
            assert batch.won == [1, big]


# -- SQLite -----------------------------------------------------------------------------------------------------------


def test_a_reboot_ends_every_claim_on_sqlite(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot what was claimed or kept is free, whatever the boot clock says; the tokens go on."""
    machine = Machine(monkeypatch)
    yard = Yard(sqlite_url)
    with yard.client() as before:
        with yard.claims(before).take([2]) as batch:
            batch.items[0].fail(retry_in=3600)
        batch = yard.claims(before).take([1])
        machine.reboot(60)
        with yard.client() as after, yard.claims(after).take([1, 2, 3]) as late:
            assert (late.won, [item.fencing_token for item in late.items]) == ([1, 2, 3], [2, 2, 1])
            batch.items[0].done()
            batch.release()
            assert batch.lost == [1]
            assert late.items[0].claim_id in yard.row(1)[1]


def test_tables_of_other_options_claim_the_same_rows_on_sqlite(sqlite_url: str) -> None:
    """Clients with other tables for leases in the file, which number its boots by themselves, exclude each other."""
    yard = Yard(sqlite_url)
    with yard.client() as one, dibs.connect(sqlite_url + "?table=other") as two:
        with yard.claims(one).take([1]), yard.claims(two).take([1, 2]) as batch:
            assert (batch.won, batch.busy) == ([2], [1])


@pytest.mark.parametrize("key", ["id", "id BLOB"])
def test_a_key_without_a_type_is_refused_on_sqlite(sqlite_url: str, key: str) -> None:
    """SQLite would not find the number 7 by the text 7 there."""
    with closing(raw(sqlite_url)) as connection:
        connection.execute(f"CREATE TABLE loose ({key} PRIMARY KEY)")
    with dibs.connect(sqlite_url) as client:
        with pytest.raises(dibs.InvalidOption, match="without a type, or a BLOB"):
            client.claims("loose", mode="columns").take([7])
        with pytest.raises(dibs.InvalidOption, match="tables of the file"):
            client.claims("loose", mode="columns", table="other.loose").take([7])


# -- PostgreSQL, MySQL ------------------------------------------------------------------------------------------------


def test_other_schemas_and_uuids_on_postgres(postgres_url: str) -> None:
    """A table in another schema, with a UUID for a key, is found by both; the search path has no say in it."""
    plain, one = postgres_url.partition("?")[0], uuid.uuid4()
    with psycopg.connect(plain, autocommit=True) as admin, dibs.connect(postgres_url) as client:
        admin.execute('CREATE SCHEMA "my app"')
        admin.execute('CREATE TABLE "my app".event (id uuid PRIMARY KEY)')
        admin.execute('INSERT INTO "my app".event VALUES (%s)', (one,))
        admin.execute(migration_sql("postgresql", "my app.event").encode())
        admin.execute(migration_sql("postgresql", "my app.event").encode())  # twice is harmless
        claims = client.claims("event", mode="columns", table="my app.event")
        with claims.take(query='SELECT id FROM "my app".event') as batch:
            assert (batch.won, batch.token) == ([one], 1)
            with psycopg.connect(plain, options="-c search_path=pg_catalog") as connection:
                batch.items[0].done(connection=connection)
                connection.commit()
        with claims.take([str(one), "no uuid"]) as batch:
            assert (batch.won, batch.stale) == ([str(one)], ["no uuid"])


def test_a_claim_is_a_hot_update_on_postgres(postgres_url: str) -> None:
    """Where a page has room, claims, renewals and ends change no index: all of them are HOT updates."""
    yard = Yard(postgres_url)
    yard.run("ALTER TABLE event SET (fillfactor = 50)")
    yard.run("CREATE INDEX kinds ON event (kind)")
    connection = psycopg.connect(yard.plain, autocommit=True)
    connection.execute("VACUUM FULL event")
    read = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'event'"
    before = connection.execute(read).fetchone()
    with yard.client() as client:
        with yard.claims(client).take(range(1, ROWS + 1)) as batch:
            assert len(batch) == ROWS
    seen: list[Any] = []

    def told() -> bool:
        seen[:] = connection.execute(read).fetchone() or ()
        return bool(before and seen[0] - before[0] >= 2 * ROWS)

    until(told)
    connection.close()
    assert before is not None
    assert seen[1] - before[1] == seen[0] - before[0] == 2 * ROWS


def test_an_old_snapshot_is_an_error_of_the_database(postgres_url: str) -> None:
    """Under REPEATABLE READ a row that was claimed after the snapshot cannot be finished: PostgreSQL says so."""
    yard = Yard(postgres_url)
    with yard.client() as client, psycopg.connect(yard.plain) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1 FROM event")
        with yard.claims(client).take([1]) as batch:
            item = next(batch)
            with pytest.raises(psycopg.errors.SerializationFailure):
                item.done(connection=connection)
            connection.rollback()
            assert item.held
            item.done(connection=connection)  # with a snapshot of its own
            connection.commit()
    assert yard.row(1) == (1, None, None)


def test_rights_on_postgres(postgres: PostgresServer, postgres_url: str) -> None:
    """SELECT on the key and the columns, and UPDATE on these, suffice; without them it is said what is needed."""
    yard = Yard(postgres_url)
    database = yard.plain.rpartition("/")[2]
    role = f"app_{database}"
    with yard.client() as client:
        client.setup()
    postgres.create_user(role)
    postgres.psql(f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO "{role}"', database=database)
    postgres.psql(f'REVOKE ALL ON event FROM "{role}"', database=database)
    columns = "dibs_token, dibs_claim, dibs_until"
    with dibs.connect(postgres.url(database, user=role)) as app:
        with pytest.raises(dibs.SetupRequired, match="needs SELECT on id, dibs_token, dibs_claim"):
            yard.claims(app).take([1])
        postgres.psql(f'GRANT SELECT (id, {columns}), UPDATE ({columns}) ON event TO "{role}"', database=database)
        _claims_with_few_rights(yard, app)


def test_rights_on_mysql(mysql: MariaDBServer, mysql_url: str) -> None:
    """SELECT on the key and the columns, and UPDATE on these, suffice; without them it is said what is needed."""
    yard = Yard(mysql_url)
    database = yard.plain.rpartition("/")[2]
    user = f"app_{database}"
    with yard.client() as client:
        client.setup()
    mysql.create_user(user)
    for (table,) in yard.run("SHOW TABLES LIKE 'dibs%'"):
        mysql.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.`{table}` TO '{user}'@'127.0.0.1'")
    columns = "dibs_token, dibs_claim, dibs_until"
    with dibs.connect(mysql.url(database, user=user)) as app:
        with pytest.raises(dibs.InvalidOption, match="that this login can see"):
            yard.claims(app).take([1])
        mysql.sql(f"GRANT SELECT (id) ON `{database}`.event TO '{user}'@'127.0.0.1'")
        with pytest.raises(dibs.SetupRequired, match="that this login can see"):
            yard.claims(app).take([1])
        mysql.sql(f"GRANT SELECT ({columns}) ON `{database}`.event TO '{user}'@'127.0.0.1'")
        with pytest.raises(dibs.SetupRequired, match="needs SELECT on id, dibs_token, dibs_claim"):
            yard.claims(app).take([1])
        mysql.sql(f"GRANT UPDATE ({columns}) ON `{database}`.event TO '{user}'@'127.0.0.1'")
        _claims_with_few_rights(yard, app)


def _claims_with_few_rights(yard: Yard, app: dibs.Client) -> None:
    order = " LIMIT 1000" if yard.dialect == "mysql" else ""
    with yard.claims(app, ttl=3, renew=True).take(query=f"SELECT id FROM event ORDER BY id{order}", n=2) as batch:
        assert batch.won == [1, 2]
        ends = yard.row(1)[2]
        until(lambda: yard.row(1)[2] > ends)
        batch.items[0].done()
        batch.items[1].fail(retry_in=5)
    assert batch.lost == []
    with yard.claims(app).take([1, 2, 99]) as batch:
        assert (batch.won, batch.busy, batch.stale) == ([1], [2], [99])
