"""What the settings of a PostgreSQL server, and the rights of a login, leave of dibs's promises.

``facts`` are what it told of itself when it was connected: see dibs.stores.postgres_link.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.store import Finding
from dibs.stores.postgres_wire import text, texts
from dibs.stores.tables import SECONDS, UNWRITTEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline
    from dibs.stores.postgres_link import Connection

# What is missing, of the schema and the tables that are there. (Rights may be given for all columns one by one.)
_LACKING = b"""\
SELECT 'schema "' || n.nspname || '"', 'USAGE' FROM pg_namespace AS n
WHERE starts_with(($1::text[])[1], '"' || n.nspname || '".') AND NOT has_schema_privilege(n.oid, 'USAGE')
UNION ALL SELECT name, lacking FROM (
SELECT t.i, t.name, string_agg(r.name, ', ' ORDER BY r.i) AS lacking
FROM unnest($1::text[]) WITH ORDINALITY AS t (name, i)
JOIN (SELECT c.oid, '"' || n.nspname || '"."' || c.relname || '"' AS name
      FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p')) AS c
    ON c.name = t.name
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) WITH ORDINALITY AS r (name, i)
WHERE NOT CASE r.name
    WHEN 'DELETE' THEN has_table_privilege(c.oid, r.name) ELSE has_any_column_privilege(c.oid, r.name) END
GROUP BY t.i, t.name ORDER BY t.i) AS t
"""
_ALL = "SELECT, INSERT, UPDATE, DELETE"
# How many servers get all that is written, and which of them have it before a commit is told. (Subscribers to a logical
# publication cannot take over.)
_STANDBYS = b"""\
SELECT (SELECT count(*) FROM pg_stat_replication AS r WHERE NOT EXISTS (
    SELECT FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical'))::text,
    current_setting('synchronous_standby_names')
"""


def findings(facts: dict[str, Any], pooled: bool) -> list[Finding]:
    """What ``dibs doctor`` says of the settings."""
    version, loose, read_only = facts["version"], volatile(facts), facts["read_only"] != "off"
    return [
        Finding("reachable", True, f"PostgreSQL {version // 10000}.{version % 10000}"),
        Finding(
            "writable",
            not facts["recovery"] and not read_only,
            "this is a standby: name the primary in the URL, or all its servers (host1,host2)"
            if facts["recovery"]
            else f"transaction_read_only={facts['read_only']}"
            + (": is default_transaction_read_only on for this role or database?" if read_only else ""),
        ),
        Finding(
            "grants survive a crash of the server",
            not loose,
            f"fsync={facts['fsync']}, full_page_writes={facts['full_page_writes']}, "
            f"synchronous_commit={facts['synchronous_commit']}"
            + (f": set {loose}=on, or a crash may hand out a token twice" if loose else ""),
        ),
        Finding("names are kept exactly", facts["encoding"] == "UTF8", f"server_encoding={facts['encoding']}"),
        Finding(
            "waiters are woken by the release",
            not pooled,
            "LISTEN/NOTIFY" if not pooled else "behind a connection pooler waiters poll once a second",
        ),
    ]


def standbys(connection: Connection, deadline: Deadline) -> list[Finding]:
    """What it says of a failover; nothing of a server that is a standby itself."""
    if connection.facts["recovery"]:
        return []
    row = connection.run(_STANDBYS, (), deadline)
    standbys, synchronous = (text(row.get_value(0, column)) or "" for column in range(2))
    told = over_a_failover(int(standbys), synchronous, connection.facts)
    return [Finding("grants survive a failover", *told)]


def over_a_failover(standbys: int, synchronous: str, facts: dict[str, Any]) -> tuple[bool, str]:
    """Whether a standby that takes over has every grant that was told to somebody, and why."""
    commit = facts["synchronous_commit"]
    if synchronous and commit in ("on", "remote_apply", "remote_write"):
        return True, f"synchronous_standby_names={synchronous}, synchronous_commit={commit}"
    if synchronous:
        return False, f"synchronous_commit={commit} waits for no standby: set it on, or a failover forgets grants"
    if not standbys:
        return True, "there is no standby that could take over"
    return False, f"standbys that are told later: {standbys}. Set synchronous_standby_names, or it forgets grants"


def rights(connection: Connection, tables: Sequence[str], of_jobs: Sequence[str], deadline: Deadline) -> list[Finding]:
    """What it says of rights that are missing: the lock that doctor tries needs the fewest."""
    rows = connection.run(_LACKING, (texts([*tables, *of_jobs]),), deadline)
    lacking = {text(rows.get_value(r, 0)): text(rows.get_value(r, 1)) for r in range(rows.ntuples)}
    if all(lacking.get(table) == _ALL for table in of_jobs):  # a login that has no queues
        lacking = {table: lacking[table] for table in lacking if table not in of_jobs}
    told = "; ".join(f"{which} on {table}" for table, which in lacking.items())
    return [Finding("rights suffice", False, f"this login lacks {told}: GRANT that")] if told else []


def volatile(facts: dict[str, Any]) -> str:
    """The setting that lets a crash lose or spoil an acknowledged commit; "" when none does."""
    settings = "fsync", "full_page_writes", "synchronous_commit"
    return next((setting for setting in settings if facts[setting] == "off"), "")


def lost_by_a_crash(facts: dict[str, Any]) -> str:
    """What the settings let a crash take of what was acknowledged; "" when nothing, or nothing is known yet."""
    lossy = volatile(facts) if facts else ""
    # Without that one, what was committed is synced within 0.6 s, as the server is shipped.
    return lossy and (SECONDS if lossy == "synchronous_commit" else UNWRITTEN)
