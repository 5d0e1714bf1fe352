"""What a Redis URL says."""

from __future__ import annotations

from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import InvalidOption
from dibs.stores.parts import Parts
from dibs.stores.redis_wire import Place

if TYPE_CHECKING:
    from urllib.parse import SplitResult

PREFIX_BYTES_MAX = 100
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs")
OPTIONS = (
    *("prefix", "min_replicas", "sentinel", "cluster", "unix_socket", "db", "sentinel_username", "sentinel_password"),
    *("ssl_check_hostname", *_TLS_OPTIONS),
)


class Where(NamedTuple):
    place: Place
    prefix: str
    min_replicas: int
    #: For people; it never holds a password.
    shown: str


def where(url: SplitResult, options: dict[str, str]) -> Where:
    """Take it apart; takes the options out that it knows. Raises InvalidOption."""
    scheme, _, kind = url.scheme.partition("+")
    if kind not in ("", "unix"):
        raise InvalidOption(f"{scheme}+{kind}:// is no kind of Redis URL; a Unix socket is {scheme}+unix:///path")
    tls = scheme in ("rediss", "valkeys")
    path = options.pop("unix_socket", None)
    if kind == "unix":
        path = unquote(url.path)
    sentinel = options.pop("sentinel", None)
    cluster = _flag("cluster", options.pop("cluster", "false"))
    if (path is not None) + (sentinel is not None) + cluster > 1:
        raise InvalidOption("a Unix socket, ?sentinel= and ?cluster= exclude each other")
    if path == "" or sentinel == "":
        raise InvalidOption("an empty path or name in the Redis URL")
    listed = url.netloc.rpartition("@")[2]
    hosts = tuple(_host_and_port(part, 26379 if sentinel else 6379) for part in listed.split(","))
    if len(hosts) > 1 and sentinel is None and not cluster:
        raise InvalidOption("several hosts are sentinels (?sentinel=name-of-the-master) or a cluster (?cluster=true)")
    if path is not None and listed:
        raise InvalidOption("a Redis URL has a host or a Unix socket, not both")
    database = options.pop("db", "0" if kind == "unix" else url.path.strip("/") or "0")
    if not (database.isascii() and database.isdigit()) or (cluster and database != "0"):
        raise InvalidOption(f"{database!r} is not the number of a Redis database" + " (a cluster has only 0)" * cluster)
    prefix = options.pop("prefix", "dibs")
    if not prefix or not prefix.isprintable() or set(prefix) & set("{} ") or len(prefix.encode()) > PREFIX_BYTES_MAX:
        raise InvalidOption(
            f"prefix={prefix!r} is not 1 to {PREFIX_BYTES_MAX} printable bytes without braces and spaces"
        )
    min_replicas = _count("min_replicas", options.pop("min_replicas", "0"))
    secured = _tls_options(options, tls)
    login: dict[str, Any] = {**secured, "db": int(database)}
    sentinel_login: dict[str, Any] = dict(secured)
    login["username"] = unquote(url.username) if url.username else None
    login["password"] = unquote(url.password) if url.password else None
    for key in ("username", "password"):
        given = options.pop(f"sentinel_{key}", None)
        if given is not None and sentinel is None:
            raise InvalidOption(f"sentinel_{key} is for sentinels: name the master with ?sentinel=")
        sentinel_login[key] = given
    place = Place(hosts, path, tls, login, sentinel, sentinel_login, cluster, f"{prefix}:wake:", [], Parts())
    at = f"{scheme}+unix://{path}" if path is not None else f"{scheme}://{listed or 'localhost'}/{database}"
    shown = at + (f"?sentinel={sentinel}" if sentinel else "?cluster=true" if cluster else "")
    return Where(place, prefix, min_replicas, shown)


def _tls_options(options: dict[str, str], tls: bool) -> dict[str, Any]:
    found: dict[str, Any] = {key: options.pop(key) for key in _TLS_OPTIONS if key in options}
    check_name = options.pop("ssl_check_hostname", None)
    if not tls:
        if found or check_name is not None:
            raise InvalidOption("ssl_… options are for TLS: write rediss:// (or valkeys://)")
        return {}
    required = found.setdefault("ssl_cert_reqs", "required")
    if required not in ("required", "optional", "none"):
        raise InvalidOption(f"ssl_cert_reqs={required!r} is none of required, optional, none")
    by_default = "true" if required == "required" else "false"
    found["ssl_check_hostname"] = _flag("ssl_check_hostname", check_name or by_default)
    return found


def _flag(key: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise InvalidOption(f"the URL option {key}={text!r} is neither true nor false")
    return text.lower() in ("true", "1", "yes")


def _count(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 100):
        raise InvalidOption(f"the URL option {key}={text!r} is not a number from 0 to 99")
    return int(text)


def _host_and_port(text: str, default: int) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.lstrip(":")
    else:
        host, _, port = text.partition(":")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidOption(f"{port!r} is no port")
    return unquote(host) or "localhost", int(port or default)
