"""One way through the code for threads and tasks: acts are written once, as steps.

A *steps* generator yields ``(session, ask, timeout)`` whenever it needs an answer and is sent whether the ask was
settled in time. ``run`` takes the steps in a thread, blocking; ``dibs.aio`` takes the same steps in a task, awaiting.
An exception at the waiting point (Ctrl-C, cancellation) is thrown into the steps, which clean up after themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from dibs._typing import TYPE_CHECKING, Any, TypeVar
from dibs.errors import LeaseLost, StoreUnavailable, once_more

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.ask import Ask
    from dibs.clock import Deadline
    from dibs.session import Session
    from dibs.store import Store

T = TypeVar("T")
Steps = Generator[tuple["Session", "Ask", "float | None"], bool, T]

# Whoever waits for what is not told looks after the first of these, then each time so much later, up to the last.
LOOK_MIN_S = 0.02
LOOK_GROWTH = 1.5
LOOK_MAX_S = 1.0


def run(steps: Steps[T]) -> T:
    """Take the steps in this thread."""
    try:
        session, ask, timeout = next(steps)
        while True:
            try:
                settled = session.wait(ask, timeout)
            except BaseException as error:  # noqa: BLE001 - the steps raise it again when they have cleaned up
                session, ask, timeout = steps.throw(error)
            else:
                session, ask, timeout = steps.send(settled)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException:
        # After a Ctrl-C between two steps they are not over. They clean up here: left to the garbage collector, they
        # would do it wherever that comes, also in a thread that has the mutex which they take.
        steps.close()
        raise


def acting(session: Session, act: Callable[[Store, Deadline], T]) -> Steps[T]:
    """Have a function of the store called by the lane; what it returned."""
    if session.closed:  # the lane would open its store once more, for whom it had been left
        raise StoreUnavailable("this dibs client is closed", maybe_applied=False)
    return (yield from asking(session, session.new_act(act), "the store did not answer"))  # type: ignore[no-any-return]


def asking(session: Session, ask: Ask, unanswered: str) -> Steps[Any]:
    """Queue an ask and wait for its outcome; raises its error, or that there is no answer.

    What nobody waits for any more is not sent later, along with something else, or after what takes it back.
    """
    try:
        session.queue(ask)
        if not (yield session, ask, session.patience_s + session.request_timeout_s):
            raise ask.unanswered(unanswered)
    except BaseException:
        ask.dropped = True
        raise
    if ask.error is not None:
        raise once_more(ask.error)
    return ask.outcome


def sending(
    session: Session, queue: Callable[[], Ask], timeout: float | None = None, unanswered: str = ""
) -> Steps[Ask]:
    """Have an ask queued and wait for the answer; raises its error, or that there is none in ``timeout`` seconds.

    Once it is queued it is sent, whoever is interrupted: also between the one and the other.
    """
    try:
        ask = queue()
        settled = yield session, ask, timeout
    except BaseException:
        session.lane.start()
        raise
    if not settled:
        raise ask.unanswered(unanswered)
    if ask.error is not None:
        raise once_more(ask.error)
    return ask


def settling(session: Session, asks: Sequence[Ask]) -> Steps[None]:
    """Wait until the store has answered all of these; raises the first error among them."""
    for ask in asks:
        if not ask.settled:
            yield session, ask, session.patience_s + session.request_timeout_s
    error = next((ask.error for ask in asks if ask.error is not None), None)
    if error is not None:
        raise once_more(error)
    for ask in asks:
        if not ask.settled:
            raise ask.unanswered("the store did not answer; what it may have granted is given back")


def begun(first: tuple[Session, Ask, float | None], steps: Steps[T]) -> Steps[T]:
    """The same steps again, from the one that was taken already."""
    step = first
    try:
        while True:
            try:
                answer = yield step
            except BaseException as error:  # noqa: BLE001 - the steps raise it again when they have cleaned up
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def within(limit_s: float | None, steps: Steps[T]) -> Steps[T]:
    """The same steps, whose first wait takes no longer than that."""
    session, ask, timeout = next(steps)
    if limit_s is not None:
        ask.overdue = True
        timeout = limit_s if timeout is None else min(timeout, limit_s)
    return (yield from begun((session, ask, timeout), steps))


def look_pauses(others: int = 0) -> Iterator[float]:
    """How long to wait between looks whether something is over, beside so many others of this process.

    A short wait ends soon after what it waits for, a long one costs the store a look each LOOK_MAX_S; and so does
    everybody in a crowd, but for those who came first.
    """
    pause_s = min(LOOK_MAX_S, LOOK_MIN_S * (1 + others))
    while True:
        yield pause_s
        pause_s = min(LOOK_MAX_S, pause_s * LOOK_GROWTH)


def together(many: Sequence[Steps[T]], results: dict[int, T | Exception]) -> Steps[None]:
    """Take several steps at once; ``results`` gets what each returned or raised, by its place.

    The first step of all is taken before any is waited for, so what they ask of the store travels in one call. When
    the waiting is interrupted, those that are not over clean up after themselves; the rest stand in ``results``.
    """
    waiting: list[tuple[int, Steps[T], Steps[T]]] = []
    try:
        for place, steps in enumerate(many):
            try:
                waiting.append((place, steps, begun(next(steps), steps)))
            except StopIteration as stop:
                results[place] = stop.value
            except Exception as error:  # noqa: BLE001 - what becomes of the others is for the caller to decide
                results[place] = error
        while waiting:
            place, _, rest = waiting[0]
            try:
                results[place] = yield from rest
            except Exception as error:  # noqa: BLE001 - as above
                results[place] = error
            del waiting[0]
    finally:
        for _, steps, _ in waiting:
            steps.close()


def all_of(many: Sequence[Steps[bool]]) -> Steps[bool]:
    """Take them all to their end in one call; whether all said True. LeaseLost is raised before any other error."""
    answers: dict[int, bool | Exception] = {}
    yield from together(many, answers)
    errors = [answer for answer in answers.values() if isinstance(answer, Exception)]
    errors.sort(key=lambda error: not isinstance(error, LeaseLost))
    try:
        if errors:
            raise errors[0]
        return all(answers.values())
    finally:  # an error knows this frame: if that knew the error, the leases of both would wait for the collector
        answers.clear()
        errors.clear()
