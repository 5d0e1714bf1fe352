"""What a caller may pass: names, namespaces, seconds, flags, info and functions are checked here, before any I/O.

Behind this door nobody checks again. It knows nothing of stores except the limits they all share.
"""

from __future__ import annotations

import math
from functools import partial

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from typing import Union

    Seconds = Union[float, timedelta]  # noqa: UP007 - the quotes-free form of Python 3.10

NAME_BYTES_MAX = 255
NAMESPACE_CHARS_MAX = 63
INFO_BYTES_MAX = 4096
TTL_MAX_S = 30 * 24 * 3600.0
# From two years on, years are how people say it.
YEARS_S = 2 * 365.25 * 24 * 3600.0
# Code flags of functions whose body does not run inside the call (CPython's inspect.CO_*).
_GENERATOR = 0x20
_COROUTINE = 0x80
_ASYNC_GENERATOR = 0x200
# Attributes that say the same: of inspect.markcoroutinefunction, and of asyncio before Python 3.12.
_ASYNC_MARKS = frozenset(("_is_coroutine_marker", "_is_coroutine"))
WAIT_MAX_S = 10 * 365 * 24 * 3600.0

_NAMESPACE_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def check_name(name: object) -> str:
    """Return the name unchanged, or raise InvalidName: 1 to 255 bytes of UTF-8 without control characters."""
    if type(name) is not str:
        if not isinstance(name, str):
            raise InvalidName(f"a name is a str, not {type(name).__name__}: {name!r}")
        name = str.__str__(name)  # a str subclass (an Enum member, say) is kept as the plain text it is
    if name.isascii() and name.isprintable():
        size = len(name)
    else:
        for char in name:
            code = ord(char)
            if code < 0x20 or 0x7F <= code < 0xA0:
                raise InvalidName(f"a name may not contain control characters: {name!r} has {char!r}")
            if 0xD800 <= code < 0xE000:
                raise InvalidName(f"a name may not contain lone surrogates: {name!r} has {char!r}")
        size = len(name.encode())
    if not size:
        raise InvalidName("a name may not be empty")
    if size > NAME_BYTES_MAX:
        raise InvalidName(
            f"a name has at most {NAME_BYTES_MAX} bytes of UTF-8; this one has {size}: {name[:40]!r}…. "
            "Use a hash of the long part."
        )
    return name


def check_namespace(namespace: object) -> str:
    """Return the namespace, or raise InvalidOption. It has no colon, so ``namespace:name`` can be taken apart again."""
    if not isinstance(namespace, str) or not namespace or not _NAMESPACE_CHARS.issuperset(namespace):
        raise InvalidOption(f"a namespace is made of letters, digits, '.', '_' and '-', not {namespace!r}")
    if len(namespace) > NAMESPACE_CHARS_MAX:
        raise InvalidOption(f"a namespace has at most {NAMESPACE_CHARS_MAX} characters, not {len(namespace)}")
    return str.__str__(namespace)


def check_seconds(what: str, value: Any, *, least: float = 0.0, most: float = WAIT_MAX_S) -> float:
    """Return seconds as a float from a number or a timedelta, or raise InvalidOption naming the parameter."""
    if type(value) is not float:
        if isinstance(value, bool):
            raise InvalidOption(f"{what} is a number of seconds or a timedelta, not {value!r}")
        total_seconds = getattr(value, "total_seconds", None)
        if total_seconds is not None and not isinstance(value, type):
            value = total_seconds()
        elif not isinstance(value, (int, float)):
            raise InvalidOption(f"{what} is a number of seconds or a timedelta, not {value!r}")
        try:
            value = float(value)
        except OverflowError:
            raise InvalidOption(f"{what} is at most {most:,.10g} s") from None
    if math.isnan(value):
        raise InvalidOption(f"{what} is not a number (NaN)")
    if value < least:
        raise InvalidOption(f"{what} is at least {least:g} s, not {value:g}")
    if value > most:
        raise InvalidOption(f"{what} is at most {most:,.10g} s, not {value:,.10g}")
    return float(value)


def check_flag(what: str, value: object) -> bool:
    """Return what is True or False, or raise InvalidOption naming the parameter: "no" would be as good as True."""
    if not isinstance(value, bool):
        raise InvalidOption(f"{what} is True or False, not {value!r}")
    return value


def check_event_timeout(value: Any) -> float | None:
    """Return how long to wait as events of the standard library do: what is negative is over, what is huge never."""
    if value is None:
        return None
    seconds = check_seconds("timeout", value, least=-math.inf, most=math.inf)
    return max(seconds, 0.0) if seconds <= WAIT_MAX_S else None


def check_timeout(value: Any) -> float | None:
    """Return how long to wait in seconds; None waits for ever, 0 tries exactly once."""
    if value is None or value == math.inf:
        return None
    return check_seconds("timeout", value)


def check_stop(stop: Any) -> Callable[[], bool]:
    """What says whether to stop, of an event, a function, or None (never); raises InvalidOption."""
    if stop is None:
        return bool  # which is False
    if not callable(stop) and not hasattr(stop, "is_set"):
        raise InvalidOption(f"stop is an event, or a function that says when to stop, not {stop!r}")
    return getattr(stop, "is_set", stop)  # type: ignore[no-any-return]


def check_info(info: object, what: str = "info") -> str | None:
    """Return info as JSON text, or raise InvalidOption, in which it is called ``what``: an object of at most 4 KiB."""
    if info is None:
        return None
    if not isinstance(info, dict):
        raise InvalidOption(f"{what} is a dict that JSON can express, not {type(info).__name__}")
    import json

    try:
        text = json.dumps(info, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"{what} cannot be written as JSON: {error}") from None
    # (Two backslashes are one that was in the text, and what comes after them stands for itself.)
    if "\\u0000" in text and "\\u0000" in text.replace("\\\\", ""):
        raise InvalidOption(f"{what} may not contain NUL characters: not every store can keep them")
    if size > INFO_BYTES_MAX:
        raise InvalidOption(f"{what} is at most {INFO_BYTES_MAX} bytes of JSON; this is {size}")
    return text


def info_in(text: str | None) -> dict[str, Any] | None:
    """The info that stands in a row. Somebody's scribbles there are none, and no reason to show nothing at all."""
    if text is None:
        return None
    import json

    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return info if isinstance(info, dict) else None


def body_of(function: Callable[..., Any]) -> str:
    """When the body of a function runs: "inside" the call, as a "generator" after it, or "async", when it is awaited.

    Of a partial, the function's; of an object that can be called, that of its ``__call__``.
    """
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(type(function).__call__, "__code__", None)
    flags = getattr(code, "co_flags", 0)
    if flags & (_GENERATOR | _ASYNC_GENERATOR):
        return "generator"
    marked = not _ASYNC_MARKS.isdisjoint(getattr(function, "__dict__", ()))
    return "async" if flags & _COROUTINE or marked else "inside"


def check_on_lost(on_lost: object) -> None:
    """Refuse what is not a function that can be called when a lease is lost."""
    if on_lost is None:
        return
    if not callable(on_lost):
        raise InvalidOption(f"on_lost is a function without parameters, not {on_lost!r}")
    if body_of(on_lost) != "inside":
        raise InvalidOption(
            f"on_lost is called in a thread of its own, where nobody would await or iterate {on_lost!r}: give it an "
            "ordinary function, which may hand over to an event loop with loop.call_soon_threadsafe()"
        )


def people_call(holder: str) -> str:
    """The holder as people would say it: ``web1 (pid 812)`` for ``web1/812/4c53…``."""
    host, _, rest = holder.partition("/")
    pid = rest.partition("/")[0]
    return f"{host} (pid {pid})" if pid.isdigit() else holder


def plain(text: str) -> str:
    """The text with everything escaped that is not seen but does something, to a terminal or a log for example."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def counted(count: int, what: str) -> str:
    """``1 job``, ``2,000 jobs``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def lasting(seconds: float) -> str:
    """How long something lasts, as people would say it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    # (Only a lease that is watched, seen by a client that does not watch, is shown to last for years.)
    return f"{minutes / 60:.1f} h" if seconds < YEARS_S else f"{seconds * 2 / YEARS_S:.0f} years"
