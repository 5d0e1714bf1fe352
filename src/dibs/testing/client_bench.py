"""What the cases on what users see work with: looking until something is so, and asking for what must be there."""

from __future__ import annotations

import asyncio
import time

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import LeaseLost
from dibs.testing.case import PATIENCE_S
from dibs.testing.faces import VERB_LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dibs.testing.faces import Face


async def until(condition: Callable[[], Any], what: str, limit_s: float = PATIENCE_S) -> Any:
    """Look until the condition is true; fail when it never is."""
    end = time.monotonic() + limit_s
    while True:
        seen = condition()
        if hasattr(seen, "__await__"):
            seen = await seen
        if seen:
            return seen
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {limit_s:g} s")
        await asyncio.sleep(0.005)


class raises:  # noqa: N801 - reads as pytest's
    """``with raises(LeaseLost) as caught:`` fails unless the block raises that."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds
        self.error: Any = None

    def __enter__(self) -> raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        names = " or ".join(kind.__name__ for kind in self._kinds)
        if error is None:
            raise AssertionError(f"expected {names}, and nothing was raised")
        if not isinstance(error, self._kinds):
            if not isinstance(error, Exception):
                return False
            raise AssertionError(f"expected {names}, saw {error!r}") from error
        self.error = error
        return True


async def had(face: Face, lock: Any, **how: Any) -> Any:
    """Acquire, and fail when it could not be had."""
    lease = await face.do(lock.acquire, **how)
    if lease is None:
        raise AssertionError(f"{lock!r} could not be had with {how}")
    return lease


async def shown(face: Face, client: Any, name: str) -> Any:
    """Who holds the name; fail when nobody does."""
    record = await face.do(client.holder, name)
    if record is None:
        raise AssertionError(f"holder({name!r}) knows nobody")
    return record


def why(lease: Any) -> str:
    """What a lease says of its end."""
    try:
        lease.check()
    except LeaseLost as error:
        return str(error)
    return "it is held"


async def waiting(face: Face, client: Any, name: str, count: int) -> None:
    """Until as many stand in the store's line for the name."""

    async def lined_up() -> bool:
        record = await face.do(client.holder, name)
        return record is not None and record.waiting == count

    await until(lined_up, f"{count} waiters in line")


def task(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """An actor of its own."""

    async def run() -> Any:
        return await work

    return asyncio.get_running_loop().create_task(run())


async def reached(event: asyncio.Event, actor: asyncio.Task[Any], what: str) -> None:
    """Until an actor sets the event; fail when it ended without, with its own error if it has one, or never does."""
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiter, actor}, timeout=VERB_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not event.is_set():
            if actor.done():
                actor.result()
            raise AssertionError(f"{what}: not within {VERB_LIMIT_S:g} s, or ever")
    finally:
        waiter.cancel()
