"""Claims: as many of these items as are free, for a time that ends for all of them together.

A *claim* on an item is a lock on ``source/key`` that is asked for once; nothing waits. The locks of a whole list travel
to the store in one call, and those that were granted are a *batch* (``dibs.batch``). It is for work that many programs
find in the same place, a table nobody may alter or a folder of files, where each item is to be worked by one of them:
claim first, then look again whether it is still due (``verify``), because somebody may have finished it between the
look and the claim.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, TypeVar, overload
from dibs.batch import BatchFacts, Item
from dibs.claiming import N_DEFAULT, check_functions, check_stream
from dibs.entry import itself
from dibs.errors import DibsError
from dibs.owners import this_thread
from dibs.steps import run

V = TypeVar("V")

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from threading import Event

    from dibs.claiming import ClaimsCore, Fetch, Params, Verify
    from dibs.names import Seconds
    from dibs.once_keys import Key
    from dibs.tries import DeadItem


class Batch(BatchFacts[V]):
    """What was won, for one thread: ``with claims.take(rows) as batch: for item in batch: …``.

    Going on to the next item finishes the one before. The loop stops a margin before the deadline. What is left at
    the end of the ``with`` block, however it ends, is given back. Its items may be ended by other threads, too: an item
    ends as the first says who ends it.
    """

    __slots__ = ()

    def release(self) -> None:
        """Give back what is left, and wait until the store has answered to everything; ``lost`` is exact then.

        What it gives no answer to for the client's ``patience`` ends by its ttl.
        """
        self.__exit__(None)

    def __iter__(self) -> Iterator[Item[V]]:
        return self

    def __next__(self) -> Item[V]:
        item = self._move_on()
        if item is None:
            raise StopIteration
        return item

    if TYPE_CHECKING:

        def __enter__(self) -> Batch[V]: ...
    else:
        __enter__ = itself

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            self._ends.session.end(self._ending(), exc_type)
        except DibsError:
            raise
        except BaseException:  # Ctrl-C on the way
            self._give_back(self._unfinished())
            raise


class Claims:
    """Claims on the items of one source. A description: ``take`` gives a ``Batch``. Safe to share among threads."""

    __slots__ = ("_core",)

    def __init__(self, core: ClaimsCore[Batch[Any]]) -> None:
        self._core = core

    @property
    def source(self) -> str:
        """What the items are of."""
        return self._core.source

    @overload
    def take(
        self,
        items: Iterable[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        limit: int | None = None,
    ) -> Batch[V]: ...
    @overload
    def take(
        self, *, query: str, n: int = N_DEFAULT, params: Params = (), verify: Verify[Any] | None = None
    ) -> Batch[Any]: ...
    def take(
        self,
        items: Iterable[Any] | None = None,
        *,
        key: Callable[[Any], Key] | None = None,
        verify: Verify[Any] | None = None,
        limit: int | None = None,
        query: str | None = None,
        n: int = N_DEFAULT,
        params: Params = (),
    ) -> Batch[Any]:
        """Claim those of ``items`` that are free, in one round trip for a thousand. That some are busy is no error.

        key: what tells an item from the others: a function that returns a str, an int or a date; without it, the items
        are such themselves. An item on key 42 of orders is the lock ``orders/42``. verify: called once with the list
        of what was won; returns what of it is still due, the rest is given back (``batch.stale``). Claim first, look
        again after: what another program finished a moment before the claim is found so. limit: win at most so many.

        query: instead of items, where leases are kept in PostgreSQL, MySQL, MariaDB or SQLite: find and claim up to
        ``n`` of the rows that this SELECT yields and nobody holds. It runs on dibs's own connection, and once more of
        what was won, so that nothing is worked that is not due any more. Its first column is the key: a str, an int, a
        date or a UUID; a row of one column is that value, others are tuples. params: for its %s or %(name)s (SQLite: ?
        or :name). It needs no LIMIT; it may have an ORDER BY, which MySQL and MariaDB heed only beside a LIMIT.

        Raises StoreUnavailable when the store gives no answer (nothing is held then), and what ``verify`` raises. Of a
        query: InvalidOption with the database's words when it refuses it, SetupRequired when dibs may not read there,
        Unsupported where leases are not kept in such a database.
        """
        core = self._core
        batch: Batch[Any] = run(core.take(this_thread(), items, key, limit, query, n, params, verify))
        if verify is not None:
            try:
                if len(batch):
                    batch._keep_due(core.due(verify(batch.won), key, query))
            except BaseException as error:
                batch.__exit__(type(error))
                raise
        return batch

    @overload
    def stream(
        self,
        fetch: Fetch[V],
        *,
        key: Callable[[V], Key] | None = None,
        verify: Verify[V] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
    ) -> Generator[Item[V], None, None]: ...
    @overload
    def stream(
        self,
        *,
        query: str,
        params: Params = (),
        verify: Verify[Any] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
    ) -> Generator[Item[Any], None, None]: ...
    def stream(
        self,
        fetch: Fetch[Any] | None = None,
        *,
        key: Callable[[Any], Key] | None = None,
        verify: Verify[Any] | None = None,
        n: int = 100,
        idle: Seconds = 1.0,
        stop: Event | Callable[[], bool] | None = None,
        query: str | None = None,
        params: Params = (),
    ) -> Generator[Item[Any], None, None]:
        """Work without end: claim up to ``n`` of what ``fetch()`` returns, yield them one by one, and so on.

        Going on to the next item finishes the one before. When nothing could be claimed, it looks again after ``idle``
        seconds, give or take a quarter. stop: an event, or a function, that ends it after the item at hand. Left in the
        middle, by ``break`` or an error, it gives back what is left when the iterator is closed; a ``with`` block of
        ``contextlib.closing`` makes that certain. key, verify, query and params are those of ``take``, which raises
        what this does.
        """
        idle_s, stopped = check_stream(fetch, query, params, n, idle, stop)
        check_functions(key, verify)
        if query is not None:
            self._core.take(
                None, None, key, None, query, n, params, verify
            ).close()  # checked now; taken when it is asked for
            return self._stream(lambda: self.take(query=query, n=n, params=params, verify=verify), idle_s, stopped)
        assert fetch is not None
        return self._stream(lambda: self.take(fetch(), key=key, verify=verify, limit=n), idle_s, stopped)

    def _stream(
        self, take: Callable[[], Batch[Any]], idle_s: float, stopped: Callable[[], bool]
    ) -> Generator[Item[Any], None, None]:
        while not stopped():
            batch = take()
            try:  # and no ``with``: a Ctrl-C as that is entered would leave what was won to its ttl
                while not stopped() and (item := batch._move_on()) is not None:
                    yield item
                batch._finish()
            except BaseException as error:
                batch.__exit__(type(error))
                raise
            batch.__exit__(None)
            if not batch.won:
                run(self._core.pausing(idle_s, stopped))

    def dead(self) -> list[DeadItem]:
        """The items that were tried ``max_tries`` times, by key. Raises Unsupported where tries cannot be counted."""
        return run(self._core.dead())

    def revive(self, keys: Iterable[Key] | None = None) -> int:
        """Let dead items be tried again, from the first try on: those of ``keys``, or all. Returns how many there were.

        Raises Unsupported where tries cannot be counted.
        """
        return run(self._core.revive(keys))

    def __repr__(self) -> str:
        return f"<dibs.Claims {self.source!r}>"
