"""What a PostgreSQL URL says."""

from __future__ import annotations

from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.stores.identifiers import check_table, quoted_table
from dibs.stores.postgres_login import LIBPQ, conninfo

if TYPE_CHECKING:
    from urllib.parse import SplitResult

#: What a URL may carry.
OPTIONS = ("table", "schema", *sorted(LIBPQ))


class Place(NamedTuple):
    #: For people; it never holds a password.
    shown: str
    conninfo: bytes
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
    parts["client_encoding"] = "UTF8"
    port = f":{parts['port']}" if parts.get("port") else ""
    shown = f"postgresql://{hosts or str(parts.get('host', '')) + port}/{parts.get('dbname', '')}"
    return Place(shown, conninfo(parts), schema, table)


def _host_and_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.lstrip(":")
    host, _, port = text.partition(":")
    return unquote(host), port
