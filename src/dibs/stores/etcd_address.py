"""What an etcd URL says: the members, TLS and the login."""

from __future__ import annotations

import ssl
from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.errors import InvalidOption

if TYPE_CHECKING:
    from urllib.parse import SplitResult

PORT = 2379


class Access(NamedTuple):
    """Where etcd is and how to be let in. ``known_good`` is shared: has anybody ever been let in?"""

    endpoints: tuple[tuple[str, int], ...]
    tls: ssl.SSLContext | None
    user: str
    password: str
    known_good: list[bool]


def access_to(url: SplitResult, options: dict[str, str]) -> Access:
    """What a URL and its options say; InvalidOption for what cannot be meant. Certificates are read here."""
    hosts = url.netloc.rpartition("@")[2]
    if not hosts:
        raise InvalidOption("an etcd URL names a host: etcd://host:2379,host:2379")
    if url.path not in ("", "/"):
        raise InvalidOption("an etcd URL has no path; keys are kept under ?prefix=…")
    if url.password and not url.username:
        raise InvalidOption("the etcd URL has a password and no user")
    files = {name: options.pop(name) for name in ("ca", "cert", "key") if name in options}
    tls = None
    if url.scheme == "etcds":
        tls = ssl.create_default_context()
        try:
            if "ca" in files:
                tls = ssl.create_default_context(cafile=files["ca"])
            if "cert" in files:
                tls.load_cert_chain(files["cert"], files.get("key"))
        except (OSError, ValueError) as error:
            raise InvalidOption(f"ca, cert or key in the etcd URL cannot be read: {error}") from None
        if "key" in files and "cert" not in files:
            raise InvalidOption("the etcd URL has a key and no cert")
    elif files:
        raise InvalidOption(f"{', '.join(files)} in the URL is for TLS: write etcds://")
    endpoints = tuple(_host_and_port(part) for part in hosts.split(","))
    return Access(endpoints, tls, unquote(url.username or ""), unquote(url.password or ""), [])


def _host_and_port(text: str) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.lstrip(":")
    else:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise InvalidOption(f"{text!r} in the etcd URL is no host:port")
    return unquote(host), int(port or PORT)
