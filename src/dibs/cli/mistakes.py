"""What is said of words on the command line that no command takes: what was perhaps meant. Loaded when it is needed."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.errors import did_you_mean

if TYPE_CHECKING:
    import argparse
    from collections.abc import Container, Sequence


def mistake(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """What is wrong with the words that the parser of a command did not know."""
    options = parser._option_string_actions
    name = unknown[0].partition("=")[0]
    if name in options:
        return f"{name!r} is an option, and stands behind --: put it before that"
    if name.startswith("-"):
        return _no_option(parser, unknown[0])
    return f"{unknown[0]!r} is one argument too many"


def taken_for_option(parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    """What is wrong with the first word that looks like an option and is none, if there is one."""
    options = parser._option_string_actions
    before = ""
    for word in words:
        if word == "--":
            return None
        name = word.partition("=")[0]
        if name.startswith("-") and name != "-" and name not in options and not _is_joined(options, word):
            if before in options and options[before].nargs is None:
                return f"{word!r} is taken for an option: write {before}={word} if it belongs to that"
            if not parser._negative_number_matcher.match(word):
                return _no_option(parser, word)
        before = word
    return None


def _is_joined(options: Container[str], word: str) -> bool:
    """Whether it is a short option with its value, as in -n5."""
    return word[1] != "-" and word[:2] in options


def _no_option(parser: argparse.ArgumentParser, word: str) -> str:
    name = word.partition("=")[0]
    near = did_you_mean(name, parser._option_string_actions)
    if (
        not near
        and not getattr(parser, "commands", None)
        and any(not action.option_strings for action in parser._actions)
    ):
        command = " -- COMMAND" if getattr(parser, "takes_command", False) else ""
        near = f"; what begins with - and is none stands behind the options and --: {parser.prog} -- {word}{command}"
    return f"there is no option {name!r}{near}"
