"""Queues under fire: thousands of jobs, and every second a worker is killed or stopped for longer than its claims last.

Each effect is written into a *fenced resource*, a database of its own that remembers the greatest token of each job and
refuses a smaller one. What it has seen at the end says whether every job was done once effectively, and none was lost.
``DIBS_CHAOS_JOBS=20000`` makes it a longer run.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

import dibs

JOBS = int(os.environ.get("DIBS_CHAOS_JOBS", "2000"))
TTL_S = 1.5
KILL_EVERY_S = 1.0
# Whoever is not through by then hangs. (6 s are usual, and 25 s beside a crowd.)
LIMIT_S = 240 + JOBS / 50

RESOURCE = """
CREATE TABLE effect (job INTEGER, payload TEXT, token INTEGER, tries INTEGER, crashes INTEGER, pid INTEGER,
                     accepted INTEGER);
CREATE TABLE fence (job INTEGER PRIMARY KEY, token INTEGER);
CREATE TABLE done (job INTEGER, token INTEGER);
CREATE TABLE refused (job INTEGER, token INTEGER);
CREATE TABLE put (payload TEXT);
"""

WORKER = """
import asyncio, os, random, sqlite3, sys, time, dibs
style, url, resource, ttl = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])

def write(*statements):
    db = sqlite3.connect(resource, timeout=30, isolation_level=None)
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN IMMEDIATE")
    for sql, values in statements:
        db.execute(sql, values)
    db.execute("COMMIT")
    db.close()

def effect(job):
    time.sleep(random.random() * 0.03)  # the work
    values = {"job": job.id, "token": job.fencing_token}
    accepted = "NOT EXISTS (SELECT 1 FROM fence WHERE job = :job AND token >= :token)"
    write(
        (f"INSERT INTO effect VALUES (:job, :payload, :token, :tries, :crashes, {os.getpid()}, {accepted})",
         {**values, "payload": job.payload, "tries": job.tries, "crashes": job.crashes}),
        ("INSERT INTO fence VALUES (:job, :token) ON CONFLICT (job) DO UPDATE SET token = max(token, :token)", values),
    )

def ended(job, how):
    write((f"INSERT INTO {how} VALUES (?, ?)", (job.id, job.fencing_token)))

def patiently(act):
    while True:
        try:
            return act()
        except dibs.StoreUnavailable:
            time.sleep(0.1)  # before another try

def by_hand(queue):
    with queue.take(10, timeout=1) as batch:
        for job in batch.won:
            effect(job)
            try:
                job.done()
            except dibs.LeaseLost:
                ended(job, "refused")
            else:
                ended(job, "done")

def at_once(queue):
    with queue.take(10, timeout=1) as batch:
        for job in batch.won:
            effect(job)
        try:
            batch.done()
        except dibs.LeaseLost:
            pass

def put(queue):
    db = sqlite3.connect(resource)
    ((already,),) = db.execute("SELECT count(*) FROM put")
    db.close()
    for number in range(already, int(sys.argv[5])):
        payload = f"{os.getpid()}-{number}"
        patiently(lambda: queue.put(payload))
        write(("INSERT INTO put VALUES (?)", (payload,)))
        time.sleep(0.005)  # so that there is something to put until the end

async def in_tasks():
    async def work(job):
        await asyncio.to_thread(effect, job)
    async with dibs.connect_async(url, ttl=ttl) as client:
        await client.queue("jobs", max_tries=None).run(work, workers=3)

if style == "tasks":
    asyncio.run(in_tasks())
else:
    with dibs.connect(url, ttl=ttl) as client:
        queue = client.queue("jobs", max_tries=None)
        if style == "threads":
            queue.run(effect, workers=3)
        elif style == "put":
            put(queue)
        else:
            while True:
                patiently(lambda: {"by_hand": by_hand, "at_once": at_once}[style](queue))
"""
STYLES = ["by_hand", "at_once", "threads", "tasks", "put"]


class Crew:
    """A process of each style; who is killed is replaced."""

    def __init__(self, url: str, resource: Path) -> None:
        self._url = url
        self._resource = resource
        self.processes = {style: self._start(style) for style in STYLES}
        self.killed = self.stopped = 0

    def _start(self, style: str) -> subprocess.Popen[bytes]:
        arguments = [style, self._url, str(self._resource), str(TTL_S), str(JOBS // 4)]
        return subprocess.Popen([sys.executable, "-X", "faulthandler", "-c", WORKER, *arguments])

    def look(self) -> None:
        """Nobody has ended but who was killed, or has put everything."""
        for style, process in self.processes.items():
            code = process.poll()
            assert code is None or (style == "put" and code == 0), f"{style} has ended with {code}"

    def strike(self) -> None:
        """Kill one of them that has got to work, or stop it for longer than its claims last."""
        with closing(sqlite3.connect(self._resource, timeout=30)) as db:
            worked = {pid for (pid,) in db.execute("SELECT pid FROM effect UNION SELECT CAST(payload AS INT) FROM put")}
        at_work = [style for style, one in self.processes.items() if one.pid in worked and one.poll() is None]
        if not at_work:
            return
        style = random.choice(at_work)
        process = self.processes[style]
        if style != "put" and self.killed > 2 * (self.stopped + 1):
            process.send_signal(signal.SIGSTOP)
            time.sleep(TTL_S + 0.7)  # stopped for longer than its claims last
            process.send_signal(signal.SIGCONT)
            self.stopped += 1
        else:
            process.kill()
            process.wait(10)
            self.killed += 1
            self.processes[style] = self._start(style)

    def tell_where_they_are(self) -> None:
        """Each ends, and writes the stacks of its threads to standard error."""
        for process in self.processes.values():
            process.send_signal(signal.SIGABRT)
            process.wait(10)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def resource(tmp_path: Path) -> Path:
    path = tmp_path / "resource.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(RESOURCE)
    return path


@pytest.fixture(
    params=["sqlite_url", "postgres_url", "mysql_url", "redis_url"], ids=lambda name: name.partition("_")[0]
)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.mark.timeout(LIMIT_S + 60)
def test_every_job_is_done_once_effectively_and_none_is_lost(url: str, resource: Path) -> None:
    """Whoever is killed or stopped: each job's accepted effects have rising tokens, and are more than one only where a
    worker was struck; nobody's done is accepted twice; nothing that was put is missing; and the queue is empty.
    """
    with dibs.connect(url) as client:
        queue = client.queue("jobs", max_tries=None)
        ids = set(queue.put_many(f"first-{number}" for number in range(JOBS // 2)))
        ids |= {id_ for start in range(0, JOBS // 4, 50) for id_ in queue.put_many(_some(start, JOBS // 4))}
        crew = Crew(url, resource)
        try:
            end = time.monotonic() + LIMIT_S
            while missing := _missing(queue, crew, resource):
                if time.monotonic() > end:
                    crew.tell_where_they_are()
                    pytest.fail(f"after {LIMIT_S:.0f} s: {', '.join(missing)}; {crew.killed} were killed")
                if not any(queue.depth()[1:4]):  # so that somebody is at work when the next blow falls
                    ids |= set(queue.put_many(f"more-{number}" for number in range(JOBS // 20)))
                time.sleep(KILL_EVERY_S)  # until the next blow
                crew.look()
                crew.strike()
        finally:
            crew.close()
        assert queue.depth()[1:] == (0, 0, 0, 0, 0.0)
    with closing(sqlite3.connect(resource)) as db:
        _check(db, ids)


def _missing(queue: dibs.Queue, crew: Crew, resource: Path) -> list[str]:
    """What there is to wait for."""
    with closing(sqlite3.connect(resource, timeout=30)) as db:
        worked_again = db.execute("SELECT 1 FROM effect WHERE accepted AND crashes > 0 LIMIT 1").fetchone()
        ((put,),) = db.execute("SELECT count(*) FROM put")
    depth = queue.depth()
    reasons = {
        f"there are jobs ({depth})": any(depth[1:4]),
        f"{put} of {JOBS // 4} were put one by one": crew.processes["put"].poll() is None,
        "nobody was stopped": not crew.stopped,
        "no job was worked again after its worker had died": worked_again is None,
    }
    return [reason for reason, so in reasons.items() if so]


def _some(start: int, end: int) -> list[dibs.NewJob]:
    return [dibs.NewJob(f"second-{number}", priority=number % 3) for number in range(start, min(start + 50, end))]


def _check(db: sqlite3.Connection, ids: set[int]) -> None:
    tokens: dict[int, list[int]] = defaultdict(list)
    tries: dict[int, list[int]] = defaultdict(list)
    crashed = stale = 0
    for job, token, tried, crashes, accepted in db.execute("SELECT job, token, tries, crashes, accepted FROM effect"):
        if accepted:
            tokens[job].append(token)
            tries[job].append(tried)
            crashed += crashes > 0
            assert tried <= 1 + crashes, f"job {job} was tried {tried} times, and {crashes} workers died with it"
        else:
            stale += 1
    assert ids <= set(tokens), f"lost: {sorted(ids - set(tokens))[:10]}"
    payloads = {payload for (payload,) in db.execute("SELECT DISTINCT payload FROM effect WHERE accepted")}
    put = {payload for (payload,) in db.execute("SELECT payload FROM put")}
    assert put, "nothing was put while workers died"
    assert put <= payloads, f"lost, though acknowledged: {sorted(put - payloads)[:10]}"
    for job, seen in tokens.items():
        assert seen == sorted(set(seen)), f"the tokens of job {job} do not rise: {seen}"
        assert tries[job] == sorted(set(tries[job])), f"the tries of job {job} do not rise: {tries[job]}"
    done = list(db.execute("SELECT job, token FROM done"))
    assert done, "nobody has heard that a job was done"
    assert len({job for job, _ in done}) == len(done), "a job was done twice"
    for job, token in done:
        assert tokens[job][-1] == token, f"job {job} was worked again after it was done with token {token}"
    assert crashed, "no job was in hand when its worker died: the faults did nothing"
    twice = sum(len(seen) > 1 for seen in tokens.values())
    (refused,) = db.execute("SELECT count(*) FROM refused").fetchone()
    print(f"{len(tokens)} jobs, {crashed} crashed, {twice} twice, {stale} stale effects, {refused} dones refused")
