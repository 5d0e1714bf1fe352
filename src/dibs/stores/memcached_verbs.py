"""What is said to memcached for one request, until its outcome is known."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.store import GONE, RELEASED, Acquire, Granted, Held, Release, Renew, Renewed, Transfer
from dibs.stores.memcached_values import Lease, change, done, key_of, lease_of, no_memory, not_ours, ticks_for, value_of
from dibs.stores.memcached_wire import Item

if TYPE_CHECKING:
    from collections.abc import Generator

    from dibs.errors import SetupRequired
    from dibs.store import Outcome, Request
    from dibs.stores.memcached_wire import Reply

    # One request's part in the conversation: it yields commands and how many replies they bring, and returns its
    # outcome, or the error that concerns it alone.
    Steps = Generator[tuple[bytes, int], list[Reply], "Outcome | Kept | SetupRequired"]

# CAS numbers of grants that are remembered; a release whose number is not known reads it first.
KNOWN_MAX = 100_000


class Kept(NamedTuple):
    """A release that keeps the name was done, and the item says this: Released, unless its end is to be doubted."""

    lease: Lease


def keeps(request: Request) -> bool:
    """Whether it is a release that keeps the name for a while."""
    return type(request) is Release and request.keep > 0


class Verbs:
    """The parts of all requests on one connection. ``token_base``: to be added to a CAS number to make a token."""

    def __init__(self, token_base: int) -> None:
        self._token_base = token_base
        #: The server's Unix time, for people.
        self.now = 0.0
        # A server that was restarted begins its CAS numbers anew: what was known on another connection may by now be
        # somebody else's.
        self._known: dict[tuple[str, str], int] = {}

    def steps(self, request: Request) -> Steps:
        if isinstance(request, Acquire):
            return self._acquire(request)
        if isinstance(request, Renew):
            return self._renew(request)
        if isinstance(request, Transfer):
            return self._transfer(request)
        return self.keep(request) if keeps(request) else self._release(request)

    def _acquire(self, request: Acquire) -> Steps:
        name, claim_id = request.name, request.claim_id
        key, ticks = key_of(name), ticks_for(request.ttl)
        at = round(self.now, 3)
        value = value_of(claim_id, f"+{self._token_base}", at, request.holder, name, request.info)
        command = b"add %b 0 %d %d\r\n%b\r\nmg %b v c t\r\n" % (key, ticks, len(value), value, key)
        while True:
            stored, found = yield command, 2
            if stored == b"STORED" and type(found) is Item and found.data == value:
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                self._known[name, claim_id] = found.cas
                return Granted(self._token_base + found.cas, at)
            lease = lease_of(found, name)
            if lease is None:
                if stored.startswith(b"SERVER_ERROR"):
                    raise no_memory(stored)
                continue  # it ended in between, or was taken away
            if lease.foreign:
                return not_ours(key)
            if lease.claim_id != claim_id:
                return Held(lease.holder, lease.token, lease.acquired_at, lease.left)
            if lease.ticks < ticks:
                (answer,) = yield change(key, lease, claim_id, ticks), 1
                if not done(answer):
                    continue
            return Granted(lease.token, lease.acquired_at)

    def _renew(self, request: Renew) -> Steps:
        name, claim_id = request.name, request.claim_id
        key, ticks = key_of(name), ticks_for(request.ttl)
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = lease_of(found, name)
            if lease is None or not claim_id or lease.claim_id != claim_id:
                return GONE
            if lease.ticks >= ticks:  # it lasts as long already: renewals never shorten a lease
                return Renewed(self.now + lease.left)
            (answer,) = yield change(key, lease, claim_id, ticks), 1
            if done(answer):
                return Renewed(self.now + request.ttl)

    def _transfer(self, request: Transfer) -> Steps:
        name, claim_id = request.name, request.claim_id
        key, ticks = key_of(name), ticks_for(request.ttl)
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = lease_of(found, name)
            if lease is None or lease.claim_id not in (claim_id, request.from_claim or claim_id):
                return GONE
            if lease.claim_id != claim_id:
                value = value_of(
                    claim_id, f"+{self._token_base}", round(self.now, 3), request.holder, name, request.info
                )
                (answer,) = yield b"cas %b 0 %d %d %d\r\n%b\r\n" % (key, ticks, len(value), lease.cas, value), 1
                done(answer)  # (raises where there is no memory for it)
                continue  # the next look shows whether that was stored, and the CAS number that makes the token
            if lease.ticks < ticks:
                (answer,) = yield change(key, lease, claim_id, ticks), 1
                if not done(answer):
                    continue
            return Granted(lease.token, lease.acquired_at)

    def _release(self, request: Release) -> Steps:
        name, claim_id = request.name, request.claim_id
        key = key_of(name)
        known = self._known.pop((name, claim_id), None)
        if known is not None:
            (answer,) = yield b"md %b C%d\r\n" % (key, known), 1
            if answer != b"EX":
                return RELEASED if done(answer) else GONE
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = lease_of(found, name)
            if lease is None or not claim_id or lease.claim_id != claim_id:
                return GONE
            (answer,) = yield b"md %b C%d\r\n" % (key, lease.cas), 1
            if done(answer):
                return RELEASED

    def keep(self, request: Release, kept: Lease | None = None) -> Steps:
        """Let the item be nobody's until its time is over. ``kept``: that was done, but the end of it is doubted."""
        name, claim_id = request.name, request.claim_id
        key, ticks = key_of(name), ticks_for(request.keep)
        self._known.pop((name, claim_id), None)
        while True:
            (found,) = yield b"mg %b v c t\r\n" % key, 1
            lease = lease_of(found, name)
            if kept is None:
                if lease is None or not claim_id or lease.claim_id != claim_id:
                    return GONE
                if request.info is not None:
                    lease = lease._replace(info=request.info)
            elif lease is None:  # it had ended as soon as it was stored
                value = value_of("", str(kept.token), kept.acquired_at, kept.holder, kept.name, kept.info)
                (answer,) = yield b"add %b 0 %d %d\r\n%b\r\n" % (key, ticks, len(value), value), 1
                if done(answer):
                    return Kept(kept)
                continue
            elif lease.claim_id or lease.token != kept.token:
                return RELEASED  # and somebody else was faster
            (answer,) = yield change(key, lease, "", ticks), 1
            if done(answer):
                return Kept(lease)
