"""What a PostgreSQL URL says."""

from __future__ import annotations

from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.stores.identifiers import check_table, quoted_table
from dibs.stores.keepalive import IDLE_S, INTERVAL_S, TIMES
from dibs.stores.postgres_login import LIBPQ, conninfo

if TYPE_CHECKING:
    from urllib.parse import SplitResult

#: What a URL may carry.
OPTIONS = ("table", "schema", *sorted(LIBPQ))


class Place(NamedTuple):
    #: For people; it never holds a password.
    shown: str
    #: How to connect to each of the servers that it names.
    conninfos: list[bytes]
    schema: str
    table: str


def place(url: SplitResult, options: dict[str, str]) -> Place:
    """Where it points; what is understood is taken out of the options."""
    table = options.pop("table", "dibs_lease")
    schema = options.pop("schema", "public")
    check_table(table)
    quoted_table(schema, "schema")
    parts: dict[str, Any] = {key: options.pop(key) for key in list(options) if key in LIBPQ}
    parts.pop("connect_timeout", None)  # request_timeout is that
    hosts = url.netloc.rpartition("@")[2]
    if hosts:
        # Several hosts may stand in one URL, as libpq writes them: host1:5432,host2:5432.
        pairs = [_host_and_port(part) for part in hosts.split(",")]
        parts.setdefault("host", ",".join(host for host, _ in pairs))
        if any(port for _, port in pairs):
            parts.setdefault("port", ",".join(port for _, port in pairs))
    if url.username:
        parts["user"] = unquote(url.username)
    if url.password:
        parts["password"] = unquote(url.password)
    if url.path.strip("/"):
        parts["dbname"] = unquote(url.path[1:])
    parts.setdefault("application_name", "dibs")
    for name, value in zip(("idle", "interval", "count"), (IDLE_S, INTERVAL_S, TIMES), strict=True):
        parts.setdefault(f"keepalives_{name}", str(value))
    parts["client_encoding"] = "UTF8"
    port = f":{parts['port']}" if parts.get("port") else ""
    shown = f"postgresql://{hosts or str(parts.get('host', '')) + port}/{parts.get('dbname', '')}"
    return Place(shown, [conninfo(server) for server in _servers(parts)], schema, table)


def _servers(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters for each server by itself; as they are where there is one, or libpq is to say what is wrong.

    Which of several takes writes is for dibs to find out (``dibs.stores.postgres_hosts``), so they are not asked for.
    """
    lists = {name: str(parts[name]).split(",") for name in ("host", "hostaddr", "port") if parts.get(name)}
    count = max((len(lists[name]) for name in ("host", "hostaddr") if name in lists), default=1)
    if lists.get("port") and len(lists["port"]) == 1:
        lists["port"] *= count
    if count == 1 or any(len(values) != count for values in lists.values()):
        return [parts]
    rest = {name: value for name, value in parts.items() if name not in lists}
    if rest.get("target_session_attrs") in ("any", "primary", "read-write"):
        del rest["target_session_attrs"]
    return [{**rest, **{name: values[n] for name, values in lists.items() if values[n]}} for n in range(count)]


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.lstrip(":")
    host, _, port = text.partition(":")
    return unquote(host), port
