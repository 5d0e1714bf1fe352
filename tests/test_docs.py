"""The documentation is true: it is printed from the code, examples run, commands parse, links lead somewhere.

Blocks of Python on a page run in order, in one namespace, in an empty folder, with DIBS_URL naming a new SQLite file.
Their `time.sleep` is short. A block marked `python no-run` is only compiled. Every `dibs …` in a block of shell or
crontab, or in a list of YAML, is parsed by the real parser, and not run.
"""

import builtins
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import pytest

import dibs
from dibs import cli
from dibs.testing.conformance import runs
from tests.callers import raw
from tests.command_line import until

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")), *sorted(DOCS.rglob("*.md"))]
WRITTEN = [page for page in PAGES if "reference" not in page.parts]
SHELLS = {"bash", "sh", "console", "cron", "crontab", "ini", "systemd", "yaml"}
HOW_TO_LINES_MAX = 120
SLEEP_MAX_S = 0.01

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
every_written_page = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))


class Block(NamedTuple):
    """A fenced block of a page; ``line`` is the page's line before its first."""

    language: str
    words: list[str]
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    fence: re.Match[str] | None = None
    start = 0
    lines: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if fence is None:
            fence = re.match(r"(`{3,})\s*(.*)", line)
            start, lines = number, []
        elif line.startswith(fence[1]):
            words: list[str] = str(fence[2]).split()
            yield Block(words[0] if words else "", words[1:], start, "\n".join(lines))
            fence = None
        else:
            lines.append(line)
    assert fence is None, f"{page}:{start}: a block without an end"


def prose(page: Path) -> str:
    """The page without its blocks and its `code`."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Where the page's links lead that stay in this repository."""
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def test_reference_pages_are_up_to_date() -> None:
    """`make docs` would change nothing."""
    command = [sys.executable, str(ROOT / "scripts" / "print_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that is there, and a heading that is on it."""
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, and there is no such heading"


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links to every page of the documentation."""
    index = DOCS / "README.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    missing = [str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents and page not in linked]
    assert missing == ["README.md"], "pages that the index does not link to"


@every_page
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples in Python do what they say; what is marked no-run is at least Python."""
    monkeypatch.setenv("DIBS_URL", f"sqlite:///{tmp_path}/locks.db")
    monkeypatch.chdir(tmp_path)
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, SLEEP_MAX_S)))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks(page):
            if block.language == "python":
                # Empty lines in front, so that a traceback names the line of the page.
                code = compile("\n" * block.line + block.text, str(page), "exec")
                if "no-run" not in block.words:
                    exec(code, namespace)
    finally:
        for thing in namespace.values():
            close = getattr(thing, "close", None)
            if close is not None and not isinstance(thing, type) and thing is not builtins:
                close()


def test_the_tests_on_the_page_about_tests_pass(tmp_path: Path) -> None:
    """What the page on testing shows are tests: pytest runs them with the settings that it shows, and all pass."""
    shown = list(blocks(DOCS / "how-to" / "test-your-program.md"))
    tests = "\n".join(block.text for block in shown if block.language == "python")
    (tmp_path / "test_shown.py").write_text(tests, "utf-8")
    (tmp_path / "pytest.ini").write_text(next(block.text for block in shown if block.language == "ini"), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shown.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tests.count('def test_')} passed" in done.stdout, done.stdout


def commands(block: Block) -> Iterator[list[str]]:
    """The arguments of each `dibs …` in a block of shell, or in a list of YAML."""
    if block.language == "yaml":
        yield from (json.loads(line)[1:] for line in re.findall(r"\[\"dibs\".*\]", block.text))
        return
    for line in block.text.replace("\\\n", " ").splitlines():
        # What the shell would put in: a number does where a number is asked for.
        filled = re.sub(r"\$\([^)]*\)|\$\w+", "1", line.removeprefix("$ "))
        lexer = shlex.shlex(filled, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;<>"):
                names = [PurePath(each.rpartition("=")[2]).name for each in words]
                if "dibs" in names and (block.language in ("bash", "sh") or _is_command(words, names.index("dibs"))):
                    yield words[names.index("dibs") + 1 :]
                words = []
            else:
                words.append(word)


def _is_command(words: list[str], index: int) -> bool:
    return any(word in cli.COMMANDS for word in words[index + 1 :])


@pytest.mark.parametrize("place, fixture", list(enumerate(["postgres_url", "mysql_url", "sqlite_url"])))
def test_the_statement_that_shows_who_holds_what(place: int, fixture: str, request: pytest.FixtureRequest) -> None:
    """It shows who holds a name, and not who held it until it was released, or died with it."""
    url = request.getfixturevalue(fixture)
    (block,) = [block for block in blocks(DOCS / "how-to" / "see-and-mend.md") if block.language == "sql"]
    select, *ends = block.text.splitlines()
    end = ends[place].removeprefix("-- ").partition(";")[0]
    with dibs.connect(url) as client:
        died = client.lock("died", ttl=client.capabilities.ttl_min_s, renew=False).acquire()
        with client.lock("released"):
            pass
        with client.lock("held", info={"n": 1}) as lease, closing(raw(url)) as connection:
            assert died is not None
            until(lambda: client.holder("died") is None)
            cursor = connection.cursor()

            def shown() -> list[Any]:
                connection.rollback()
                cursor.execute(f"{select} {end}")
                return list(cursor.fetchall())

            until(lambda: len(shown()) == 1)  # a program's own clock may be a few milliseconds behind
            ((name, holder, *_, token, info),) = shown()
    assert (name if isinstance(name, str) else name.decode()).endswith(":held")
    assert (holder, token) == (lease.holder, lease.fencing_token)
    assert "n" in str(info)


@every_written_page
def test_commands_parse(page: Path) -> None:
    """Every `dibs …` that a page shows is one that the command line takes."""
    for block in blocks(page):
        if block.language in SHELLS:
            for words in commands(block):
                try:
                    args = cli._parse(words)
                except cli.CommandError as error:
                    pytest.fail(f"{page.name}, line {block.line}: dibs {shlex.join(words)}: {error}")
                assert args is not None, f"{page.name}: dibs {shlex.join(words)} names no command"


@every_page
def test_nothing_is_left_to_be_written(page: Path) -> None:
    """No page says that it is unfinished."""
    text = page.read_text("utf-8")
    found = re.findall(r"\b(?:TODO|FIXME|XXX|TBD|lorem ipsum|coming soon)\b", text, re.IGNORECASE)
    assert not found, f"{page.name}: {found}"


@every_written_page
def test_files_that_are_named_are_there(page: Path) -> None:
    """A test, script or example that a page names exists."""
    named = re.findall(r"`((?:tests|scripts|examples|src|benchmarks)/[\w./-]*)`", page.read_text("utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_how_to_pages_are_short() -> None:
    """A how-to page is read while one is busy with something else."""
    long = {page.name: len(page.read_text("utf-8").splitlines()) for page in (DOCS / "how-to").glob("*.md")}
    assert {name: lines for name, lines in long.items() if lines > HOW_TO_LINES_MAX} == {}


def test_promises_are_checked_where_the_page_says() -> None:
    """The table of promises says "cases" exactly where the conformance suite has some."""
    page = (DOCS / "explanation" / "safety.md").read_text("utf-8")
    rows = re.findall(r"^\| (P\d+) \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    claimed = {promise for promise, where in rows if "cases" in where}
    covered = {promise for run in runs() for promise in re.findall(r"\bP\d+\b", run.case.promise)}
    assert claimed == covered & {promise for promise, _ in rows}
    assert covered <= {promise for promise, _ in rows}, "the suite checks promises that the page does not list"


def test_the_glossary_is_in_order() -> None:
    """Words are found where one looks for them."""
    words = re.findall(r"^\*\*(.+?)\*\*", (DOCS / "explanation" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    assert words == sorted(words, key=lambda word: word.partition(",")[0].lower())
    assert len(words) > 50
