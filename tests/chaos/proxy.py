"""A network between the clients and a server that can be spoiled: a TCP proxy on 127.0.0.1, in a thread of its own.

How a connection is treated is decided for each piece of it that arrives, by what ``spoil`` said last:

* *pass*;
* *slow*: every piece is late by up to 50 ms, either way;
* *deaf*: answers are swallowed. What was asked for is done, and nobody hears of it. A stream that lacks bytes is cut
  when the time is over, as a real network would not deliver what comes behind them;
* *late*: requests are kept for the time, and delivered then, whether or not the client is still there.

``cut`` ends all connections at once, ``shut`` each of the next so many when something is asked on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from itertools import cycle

CHUNK = 65536
SLOW_S = 0.05


class Proxy:
    def __init__(self, *ports: int) -> None:
        """Stand before the server on this port, or by turns, a connection each, before those on these."""
        self._to = cycle(ports)
        self._mode = "pass"
        self._shuts = self._behind = 0
        self._changed = asyncio.Event()
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        #: How many pieces were delayed, swallowed and kept, and how many connections cut off.
        self.done: Counter[str] = Counter()
        self.port = 0
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), daemon=True)
        self._thread.start()
        begun.wait()

    def _run(self, begun: threading.Event) -> None:
        async def serve() -> None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            self.port = self._server.sockets[0].getsockname()[1]
            begun.set()

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(serve())
        self._loop.run_forever()

    def spoil(self, mode: str) -> None:
        """Treat what comes from now on so: pass, slow, deaf or late."""
        self._loop.call_soon_threadsafe(self._set, mode)

    def lead(self, port: int) -> None:
        """Stand before the server on this port from now on; what is connected stays so."""
        self._to = cycle([port])

    def shut(self, times: int, behind: int = 0) -> None:
        """Cut off so many of the next that ask for anything, once so many pieces of it have passed."""
        self._shuts, self._behind = times, behind

    def cut(self) -> None:
        """End all connections, as a firewall does that forgets them."""
        self._loop.call_soon_threadsafe(self._cut, lambda link: True)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # In the loop:

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _set(self, mode: str) -> None:
        self._mode = mode
        self._changed.set()
        self._changed = asyncio.Event()
        self._cut(lambda link: link.torn)

    def _cut(self, which: Callable[[_Link], bool]) -> None:
        for link in list(self._links):
            if which(link):
                self.done["cut"] += 1
                link.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await asyncio.open_connection("127.0.0.1", next(self._to))
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, server[1])
        self._links.add(link)
        try:
            await asyncio.gather(
                self._pump(reader, server[1], link, requests=True),
                self._pump(server[0], writer, link, requests=False),
            )
        except asyncio.CancelledError:  # the proxy is closed; asyncio's streams would complain
            pass
        finally:
            link.cut()
            self._links.discard(link)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, link: _Link, *, requests: bool
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while piece := await source.read(CHUNK):
                mode = self._mode
                if mode == "slow":
                    self.done["slow"] += 1
                    await asyncio.sleep(random.random() * SLOW_S)
                elif mode == "deaf" and not requests:
                    self.done["deaf"] += 1
                    link.torn = True
                elif mode == "late" and requests:
                    self.done["late"] += 1
                    await self._changed.wait()
                elif self._shuts and requests and passed >= self._behind:
                    self.done["shut"] += 1
                    self._shuts -= 1
                    link.cut()
                    return
                if not link.torn or requests:
                    target.write(piece)
                    await target.drain()
                passed += 1
            if target.can_write_eof():
                target.write_eof()


class _Link:
    """One connection, both sides of it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._sides = (client, server)
        #: Bytes were swallowed: nothing that comes behind them may be delivered.
        self.torn = False

    def cut(self) -> None:
        for side in self._sides:
            with contextlib.suppress(Exception):
                side.transport.abort()
