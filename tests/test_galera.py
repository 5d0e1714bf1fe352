"""Galera: nodes of MariaDB that are one database, each a little behind the others. (See ``tests.chaos``, too.)"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from time import sleep
from typing import Any

import pytest

import dibs
from dibs.clock import Deadline
from dibs.connecting import locate
from dibs.jobs import Finished, NewJob
from dibs.steps import run
from dibs.store import Held
from dibs.stores.mysql_link import Connection
from dibs.testing import check_store
from tests.at_work import at_work
from tests.chaos.proxy import Proxy
from tests.job_queues import JobQueue, finishing
from tests.servers.galera import GaleraCluster, GaleraNode
from tests.servers.process import wait_until

DRIVERS = ["pymysql", *(["mysqlclient"] if find_spec("MySQLdb") else [])]
# Longer than the other nodes take to give up one that has died: 5 s, as shipped, and what comes of it.
TTL_S = 20.0
# Cases of conformance in which several connections speak of the same names and jobs.
ACROSS = [
    "grant_then_held",
    "tokens_rise_across_releases",
    "tokens_rise_across_purge",
    "a_purge_elsewhere_raises_no_doubt",
    "a_transfer_changes_hands_at_once",
    "renewal_keeps_it_alive",
    "purged_slots_leave_their_tokens",
    "opposite_orders",
    "verbs_mix_in_one_call",
    "a_repeated_take_is_one_take",
    "each_job_goes_to_one",
    "an_end_counts_once",
    "extended_claims_last",
    "a_key_is_unique_while_its_job_lives",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[GaleraCluster]:
    with GaleraCluster() as cluster:
        yield cluster


@pytest.fixture
def spread(cluster: GaleraCluster) -> Iterator[str]:
    """A new database where each connection leads to another node."""
    with Proxy(*cluster.ports) as network:
        yield at(cluster.create_database(), cluster, network.port)


def at(url: str, cluster: GaleraCluster, port: int) -> str:
    return url.replace(f":{cluster.port}/", f":{port}/")


def sql(node: GaleraNode, url: str, text: str) -> Any:
    return node.sql(text, database=url.rpartition("/")[2])


def test_the_contract_holds_whichever_node_is_asked(spread: str) -> None:
    """What one connection was told, the next one is told, too, by another node."""
    assert check_store(spread, only=ACROSS) == len(ACROSS)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_node_that_is_behind_takes_nobody_for_dead(cluster: GaleraCluster, driver: str) -> None:
    """Leases and jobs of whoever comes to a node that has not applied them yet are what they were."""
    url = cluster.create_database()
    here, there = cluster.nodes[:2]
    sql(here, url, "CREATE TABLE large (id INT PRIMARY KEY, text VARCHAR(200))")
    sql(here, url, "INSERT INTO large SELECT seq, REPEAT('x', 150) FROM seq_1_to_80000")
    with (
        Proxy(here.port) as address,
        dibs.connect(f"{at(url, cluster, address.port)}?driver={driver}", patience=60) as client,
    ):
        client.setup()
        queue = client.queue("q")
        queue.put("job")
        for letter in "yzabcdefgh":
            # What is committed at once here takes as long again to apply there, and everything else comes after it.
            sql(here, url, f"UPDATE large SET text = REPEAT('{letter}', 180)")
            lock, permit = client.lock("a").acquire(), client.semaphore("s", 1).acquire()
            jobs = queue.take()
            assert lock is not None
            assert permit is not None
            assert len(jobs.won) == 1
            if not sql(there, url, "SELECT 1 FROM dibs_lease WHERE name = 'default:a' AND claim_id IS NOT NULL"):
                break
            # On a busy machine this process may have been the slower one.
            lock.release()
            permit.release()
            jobs.release()
        else:
            pytest.fail("it was never behind")
        address.lead(there.port)
        address.cut()
        lock.renew()
        permit.renew()
        assert client.lock("a").acquire(timeout=0) is None
        jobs.done()
        assert lock.release()
        assert permit.release()


def test_transactions_of_the_callers_own(cluster: GaleraCluster) -> None:
    """Jobs are put at any node. A lease is guarded at the node that dibs uses, and nowhere else."""
    url = cluster.create_database()
    with dibs.connect(url) as client:
        client.queue("q").put("first")
        lease = client.lock("a").acquire()
        assert lease is not None
        for node in cluster.nodes:
            with node.connect(url.rpartition("/")[2]) as connection:
                connection.begin()
                client.queue("q").put(node.port, connection=connection)
                if node is cluster.nodes[0]:
                    lease.guard(connection)
                else:
                    with pytest.raises(dibs.InvalidOption, match="another"):
                        lease.guard(connection)
                connection.commit()
        with client.queue("q").take(10) as batch:
            assert {job.payload for job in batch.won} == {"first", *cluster.ports}
        assert lease.release()


def test_doctor_says_what_galera_is(cluster: GaleraCluster) -> None:
    """Grants survive a node; but each compares expiries with its own clock, which is told as it is."""
    with dibs.connect(cluster.create_database()) as client:
        found = {finding.promise: finding for finding in run(client._desk.checking())}
    assert [promise for promise, finding in found.items() if not finding.kept] == ["one server decides, by one clock"]
    assert found["grants survive a failover"].detail.endswith("nodes: 3")


def test_a_node_dies_under_programs_at_work(cluster: GaleraCluster) -> None:
    """They go on at another node, and nothing is lost."""
    url = cluster.create_database()
    with Proxy(cluster.port) as address, at_work(at(url, cluster, address.port), TTL_S) as programs:
        cluster.nodes[0].kill()
        try:
            address.lead(cluster.nodes[1].port)
            programs.go_on()
        finally:
            cluster.nodes[0].start()


@pytest.mark.parametrize("limit", [1, 2])
def test_groups_of_jobs_keep_to_their_limit_at_all_nodes(cluster: GaleraCluster, limit: int) -> None:
    """However many workers there are at each node, and whoever puts where: each job is worked once."""
    url = cluster.create_database()
    clients = [dibs.connect(at(url, cluster, port), patience=30) for port in cluster.ports for _ in range(2)]
    clients[0].setup()
    mutex, at_it, most, worked = threading.Lock(), Counter[Any](), Counter[Any](), Counter[Any]()

    def work(job: dibs.Job) -> None:
        with mutex:
            at_it[job.group] += 1
            most[job.group] = max(most[job.group], at_it[job.group])
        sleep(0.005)  # the work
        with mutex:
            at_it[job.group] -= 1
            worked[job.payload] += 1

    def put(client: dibs.Client, start: int) -> None:
        for number in range(start, start + 40):
            client.queue("q").put(number, group=f"g{number % 7}")

    threads = [threading.Thread(target=put, args=(client, 40 * i)) for i, client in enumerate(clients)]
    for client in clients:
        queue = client.queue("q", group_limit=limit)
        threads.append(threading.Thread(target=queue.run, args=(work,), kwargs={"workers": 2, "idle": 2}))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    assert worked == Counter(range(40 * len(clients)))
    assert max(most.values()) <= limit


def test_takes_that_do_not_see_each_other_do_not_both_count(
    cluster: GaleraCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take that has counted and chosen begins again when another node lets one of the same group be taken first."""
    url = cluster.create_database()
    here, there = (JobQueue(locate(at(url, cluster, port))[0].open()) for port in cluster.ports[:2])
    here.put(NewJob("0", group="other"))  # so that there are tables, and the row that takes lock
    assert here.one(finishing(here.take(group_limit=1))) == Finished()
    chosen, go_on, told = threading.Event(), threading.Event(), list[Any]()
    execute = Connection._execute

    def slow(connection: Connection, statement: str, deadline: Deadline) -> Any:
        if statement == "COMMIT" and connection is here.store._connection and not chosen.is_set():
            chosen.set()
            assert go_on.wait(20)
        return execute(connection, statement, deadline)

    taker = threading.Thread(target=lambda: told.append(here.take(group_limit=1)))
    with cluster.nodes[0].connect(url.rpartition("/")[2]) as connection:
        # Nobody sees it yet, but it comes first.
        connection.begin()
        here.within(connection, here.asked(NewJob("first", group="g")))
        here.put(NewJob("second", group="g"))
        monkeypatch.setattr(Connection, "_execute", slow)
        taker.start()
        assert chosen.wait(20)
        connection.commit()
    assert [job.payload for job in there.take(group_limit=1).jobs] == ["first"]
    go_on.set()
    taker.join()
    assert isinstance(told[0], Held)
    here.store.close()
    there.store.close()


def test_a_node_without_the_majority_grants_nothing() -> None:
    """It is away, and says why; what was granted before is held until its time is over."""
    with GaleraCluster(2) as cluster, dibs.connect(cluster.create_database(), patience=1) as client:
        lease = client.lock("a").acquire()
        assert lease is not None
        cluster.nodes[1].kill()

        def refused() -> bool:
            with pytest.raises(dibs.StoreUnavailable) as told:
                client.lock("b").acquire(timeout=0)
            return "cut off from the majority" in str(told.value)

        assert wait_until(refused, 30)
        assert lease.held
