"""Tables on the command line, as wide as the terminal, and what ``dibs --help`` shows."""

from __future__ import annotations

import sys

import pytest

import dibs as library
from dibs.cli import COMMANDS
from dibs.cli.looks import table
from dibs.cli.overview import EPILOG
from tests.command_line import Dibs

HEADERS = ("NAME", "TOKEN", "INFO")
LONG = '{"note": "' + "x" * 200 + '"}'


def test_info_is_cut_to_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long info ends with an ellipsis where the terminal ends; what is shorter, and the rest of the row, is whole."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    lines = table(HEADERS, [("a" * 30, 1, LONG), ("b", 2, "{}")]).splitlines()
    assert [len(lines[1]), lines[1][-1]] == [60, "…"]
    assert lines[1].startswith("a" * 30 + " ")
    assert lines[2].endswith("  {}")
    monkeypatch.setenv("COLUMNS", "20")
    assert '{"note": "x…' in table(HEADERS, [("a" * 30, 1, LONG)])


def test_info_is_whole_where_a_program_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe nothing is cut, whatever COLUMNS says; nor is the last column of another table."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert LONG in table(HEADERS, [("a", 1, LONG)])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert LONG in table(("ID", "PAYLOAD"), [(1, LONG)])


def test_a_line_stands_between_pauses_and_table(dibs: Dibs, client: library.Client) -> None:
    """`dibs top` shows the pauses, a line without anything, and who holds what; without pauses no such line."""
    with client.lock("deploy/web"):
        assert dibs("top", "--once").stdout.startswith("NAME ")
        dibs("pause", "deploy/*")
        pause, between, headers, *_ = dibs("top", "--once").stdout.splitlines()
        assert pause.startswith("'deploy/*' is paused by")
        assert between == ""
        assert headers.startswith("NAME ")


def test_the_examples_show_how_to_measure() -> None:
    """`dibs --help` has an example of `dibs bench`, and none of a command that does not exist."""
    shown = [line.split()[1] for line in EPILOG.splitlines() if line.startswith("  dibs ")]
    assert "bench" in shown
    assert set(shown) <= set(COMMANDS)
