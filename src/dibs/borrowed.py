"""The address of a database that the caller's program is connected to already.

Only the address is taken: dibs opens connections of its own, so the caller's transaction neither hides nor undoes a
lock. Nothing is imported here; an object is known by what its library promises to have on it.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from dibs.errors import InvalidOption


def url_of(source: Any) -> str:
    """A dibs URL for a SQLAlchemy engine or URL, a psycopg pool or connection, or a Django connection."""
    for known in (_sqlalchemy, _django, _psycopg_pool, _psycopg_connection):
        url = known(source)
        if url is not None:
            return url
    raise InvalidOption(
        f"connect() takes a URL, a SQLAlchemy engine, a psycopg pool or connection, or a Django connection, not "
        f"{type(source).__module__}.{type(source).__qualname__}"
    )


def _sqlalchemy(source: Any) -> str | None:
    engine = getattr(source, "sync_engine", source)  # an AsyncEngine wraps one
    url = getattr(engine, "url", engine)
    backend = getattr(url, "get_backend_name", None)
    if backend is None:
        return None
    kind = backend()
    if kind == "sqlite":
        return _sqlite(url.database)
    if kind != "postgresql":
        raise InvalidOption(f"dibs has no store for SQLAlchemy's {kind!r} databases yet")
    # SQLAlchemy's query holds the driver's parameters, of which psycopg2, psycopg and libpq share the names.
    query = {key: value for key, value in url.query.items() if isinstance(value, str)}
    return _postgresql(url.host, url.port, url.username, url.password, url.database, query)


def _django(source: Any) -> str | None:
    settings = getattr(source, "settings_dict", None)
    vendor = getattr(source, "vendor", None)
    if not isinstance(settings, dict) or vendor is None:
        return None
    if vendor == "sqlite":
        return _sqlite(settings["NAME"])
    if vendor != "postgresql":
        raise InvalidOption(f"dibs has no store for Django's {vendor!r} databases yet")
    options = {k: v for k, v in settings.get("OPTIONS", {}).items() if isinstance(v, str) and k != "assume_role"}
    host, port = settings.get("HOST"), settings.get("PORT")
    return _postgresql(host, port, settings.get("USER"), settings.get("PASSWORD"), settings["NAME"], options)


def _psycopg_pool(source: Any) -> str | None:
    conninfo = getattr(source, "conninfo", None)
    if not isinstance(conninfo, str) or not hasattr(source, "getconn"):
        return None
    from psycopg.conninfo import conninfo_to_dict

    kwargs = {k: v for k, v in (getattr(source, "kwargs", None) or {}).items() if isinstance(v, (str, int))}
    kwargs = {k: v for k, v in kwargs.items() if k not in ("autocommit", "prepare_threshold", "row_factory")}
    return _from_libpq(dict(conninfo_to_dict(conninfo, **kwargs)))


def _psycopg_connection(source: Any) -> str | None:
    info = getattr(source, "info", None)
    if info is None or not hasattr(info, "get_parameters") or not hasattr(info, "password"):
        return None
    return _from_libpq({**info.get_parameters(), "password": info.password or None})


def _from_libpq(parameters: dict[str, Any]) -> str:
    taken = {k: v for k, v in parameters.items() if v is not None and k != "connect_timeout"}
    return _postgresql(
        taken.pop("host", None),
        taken.pop("port", None),
        taken.pop("user", None),
        taken.pop("password", None),
        taken.pop("dbname", None),
        {k: str(v) for k, v in taken.items() if k not in ("application_name", "client_encoding")},
    )


def _postgresql(
    host: str | None, port: Any, user: str | None, password: str | None, database: str | None, query: dict[str, str]
) -> str:
    login = ""
    if user:
        login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "") + "@"
    query = {k: v for k, v in query.items() if k not in ("client_encoding", "prepared_statement_cache_size")}
    # Through the query, where a socket folder or several hosts can be written as they are.
    if host:
        query["host"] = host
    if port:
        query["port"] = str(port)
    tail = f"?{urlencode(query)}" if query else ""
    return f"postgresql://{login}/{quote(database or '', safe='')}{tail}"


def _sqlite(path: Any) -> str:
    text = str(path or "")
    if not text or ":memory:" in text or "mode=memory" in text or text.startswith("file:"):
        raise InvalidOption("that SQLite database is in memory or opened by a file: URI; dibs needs the path of a file")
    return f"sqlite:///{quote(text)}"
