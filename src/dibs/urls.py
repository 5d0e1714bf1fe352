"""What a URL consists of.

Several hosts may stand in one, separated by commas, IPv6 addresses among them in brackets. ``urllib.parse.urlsplit``
knows URLs of one host, and newer Pythons refuse others; so who is named before the path is read here, the same way
under every Python.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

# A name, an IPv4 address, or whatever stands in brackets; perhaps a port.
_HOST = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]*)(:(?P<port>[0-9]{0,5}))?")
_PORT_MAX = 65535
# What stands between two dots of a name (RFC 1035).
_LABEL_MAX = 63
# What urlsplit leaves out wherever it stands, such as the end of the line that a URL was read from.
_LEFT_OUT = str.maketrans("", "", "\t\r\n")


def split_url(url: str) -> SplitResult:
    """The parts of ``scheme://login@host:port,host:port/path?query``; ValueError where a host or port is none."""
    url = url.translate(_LEFT_OUT)
    scheme, mark, rest = url.partition("://")
    places = re.split("[/?#]", rest, maxsplit=1)[0]
    for host in places.rpartition("@")[2].split(","):
        fits = _HOST.fullmatch(host)
        if not fits or int(fits["port"] or 0) > _PORT_MAX or not _can_be_looked_up(unquote(fits[1])):
            raise ValueError("a host in that URL is none")
    return urlsplit(scheme + mark + rest[len(places) :])._replace(netloc=places)


def _can_be_looked_up(host: str) -> bool:
    """Whether a host has the form of one. Those that have not are a UnicodeError of the socket, not one of the net."""
    if host.startswith(("/", "@", "[")):  # a socket, or an IPv6 address
        return True
    if host.isascii():  # what comes now says the same, after loading tables of all of Unicode
        *labels, last = host.split(".")
        return "\0" not in host and all(0 < len(label) <= _LABEL_MAX for label in labels) and len(last) <= _LABEL_MAX
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False
