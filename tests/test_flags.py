"""Options that are true or false take nothing else: "no" would be as good as True."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

import dibs

#: By option: what takes it, of a client of either face.
TAKERS: dict[str, list[Callable[[Any, Any], object]]] = {
    "renew": [
        lambda client, value: client.lock("x", renew=value),
        lambda client, value: client.lock("x", renew=value, ttl=7),
        lambda client, value: client.lock("x", renew=value, info={"x": 1}),
        lambda client, value: client.multilock(["x", "y"], renew=value),
        lambda client, value: client.semaphore("x", 3, renew=value),
        lambda client, value: client.rwlock("x", renew=value),
        lambda client, value: client.claims("x", renew=value),
        lambda client, value: client.queue("x", renew=value),
        lambda client, value: client.adopt(exported(client), renew=value),
    ],
    "reentrant": [
        lambda client, value: client.lock("x", reentrant=value),
        lambda client, value: client.lock("x", reentrant=value, ttl=7),
        lambda client, value: client.multilock(["x", "y"], reentrant=value),
        lambda client, value: client.semaphore("x", 3, reentrant=value),
        lambda client, value: client.rwlock("x", reentrant=value),
    ],
    "resize": [lambda client, value: client.semaphore("x", 3, resize=value)],
    "keep_result": [
        lambda client, value: client.once("x", keep=5, keep_result=value),
        lambda client, value: client.once_per("x", keep=5, keep_result=value),
    ],
    "now": [lambda client, value: client.break_lease("x", fencing_token=1, now=value)],
    "forever": [lambda client, value: client.election("x").run(on_elected(client), forever=value)],
    "blocking": [
        lambda client, value: client.lock("x").acquire(value),
        lambda client, value: client.lock("x").acquire(blocking=value, timeout=1),
        lambda client, value: client.lock("x", reentrant=True).acquire(blocking=value),
        lambda client, value: client.multilock(["x", "y"]).acquire(value),
        lambda client, value: client.semaphore("x", 3).acquire(value),
        lambda client, value: client.rwlock("x").read().acquire(value),
    ],
}
CASES = [pytest.param(option, take, id=f"{option}{n}") for option in TAKERS for n, take in enumerate(TAKERS[option])]
# (With acquire(0) and acquire(1), `blocking` is what it is for the locks of threading.)
WRONG: list[Any] = ["False", "no", "", None, 2, 0.5, [], b"\0"]
NUMBERS = [1, 0, 1.0, 0.0]


def exported(client: Any) -> dict[str, Any]:
    with dibs.connect("memory://flags") as of_threads:
        lease = of_threads.lock(uuid.uuid4().hex).acquire()
        assert lease is not None
        return lease.export()


def on_elected(client: Any) -> Callable[..., Any]:
    async def led(term: object) -> None: ...

    return led if isinstance(client, dibs.AsyncClient) else lambda term: None


@contextmanager
def refusal(option: str, value: Any) -> Iterator[None]:
    """The option is refused, and the error names it and what was given."""
    with pytest.raises(dibs.InvalidOption, match=f"{option} .*{re.escape(repr(value))}"):
        yield


@pytest.fixture
def client() -> Iterator[Any]:
    with dibs.connect("memory://flags") as client:
        # What is remembered of good options lets no bad ones in that equal them.
        for renew in (True, False):
            for reentrant in (True, False):
                client.lock("x", renew=renew, reentrant=reentrant)
                client.lock("x", renew=renew, reentrant=reentrant, ttl=7)
        yield client


@pytest.mark.parametrize("option, take", CASES)
def test_flags_are_true_or_false(option: str, take: Callable[[Any, Any], object], client: Any) -> None:
    """Every option that is true or false refuses whatever is not, names it and what was given, and sends nothing."""
    for value in WRONG if option == "blocking" else (*WRONG, *NUMBERS):
        with refusal(option, value):
            take(client, value)


@pytest.mark.parametrize("option, take", CASES)
def test_flags_of_asyncio(option: str, take: Callable[[Any, Any], object]) -> None:
    """The face for asyncio refuses them as well."""

    async def main() -> None:
        async with dibs.connect_async("memory://flags") as client:
            for value in WRONG:
                with refusal(option, value):
                    await cast("Any", take(client, value))

    asyncio.run(main())


def test_dead_is_true_or_false(client: Any) -> None:
    """A job that fails with ``dead="no"`` goes on being held, to be failed rightly."""
    queue = client.queue("x")
    queue.put("payload")
    with queue.take() as batch:
        job = next(batch)
        for value in (*WRONG, *NUMBERS):
            with refusal("dead", value):
                job.fail("in vain", dead=value)
        assert job.held
        job.fail("in vain", dead=False)
    assert queue.depth().dead == 0


def test_blocking_as_threading_takes_it(client: Any) -> None:
    """``acquire(0)`` and ``acquire(1)`` ask once, and wait, as programs for ``threading.Lock`` write it."""
    lock = client.lock("blocking")
    lease = lock.acquire(1)
    assert lease is not None
    assert client.lock("blocking").acquire(0) is None
    with pytest.raises(ValueError, match="non-blocking"):
        lock.acquire(0, 1)
    lock.release()


@pytest.mark.parametrize("value", [value for value in (*WRONG, *NUMBERS) if value is not None], ids=repr)
def test_flags_of_a_client(value: Any) -> None:
    """So do the options of a client, where None is as good as not given."""
    for connect in (dibs.connect, dibs.connect_async):
        with refusal("lock_order_warnings", value):
            connect("memory://", lock_order_warnings=value)


@pytest.mark.parametrize("url", ["memory://", "redis://x", "mysql://x/y", "zookeeper://x", "memcached://x", None])
@pytest.mark.parametrize("value", [False, True, 1, None, b"yes"])
def test_options_in_a_dict_are_text(url: str | None, value: Any) -> None:
    """``options=`` stands for what a URL's query may say, which is text: ``{"tls": True}`` is refused, and why."""
    for option in ("lock_order_warnings", "tls", "ssl", "cluster"):
        with pytest.raises(dibs.InvalidOption, match=f"{option!r} is {type(value).__name__}"):
            dibs.connect(url, options={option: value})
