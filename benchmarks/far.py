"""A server that is not on the same machine: a proxy in front of it that keeps every piece for a while, either way.

It is a process of its own, since what runs in this one would wait for those who are measured.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

ONE_WAY_S = 0.001
CHUNK = 65536


@contextmanager
def far(url: str) -> Iterator[str]:
    """The URL under which the same server is two milliseconds away, and what the proxy itself takes."""
    port = str(urlsplit(url).port)
    with subprocess.Popen([sys.executable, "-m", __name__, port], stdout=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            yield url.replace(f":{port}/", f":{int(proxy.stdout.readline())}/")
        finally:
            proxy.kill()


async def _serve(port: int) -> None:
    async def accept(near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        distant, to_distant = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_carry(near, to_distant), _carry(distant, to_near))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Each piece as late as the other, also where they come one upon the other."""
    loop = asyncio.get_running_loop()
    with closing(target):
        last = loop.create_future()
        while piece := await source.read(CHUNK):
            loop.call_later(ONE_WAY_S, target.write, piece)
        loop.call_later(ONE_WAY_S, last.set_result, None)
        await last


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
