"""The library as Python programs meet it: both faces alike, misuse, forks, copies, signals, cancellation, the end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import functools
import gc
import inspect
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import dibs
from dibs import desk
from dibs.connecting import locate
from dibs.store import StoreAddress
from dibs.testing.case import within
from tests.servers.postgres import PostgresServer
from tests.waits import eventually

TRIES = 30


@pytest.fixture
def client(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


@pytest.fixture
def other(sqlite_url: str) -> Iterator[dibs.Client]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client


def had(lock: dibs.Lock | dibs.Semaphore, **how: Any) -> dibs.Lease:
    lease = lock.acquire(**how)
    assert lease is not None
    return lease


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What dibs has logged: not a driver that still looks for the server of an earlier test."""
    return [record.getMessage() for record in caplog.records if record.name == "dibs"]


# -- both faces -------------------------------------------------------------------------------------------------------

PAIRS = [
    ("Client", "AsyncClient"),
    ("Lock", "AsyncLock"),
    ("Lease", "AsyncLease"),
    ("MultiLock", "AsyncMultiLock"),
    ("MultiLease", "AsyncMultiLease"),
    ("Semaphore", "AsyncSemaphore"),
    ("RWLock", "AsyncRWLock"),
    ("Once", "AsyncOnce"),
    ("OnceRun", "AsyncOnceRun"),
    ("Claims", "AsyncClaims"),
    ("Batch", "AsyncBatch"),
    ("Queue", "AsyncQueue"),
    ("Job", "AsyncJob"),
    ("JobBatch", "AsyncJobBatch"),
    ("Election", "AsyncElection"),
    ("Term", "AsyncTerm"),
]
TWINS = {"__enter__": "__aenter__", "__exit__": "__aexit__"}


def verbs(cls: type) -> dict[str, Any]:
    shown = {name for name in dir(cls) if not name.startswith("_")} | {n for n in ("__call__",) if hasattr(cls, n)}
    found = {name: inspect.getattr_static(cls, name) for name in shown}
    for sync, awaited in TWINS.items():
        method = inspect.getattr_static(cls, sync, None) or inspect.getattr_static(cls, awaited, None)
        if method is not None:
            found[sync] = method
    return found


@pytest.mark.parametrize("sync, awaited", PAIRS)
def test_both_faces_have_the_same_verbs(sync: str, awaited: str) -> None:
    """Client and AsyncClient, and so on, have the same public names, parameters, defaults and kinds."""
    ours, theirs = verbs(getattr(dibs, sync)), verbs(getattr(dibs, awaited))
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        twin = theirs[name]
        assert isinstance(method, property) == isinstance(twin, property), name
        if not isinstance(method, property):
            seen = [
                [(p.name, p.default, p.kind) for p in inspect.signature(m).parameters.values()] for m in (method, twin)
            ]
            assert seen[0] == seen[1], name


def test_both_doors_take_the_same() -> None:
    """`connect` and `connect_async` take the same arguments, and the event of a loss has the same verbs."""
    doors = [
        [(p.name, p.default, p.kind) for p in inspect.signature(door).parameters.values()]
        for door in (dibs.connect, dibs.connect_async)
    ]
    assert doors[0] == doors[1]
    from dibs.aio import AsyncLost
    from dibs.lost import Lost

    for name in ("is_set", "wait"):
        one, two = inspect.signature(getattr(Lost, name)), inspect.signature(getattr(AsyncLost, name))
        assert [(p.name, p.default) for p in one.parameters.values()] == [
            (p.name, p.default) for p in two.parameters.values()
        ]


def test_public_names_are_there_and_say_what_they_are() -> None:
    """Every name in `dibs.__all__` can be had, and every public class, method and property has a docstring."""
    missing = []
    for name in dibs.__all__:
        thing = getattr(dibs, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        if not inspect.getdoc(thing):
            missing.append(name)
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            documented = isinstance(value, (property, classmethod, staticmethod)) or inspect.isfunction(value)
            if documented and not member.startswith("_") and not inspect.getdoc(value):
                missing.append(f"{name}.{member}")
    assert not missing


def test_a_name_that_is_not_there_is_told() -> None:
    """A misspelt name of `dibs` raises AttributeError; type checkers tell it before (else the comment is unused)."""
    with pytest.raises(AttributeError, match="no_such_name"):
        dibs.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_tab_shows_what_is_not_loaded_yet() -> None:
    """In a fresh Python, `dir(dibs)` lists every public name, and loads nothing for it."""
    code = "import sys, dibs; print(set(dibs.__all__) <= set(dir(dibs)), 'dibs.client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_modules_of_the_reference_are_there() -> None:
    """What the reference calls `dibs.fencing.advance` is that after `import dibs`, which alone does not load it."""
    pages = Path(__file__).parent.parent / "docs" / "reference" / "api.md"
    shown = re.findall(r"^dibs\.(\w+)\.(\w+)\(", pages.read_text(encoding="utf-8"), re.MULTILINE)
    assert {module for module, _ in shown} == {"columns", "fencing", "rows", "testing"}
    for module, function in shown:
        code = (
            f"import sys, dibs; before = 'dibs.{module}' in sys.modules, {module!r} in dir(dibs);"
            f"print(*before, callable(dibs.{module}.{function}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "True", "True"], code
    assert callable(dibs.rows.lock)  # type checkers know them, too


# -- like the standard library ----------------------------------------------------------------------------------------

MISUSES: list[dict[str, Any]] = [
    {"timeout": -2},
    {"timeout": -0.5},
    {"timeout": float("nan")},
    {"timeout": 1e100},
    {"timeout": float("inf")},
    {"timeout": 10**400},
    {"blocking": False, "timeout": 1},
    {"blocking": False, "timeout": 0},
]


@pytest.mark.parametrize("how", MISUSES, ids=str)
def test_misuse_of_acquire_raises_what_threading_raises(how: dict[str, Any], client: dibs.Client) -> None:
    """Where `threading.Lock().acquire` raises ValueError or OverflowError, so does a dibs lock, and holds nothing."""
    with pytest.raises((ValueError, OverflowError)) as theirs:
        threading.Lock().acquire(**how)
    lock = client.lock("misuse")
    with pytest.raises((ValueError, OverflowError)) as ours:
        lock.acquire(**how)
    assert isinstance(ours.value, OverflowError) == isinstance(theirs.value, OverflowError)
    assert not lock.locked()


@pytest.mark.parametrize("reentrant", [False, True])
def test_misuse_of_release_raises_what_threading_raises(reentrant: bool, client: dibs.Client) -> None:
    """Releasing what is not held is a RuntimeError; releasing another thread's is one for reentrant locks only."""
    lock = client.lock("misuse", reentrant=reentrant)
    with pytest.raises(RuntimeError):
        lock.release()
    had(lock)
    errors: list[BaseException] = []

    def release() -> None:
        try:
            lock.release()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=release)
    thread.start()
    thread.join()
    assert bool(errors) == reentrant == lock.locked()
    if reentrant:
        lock.release()
    with pytest.raises(RuntimeError):
        lock.release()


def test_it_moves_over_from_threading(client: dibs.Client) -> None:
    """A Condition, which knows only acquire and release, works on a dibs lock."""
    condition = threading.Condition(client.lock("condition"))  # type: ignore[arg-type]
    seen: list[int] = []

    def consume() -> None:
        with condition:
            assert condition.wait_for(lambda: seen, 10)
            seen.append(2)

    thread = threading.Thread(target=consume)
    thread.start()
    with condition:
        seen.append(1)
        condition.notify()
    thread.join(10)
    assert seen == [1, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_condition_waits_without_a_reentrant_lock(count: int, client: dibs.Client) -> None:
    """As with an RLock: however often it was acquired, others may have it during the wait; then it is back."""
    lock = client.lock("condition", reentrant=True)
    condition = threading.Condition(lock)  # type: ignore[arg-type]
    seen: list[int] = []

    def produce() -> None:
        with condition:
            seen.append(1)
            condition.notify()

    with contextlib.ExitStack() as blocks:
        for _ in range(count):
            blocks.enter_context(condition)
        thread = threading.Thread(target=produce)
        thread.start()
        assert condition.wait_for(lambda: seen, 10)
        thread.join(10)
        assert lock.acquire(timeout=0)
        lock.release()
        assert lock.locked()
    assert not lock.locked()
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.notify()


def test_a_condition_goes_on_with_its_lock(client: dibs.Client) -> None:
    """Condition does not look at what an acquire returns, so the time-out of a lock is not for the end of its wait."""
    lock = client.lock("condition", timeout=0)
    condition = threading.Condition(lock)  # type: ignore[arg-type]
    waiting = client._desk.session().waiting
    over = threading.Event()

    def hold() -> None:
        assert lock.acquire(timeout=None)
        condition.notify()
        while not waiting._first and not over.wait(0.01):
            pass  # until the other one waits for it, or believes to have it
        lock.release()

    thread = threading.Thread(target=hold)
    with condition:
        thread.start()
        assert condition.wait(10)
        over.set()
        assert condition._is_owned()  # type: ignore[attr-defined]
        assert lock.release()
        thread.join(10)


def test_locks_are_kept_for_as_long_as_somebody_has_them(client: dibs.Client, sqlite_url: str) -> None:
    """The usual way to have a lock for each thing: a dictionary that does not keep what nobody uses."""
    awaited = dibs.connect_async(sqlite_url)
    for made in (client, awaited):
        kept: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        locks = made.lock("x"), made.semaphore("x", 2), made.multilock(["x", "y"]), made.rwlock("x")
        for lock in locks:
            assert kept.setdefault(type(lock).__name__, lock) is lock
        assert len(kept) == len(locks)
        del lock, locks
        gc.collect()
        assert not kept


def test_only_functions_are_decorated(client: dibs.Client) -> None:
    """A lock refuses to decorate what would run outside it: generators, coroutines, things that cannot be called."""
    lock = client.lock("decorated")

    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    class Later:
        async def __call__(self) -> None: ...

    class Item:
        def __call__(self) -> Iterator[int]:
            yield 1

    for wrong in (generator, coroutine, 7, functools.partial(coroutine), functools.partial(generator), Later(), Item()):
        with pytest.raises(TypeError):
            lock(wrong)  # type: ignore[type-var]
    assert lock(mock.MagicMock(return_value=7))() == 7
    above: dict[str, Any] = {"classmethod": classmethod(len), "property": property(len)}  # type: ignore[arg-type]
    for name, wrong in above.items():
        with pytest.raises(TypeError, match=f"write @{name} above it"):
            lock(wrong)


async def _never_run(*args: object) -> None:
    raise AssertionError("nobody awaits it")


@pytest.mark.filterwarnings("ignore:coroutine '_never_run' was never awaited")
def test_a_body_that_would_run_outside_its_lock_is_told_when_it_shows(client: dibs.Client) -> None:
    """A function may return what nobody sees before it is called: a coroutine, or a context manager of a generator."""
    lock = client.lock("decorated")

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        yield

    @contextlib.asynccontextmanager
    async def awaited() -> AsyncIterator[None]:
        yield

    for wrong in (lambda: _never_run(1), block, awaited):
        with pytest.raises(TypeError, match="when nothing is held any more"):
            lock(wrong)()
        assert not lock.locked()


def test_a_function_that_is_marked_as_async_is(client: dibs.Client, sqlite_url: str) -> None:
    """A wrapper that returns a coroutine says so with inspect.markcoroutinefunction, or before 3.12 as asyncio does."""

    def marked(held: Callable[[], bool]) -> Any:
        return later(held)

    async def later(held: Callable[[], bool]) -> bool:
        return held()

    if sys.version_info >= (3, 12):
        inspect.markcoroutinefunction(marked)
    else:
        marked._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as awaited:
            lock = awaited.lock("decorated")
            assert await lock(marked)(lock.locked)

    with pytest.raises(TypeError, match="is async"):
        client.lock("decorated")(marked)
    asyncio.run(main())


def test_an_object_that_is_called_and_awaited_is_decorated(sqlite_url: str) -> None:
    """With tasks an object whose ``__call__`` is an async function is as good as an async function."""

    class Later:
        async def __call__(self, held: Callable[[], bool]) -> bool:
            return held()

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as client:
            lock = client.lock("decorated")
            assert await lock(Later())(lock.locked)
            assert await client.once("x", keep=10).run(Later(), lambda: True)
            with pytest.raises(TypeError, match="not async"):
                lock(functools.partial(len))

    asyncio.run(main())


async def lost() -> None: ...


class Lost:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize("on_lost", [lost, Lost(), functools.partial(lost)])
def test_on_lost_is_an_ordinary_function(on_lost: Any, client: dibs.Client, sqlite_url: str) -> None:
    """Nobody would await an async ``on_lost``, so it is refused, with what to do; a mock is as good as a function."""
    with pytest.raises(dibs.InvalidOption, match="call_soon_threadsafe"):
        client.lock("x", on_lost=on_lost)
    with pytest.raises(dibs.InvalidOption, match="call_soon_threadsafe"):
        dibs.connect_async(sqlite_url).multilock(["x", "y"], on_lost=on_lost)
    client.lock("x", on_lost=mock.MagicMock())


@pytest.mark.parametrize("option", ["ttl", "timeout", "min_hold", "max_hold"])
def test_the_class_timedelta_is_no_number_of_seconds(option: str, client: dibs.Client) -> None:
    with pytest.raises(dibs.InvalidOption, match=option):
        client.lock("x", **{option: timedelta})  # type: ignore[arg-type]


class Word(str, Enum):
    """As many programs write down their names."""

    MAIL = "mail"


def test_a_member_of_an_enumeration_is_the_text_that_it_is(client: dibs.Client, sqlite_url: str) -> None:
    """A name or a namespace given as one is the same as that text, for all that is made of it, under every Python."""
    word: Any = Word.MAIL
    for made in (client.lock(word), client.rwlock(word), client.once(word, keep=9)):
        assert str(made.name) == "mail"
    assert client.once(word, "k", keep=9).name == "mail/k"
    client.queue(word).put("letter")
    assert client.queue("mail").depth().ready == 1
    assert [depth.queue for depth in client.queues(word)] == ["mail"]
    with client.multilock([word, "b"]) as leases:
        assert leases["mail"].name == str(leases["mail"].name) == "mail"
        assert leases.fencing_tokens.keys() == {"mail", "b"}
    client.setup(history=1)
    with client.lock(word):
        assert [str(record.name) for record in client.history(word)] == ["mail"]
    one, same = client.election(word, standby_max=1), client.election("mail", standby_max=1)
    assert one._core._seats is not None
    assert same._core._seats is not None
    assert one._core._seats._cores[0]._key == same._core._seats._cores[0]._key
    with dibs.connect(sqlite_url, namespace=word) as named, dibs.connect(sqlite_url, namespace="mail") as other:
        with named.lock("x"):
            assert other.lock("x").acquire(timeout=0) is None


def test_what_info_may_contain(client: dibs.Client) -> None:
    """A backslash before u0000 is text like any other. NUL is refused, and so is what is nested too deeply for JSON."""
    text = {"path": "C:\\u0000", "\\u0000": "\\\\u0000"}
    with client.lock("x", info=text) as lease:
        record = client.holder("x")
        assert record is not None
        assert (lease.info, record.info) == (text, text)
    assert client.once("y", keep=20).run(lambda: "C:\\u0000") == "C:\\u0000"
    assert client.once("y", keep=20).run(lambda: None) == "C:\\u0000"
    for bad in ("\0", "\\\0", "\\\\\0", "\\u0000\0"):
        for info in ({"x": bad}, {bad: 1}):
            with pytest.raises(dibs.InvalidOption, match="NUL"):
                client.lock("x", info=info)
    assert refuses_what_is_deep(lambda deep: client.lock("x", info={"deep": deep}))
    assert refuses_what_is_deep(lambda deep: client.election("x", value=deep))


def refuses_what_is_deep(take: Callable[[Any], object]) -> bool:
    """(The error itself shows the deep list, which no report of a failure survives.)"""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    try:
        take(deep)
    except dibs.InvalidOption as error:
        return "JSON" in str(error)
    except RecursionError:
        return False
    finally:
        while deep:  # apart from outside
            deep = deep.pop()
    return False


@pytest.mark.parametrize("wrong", [{"ttl": True}, {"timeout": False}, {"min_hold": False}], ids=str)
def test_what_was_refused_once_is_refused_again(wrong: dict[str, Any], client: dibs.Client) -> None:
    """Options that equal remembered good ones, but are not good themselves, are refused all the same."""
    client.lock("x", ttl=1)
    client.lock("x", timeout=0)
    client.lock("x", min_hold=0)
    with pytest.raises(dibs.InvalidOption):
        client.lock("x", **wrong)


def test_a_record_does_not_change_while_it_is_looked_at(client: dibs.Client) -> None:
    """`LeaseRecord.expires_at` is a moment, the same whenever it is read."""
    lease = had(client.lock("record"))
    record = client.holder("record")
    assert record is not None
    first = record.expires_at
    time.sleep(0.05)
    assert record.expires_at == first
    lease.release()


# -- threads come and go ----------------------------------------------------------------------------------------------


def in_a_thread(run: Callable[[], object]) -> None:
    """Run it in a thread that is over afterwards; fail with what it raised."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - raised here
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_the_next_thread_is_another_owner(client: dibs.Client) -> None:
    """A thread that gets the number of a dead one is not taken for it: neither does it hold what that left, nor is it
    told that it waits for itself."""
    lock, reentrant = client.lock("left"), client.lock("entered", reentrant=True)
    left: list[dibs.Lease] = []
    idents: list[int] = []

    def leave() -> None:
        idents.append(threading.get_ident())
        left[:] = [had(lock), had(reentrant)]

    def look() -> None:
        idents.append(threading.get_ident())
        assert reentrant.acquire(timeout=0) is None
        with pytest.raises(dibs.NotHeld):
            reentrant.release()
        with pytest.raises(dibs.LockTimeout):
            client.lock("left", timeout=0.01).__enter__()

    for _ in range(50):  # until it has that number, nearly always soon
        idents.clear()
        in_a_thread(leave)
        in_a_thread(look)
        if idents[0] == idents[1]:
            break
        assert [lease.release() for lease in left] == [True, True]
    assert idents[0] == idents[1]

    got: list[dibs.Lease] = []
    waiter = threading.Thread(target=lambda: got.append(had(lock, timeout=None)))
    waiter.start()
    eventually(lambda: (record := client.holder("left")) is not None and record.waiting, "it waits")
    left[0].release()
    waiter.join(10)
    assert [lease.release() for lease in got] == [True]
    assert left[1].release()


@pytest.mark.parametrize("kind", ["lock", "multilock", "semaphore", "read", "write"])
def test_a_block_may_be_left_by_another_thread(kind: str, client: dibs.Client) -> None:
    """As with ``threading.Lock``: frameworks enter a context manager in one thread and leave it in another."""
    lock: Any = {
        "lock": lambda: client.lock("x"),
        "multilock": lambda: client.multilock(["x", "y"]),
        "semaphore": lambda: client.semaphore("x", 2),
        "read": lambda: client.rwlock("x").read(),
        "write": lambda: client.rwlock("x").write(),
    }[kind]()
    in_a_thread(lock.__enter__)
    lock.__exit__(None, None, None)
    assert client.leases() == []
    with lock:
        in_a_thread(lambda: lock.__exit__(None, None, None))
        assert client.leases() == []
    assert client.leases() == []


def test_a_reentrant_block_is_its_owners_to_leave(client: dibs.Client) -> None:
    """As ``threading.RLock`` refuses a release by another thread, also where a block ends."""
    lock = client.lock("x", reentrant=True)
    with lock, lock:
        with pytest.raises(dibs.NotHeld, match="another owner"):
            in_a_thread(lambda: lock.__exit__(None, None, None))
        assert lock.locked()
    assert not lock.locked()


def test_a_block_that_has_nothing_left_releases_nobody_elses(client: dibs.Client) -> None:
    """Who released inside the block leaves it without touching what another thread holds by now."""
    lock, entered, leave = client.lock("x"), threading.Event(), threading.Event()

    def enter() -> None:
        with lock:
            entered.set()
            assert leave.wait(20)

    other = threading.Thread(target=enter)
    with lock:
        lock.release()
        other.start()
        assert entered.wait(20)
    assert lock.locked()
    leave.set()
    other.join(20)
    assert client.leases() == []
    with lock:
        assert lock.locked()
    assert client.leases() == []


def test_who_leaves_while_others_do_leaves_its_own(client: dibs.Client) -> None:
    """It looks for its own block in an object that they share; meanwhile others leave theirs, and one stays."""
    core = client.semaphore("x", 6)._core

    class Owner:
        """When it is looked at by another, those who came last leave."""

        def __eq__(self, other: object) -> bool:
            if other is mine and len(core._grips) in (6, 4):
                for place in range(len(core._grips) - 1, len(core._grips) - 3, -1):
                    assert core.leave(owners[place], core.block_of(owners[place])) is leases[place]
            return self is other

        __hash__ = object.__hash__

    owners = [mine := Owner(), *(Owner() for _ in range(5))]
    leases = [had(client.semaphore("x", 6)) for _ in owners]
    for owner, lease in zip(owners, leases, strict=True):
        core._grip(owner, lease)
        core.enter(lease)
    assert core.leave(mine, core.block_of(mine)) is leases[0]
    assert core.leave(owners[1], core.block_of(owners[1])) is leases[1]
    for lease in leases:
        assert lease.release()


def test_a_block_left_by_another_after_a_release_inside_takes_nothing_of_a_third(client: dibs.Client) -> None:
    """What was released inside is over when the block is; its owner's next block ends as any other."""
    semaphore, entered, leave = client.semaphore("x", 3), threading.Event(), threading.Event()

    def third() -> bool:
        with semaphore as lease:
            entered.set()
            assert leave.wait(20)
            return lease.held

    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(third)
        assert entered.wait(20)
        semaphore.__enter__()
        semaphore.release()
        in_a_thread(lambda: semaphore.__exit__(None, None, None))
        leave.set()
        assert held.result(20)
    with semaphore:
        pass
    assert client.leases() == []


def test_a_task_that_leads_is_told_that_it_would_wait_for_itself() -> None:
    """Also in the block of ``lead()``, of which nothing is left when it ends, whatever was released inside."""

    async def main() -> None:
        async with dibs.connect_async("memory://") as client:
            election = client.election("x")
            async with election.lead() as term:
                with pytest.raises(dibs.WouldDeadlock):
                    await election.campaign()
                await term.resign()
            assert await client.leases() == []

    asyncio.run(main())


def test_a_generator_closed_in_another_task_gives_back(sqlite_url: str) -> None:
    """asyncio closes an asynchronous generator that was left in the middle in a task of its own."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client:
            lock, semaphore, once = client.lock("x"), client.semaphore("y", 2), client.once("z", keep=20)

            async def each() -> AsyncIterator[int]:
                async with lock, semaphore, once as run:
                    assert run
                    yield 1

            async for _ in each():
                assert len(await client.leases()) == 3
                break
            gc.collect()
            end = time.monotonic() + 10
            while await client.leases():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            assert lock._blocks == []
            with pytest.raises(dibs.NotHeld):
                lock.release()

    asyncio.run(main())


# -- forks ------------------------------------------------------------------------------------------------------------


def in_a_fork(run: Callable[[], object]) -> None:
    """Run it in a forked child; fail with what it raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(30)
            run()
            code = 0
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writing, repr(error).encode()[:4000])
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child: {told or status}"


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_a_fork_holds_nothing_and_works_anew(store: str, request: pytest.FixtureRequest) -> None:
    """In a forked child a lease is not held, its release does nothing, and the library works as a client of its own."""
    url = request.getfixturevalue("sqlite_url" if store == "sqlite" else "postgres_url")
    with dibs.connect(url, ttl=1.0) as client:
        lock = client.lock("forked")
        lease = had(lock)
        parents_id = lease.holder.rpartition("/")[2]

        def child() -> None:
            assert not lease.held
            assert lease.remaining() == 0.0
            assert lease.lost.is_set()
            assert lease.lost.wait(0)
            with pytest.raises(dibs.LeaseLost, match="fork"):
                lease.check()
            assert lease.release() is False
            with pytest.raises(dibs.LeaseLost):
                lease.renew()
            assert not lock.locked()
            with pytest.raises(dibs.NotHeld):  # what its parent acquired is not its own to give back
                lock.release()
            assert lock.acquire(timeout=0) is None
            fresh = had(client.lock("the child's"), timeout=5)
            assert fresh.held
            assert fresh.holder.split("/")[1] == str(os.getpid())
            assert fresh.holder.rpartition("/")[2] != parents_id
            time.sleep(1.5)  # longer than the ttl: renewed by threads of the child's own
            assert fresh.held
            assert fresh.release() is True
            left = had(client.lock("left behind"), timeout=5)
            client.close()
            assert not left.held

        in_a_fork(child)
        assert lease.held
        assert client.holder("left behind") is None
        time.sleep(1.2)
        assert lease.held
        record = client.holder("forked")
        assert record is not None
        assert record.fencing_token == lease.fencing_token
        assert lease.release() is True


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_forking_at_any_moment_leaves_the_child_free(store: str, request: pytest.FixtureRequest) -> None:
    """A child forked while other threads are inside the library can use it."""
    url = "memory://" if store == "memory" else request.getfixturevalue("sqlite_url")
    # (In memory an act is so short that few forks meet one.)
    forks = 100 if store == "memory" else 10
    with dibs.connect(url, ttl=20) as client:
        over = threading.Event()

        def work(number: int) -> None:
            lock = client.lock(f"busy/{number}")
            while not over.is_set():
                with lock:
                    pass

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(forks):
                in_a_fork(lambda n=number: had(client.lock(f"child/{n}"), timeout=20).release())  # type: ignore[misc]
        finally:
            over.set()
            for thread in threads:
                thread.join()


def test_a_parent_that_closes_takes_nothing_from_its_fork(sqlite_url: str) -> None:
    """What a forked child is granted after its parent closed is known to everybody who comes later."""
    client = dibs.connect(sqlite_url, ttl=20)
    had(client.lock("parent's"), timeout=0).release()
    to_child, to_parent = os.pipe(), os.pipe()

    def child() -> None:
        first = had(client.lock("before"), timeout=0)
        os.write(to_parent[1], b"1")
        os.read(to_child[0], 1)
        second = had(client.lock("after"), timeout=0)
        os.write(to_parent[1], b"2")
        os.read(to_child[0], 1)
        assert first.held
        assert second.held

    def parent() -> None:
        try:
            os.read(to_parent[0], 1)
            client.close()
            os.write(to_child[1], b"1")
            os.read(to_parent[0], 1)
            with dibs.connect(sqlite_url, ttl=20) as third:
                for name in ("before", "after"):
                    taken = third.lock(name).acquire(timeout=0)
                    if taken is not None:
                        wrong.append(name)
                        taken.release()
        finally:
            os.write(to_child[1], b"2")

    wrong: list[str] = []
    # The thread begins before the fork, and waits for the child's first word.
    thread = threading.Thread(target=parent)
    thread.start()
    in_a_fork(child)
    thread.join(20)
    for fd in (*to_child, *to_parent):
        os.close(fd)
    assert not wrong, f"granted twice, to the child and to another: {wrong}"


# -- copies, and what nobody has in hand ------------------------------------------------------------------------------


def test_a_copy_holds_nothing(client: dibs.Client) -> None:
    """A copied or pickled lease is not held and can do nothing to the original."""
    lease = had(client.lock("original"))
    for duplicate in (copy.copy(lease), copy.deepcopy(lease), pickle.loads(pickle.dumps(lease))):
        assert not duplicate.held
        assert duplicate.remaining() == 0.0
        assert (duplicate.name, duplicate.fencing_token) == ("original", lease.fencing_token)
        with pytest.raises(dibs.LeaseLost):
            duplicate.check()
        assert duplicate.lost.is_set()
        with pytest.raises(dibs.LeaseLost):
            duplicate.release()
        with pytest.raises(dibs.LeaseLost, match="a copy of a lease on 'original'"), duplicate:
            pytest.fail("a block was entered that holds nothing")
        with pytest.raises(AttributeError, match="a copy of a lease on 'original', and has no slot"):
            _ = duplicate.slot
        assert "copy of a lease on 'original'" in repr(copy.copy(duplicate))
        del duplicate
    gc.collect()
    assert lease.held
    assert lease.release() is True


def test_a_copy_of_several_leases_holds_nothing(client: dibs.Client) -> None:
    """The same is true of what a multilock gives."""
    lease = client.multilock(["one", "two"]).acquire()
    assert lease is not None
    for duplicate in (copy.copy(lease), copy.deepcopy(lease), pickle.loads(pickle.dumps(lease))):
        assert not duplicate.held
        assert duplicate.names == lease.names
        assert duplicate.fencing_tokens == lease.fencing_tokens
        assert not any(each.held for each in duplicate.leases.values())
        assert duplicate.lost.is_set()
        with pytest.raises(dibs.LeaseLost, match="one, two"):
            duplicate.release()
    assert lease.held
    assert lease.release() is True


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
def test_a_lock_forgets_what_ran_out_in_threads_and_tasks_that_are_gone(
    kind: str, client: dibs.Client, sqlite_url: str
) -> None:
    """Who lets leases end by themselves, each in a thread or task of its own, has no list of them that only grows."""
    terms: dict[str, Any] = {"ttl": 0.05, "renew": False, "timeout": 10}

    def made(by: Any) -> Any:
        return by.lock("ended", **terms) if kind == "lock" else by.semaphore("ended", 1, **terms)

    lock = made(client)
    for _ in range(10):
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join(10)
    assert len(lock._core._grips) < 4

    async def main() -> None:
        async with dibs.connect_async(sqlite_url) as awaited:
            lock = made(awaited)
            for _ in range(10):
                await asyncio.create_task(lock.acquire())
            assert len(lock._core._grips) < 4

    asyncio.run(main())


def test_a_dropped_lease_warns_and_ends_by_its_ttl(sqlite_url: str, other: dibs.Client) -> None:
    """A lease dropped without release() is a ResourceWarning, is not renewed any more, and its ttl frees the name."""
    with dibs.connect(sqlite_url, ttl=3) as client:
        leases = [had(client.lock("dropped"))]
        time.sleep(1.2)
        with pytest.warns(ResourceWarning, match="dropped.*without release"):
            leases.clear()
        gc.collect()
        assert other.lock("dropped").acquire(timeout=0) is None
        had(other.lock("dropped"), timeout=10).release()


def test_a_lease_that_has_just_run_out_is_dropped_in_silence(client: dibs.Client) -> None:
    """Who drops a lease that is over, though nobody has noticed yet, has forgotten nothing."""
    leases = [had(client.lock("over", renew=False))]
    leases[0]._hold.trusted_until = leases[0]._session.clock.now()
    leases.clear()
    gc.collect()


@pytest.mark.parametrize("kind", ["lock", "multilock"])
def test_a_lease_that_is_interrupted_as_it_is_made_is_not_dropped(
    client: dibs.Client, other: dibs.Client, kind: str
) -> None:
    """A Ctrl-C between its making and the first line that keeps it: it is given back, and nobody is warned of it."""
    lock: dibs.Lock | dibs.MultiLock = client.lock("made") if kind == "lock" else client.multilock(["also", "made"])
    core: Any = lock._core
    make = core._make_lease

    def interrupted(session: Any, hold: Any, name: str) -> Any:
        lease = make(session, hold, name)
        if name == "made":
            del lease
            raise KeyboardInterrupt
        return lease

    core._make_lease = interrupted
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    gc.collect()
    with other.multilock(["also", "made"], timeout=5):
        pass


def test_a_lease_that_a_lock_remembers_is_not_dropped(client: dibs.Client) -> None:
    """`lock.acquire()` without keeping the lease is the standard library's style: the lock keeps it."""
    lock = client.lock("kept")
    assert lock.acquire()
    gc.collect()
    assert lock.locked()
    assert lock.release() is True


# -- signals and the end ----------------------------------------------------------------------------------------------

# (It rests in short sleeps: one long one would outlast a signal that came just before it began.)
WAITER = """
import os, sys, time, signal, dibs
def rest():
    for _ in range(600):
        time.sleep(0.1)
url, what = sys.argv[1:]
client = dibs.connect(url, ttl=float(os.environ.get("ttl", "20")))
if what == "waiting":
    print("ready", flush=True)
    try:
        client.lock("signalled").acquire()
        print("acquired", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        if "stay" in os.environ:
            rest()
elif what == "holding":
    with client.lock("signalled"):
        print("ready", flush=True)
        rest()
elif what == "exit":
    lease = client.lock("signalled").acquire()
    kept = [lease]
    print("ready", flush=True)
elif what == "sys.exit in a thread's time":
    import threading
    lease = client.lock("signalled").acquire()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    print("ready", flush=True)
    sys.exit(3)
elif what == "busy":
    if "finish" in os.environ:
        import dibs.stores.postgres_link
        dibs.stores.postgres_link.FINISH_S = float(os.environ["finish"])
    lock = client.lock("signalled")
    print("ready", flush=True)
    while True:
        with lock:
            pass
"""


def start(url: str, what: str, **env: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITER, url, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str], within: float = 20) -> tuple[int, str, str]:
    with process:
        try:
            out, err = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


def test_ctrl_c_while_waiting_leaves_the_line(client: dibs.Client, other: dibs.Client, sqlite_url: str) -> None:
    """A waiter interrupted by Ctrl-C, which lives on, neither holds the name nor is waited for."""
    lease = had(client.lock("signalled"))
    process = start(sqlite_url, "waiting", stay="1")

    def waiting() -> int:
        record = client.holder("signalled")
        return 0 if record is None else record.waiting

    eventually(waiting, "the child does not wait")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "interrupted\n"
    eventually(lambda: waiting() == 0, "the interrupted waiter still stands in line")
    lease.release()
    had(other.lock("signalled"), timeout=0).release()
    process.kill()
    ended(process)


def test_ctrl_c_while_holding_gives_back(client: dibs.Client, sqlite_url: str) -> None:
    """A holder interrupted by Ctrl-C gives the name back as its block ends."""
    process = start(sqlite_url, "holding")
    assert client.lock("signalled").acquire(timeout=0) is None
    process.send_signal(signal.SIGINT)
    had(client.lock("signalled"), timeout=10).release()
    _, _, err = ended(process)
    assert err.count("Traceback") == 1
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_ctrl_c_anywhere_leaves_nothing_held(store: str, request: pytest.FixtureRequest) -> None:
    """Interrupted at any point of acquiring and releasing, a process that ends leaves nothing held and ends at once."""
    url = request.getfixturevalue("sqlite_url" if store == "sqlite" else "postgres_url")
    with dibs.connect(url, ttl=20) as client:
        for number in range(12):
            # On a busy machine a commit can take longer than the half second that a statement under way is waited for.
            process = start(url, "busy", finish="20")
            time.sleep(0.003 * number)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                # Python swallows a Ctrl-C where it collects garbage; whoever pressed it does so again.
                process.send_signal(signal.SIGINT)
            code, _, err = ended(process)
            assert "KeyboardInterrupt" in err, err
            assert code in (-signal.SIGINT, 130), (code, err)
            assert client.holder("signalled") is None, err
            had(client.lock("signalled"), timeout=0).release()


def test_ctrl_c_while_the_server_is_stuck_leaves_a_ttl_at_most(own_postgres: PostgresServer) -> None:
    """What the server does after nobody waited for it any more is held by nobody, renewed by nobody, and ends."""
    url = own_postgres.create_database()
    with dibs.connect(url) as client:
        had(client.lock("signalled")).release()
        for _ in range(3):
            process = start(url, "busy", ttl="2")
            time.sleep(0.1)  # somewhere in its acquiring and releasing
            with own_postgres.paused():
                time.sleep(0.1)  # so that a statement is under way
                process.send_signal(signal.SIGINT)
                code, _, err = ended(process)
            assert code in (-signal.SIGINT, 130), (code, err)
            had(client.lock("signalled"), timeout=20).release()


@pytest.mark.parametrize("what, code", [("exit", 0), ("sys.exit in a thread's time", 3)])
def test_the_end_of_the_interpreter_gives_back(what: str, code: int, client: dibs.Client, sqlite_url: str) -> None:
    """What is still held when the interpreter ends is given back, quickly and without a word."""
    process = start(sqlite_url, what)
    seen, out, err = ended(process, 5)
    assert (seen, out, err) == (code, "", "")
    had(client.lock("signalled"), timeout=0).release()


def test_clients_that_are_gone_leave_nothing_for_the_end(sqlite_url: str) -> None:
    """A program that makes a client for each piece of work does not grow by what is to be done when it ends."""

    def use(closed: bool) -> None:
        client = dibs.connect(sqlite_url)
        client.ping()
        if closed:
            client.close()

    use(True)
    before, opened = atexit._ncallbacks(), len(desk._OPENED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # Python 3.13 and later tell of every connection nobody closed
        for number in range(6):
            use(number % 2 == 0)
        gc.collect()
    assert atexit._ncallbacks() == before
    assert len(desk._OPENED) <= opened


def test_ctrl_c_in_a_purge_leaves_the_file_free(
    sqlite_url: str, other: dibs.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge that is interrupted is undone: the file is not left locked for others, and the client goes on working."""
    from dibs.stores.sqlite_file import SQLiteFile

    with dibs.connect(sqlite_url, ttl=20) as client:
        had(client.lock("purged")).release()
        read_meta = SQLiteFile.meta

        def interrupted(file: SQLiteFile, db: Any, key: str) -> Any:
            if key == "token_floor":
                raise KeyboardInterrupt
            return read_meta(file, db, key)

        monkeypatch.setattr(SQLiteFile, "meta", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.purge(0)
        monkeypatch.undo()
        had(other.lock("free"), timeout=0).release()
        had(client.lock("free"), timeout=0).release()
        assert client.purge(0) >= 1


@pytest.mark.parametrize("kind", ["lock", "semaphore", "rwlock"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_who_would_wait_for_itself_is_told_what_to_do(kind: str, reentrant: bool, client: dibs.Client) -> None:
    """Who takes a name again through another object is told so, above all if both of them are reentrant."""

    def made() -> Any:
        if kind == "semaphore":
            return client.semaphore("twice", 1, reentrant=reentrant)
        if kind == "rwlock":
            return client.rwlock("twice", reentrant=reentrant).write()
        return client.lock("twice", reentrant=reentrant)

    with made(), pytest.raises(dibs.WouldDeadlock) as told, made():
        pass
    what = "semaphore" if kind == "semaphore" else "lock"
    if reentrant:
        assert f"being reentrant belongs to the {what} object" in str(told.value)
    else:
        assert f"build the {what} with reentrant=True and use that one object" in str(told.value)


def dibs_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dibs-")]


def test_a_lone_caller_gives_back_in_its_own_thread(sqlite_url: str) -> None:
    """Also through the object, and several at once: another thread would take longer than the release."""
    with dibs.connect(sqlite_url) as client:
        before = dibs_threads()
        permits = client.semaphore("permits", 5)
        had(permits), had(permits), had(permits)
        assert permits.release()
        assert permits.release(2)
        with client.multilock(["a", "b"]):
            pass
        assert set(dibs_threads()[len(before) :]) <= {"dibs-renew"}


def test_closing_ends_everything_soon(sqlite_url: str, other: dibs.Client) -> None:
    """A client closed while it holds, renews and waits comes back soon, and leaves no thread behind it."""
    busy = had(other.lock("busy"))
    before = dibs_threads()
    client = dibs.connect(sqlite_url, ttl=0.5)
    mine = had(client.lock("mine"))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.lock("busy").acquire()
        except dibs.StoreUnavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    with within(2, "closing took long"):
        client.close()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 2
    assert not mine.held
    with within(1, "closing again took long"):
        client.close()
    eventually(lambda: len(dibs_threads()) <= len(before), f"threads left: {dibs_threads()}, before: {before}", 3)
    busy.release()


def slow(address: StoreAddress, gate: threading.Event, reached: threading.Event) -> StoreAddress:
    """The same store, whose next acquires take until the gate is opened."""

    def open_store() -> Any:
        store = address.open()
        act = store.act

        def slow_act(requests: Any, deadline: Any) -> Any:
            outcomes = act(requests, deadline)
            if any(hasattr(request, "holder") for request in requests):
                reached.set()
                gate.wait(10)
            return outcomes

        store.act = slow_act  # type: ignore[method-assign]
        return store

    return address._replace(open=open_store)


@pytest.mark.parametrize("used", [False, True])
def test_a_closed_client_asks_nothing_more(used: bool, sqlite_url: str) -> None:
    """Whatever is asked of a client that was closed is refused, whether it was used before or not."""
    client = dibs.connect(sqlite_url)
    if used:
        client.ping()
    client.close()
    queue = client.queue("q")
    for verb in (
        lambda: client.lock("x").acquire(timeout=0),
        client.leases,
        lambda: client.holder("x"),
        lambda: client.break_lease("x", fencing_token=1),
        lambda: client.purge(0),
        lambda: client.pause("x"),
        client.pauses,
        client.setup,
        client.ping,
        lambda: client.capabilities,
        client.semaphore("s", 1).available,
        client.election("e").leader,
        lambda: queue.put(1),
        queue.take,
        queue.depth,
        lambda: queue.cancel(1),
    ):
        with pytest.raises(dibs.StoreUnavailable, match="this dibs client is closed"):
            verb()


def test_a_task_can_be_made_of_the_capabilities() -> None:
    """They are a coroutine, like what every other verb returns: of nothing else does Python 3.12 make a task."""

    async def main() -> str:
        async with dibs.connect_async("memory://") as client:
            asked = client.capabilities
            assert inspect.iscoroutine(asked)
            return (await asyncio.create_task(asked)).store

    assert asyncio.run(main()) == "memory"


def test_a_grant_that_comes_after_close_is_given_back(sqlite_url: str, other: dibs.Client) -> None:
    """An acquire that is under way when its client is closed holds nothing afterwards."""
    from dibs.client import Client
    from dibs.desk import DEFAULTS, Desk

    gate, reached = threading.Event(), threading.Event()
    client = Client(Desk(slow(locate(sqlite_url)[0], gate, reached), **{"info": None, **DEFAULTS, "ttl": 20}))
    seen: list[Any] = []

    def acquire() -> None:
        try:
            seen.append(client.lock("late").acquire(timeout=0))
        except dibs.StoreUnavailable as error:
            seen.append(error)

    thread = threading.Thread(target=acquire)
    thread.start()
    assert reached.wait(10)
    closing = threading.Thread(target=client.close)
    closing.start()
    time.sleep(0.1)
    gate.set()
    thread.join(10)
    closing.join(15)
    assert len(seen) == 1
    assert not getattr(seen[0], "held", False), "a closed client holds a lease that nobody renews"
    eventually(lambda: other.holder("late") is None, "the grant was not given back", 3)


# -- cancellation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "sqlite", "postgresql"])
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_cancelling_an_acquire_anywhere_leaves_nothing_held(
    store: str, held: bool, request: pytest.FixtureRequest
) -> None:
    """A task cancelled at any moment of an acquire holds nothing, stands in no line, and delays nobody."""
    fixture = {"sqlite": "sqlite_url", "postgresql": "postgres_url"}.get(store)
    url = "memory://cancelled" if fixture is None else request.getfixturevalue(fixture)

    async def main() -> None:
        async with dibs.connect_async(url, ttl=20) as client, dibs.connect_async(url, ttl=20) as other:
            lock = client.lock("cancelled")
            for number in range(TRIES):
                lease = await other.lock("cancelled").acquire(timeout=5) if held else None
                task = asyncio.get_running_loop().create_task(lock.acquire(timeout=5 if number % 3 else 0))
                # First after so many turns of the loop, then after so much time.
                if number < TRIES // 2:
                    for _ in range(number):
                        await asyncio.sleep(0)
                else:
                    await asyncio.sleep(0.0004 * (number - TRIES // 2))
                if lease is not None and number % 2:
                    await lease.release()
                task.cancel()
                try:
                    won = await task
                except asyncio.CancelledError:
                    won = None
                if won is not None:
                    await won.release()
                if lease is not None:
                    await lease.release()
                assert not lock.locked()
                again = await other.lock("cancelled").acquire(timeout=2)
                assert again is not None, f"try {number}: the cancelled acquire holds the name or a place in line"
                # What is given back travels behind what was asked, so it may arrive a moment later.
                for _ in range(100):
                    record = await other.holder("cancelled")
                    waiting = record.waiting if record is not None else -1
                    if waiting == 0:
                        break
                    await asyncio.sleep(0.01)
                assert waiting == 0, f"try {number}: the cancelled acquire still stands in line"
                await again.release()

    asyncio.run(main())


def test_cancelling_at_each_await_point_leaves_nothing_held(sqlite_url: str) -> None:
    """Driven by hand and cancelled at its first, second, … await point, an acquire and a release leave nothing held."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url, ttl=20) as other:
            for point in range(6):
                cancelled = False

                async def block(point: int = point) -> None:
                    async with client.lock("points") as lease:
                        assert lease.held
                        await asyncio.sleep(0)

                task = asyncio.get_running_loop().create_task(block())
                suspensions = 0
                while not task.done():
                    if suspensions == point and not cancelled:
                        cancelled = task.cancel()
                    await asyncio.sleep(0.002)
                    suspensions += 1
                assert task.cancelled() or task.exception() is None
                lease = await other.lock("points").acquire(timeout=2)
                assert lease is not None, f"cancelled at point {point}: still held"
                await lease.release()

    asyncio.run(main())


def test_a_release_acts_even_when_nobody_awaits_it(sqlite_url: str) -> None:
    """`lock.release()` without await gives the name back, as with asyncio.Lock."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url, ttl=20) as other:
            lock = client.lock("not awaited")
            assert await lock.acquire()
            lock.release()
            assert not lock.locked()
            lease = await other.lock("not awaited").acquire(timeout=5)
            assert lease is not None
            lease.release()
            assert not lease.held
            assert await lock.acquire(timeout=5)
            assert await lock.release() is True
            with pytest.raises(RuntimeError):
                lock.release()

    asyncio.run(main())


def test_a_cancelled_block_is_cancelled_and_a_lost_one_is_lost(sqlite_url: str) -> None:
    """A block cancelled from outside ends with CancelledError and gives back; one that lost its lease, LeaseLost."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url, ttl=20) as other:
            inside = asyncio.Event()

            async def block(**options: Any) -> None:
                async with client.lock("block", **options):
                    inside.set()
                    await asyncio.sleep(60)

            task = asyncio.get_running_loop().create_task(block())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await other.holder("block") is None
            inside.clear()
            began = time.monotonic()
            task = asyncio.get_running_loop().create_task(block(ttl=0.3, renew=False))
            with pytest.raises(dibs.LeaseLost):
                await task
            assert time.monotonic() - began < 5

            # Python 3.11 counts cancellations: the loss left none behind for the next await of a task.
            async def lost_and_on() -> str:
                try:
                    await block(ttl=0.3, renew=False)
                except dibs.LeaseLost:
                    await asyncio.sleep(0.01)
                    return "goes on"
                return "not lost"

            assert await asyncio.get_running_loop().create_task(lost_and_on()) == "goes on"

    asyncio.run(main())


def test_wait_for_and_timeout_work_on_it(sqlite_url: str) -> None:
    """asyncio's own time-outs around an acquire leave nothing held and nobody in line."""

    async def main() -> None:
        async with dibs.connect_async(sqlite_url, ttl=20) as client, dibs.connect_async(sqlite_url, ttl=20) as other:
            lease = await other.lock("late").acquire()
            assert lease is not None
            for _ in range(3):
                with pytest.raises((asyncio.TimeoutError, TimeoutError)):
                    await asyncio.wait_for(client.lock("late").acquire(), 0.05)
            await lease.release()
            # What was given up is taken back at once: a place left in line would keep the name for 1.2 s.
            again = await asyncio.wait_for(other.lock("late").acquire(timeout=1), 5)
            assert again is not None
            await again.release()

    asyncio.run(main())


def test_one_client_in_many_loops(sqlite_url: str) -> None:
    """An asynchronous client made outside a loop works in one loop after another."""
    client = dibs.connect_async(sqlite_url, ttl=20)

    async def once() -> int:
        async with client.lock("loops") as lease:
            return lease.fencing_token

    tokens = [asyncio.run(once()) for _ in range(3)]
    assert tokens == sorted(set(tokens))
    asyncio.run(client.close())
