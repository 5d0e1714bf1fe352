"""What the settings of a MySQL or MariaDB server leave of dibs's promises.

``facts`` are the server's own variables by their names, as ``mysql_sql.FACTS`` asks for them.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.store import Finding
from dibs.stores import mysql_sql as sql
from dibs.stores.tables import SECONDS, UNWRITTEN

if TYPE_CHECKING:
    from collections.abc import Collection

    from dibs.clock import Deadline
    from dibs.stores.mysql_link import Connection

# A call of a thousand leases has been seen to take 8.5 MB of text in one statement.
PACKET_BYTES_MIN = 10_000_000
_DURABILITY = ("innodb_flush_log_at_trx_commit", "innodb_doublewrite", "log_bin", "sync_binlog")


def check(connection: Connection, called: Collection[str], deadline: Deadline) -> list[Finding]:
    """What ``dibs doctor`` says, where our tables are called so."""
    connection.reopen(deadline)
    connection.read_facts(deadline)
    facts, engines = connection.facts, connection.pairs(sql.ENGINES, deadline)
    if facts.get("lower_case_table_names") != "0":  # the server tells names otherwise than they were given
        called = [name.lower() for name in called]
        engines = {name.lower(): engine for name, engine in engines.items()}
    ours = {name: engine for name, engine in engines.items() if name in called}
    # (Those that the login has no right on at all are not told.) The lock that doctor tries does without DELETE.
    lacking = [name for name in ours if connection.denies(f"DELETE FROM {sql.quoted(name)} WHERE FALSE", deadline)]
    told = over_a_failover({name.lower(): value for name, value in connection.pairs(sql.REPLICAS, deadline).items()})
    failover = [] if told is None else [Finding("grants survive a failover", *told)]
    return [*findings(facts, ours), *failover, *rights(lacking)]


def over_a_failover(status: dict[str, str]) -> tuple[bool, str] | None:
    """Whether a replica that takes over has every grant that was told to somebody, and why; None: it is not known."""
    for role in "master", "source":
        if status.get(f"rpl_semi_sync_{role}_status") == "ON":
            clients = int(status.get(f"rpl_semi_sync_{role}_clients", 0))
            return clients > 0, f"semi-synchronous replication; replicas that confirm: {clients}"
    nodes = int(status.get("wsrep_cluster_size", 0))
    if nodes:
        return True, f"what a node of Galera has committed, the others have; nodes: {nodes}"
    if "slaves_connected" not in status:  # MySQL does not tell
        return None
    replicas = int(status["slaves_connected"])
    if not replicas:
        return True, "there is no replica that could take over"
    return False, f"replicas that are told later: {replicas}. Make that semi-synchronous, or it forgets grants"


def findings(facts: dict[str, str], engines: dict[str, str]) -> list[Finding]:
    """What ``dibs doctor`` says; ``engines`` are those of our tables, by their names."""
    lossy = volatile(facts)
    kind = "MariaDB" if "MariaDB" in facts["version"] else "MySQL"
    read_only = "ON" in (facts.get("read_only"), facts.get("super_read_only"))
    told = ", ".join(f"{name}={facts[name]}" for name in _DURABILITY if name in facts)
    wanted = f": set {lossy}=1, or a crash may hand out a token twice" if lossy else ""
    several = _several_writers(facts)
    found = [
        Finding("reachable", True, f"{kind} {facts['version']}"),
        Finding(
            "writable",
            not read_only,
            "read_only: this looks like a replica; name the primary in the URL" if read_only else "read_only=OFF",
        ),
        Finding("grants survive a crash of the server", not lossy, told + wanted),
        Finding(
            "one server decides, by one clock",
            not several,
            several or "neither Galera nor a group of several primaries",
        ),
    ]
    packet_bytes = int(facts["max_allowed_packet"])
    small = packet_bytes < PACKET_BYTES_MIN
    found.append(
        Finding(
            "the server takes calls of any size",
            not small,
            f"max_allowed_packet={packet_bytes}"
            + (": set 16M, or calls of many items, or of much text, fail as if the server were away" if small else ""),
        )
    )
    if facts.get("log_bin") == "ON":
        by_statement = facts.get("binlog_format") == "STATEMENT"
        found.append(
            Finding(
                "grants can be written to the binary log",
                not by_statement,
                f"binlog_format={facts.get('binlog_format')}" + (": set ROW or MIXED" if by_statement else ""),
            )
        )
    if engines:
        odd = {name: engine for name, engine in engines.items() if engine != "InnoDB"}
        found.append(
            Finding(
                "grants are transactions",
                not odd,
                f"not of InnoDB: {odd}; ALTER TABLE … ENGINE=InnoDB" if odd else "all tables are of InnoDB",
            )
        )
    return found


def rights(lacking: list[str]) -> list[Finding]:
    """What it says of tables from which this login may not delete."""
    told = ", ".join(lacking)
    return [Finding("rights suffice", False, f"this login lacks DELETE on {told}: GRANT that")] if told else []


def volatile(facts: dict[str, str]) -> str:
    """The setting that lets a crash lose an acknowledged commit; "" when none does."""
    if facts.get("innodb_flush_log_at_trx_commit") not in ("1", "3"):  # 3: MariaDB's, stricter than 1
        return "innodb_flush_log_at_trx_commit"
    # With a binary log, what is not in it is rolled back when the server starts again.
    if facts.get("log_bin") == "ON" and facts.get("sync_binlog") != "1":
        return "sync_binlog"
    return ""


def lost_by_a_crash(facts: dict[str, str]) -> str:
    """What the settings let a crash take of what was acknowledged; "" when nothing, or nothing is known yet."""
    lossy = volatile(facts) if facts else ""
    # It is written once a second, whatever else is set.
    return lossy and (SECONDS if lossy == "innodb_flush_log_at_trx_commit" else UNWRITTEN)


def _several_writers(facts: dict[str, str]) -> str:
    """What makes this a place where several servers take writes; "" when nothing does."""
    if facts.get("wsrep_on") == "ON" and facts.get("wsrep_cluster_address"):
        return (
            "Galera (wsrep_on=ON): nodes certify every grant, so two of them never grant one token, but each "
            "compares expiries with its own clock: let all programs name the same node, or keep the nodes' clocks "
            "within milliseconds; locks are safe with takeover='observe', too"
        )
    if facts.get("group_replication_group_name") and facts.get("group_replication_single_primary_mode") == "OFF":
        return (
            "group replication with several primaries: each compares expiries with its own clock: set "
            "group_replication_single_primary_mode=ON, or let all programs name the same server"
        )
    return ""
