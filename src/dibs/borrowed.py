"""The address of a database that the caller's program is connected to already.

Only the address is taken: dibs opens connections of its own, so the caller's transaction neither hides nor undoes a
lock. Nothing is imported here; an object is known by what its library promises to have on it.
"""

from __future__ import annotations

from os import PathLike, fsdecode
from urllib.parse import quote, urlencode

from dibs._typing import Any
from dibs.errors import InvalidOption


def url_of(source: Any) -> str:
    """A dibs URL for a path, a SQLAlchemy engine or URL, a psycopg pool or connection, Django's, or redis-py's."""
    for known in (_path, _sqlalchemy, _django, _psycopg_pool, _psycopg_connection, _redis):
        url = known(source)
        if url is not None:
            return url
    raise InvalidOption(
        "connect() takes a URL, the Path of an SQLite file, a SQLAlchemy engine, a psycopg pool or connection, a "
        f"Django connection, or a client or pool of redis-py, not {type(source).__module__}.{type(source).__qualname__}"
    )


def _path(source: Any) -> str | None:
    return _sqlite(fsdecode(source)) if isinstance(source, PathLike) else None


def _sqlalchemy(source: Any) -> str | None:
    engine = getattr(source, "sync_engine", source)  # an AsyncEngine wraps one
    url = getattr(engine, "url", engine)
    backend = getattr(url, "get_backend_name", None)
    if backend is None:
        return None
    kind = backend()
    if kind == "sqlite":
        return _sqlite(url.database)
    if kind in ("mysql", "mariadb"):
        # Of the drivers' parameters those count that say where and how to connect; the driver is dibs's own choice.
        query = {key: value for key, value in url.query.items() if isinstance(value, str) and key in _MYSQL_OPTIONS}
        return _mysql(url.host, url.port, url.username, url.password, url.database, query)
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
    if vendor == "mysql":
        return _django_mysql(settings)
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


_MYSQL_OPTIONS = (
    "unix_socket",
    "ssl",
    "ssl_mode",
    "ssl_ca",
    "ssl_cert",
    "ssl_key",
    "ssl_disabled",
    "ssl_verify_cert",
    "ssl_verify_identity",
    "ssl_check_hostname",
)


def _django_mysql(settings: dict[str, Any]) -> str:
    options = dict(settings.get("OPTIONS") or {})
    if "read_default_file" in options and not settings.get("USER"):
        raise InvalidOption("that Django connection takes its login from read_default_file; give dibs a URL instead")
    files = options.pop("ssl", None)
    query = {key: str(value) for key, value in options.items() if key in _MYSQL_OPTIONS}
    if isinstance(files, dict):
        query |= {f"ssl_{key}": str(value) for key, value in files.items() if key in ("ca", "cert", "key")}
    elif files:
        query["ssl"] = "true"
    host = settings.get("HOST") or None
    if host and host.startswith("/"):
        query["unix_socket"], host = host, None
    return _mysql(host, settings.get("PORT"), settings.get("USER"), settings.get("PASSWORD"), settings["NAME"], query)


def _mysql(
    host: str | None, port: Any, user: str | None, password: str | None, database: str | None, query: dict[str, str]
) -> str:
    login = f"{quote(user or '', safe='')}:{quote(password or '', safe='')}@" if user or password else ""
    at = (f"[{host}]" if ":" in host else quote(host)) if host else ""
    tail = f"?{urlencode(query)}" if query else ""
    return f"mysql://{login}{at}{f':{port}' if port else ''}/{quote(database or '', safe='')}{tail}"


def _sqlite(path: Any) -> str:
    text = str(path or "")
    if not text or ":memory:" in text or "mode=memory" in text or text.startswith("file:"):
        raise InvalidOption("that SQLite database is in memory or opened by a file: URI; dibs needs the path of a file")
    return f"sqlite:///{quote(text, errors='surrogateescape')}"  # the name of a file is made of any bytes


def _redis(source: Any) -> str | None:
    """A client or pool of redis-py, for threads or asyncio, of one server, of sentinels or of a cluster."""
    nodes = getattr(source, "nodes_manager", None)
    pool = getattr(source, "connection_pool", source)
    if nodes is not None:
        settings = dict(nodes.connection_kwargs)
        places = [(node.host, node.port) for node in nodes.startup_nodes.values()]
        query = {"cluster": "true"}
        settings.pop("db", None)
        kind = "SSL" if settings.get("ssl") else getattr(settings.get("connection_class"), "__name__", "")
    elif isinstance(getattr(pool, "connection_kwargs", None), dict):
        settings = dict(pool.connection_kwargs)
        kind = getattr(getattr(pool, "connection_class", None), "__name__", "")
        places, query = [(settings.get("host", "localhost"), settings.get("port", 6379))], {}
        sentinels = getattr(getattr(pool, "sentinel_manager", None), "sentinels", None)
        if sentinels:
            known = [sentinel.connection_pool.connection_kwargs for sentinel in sentinels]
            places = [(one["host"], one["port"]) for one in known]
            query = {"sentinel": pool.service_name}
            logins = {f"sentinel_{key}": known[0].get(key) for key in ("username", "password")}
            query.update({key: value for key, value in logins.items() if value})
    else:
        return None
    if settings.get("credential_provider") is not None:
        raise InvalidOption("that redis client asks a credential provider for its login; give dibs a URL with a login")
    user, password = settings.get("username") or "", settings.get("password") or ""
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user or password else ""
    query["db"] = str(settings.get("db") or 0)
    if settings.get("path"):
        return f"redis+unix://{login}{quote(settings['path'])}?{urlencode(query)}"
    tls = "SSL" in kind
    if tls:
        query.update({k: str(v) for k, v in settings.items() if k in _REDIS_TLS and v is not None})
        if isinstance(settings.get("ssl_cert_reqs"), int):  # ssl.CERT_NONE and so on
            query["ssl_cert_reqs"] = ("none", "optional", "required")[settings["ssl_cert_reqs"]]
    hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in places)
    return f"redis{'s' * tls}://{login}{hosts}?{urlencode(query)}"


_REDIS_TLS = frozenset(
    "ssl_ca_certs ssl_ca_path ssl_certfile ssl_keyfile ssl_password ssl_cert_reqs ssl_check_hostname".split()
)
