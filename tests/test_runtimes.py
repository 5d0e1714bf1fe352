"""Other loops than asyncio's own, and greenlets in the place of threads: what programs that use dibs run in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop

import dibs
from dibs.aio.tasks import take
from dibs.ask import Ask
from dibs.session import Session
from dibs.steps import Steps
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

# Ten greenlets take turns while another one counts how often it may go on; a lease is renewed; a waiter is woken.
GREENLETS = """
from gevent import monkey
monkey.patch_all()
import sys
import gevent
import dibs

url, ttl = sys.argv[1], float(sys.argv[2])
client = dibs.connect(url)
tokens, turns = [], 0

def work():
    with client.lock("turns", timeout=20) as lease:
        tokens.append(lease.fencing_token)
        gevent.sleep(0.02)

def count():
    global turns
    while True:
        gevent.sleep(0.005)
        turns += 1

counting = gevent.spawn(count)
gevent.joinall([gevent.spawn(work) for _ in range(10)], raise_error=True)
assert len(tokens) == 10 and tokens == sorted(set(tokens)), tokens
assert turns >= 10, f"the other greenlets stood still: {turns}"
lease = client.lock("renewed", ttl=ttl).acquire()
gevent.sleep(2.5 * ttl)
assert lease.held
with dibs.connect(url) as other:
    gevent.spawn_later(0.3, lease.release)
    with other.lock("renewed", timeout=10):
        pass
counting.kill()
client.close()
print("well")
"""


def greenlets(url: str, ttl: float = 1.0) -> None:
    done = subprocess.run([sys.executable, "-c", GREENLETS, url, str(ttl)], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "best effort" not in line]  # as of memcached is said once
    assert (done.returncode, done.stdout, said) == (0, "well\n", [])


def test_gevent_on_sqlite(tmp_path: Path) -> None:
    """After ``monkey.patch_all()``, threads are greenlets, and dibs blocks no more than they do."""
    greenlets(f"sqlite:///{tmp_path}/dibs.db")


def test_gevent_on_postgresql(postgres: PostgresServer) -> None:
    greenlets(postgres.url())


def test_gevent_on_mysql(mysql: MariaDBServer) -> None:
    greenlets(mysql.url())


def test_gevent_on_redis(redis: RedisServer) -> None:
    greenlets(redis.url())


def test_gevent_on_memcached(memcached_url: str) -> None:
    greenlets(memcached_url, ttl=3)


def test_gevent_on_etcd(etcd_url: str) -> None:
    greenlets(etcd_url, ttl=2)


def eager() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    return loop


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
if sys.version_info >= (3, 12):
    LOOPS["eager tasks"] = eager


@pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
def test_loops_that_are_not_the_usual_one(tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Tasks take turns, are cancelled and time out, and a block ends when its lease is lost."""
    loop = new_loop()
    try:
        loop.run_until_complete(_turns_and_ends(f"sqlite:///{tmp_path}/dibs.db"))
    finally:
        loop.close()


async def _turns_and_ends(url: str) -> None:
    tokens: list[int] = []
    async with dibs.connect_async(url) as client, dibs.connect_async(url) as other:

        async def work() -> None:
            async with client.lock("turns", timeout=20) as lease:
                tokens.append(lease.fencing_token)
                await asyncio.sleep(0.005)

        await asyncio.gather(*(asyncio.ensure_future(work()) for _ in range(20)))
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 20

        held = await other.lock("held").acquire()
        assert held is not None
        waiting = asyncio.ensure_future(client.lock("held").acquire())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.lock("held").acquire(), 0.1)
        await held.release()
        async with client.lock("held", timeout=5):
            pass

        async def lose() -> None:
            async with client.lock("lost", ttl=1) as lease:
                await other.break_lease("lost", fencing_token=lease.fencing_token, now=True)
                await asyncio.sleep(30)  # until it is cancelled

        with pytest.raises(dibs.LeaseLost):
            await lose()


def test_scopes_of_anyio(tmp_path: Path) -> None:
    """A scope that is over ends the wait inside it and nothing else (as in FastAPI, Starlette and httpx)."""
    anyio.run(_scopes, f"sqlite:///{tmp_path}/dibs.db")


async def _scopes(url: str) -> None:
    async with dibs.connect_async(url) as client, dibs.connect_async(url) as other:
        held = await other.lock("held").acquire()
        assert held is not None
        with anyio.move_on_after(0.1) as scope:
            async with client.lock("held"):
                raise AssertionError("two holders")
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.1):
                await client.lock("held").acquire()
        # A scope cancels again whatever is awaited in it: also the release at the end of a block.
        with anyio.move_on_after(0.1):
            async with client.lock("inside"):
                await anyio.sleep(30)
        async with other.lock("inside", timeout=5):
            pass
        async with anyio.create_task_group() as group:
            group.start_soon(client.lock("held").acquire)
            await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        assert await other.holder("held") is not None
        await held.release()
        with anyio.fail_after(10):
            async with client.lock("held") as lease:
                assert lease.held
        assert await other.holder("held") is None


def test_a_cancellation_keeps_what_it_says(tmp_path: Path) -> None:
    """``task.cancel("why")`` reaches whoever waits with that text, as with every future of asyncio."""

    async def main() -> None:
        url = f"sqlite:///{tmp_path}/dibs.db"
        async with dibs.connect_async(url) as client, dibs.connect_async(url) as other:
            async with other.lock("held"):
                waiting = asyncio.ensure_future(client.lock("held").acquire())
                await asyncio.sleep(0.05)
                waiting.cancel("enough")
                with pytest.raises(asyncio.CancelledError) as caught:
                    await waiting
        # Python 3.10 hands on a new error, whose context is the one that was raised.
        told = caught.value.args or getattr(caught.value.__context__, "args", ())
        assert told == ("enough",)

    asyncio.run(main())


class _AtOnce(Ask):
    """An ask that is answered as soon as somebody listens."""

    def listen(self, listener: Callable[[Any], None], letter: Any) -> None:
        super().listen(listener, letter)
        self.settle(None)


def test_the_rest_of_the_loop_has_its_turn() -> None:
    """However fast the answers come, the loop goes on with its timers and its connections between them."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    def asking(session: Session) -> Steps[None]:
        for _ in range(100):
            yield session, _AtOnce(None, float("inf")), None

    async def ask(session: Session) -> None:
        await take(asking(session))

    async def main() -> None:
        async with dibs.connect_async("memory://") as client:
            counting = asyncio.ensure_future(count())
            await asyncio.gather(*(ask(client._desk.session()) for _ in range(10)))
            counting.cancel()

    asyncio.run(main())
    assert turns >= 100
