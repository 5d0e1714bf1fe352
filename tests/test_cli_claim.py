"""``dibs claim``: which ids it reads, and what it tells of them; what becomes of its command is in test_cli_work."""

import json
import subprocess
from pathlib import Path

import pytest

import dibs as library
from tests.command_line import DIBS, Dibs


def claimed(dibs: Dibs, data: bytes) -> list[str]:
    """The lines that the command reads."""
    (dibs.folder / "ids").write_bytes(data)
    done = dibs("claim", "s", "--ids", "ids", "--json", "--", "cat")
    lines = done.stdout.split("\n")[:-1]
    assert json.loads(done.stderr) == {"won": len(lines), "busy": 0, "lost": 0, "exit_code": 0}
    return lines


@pytest.mark.parametrize(
    "data, ids",
    [
        (b'a b\n"q"\n\'s\n--x\n', ["a b", '"q"', "'s", "--x"]),
        (b"a\r\nb\r\n\r\nc", ["a", "b", "c"]),
        (b"a\nb\na\n\n  \n", ["a", "b"]),
        (b"\xef\xbb\xbf1\n2\n", ["1", "2"]),
        ("a\u2028b\nc\u2029\n".encode(), ["a\u2028b", "c\u2029"]),
        (b" a\nb \n", [" a", "b "]),
    ],
)
def test_an_id_is_a_line(dibs: Dibs, data: bytes, ids: list[str]) -> None:
    """Whatever is in it; once, though it stands there twice; of Windows, too, and without a last new line."""
    assert claimed(dibs, data) == ids


@pytest.mark.parametrize("data", [b"a\x0bb\n", b"a\x1eb\n", "a\x85b\n".encode(), b"a\rb\n", b"\xff\n", b"x" * 300])
def test_what_can_be_no_id_is_wrong_usage(dibs: Dibs, data: bytes) -> None:
    """It is neither taken apart nor left out."""
    (dibs.folder / "ids").write_bytes(data)
    done = dibs("claim", "s", "--ids", "ids", "--", "touch", "ran")
    assert done.returncode == 64
    assert done.stderr.count("\n") == 1
    assert not (dibs.folder / "ran").exists()


def test_no_ids_are_told_like_any_others(dibs: Dibs) -> None:
    """A program that reads the JSON and the file of busy ids finds both, and not the ids of the time before."""
    (dibs.folder / "busy").write_text("1\n")
    done = dibs("claim", "s", "--ids", "/dev/null", "--busy", "busy", "--json", "--", "touch", "ran")
    assert done.returncode == 0
    assert json.loads(done.stderr) == {"won": 0, "busy": 0, "lost": 0, "exit_code": None}
    assert (dibs.folder / "busy").read_text() == ""
    assert not (dibs.folder / "ran").exists()


def test_all_busy_is_told(dibs: Dibs, client: library.Client) -> None:
    """In JSON, in the file, and by the code."""
    with client.claims("s").take(["1", "2"]):
        done = dibs("claim", "s", "--ids", "-", "--busy", "busy", "--json", "--", "true", input="1\n2\n", stdin=None)
    assert done.returncode == 75
    told, line = done.stderr.splitlines()
    assert json.loads(told) == {"won": 0, "busy": 2, "lost": 0, "exit_code": None}
    assert line == "dibs: others have all 2 of them"
    assert (dibs.folder / "busy").read_text() == "1\n2\n"


def test_what_cannot_be_told_is_no_success(dibs: Dibs) -> None:
    """The command has run, and its own code is kept where that tells more."""
    (dibs.folder / "ids").write_text("1\n")
    for own, code in ((0, 74), (3, 3)):
        with Path("/dev/full").open("w") as full:
            done = dibs(
                "claim", "s", "--ids", "ids", "--json", "--", "sh", "-c", f"cat; exit {own}",
                stdout=subprocess.PIPE, stderr=full, capture_output=False,
            )  # fmt: skip
        assert (done.returncode, done.stdout) == (code, "1\n")


def test_ids_from_where_nothing_can_be_read(dibs: Dibs) -> None:
    """A folder, and standard input that is closed: not the same as no ids."""
    assert dibs("claim", "s", "--ids", ".", "--", "true").returncode == 64
    closed = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *DIBS, "claim", "s", "--ids", "-", "--", "true"],
        env=dibs.env, cwd=dibs.folder, stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert closed.returncode == 64
    assert closed.stderr.startswith("dibs: cannot read the ids")
