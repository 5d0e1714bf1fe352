"""A connected socket of a store that reads its server's answers itself, and never waits longer than it was told to.

Without TLS the system itself waits for what comes (SO_RCVTIMEO): one call instead of a poll before each, and a timer
that counts in ticks, where that of a poll is exact and costs more to set. A lone pair of requests then takes up to a
tenth less.
"""

from __future__ import annotations

import os
import socket
import ssl
from struct import pack

from dibs.clock import Readiness
from dibs.stores.keepalive import keep_alive

# What a socket raises that is not to wait, when there is nothing to do.
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# A time-out that the socket has been told is as good as another that is longer or shorter by so much.
NEARLY = 0.95, 1.2


class Inlet:
    __slots__ = ("_flags", "_patience_s", "_ready", "_socket")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        keep_alive(connected)
        # Whatever must not wait says so. TLS knows no flags, and the sockets of gevent never let the system wait: where
        # one would, they let others run, for as long as it takes.
        connected.settimeout(None)
        waits = not isinstance(connected, ssl.SSLSocket) and os.get_blocking(connected.fileno())
        self._flags = socket.MSG_DONTWAIT if waits else 0
        if not waits:
            connected.settimeout(0)
        self._patience_s = 0.0
        self._ready = Readiness(connected.fileno())

    def send(self, data: bytes) -> bytes:
        """Send what the system takes without waiting; the rest."""
        try:
            return data[self._socket.send(data, self._flags) :]
        except WOULD_BLOCK:
            return data

    def writable(self, seconds: float) -> bool:
        """Wait until more can be sent, or something has come; False when neither was so in time."""
        return self._ready.writable(seconds)

    def receive(self, size: int, seconds: float = 0.0) -> bytes:
        """What has come, or comes first within so many seconds; nothing when nothing does, or only a part of a record.

        ConnectionResetError at the end of the stream.
        """
        flags = self._flags
        if seconds > 0.0:
            if flags:
                flags = 0
                self._wait_for(seconds)
            elif not self.has_more() and not self._ready.readable(seconds):
                return b""
        try:
            data = self._socket.recv(size, flags)
        except WOULD_BLOCK:
            return b""
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def has_more(self) -> bool:
        """Whether TLS holds what the descriptor no longer shows."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _wait_for(self, seconds: float) -> None:
        least, most = NEARLY
        if not self._patience_s * least <= seconds <= self._patience_s * most:
            self._patience_s = max(seconds, 0.001)
            timeval = pack("@ll", int(self._patience_s), int(self._patience_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def fileno(self) -> int:
        return self._socket.fileno()
