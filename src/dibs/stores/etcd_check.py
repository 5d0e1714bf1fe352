"""What can be read of an etcd cluster's health and settings, and what it means for dibs's promises."""

from __future__ import annotations

import json
import re
from contextlib import closing

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.store import Finding
from dibs.stores.etcd_gateway import OUT_OF_RANGE, Gateway, Refusal
from dibs.stores.parts import AWAY_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline
    from dibs.stores.etcd_address import Access

# A history of more revisions than this, none of which was ever compacted, is one that grows for ever.
HISTORY_MAX = 200_000
QUOTA_PART = 0.8
# A single member of some versions answers just before its sync; so many writes in vain are no accident.
WRITES = 3
SYNCS = "etcd_disk_wal_fsync_duration_seconds_count"
MIB = 1024 * 1024


class Facts(NamedTuple):
    """Of the member that answered. What its metrics do not tell, or nobody may read, is None."""

    version: str
    leader: bool
    size: int
    revision: int
    #: None when this login may not know.
    errors: list[str] | None
    quota: int | None
    #: Why a crash may lose what was acknowledged; empty when it may not.
    unsafe: str
    #: How many members there are; None when this login may not know.
    members: int | None


def read(gateway: Gateway, key: str, deadline: Deadline) -> Facts:
    """Ask the member that is connected. ``key`` is one that is not there: deleting it is a write to the log."""
    syncs_before = _metric(gateway.text("/metrics", deadline), SYNCS)
    for _ in range(WRITES):
        written = gateway.one("kv/deleterange", f'{{"key":"{key}"}}', deadline)
        metrics = gateway.text("/metrics", deadline)
        syncs, quota = _metric(metrics, SYNCS), _metric(metrics, "etcd_server_quota_backend_bytes")
        if syncs is None or syncs != syncs_before:
            break
    errors: list[str] | None = None
    try:
        status = gateway.one("maintenance/status", "{}", deadline)
        errors = list(status.get("errors", ()))
    except SetupRequired:  # etcd 3.5.30 tells it to its root only: this is what everybody may know
        size = _metric(metrics, "etcd_mvcc_db_total_size_in_bytes") or 0
        version = json.loads(gateway.text("/version", deadline))["etcdserver"]
        # (Without a leader nothing would have been written.)
        status = {"version": version, "leader": "1", "dbSize": size, "header": written["header"]}
    members = _members(gateway, deadline)
    unsafe = ""
    if syncs is not None and syncs == syncs_before:
        unsafe = "it runs with --unsafe-no-fsync; start it without"
    elif members == 1 and _answers_early(status["version"]):
        unsafe = (
            "this version answers before it has synced when it is a single member; update to 3.4.21, 3.5.5 or later"
        )
    return Facts(
        status["version"],
        status.get("leader", "0") != "0",
        int(status.get("dbSize", 0)),
        int(status["header"].get("revision", 0)),
        errors,
        None if quota is None else int(quota),
        unsafe,
        members,
    )


def _answers_early(version: str) -> bool:
    """Whether a single member of this version may lose what it acknowledged: etcd's issue 14370."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return numbers < (3, 4, 21) or (3, 5) <= numbers < (3, 5, 5)


def _metric(metrics: str, name: str) -> float | None:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return None if found is None else float(found[1])


def findings(gateway: Gateway, access: Access, facts: Facts, shortest_s: int, deadline: Deadline) -> list[Finding]:
    """One for each promise that a setting or the cluster's state can break."""
    return [
        Finding("reachable", True, f"etcd {facts.version}"),
        Finding(
            "the cluster has a leader",
            facts.leader,
            "yes"
            if facts.leader
            else "no: without one nothing is granted, renewed or released until a majority is back",
        ),
        _failover(facts.members, [f"{host}:{port}" for host, port in access.endpoints], _silent(access, deadline)),
        Finding(
            "grants survive a crash of the server",
            not facts.unsafe,
            f"a crash may hand out a token twice: {facts.unsafe}" if facts.unsafe else "its log is synced to disk",
        ),
        _space(gateway, facts, deadline),
        _shortest(gateway, shortest_s, deadline),
        _history(gateway, facts, deadline),
        Finding(
            "only those let in take locks",
            True,
            f"logged in as {access.user}" if access.user else "no login in the URL: whoever reaches etcd may",
        ),
    ]


def _failover(members: int | None, endpoints: Sequence[str], silent: Sequence[str]) -> Finding:
    """Whether the next loss is survived. ``endpoints`` are those in the URL, ``silent`` which do not answer."""
    promise = "the loss of a member is survived"
    if members is None:
        if not silent:
            return Finding(promise, True, "this login may not list the members")
        members = len(endpoints)
    if members == 1:
        # A remark: it may well be what is wanted. But it is not to be read as the promise that it is not.
        return Finding(
            "leases and tokens outlive the restart of a member",
            True,
            "but not its loss: a single member is one machine's disk; 3 members outlive the loss of one",
        )
    if members == 2:
        return Finding(promise, False, "2 members: the loss of either stops the cluster; have 3")
    told = f"{members} members, {len(endpoints)} of them in the URL"
    if silent:
        survived = members - len(silent) - 1 > members // 2
        told += f", of which {len(endpoints) - len(silent)} answer (not {', '.join(silent)})"
        return Finding(promise, survived, told + ("" if survived else ": the loss of another would stop the cluster"))
    if len(endpoints) == 1:
        told += ": name more, host:port,host:port"
    return Finding(promise, True, told)


def _silent(access: Access, deadline: Deadline) -> list[str]:
    """Which members of the URL say nothing. (One that is asked for its version need not have a leader to answer.)"""
    silent = []
    for host, port in access.endpoints:
        with closing(Gateway(access._replace(endpoints=((host, port),), user="", password=""))) as member:
            try:
                member.text("/version", deadline.within(AWAY_S))
            except (SetupRequired, StoreUnavailable):
                silent.append(f"{host}:{port}")
    return silent


def _members(gateway: Gateway, deadline: Deadline) -> int | None:
    try:
        return len(gateway.one("cluster/member/list", "{}", deadline)["members"])
    except (SetupRequired, StoreUnavailable):
        return None


def _space(gateway: Gateway, facts: Facts, deadline: Deadline) -> Finding:
    promise = "there is room to grant"
    size = f"the database has {facts.size / MIB:.0f} MiB"
    if facts.quota:
        size += f" of {facts.quota / MIB:.0f} MiB"
    alarmed = _alarmed(gateway, deadline)
    if any("NOSPACE" in error for error in facts.errors or ()) or alarmed:
        return Finding(
            promise,
            False,
            f"{size}, and the alarm NOSPACE is raised: nothing is granted, what is held can be renewed and released. "
            "Compact, `etcdctl defrag`, `etcdctl alarm disarm`",
        )
    full = bool(facts.quota) and facts.size > QUOTA_PART * (facts.quota or 0)
    if facts.errors is None and alarmed is None:
        size += "; whether the alarm NOSPACE is raised, root alone is told"
    return Finding(promise, not full, size + (": compact and defrag, or raise --quota-backend-bytes" if full else ""))


def _alarmed(gateway: Gateway, deadline: Deadline) -> bool | None:
    """Whether the alarm for space is raised; None when this login may not know."""
    try:
        alarms: list[dict[str, Any]] = gateway.one("maintenance/alarm", "{}", deadline).get("alarms", [])
    except (SetupRequired, StoreUnavailable):
        return None
    return any(alarm.get("alarm") == "NOSPACE" for alarm in alarms)


def _shortest(gateway: Gateway, shortest_s: int, deadline: Deadline) -> Finding:
    """Ask for the shortest etcd lease that is ever asked for and see what is given."""
    promise = "leases end with their ttl"
    try:
        given = gateway.one("lease/grant", f'{{"TTL":"{shortest_s}"}}', deadline)
    except StoreUnavailable:  # no space, which is told above
        return Finding(promise, True, "not tried")
    gateway.one("lease/revoke", f'{{"ID":"{given["ID"]}"}}', deadline)
    if int(given["TTL"]) > shortest_s:
        return Finding(promise, False, f"none is shorter than {given['TTL']} s here: lower --election-timeout")
    return Finding(promise, True, "in whole seconds, rounded up")


def _history(gateway: Gateway, facts: Facts, deadline: Deadline) -> Finding:
    """Old revisions stay readable until they are compacted; whether that ever happened can be tried."""
    promise = "history is compacted"
    if facts.revision <= HISTORY_MAX:
        return Finding(promise, True, f"revision {facts.revision:,}, too few to tell; set --auto-compaction-retention")
    answer = gateway.one_or_refusal("kv/range", '{"key":"AA==","revision":"2"}', deadline)
    if type(answer) is Refusal and answer.code == OUT_OF_RANGE:
        return Finding(promise, True, f"revision {facts.revision:,}")
    return Finding(promise, False, f"{facts.revision:,} revisions, none compacted: set --auto-compaction-retention=1h")
