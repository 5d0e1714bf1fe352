"""What a ZooKeeper URL says."""

from __future__ import annotations

from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING
from dibs.errors import InvalidOption
from dibs.stores.zookeeper_link import Settings

if TYPE_CHECKING:
    from ssl import SSLContext
    from urllib.parse import SplitResult

#: What a URL may carry.
OPTIONS = ("tickTime", "maxSessionTimeout", "tls", "ssl_ca", "ssl_cert", "ssl_key")
TICK_MS_DEFAULT = 2000
# The servers' own default: maxSessionTimeout is this many ticks.
SESSION_MAX_TICKS = 20
PORT_DEFAULT = 2181


def settings(url: SplitResult, options: dict[str, str]) -> Settings:
    """Where it points; what is understood is taken out of the options."""
    hosts = tuple(_host_and_port(part) for part in url.netloc.rpartition("@")[2].split(","))
    root = "/" + unquote(url.path).strip("/")
    parts = root[1:].split("/")
    if root == "/":
        root = "/dibs"
    elif not all(parts) or {".", "..", "zookeeper"} & set(parts) or not root.isprintable():
        raise InvalidOption(f"{root!r} is no path for nodes of ZooKeeper")
    tick_ms = _milliseconds("tickTime", options.pop("tickTime", None), TICK_MS_DEFAULT)
    session_max_ms = _milliseconds(
        "maxSessionTimeout", options.pop("maxSessionTimeout", None), SESSION_MAX_TICKS * tick_ms
    )
    if session_max_ms < 4 * tick_ms:
        raise InvalidOption(f"maxSessionTimeout={session_max_ms} is less than four ticks of {tick_ms} ms")
    login = None
    if url.username is not None or url.password is not None:
        if not url.username or not url.password:
            raise InvalidOption("a login in a ZooKeeper URL is user:password, both of them")
        login = f"{unquote(url.username)}:{unquote(url.password)}"
    return Settings(hosts, root, login, _tls(options), tick_ms, session_max_ms)


def _host_and_port(text: str) -> str:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(PORT_DEFAULT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host) != host.startswith("["):
        raise InvalidOption(f"{text!r} is no server: zookeeper://host:2181,host:2181/chroot")
    return f"{host}:{port}"


def _milliseconds(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or not 10 <= int(text) <= 86_400_000:
        raise InvalidOption(f"{option}={text!r} is no number of milliseconds, as it stands in zoo.cfg")
    return int(text)


def _tls(options: dict[str, str]) -> SSLContext | None:
    wanted = options.pop("tls", "false")
    if wanted not in ("true", "false"):
        raise InvalidOption(f"tls={wanted!r} is neither true nor false")
    ca, cert, key = (options.pop(option, None) for option in ("ssl_ca", "ssl_cert", "ssl_key"))
    if wanted == "false":
        if ca or cert or key:
            raise InvalidOption("ssl_ca, ssl_cert and ssl_key need tls=true")
        return None
    if (cert is None) != (key is None):
        raise InvalidOption("ssl_cert and ssl_key go together")
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise InvalidOption(f"ssl_ca, ssl_cert or ssl_key cannot be used: {error}") from None
    return context
