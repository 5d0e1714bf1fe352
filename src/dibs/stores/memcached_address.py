"""What a memcached URL says."""

from __future__ import annotations

import ssl
from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.errors import InvalidOption
from dibs.stores.memcached_spread import RISK
from dibs.stores.memcached_wire import Place

if TYPE_CHECKING:
    from urllib.parse import SplitResult

#: What a URL may carry.
OPTIONS = ("tls", "tls_ca", "tls_cert", "tls_key", "spread")
PORT = 11211


class Servers(NamedTuple):
    #: For people; it never holds a password.
    shown: str
    places: list[Place]


def servers(url: SplitResult, options: dict[str, str]) -> Servers:
    """Where it points; what is understood is taken out of the options."""
    tls = _tls(options)
    spread = options.pop("spread", "")
    path = unquote(url.path)
    user = None if url.username is None else unquote(url.username)
    password = unquote(url.password or "")
    if any(char.isspace() for char in f"{user or ''}{password}"):
        raise InvalidOption("memcached takes no user or password with spaces")
    hosts = url.netloc.rpartition("@")[2]
    named: list[tuple[str, int] | str]
    if hosts:
        if path not in ("", "/"):
            raise InvalidOption(f"memcached has no databases: leave out {path!r}, and separate by ?namespace=…")
        named = [_host_and_port(host) for host in hosts.split(",")]
    elif path.startswith("/") and path != "/":
        hosts, named = path, [path]
    else:
        raise InvalidOption("a memcached URL names a host (memcached://host:11211) or a socket (memcached:///path)")
    if spread not in ("", RISK):
        raise InvalidOption(f"the URL option spread has one value, {RISK}, not {spread!r}")
    if (len(named) > 1) != bool(spread):
        raise InvalidOption(
            "name one memcached server. Names can be spread over several, but then two hold one name whenever two "
            f"programs do not list the same servers in the same order; who takes that risk adds ?spread={RISK}"
            if not spread
            else "the URL option spread is for several servers"
        )
    places = [Place(f"memcached://{_shown(server)}", server, user, password, tls, []) for server in named]
    return Servers(places[0].shown if len(places) == 1 else f"memcached://{hosts}", places)


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text[1:].partition("]") if text.startswith("[") else text.partition(":")
    port = port.removeprefix(":")
    if not host or not (port.isdecimal() or not port) or not int(port or PORT) < 2**16:
        raise InvalidOption(f"a memcached URL names a host and perhaps a port, as in host:11211, not {text!r}")
    return unquote(host), int(port or PORT)


def _shown(server: tuple[str, int] | str) -> str:
    if isinstance(server, str):
        return server
    host, port = server
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls(options: dict[str, str]) -> ssl.SSLContext | None:
    wanted = options.pop("tls", "off")
    files = {key: options.pop(key) for key in ("tls_ca", "tls_cert", "tls_key") if key in options}
    if wanted not in ("on", "off"):
        raise InvalidOption(f"the URL option tls is 'on' or 'off', not {wanted!r}")
    if wanted == "off":
        if files:
            raise InvalidOption(f"the URL option {next(iter(files))} goes with tls=on")
        return None
    try:
        context = ssl.create_default_context(cafile=files.get("tls_ca"))
        if "tls_cert" in files or "tls_key" in files:
            context.load_cert_chain(files.get("tls_cert", ""), files.get("tls_key"))
    except OSError as error:  # ssl.SSLError among them
        raise InvalidOption(f"the files of the URL's tls options cannot be used: {error}") from None
    return context
