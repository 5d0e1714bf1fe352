"""From what a user has (a URL, an engine, a pool, nothing) to a client.

URLs are written as SQLAlchemy and the drivers write them. What is wrong with one is said before any I/O, and nothing
printed here ever contains a password. A store's module is loaded when its scheme is used.
"""

from __future__ import annotations

import os
import sys

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption, Unsupported, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

    from dibs.aio import AsyncClient
    from dibs.client import Client
    from dibs.desk import Desk
    from dibs.names import Seconds
    from dibs.store import StoreAddress

_SCHEMES = {
    "sqlite": "dibs.stores.sqlite",
    "memory": "dibs.stores.memory",
    "postgresql": "dibs.stores.postgres",
    "postgres": "dibs.stores.postgres",
    "mysql": "dibs.stores.mysql",
    "mariadb": "dibs.stores.mysql",
    "redis": "dibs.stores.redis",
    "rediss": "dibs.stores.redis",
    "valkey": "dibs.stores.redis",
    "valkeys": "dibs.stores.redis",
    "memcached": "dibs.stores.memcached",
    "etcd": "dibs.stores.etcd",
    "etcds": "dibs.stores.etcd",
    "zookeeper": "dibs.stores.zookeeper",
}
# Other packages add stores with entry points of this group. Their names are URL schemes; what they point to is called
# with the URL as a ``urllib.parse.SplitResult`` and a dict of its options, pops those that it knows, raises
# InvalidOption for whatever is wrong, and returns a ``dibs.store.StoreAddress``. The module it is in may list the
# options in ``OPTIONS``, for errors that help.
ENTRY_POINT_GROUP = "dibs.stores"
# Options any URL may carry for the client itself; an argument of connect() of the same name wins over them.
_CLIENT_OPTIONS = ("namespace", "ttl", "request_timeout", "patience", "require", "lock_order_warnings", "takeover")
_TEXTS = ("namespace", "require", "takeover")
_FLAGS = ("lock_order_warnings",)
_SCHEME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-_")
# So many of a store's options are listed in an error.
_OPTIONS_SHOWN = 12


def connect(
    where: object = None,
    *,
    namespace: str | None = None,
    ttl: Seconds | None = None,
    info: dict[str, Any] | None = None,
    request_timeout: Seconds | None = None,
    patience: Seconds | None = None,
    lock_order_warnings: bool | None = None,
    takeover: str | None = None,
    options: dict[str, str] | None = None,
) -> Client:
    """Make a client for threads. Nothing is sent before it is used.

    where: a URL (``sqlite:////absolute/path.db``, ``postgresql://user@host/db``, ``memory://``), the ``Path`` of an
    SQLite file, or a SQLAlchemy engine, a psycopg pool or connection, a Django connection, or a client or pool of
    redis-py: its address is taken, and its connections and transactions are left alone. None means ``$DIBS_URL``,
    else an SQLite file in the user's state directory.
    namespace: separates applications that share a store. ttl: the default of its locks, in seconds. info: a small
    JSON object shown with its leases. request_timeout: seconds one request to the store may take. patience: seconds
    for which a store that was reached before is tried again before StoreUnavailable is raised. lock_order_warnings:
    warn (LockOrderWarning) when two names are taken in both orders; on unless it is False. takeover: ``"observe"`` for
    locks that no step of the server's clock ends: whoever takes one over has watched it for a whole ttl. (All who want
    the name must say so.) The default is ``"expiry"``. options: more options of the store, as they could stand in the
    URL's query ({"schema": "ops"}), say for an engine.

    Raises InvalidOption for anything wrong with these, a driver that is not installed included, and Unsupported when
    the store cannot promise what the option ``require`` asks for.
    """
    from dibs.client import Client

    desk = _desk(where, namespace, ttl, info, request_timeout, patience, lock_order_warnings, takeover, options)
    return Client(desk)


def connect_async(
    where: object = None,
    *,
    namespace: str | None = None,
    ttl: Seconds | None = None,
    info: dict[str, Any] | None = None,
    request_timeout: Seconds | None = None,
    patience: Seconds | None = None,
    lock_order_warnings: bool | None = None,
    takeover: str | None = None,
    options: dict[str, str] | None = None,
) -> AsyncClient:
    """Make a client for asyncio: the same as ``connect``, with the same verbs awaited."""
    from dibs.aio import AsyncClient

    return AsyncClient(
        _desk(where, namespace, ttl, info, request_timeout, patience, lock_order_warnings, takeover, options)
    )


def _desk(
    where: object,
    namespace: str | None,
    ttl: Seconds | None,
    info: dict[str, Any] | None,
    request_timeout: Seconds | None,
    patience: Seconds | None,
    lock_order_warnings: bool | None,
    takeover: str | None,
    options: dict[str, str] | None,
) -> Desk:
    from dibs.clock import can_poll
    from dibs.desk import DEFAULTS, Desk

    if sys.platform == "win32":
        raise Unsupported("dibs runs on Linux and macOS; on Windows, run the program in WSL or in a container")
    if not can_poll():
        raise Unsupported(
            "dibs does not run under eventlet's monkey_patch(), which takes select.poll away: use gevent, or threads"
        )
    settings = dict(DEFAULTS)
    address, from_url = locate(where, options)
    settings.update(from_url)
    given = {
        "namespace": namespace,
        "ttl": ttl,
        "request_timeout": request_timeout,
        "patience": patience,
        "lock_order_warnings": lock_order_warnings,
        "takeover": takeover,
    }
    settings.update({key: value for key, value in given.items() if value is not None})
    return Desk(address, info=info, **settings)


def undemanding(where: object, namespace: str | None) -> tuple[Client, str]:
    """A client that enforces no ``require``, and what was required: for ``dibs doctor``, which tells what is broken."""
    from dibs.client import Client
    from dibs.desk import DEFAULTS, Desk

    address, settings = locate(where)
    required = settings.pop("require", "")
    settings = {**DEFAULTS, **settings} if namespace is None else {**DEFAULTS, **settings, "namespace": namespace}
    return Client(Desk(address, info=None, **settings)), required


def locate(where: object = None, options: dict[str, str] | None = None) -> tuple[StoreAddress, dict[str, Any]]:
    """The store's address, and the client's own options found in the URL."""
    more = dict(options or {})
    for key, value in more.items():
        if not isinstance(value, str):  # (Which is not shown: it may be a password.)
            raise InvalidOption(
                f"options are text, as in a URL's query ({{'schema': 'ops'}}): {key!r} is {type(value).__name__}"
            )
    if where is None:
        where = os.environ.get("DIBS_URL") or None
    if where is None:
        from dibs.stores import sqlite

        settings = _settings(more)
        return _complete(sqlite.address(None, more), more, sqlite.address), settings
    if not isinstance(where, str):
        from dibs.borrowed import url_of

        where = url_of(where)
    scheme, colon, _rest = where.partition("://")
    if not colon or not _SCHEME_CHARS.issuperset(scheme):
        raise InvalidOption(
            "that is not a URL dibs knows (the text is not shown, it may hold a password). "
            "Examples: sqlite:////var/lib/app/dibs.db, postgresql://user@host/database"
        )
    scheme = scheme.lower()
    plain, _, driver = scheme.partition("+")  # SQLAlchemy's postgresql+psycopg:// names a driver we choose ourselves
    load = _loader(plain if plain in _SCHEMES else scheme)
    if plain == "sqlite" and not driver and not more and "?" not in where and "%" not in where and "#" not in where:
        return load(where[len("sqlite:///") :] if where.startswith("sqlite:///") else "", {}), {}
    return _parsed(where, plain, load, more)


def _parsed(
    url: str, scheme: str, load: Callable[..., StoreAddress], more: dict[str, str]
) -> tuple[StoreAddress, dict[str, Any]]:
    from urllib.parse import parse_qsl, unquote

    from dibs.store import StoreAddress
    from dibs.urls import split_url

    if scheme != "sqlite" and not _is_text(unquote(url)):  # (The name of a file is made of any bytes.)
        raise InvalidOption("that URL has NUL characters, or bytes that are no UTF-8")
    try:
        parts = split_url(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise InvalidOption("that URL cannot be taken apart: look at its ports, its brackets and its ?query") from None
    if "#" in url:  # in a browser it would name a place within a page; here it would cut off the end of a path
        raise InvalidOption("a URL for dibs has no #: where it belongs to a name or a password, write %23")
    options: dict[str, str] = {}
    for key, value in [*query, *more.items()]:
        if key in options:
            raise InvalidOption(f"the URL option {key!r} is given twice")
        options[key] = value
    settings = _settings(options)
    if scheme == "sqlite":
        if parts.netloc:
            raise InvalidOption("an SQLite URL has no host: sqlite:////absolute/path.db (four slashes)")
        address = load(unquote(parts.path[1:], errors="surrogateescape"), options)
    elif scheme == "memory":
        address = load(unquote(parts.netloc + parts.path))
    else:
        address = load(parts, options)
        if not isinstance(address, StoreAddress):  # of a store that was written elsewhere
            raise TypeError(f"{load.__module__}.{load.__qualname__} did not return a dibs.store.StoreAddress")
    return _complete(address, options, load), settings


def _is_text(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _settings(options: dict[str, str]) -> dict[str, Any]:
    """Take out the options that are the client's own."""
    found: dict[str, Any] = {}
    for key in _CLIENT_OPTIONS:
        if key in options:
            text = options.pop(key)
            found[key] = text if key in _TEXTS else _flag(key, text) if key in _FLAGS else _number(key, text)
    return found


def _complete(address: StoreAddress, left: dict[str, str], load: Callable[..., StoreAddress]) -> StoreAddress:
    """The address, when the store has taken every option that was given."""
    if not left:
        return address
    own = tuple(getattr(sys.modules.get(load.__module__), "OPTIONS", ()))
    name = min(left)
    near = did_you_mean(name, (*own, *_CLIENT_OPTIONS))
    shown = ", ".join(own[:_OPTIONS_SHOWN]) + (", …" if len(own) > _OPTIONS_SHOWN else "")
    knows = f"{address.capabilities.store} knows {shown}, and every" if own else "Every"
    raise InvalidOption(f"unknown option {name!r}{near}. {knows} URL may have {', '.join(_CLIENT_OPTIONS)}")


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidOption(f"the URL option {key}={text!r} is not a number of seconds") from None


def _flag(key: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise InvalidOption(f"the URL option {key}={text!r} is neither true nor false")
    return text.lower() in ("true", "1", "yes")


def _loader(scheme: str) -> Callable[..., StoreAddress]:
    from importlib import import_module

    module = _SCHEMES.get(scheme)
    if module is not None:
        return import_module(module).address  # type: ignore[no-any-return]
    from importlib.metadata import entry_points

    offers = {(entry.name, entry.value): entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    fitting = [entry for entry in offers.values() if entry.name == scheme]
    if not fitting:
        known = {*_SCHEMES, *(name for name, _ in offers)}
        raise InvalidOption(
            f"unknown store {scheme!r}{did_you_mean(scheme, known)}. "
            f"This dibs knows {', '.join(sorted(known - {'postgres'}))}"
        )
    if len(fitting) > 1:
        raise InvalidOption(f"several packages offer a store {scheme!r}: {', '.join(map(_origin, fitting))}. Keep one")
    try:
        return fitting[0].load()  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise InvalidOption(f"the store {scheme!r} of {_origin(fitting[0])} cannot be loaded: {error}") from error


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name if entry.dist else 'a package'} ({entry.value})"
