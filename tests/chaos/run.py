"""One run: clients at work on a store, faults for a while, then calm, and the verdict."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import dibs
from tests.chaos import resource
from tests.chaos.checker import Verdict, judge
from tests.chaos.client import LOCKS, PAGE, PATIENCE_S, POOL, POOL_LIMIT, PROGRAMS, REQUEST_TIMEOUT_S, SEAT, Plan
from tests.chaos.faults import Faults
from tests.chaos.history import read
from tests.chaos.proxy import Proxy
from tests.servers.etcd import EtcdServer
from tests.servers.galera import GaleraCluster
from tests.servers.memcached import MemcachedServer
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.servers.server import Server
from tests.servers.stepped import SteppedPostgres
from tests.servers.zookeeper import ZooKeeperServer

CLIENTS = 4
# Faults go on for so long at a time, and this much longer than asked for when they have not yet done what they must.
SPELL_S = 2.0
LONGEST = 40
# What has to happen for a run to say anything.
FLOORS = {"granted": 100, "refused": 5, "cancelled": 5, "killed in hand": 1, "lost over a stop": 1}
NETWORK_FLOORS = {"cut": 5, "slow": 20, "deaf": 5, "late": 5}
# Beyond a ttl, after which even what a dead process held is free: the store's own grace, and that of a dead waiter.
GRACE_S = 6.0


class Kind(NamedTuple):
    """A store to run on. ``server`` is None where the clients themselves are all there is."""

    server: Callable[[], Server | GaleraCluster] | None
    #: Given the server, or without one a folder.
    url: Callable[..., str]
    ttl: float = 1.0
    #: It keeps what was granted when it is killed.
    durable: bool = True
    without: tuple[str, ...] = ()
    takeover: str = "expiry"


def _database(driver: str) -> Callable[[MariaDBServer], str]:
    return lambda server: f"{server.create_database()}?driver={driver}"


KINDS = {
    "sqlite": Kind(None, lambda folder: f"sqlite:///{folder}/locks.db"),
    "postgres": Kind(PostgresServer, PostgresServer.create_database),
    "mysql": Kind(MariaDBServer, _database("pymysql")),
    "redis": Kind(RedisServer, RedisServer.create_place),
    "memcached": Kind(
        MemcachedServer, MemcachedServer.url, ttl=3.0, durable=False, without=("permits", "pages", "lead")
    ),
    "etcd": Kind(EtcdServer, EtcdServer.create_place, ttl=2.0),
    "zookeeper": Kind(ZooKeeperServer, ZooKeeperServer.create_root, ttl=2.0),
}
# Each connection leads to another node. (Their clocks are one, that of the machine.)
KINDS["galera"] = Kind(GaleraCluster, GaleraCluster.create_database)
# Its clock is set now and then. (Permits are not watched.)
KINDS["stepped"] = Kind(
    SteppedPostgres, SteppedPostgres.create_database, without=("permits", "pages"), takeover="observe"
)
# mysqlclient must be compiled (scripts/setup_mysqlclient.sh tries to); PyMySQL is always tested.
if find_spec("MySQLdb"):
    KINDS["mysqlclient"] = Kind(MariaDBServer, _database("mysqlclient"))


class Clients:
    """The client processes, by their ids."""

    def __init__(self, plan: Plan, count: int) -> None:
        self._plan = plan
        self._seed = plan.seed
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._log = (Path(plan.folder) / "clients.log").open("ab")
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        self._seed += 1
        plan = json.dumps(self._plan._replace(seed=self._seed)._asdict())
        # They are to be interrupted by what the faults do, not by the Ctrl-C of who watches.
        client = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.chaos.client", plan],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        self._running[client.pid] = client

    def any(self, chance: random.Random) -> int:
        """One of them."""
        return chance.choice(sorted(self._running))

    def has_in_hand(self, pid: int) -> bool:
        """Whether one that stands still has a lease, by what it has written."""
        open_ones: set[str] = set()
        for event in read(Path(self._plan.folder), f"{pid}.history"):
            if event.what == "granted":
                open_ones.add(event.who)
            elif event.what in ("ended", "lost", "cancelled", "failed"):
                open_ones.discard(event.who)
        return bool(open_ones)

    def replace(self, pid: int) -> None:
        """Kill one with -9, and start another in its place."""
        client = self._running.pop(pid)
        client.kill()
        client.wait()
        self._start()

    def ended(self) -> list[str]:
        """What there is to say of those that have ended by themselves, which none should."""
        return [f"client {pid} ended with {p.poll()}" for pid, p in self._running.items() if p.poll() is not None]

    def calm(self, limit_s: float) -> list[str]:
        """Have all come to an end of what they do, and live on. Returns what there is to say of those that did not."""
        folder = Path(self._plan.folder)
        (folder / "calm").touch()
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            restless = set(self._running) - {event.pid for event in read(folder) if event.what == "calm"}
            if not restless:
                return []
            time.sleep(0.2)  # each look reads all of the history
        return [f"P11: client {pid} did not come to an end of what it did" for pid in restless]

    def close(self) -> None:
        for client in self._running.values():
            os.kill(client.pid, signal.SIGKILL)
            client.wait()
        self._running.clear()
        self._log.close()

    def log(self) -> str:
        """The end of what they said to nobody."""
        return (Path(self._plan.folder) / "clients.log").read_text(errors="replace")[-2000:]


def run(
    kind_name: str,
    folder: Path,
    seconds: float,
    seed: int,
    *,
    fenced: bool = True,
    bug: str = "",
    programs: Sequence[str] = tuple(PROGRAMS),
    floors: dict[str, int] | None = None,
    told: Callable[[float, Counter[str]], object] = lambda passed_s, counts: None,
) -> Verdict:
    """Run for so many seconds at least, and until the faults have done what they must. The folder must be empty."""
    kind = KINDS[kind_name]
    if floors is None:
        floors = FLOORS if kind.server is None else {**FLOORS, **NETWORK_FLOORS, "freeze": 1}
        if kind.server is SteppedPostgres:
            floors = {**floors, "step": 3}
    resource.make(folder / "resource.db", list(LOCKS))
    with ExitStack() as stack:
        server = None if kind.server is None else kind.server()
        if server is not None:
            stack.callback(server.close)
        direct = kind.url(folder if server is None else server)
        proxy = None
        url = direct
        if server is not None:
            proxy = Proxy(*(server.ports if isinstance(server, GaleraCluster) else [server.port]))
            stack.callback(proxy.close)
            url = direct.replace(f":{server.port}", f":{proxy.port}")
        with dibs.connect(direct) as client:
            client.setup()
        possible = [name for name in programs if name not in kind.without]
        plan = Plan(url, str(folder), seed * 1000, kind.ttl, possible, fenced, bug=bug, takeover=kind.takeover)
        clients = Clients(plan, CLIENTS)
        stack.callback(clients.close)

        def more() -> Counter[str]:
            """What the history does not tell."""
            done: Counter[str] = Counter() if proxy is None else Counter(proxy.done)
            done["lost writes"] = sum(resource.lost_writes(folder / "resource.db").values())
            return done

        faults = Faults(seed, kind.ttl, clients, proxy, server, kind.durable)
        begun = time.monotonic()
        while True:
            faults.go_on(SPELL_S)
            passed_s = time.monotonic() - begun
            so_far = judge(read(folder), faults.done, floors, more=more())
            told(passed_s, so_far.counts)
            enough = passed_s >= seconds and not so_far.missing
            if so_far.broken or clients.ended() or enough or passed_s > LONGEST * seconds:
                break
        faults.heal()
        broken = clients.ended()
        broken += clients.calm(3 * (REQUEST_TIMEOUT_S + PATIENCE_S + kind.ttl))
        stuck = _stuck(direct, kind) if not broken else []
        if broken:
            broken.append(clients.log())
    verdict = judge(read(folder), faults.done, floors, stuck, more())
    lost = verdict.counts["lost writes"]
    if fenced and lost:
        broken.append(f"the fence let {lost} writes of old holders through")
    return verdict._replace(broken=broken + verdict.broken)


def _stuck(url: str, kind: Kind) -> list[str]:
    """The names that are not to be had although nobody does anything any more."""
    limit = kind.ttl + GRACE_S
    with dibs.connect(url, takeover=kind.takeover) as client:
        locks = {name: client.lock(name) for name in LOCKS}
        if "permits" not in kind.without:
            locks[POOL] = client.semaphore(POOL, POOL_LIMIT, weight=POOL_LIMIT)  # type: ignore[assignment]
        if "pages" not in kind.without:
            locks[PAGE] = client.rwlock(PAGE).write()
        if "lead" not in kind.without:
            locks[SEAT] = client.lock(SEAT)
        leases = {name: lock.acquire(timeout=limit) for name, lock in locks.items()}
    return [name for name, lease in leases.items() if lease is None]
