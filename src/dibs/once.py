"""Once: at most one successful run per name and key in ``keep`` seconds, also across machines and crashes.

A once is a lock on ``name/key``, and a run is one lease of it; so while one runs nobody else does, and a run that fails
or dies gives the name up like any holder. What is added is how a run ends that succeeded: it is released with ``keep``.
The store then keeps the name for that long under a claim that nobody has, in the same conditional write that ends the
lease, and shows the *mark* of success in its info, with the result. Whoever asks meanwhile is refused as by a holder,
looks at what is shown, and finds it

* *done*: the mark is there;
* *running*: it is not. Whoever may wait stands in line like for a lock, which ends when the run fails, and looks again
  now and then (``look_pauses``) without leaving its place, which ends when it succeeds.

A crash after the work was done and before the mark was written leaves no mark, and the work may be done again. No store
can prevent that: an effect that must not be repeated needs the fencing token, or the caller's own transaction.
"""

from __future__ import annotations

from functools import wraps

from dibs._typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from dibs.errors import DibsError, InvalidOption, LeaseLost, NotHeld, ResultNotKept, StoreUnavailable
from dibs.hold import RELEASED, Finish
from dibs.lease import Lease, LeaseFacts
from dibs.lock import LockCore, check_decorated, ran, wait_limit
from dibs.names import check_flag, check_info, check_name, check_seconds
from dibs.once_blocks import Blocks
from dibs.once_keys import check_key, key_of_calls
from dibs.once_record import MARK, OnceRecord, kept_result, record_of
from dibs.owners import this_thread
from dibs.steps import run, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.desk import Desk
    from dibs.errors import LockTimeout
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.once_keys import Key
    from dibs.session import Session
    from dibs.steps import Steps
    from dibs.terms import Terms

F = TypeVar("F", bound="Callable[..., Any]")
L = TypeVar("L", bound=LeaseFacts)
R = TypeVar("R", bound="OnceRunFacts[Any]")


class OnceRunFacts(Generic[L]):
    """What ``begin()`` found: true when the work is this caller's to do, false when it is done or being done."""

    __slots__ = ("_core", "_done", "_lease", "_result")

    def __init__(self, core: OnceCore[L, Any], lease: L | None, done: OnceRecord | None) -> None:
        self._core = core
        self._lease = lease
        self._done = done
        self._result: Any = None if done is None else done.result

    def __bool__(self) -> bool:
        return self._lease is not None

    @property
    def done(self) -> OnceRecord | None:
        """The successful run that is kept. None when the work is this caller's to do, or somebody is doing it now."""
        return self._done

    @property
    def lease(self) -> L:
        """The lease under which this run goes on: ``run.lease.check()``, ``run.lease.fencing_token``.

        Raises NotHeld when the work is not this caller's to do. Releasing it ends the run without a mark.
        """
        if self._lease is None:
            raise NotHeld(f"{self._core.name!r} is not this caller's to do: look at `if run:` first")
        return self._lease

    @property
    def result(self) -> Any:
        """What is kept with the mark, to be set inside the block: small JSON. Of an earlier run, what was kept."""
        return self._result

    @result.setter
    def result(self, value: Any) -> None:
        if self._lease is None:
            raise NotHeld(f"{self._core.name!r} is not this caller's to do, so it has no result to keep")
        self._result = value

    def _give_up(self) -> None:
        if self._lease is not None:
            self._lease._end()

    def __repr__(self) -> str:
        state = "done" if self._done is not None else "somebody else's" if self._lease is None else repr(self._lease)
        return f"<{type(self).__name__} {self._core.name!r}: {state}>"


class _RunLock(LockCore[L]):
    """The lock under which a run goes on."""

    __slots__ = ()

    LOOKS = True

    def look(self, within_s: float | None = None) -> Steps[OnceRecord | None]:
        return record_of(self.name, (yield from within(within_s, self._desk.holder(self.name))))

    def is_over(self, within_s: float | None) -> Steps[bool]:
        return (yield from self.look(within_s)) is not None

    def instead(self, kind: str) -> str:
        return "work that is done once cannot wait for itself to be done: leave its block before, or pass a timeout"


class OnceCore(Generic[L, R]):
    """What a once does, in steps for either face."""

    __slots__ = ("_desk", "_fields", "_lock", "_make_run", "blocks", "keep_result", "keep_s", "name", "terms")

    def __init__(
        self,
        desk: Desk,
        name: str,
        key: Key | None,
        options: OnceOptions,
        make_lease: Callable[[Session, Hold, str], L],
        make_run: Callable[[OnceCore[L, R], L | None, OnceRecord | None], R],
    ) -> None:
        name = check_name(name)
        self.name = name if key is None else f"{name}/{check_key(key)}"
        self._desk = desk
        self.terms, self.keep_s, self.keep_result, self._fields = options
        self._lock = _RunLock(desk, self.name, self.terms, make_lease)
        self._make_run = make_run
        self.blocks: Blocks[R] = Blocks(self.name)

    def begin(self, owner: object, timeout: Seconds | None = -1) -> Steps[R]:
        """A run: this caller's to do, done before, or neither when ``timeout`` seconds did not suffice."""
        limit_s = wait_limit(self.terms, True, timeout)
        session = self._desk.session()
        clock = session.clock
        if limit_s is None:
            self._lock.refuse_own(owner)
        if limit_s != 0 and owner in session.holdings.owned:
            session.rings.taking(owner, self._lock._key)
        began = clock.now()
        until = None if limit_s is None else began + limit_s
        wait_s: float | None = 0.0  # who finds it done at first waits for nothing, and lines up nowhere
        while True:
            lease = yield from self._lock.obtain(owner, wait_s)
            if lease is not None:
                try:
                    return self._make_run(self, lease, None)
                except BaseException:  # Ctrl-C: nobody has it in hand
                    lease._end()
                    raise
            done = yield from self._lock.look(session.time_left(until))
            waited = clock.now() - began
            if done is not None or (limit_s is not None and waited >= limit_s):
                self._lock.refused = (self._lock.refused[0], waited)
                return self._make_run(self, None, done)
            wait_s = None if limit_s is None else limit_s - waited

    def enter(self, owner: object) -> Steps[R]:
        """The beginning of a ``with`` block."""
        begun = yield from self.begin(owner)
        try:
            if begun or begun.done is not None or self.terms.on_busy == "skip":
                self.blocks.enter(owner, begun)
                return begun
            raise self.timed_out()
        except BaseException:  # as above
            begun._give_up()
            raise

    def timed_out(self) -> LockTimeout:
        return self._lock.timed_out()

    def end(self, begun: OnceRunFacts[L], failed: bool) -> Steps[None]:
        """End a run: give the name up if it failed, else mark it done and keep it so."""
        if not begun:
            return
        lease = begun.lease
        if failed:
            yield from lease._releasing()
            return
        if lease._hold.state == RELEASED:
            if lease._session.closed:
                raise StoreUnavailable(
                    f"{self.name!r} is not marked as done: the dibs client was closed inside the block",
                    maybe_applied=False,
                )
            return
        lease._check_at_end()
        text, problem = self._mark(begun)
        told = yield from lease._releasing(Finish(self.keep_s, text))
        if not told:
            yield from self._make_sure(lease)
        if problem is not None:
            raise ResultNotKept(
                f"{self.name!r} was run and is kept as done, but its result cannot be kept: {problem}",
                result=begun.result,
            ) from problem

    def _mark(self, begun: OnceRunFacts[L]) -> tuple[str | None, Exception | None]:
        """The info that says done, and what is wrong with the result if it cannot be part of it."""
        mark: dict[str, Any] = {"keep": self.keep_s}
        problem = None
        if self.keep_result and begun._result is not None:
            try:
                text = check_info({**self._fields, MARK: {**mark, "result": begun._result}}, "it")
                begun._result = kept_result(text)
                return text, None
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the run has succeeded
                problem = error
        return check_info({**self._fields, MARK: mark}), problem

    def _make_sure(self, lease: L) -> Steps[None]:
        """The store did not confirm the mark. It is there, or it is told that it may not be."""
        why: StoreUnavailable | None = None
        try:
            done = yield from self.look()
            if done is not None and done.fencing_token == lease.fencing_token:
                return
        except StoreUnavailable as error:
            why = error
        raise StoreUnavailable(
            f"{self.name!r} was run (token {lease.fencing_token}), but the store did not confirm that it is kept as "
            "done: it may be run again"
        ) from why

    def look(self) -> Steps[OnceRecord | None]:
        """The successful run that is kept, if there is one."""
        return (yield from self._lock.look())

    def forget(self) -> Steps[bool]:
        """Forget the successful run that is kept; False when there is none."""
        done = yield from self.look()
        return done is not None and (yield from self._desk.breaking(self.name, done.fencing_token, True))


# -- what a caller may pass -------------------------------------------------------------------------------------------


class OnceOptions(NamedTuple):
    """The checked options of a once, the same for all of its keys."""

    terms: Terms
    keep_s: float
    keep_result: bool
    #: The info that is shown besides the mark.
    fields: dict[str, Any]


def once_options(
    desk: Desk,
    keep: Seconds,
    keep_result: bool,
    ttl: Seconds | None,
    timeout: Seconds | None,
    max_hold: Seconds | None,
    on_lost: Callable[[], object] | None,
    on_busy: str,
    info: dict[str, Any] | None,
) -> OnceOptions:
    """Check what a caller gave; raises InvalidOption before any I/O."""
    limits = desk.address.capabilities
    keep_s = check_seconds(f"keep (on {limits.store})", keep, least=limits.ttl_min_s, most=limits.ttl_max_s)
    terms = desk.terms(ttl, True, timeout, False, 0, max_hold, on_lost, on_busy, info)
    fields: dict[str, Any] = {}
    if terms.info is not None:
        import json

        fields = json.loads(terms.info)
        if MARK in fields:
            raise InvalidOption(f"info may not contain {MARK!r}: there stands whether the work is done")
        check_info({**fields, MARK: {"keep": keep_s}})
    return OnceOptions(terms, keep_s, check_flag("keep_result", keep_result), fields)


# -- the face for threads ---------------------------------------------------------------------------------------------


class OnceRun(OnceRunFacts[Lease]):
    """What ``begin()`` found: true when the work is this caller's to do, false when it is done or being done.

    Leaving the block without an exception marks the work as done, and keeps it so for ``keep`` seconds; an exception,
    whichever, gives the name up for the next to try.
    """

    __slots__ = ()

    def __enter__(self) -> OnceRun:
        try:
            if self._lease is not None:
                self._lease.check()
        except DibsError:
            raise
        except BaseException:  # Ctrl-C in front of the block
            self._give_up()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        try:
            self._core._desk.session().end(self._core.end(self, exc_type is not None), exc_type)
        except LeaseLost:
            if exc_type is None:
                raise
        except DibsError:
            raise
        except BaseException:  # Ctrl-C on the way: whoever comes next may try
            self._give_up()
            raise


class Once:
    """Work that is to be done at most once in ``keep`` seconds. A description: ``begin()`` makes a run of it.

    ``with once as run:`` begins one, waiting as long as ``timeout`` while somebody else is at it. Safe to share among
    threads.
    """

    __slots__ = ("_core",)

    def __init__(self, core: OnceCore[Lease, OnceRun]) -> None:
        self._core = core

    @property
    def name(self) -> str:
        """The name under which it is kept: name/key, or the name alone. ``client.holder(once.name)`` shows it."""
        return self._core.name

    def begin(self, timeout: Seconds | None = -1) -> OnceRun:
        """A run, to be used as ``with`` block: true when the work is this caller's to do.

        False at once when it is done (``run.done``); false after ``timeout`` seconds when somebody is still doing it.
        ``timeout=-1`` means what the once was built with, None for ever, 0 asks exactly once. Raises StoreUnavailable
        and SetupRequired as ``lock.acquire``, WouldDeadlock when this thread is doing it and would wait without limit.
        """
        return run(self._core.begin(this_thread(), timeout))

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call the function unless it is done, and return its result, now or from the run that is kept.

        What it returns is kept and returned as JSON has it (a tuple comes back as a list); with keep_result=False it
        is returned as it is, and None when it was done before. An exception of the function is raised, and nothing is
        marked. While somebody else is at it, waits as long as ``timeout`` says; then LockTimeout, or None with
        on_busy="skip". Raises LeaseLost when the lease was lost meanwhile, ResultNotKept when it is done and the
        result is too large or no JSON.
        """
        check_decorated(function, awaited=False)
        with self as begun:
            if begun:
                begun.result = ran(function(*args, **kwargs))
        return begun.result

    def done(self) -> OnceRecord | None:
        """The successful run that is kept; None when there is none, also while one goes on."""
        return run(self._core.look())

    def forget(self) -> bool:
        """Let it be run again although it is done; False when it is not. Does nothing to a run that goes on."""
        return run(self._core.forget())

    def __enter__(self) -> OnceRun:
        return run(self._core.enter(this_thread()))

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        begun = None
        try:
            begun = self._core.blocks.innermost(this_thread())
            self._core.blocks.leave(this_thread()).__exit__(exc_type, *exc)
        except DibsError:
            raise
        except BaseException:  # Ctrl-C on the way
            begun = begun or self._core.blocks.innermost(this_thread())
            if begun is not None:
                begun._give_up()
            raise

    def __repr__(self) -> str:
        return f"<dibs.Once {self.name!r}>"


def once_per(make: Callable[[Key | None], Once], key: Callable[..., Key] | None) -> Callable[[F], F]:
    """The decorator behind ``client.once_per``."""

    def decorate(function: F) -> F:
        check_decorated(function, awaited=False)
        key_of = key_of_calls(function, key)

        @wraps(function)
        def at_most_once(*args: Any, **kwargs: Any) -> Any:
            return make(key_of(*args, **kwargs)).run(function, *args, **kwargs)

        return at_most_once  # type: ignore[return-value]

    return decorate
