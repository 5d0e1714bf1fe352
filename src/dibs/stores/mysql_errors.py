"""What an error of MySQL or MariaDB means, by its code."""

from __future__ import annotations

from dibs.errors import SetupRequired, StoreUnavailable
from dibs.store import StoreBusy, TakesNoWrites
from dibs.stores.mysql_drivers import CR_SSL, ServerError
from dibs.stores.tables import TablesMissing

# Those of the client library are the first four, which both drivers use.
_CONNECTION_LOST = frozenset((2006, 2013, 2027, 2055))
_NO_TABLE = frozenset((1146, 1054))
# A row that somebody else made, perhaps at the same moment; and somebody else's locks.
_SAME_KEY = 1062
_TRY_AGAIN = frozenset((1205, 1213, 3572))
_TRIGGER_THERE = 1359
_READ_ONLY = frozenset((1290, 1792, 1836))
_STATEMENT_BINLOG = frozenset((1665,))
_NO_MAJORITY = 1047
# (Also for an account that may come by TLS only.)
_ACCESS_DENIED = 1045
_LOGIN = frozenset((1044, _ACCESS_DENIED, 1049, 1130, 1251, 1524, 1698, 1820, 1862, 2054, 2059, 2061, 3118, 4151))
_RIGHTS = frozenset((1142, 1143, 1227, 1370, 1419))
_TLS = frozenset((CR_SSL, 3159))
# Refused before anything was done: too many connections, shutting down, a Galera node outside the majority, disk full,
# a statement that ran into a limit or was killed, a connection that MySQL had ended because nothing happened on it.
_NOT_DONE = frozenset((1021, 1040, _NO_MAJORITY, 1053, 1114, 1203, 1226, 1317, 1969, 3024, 4031))


class ThereAlready(Exception):
    """The trigger that was to be made is there."""


class SameKey(StoreBusy):
    """A row with the same unique key is there."""


def meant(error: ServerError, shown: str, *, may_be_plain: bool, wrote: bool) -> tuple[Exception, bool]:
    """What it means, and whether nothing more can be said on that connection.

    ``may_be_plain``: it is not sure to be in TLS. ``wrote``: something of the call under way has been applied.
    """
    code = error.code
    text = f"{shown}: {error}"
    if code in _NO_TABLE:
        return TablesMissing(text), False
    if code == _TRIGGER_THERE:
        return ThereAlready(text), False
    if code == _SAME_KEY:
        return SameKey(text), False
    if code in _TRY_AGAIN:
        return StoreBusy(text), False
    if code in _READ_ONLY:  # behind one name there may be another server now
        read_only = TakesNoWrites(
            f"{text}. Is this a replica? Name the primary in the URL. Or does an option of the server, or of this "
            "session, forbid it?",
            maybe_applied=wrote,
        )
        return read_only, True
    if code in _STATEMENT_BINLOG:
        return SetupRequired(f"{text}. Set binlog_format to ROW or MIXED"), False
    if code in _RIGHTS:
        return SetupRequired(text), False
    if code in _LOGIN:
        hint = ""
        if code == _ACCESS_DENIED and may_be_plain:
            hint = ", and whether that account asks for TLS (ssl_mode=required)"
        return SetupRequired(f"{text}. Check user, password and database in the URL{hint}"), True
    if code in _TLS:
        return SetupRequired(f"{text}. Check ssl_mode, ssl_ca, ssl_cert and ssl_key in the URL"), True
    if code == _NO_MAJORITY:
        text += ". Is this node of Galera cut off from the majority of them, or about to join?"
    lost = code == 0 or code in _CONNECTION_LOST
    return StoreUnavailable(text, maybe_applied=lost or wrote), lost or code in _NOT_DONE


def lacks_right(error: BaseException) -> bool:
    """Whether the login may not do what was to be done."""
    return isinstance(error.__cause__, ServerError) and error.__cause__.code in _RIGHTS


def refuses(error: StoreUnavailable) -> bool:
    """Whether the server refused the statement itself, for what it says or would write."""
    code = error.__cause__.code if isinstance(error.__cause__, ServerError) else 0
    return code not in _NOT_DONE | _READ_ONLY and (1000 <= code < 2000 or code >= 3000)
