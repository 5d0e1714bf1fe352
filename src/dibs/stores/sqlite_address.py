"""Where an SQLite file is: which paths a URL may have, and which file it is when nobody says."""

from __future__ import annotations

import os

from dibs.errors import InvalidOption, SetupRequired


def check_path(path: str) -> str:
    """Return the path of a URL; raises InvalidOption for what can be no file, or not the one that was meant."""
    if not path or path == ":memory:" or path.endswith("/"):
        raise InvalidOption(
            "an SQLite URL names a file: sqlite:////absolute/path.db or sqlite:///relative.db; "
            "memory:// keeps leases in this process only"
        )
    if path.startswith("~"):  # in each working directory there would be a folder of this name
        raise InvalidOption("in an SQLite URL ~ is no home directory: write it out (or ./~ for a file that begins so)")
    if "\0" in path:
        raise InvalidOption("the path of an SQLite file has no NUL characters")
    return path


def default_path() -> str:
    """The file used when no URL is given: in the user's state directory (XDG; on macOS, Application Support).

    Raises SetupRequired where the user has none: processes that each made up a place would not exclude each other.
    """
    state = os.environ.get("XDG_STATE_HOME")
    if not state or not os.path.isabs(state):
        on_mac = os.uname().sysname == "Darwin"
        parts = ("Library", "Application Support") if on_mac else (".local", "state")
        state = os.path.join(_home(), *parts)
    return os.path.join(state, "dibs", "dibs.db")


def _home() -> str:
    # Not os.path.expanduser(): where there is no home it answers "~", and "/" for an empty $HOME.
    home = os.environ.get("HOME") or _home_in_passwd()
    if not os.path.isabs(home):
        raise SetupRequired(
            f"user {os.getuid()} has no home directory to keep leases in: set $DIBS_URL, or give a URL (dibs --url), "
            "for example sqlite:////var/lib/app/dibs.db"
        )
    return home


def _home_in_passwd() -> str:
    try:
        from pwd import getpwuid

        return getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):  # as in a container that runs under any number
        return ""
