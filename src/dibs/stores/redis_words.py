"""What the scripts on leases are told, and what they answer, one line of words for each request."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.store import (
    GONE,
    LINE_GRACE_S,
    RELEASED,
    Acquire,
    Granted,
    Held,
    Mismatch,
    Outcome,
    Release,
    Renew,
    Renewed,
    Transfer,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.store import Request
    from dibs.stores.redis_keys import Keys

# How long a line in which nobody asks is kept, and longer the free row of its name: where there is a line, there is a
# row, so that a name without one is granted without a look at the line. (Of a name with permits, how long it is known
# how many it has, when nobody holds one.)
LINE_KEEP_MS = 3600 * 1000
ROW_KEEP_MS = 2 * LINE_KEEP_MS
GRACE = repr(LINE_GRACE_S)
_VERBS: dict[type, str] = {Renew: "renew", Release: "release", Transfer: "transfer"}


def verb_of(request: Request) -> str:
    """The script that carries it out."""
    if type(request) is Acquire:
        return "acquire_permits" if request.permits else "acquire"
    return _VERBS[type(request)]


def words_of(verb: str, requests: Sequence[Any], slot: int, all_keys: Keys) -> tuple[list[str], list[str]]:
    """The keys and arguments of a run of the script with the name of the verb, on these requests."""
    keys: list[str] = []
    words: list[str] = []
    ttl, ttl_word = 0.0, "0.0"  # most requests have the ttl of the one before
    if verb in ("acquire", "acquire_permits"):
        words += (GRACE, str(LINE_KEEP_MS))
        if verb == "acquire_permits":
            words.append(str(ROW_KEEP_MS))
        for name, claim_id, seconds, holder, info, wake, ticket, permits, take, resize in requests:
            if seconds != ttl:
                ttl, ttl_word = seconds, repr(seconds)
            keys += all_keys.of(name)
            channel = "" if wake is None else all_keys.channel(wake)
            words += (claim_id, ttl_word, holder, info or "", channel, "" if ticket is None else str(ticket))
            if permits:
                words += (str(permits), str(take), "1" if resize else "")
        keys.append(all_keys.counter(slot))
    elif verb == "transfer":
        words += (GRACE, str(LINE_KEEP_MS))
        for name, claim_id, seconds, holder, from_claim, info, permit, permits in requests:
            keys.append(all_keys.of(name)[0])
            words += (claim_id, repr(seconds), holder, from_claim, info or "", str(permit), "1" if permits else "")
        keys.append(all_keys.counter(slot))
    elif verb == "renew":
        for name, claim_id, seconds, permit in requests:
            if seconds != ttl:
                ttl, ttl_word = seconds, repr(seconds)
            keys.append(all_keys.of(name)[0])
            words += (claim_id, ttl_word, str(permit))
    else:
        words += (str(ROW_KEEP_MS), GRACE)
        for name, claim_id, permit, ticket, keep, info in requests:
            keys += all_keys.of(name)
            plain = ticket is None and not keep  # as nearly all are
            more = "" if plain else f"{int(ticket is not None)} {keep!r} {info or ''}"
            words += (claim_id, str(permit), more)
    return keys, words


def _read_acquire(text: bytes) -> Granted | Held | Mismatch:
    if text[:1] == b"G":
        _, token, since, *slot = text.split(b" ")
        return Granted(int(token), float(since), *map(int, slot))
    if text[:1] == b"M":
        return Mismatch(int(text[2:]))
    _, token, since, free_in, ticket, ahead, holder = text.split(b" ", 6)
    place = None if ticket == b"-" else int(ticket)
    return Held(
        holder.decode("utf-8", "replace") or None, int(token), float(since), float(free_in), place, ahead == b"1"
    )


def _read_transfer(text: bytes) -> Outcome:
    return _read_acquire(text) if text else GONE


def _read_renew(text: bytes) -> Outcome:
    return Renewed(float(text)) if text else GONE


def _read_release(text: bytes) -> Outcome:
    return RELEASED if text == b"1" else GONE


READERS: dict[str, Callable[[bytes], Outcome]] = {
    "acquire": _read_acquire,
    "acquire_permits": _read_acquire,
    "transfer": _read_transfer,
    "renew": _read_renew,
    "release": _read_release,
}
