"""``dibs elect``: one machine runs the command, the others stand by; with real processes and a real SQLite file."""

import os
import signal
import sys

import pytest

import dibs as library
from dibs.clock import boot_now
from tests.command_line import Dibs, Started, until
from tests.servers.postgres import PostgresServer
from tests.servers.process import free_port

AWAY = "dibs: election 'scheduler': the store is "


def start(dibs: Dibs, who: str, *options: str, body: str = "exec sleep 60") -> Started:
    """A candidate whose command writes its number into a file before it does anything else."""
    script = f"echo $DIBS_FENCING_TOKEN $$ > leads-{who}; {body}"
    return dibs.start("elect", "scheduler", *options, "--", "sh", "-c", script)


def leads(dibs: Dibs, who: str, process: Started) -> int:
    """The number of the candidate's term, once its command runs."""
    path = dibs.folder / f"leads-{who}"
    until(lambda: process.poll() is not None or (path.exists() and path.read_text().endswith("\n")))
    assert process.poll() is None, process.communicate()
    number, pid = path.read_text().split()
    process.command_pid = int(pid)
    return int(number)


def standing_by(dibs: Dibs, count: int) -> None:
    until(lambda: dibs.holder("scheduler")["waiting"] == count)


# -- one leads, the others stand by ------------------------------------------------------------------------------------


def test_one_runs_the_others_stand_by(dibs: Dibs) -> None:
    """When the command ends its leadership is resigned, its exit code returned, and the next in line runs its own."""
    first = start(dibs, "a", "--value", "http://a:80", body="until test -e go; do sleep 0.02; done; exit 3")
    one = leads(dibs, "a", first)
    second = start(dibs, "b", "--value", "http://b:80")
    standing_by(dibs, 1)
    third = start(dibs, "c")
    standing_by(dibs, 2)
    with library.connect(dibs.url) as client:
        leader = client.election("scheduler").leader()
        assert leader is not None
        assert (leader.number, leader.value, leader.holder.split("/")[1]) == (one, "http://a:80", str(first.pid))
    assert not (dibs.folder / "leads-b").exists()
    (dibs.folder / "go").touch()
    assert first.communicate() == ("", "")
    assert first.returncode == 3
    two = leads(dibs, "b", second)
    assert two > one
    second.terminate()
    assert second.wait() == 143
    assert leads(dibs, "c", third) > two
    third.terminate()
    assert third.wait() == 143
    assert dibs.holder("scheduler") is None


def test_the_command_knows_its_term(dibs: Dibs) -> None:
    """The child finds name, slot and the number of the term in its environment; streams are its own."""
    for number in ("1", "2"):
        done = dibs(
            "elect",
            "a b",
            "--",
            "sh",
            "-c",
            'echo "$DIBS_NAME $DIBS_SLOT $DIBS_FENCING_TOKEN"; cat',
            input="in",
            stdin=None,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"a b 1 {number}\nin", "")


# -- leadership that ends ----------------------------------------------------------------------------------------------


def test_kill_9_of_a_leader(dibs: Dibs) -> None:
    """The command dies with its wrapper, and a standby leads within the ttl, with a greater number."""
    leader = start(dibs, "a", "--ttl", "2")
    one = leads(dibs, "a", leader)
    standby = start(dibs, "b")
    standing_by(dibs, 1)
    leader.kill()
    killed = boot_now()
    assert leads(dibs, "b", standby) > one
    assert boot_now() < killed + 2 + 3
    assert leader.command_pid not in dibs.processes()
    standby.terminate()
    assert standby.wait() == 143


def test_a_lost_leader_is_stopped_before_another_starts(dibs: Dibs) -> None:
    """A leader that is paused for longer than its ttl: its command has ended before the standby's begins; exit 76."""
    ticker = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "with open('ticks', 'w', buffering=1) as file:\n"
        "    while True:\n"
        "        file.write(f'{time.clock_gettime(time.CLOCK_BOOTTIME):.6f}\\n')\n"
        "        time.sleep(0.001)\n"
    )
    leader = dibs.start("elect", "scheduler", "--ttl", "2", "--", sys.executable, "-c", ticker)
    until((dibs.folder / "ticks").exists)
    now = "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)"
    standby = dibs.start("elect", "scheduler", "--", sys.executable, "-c", now)
    standing_by(dibs, 1)
    os.kill(leader.pid, signal.SIGSTOP)
    output, errors = standby.communicate()
    assert (standby.returncode, errors) == (0, "")
    assert float((dibs.folder / "ticks").read_text().splitlines()[-1]) < float(output)
    os.kill(leader.pid, signal.SIGCONT)
    _output, errors = leader.communicate()
    assert leader.returncode == 76
    assert errors.startswith("dibs: the command was stopped: lost 'scheduler' (token 1): ")
    assert errors.count("\n") == 1


def test_a_standby_outlives_an_outage(dibs: Dibs, own_postgres: PostgresServer) -> None:
    """It says that the store is away, and that it is back, stands by again, and leads in its turn."""
    url = f"{own_postgres.create_database()}?patience=0.2"
    with library.connect(url) as client:
        lease = client.lock("scheduler", ttl=60).acquire()
        assert lease is not None
        standby = start(dibs, "b", "--url", url)
        until(lambda: client.leases()[0].waiting)
        own_postgres.kill()
        assert standby.stderr is not None
        assert standby.stderr.readline().startswith(f"{AWAY}away, trying again: PostgreSQL: ")
        own_postgres.start()
        assert standby.stderr.readline().startswith(f"{AWAY}back, ")
        until(lambda: _waiting(client))
        lease.release()
    leads(dibs, "b", standby)
    standby.terminate()
    assert standby.communicate() == ("", "")
    assert standby.returncode == 143


def _waiting(client: library.Client) -> int:
    try:
        return client.leases()[0].waiting
    except library.StoreUnavailable:
        return 0


def test_a_store_that_never_comes_ends_a_candidate(dibs: Dibs) -> None:
    """At boot its database may come a little later; an address that is wrong is told in the end, with 69."""
    url = f"postgresql://127.0.0.1:{free_port()}/x?patience=0.5"
    done = dibs("elect", "scheduler", "--url", url, "--", "true")
    first, last = done.stderr.splitlines()
    assert first.startswith(f"{AWAY}away, trying again: PostgreSQL: ")
    assert last.startswith("dibs: PostgreSQL: ")
    assert (done.returncode, done.stdout) == (69, "")


def test_a_standby_that_is_asked_to_end(dibs: Dibs) -> None:
    """TERM and Ctrl-C end a standby, which leaves the line and never runs its command."""
    leader = start(dibs, "a")
    leads(dibs, "a", leader)
    for signum in (signal.SIGTERM, signal.SIGINT):
        standby = start(dibs, "b")
        standing_by(dibs, 1)
        standby.send_signal(signum)
        assert standby.wait() == 128 + signum
        standing_by(dibs, 0)
    assert not (dibs.folder / "leads-b").exists()
    leader.terminate()
    leader.wait()


# -- who may stand by --------------------------------------------------------------------------------------------------


def test_standbys_enough(dibs: Dibs) -> None:
    """With ``--standby-max`` others in line it exits 75 at once and says so."""
    leader = start(dibs, "a")
    leads(dibs, "a", leader)
    standby = start(dibs, "b", "--standby-max", "1")
    standing_by(dibs, 1)
    done = dibs("elect", "scheduler", "--standby-max", "1", "--", "touch", "ran")
    assert done.returncode == 75
    assert done.stderr.startswith("dibs: 'scheduler' is led by ")
    assert done.stderr.endswith("and 1 candidate stands by already, where standby_max is 1\n")
    assert not (dibs.folder / "ran").exists()
    for process, who in ((leader, "a"), (standby, "b")):
        leads(dibs, who, process)
        process.terminate()
        assert process.wait() == 143


def test_the_newest_standby_stays(dibs: Dibs) -> None:
    """With ``--standby-full replace`` the newest stands by, and the one before it exits 75 and says so."""
    leader = start(dibs, "a")
    leads(dibs, "a", leader)
    options = ("--standby-max", "1", "--standby-full", "replace")
    old = start(dibs, "b", *options)
    standing_by(dibs, 1)
    new = start(dibs, "c", *options)
    assert old.wait(30) == 75
    _, errors = old.communicate()
    assert errors.startswith("dibs: 'scheduler' is led by ")
    assert "this standby was replaced by a newer one" in errors
    assert not (dibs.folder / "leads-b").exists()
    standing_by(dibs, 1)
    leader.terminate()
    leads(dibs, "c", new)
    new.terminate()
    assert [process.wait() for process in (leader, new)] == [143, 143]


def test_a_reserve_leads_last(dibs: Dibs) -> None:
    """A candidate with a priority below 0 leads when nobody else wants to."""
    leader = start(dibs, "a")
    leads(dibs, "a", leader)
    reserve = start(dibs, "r", "--priority", "-1")
    standby = start(dibs, "b")
    standing_by(dibs, 1)
    leader.terminate()
    leads(dibs, "b", standby)
    assert not (dibs.folder / "leads-r").exists()
    standby.terminate()
    leads(dibs, "r", reserve)
    reserve.terminate()
    assert [process.wait() for process in (leader, standby, reserve)] == [143, 143, 143]


# -- wrong usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("elect", "x"),
        ("elect", "x", "--"),
        ("elect", "x", "true"),
        ("elect", "--", "true"),
        ("elect", "", "--", "true"),
        ("elect", "x", "--timeout", "3", "--", "true"),
        ("elect", "x", "--ttl", "0", "--", "true"),
        ("elect", "x", "--priority", "1", "--", "true"),
        ("elect", "x", "--priority", "low", "--", "true"),
        ("elect", "x", "--standby-max", "-1", "--", "true"),
        ("elect", "x", "--standby-full", "replace", "--", "true"),
        ("elect", "x", "--standby-max", "1", "--priority", "-1", "--", "true"),
        ("elect", "x", "--info", "{", "--", "true"),
        ("elect", "x", "--info", '{"value": 1}', "--", "true"),
        ("--url", "memory://", "elect", "x", "--", "true"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_64(dibs: Dibs, args: tuple[str, ...]) -> None:
    """Exit 64 with one line on stderr; nothing is run."""
    done = dibs(*args)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith("dibs: ")
    assert done.stderr.count("\n") == 1
    assert "invalid choice" not in done.stderr
