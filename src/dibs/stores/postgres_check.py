"""What the settings of a PostgreSQL server leave of dibs's promises.

``facts`` are what it told of itself when it was connected: see dibs.stores.postgres_link.
"""

from __future__ import annotations

from dibs._typing import Any
from dibs.store import Finding


def findings(facts: dict[str, Any], pooled: bool) -> list[Finding]:
    """What ``dibs doctor`` says."""
    version, loose, read_only = facts["version"], volatile(facts), facts["read_only"] != "off"
    return [
        Finding("reachable", True, f"PostgreSQL {version // 10000}.{version % 10000}"),
        Finding(
            "writable",
            not facts["recovery"] and not read_only,
            "this is a standby: name the primary, or add target_session_attrs=read-write to the URL"
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


def volatile(facts: dict[str, Any]) -> str:
    """The setting that lets a crash lose or spoil an acknowledged commit; "" when none does."""
    settings = "fsync", "full_page_writes", "synchronous_commit"
    return next((setting for setting in settings if facts[setting] == "off"), "")
