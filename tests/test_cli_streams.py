"""``dibs`` with standard streams that are closed, full, read by nobody, or of an encoding that knows few letters."""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

import dibs as library
from tests.command_line import DIBS, Dibs

# One of every kind of answer: tables, JSON at once and by the line, SQL, one line, help.
ANSWERS = (
    ("--help",),
    ("--version",),
    ("run", "--help"),
    ("ls",),
    ("ls", "--json"),
    ("show", "x"),
    ("show", "x", "--json"),
    ("show", "free"),
    ("top",),
    ("top", "--json"),
    ("history", "x"),
    ("pause",),
    ("queues", "--json"),
    ("jobs", "q"),
    ("jobs", "q", "1", "99"),
    ("dead", "q"),
    ("take", "q"),
    ("advise", "--metrics"),
    ("put", "q", "1"),
    ("purge", "--older-than", "1d"),
    ("setup",),
    ("schema",),
    ("doctor",),
    ("doctor", "--json"),
    ("bench", "--only", "ping", "--seconds", "50ms"),
)


@pytest.fixture(autouse=True)
def _something_to_show(client: library.Client) -> Iterator[None]:
    client.setup(history=10)
    client.queue("q").put({"to": "ann"})
    with client.lock("x", info={"why": "é"}):
        yield


def shell(dibs: Dibs, redirection: str, *words: str, unbuffered: bool = False, **options: Any) -> Any:
    """Run it with its streams redirected by a shell."""
    env = {**dibs.env, "PYTHONUNBUFFERED": "1"} if unbuffered else dibs.env
    files = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    script = f"exec {shlex.join([*DIBS, *words])} {redirection}"
    return subprocess.run(["sh", "-c", script], env=env, cwd=dibs.folder, text=True, timeout=60, **files)


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_an_answer_that_cannot_be_written_is_74(dibs: Dibs, words: tuple[str, ...]) -> None:
    """A disk that is full, and stdout that is closed: one line on stderr, and no success."""
    for redirection, unbuffered in ((">/dev/full", False), (">/dev/full", True), (">&-", False)):
        done = shell(dibs, redirection, *words, unbuffered=unbuffered)
        assert (redirection, done.returncode) == (redirection, 74)
        assert done.stdout == ""
        assert [line[:6] for line in done.stderr.splitlines()][-1:] == ["dibs: "]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ANSWERS, ids=" ".join)
def test_a_reader_that_has_gone_ends_it_without_a_word(dibs: Dibs, words: tuple[str, ...]) -> None:
    """As any other program in a pipeline that writes to nobody."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        for unbuffered in (False, True):
            done = shell(dibs, "", *words, unbuffered=unbuffered, stdout=write_fd)
            assert done.returncode == 141
            assert done.stderr in ("", "dibs: not in 'q', or not any more: 99\n")
    finally:
        os.close(write_fd)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"])
def test_errors_that_cannot_be_told_keep_their_code(dibs: Dibs, redirection: str) -> None:
    """Whoever reads nothing has the exit code still."""
    for words, code in (
        (("nonsense",), 64),
        (("run", "x", "--nowait", "--", "true"), 75),
        (("break", "x"), 64),
        (("--url", "redis://127.0.0.1:1", "ls"), 69),
        (("cancel", "q", "99", "--namespace", "other"), 74 if ">" in redirection.partition("2")[0] else 1),
    ):
        assert (words, shell(dibs, redirection, *words).returncode) == (words, code)


def test_a_name_in_an_encoding_without_its_letters(dibs: Dibs) -> None:
    """It is escaped, and JSON is JSON."""
    dibs.env["PYTHONIOENCODING"] = "ascii"
    assert '{"why": "\\xe9"}' in dibs("ls").stdout
    assert "\\u2026" in dibs("run", "--help").stdout
    for words in (("ls", "--json"), ("show", "x", "--json"), ("top", "--json", "--once")):
        assert "é" in json.dumps(json.loads(dibs(*words).stdout), ensure_ascii=False)
    assert dibs("put", "letters", '"é"').returncode == 0
    assert json.loads(dibs("take", "letters").stdout)["payload"] == "é"


# -- commands that run one ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [("run", "y"), ("elect", "y"), ("claim", "y", "--ids", "ids")], ids=lambda words: words[0]
)
@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_a_command_gets_the_streams_that_dibs_has(dibs: Dibs, words: tuple[str, ...], closed: str) -> None:
    """A closed one is closed, and not the database or whatever else dibs opened, into which the command would write."""
    (dibs.folder / "ids").write_text("1\n")
    own = "02" if words[0] == "claim" else ""  # in between is dibs
    look = "for n in 0 1 2; do [ -e /proc/$$/fd/$n ] && echo $n; done > seen; echo out; echo err >&2; exit 0"
    redirection = " ".join({"0": "<&-", "1": ">&-", "2": "2>&-"}[fd] for fd in closed)
    done = shell(dibs, redirection, *words, "--", "bash", "-c", look)
    assert done.returncode == 0
    # (While `seen` is written it is stdout of the shell, closed or not.)
    assert set((dibs.folder / "seen").read_text().split()) - {"1"} == {*"02"} - ({*closed} - {*own})
    assert done.stdout == ("" if "1" in closed else "out\n")
    assert ("err\n" in done.stderr) is ("2" not in closed)
    assert dibs("ls").returncode == 0


def test_an_internal_error_is_70(dibs: Dibs) -> None:
    """One line, which says how to see where it was."""
    dibs.env["PYTHONPATH"] = os.pathsep.join([str(dibs.folder), *dibs.env.get("PYTHONPATH", "").split(os.pathsep)])
    (dibs.folder / "sitecustomize.py").write_text(
        "import dibs.client\n"
        "def leases(*args): raise ZeroDivisionError('planted')\n"
        "dibs.client.Client.leases = leases\n"
    )
    done = dibs("ls")
    assert done.returncode == 70
    assert done.stderr.count("\n") == 1
    assert "planted" in done.stderr
    assert "leases" in dibs("ls", env={**dibs.env, "PYTHONDEVMODE": "1"}).stderr


# -- what others have written ------------------------------------------------------------------------------------------


def test_what_others_wrote_moves_no_cursor(dibs: Dibs, client: library.Client) -> None:
    """Escapes, new lines and changes of direction in a note, an info, an error, a key and a name are shown as such."""
    evil = "\x1b[2J\x9b1m\u202e\x07"
    client.pause("x", f"note{evil}\n{evil}")
    queue = client.queue("q", max_tries=1)
    queue.put({"evil": evil}, key="k\u202e")
    with queue.take(10) as batch:
        for job in batch:
            job.fail(f"error{evil}\n{evil}", dead=True)
    with client.lock("y\u202e", info={"evil": evil}):
        for words in (
            ("ls",), ("show", "y\u202e"), ("show", "x"), ("top", "--once"), ("history", "y\u202e"),
            ("break", "y\u202e"),
            ("jobs", "q"), ("jobs", "q", "2"), ("dead", "q"), ("pause",), ("queues",),
            ("run", "x", "--nowait", "--", "true"), ("run", "y\u202e", "--nowait", "--", "true"),
        ):  # fmt: skip
            done = dibs(*words)
            assert done.stdout + done.stderr
            assert not [char for char in done.stdout + done.stderr if not (char.isprintable() or char == "\n")], words
