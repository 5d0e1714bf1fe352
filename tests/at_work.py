"""Programs in the middle of things, for tests in which their store fails over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import dibs
from tests.servers.process import wait_until

TTL_S = 9.0


class AtWork:
    """Programs that are in the middle of things: one holds a lock, one waits for it, one works the jobs of a queue.

    Another claims rows that keep their claims themselves, from when it is told to until all goes on.
    """

    def __init__(self, url: str, ttl: float = TTL_S) -> None:
        self._ttl = ttl
        self.client = dibs.connect(url, ttl=ttl, patience=30)
        self.other = dibs.connect(url, ttl=ttl, patience=30)
        #: What they got, and what went wrong with them.
        self.got: SimpleQueue[Any] = SimpleQueue()
        self.worked: SimpleQueue[Any] = SimpleQueue()
        self.claimed: SimpleQueue[Any] = SimpleQueue()
        self._stop = threading.Event()
        lease = self.client.lock("held").acquire(timeout=0)
        assert lease is not None
        self.lease, trusted = lease, lease.trusted_until
        self.client.queue("jobs").put("before")
        self._threads = [threading.Thread(target=self._wait), threading.Thread(target=self._work)]
        for thread in self._threads:
            thread.start()
        assert self.worked.get(timeout=20) == "before"
        # From now on it has connections that are in use, for renewals too.
        assert wait_until(lambda: lease.trusted_until > trusted, ttl)

    def _wait(self) -> None:
        try:
            self.got.put(self.other.lock("held").acquire())
        except Exception as error:  # noqa: BLE001 - whatever it was, the test is told
            self.got.put(error)

    def _work(self) -> None:
        try:
            self.other.queue("jobs").run(lambda job: self.worked.put(job.payload), stop=self._stop)
        except Exception as error:  # noqa: BLE001 - whatever it was, the test is told
            self.worked.put(error)

    def _claim(self) -> None:
        try:
            with self.other.claims("item", mode="columns").take([1]) as batch:
                self.claimed.put(list(batch.won))
        except Exception as error:  # noqa: BLE001 - as above
            self.claimed.put(error)

    def claim(self) -> None:
        """Begin to claim a row, if there are any."""
        self._threads.append(threading.Thread(target=self._claim))
        self._threads[-1].start()

    def go_on(self, told: Callable[[], object] = lambda: True) -> None:
        """Nothing was lost, and nobody had to begin again: holder, waiter and worker; and a newcomer is served.

        ``told``: whether those who wait are told of what happens at the new server.
        """
        trusted = self.lease.trusted_until
        assert wait_until(lambda: self.lease.trusted_until > trusted, self._ttl), "it is no longer renewed"
        assert self.lease.held
        with self.client.lock("new", timeout=20):
            pass
        self.client.queue("jobs").put("after")
        assert self.worked.get(timeout=20) == "after"
        if len(self._threads) > 2:
            assert self.claimed.get(timeout=20) == [1]
        assert self.got.empty()
        assert wait_until(told, 20), "who waits is left to polling"
        assert self.lease.release()
        after = self.got.get(timeout=20)
        assert isinstance(after, dibs.Lease), after
        assert after.fencing_token > self.lease.fencing_token
        assert after.release()

    def close(self) -> None:
        self._stop.set()
        self.client.close()
        self.other.close()
        for thread in self._threads:
            thread.join()


@contextmanager
def at_work(url: str, ttl: float = TTL_S) -> Iterator[AtWork]:
    made = AtWork(url, ttl)
    try:
        yield made
    finally:
        made.close()
