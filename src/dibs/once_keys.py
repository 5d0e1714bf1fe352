"""Keys of a once: which may be given, and which the calls of a decorated function have."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import date
    from typing import Union

    Key = Union[str, int, date]  # noqa: UP007 - the quotes-free form of Python 3.10


def check_key(key: object) -> str:
    """The key as text, or InvalidName: a str as it is, an int in digits, a date as 2026-11-21."""
    if isinstance(key, str):
        text = str.__str__(key)
    elif isinstance(key, int) and not isinstance(key, bool):
        try:
            text = int.__repr__(key)
        except ValueError:  # Python writes no more than some thousand digits
            raise InvalidName(f"a key of {key.bit_length():,} bits is too long: use a hash of it") from None
    else:
        from datetime import date, datetime

        if not isinstance(key, date) or isinstance(key, datetime):
            hint = "; its .date(), perhaps" if isinstance(key, date) else ""
            raise InvalidName(f"a key is a str, an int or a date, not {type(key).__name__}{hint}: {key!r}")
        text = key.isoformat()
    if not text:
        raise InvalidName("a key may not be empty; leave it out where there is only one")
    return text


def key_of_calls(function: Callable[..., Any], key: Callable[..., Key] | None) -> Callable[..., str | None]:
    """What makes the key of a call to the decorated function, by default of its arguments."""
    if key is not None:
        if not callable(key):
            raise InvalidOption(f"key is a function of the arguments that returns the key, not {key!r}")
        chosen = key
        return lambda *args, **kwargs: check_key(chosen(*args, **kwargs))
    import inspect

    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidOption(f"{function!r} takes any arguments ({parameter}): give once_per a key=")

    def formatted(*args: Any, **kwargs: Any) -> str | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        parts = []
        for name, value in bound.arguments.items():
            try:
                parts.append(check_key(value).replace("%", "%25").replace("/", "%2F"))
            except InvalidName as error:
                raise InvalidName(f"argument {name!r} cannot be part of a key: {error}. Give once_per a key=") from None
        return "/".join(parts) if parts else None

    return formatted
