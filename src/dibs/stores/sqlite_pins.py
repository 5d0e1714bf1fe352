"""How a lease in SQLite is pinned: it is renewed in a transaction, which from then on has a lock on the whole file."""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import boot_now
from dibs.errors import InvalidOption
from dibs.store import Pin
from dibs.stores.identifiers import quoted_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline
    from dibs.store import Renew
    from dibs.stores.sqlite_file import SQLiteFile


def pin(
    file: SQLiteFile, request: Renew, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline
) -> Pin:
    """The statements for that connection, or InvalidOption where it does not have our file open."""
    if files is None:
        raise InvalidOption(f"leases are kept in SQLite, and that connection is to {dialect}: use dibs.fencing")
    with file.in_use:
        file.open(deadline)
    alias = alias_of(file, files, "the leases", "use dibs.fencing")
    table = f"{quoted_table(alias, 'schema')}.{file.names['lease']}"
    name, claim_id = (text.replace("'", "''") for text in (request.name, request.claim_id))
    now = boot_now()
    ours = (
        f"WHERE name = '{name}' AND slot = {request.slot:d} AND claim_id = '{claim_id}' AND boot = {file.boot:d}"
        f" AND expires_boot > {now!r} RETURNING slot"
    )

    def given_back(keep: float) -> str:
        if keep > 0:
            return f"UPDATE {table} SET claim_id = '', expires_boot = {boot_now() + keep!r} {ours}"
        return f"UPDATE {table} SET claim_id = NULL, holder = NULL, info = NULL, expires_boot = {now!r} {ours}"

    lock = f"UPDATE {table} SET expires_boot = max(expires_boot, {now + request.ttl!r}) {ours}"
    return Pin(lock, decides=True, release=given_back)


def alias_of(file: SQLiteFile, files: Sequence[tuple[Any, ...]], what: str, otherwise: str) -> str:
    """What a connection with these files calls ours, in which ``what`` are kept, or InvalidOption."""
    alias = next((alias for _, alias, path in files if path and _same(path, file.path)), None)
    if alias is None:
        raise InvalidOption(
            f"that connection does not have the file {file.path!r} open, in which {what} are kept: "
            f"ATTACH it, keep {what} in the connection's own file, or {otherwise}"
        )
    # (A connection may be told to bring text as bytes.)
    return alias.decode() if isinstance(alias, bytes) else str(alias)


def _same(path: str | bytes, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
