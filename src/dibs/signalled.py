"""Whether an error was raised by a signal handler of the program, in the midst of whatever its main thread was at.

Frameworks end a job that takes too long in this way (Celery with SoftTimeLimitExceeded, RQ with JobTimeoutException,
and the recipes for ``signal.alarm`` with TimeoutError). What they raise is an error like those of stores and drivers,
and would be taken for one of theirs; where it was raised tells it from them.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType


def by_signal(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """Of an error and those that it was raised from: that which a signal handler has raised.

    ``handled`` is what the caller was handling before (``sys.exc_info``): that one, which may be a handler's, is over.
    """
    codes = _handlers()
    link: BaseException | None = error
    while codes and link is not None and link is not handled:
        step = link.__traceback__
        while step is not None:
            if step.tb_frame.f_code in codes:
                return link
            step = step.tb_next
        link = link.__cause__ or link.__context__
    return None


def _handlers() -> set[CodeType]:
    """What the handlers of the program do, as far as they are written in Python."""
    import signal

    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of a functools.partial
        if callable(handler):  # (a method has the code of its function)
            code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
            if code is not None:
                codes.add(code)
    return codes
