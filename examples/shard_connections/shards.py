"""Connections to database shards, never more than each shard allows, however many processes and threads want one.

Every connection needs a permit of a semaphore that all processes share. Code that is called inside a block, and needs
the same shard, gets the same connection and takes no second permit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg

import dibs


class Shards:
    """Where the shards are, and how many connections all programs together may have to each."""

    def __init__(self, client: dibs.Client, urls: Sequence[str], limit: int) -> None:
        self._urls = urls
        self._permits = [client.semaphore(f"shard/{number}", limit, reentrant=True) for number in range(len(urls))]
        self._own = threading.local()

    @contextmanager
    def connection(self, number: int) -> Iterator[psycopg.Connection]:
        """A connection to shard ``number``, as soon as there may be one more; inside such a block, the same again."""
        with self._permits[number]:
            own: dict[int, psycopg.Connection] = self._own.__dict__.setdefault("connections", {})
            if number in own:
                yield own[number]
                return
            with psycopg.connect(self._urls[number], autocommit=True) as connection:
                own[number] = connection
                try:
                    yield connection
                finally:
                    del own[number]
