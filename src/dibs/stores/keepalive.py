"""TCP's own signs of life, on connections that may have nothing to say for long.

Load balancers, firewalls and routers forget a connection on which nothing was sent for some minutes, and a machine that
has lost its power says nothing either: neither end is told. The next request on it would get no answer, and whoever
waits on it for hints would wait in vain. (By itself a system that is asked for signs of life begins after two hours.)
"""

from __future__ import annotations

import os
import socket

# The first after so many seconds without anything, the next after so many each; so many without an answer end it.
IDLE_S, INTERVAL_S, TIMES = 30, 10, 3


def keep_alive(connected: socket.socket) -> None:
    """Have the system ask for signs of life, where this is a TCP connection."""
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS calls the first one otherwise.
    for names, value in (
        (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), IDLE_S),
        (("TCP_KEEPINTVL",), INTERVAL_S),
        (("TCP_KEEPCNT",), TIMES),
    ):
        option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def keep_descriptor_alive(descriptor: int) -> None:
    """The same for a driver that shows no socket."""
    waits = os.get_blocking(descriptor)
    borrowed = socket.socket(fileno=descriptor)
    try:
        keep_alive(borrowed)
    finally:
        borrowed.detach()
        os.set_blocking(descriptor, waits)  # which a default time-out of the program's sockets has changed
