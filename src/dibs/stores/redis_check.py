"""What a Redis server's settings leave of dibs's promises.

``facts`` are what the server told of itself when it was connected: the fields of INFO, and what CONFIG GET showed, as
far as the login may ask.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.store import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.stores.redis_wire import Place

EVICTING = ". Set it to noeviction or to one of volatile-*, or a name may be free too early, and a queue lost"


def findings(
    everywhere: Sequence[dict[str, str]], place: Place, min_replicas: int, strict: bool, channels: str
) -> list[Finding]:
    """What ``dibs doctor`` says of the servers that take writes; of the weakest where they differ."""
    facts = min(everywhere, key=kept)
    durable, survives = kept(facts)
    append, fsync = facts.get("appendonly", "unknown"), facts.get("appendfsync", "unknown")
    policy, limit = facts.get("maxmemory_policy", "unknown"), facts.get("maxmemory", "unknown")
    woken = all(map(publishes, everywhere))
    return [
        Finding("reachable", True, f"{program(facts)}{_kind(place, len(everywhere))}"),
        Finding(
            "grants survive a crash of the server",
            durable,
            f"appendonly={append}, appendfsync={fsync}; survives a restart: {survives}"
            + ("" if durable else ". Set appendonly yes and appendfsync always, or a crash may forget grants"),
        ),
        Finding(
            "leases are not evicted",
            policy != "unknown" and not evicts(facts),
            f"maxmemory={limit}, maxmemory-policy={policy}" + (EVICTING * evicts(facts)),
        ),
        Finding("grants survive a failover", *over_a_failover(everywhere, place, min_replicas)),
        Finding(
            "fencing tokens rise",
            strict,
            "counted, and never below the server's time in microseconds"
            + ("" if strict else ": when data is lost, as above, only its clock keeps that"),
        ),
        Finding(
            "waiters are woken by the release",
            woken,
            "pub/sub" if woken else f"they ask once a second: this login may not use the channels {channels}",
        ),
    ]


def over_a_failover(everywhere: Sequence[dict[str, str]], place: Place, min_replicas: int) -> tuple[bool, str]:
    """Whether a replica that takes over has heard of every grant, and why."""
    if not all("connected_slaves" in facts for facts in everywhere):
        return False, "unknown (INFO is not to be had): where there are replicas, add ?min_replicas=1"
    replicas = min(int(facts["connected_slaves"]) for facts in everywhere)
    if min_replicas:
        told = f"min_replicas={min_replicas}, and the fewest connected to a master are {replicas}"
        return replicas >= min_replicas, told + ("" if replicas >= min_replicas else ": nothing can be granted")
    if not replicas and place.sentinel is None:
        return True, "there is no replica that could take over"
    return False, f"{replicas} replicas, which are told later: add ?min_replicas=1, or a failover forgets grants"


def _kind(place: Place, servers: int) -> str:
    if place.cluster:
        return f", a cluster with {servers} masters"
    return "" if place.sentinel is None else f", the master that sentinels call {place.sentinel}"


def publishes(facts: dict[str, str]) -> bool:
    return facts["publishes"] == "yes"


def evicts(facts: dict[str, str]) -> bool:
    """Whether keys without a time to live may be evicted, as leases and queues are."""
    return facts.get("maxmemory_policy", "").startswith("allkeys-") and facts.get("maxmemory") != "0"


def kept(facts: dict[str, str]) -> tuple[bool, str]:
    """Whether an acknowledged write outlives a crash, and what does."""
    if "maxmemory_policy" not in facts:
        return False, "unknown (INFO is not to be had, which says what may be evicted)"
    if evicts(facts):
        return False, f"no: {facts['maxmemory_policy']} may evict leases and queues at any time"
    fsync = facts.get("appendfsync", "unknown")
    if facts.get("appendonly", facts.get("aof_enabled")) in ("yes", "1"):
        if facts.get("aof_last_write_status", "ok") != "ok":
            return False, "no: the last write to the append-only file failed"
        if fsync == "always":
            return True, "yes"
        return False, {
            "everysec": "yes, but for the last second or two",
            "no": "yes, but for what the system had not written yet",
        }.get(fsync, "yes, but for the last moments (appendfsync is unknown)")
    if "save" not in facts:
        return False, "as of its last snapshot, if it makes any (unknown)"
    return False, "as of its last snapshot" if facts["save"] else "no"


def program(facts: dict[str, str]) -> str:
    if "valkey_version" in facts:
        return f"Valkey {facts['valkey_version']}"
    return f"Redis {facts.get('redis_version', 'of unknown version')}"
