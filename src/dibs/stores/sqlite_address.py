"""Where the SQLite file is that is used when nobody says which."""

from __future__ import annotations

import os


def default_path() -> str:
    """The file used when no URL is given: in the user's state directory (XDG; on macOS, Application Support)."""
    home = os.path.expanduser("~")
    state = os.environ.get("XDG_STATE_HOME")
    if not state or not os.path.isabs(state):
        on_mac = os.uname().sysname == "Darwin"
        parts = ("Library", "Application Support") if on_mac else (".local", "state")
        state = os.path.join(home, *parts)
    return os.path.join(state, "dibs", "dibs.db")
