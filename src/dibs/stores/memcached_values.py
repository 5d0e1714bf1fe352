"""Leases as they stand in memcached: the key of a name, the text of a value, the expiry that a ttl becomes."""

from __future__ import annotations

from hashlib import sha256
from math import ceil
from urllib.parse import unquote_to_bytes

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.stores.memcached_wire import Item, shown

if TYPE_CHECKING:
    from dibs.stores.memcached_wire import Reply

TTL_MAX_S = 30 * 24 * 3600  # a greater number is taken for a date, mostly one long past
# The first line of a value of ours.
MAGIC = "dibs 1"
KEY_BYTES_MAX = 250
# A waiter is told to ask again this soon in the last tick of a lease, whose end nobody can tell exactly.
LAST_TICK_S = 0.25


class Lease(NamedTuple):
    claim_id: str  # empty: nobody's, but not free before it ends
    token: int
    acquired_at: float
    holder: str
    name: str
    info: str | None
    cas: int
    ticks: int

    @property
    def foreign(self) -> bool:
        """Whether it is no lease: somebody else put something there."""
        return not self.name

    @property
    def left(self) -> float:
        """Seconds that it lasts at least; never 0, which would tell a waiter to ask again at once."""
        return max(self.ticks - 1.0, LAST_TICK_S)


def ticks_for(ttl: float) -> int:
    """What is sent for a ttl, see the head of ``memcached``. (At 30 days the allowance for clock rates is far more.)"""
    return min(ceil(ttl) + 1, TTL_MAX_S)


def key_of(name: str) -> bytes:
    """The key of a name: the name, but for what may not stand in one; a longer one its hash and its beginning.

    (For slot 2 of a name it would begin ``dibs#2:``, and no namespace can.)
    """
    key = b"dibs:" + name.replace("%", "%25").replace(" ", "%20").encode()
    if len(key) <= KEY_BYTES_MAX:
        return key
    return b"dibs~%b~%b" % (sha256(name.encode()).hexdigest().encode(), key[5:165])


def may_be_of(key: bytes, first: str, before: str) -> bool:
    """Whether a key that begins with ``dibs`` may be that of a name in this range."""
    name = unquote_to_bytes(key[5:]).decode("utf-8", "replace") if key.startswith(b"dibs:") else None
    return key.startswith(b"dibs~") or (name is not None and first <= name < before)


def value_of(claim_id: str, token: str, acquired_at: float, holder: str, name: str, info: str | None) -> bytes:
    """A token that begins with + has the item's CAS number still to be added to it."""
    holder = holder.replace("\n", " ")
    return f"{MAGIC}\n{claim_id}\n{token}\n{acquired_at!r}\n{holder}\n{name}\n{info or ''}".encode()


def lease_of(found: Reply, name: str | None = None) -> Lease | None:
    """What an item says. One that is not of dibs, or of another name with the same key, is a lease of nobody's."""
    if type(found) is not Item:
        return None
    lines = found.data.decode("utf-8", "replace").split("\n", 6)
    try:
        magic, claim_id, token, acquired_at, holder, its_name, info = lines
        number = int(token) + (found.cas if token[0] == "+" else 0)
        lease = Lease(claim_id, number, float(acquired_at), holder, its_name, info or None, found.cas, found.ticks)
    except ValueError:
        magic = ""
    if magic != MAGIC or (name is not None and its_name != name):
        return Lease("", 0, 0.0, "a program that is not dibs", "", None, found.cas, found.ticks)
    return lease


def change(key: bytes, lease: Lease, claim_id: str, ticks: int) -> bytes:
    """Give the lease another end, or to nobody, if it has not changed since it was read."""
    value = value_of(claim_id, str(lease.token), lease.acquired_at, lease.holder, lease.name, lease.info)
    return b"cas %b 0 %d %d %d\r\n%b\r\n" % (key, ticks, len(value), lease.cas, value)


def not_ours(key: bytes) -> SetupRequired:
    """What whoever asks for a name is told whose key somebody else uses."""
    return SetupRequired(
        f"memcached's key {shown(key)} holds something that is not dibs's: delete that, or let whoever writes it use "
        "other keys"
    )


def done(answer: bytes) -> bool:
    if answer.startswith(b"SERVER_ERROR"):
        raise no_memory(answer)
    return answer in (b"STORED", b"HD")


def no_memory(answer: bytes) -> StoreUnavailable:
    return StoreUnavailable(f"memcached cannot keep another lease: {shown(answer)}. Give it more memory (-m)")
