"""A connection that never blocks, and HTTP/1.1's framing of what arrives on it; what it means, the gateway knows."""

from __future__ import annotations

import socket
import ssl

from dibs._typing import TYPE_CHECKING
from dibs.clock import Readiness
from dibs.stores.keepalive import keep_alive

if TYPE_CHECKING:
    from dibs.clock import Deadline

RECEIVE_BYTES = 1 << 18
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Wire:
    """One connection: a socket that never blocks, and the bytes that have arrived on it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ready = Readiness(sock.fileno())
        self.arrived = b""

    def take(self) -> bool:
        """Read what is there; False when nothing is. ConnectionError at the end of the stream."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except _WOULD_BLOCK:
            return False
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self.arrived += data
        return True

    def give(self, data: memoryview) -> memoryview:
        """Send what the system takes; the rest."""
        try:
            return data[self.sock.send(data) :]
        except _WOULD_BLOCK:
            return data

    def answer(self) -> tuple[int, bytes] | None:
        """The next whole answer, status and body; None while it is not all there."""
        found = self.head()
        if found is None:
            return None
        status, length, at = found
        if length is None:
            body, end, over = unchunked(self.arrived, at)
            if not over:
                return None
        else:
            end = at + length
            if len(self.arrived) < end:
                return None
            body = self.arrived[at:end]
        self.arrived = self.arrived[end:]
        return status, body

    def head(self) -> tuple[int, int | None, int] | None:
        """Of the next answer: its status, its length (None: in chunks), and where its body begins."""
        arrived = self.arrived
        end = arrived.find(b"\r\n\r\n")
        if end < 0:
            return None
        lines = arrived[:end].lower()
        place = lines.find(b"\r\ncontent-length:")
        length = None
        if place >= 0:
            length = int(lines[place + 17 :].split(b"\r\n", 1)[0])
        elif b"\r\ntransfer-encoding: chunked" not in lines:
            length = len(arrived) - end - 4  # an answer from before HTTP/1.1; what has arrived of it will do
        return int(lines.split(b" ", 2)[1]), length, end + 4

    def close(self) -> None:
        self.sock.close()


def unchunked(data: bytes, at: int) -> tuple[bytes, int, bool]:
    """The whole chunks from ``at`` on, joined; where the next one begins; whether the last has come."""
    pieces: list[bytes] = []
    while (line_end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line_end].split(b";", 1)[0], 16)
        if size == 0:  # behind the last chunk there may be trailers, as there are behind refusals
            end = data.find(b"\r\n\r\n", line_end)
            return b"".join(pieces), end + 4 if end >= 0 else at, end >= 0
        end = line_end + 2 + size
        if len(data) < end + 2:
            break
        pieces.append(data[line_end + 2 : end])
        at = end + 2
    return b"".join(pieces), at, False


def reach(host: str, port: int, tls: ssl.SSLContext | None, deadline: Deadline) -> Wire:
    """A connection to the first address of a host that takes one. OSError when none does in time."""
    error: OSError = OSError("no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.001, deadline.remaining()))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
            sock.setblocking(False)
            if tls is not None:
                sock = _with_tls(tls, sock, host, deadline)
            return Wire(sock)
        except OSError as failed:
            sock.close()
            error = failed
        except BaseException:
            sock.close()
            raise
    raise error


def _with_tls(context: ssl.SSLContext, sock: socket.socket, host: str, deadline: Deadline) -> socket.socket:
    tls = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    ready = Readiness(tls.fileno())
    try:
        while True:
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                in_time = ready.readable(deadline.remaining())
            except ssl.SSLWantWriteError:
                in_time = ready.writable(deadline.remaining())
            if not in_time:
                raise TimeoutError("TLS took too long")
    except BaseException:
        tls.close()
        raise
