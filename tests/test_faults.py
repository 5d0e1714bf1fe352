"""A fault at the first, the second, … call to the store, in whatever a program may do: nothing is left behind.

The store is the memory store; each call to it that dibs makes, on whichever connection, is a place for a fault. After
it: what the program was told is an error that it may expect; nothing is held and nobody stands in line for longer than
a ttl; and the same client does the same thing as ever.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import dibs
from dibs.connecting import locate
from dibs.store import StoreAddress
from dibs.testing.client_bench import task, until
from dibs.testing.faces import FACES, VERB_LIMIT_S, Place
from tests.acts import ACTS, Act, worked
from tests.waits import eventually

# What dibs calls a store by, and what is answered without asking anybody.
NO_CALLS = {"capabilities", "schema", "close", "jobs"}
# More calls than any act makes.
CALLS_MAX = 100


# What becomes of a call.
Fault = Callable[[Callable[[], Any]], Any]


class Bug(Exception):
    """A store's own mistake."""


class Faults:
    """A memory store with a fault at call number ``at``."""

    def __init__(self, name: str) -> None:
        self.real: StoreAddress = locate(f"memory://{name}")[0]
        self.address = self.real._replace(open=lambda: _Faulty(self, self.real.open()))
        self._fault: Fault | None = None
        self._at, self._calls = 0, 0
        self._mutex = threading.Lock()

    def call(self, verb: Callable[..., Any], *given: Any) -> Any:
        with self._mutex:
            self._calls += 1
            fault = self._fault if self._calls == self._at else None
        return verb(*given) if fault is None else fault(partial(verb, *given))

    def begin(self, fault: Fault, at: int) -> None:
        self._fault, self._at, self._calls = fault, at, 0

    @property
    def came(self) -> bool:
        return self._at <= self._calls

    def end(self) -> None:
        self._fault = None


class _Faulty:
    def __init__(self, faults: Faults, real: Any) -> None:
        self._faults = faults
        self._real = real

    @property
    def jobs(self) -> _Faulty:
        return _Faulty(self._faults, self._real.jobs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if name in NO_CALLS or not callable(value):
            return value
        return lambda *given: self._faults.call(value, *given)


def away(call: Callable[[], Any]) -> Any:
    raise dibs.StoreUnavailable("it is away", maybe_applied=False)


def answer_lost(call: Callable[[], Any]) -> Any:
    call()
    raise dibs.StoreUnavailable("no answer came", maybe_applied=True)


def bug(call: Callable[[], Any]) -> Any:
    raise Bug("a bug")


# For how long dibs tries again, and what happens.
FAULTS: dict[str, tuple[float, Fault]] = {
    "away": (0, away),
    "away, and asked again": (5, away),
    "its answer lost": (0, answer_lost),
    "its answer lost, and asked again": (5, answer_lost),
    "a bug": (0, bug),
}


async def left_nothing(client: Any, other: dibs.Client, name: str) -> None:
    """Nobody holds anything, in this process or in the store, but what is kept as done; nobody waits in the process."""
    session = client._desk.session()

    def held() -> list[object]:
        return [record for record in other.leases(name) if "once" not in (record.info or {})]

    await until(lambda: not held(), "left in the store")
    await until(lambda: not session.waiting.everybody(), "waits still")
    assert not session.holdings.held, "left in the process"
    assert not session.holdings.owned, "owned by somebody still"
    assert not session.holdings.shares, "counted for somebody still"


async def told_by(work: Awaitable[object]) -> BaseException | None:
    """What it raises, if anything."""
    try:
        await work
    except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - looked at by who asked
        return raised
    return None


@contextmanager
def after(what: str, error: BaseException | None) -> Iterator[None]:
    """What fails in the block says what had happened before."""
    try:
        yield
    except BaseException as failed:
        raise AssertionError(f"after {what}, told {error!r}: {failed!r}") from failed


def told(error: BaseException | None, fault: str) -> None:
    """It is what a program may expect: after a fault that is over by the next call nothing at all."""
    if "asked again" in fault:
        assert error is None
    else:
        assert isinstance(error, (dibs.StoreUnavailable, dibs.LeaseLost, Bug, type(None)))


def _cases() -> list[Any]:
    # (Workers ask again whatever their patience is, and take their time.)
    pairs = [(act, fault) for act in ACTS for fault in FAULTS if act is not worked or FAULTS[fault][0]]
    return [pytest.param(act, fault, id=f"{act.__name__}-{fault}") for act, fault in pairs]


@pytest.mark.parametrize("kind", FACES)
@pytest.mark.parametrize("act, fault", _cases())
def test_a_fault_anywhere_leaves_nothing(act: Act, kind: str, fault: str) -> None:
    """And the program is told what happened, or it was made up for by asking again."""

    async def main() -> None:
        faults = Faults(f"{act.__name__}-{kind}")
        face = FACES[kind](Place(faults.address))
        patience, how = FAULTS[fault]
        # What is not given back, as nobody asks again, lasts until its time is over.
        client = face.client(patience=patience, ttl=20 if patience else 0.2)
        with dibs.connect(faults.real.shown, namespace=face.namespace) as other:
            await act(face, client, "before")
            for at in range(1, CALLS_MAX):
                faults.begin(how, at)
                error = await told_by(act(face, client, f"x{at}"))
                came = faults.came
                faults.end()
                with after(f"{fault} at call {at}", error):
                    told(error, fault)
                    await left_nothing(client, other, f"x{at}")
                    await act(face, client, f"x{at}")
                if not came:
                    break
            assert at > 2
        await face.close()

    asyncio.run(main())


class CancelledAt:
    """Awaits something, and has the task cancelled when it is suspended for the n-th time."""

    def __init__(self, work: Awaitable[object], number: int) -> None:
        self._work = work
        self._left = number

    @property
    def came(self) -> bool:
        return self._left <= 0

    def __await__(self) -> Generator[Any, Any, object]:
        work, task = self._work.__await__(), asyncio.current_task()
        assert task is not None
        step: Callable[[], Any] = partial(next, work)
        while True:
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            self._left -= 1
            if not self._left:
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - the work is to see it
                step = partial(work.throw, error)
            else:
                step = partial(next, work)


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_a_cancellation_anywhere_leaves_nothing(act: Act) -> None:
    """A task that is cancelled where it is suspended for the first, the second, … time gives back what it has."""

    async def main() -> None:
        faults = Faults(f"{act.__name__}-cancelled")
        face = FACES["tasks"](Place(faults.address))
        client = face.client(ttl=20)
        with dibs.connect(faults.real.shown, namespace=face.namespace) as other:
            await act(face, client, "before")
            for at in range(1, 4 * CALLS_MAX):

                async def run(work: CancelledAt) -> None:
                    await work

                work = CancelledAt(act(face, client, f"x{at}"), at)
                error = await told_by(asyncio.get_running_loop().create_task(run(work)))
                with after(f"cancellation at suspension {at}", error):
                    assert error is None or isinstance(error, asyncio.CancelledError)
                    await left_nothing(client, other, f"x{at}")
                    await act(face, client, f"x{at}")
                if not work.came:
                    break
            assert at > 2
        await face.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", FACES)
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_a_client_closed_anywhere_leaves_nothing(act: Act, kind: str) -> None:
    """Whoever is in the midst of something is told, and what is held is given back."""

    async def main() -> None:
        faults = Faults(f"{act.__name__}-{kind}-closed")
        face = FACES[kind](Place(faults.address))
        loop = asyncio.get_running_loop()
        with dibs.connect(faults.real.shown, namespace=face.namespace) as other:
            for at in range(1, CALLS_MAX):
                client, ended = face.client(ttl=20), loop.create_future()

                def close(call: Callable[[], Any], client: Any = client, ended: asyncio.Future[None] = ended) -> Any:
                    async def closed() -> None:
                        await face.do(client.close)
                        ended.set_result(None)

                    loop.call_soon_threadsafe(task, closed())
                    eventually(lambda: client._desk.session().closed, "it has begun")
                    return call()

                faults.begin(close, at)
                error = await told_by(act(face, client, f"x{at}"))
                came = faults.came
                faults.end()
                if not came:
                    break
                with after(f"a close at call {at}", error):
                    await asyncio.wait_for(ended, VERB_LIMIT_S)
                    assert isinstance(error, (dibs.StoreUnavailable, dibs.LeaseLost, type(None)))
                    await left_nothing(client, other, f"x{at}")
            assert at > 2
        await face.close()

    asyncio.run(main())
