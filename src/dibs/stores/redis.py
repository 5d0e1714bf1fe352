"""Redis and Valkey: leases as hashes, changed by Lua scripts, which the server runs one at a time.

A permit is a hash ``dibs:lease:{namespace:name}`` with the fields claim_id, holder, fencing_token, acquired_at,
expires_at and info, there only while somebody holds it, is kept out of it, or waits for it (and after a crash of its
holder, until the next one comes or a purge). A script reads it, decides, and writes it with nothing in between: that
is the conditional write. Time is the server's ``TIME``, read in the script; whether a lease is over is decided by its
``expires_at``, never by Redis's own expiry of keys, so an eviction among keys with a time to live takes none.

A fencing token is ``max(the last one + 1, the server's time in microseconds)``, counted for all names together (in a
cluster for all names of a hash slot) under ``dibs:token``. So a released name can be deleted without a trace, and
tokens go on rising when data was lost, by a failover, a crash or FLUSHALL, unless the server's clock was set back too.

The line is a sorted set of claims by ticket beside a hash that says when each was seen free to ask and where it is
told; both are forgotten after an hour in which nobody asked. Whoever releases publishes to the first in line alone.

A name with permits is a hash ``dibs:lease:{namespace:name}`` that says how many there are (permits), how many are
taken, and which claim has which slot; the lease of slot 2 is then ``dibs:lease:{namespace:name}2``, with how many
permits it takes, and ``dibs:lease:{namespace:name}:slots`` is a sorted set of when each ends (``redis_lua/pools.lua``
describes all of it). So a take costs the same whoever else holds some: it looks at none of their leases, unless they
are over. One key says whether a name is a lock or has permits, so it is never both. A lock is forgotten when it is
free and nobody waits for it, a number of permits two hours after the last was released.

What is in braces is the hash tag: all keys of a name are in one slot. ``%`` and ``}`` in a name are written as %25 and
%7D there, so two names never share a key.

Not promised: what a failover forgets, unless ``min_replicas`` makes each grant and renewal wait for replicas; what a
crash forgets, unless ``appendfsync`` is ``always``; anything where ``maxmemory-policy`` evicts keys without a time to
live. ``capabilities`` and ``check`` say which of these hold.
"""

from __future__ import annotations

from itertools import groupby

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.store import (
    GONE,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Outcome,
    PartUnavailable,
    Release,
    StoreAddress,
    StoredLease,
    Transfer,
)
from dibs.stores import redis_address, redis_check
from dibs.stores.redis_keys import CHUNK_MAX, QUEUES, Keys
from dibs.stores.redis_links import Request
from dibs.stores.redis_operators import Operators
from dibs.stores.redis_scripts import Flights
from dibs.stores.redis_wire import Place, Refusal, Wire, packed, refusal
from dibs.stores.redis_words import READERS, verb_of, words_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.store import Request as StoreRequest
    from dibs.stores.redis_jobs import RedisJobs
    from dibs.stores.redis_scripts import Call

CAPABILITIES = Capabilities(
    store="Redis",
    survives_restart="as its persistence does",
    fencing_token="strict while data lives, then by the server's clock",
    clock="server TIME",
    waiting_line="FIFO",
    signal="pub/sub",
    queue=True,
    durable=False,
    ttl_min_s=0.05,
    ttl_max_s=30 * 24 * 3600.0,
    resolution_s=0.001,
    margin_s=0.010,
    permits=True,
    pause=True,
    tries=True,
    observe=True,
)
# What a login must be allowed to do, and what it should be, so that capabilities and doctor can tell what is promised.
RIGHTS = (
    "+evalsha +eval +time +hget +hmget +hset +hdel +hlen +hvals +get +set +incr +del +persist +pexpire +pttl +zadd "
    "+zcard +zcount +zrange +zrevrange +zrank +zscore +zrangebyscore +zremrangebyscore +zrem +publish +subscribe +scan "
    "+ping +wait +select +info +config|get +client|setname"
)


class RedisStore:
    def __init__(self, place: Place, prefix: str, min_replicas: int) -> None:
        self._place = place
        self._flights = Flights(place)
        self._link = self._flights.link
        self._keys = Keys(place, prefix)
        self._min_replicas = min_replicas
        self._operators = Operators(self._flights, self._keys, min_replicas)
        self._jobs: RedisJobs | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What the weakest of the servers offers that are connected."""
        facts = self._link.facts()
        if not facts:
            return CAPABILITIES
        durable, survives = min(map(redis_check.kept, facts))
        survives_failover, _ = redis_check.over_a_failover(facts, self._place, self._min_replicas)
        return CAPABILITIES._replace(
            survives_restart=survives,
            durable=durable,
            fencing_token="strict" if durable and survives_failover else CAPABILITIES.fencing_token,
            signal="pub/sub" if all(map(redis_check.publishes, facts)) else "poll (this login may not publish)",
        )

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[StoreRequest], deadline: Deadline) -> list[Outcome]:
        if not requests:
            pings = [Request(packed("PING"), node=node) for node, _ in self._link.servers(deadline)]
            self._flights.fly(pings, deadline)
            return []
        outcomes: list[Any] = [GONE] * len(requests)
        chunks = list(self._chunks(requests))
        calls = (self._call(verb, [requests[index] for index in indexes], slot) for verb, slot, indexes in chunks)
        # Requests for one name are tried in their order also by a server that knows the last of the scripts only.
        ordered = len({request.name for request in requests}) < len(requests)
        answers = self._flights.run(calls, deadline, by_text=len(chunks) - 1 if ordered else 0, parts=True)
        for (verb, _, indexes), texts in zip(chunks, answers, strict=True):
            if type(texts) is PartUnavailable:
                outcomes = [texts if index in indexes else outcome for index, outcome in enumerate(outcomes)]
                continue
            read = READERS[verb]
            for index, text in zip(indexes, texts, strict=True):
                try:
                    outcomes[index] = read(text) if text[:1] != b"E" else self._refused(requests[index], text)
                except ValueError:  # a number in the row is none any more
                    outcomes[index] = _not_ours(requests[index], repr(text))
        if self._min_replicas and any(type(request) is not Release or request.keep for request in requests):
            self._wait_for_replicas(requests, outcomes, deadline)
        if not self._place.worked:
            self._place.worked.append(True)
        return outcomes

    def _chunks(self, requests: Sequence[StoreRequest]) -> Iterator[tuple[str, int, Sequence[int]]]:
        """The requests by verb and slot, in their order, as one run of a script takes them."""
        if len(requests) == 1:  # as most are, of a caller who is alone
            yield verb_of(requests[0]), self._keys.slot(requests[0].name), (0,)
            return
        for verb, run in groupby(range(len(requests)), key=lambda index: verb_of(requests[index])):
            if self._place.cluster:
                slots = {index: self._keys.slot(requests[index].name) for index in run}
                groups = groupby(sorted(slots, key=slots.__getitem__), key=slots.__getitem__)
            else:
                groups = iter([(0, run)])  # type: ignore[assignment]
            for slot, indexes in groups:
                these = list(indexes)
                for start in range(0, len(these), CHUNK_MAX):
                    yield verb, slot, these[start : start + CHUNK_MAX]

    def _call(self, verb: str, requests: Sequence[Any], slot: int) -> Call:
        return self._flights.script(verb).calling(*words_of(verb, requests, slot, self._keys), slot)

    def _refused(self, request: StoreRequest, text: bytes) -> Any:
        """What became of a request that failed by itself: an error for an acquire, and no lease for the others."""
        error = refusal(text[2:])
        if error.code == "OOM":
            if type(request) in (Acquire, Transfer):
                return StoreUnavailable(
                    f"Redis is out of memory and takes no new lease: {error.text}", maybe_applied=False
                )
        elif error.code == "WRONGTYPE":
            if type(request) is not Acquire:
                return GONE
            return _not_ours(request, error.text)
        told = error._replace(text=f"{error.text} ({request.name!r} was asked for)")
        raise self._flights.failure(told, maybe_applied=True, in_script=True)

    def _wait_for_replicas(self, requests: Sequence[StoreRequest], outcomes: Sequence[Any], deadline: Deadline) -> None:
        """Go on when enough replicas have what was just written; else give the grants back, and nothing is known.

        A renewal that too few replicas have heard of may be forgotten by a failover, so nobody may trust it.
        """
        trouble = self._flights.wait_for_replicas(self._min_replicas, deadline)
        if trouble is None:
            return
        grants = [
            Release(request.name, request.claim_id, outcome.slot)
            for request, outcome in zip(requests, outcomes, strict=True)
            if type(outcome) is Granted
        ]
        chunks = self._chunks(grants)
        calls = (self._call(verb, [grants[i] for i in these], slot) for verb, slot, these in chunks)
        self._flights.run(calls, deadline)
        raise StoreUnavailable(f"{trouble}; what was granted was given back")

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        return self._operators.leases(first, before, deadline)

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        return self._operators.break_lease(name, fencing_token, now, deadline)

    def end_unchanged(self, name: str, fencing_token: int, expires_at: float, deadline: Deadline) -> bool:
        return self._operators.end_unchanged(name, fencing_token, expires_at, deadline)

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        return self._operators.purge(first, before, older_than, deadline)

    def check(self, deadline: Deadline) -> list[Finding]:
        self._link.close()  # the settings as they are now
        everywhere = [wire.facts for _, wire in self._link.servers(deadline)]
        strict = self.capabilities.fencing_token == "strict"
        return redis_check.findings(everywhere, self._place, self._min_replicas, strict, self._keys.channel("*"))

    def setup(self, deadline: Deadline) -> None:
        self._link.open(deadline)

    def schema(self) -> str:
        prefix, channels = self._keys.prefix, self._keys.channel("*")
        return (
            f"# Nothing to make. Of a name, dibs keeps {prefix}:lease:{{name}}, {prefix}:line:{{name}} and\n"
            f"# {prefix}:waiters:{{name}}, of its permits {prefix}:lease:{{name}}1 and so on and\n"
            f"# {prefix}:lease:{{name}}:slots; of all names {prefix}:token.\n# {self.jobs.schema()[2:]}"
            f"# A login needs these rights and no more:\n"
            f"ACL SETUSER dibs on >password resetkeys ~{prefix}:* resetchannels &{channels} -@all {RIGHTS}"
            + (" +cluster|slots +asking\n" if self._place.cluster else "\n")
        )

    def watch(self, address: str, deadline: Deadline) -> RedisWatch | None:
        wire = self._link.open(deadline)
        # Two commands: a channel that this login may not hear is refused by itself.
        channels = (self._keys.channel(address), self._keys.channel(QUEUES))
        answers = wire.exchange(b"".join([packed("SUBSCRIBE", channel) for channel in channels]), 2, deadline)
        return None if isinstance(answers[0], Refusal) else RedisWatch(self, self._keys, wire)

    @property
    def jobs(self) -> RedisJobs:
        if self._jobs is None:
            from dibs.stores.redis_jobs import RedisJobs

            self._jobs = RedisJobs(self._flights, self._keys, self._min_replicas)
        return self._jobs

    def close(self) -> None:
        self._link.close()


class RedisWatch:
    """What releases publish to this client, and puts to everybody; each message names where something may be had."""

    interval_s: float | None = None

    def __init__(self, store: RedisStore, keys: Keys, wire: Wire) -> None:
        self._store = store
        self._keys = keys
        self._wire = wire

    def fileno(self) -> int:
        return self._wire.fileno()

    def changed(self, names: Collection[str]) -> Collection[str]:
        told = []
        for message in self._wire.arrived():
            if isinstance(message, list) and message[0] == b"message":
                name = self._keys.name_in(message[2]) or self._keys.queue_in(message[2])
                if name is not None:
                    told.append(name)
        return told

    def close(self) -> None:
        self._store.close()


def _not_ours(request: StoreRequest, seen: str) -> SetupRequired:
    return SetupRequired(f"a key of {request.name!r} holds something that is not dibs's: {seen}")


OPTIONS = redis_address.OPTIONS


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``redis://user:password@host:port/0?…`` points; ``rediss`` for TLS, ``valkey`` and ``valkeys`` likewise.

    Several hosts are sentinels (``?sentinel=name-of-the-master``) or nodes of a cluster (``?cluster=true``). A Unix
    socket is ``redis+unix:///path`` or ``?unix_socket=/path``. The query may also carry ``prefix``, ``min_replicas``,
    ``db``, ``sentinel_username``, ``sentinel_password``, and redis-py's ``ssl_…`` options.
    """
    place, prefix, min_replicas, shown = redis_address.where(url, options)
    return StoreAddress(
        shown, CAPABILITIES, lambda: RedisStore(place, prefix, min_replicas), together=True, served=True
    )
