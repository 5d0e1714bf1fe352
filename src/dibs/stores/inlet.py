"""A connected socket of a store that reads its server's answers itself, and never waits longer than it was told to.

It waits in a poll, and what it then calls does not wait. Were the system to wait while it receives (SO_RCVTIMEO), a
lone pair of requests would take two to four hundredths less, on some machines a tenth; but each signal begins that wait
anew, as Python repeats the call with all of its time. In a program with a timer, or that is stopped and continued, a
server that hangs would be waited for far beyond the time of the call. After a poll Python waits for what is left.
"""

from __future__ import annotations

import os
import socket
import ssl

from dibs.clock import Readiness
from dibs.stores.keepalive import keep_alive

# What a socket raises that is not to wait, when there is nothing to do.
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Inlet:
    __slots__ = ("_flags", "_ready", "_socket")

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
        if seconds > 0.0 and not self.has_more() and not self._ready.readable(seconds):
            return b""
        try:
            data = self._socket.recv(size, self._flags)
        except WOULD_BLOCK:
            return b""
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data

    def has_more(self) -> bool:
        """Whether TLS holds what the descriptor no longer shows."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def fileno(self) -> int:
        return self._socket.fileno()
