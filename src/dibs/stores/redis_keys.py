"""How names stand in the keys of Redis: in braces, where a cluster looks for what decides on the slot of a key."""

from __future__ import annotations

from binascii import crc_hqx
from itertools import groupby

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from dibs.stores.redis_wire import Place

SLOTS = 16384
# Requests that one run of a script serves. Redis serves nobody else meanwhile: this many take about a millisecond.
CHUNK_MAX = 100
# Where hints on queues are told to everybody who watches; addresses of clients are random.
QUEUES = "queues"


class Keys:
    """The keys of names, the slots they are in, and the channels where hints go."""

    def __init__(self, place: Place, prefix: str) -> None:
        self.prefix = prefix
        self._cluster = place.cluster
        self._channels = place.channels
        self._leases, self._queues = f"{prefix}:lease:", f"{prefix}:queue:"
        self._counters: list[str] = []

    # -- leases ---------------------------------------------------------------------------------------------------

    def of(self, name: str) -> tuple[str, str, str]:
        """Of the lease, the line and who waits in it."""
        tag, prefix = f"{{{tagged(name)}}}", self.prefix
        return f"{self._leases}{tag}", f"{prefix}:line:{tag}", f"{prefix}:waiters:{tag}"

    def counter(self, slot: int) -> str:
        """The key that counts tokens: in a cluster one in each slot, since a script may use no other."""
        if not self._cluster:
            return f"{self.prefix}:token"
        if not self._counters:
            self._counters = [""] * SLOTS
            left, number = SLOTS, 0
            while left:
                of = slot_of(b"%d" % number)
                if not self._counters[of]:
                    self._counters[of] = f"{self.prefix}:token:{{{number}}}"
                    left -= 1
                number += 1
        return self._counters[slot]

    def name_in(self, key: bytes) -> str | None:
        """The name that the key of a lease is about; None for any other key."""
        return _name_in(key, self._leases)

    # -- queues ---------------------------------------------------------------------------------------------------

    def of_queue(self, name: str, kind: str = "") -> str:
        return f"{self._queues}{{{tagged(name)}}}{kind}"

    def queue_in(self, key: bytes) -> str | None:
        """The queue whose own key this is; None for any other key."""
        return _name_in(key, self._queues)

    # -- slots and channels ---------------------------------------------------------------------------------------

    def slot(self, name: str) -> int:
        return slot_of(tagged(name).encode()) if self._cluster else 0

    def by_slot(self, names: Collection[str]) -> Iterator[tuple[int, list[str]]]:
        """Names as one run of a script takes them."""
        for slot, group in groupby(sorted(names, key=self.slot), key=self.slot):
            some = list(group)
            for start in range(0, len(some), CHUNK_MAX):
                yield slot, some[start : start + CHUNK_MAX]

    def channel(self, address: str) -> str:
        return self._channels + address


def slot_of(tag: bytes) -> int:
    """The hash slot of a key whose part in braces this is."""
    return crc_hqx(tag, 0) % SLOTS


def tagged(name: str) -> str:
    """The name as it stands in braces, where the first } ends it."""
    if "%" in name or "}" in name:
        return name.replace("%", "%25").replace("}", "%7D")
    return name


def _name_in(key: bytes, start: str) -> str | None:
    """The name in braces after this start of a key; None for a key that begins otherwise, or goes on after them."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return None
    start += "{"
    if not text.startswith(start) or not text.endswith("}"):
        return None
    tag = text[len(start) : -1]
    return None if "}" in tag else tag.replace("%7D", "}").replace("%25", "%")


def beginning(first: str, before: str) -> str:
    """What all names from the one to the other begin with."""
    length = 0
    while first[:length] == before[:length] and length < min(len(first), len(before)):
        length += 1
    return first[: length - (first[:length] != before[:length])]
