"""What ``dibs doctor`` says about a ZooKeeper: what its servers tell of themselves, and who may change the nodes."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.store import Finding

if TYPE_CHECKING:
    from dibs.stores.zookeeper_link import Session, Settings


def findings(session: Session, settings: Settings, acls: list[Any]) -> list[Finding]:
    # Kazoo asks for these words without TLS only; the rest of what is said here does not need them.
    facts = _facts(session) if settings.tls is None else {}
    version = facts.get("Zookeeper version", "(it does not tell its version)").partition("-")[0]
    mode = facts.get("Mode", "it does not tell whether alone")
    return [
        Finding("reachable", True, f"ZooKeeper {version}, {mode}"),
        Finding(
            "grants survive a crash of the server",
            True,
            "one server: they are lost with its disk, and tokens begin anew"
            if mode == "standalone"
            else "they are on the disks of a majority; no server may run with forceSync=no",
        ),
        _ticks(facts, settings),
        _openness(settings, acls),
    ]


def _facts(session: Session) -> dict[str, str]:
    """What the server says, as far as its four letter words are allowed."""
    facts = {}
    for word, separator in ((b"srvr", ": "), (b"conf", "=")):
        for line in session.say(word).splitlines():
            key, found, value = line.partition(separator)
            if found:
                facts[key.strip()] = value.strip()
    return facts


def _ticks(facts: dict[str, str], settings: Settings) -> Finding:
    promise = "sessions last as long as the URL takes for granted"
    tick = facts.get("tickTime", "")
    if not tick.isdigit():
        words = f"tickTime={settings.tick_ms} is what the URL says; the server does not tell, unless conf stands in "
        return Finding(promise, True, words + "4lw.commands.whitelist")
    kept = int(tick) <= settings.tick_ms
    words = f"tickTime={tick}, maxSessionTimeout={facts.get('maxSessionTimeout', '?')}"
    return Finding(promise, kept, words + ("" if kept else f": write ?tickTime={tick} into the URL"))


def _openness(settings: Settings, acls: list[Any]) -> Finding:
    promise = "only this login can change leases" if settings.login else "who can change leases"
    if not any(acl.id.scheme == "world" and acl.perms & ~1 for acl in acls):
        return Finding(promise, True, ", ".join(f"{acl.id.scheme}:{acl.id.id.partition(':')[0]}" for acl in acls))
    words = f"{settings.root} is open to everybody who reaches the server"
    if settings.login:
        return Finding(
            promise, False, f"{words}, made without a login: `setAcl -R {settings.root} auth::cdrwa` closes it"
        )
    return Finding(promise, True, f"{words}; user:password in the URL makes nodes that only this login can use")
