"""What is done to clients, server and network while they work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dibs.clock import boot_now
from tests.servers.process import wait_until
from tests.servers.stepped import Stepped

if TYPE_CHECKING:
    from tests.chaos.proxy import Proxy
    from tests.chaos.run import Clients
    from tests.servers.galera import GaleraCluster
    from tests.servers.server import Server

STATE_LIMIT_S = 5.0
HOUR_S, DAYS_S = 3600.0, 10 * 24 * 3600.0
# So many clients are looked at for one with a lease in hand.
HALTS = 20


class Fault(NamedTuple):
    """Something that was done; ``pid`` is that of a client it was done to."""

    what: str
    begin: float
    end: float
    pid: int = 0


class Faults:
    """Does one thing after the other, and several at a time, as a seed says."""

    def __init__(
        self,
        seed: int,
        ttl: float,
        clients: Clients,
        proxy: Proxy | None,
        server: Server | GaleraCluster | None,
        durable: bool,
    ) -> None:
        self._random = random.Random(seed)
        self._ttl = ttl
        self._clients = clients
        self._proxy = proxy
        self._server = server
        self.done: list[Fault] = []
        #: What has begun and is to be ended: when, and how.
        self._under_way: list[tuple[float, Callable[[], None]]] = []
        self._stopped: set[int] = set()
        self._spoiled = False
        self._choices: list[tuple[int, Callable[[], None]]] = [(4, self._kill), (6, self._stop)]
        if proxy is not None:
            self._choices += [(2, self._cut), (6, self._spoil)]
        if server is not None:
            self._choices += [(2, self._freeze), (1, self._crash)] if durable else [(2, self._freeze)]
        if isinstance(server, Stepped):
            self._choices.append((6, partial(self._step, server)))

    def go_on(self, seconds: float) -> None:
        """Go on for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(self._random.uniform(0.05, 0.4))
            self._end_what_is_due(boot_now())
            weights = [weight for weight, _ in self._choices]
            if self._random.random() < 0.4:
                self._random.choices([act for _, act in self._choices], weights)[0]()

    def heal(self) -> None:
        """End whatever is under way."""
        self._end_what_is_due(float("inf"))

    def _end_what_is_due(self, now: float) -> None:
        due = [end for at, end in self._under_way if at <= now]
        self._under_way = [(at, end) for at, end in self._under_way if at > now]
        for end in due:
            end()

    def _halt(self) -> tuple[int, float]:
        """Stop a client, if possible one with a lease in hand: which one, and since when it stands still."""
        for tries_left in reversed(range(HALTS)):
            pid = self._clients.any(self._random)
            if pid in self._stopped:
                continue
            os.kill(pid, signal.SIGSTOP)
            _wait_for(pid, "T")
            at = boot_now()
            if not tries_left or self._clients.has_in_hand(pid):
                return pid, at
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)  # for it to get somewhere else before the next look
        return 0, 0.0

    def _kill(self) -> None:
        pid, at = self._halt()
        if pid:
            self._clients.replace(pid)
            self.done.append(Fault("kill", at, at, pid))

    def _stop(self) -> None:
        """Stop a client for less than its leases last, or for longer."""
        pid, begin = self._halt()
        if not pid:
            return
        self._stopped.add(pid)

        def end() -> None:
            self._stopped.discard(pid)
            self.done.append(Fault("stop", begin, boot_now(), pid))
            os.kill(pid, signal.SIGCONT)

        self._under_way.append((begin + self._ttl * self._random.choice((0.2, 0.7, 1.05, 2.0)), end))

    def _cut(self) -> None:
        assert self._proxy is not None
        self._proxy.cut()

    def _spoil(self) -> None:
        assert self._proxy is not None
        if self._spoiled:
            return
        proxy, self._spoiled = self._proxy, True
        proxy.spoil(self._random.choice(("slow", "deaf", "late")))

        def end() -> None:
            proxy.spoil("pass")
            self._spoiled = False

        self._under_way.append((boot_now() + self._random.uniform(0.05, self._ttl), end))

    def _freeze(self) -> None:
        assert self._server is not None
        begin = boot_now()
        with self._server.paused():
            time.sleep(self._random.choice((0.1, 0.5, self._ttl)))
        self.done.append(Fault("freeze", begin, boot_now()))

    def _crash(self) -> None:
        assert self._server is not None
        begin = boot_now()
        self._server.kill()
        time.sleep(self._random.choice((0.0, 0.3)))
        self._server.start()
        self.done.append(Fault("crash", begin, boot_now()))

    def _step(self, server: Stepped) -> None:
        """Set the server's clock: by little more than leases last, by much, or back.

        Back by as long as a dead waiter may keep its place in line for longer, which is kept by that clock.
        """
        seconds = self._random.choice((self._ttl * 1.1, HOUR_S, DAYS_S, -self._ttl, -self._ttl / 2))
        at = boot_now()
        server.step(seconds)
        self.done.append(Fault("step", at, at))


def _wait_for(pid: int, state: str) -> None:
    def reached() -> bool:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] == state

    assert wait_until(reached, STATE_LIMIT_S), f"process {pid} was not in state {state} in {STATE_LIMIT_S:g} s"
