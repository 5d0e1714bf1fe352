"""Hints from etcd: a waiter watches the one key it stands behind, and is told when that is deleted.

Whoever is first in line watches the holder's key, everybody else the place of the waiter before it, so an end wakes one
waiter and no herd. (First in line for permits watches all who hold any, and how many there are: each change may be what
it waits for.) Which key that is only the claim lane's store learns, from the answer that refused the waiter; it
says so with ``follow``. The waiting thread opens a stream for what was said meanwhile, and reads. A key is watched from
the revision at which it was seen, so nothing is missed in between. But where anything at all was written since, etcd
tells of that ten times a second only; so as soon as it watches, the thread looks for itself whether the key is there.

The gateway's streams take no more keys once they have begun: each is opened for some keys and closed when all of these
were told of. Beyond ``STREAMS_MAX`` they are replaced by one for all. An epoll makes them one descriptor; where the
system has none, waiters poll.
"""

from __future__ import annotations

import select
import socket
from collections import deque

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.clock import Deadline, RealClock
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_gateway import lines_of
from dibs.stores.etcd_wire import unchunked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dibs.stores.etcd_gateway import Gateway
    from dibs.stores.etcd_keys import Span
    from dibs.stores.etcd_wire import Wire

STREAMS_MAX = 16
# Opening a stream may keep the waiting thread from its other waiters for this long.
OPEN_S = 0.5
# Keys that were said and not looked at yet; beyond these, waiters poll.
SAID_MAX = 10_000
# So many keys are looked at in one request. Of more, the others are told of by etcd in its own time.
LOOK_MAX = 100

available = hasattr(select, "epoll")


class Followed(NamedTuple):
    """What is watched for a name: the deletion of a key, or any change in a range. Keys are in base64."""

    name: str
    key: str
    last: str
    #: The first one that counts.
    revision: int
    #: How many keys there were before it.
    number: int

    def asked(self, watch_id: int) -> str:
        """The request to watch it, whose events shall have this number."""
        what = f'"range_end":"{self.last}"' if self.last else '"filters":["NOPUT"]'
        head = f'"watch_id":"{watch_id}","key":"{self.key}","start_revision":"{self.revision}"'
        return f'{{"create_request":{{{head},{what}}}}}'

    def look(self) -> str:
        """The operation that shows whether it is as it was."""
        span = keys.Span(self.key, self.last)
        return keys.get_all(span, keys.LATEST) if self.last else keys.get(self.key)

    def is_changed(self, shown: dict[str, Any]) -> bool:
        """Whether what was looked at is not as it was. (Of a single key, whether it is there.)"""
        found, latest = shown["response_range"], 0
        if self.last:
            latest = max((int(key["mod_revision"]) for key in found.get("kvs", ())), default=0)
        return int(found.get("count", 0)) != self.number or latest >= self.revision


class EtcdWatch:
    """The streams of a client. The claim lane calls ``follow`` and ``has_told``, the waiting thread everything else."""

    interval_s: float | None = None

    def __init__(self, address: str, gateway: Gateway, watches: dict[str, EtcdWatch]) -> None:
        self._address = address
        self._gateway = gateway
        self._watches = watches
        self._followed: set[str] = set()  # the keys, or first keys of ranges
        self._said: deque[Followed] = deque()
        self._told: set[str] = set()
        self._streams: dict[int, _Stream] = {}
        self._bell, self._knock = socket.socketpair()
        self._bell.setblocking(False)
        self._knock.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._bell.fileno(), select.EPOLLIN)
        watches[address] = self

    def follow(self, name: str, key: str, revision: int) -> None:
        """Tell of ``name`` when ``key`` (in base64), which was there at ``revision``, is deleted."""
        self._follow(Followed(name, key, "", revision + 1, 1))

    def follow_all(self, name: str, span: Span, revision: int, number: int) -> None:
        """Tell of ``name`` when anything in a range is not as it was at ``revision``, when there were so many keys."""
        self._follow(Followed(name, span.first, span.last, revision + 1, number))

    def _follow(self, followed: Followed) -> None:
        if followed.key in self._followed or len(self._said) >= SAID_MAX:
            return
        self._followed.add(followed.key)
        self._said.append(followed)
        try:
            self._knock.send(b"!")
        except OSError:  # full means already knocked; closed means nobody listens any more
            pass

    def has_told(self, name: str) -> bool:
        """Whether the name was told of since this was last asked."""
        if name not in self._told:
            return False
        self._told.discard(name)
        return True

    def fileno(self) -> int:
        return self._epoll.fileno()

    def changed(self, names: Collection[str]) -> Collection[str]:
        told: set[str] = set()
        for fd, _ in self._epoll.poll(0):
            stream = self._streams.get(fd)
            if stream is not None:
                self._read(stream, told)
        self._look(told)
        self._told |= told
        try:
            self._bell.recv(4096)
        except BlockingIOError:
            return told
        self._open([self._said.popleft() for _ in range(len(self._said))])
        return told

    def _read(self, stream: _Stream, told: set[str]) -> None:
        """Note whose keys are gone; end the stream when all are, or when it has ended itself."""
        over = False
        try:
            for followed in stream.told():
                told.add(followed.name)
                self._followed.discard(followed.key)
        except (OSError, ValueError, KeyError):
            over = True  # whoever it was for asks within a poll, and follows again
            self._gateway.forget_login()  # a login that has ended is told by nothing but that
        if over or not stream.followed:
            self._followed.difference_update(followed.key for followed in stream.followed.values())
            self._end(stream)

    def _look(self, told: set[str]) -> None:
        """Note what had changed before etcd began to watch it."""
        unsure: list[tuple[_Stream, int, Followed]] = []
        for stream in self._streams.values():
            unsure += [
                (stream, number, stream.followed[number]) for number in stream.unsure if number in stream.followed
            ]
            stream.unsure.clear()
        del unsure[LOOK_MAX:]
        if not unsure:
            return
        body = keys.txn([], [followed.look() for _, _, followed in unsure])
        try:
            shown = self._gateway.one("kv/txn", body, Deadline(RealClock(), RealClock.now() + OPEN_S))["responses"]
        except (StoreUnavailable, SetupRequired):  # then it is told of a little later
            return
        for (stream, number, followed), one in zip(unsure, shown, strict=True):
            if followed.is_changed(one):
                told.add(followed.name)
                self._followed.discard(followed.key)
                del stream.followed[number]
                if not stream.followed:
                    self._end(stream)

    def _open(self, said: list[Followed]) -> None:
        if not said:
            return
        if len(self._streams) >= STREAMS_MAX:
            for stream in list(self._streams.values()):
                said += stream.followed.values()
                self._end(stream)
        by_number = dict(enumerate(said, 1))
        asked = "\n".join(followed.asked(number) for number, followed in by_number.items())
        wire = self._gateway.stream("watch", asked, Deadline(RealClock(), RealClock.now() + OPEN_S))
        self._streams[wire.sock.fileno()] = _Stream(wire, by_number)
        self._epoll.register(wire.sock.fileno(), select.EPOLLIN)

    def _end(self, stream: _Stream) -> None:
        fd = stream.wire.sock.fileno()
        self._epoll.unregister(fd)
        del self._streams[fd]
        stream.wire.close()

    def close(self) -> None:
        if self._watches.get(self._address) is self:
            del self._watches[self._address]
        for stream in list(self._streams.values()):
            self._end(stream)
        self._epoll.close()
        self._bell.close()
        self._knock.close()
        self._gateway.close()


class _Stream:
    """One request to watch some keys, and its answer, which ends when the connection does."""

    def __init__(self, wire: Wire, followed: dict[int, Followed]) -> None:
        self.wire = wire
        self.followed = followed  # what was not told of yet, by its number
        #: What may have changed before it was watched.
        self.unsure: list[int] = []
        self._begun = False
        self._line = b""

    def told(self) -> Iterator[Followed]:
        """What turned out to be gone, or not as it was. An error when the stream is over."""
        wire = self.wire
        while wire.take():
            pass
        if not self._begun:
            head = wire.head()
            if head is None:
                return
            status, length, at = head
            if status != 200 or length is not None:
                raise SetupRequired(f"etcd answered {status} to a watch")  # and whoever opened it opens another later
            self._begun = True
            wire.arrived = wire.arrived[at:]
        text, at, over = unchunked(wire.arrived, 0)
        wire.arrived = wire.arrived[at:]
        whole, _, self._line = (self._line + text).rpartition(b"\n")
        for message in lines_of(whole):
            result = message["result"]
            if result.get("created", False):
                number = int(result["watch_id"])
                if number in self.followed and int(result["header"]["revision"]) >= self.followed[number].revision:
                    self.unsure.append(number)
            # What happened before a compaction is told no more: the key may be gone.
            changed = result.get("events") or result.get("compact_revision")
            followed = self.followed.pop(int(result["watch_id"]), None) if changed else None
            if followed is not None:
                yield followed
            over = over or (result.get("canceled", False) and not changed)
        if over:
            raise ValueError("the stream is over")
