"""The list of benchmarks: each work says what it measures, and the page about them names them all.

Read, not imported: a work needs the packages it is run beside, and a test does not.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"


def _listed() -> dict[str, str]:
    """The works of ``python -m benchmarks``, and the names of their functions."""
    for node in ast.walk(ast.parse((FOLDER / "__main__.py").read_text("utf-8"))):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "WORKS":
            assert isinstance(node.value, ast.Dict)
            names = [ast.literal_eval(key) for key in node.value.keys if key is not None]
            return dict(zip(names, map(ast.unparse, node.value.values), strict=True))
    raise AssertionError("benchmarks/__main__.py has no WORKS")


def _returns_nothing(node: ast.FunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns) == "None"


def _functions() -> dict[str, str | None]:
    """The functions that are given a bench and nothing else, with their docstrings."""
    found = {}
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if (
                isinstance(node, ast.FunctionDef)
                and ast.unparse(node.args) == "bench: Bench"
                and _returns_nothing(node)
            ):
                found[node.name] = ast.get_docstring(node)
    return found


WORKS = _listed()


@pytest.mark.parametrize("work", WORKS)
def test_a_work_says_what_it_measures(work: str) -> None:
    """What ``--list`` prints of it; it is called as its function is."""
    function = WORKS[work]
    assert function == work.replace("-", "_")
    assert _functions()[function], f"{function} has no docstring"


def test_works_are_listed() -> None:
    """Whatever can be run is in the list."""
    public = {name for name in _functions() if not name.startswith("_")}
    assert public == set(WORKS.values())


def test_the_page_names_every_work() -> None:
    """The table of the page about benchmarks has all works, and no others."""
    page = (ROOT / "docs" / "explanation" / "benchmarks.md").read_text("utf-8")
    table = page.partition("## What is measured")[2].partition("\n\n*")[0]
    named = [name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    assert sorted(named) == sorted(WORKS)


def test_the_table_of_the_page_is_whole() -> None:
    """Each row of the page's figures says whose they are: dibs's and, where there are peers, theirs."""
    page = (ROOT / "docs" / "explanation" / "benchmarks.md").read_text("utf-8")
    figures = page.partition("<!-- figures: begin -->")[2].partition("<!-- figures: end -->")[0]
    head, line, *rows = [row.strip("|").split("|") for row in figures.splitlines() if row.startswith("|")]
    assert [cell.strip() for cell in head[:3]] == ["work", "case", "who"]
    assert set("".join(line)) <= set("-:")
    assert len(rows) > len(WORKS)
    for row in rows:
        assert len(row) == len(head), row
        assert row[2].strip().strip("-"), row
    assert {row[0].strip() for row in rows} - {""} == set(WORKS)


def test_what_is_run_beside_dibs_is_installed() -> None:
    """Each package of which the report tells the version comes with what ``make bench`` installs."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    compiled = (ROOT / "scripts" / "setup_mysqlclient.sh").read_text("utf-8")
    brought: set[str] = set()
    for name, extra in re.findall(r"[\"']([\w-]+)(?:\[(\w+)\])?[>;]", extras + compiled):
        brought |= {name, f"{name}-{extra}"}
    tree = ast.parse((FOLDER / "report.py").read_text("utf-8"))
    (packages,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES"
    )
    assert set(packages) - brought == set()
