"""What an error of PostgreSQL means, by its code: what dibs raises for it, and whether its connection is over."""

from __future__ import annotations

from psycopg import pq

from dibs._typing import TYPE_CHECKING
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.store import RowBusy, StoreBusy, TakesNoWrites
from dibs.stores.postgres_sql import NEWER, VERSION
from dibs.stores.tables import TablesMissing, newer

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

# Classes of errors that are not about what a statement says or would write; a trigger raises any of the others.
_NOT_REFUSED = frozenset(("08", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "XX"))


class Refused(StoreUnavailable):
    """The server refuses what a statement would do: a value, or a rule or trigger of a table. Nothing was changed."""


def told(result: PGresult) -> tuple[str, str]:
    """The code of an error, and what the server said; both empty where there was none."""
    code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    return code, (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode("utf-8", "replace")


def meant(result: PGresult, server: str, planned: bool) -> tuple[Exception, bool]:
    """What an error of this server means, and whether nothing more can be said on that connection.

    ``planned``: the statements are those of earlier calls.
    """
    code, words = told(result)
    text = f"{server}: {words} ({code})"
    if code in ("42P01", "3F000", "42703"):  # no such table, schema, column
        return TablesMissing(text), False
    if code == "23502" and result.error_field(pq.DiagnosticField.COLUMN_NAME) == b"fencing_token":
        return TablesMissing(f"this login sees no floor that the tokens of new names would begin above ({text})"), False
    if code == NEWER:
        return newer(int(words), VERSION), False
    if code == "55P03":
        return RowBusy(text), False
    # Deadlock, serialization; a row with that key was made meanwhile, and is seen next time.
    if code in ("40P01", "40001", "23505"):
        return StoreBusy(text), False
    if code == "25006":  # behind one name there may be another server now, and a setting counts for new connections
        error = TakesNoWrites(
            f"{text}. Is this a standby? Name the primary in the URL, or all its servers (host1,host2). "
            "Or is default_transaction_read_only on for this role or database?",
            maybe_applied=False,
        )
        return error, True
    if code == "42501":
        return SetupRequired(f"{text}. `dibs doctor` says which rights this login lacks"), False
    if code == "26000" or (code == "0A000" and planned):
        # The statement that was prepared is gone, or its columns have other types now: somebody has changed a
        # table. It did nothing, but another statement of this call may have.
        return StoreUnavailable(text), True
    if code and (code[:2] not in _NOT_REFUSED or code == "55000"):
        return Refused(text, maybe_applied=False), False
    return StoreUnavailable(text, maybe_applied=not code or code.startswith(("08", "57P"))), code.startswith("57P")
