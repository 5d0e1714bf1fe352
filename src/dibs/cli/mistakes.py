"""What is said of words on the command line that no command takes: what was perhaps meant. Loaded when it is needed."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.errors import did_you_mean

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def mistake(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """What is wrong with the words that the parser of a command did not know."""
    options = parser._option_string_actions
    name = unknown[0].partition("=")[0]
    if name in options:
        return f"{name!r} is an option, and stands behind --: put it before that"
    if name.startswith("-"):
        return f"there is no option {name!r}{did_you_mean(name, options)}"
    return f"{unknown[0]!r} is one argument too many"
