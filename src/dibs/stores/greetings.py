"""A server that closed a connection without a word: was that the network, or does it want to be spoken to otherwise?

The two look alike, also when it happens several times: networks and starting servers cut many connections in a row. So
nobody who was never let in concludes anything from being cut. The server is greeted in the other way, on a connection
of its own, and only if it answers to that, the URL is wrong (``SetupRequired``); otherwise it is an outage.
"""

from __future__ import annotations

import socket
import ssl

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dibs.clock import Deadline

# A handshake or an alert, of any version of TLS.
_TLS_ANSWERS = (b"\x16\x03", b"\x15\x03")
_ANSWER_BYTES = 256
# Who greets may have used up the time of its call; and a server that waits for more says nothing.
_LEAST_S = 0.5
_MOST_S = 2.0


def was_cut(error: BaseException | None) -> bool:
    """Whether a connection ended without a word, in the handshake of TLS or otherwise; what TLS refuses has words."""
    cuts = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
    return isinstance(error, cuts) and not isinstance(error, ConnectionRefusedError)


def heard(server: tuple[str, int] | str, words: bytes, deadline: Deadline) -> bytes:
    """How the answer to these words begins; empty where there is none. ``server``: host and port, or a socket's path.

    Takes two seconds at most, and half a second where less is left.
    """
    seconds = min(_MOST_S, max(_LEAST_S, deadline.remaining()))
    try:
        with _connected(server, seconds) as connection:
            connection.sendall(words)
            return connection.recv(_ANSWER_BYTES)
    except OSError:
        return b""


def _connected(server: tuple[str, int] | str, seconds: float) -> socket.socket:
    if not isinstance(server, str):
        return socket.create_connection(server, seconds)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect(server)
    except OSError:
        connection.close()
        raise
    return connection


def speaks_tls(server: tuple[str, int] | str, deadline: Deadline) -> bool:
    """Whether a server answers to a greeting in TLS, be it with a refusal."""
    return heard(server, _hello(), deadline)[:2] in _TLS_ANSWERS


def _hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    arriving, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(arriving, leaving, server_hostname="dibs").do_handshake()
    except ssl.SSLWantReadError:
        pass
    return leaving.read()
