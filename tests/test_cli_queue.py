"""``dibs put``, ``take``, ``done`` and what operators see and mend of queues, on a real SQLite file."""

import base64
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import threading
from bisect import bisect
from typing import Any

import pytest

import dibs as library
from tests.command_line import DIBS, PATIENCE_S, Dibs, until


def taken(dibs: Dibs, *words: str) -> list[Any]:
    """The jobs that ``dibs take`` prints."""
    done = dibs("take", *words)
    jobs = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == (0 if jobs else 1)
    return jobs


# -- put ---------------------------------------------------------------------------------------------------------------


def test_a_job_from_the_shell_is_one_like_any_other(dibs: Dibs, client: library.Client) -> None:
    """``put`` prints the id; Python takes it with its payload, priority, key, group and tries."""
    options = ["--priority", "5", "--key", "user/42", "--group", "g", "--max-tries", "3"]
    done = dibs("put", "mail", *options, '{"to": "ann"}')
    assert (done.returncode, done.stderr) == (0, "")
    with client.queue("mail").take() as batch:
        (job,) = batch.won
        assert (job.id, job.payload, job.key, job.group, job.max_tries) == (
            int(done.stdout), {"to": "ann"}, "user/42", "g", 3
        )  # fmt: skip
    assert client.queue("mail").jobs()[0].priority == 5
    assert json.loads(dibs("put", "mail", "1", "--json").stdout) == {"queue": "mail", "id": job.id + 1}


def test_a_payload_from_standard_input(dibs: Dibs, client: library.Client) -> None:
    """With ``-``, or without a payload, standard input is the payload; with ``--bytes`` whatever bytes it has."""
    assert dibs("put", "q", "-", input='[1, "é"]', stdin=None).returncode == 0
    assert dibs("put", "q", input="2\n", stdin=None).returncode == 0
    raw = subprocess.run([*DIBS, "put", "q", "--bytes", "-"], env=dibs.env, input=b"\0\xff\n", check=True)
    assert raw.returncode == 0
    assert dibs("put", "q", "text", "--bytes").returncode == 0
    with client.queue("q").take(10) as batch:
        assert [job.payload for job in batch.won] == [[1, "é"], 2, b"\0\xff\n", b"text"]


@pytest.mark.parametrize(
    "words",
    [
        ("put", "q", "{bad"),
        ("put", "q", "text"),
        ("put", "q", "NaN"),
        ("put", "q", ""),
        ("put", "q", "1", "--at", "tomorrow"),
        ("put", "q", "1", "--at", "2026-12-24T18:00", "--delay", "5"),
        ("put", "q", "1", "--priority", "101"),
        ("put", "q", "1", "--max-tries", "0"),
        ("put", "q", "1", "--key", ""),
        ("put", "q", "1", "--on-conflict", "shrug"),
        ("put", "q", "1", "--lines"),
        ("put", "q", "-", "--lines", "--key", "k"),
        ("put", "", "1"),
        ("put",),
        ("--url", "memory://", "put", "q", "1"),
        ("--url", "memory://", "take", "q"),
        ("take", "q", "--n", "0"),
        ("take", "q", "--n", "1001"),
        ("take", "q", "--ttl", "0"),
        ("done", "q", "1"),
        ("done", "q", "x", "--token", "1"),
        ("done", "q", "0", "--token", "1"),
        ("done", "q", "1", "--token", "0"),
        ("done", "q", "1", "--token", "1", "--dead"),
        ("done", "q", "1", "--token", "1", "--retry-in", "5"),
        ("done", "q", "1", "--token", "1", "--fail", "x", "--skip"),
        ("done", "q", "1", "--token", "1", "--fail", "x", "--dead", "--retry-in", "5"),
        ("done", "q", "1", "--token", "1", "--result", "1"),
        ("done", "q", "1", "--token", "1", "--result", "{", "--keep", "1d"),
        ("jobs", "q", "1", "--state", "dead"),
        ("jobs", "q", "--state", "gone"),
        ("jobs", "q", "-n", "0"),
        ("cancel", "q"),
        ("cancel", "q", "-1"),
        ("forget", "q"),
        ("pause", "x", "--queue", "q"),
        ("resume",),
    ],
)
def test_wrong_usage_is_64(dibs: Dibs, words: tuple[str, ...]) -> None:
    """Exit 64 and one line that says what is wrong; nothing is put."""
    done = dibs(*words)
    assert (done.returncode, done.stdout) == (64, ""), done
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1
    assert json.loads(dibs("queues", "--json").stdout) == []


def test_a_payload_is_not_waited_for_on_a_terminal(dibs: Dibs) -> None:
    """Without a payload and with a terminal as standard input, it says what is missing instead of hanging."""
    ours, theirs = pty.openpty()
    try:
        done = dibs("put", "q", stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 64
    assert "payload is missing" in done.stderr
    assert "the payload is empty" in dibs("put", "q").stderr


def test_a_payload_is_at_most_a_mebibyte(dibs: Dibs) -> None:
    """One byte more is refused."""
    assert dibs("put", "q", "--bytes", "-", input="x" * 2**20, stdin=None).returncode == 0
    done = dibs("put", "q", "--bytes", "-", input="x" * (2**20 + 1), stdin=None)
    assert done.returncode == 64
    assert "1,048,576" in done.stderr


def test_keys_are_unique_while_a_job_lives(dibs: Dibs) -> None:
    """A second put with a live key exits 75, or keeps or replaces the first."""
    first = dibs("put", "q", "1", "--key", "k").stdout
    again = dibs("put", "q", "2", "--key", "k")
    assert (again.returncode, again.stdout) == (75, "")
    assert "has the key 'k', and waits for a worker: --on-conflict replace gives it this payload" in again.stderr
    assert dibs("put", "q", "2", "--key", "k", "--on-conflict", "keep").stdout == first
    assert dibs("put", "q", "3", "--key", "k", "--on-conflict", "replace").stdout == first
    assert [job["payload"] for job in taken(dibs, "q", "--n", "10")] == [3]


def test_a_job_that_is_due_later(dibs: Dibs, client: library.Client) -> None:
    """``--delay`` and ``--at`` put it for later; a time without a zone is this machine's."""
    dibs.env["TZ"] = "America/New_York"
    assert dibs("put", "q", "1", "--delay", "1h").returncode == 0
    assert dibs("put", "q", "2", "--at", "2090-01-02T03:04").returncode == 0
    assert dibs("put", "q", "3", "--at", "2090-01-02T03:04Z").returncode == 0
    assert taken(dibs, "q") == []
    due = [job.due_at.isoformat() for job in client.queue("q").jobs("later")]
    assert due[1:] == ["2090-01-02T03:04:00+00:00", "2090-01-02T08:04:00+00:00"]


def test_a_payload_that_is_nested_as_deeply_as_can_be_is_shown(dibs: Dibs, client: library.Client) -> None:
    """What ``put`` took and who is further down the stack cannot read, is shown as its text; no other job is hidden."""

    def nested(depth: int) -> list[Any]:
        payload: list[Any] = []
        for _ in range(depth - 1):
            payload = [payload]
        return payload

    def refused(depth: int) -> bool:
        try:
            client.queue("other").put(nested(depth))
        except library.InvalidOption:
            return True
        return False

    def text(payload: Any) -> str:
        """A process that has more of the stack left than this one can read it, and shows it as it is."""
        return payload if isinstance(payload, str) else json.dumps(payload)

    depth = bisect(range(1, 100_000), False, key=refused)
    queue = client.queue("q")
    queue.put_many(["text", nested(depth - 5)])
    shown = ["text", "[" * (depth - 5) + "]" * (depth - 5)]
    assert [text(job.payload) for job in queue.jobs()] == shown
    assert len(dibs("jobs", "q").stdout.splitlines()) == 3
    assert [text(job["payload"]) for job in json.loads(dibs("jobs", "q", "--json").stdout)] == shown
    assert [text(job["payload"]) for job in taken(dibs, "q", "--n", "2")] == shown


@pytest.mark.parametrize("depth, indented", [(20, True), (300, False)])
def test_json_is_indented_where_that_helps(dibs: Dibs, client: library.Client, depth: int, indented: bool) -> None:
    """And not where a payload of some kilobytes would become gigabytes of indents."""
    payload = json.loads('[{"a": ' * depth + "1" + "}]" * depth)
    client.queue("q").put(payload)
    shown = dibs("jobs", "q", "--json").stdout
    assert json.loads(shown)[0]["payload"] == payload
    assert (len(shown.splitlines()) > 1) == indented


def test_what_is_printed_does_nothing_to_a_terminal(dibs: Dibs, client: library.Client) -> None:
    """JSON for programs shows letters as they are, and what would move a cursor or turn the line as an escape."""
    payload = "é 中 \x9b2J \u202e \U000e0001 \x7f"
    client.queue("q").put(payload)
    (line,) = dibs("take", "q").stdout.splitlines()
    assert line.isprintable()
    assert "é 中" in line
    assert json.loads(line)["payload"] == payload


def test_lines_are_jobs(dibs: Dibs, client: library.Client) -> None:
    """Each line that is not empty is a job, in order, also the last without an end, and thousands of them."""
    lines = "\n".join([json.dumps({"n": n}) for n in range(12_345)])
    done = dibs("put", "q", "--lines", input=f"\n{lines}", stdin=None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Put 12,345 jobs.\n", "")
    assert client.queue("q").depth().ready == 12_345
    with client.queue("q").take(1000) as batch:
        assert [job.payload["n"] for job in batch.won] == list(range(1000))
    raw = subprocess.run([*DIBS, "put", "b", "--lines", "--bytes", "--json"], env=dibs.env, input=b"a\0\n\xff\n",
                         capture_output=True, check=True)  # fmt: skip
    assert json.loads(raw.stdout) == {"queue": "b", "put": 2}
    with client.queue("b").take(10) as batch:
        assert [job.payload for job in batch.won] == [b"a\0", b"\xff"]


def test_lines_that_come_slowly_do_not_wait_for_more(dibs: Dibs, client: library.Client) -> None:
    """What a slow producer has written is put while it goes on."""
    process = dibs.start("put", "q", "--lines", stdin=subprocess.PIPE)
    assert process.stdin is not None
    for count in (1, 2):
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        until(lambda: client.queue("q").depth().ready == count)  # noqa: B023 - called before the next round
    process.stdin.close()
    process.stdin = None
    assert process.wait(PATIENCE_S) == 0


def test_a_wrong_line_is_named_and_those_before_it_were_put(dibs: Dibs, client: library.Client) -> None:
    """So that one can mend it and go on behind the others. (NaN is JSON to Python alone.)"""
    done = dibs("put", "nan", "--lines", input="1\n-Infinity\n", stdin=None)
    assert (done.returncode, client.queue("nan").depth().ready) == (64, 1)
    assert done.stderr.startswith("dibs: line 2 is no JSON: there is no -Infinity in JSON; the first line was put\n")
    done = dibs("put", "nan", "--lines", input="NaN\n", stdin=None)
    assert done.stderr.startswith("dibs: line 1 is no JSON: there is no NaN in JSON; no line was put\n")
    done = dibs("put", "q", "--lines", input="1\n2\n{bad\n4\n", stdin=None)
    assert done.returncode == 64
    assert done.stderr.startswith("dibs: line 3 is no JSON: ")
    assert "; the first 2 lines were put\n" in done.stderr
    assert [job.payload for job in client.queue("q").jobs()] == [1, 2]
    done = dibs("put", "q", "--lines", "--bytes", input="x" * (2**20 + 1), stdin=None)
    assert done.returncode == 64
    assert "line 1 cannot be put" in done.stderr


def test_lines_that_cannot_be_read_on_leave_those_before_them_put(dibs: Dibs, client: library.Client) -> None:
    """Exit 74, and how many lines were put, so that one can go on behind them."""
    ours, theirs = pty.openpty()
    process = dibs.start("put", "q", "--lines", stdin=theirs)
    os.close(theirs)
    os.write(ours, b"1\n2\n")
    until(lambda: client.queue("q").depth().ready == 2)
    os.close(ours)  # from here on a read fails
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert said == "dibs: cannot read the lines: Input/output error; the first 2 lines were put\n"
    assert process.returncode == 74


def test_a_bar_shows_how_far_it_is(dibs: Dibs) -> None:
    """On a terminal, when it takes longer than a second; and no trace of it is left."""
    ours, theirs = pty.openpty()
    process = dibs.start("put", "q", "--lines", stdin=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    assert process.stdin is not None
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 1024):
                shown.extend(data)
        except OSError:  # the terminal's other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: _wrote_line(process) and b"job" in shown)
    process.stdin.close()
    process.stdin = None
    assert process.wait(PATIENCE_S) == 0
    reader.join(PATIENCE_S)
    os.close(ours)
    assert shown.endswith(b"\r\x1b[K")


def _wrote_line(process: Any) -> bool:
    process.stdin.write("1\n")
    process.stdin.flush()
    return True


# -- take and done -----------------------------------------------------------------------------------------------------


def test_taken_jobs_are_ended_by_another_process(dibs: Dibs, client: library.Client) -> None:
    """``take`` leaves jobs claimed, ``done`` ends them by id and token: once, and not with another token."""
    client.queue("q").put_many(["a", b"\xff", "c"])
    jobs = taken(dibs, "q", "--n", "3", "--ttl", "60")
    assert [job.get("payload") for job in jobs] == ["a", None, "c"]
    assert base64.b64decode(jobs[1]["payload_base64"]) == b"\xff"
    assert {job["tries"] for job in jobs} == {1}
    depth = client.queue("q").depth()
    assert (depth.ready, depth.claimed) == (0, 3)
    first, token = str(jobs[0]["id"]), str(jobs[0]["token"])
    assert dibs("done", "q", first, "--token", "999").returncode == 76
    done = dibs("done", "q", first, "--token", token)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    again = dibs("done", "q", first, "--token", token)
    assert again.returncode == 76
    assert "nothing was changed" in again.stderr
    assert client.queue("q").job(jobs[0]["id"]) is None
    assert client.queue("q").depth().claimed == 2


def test_a_taken_job_that_nobody_ends_is_handed_out_again(dibs: Dibs) -> None:
    """After the ttl, with a greater token; the old one is refused then."""
    dibs("put", "q", "1")
    (old,) = taken(dibs, "q", "--ttl", "2")
    (new,) = taken(dibs, "q", "--ttl", "60", "--timeout", "10")
    assert new["id"] == old["id"]
    assert new["token"] > old["token"]
    assert (new["tries"], new["crashes"]) == (2, 1)
    assert dibs("done", "q", str(old["id"]), "--token", str(old["token"])).returncode == 76
    assert dibs("done", "q", str(new["id"]), "--token", str(new["token"])).returncode == 0


def test_ways_to_end_a_taken_job(dibs: Dibs, client: library.Client) -> None:
    """Failed, dead, given back, and done with a result that is kept."""
    queue = client.queue("q")

    def end(*words: str) -> library.JobRecord | None:
        (job,) = taken(dibs, "q", "--ttl", "60", "--timeout", "5")
        done = dibs("done", "q", str(job["id"]), "--token", str(job["token"]), *words)
        assert (done.returncode, done.stderr) == (0, "")
        return queue.job(job["id"])

    queue.put(1)
    back = end("--skip")
    assert back is not None
    assert (back.state, back.tries) == ("ready", 0)
    failed = end("--fail", "no such mailbox", "--retry-in", "0")
    assert failed is not None
    assert (failed.tries, failed.error) == (1, "no such mailbox")
    later = end("--fail", "again")
    assert later is not None
    pause = later.due_at - later.created_at
    assert later.tries == 2
    assert pause.total_seconds() > 1.0, "the second try is paused for two seconds or so"
    queue.cancel(later.id)
    queue.put(2)
    dead = end("--fail", "never", "--dead")
    assert dead is not None
    assert (dead.state, dead.error) == ("dead", "never")
    queue.put(3)
    done = end("--result", '{"sent": 3}', "--keep", "1d")
    assert done is not None
    assert (done.state, done.result) == ("done", {"sent": 3})


def test_jobs_that_could_not_be_printed_are_given_back(dibs: Dibs, client: library.Client) -> None:
    """When nobody reads the output, the jobs are ready again, and no try is counted."""
    client.queue("q").put(1)
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = dibs("take", "q", stdout=write_fd, capture_output=False, stderr=subprocess.PIPE)
    os.close(write_fd)
    assert done.returncode == 141
    (job,) = client.queue("q").jobs("ready")
    assert job.tries == 0


def test_ctrl_c_ends_a_waiting_take(dibs: Dibs) -> None:
    """Silently, with 130; nothing is claimed."""
    process = dibs.start("take", "q", "--timeout", "60")
    until((dibs.folder / "locks.db").exists)
    until(lambda: "dibs_lease_job" in _tables(dibs))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")


def _tables(dibs: Dibs) -> set[str]:
    connection = sqlite3.connect(dibs.folder / "locks.db")
    try:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    finally:
        connection.close()


# -- see and mend ------------------------------------------------------------------------------------------------------


def test_queues_are_listed(dibs: Dibs, client: library.Client) -> None:
    """How many jobs are in which state, for people and for programs; a pause stands beneath."""
    assert dibs("queues").stdout == "No jobs.\n"
    queue = client.queue("mail")
    queue.put_many(range(4))
    queue.put(5, delay=60)
    client.queue("other").put(1)
    with queue.take(2) as batch:
        batch.won[0].fail("x", dead=True)
        mail, other = json.loads(dibs("queues", "--json").stdout)
        assert (mail["ready"], mail["later"], mail["claimed"], mail["dead"]) == (2, 1, 1, 1)
        assert (other["queue"], other["ready"], other["paused"]) == ("other", 1, None)
        lines = dibs("queues", "ma").stdout.splitlines()
        assert lines[0].split() == ["QUEUE", "READY", "LATER", "CLAIMED", "DEAD", "OLDEST"]
        assert lines[1].split()[:5] == ["mail", "2", "1", "1", "1"]
        assert len(lines) == 2
    dibs("pause", "--queue", "mail", "--note", "OPS-7")
    shown = dibs("queues").stdout
    assert "'queue/mail'" in shown
    assert "OPS-7" in shown
    assert json.loads(dibs("queues", "mail", "--json").stdout)[0]["paused"] == "queue/mail"


def test_a_paused_queue_hands_out_nothing(dibs: Dibs) -> None:
    """``dibs pause --queue`` and ``dibs resume --queue``; the same as ``dibs pause queue/NAME``."""
    dibs("put", "q", "--lines", input="1\n2\n", stdin=None)
    assert dibs("pause", "--queue", "q").returncode == 0
    assert taken(dibs, "q") == []
    assert dibs("resume", "--queue", "q").returncode == 0
    assert len(taken(dibs, "q", "--timeout", "5", "--ttl", "60")) == 1
    assert dibs("pause", "queue/q").returncode == 0
    waited = dibs("take", "q", "--timeout", "0.3")
    assert (waited.returncode, waited.stdout) == (1, "")
    assert re.fullmatch(r"dibs: 'q' is paused by .*\n", waited.stderr)
    assert dibs("resume", "--queue", "q").returncode == 0


def test_jobs_are_listed(dibs: Dibs, client: library.Client) -> None:
    """In the order in which they are taken; with a state, those; with ids, everything there is to know."""
    queue = client.queue("q")
    first, second = queue.put_many([{"to": "ann"}, b"\0raw"])
    later = queue.put(3, delay=60, key="k", priority=7)
    with queue.take():
        lines = dibs("jobs", "q").stdout.splitlines()
        assert [line.split()[:2] for line in lines[1:]] == [
            [str(first), "claimed"], [str(second), "ready"], [str(later), "later"]
        ]  # fmt: skip
        assert f"(pid {os.getpid()})" in lines[1]
        assert '{"to": "ann"}' in lines[1]
        shown = json.loads(dibs("jobs", "q", "--state", "ready", "--json").stdout)
        assert [(job["id"], base64.b64decode(job["payload_base64"])) for job in shown] == [(second, b"\0raw")]
        full = dibs("jobs", "q", str(later), str(first))
        assert full.returncode == 0
        assert "key      k\n" in full.stdout
        assert "state    claimed\n" in full.stdout
    missing = dibs("jobs", "q", str(first), "99")
    assert missing.returncode == 1
    assert "99" in missing.stderr
    assert dibs("jobs", "empty").stdout == "No jobs in 'empty'.\n"
    assert dibs("jobs", "q", "--state", "dead").stdout == "No jobs in 'q' that are dead.\n"


def test_dead_jobs_are_seen_revived_and_forgotten(dibs: Dibs, client: library.Client) -> None:
    """``dead``, ``requeue`` and ``forget``: some by their ids, or all."""
    queue = client.queue("q")
    ids = queue.put_many(range(4))
    assert dibs("dead", "q").stdout == "No dead jobs in 'q'.\n"
    with queue.take(4) as batch:
        for job in batch.won:
            job.fail(f"first line\nlast line of {job.payload}", dead=True)
    lines = dibs("dead", "q").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(job) for job in reversed(ids)]
    assert "last line of 3" in lines[1]
    assert "first line" not in lines[1]
    assert len(json.loads(dibs("dead", "q", "-n", "2", "--json").stdout)) == 2
    assert "first line\n" in dibs("jobs", "q", str(ids[0])).stdout
    assert dibs("requeue", "q", str(ids[0])).stdout == "Requeued 1 job.\n"
    again = dibs("requeue", "q", str(ids[0]))
    assert (again.returncode, again.stdout) == (1, "Requeued 0 jobs.\n")
    assert "not dead in 'q', or another job has the key meanwhile: 1 job of those named" in again.stderr
    assert dibs("forget", "q", str(ids[1])).stdout == "Deleted 1 job.\n"
    assert dibs("forget", "q", "--older-than", "1h").stdout == "Deleted 0 jobs.\n"
    assert dibs("requeue", "q").stdout == "Requeued 2 jobs.\n"
    assert client.queue("q").depth().ready == 3
    assert dibs("forget", "q", "--older-than", "0").stdout == "Deleted 0 jobs.\n", "live jobs are never forgotten"


def test_jobs_are_cancelled(dibs: Dibs, client: library.Client) -> None:
    """Also one that is being worked, whose end is refused then; 1 when one had ended before."""
    queue = client.queue("q")
    first, second = queue.put_many([1, 2])
    (job,) = taken(dibs, "q", "--ttl", "60")
    assert dibs("cancel", "q", str(first), str(second)).stdout == "Cancelled 2 jobs.\n"
    assert dibs("done", "q", str(first), "--token", str(job["token"])).returncode == 76
    again = dibs("cancel", "q", str(first))
    assert (again.returncode, again.stdout) == (1, "Cancelled 0 jobs.\n")
    assert str(first) in again.stderr


def test_a_store_without_queues_says_so(dibs: Dibs) -> None:
    """78, and which stores keep queues; nothing is connected to."""
    for words in (("put", "q", "1"), ("take", "q"), ("queues",), ("work", "q", "--", "true")):
        done = dibs("--url", "memcached://127.0.0.1:1", *words)
        assert done.returncode == 78, done
        assert "keeps no queues" in done.stderr


def test_a_store_that_is_away_is_69(dibs: Dibs) -> None:
    """And what could have been put is told apart from what was not."""
    for words in (("put", "q", "1"), ("take", "q"), ("queues",), ("work", "q", "--", "true")):
        done = dibs("--url", "redis://127.0.0.1:1", *words)
        if "keeps no queues" not in done.stderr:
            assert done.returncode == 69, done


def test_jobs_that_are_not_there(dibs: Dibs) -> None:
    """Exit 1 and one line on stderr; nothing on stdout, not even an empty line."""
    done = dibs("jobs", "mail", "7")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dibs: not in 'mail', or not any more: 7\n"
