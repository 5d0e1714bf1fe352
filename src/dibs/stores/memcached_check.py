"""What the settings and the past of a memcached leave of dibs's promises.

``facts`` are what the server answers to ``stats``, ``settings`` to ``stats settings``.
"""

from __future__ import annotations

from dibs.errors import SetupRequired, Unsupported
from dibs.store import Finding

SERVER_MIN = (1, 6, 10)
# The greatest value: claim, holder, the longest name and 4 KiB of info, with room to spare.
ITEM_BYTES_MIN = 16 * 1024


def findings(facts: dict[str, str], settings: dict[str, str]) -> list[Finding]:
    """What ``dibs doctor`` says."""
    limit_mb, used_mb = (int(facts.get(key, 0)) / 2**20 for key in ("limit_maxbytes", "bytes"))
    evictions, flushes = int(facts.get("evictions", 0)), int(facts.get("cmd_flush", 0))
    listed = settings.get("lru_crawler") != "no"
    full = f"{used_mb:.1f} of {limit_mb:.0f} MiB in use"
    if settings.get("evictions") != "off":
        room = f"{evictions} items were evicted since the server started, {full}. " + (
            "Give it more memory (-m), or dibs a memcached of its own"
            if evictions
            else "A full server drops leases before their time; with -M it would refuse new ones instead"
        )
    else:
        room = f"-M: a full server refuses new leases and renewals, it drops none; {full}"
    return [
        Finding("reachable", True, f"memcached {facts['version']}, up for {facts['uptime']} s"),
        Finding(
            "durable",
            False,
            "a restart forgets all leases, and their holders go on until their next renewal: use another store "
            "where two holders at once do harm",
        ),
        Finding("leases are not evicted", not evictions, room),
        Finding(
            "leases are not flushed",
            not flushes,
            f"flush_all was called {flushes} times since the server started"
            + (": every lease was lost each time. -F forbids it" if flushes else "; -F would forbid it"),
        ),
        Finding(
            "leases can be listed",
            listed,
            "by lru_crawler metadump, which reads every item of the server"
            if listed
            else "started with no_lru_crawler: `dibs ls` does not work, `dibs show NAME` does",
        ),
    ]


def refuse(facts: dict[str, str], settings: dict[str, str]) -> None:
    """Refuse what cannot keep a lease."""
    version = facts.get("version", "?")
    numbers = tuple(int(part) for part in version.split("_")[0].split(".") if part.isdigit())
    if not numbers or not {"pid", "uptime", "time"} <= facts.keys() or "cas_enabled" not in settings:
        raise Unsupported("this does not answer as memcached does: dibs must reach the server itself, not a proxy")
    if numbers < SERVER_MIN:
        raise Unsupported(f"dibs needs memcached {'.'.join(map(str, SERVER_MIN))} or later; this is {version}")
    if settings["cas_enabled"] != "yes":
        raise SetupRequired("this memcached was started with -C; without CAS numbers leases cannot be kept")
    if int(settings.get("item_size_max", ITEM_BYTES_MIN)) < ITEM_BYTES_MIN:
        raise SetupRequired(f"this memcached takes items of {settings['item_size_max']} bytes; start it with -I 16k")
