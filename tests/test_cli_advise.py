"""``dibs advise``: for people, for programs, and as metrics."""

import json
from pathlib import Path

import pytest

import dibs as library
from dibs.connecting import locate
from dibs.load import load_key
from dibs.testing.case import Connection, asking
from tests.command_line import Dibs
from tests.test_advice import told

BUSY = told(workers=3, depths=[(0.0, 4)], taken=600, ended=600, held_s=300)


@pytest.fixture
def dibs(dibs: Dibs) -> Dibs:
    """The command line on an SQLite file of this test, with a busy queue in it."""
    with library.connect(dibs.url) as client:
        client.queue("mail").put("job")
    write(dibs, "mail", BUSY)
    return dibs


def write(shell: Dibs, queue: str, load: object) -> None:
    """Tell a load as a worker does."""
    store = Connection(locate(shell.url)[0].open())
    store.act(asking(load_key("default", queue) + "a", "a-1", info=json.dumps(load)))
    store.store.close()


def test_for_people(dibs: Dibs) -> None:
    """A table of all queues, and beneath it why."""
    done = dibs("advise")
    assert (done.returncode, done.stderr) == (0, "")
    head, row, _, why = done.stdout.splitlines()
    assert head.split() == ["QUEUE", "WORKERS", "NEEDED", "BUSY", "BINDS"]
    assert row.split() == ["mail", "3", "7", "167%", "work"]
    assert why.startswith("mail: 10 jobs arrive a second, and each takes 500 ms of work")
    assert why.endswith("There are 3: add 4.")


def test_for_programs(dibs: Dibs) -> None:
    """All there is to know as JSON, also of a queue of which nothing is known."""
    done = dibs("advise", "mail", "other", "--json")
    mail, other = json.loads(done.stdout)
    assert (mail["queue"], mail["needed"], mail["arrival_rate"]) == ("mail", 7, 10.0)
    assert (other["queue"], other["needed"]) == ("other", None)


def test_as_metrics(dibs: Dibs) -> None:
    """The text format of Prometheus; what is not known is left out, and a quote in a name does no harm."""
    done = dibs("advise", "mail", 'a "b\\', "--metrics")
    lines = done.stdout.splitlines()
    assert 'dibs_workers_needed{queue="mail"} 7' in lines
    assert 'dibs_queue_depth{queue="mail"} 4' in lines
    assert 'dibs_workers{queue="a \\"b\\\\"} 0' in lines
    assert sum(line.startswith("dibs_workers_needed{") for line in lines) == 1
    assert sum(line.startswith("# TYPE dibs_workers_needed gauge") for line in lines) == 1


def test_metrics_without_workers(dibs: Dibs) -> None:
    """Where nobody takes jobs any more, the metrics still say how many wait: that is when somebody has to know."""
    with library.connect(dibs.url) as client:
        client.queue("left").put_many([1, 2, 3])
    lines = dibs("advise", "--metrics").stdout.splitlines()
    assert 'dibs_queue_depth{queue="left"} 3' in lines
    assert 'dibs_workers{queue="left"} 0' in lines
    assert 'dibs_queue_depth{queue="mail"} 4' in lines


def test_metrics_are_exact(dibs: Dibs) -> None:
    """A great number of jobs is told to the last one."""
    write(dibs, "mail", {**BUSY, "depths": [(0.0, 1_234_567)]})
    assert 'dibs_queue_depth{queue="mail"} 1234567' in dibs("advise", "mail", "--metrics").stdout.splitlines()


def test_nothing_to_say(dibs: Dibs, tmp_path: Path) -> None:
    """No queue has jobs; wrong usage."""
    done = dibs("--namespace", "empty", "advise")
    assert (done.returncode, done.stdout) == (0, "No queue has jobs: name those that you mean.\n")
    assert dibs("advise", "--json", "--metrics").returncode == 64
