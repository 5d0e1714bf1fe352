"""Where the SQLite file is that is used when nobody says which."""

from __future__ import annotations

import os

from dibs.errors import SetupRequired


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
