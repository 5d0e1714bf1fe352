"""Print the reference pages from the code: `make docs`. With --check: say which pages are out of date, and exit 1.

What a page says comes from docstrings, signatures, constants and parsers, so it cannot drift from them. The output is
the same under every supported Python. A constant or capability that is new is an error here until the tables below
explain it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import dibs
import dibs.aio
import dibs.cli
import dibs.columns
import dibs.connecting
import dibs.desk
import dibs.errors
import dibs.fencing
import dibs.lost
import dibs.rows
import dibs.testing
from dibs.connecting import locate
from dibs.promises import PROMISES
from dibs.store import Capabilities
from dibs.testing.conformance import runs

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
HEAD = "<!-- Printed by scripts/print_reference.py (`make docs`). Change the code, not this page. -->"

Row = tuple[object, ...]

# -- what the code does not say by itself ------------------------------------------------------------------------------

API = """\
# API

Everything public is in the package `dibs`. The face for asyncio has the same verbs with the same parameters; where
*awaited* stands it returns an awaitable. Seconds are numbers or `timedelta`.
"""
CAPABILITIES = """\
# Capabilities

What each store declares before it was reached. `client.capabilities` tells the same of the store in use, after a look
at the server's settings: behind a connection pooler `signal` differs; where the server forgets acknowledged commits
`durable`, `survives_restart` and `fencing_token` do; Redis is durable where `appendfsync` is `always`; ZooKeeper's
limits follow its `tickTime`. The [conformance suite](conformance.md) runs what is declared.
"""
VERSIONS = """\
# Versions

What dibs needs, and what its tests were run on. An SQLite, PostgreSQL, MySQL, MariaDB, Redis or memcached that is too
old is refused when it is reached.

All of it was on Linux, on x86-64. What macOS needs (its clock, its boot id, its way to the disk) is written from its
documentation, and has not been run there.

*All tests* are a whole run: on Debian 12 each time; before a release on Debian 13, on Debian testing (with the newest
Python, PostgreSQL and Redis) and on Debian unstable (with MySQL and Valkey). *In part* is by hand before a release:
of a server the conformance suite (of SQLite 3.37, PostgreSQL 14, MariaDB 10.6 and Redis 6.0 without its half for
asyncio) and of most the store's own tests; of a driver, the oldest that pip may choose, all tests that use it but
chaos and state machines, on Python 3.10; of Python 3.13t, without the global lock, [what its drivers
allow](../explanation/safety.md). Whole runs take the newest drivers.

The tests take the servers that are installed. Where there are two of a kind,
`DIBS_TEST_WITH="mysqld valkey-server" make test` names the programs to take.
"""
# In whole runs, and in part.
RUN_ON = {
    "Python": ("3.10 to 3.15", "3.13t"),
    "SQLite": ("3.40, 3.46, 3.53", "3.37"),
    "PostgreSQL": ("15, 17, 18, 19 (rc 1)", "12, 14"),
    "MariaDB": ("10.11, 11.8", "10.6"),
    "MySQL": ("9.7", "8.0.36"),
    "Redis, Valkey": ("Redis 7.0, 8.0, 8.6, Valkey 9.1", "Redis 6.0"),
    "memcached": ("1.6.18, 1.6.38, 1.6.45", ""),
    "etcd": ("3.4, 3.5", ""),
    "ZooKeeper": ("3.8, 3.9", ""),
}
DRIVERS = {
    "psycopg": ("3.3", "3.2.1"),
    "PyMySQL": ("1.2", "1.1.0"),
    "redis": ("8.1", "5.2.0"),
    "pymemcache": ("4.0", ""),
    "kazoo": ("2.11", ""),
}
CLI = """\
# Command line

What `--help` prints, 100 columns wide. The codes: [errors](errors.md#exit-codes).

## What --json prints

The fields are those of the objects that Python has ([API](api.md)), times as text (ISO 8601, UTC), and these besides:
"""
# By command: what it prints with --json.
JSON: list[Row] = [
    ("`ls`", "a list of [LeaseRecord](api.md#leaserecord), each with `paused`: the pause that covers it, or null"),
    ("`show`", "one of these, or null when nobody holds the name"),
    (
        "`top`",
        (
            "at each look a line: `held`, `waiting`, `grants_per_s` (null at the first look), `leases` as of `ls`, "
            "each with `held_for` (seconds) and `grants_per_s`, and `pauses`"
        ),
    ),
    ("`history`", "a list of [HistoryRecord](api.md#historyrecord)"),
    ("`pause`", "the [Pause](api.md#pause), with `holders`, as of `ls`; without NAME a list of all"),
    ("`queues`", "a list of [QueueDepth](api.md#queuedepth), each with `paused`: the name of the pause, or null"),
    (
        "`jobs`, `dead`",
        "a list of [JobRecord](api.md#jobrecord); `payload_base64` in the place of `payload` where that is bytes",
    ),
    (
        "`take` (always)",
        (
            "a line for each job: `id`, `token`, `payload` or `payload_base64`, `tries`, `max_tries`, `crashes`, "
            "`key`, `group`, `created_at`, `expires_at`"
        ),
    ),
    ("`put`", "`queue`, and `id`; with `--lines` `put`: how many"),
    (
        "`bench`",
        (
            "`store`, `kind`, `durable`, `host`, `processors`, `load`, `version`, `at`, `seconds`, `connect_s`, "
            "`complete` (false when it was interrupted), and `works`: a list of `work`, `what`, `count`, `per_second`, "
            "`median_s`, `p99_s`, `least_s`, `most_s` (numbers, or null) and `unsupported` (why, or null)"
        ),
    ),
    ("`advise`", "a list of [Advice](api.md#advice)"),
    (
        "`claim`",
        (
            "on stderr `won`, `busy`, `lost` (how many), `exit_code` (null when nothing was run); with `--columns` "
            "`without_row`"
        ),
    ),
    (
        "`doctor`",
        (
            "`store`, `ok`, `required`, `findings` (a list of `promise`, `kept`, `detail`), and `capabilities`, "
            "or null where the store was not reached"
        ),
    ),
]
CONFORMANCE = """\
# The conformance suite

`dibs.testing.check_store(url)` runs these cases against a store, and `make test` runs them against every store that
ships with dibs. A case is either for the contract of stores, or runs twice, through the face for threads and through
the one for tasks. The promises are numbered in [safety](../explanation/safety.md#the-promises).

Most cases rest on real time. On a virtual machine whose host keeps it from running, for seconds or for a good part of
the time, some must fail, so `make test` watches for that: what failed meanwhile is run again, and named at the end. So
is what failed because a server ended by itself (`tests/again.py`). And since more tests run at once than there are
processors, up to five tests that failed beside others pass if each then passes three times by itself; the summary still
shows what had failed (`tests/alone.py`). Chaos and simulation are never run again.
"""
ERRORS = """\
# Errors

Everything dibs raises on purpose is a `DibsError`, except `TypeError`, `ValueError` and `OverflowError` where the
standard library's locks raise them. *Held by another*, *store unreachable* and *misconfigured* are three classes.
`LockOrderWarning` is a `RuntimeWarning` and no error: [deadlocks](../explanation/deadlocks.md).
"""
SCHEMA = """\
# Tables

What `dibs setup` runs and `dibs schema` prints; stores that need no tables say what they keep, or which rights they
want. The tables are made to be read; only dibs should write to them. A row without a claim id is a name that was
released.
"""
URLS = """\
# URLs, options and limits

## URLs

| URL | store |
| --- | --- |
| `sqlite:////absolute/path.db` | SQLite, a file; with three slashes relative to the working directory |
| `postgresql://user@host:5432/database` | PostgreSQL; several hosts as `host1:5432,host2:5432` |
| `mysql://user@host:3306/database`, `mariadb://…` | MySQL or MariaDB |
| `redis://host:6379/0`, `rediss://…`, `valkey://…`, `valkeys://…` | Redis or Valkey; with an `s` over TLS |
| `memcached://host:11211` | memcached |
| `etcd://host:2379,host:2379`, `etcds://…` | etcd, any of its members; with an `s` over TLS |
| `zookeeper://host:2181,host:2181/chroot` | ZooKeeper |
| `memory://` | this client only, in memory |
| `memory://name` | all clients of this process that use this name |
| none | `$DIBS_URL`, else the default SQLite file of this user; `SetupRequired` where a user has no home directory |

`postgresql+driver://`, as SQLAlchemy writes it, is taken as `postgresql://`. Other packages can add stores with the
entry point group `dibs.stores`. An unknown option is an error, and so is one that stands twice.
In names and passwords, characters that mean something in a URL are written as `%` and two digits: `#` is `%23`, `@` is
`%40`, and `/` is `%2F`.

## Options of every URL

An argument of `connect()` wins over the option in the URL.
"""
STORE_OPTIONS = """\
`info`, a small JSON object shown with a client's leases, is an argument of `connect()` only.

## Options of a store

| store | option | meaning | default |
| --- | --- | --- | --- |
| SQLite | `table` | the table; the others are named after it | `dibs_lease` |
| PostgreSQL | `table` | the same | `dibs_lease` |
| PostgreSQL | `schema` | the schema of the tables | `public` |
| MySQL | `table` | the same | `dibs_lease` |
| MySQL | `driver`, `unix_socket`, `ssl_…` | see [Use MySQL or MariaDB](../how-to/mysql.md) | |
| Redis | `prefix`, `min_replicas`, `sentinel`, `cluster`, … | see [Use Redis or Valkey](../how-to/redis.md) | |
| memcached | `tls`, `tls_…`, `spread` | see [Use memcached](../how-to/memcached.md) | |
| etcd | `prefix`, `ca`, `cert`, `key` | see [Use etcd](../how-to/etcd.md) | |
| ZooKeeper | `tickTime`, `maxSessionTimeout`, `tls`, `ssl_…` | see [Use ZooKeeper](../how-to/zookeeper.md) | |

A PostgreSQL URL also carries the parameters of PostgreSQL's client library that is installed (`sslmode`, `sslrootcert`,
`target_session_attrs`, `application_name`, `options`, `service` and the others), except `connect_timeout`:
`request_timeout` is that.

## Environment

| variable | meaning |
| --- | --- |
| `DIBS_URL` | where leases are kept, for `dibs.connect()` without an argument and for the command line |
| `XDG_STATE_HOME` | the folder in which `dibs/dibs.db` is the default file (`~/.local/state` if unset) |
| `DIBS_NAME`, `DIBS_SLOT`, `DIBS_FENCING_TOKEN` | set by `dibs run` and `dibs elect` for their command |
| `DIBS_QUEUE`, `DIBS_JOB_ID`, `DIBS_FENCING_TOKEN`, `DIBS_TRIES` | set by `dibs work` for its command |
| `DIBS_SOURCE` | set by `dibs claim` for its command |
| `PGPASSWORD`, `PGPASSFILE`, `PGSERVICE` and others | read by PostgreSQL's client library, as by `psql` |
"""

EXAMPLE_URLS = {
    "SQLite": "sqlite:////var/lib/app/dibs.db",
    "PostgreSQL": "postgresql://app@db/prod",
    "MySQL and MariaDB": "mysql://app@db/prod",
    "Redis and Valkey": "redis://cache",
    "memcached": "memcached://cache",
    "etcd": "etcd://etcd1,etcd2",
    "ZooKeeper": "zookeeper://zk1,zk2",
    "memory": "memory://",
}
FACES = (
    (dibs.Client, dibs.AsyncClient, "client"),
    (dibs.Lock, dibs.AsyncLock, "lock"),
    (dibs.Lease, dibs.AsyncLease, "lease"),
    (dibs.MultiLock, dibs.AsyncMultiLock, "multilock"),
    (dibs.MultiLease, dibs.AsyncMultiLease, "multilease"),
    (dibs.Semaphore, dibs.AsyncSemaphore, "semaphore"),
    (dibs.RWLock, dibs.AsyncRWLock, "rwlock"),
    (dibs.Once, dibs.AsyncOnce, "once"),
    (dibs.OnceRun, dibs.AsyncOnceRun, "run"),
    (dibs.Claims, dibs.AsyncClaims, "claims"),
    (dibs.Batch, dibs.AsyncBatch, "batch"),
    (dibs.Item, dibs.AsyncItem, "item"),
    (dibs.Queue, dibs.AsyncQueue, "queue"),
    (dibs.Job, dibs.AsyncJob, "job"),
    (dibs.JobBatch, dibs.AsyncJobBatch, "batch"),
    (dibs.Election, dibs.AsyncElection, "election"),
    (dibs.Term, dibs.AsyncTerm, "term"),
    (dibs.lost.Lost, dibs.aio.AsyncLost, "lease.lost"),
)
BLOCKS = {
    dibs.Client: "`with client:` closes it at the end.",
    dibs.Lock: "`with lock as lease:` acquires, or raises LockTimeout. At the end it releases, and raises LeaseLost if "
    "the lease was lost and the block has no error of its own.",
    dibs.Lease: "`with lease:` releases at the end, with LeaseLost as above, raised at once where the lease is over "
    "already.",
    dibs.MultiLock: "`with multilock as lease:` as with a lock.",
    dibs.MultiLease: "`with multilease:` releases all of it at the end, with LeaseLost as above.",
    dibs.Semaphore: "`with semaphore as lease:` as with a lock; `lease.slot` is a number nobody else has meanwhile.",
    dibs.Batch: "`for item in batch:` works it off: going on to the next item finishes the one before. `with batch:` "
    "gives back what is left at the end, and never raises LeaseLost: what was lost stands in `batch.lost`.",
    dibs.JobBatch: "`for job in batch:` works it off: going on to the next job finishes the one before as done. "
    "`with batch:` gives back what is left at the end; an error fails the job at hand.",
    dibs.Term: "`with term:` resigns at the end, with LeaseLost as with a lease.",
    dibs.Once: "`with once as run:` begins a run; LockTimeout when somebody else is at it for longer than `timeout`, "
    'or with `on_busy="skip"` a run that is false. At the end as below.',
    dibs.OnceRun: "`with run:` marks the work as done at the end, unless the block has an error. LeaseLost when the "
    "lease was lost, ResultNotKept when only the result cannot be kept, StoreUnavailable when the store did not "
    "confirm the mark.",
}
RECORDS: dict[type, str] = {
    dibs.LeaseRecord: "`client.leases()` and `client.holder()` return it.",
    dibs.Pause: "`client.pause()` and `client.pauses()` return it.",
    dibs.DeadItem: "`claims.dead()` returns them.",
    dibs.HistoryRecord: "`client.history()` returns them.",
    dibs.Leader: "`election.leader()` returns it, `election.observe()` gives one after the other.",
    dibs.NewJob: "For `queue.put_many()`.",
    dibs.JobRecord: "`queue.job()`, `queue.jobs()` and `queue.dead()` return them.",
    dibs.QueueDepth: "`queue.depth()` and `client.queues()` return it.",
    dibs.Advice: "`queue.advice()` returns it.",
    dibs.QueueStats: "`queue.stats()` returns it.",
    dibs.OnceRecord: "`once.done()` returns it, and `run.done` is one.",
}
CAPABILITY_WORDS = {
    "survives_restart": "A restart of the store keeps leases and tokens",
    "fencing_token": "How reliably tokens rise",
    "clock": "The clock on which leases end",
    "waiting_line": "In which order waiters are served",
    "signal": "What wakes a waiter",
    "queue": "Durable queues of work: `client.queue(name)`",
    "durable": "An acknowledged grant outlives a crash and a power cut (SQLite: its token is never repeated)",
    "ttl_min_s": "Shortest ttl, in seconds",
    "ttl_max_s": "Longest ttl, in seconds",
    "resolution_s": "How far around an expiry the answer may go either way, in seconds",
    "margin_s": "How much earlier than the allowance for clock rates trust ends, in seconds",
    "permits": "Semaphores, and locks for readers and writers",
    "deadlocks": "Rings of waiters are told ([deadlocks](../explanation/deadlocks.md))",
    "tries": "The tries of items are counted: `client.claims(source, max_tries=…)`",
    "query": 'What a query of your own finds is claimed: `claims.take(query=…)`; rows keep claims: `mode="columns"`',
    "steady": 'Leases end on a clock that nobody sets; with `takeover="observe"` they do wherever that is possible',
    "observe": '`takeover="observe"`: no step of the server\'s clock ends a lock',
    "pause": "New grants can be paused by an operator",
    "history": "Who had a name, and when, can be written down",
    "guard": "A lease can be pinned in a transaction of your own: `lease.guard(connection)`",
}
CLIENT_OPTION_WORDS = {
    "namespace": "separates applications in one store",
    "ttl": "the default ttl of its locks, in seconds",
    "request_timeout": "seconds one call to the store may take",
    "patience": "seconds for which a store that was reached before is tried again",
    "require": "promises without which nothing is handed out and no job is put, with commas between: "
    + ", ".join(f"`{name}`" for name in PROMISES),
    "lock_order_warnings": "warn when two names are taken in both orders: `yes` or `no`",
    "takeover": "`observe`: whoever takes a lock over has watched it for a ttl, so that no step of the server's clock "
    "lets two in ([how-to](../how-to/when-the-servers-clock-may-jump.md)); otherwise `expiry`",
}
EXIT_CODES = (
    ("0", "done; with `--on-busy skip` also: not run, because somebody else had it"),
    (
        "NOT_HELD",
        (
            "`show`, `break`: nobody holds it, or not with that token; `resume`: no pause; `doctor`: a promise is "
            "not kept; `take`: no job; `jobs`, `cancel`, `requeue`, `forget`: no such job"
        ),
    ),
    ("USAGE", "wrong usage"),
    ("UNREACHABLE", "the store cannot be reached"),
    ("BUG", "a fault of dibs; with `PYTHONDEVMODE=1` in the environment it shows where"),
    ("SYSTEM", "the system refused a process"),
    ("UNWRITABLE", "output could not be written, although what was asked for may have been done, or input not be read"),
    (
        "BUSY",
        (
            "held by another, or paused, for as long as it was to wait; `elect`: standbys enough, or replaced as one; "
            "`claim`: others have all; `put`: a job has this key; to `dibs work` from its command: not now"
        ),
    ),
    ("LOST", "the lease was lost, the command stopped; `done`: the job was not yours any more"),
    ("MISCONFIGURED", "not set up, or misconfigured"),
    ("NOT_EXECUTABLE", "the command cannot be executed"),
    ("NOT_FOUND", "the command was not found"),
    ("SIGNALLED", "this plus n: signal n ended the command, or dibs while it waited"),
)
# Constants by module: what a user meets, and what goes on inside.
LIMITS = {
    "dibs.names": {
        "NAME_BYTES_MAX": "longest name, in bytes of UTF-8",
        "NAMESPACE_CHARS_MAX": "longest namespace, in characters",
        "INFO_BYTES_MAX": "longest info, in bytes of JSON",
        "TTL_MAX_S": "longest ttl that any store may offer, in seconds",
        "WAIT_MAX_S": "longest finite timeout, in seconds",
    },
    "dibs.desk": {
        "TTL_DEFAULT_S": "ttl where none is given, in seconds",
        "REQUEST_TIMEOUT_MAX_S": "longest request_timeout, in seconds",
        "TERMS_MAX": "different sets of lock options that a client remembers having checked",
    },
    "dibs.history": {"HISTORY_KEPT_MAX": "most grants of one name that a store can be told to keep"},
    "dibs.pausing": {
        "PAUSE_DEFAULT_S": "how long a pause lasts where nothing is said, in seconds",
        "SETTLE_S": "`pause()` returns so long after it was written: then it is in force",
    },
    "dibs.stores.sqlite_file": {"SQLITE_MIN": "oldest SQLite"},
    "dibs.stores.sqlite_boots": {
        "TOKENS_PER_BOOT": "by how much the floor under the tokens rises at each boot of the machine",
    },
    "dibs.stores.postgres_link": {"SERVER_MIN": "oldest PostgreSQL, as servers number themselves (12)"},
    "dibs.jobs": {
        "PUT_MAX": "most jobs of one put",
        "TAKE_MAX": "most jobs of one take",
        "PAYLOAD_BYTES_MAX": "longest payload of a job, in bytes",
        "ERROR_CHARS_MAX": "longest error that is kept with a job, in characters",
        "PRIORITY_MAX": "greatest priority of a job, and the smallest with a minus",
        "GROUP_LIMIT_MAX": "greatest group_limit",
    },
    "dibs.new_jobs": {
        "PUT_BYTES_MAX": "most bytes of payload in one put",
        "TRIES_MAX": "greatest max_tries",
    },
    "dibs.load": {"WINDOW_S": "advice is measured over so many seconds"},
    "dibs.crew": {"WORKERS_MAX": "most workers of one run"},
    "dibs.multilock": {
        "NAMES_MAX": "most names in one multilock",
        "PAUSES_MAX": "one that is refused once more pauses for up to so many times what asking took",
        "PAUSE_MAX_S": "… and for so long at most",
        "ASKS_MAX": "so many times more it asks for the rest before it gives back what it has waited for",
    },
    "dibs.stores.identifiers": {"TABLE_BYTES_MAX": "longest table name, in bytes"},
}
INSIDE = {
    "dibs.session": {
        "REQUEST_TIMEOUT_S": "one call to the store takes at most this long (option `request_timeout`)",
        "PATIENCE_S": "a store that was reached before is tried again for this long (option `patience`)",
        "MUTEX_S": "a thread that closes a generator and sees the mutex had for this long has it: garbage is collected",
        "MUTEX_LOOK_S": "so often it looks",
    },
    "dibs.trust": {
        "DRIFT": "by which part clocks may run faster or slower than each other",
        "RENEWALS_PER_TTL": "renewals in a ttl",
        "ROUNDING_S": "moments no farther apart are one when a renewal is planned",
    },
    "dibs.pending": {
        "BATCH_MAX": "requests in one call to the store",
        "CROWD_MIN": "from so many tasks on that ask a server at once, a call carries the requests of half of them",
        "TURN_S": "where a call lasts so many seconds for each of that half, or more, they share one instead",
        "QUEUE_MAX": "requests that may wait for a batch; more acquires are refused at once",
        "WEIGHT_MAX": "bytes of payload in one call to the store, unless a single put has more",
    },
    "dibs.lane": {
        "IDLE_S": "the claim lane's thread ends after so many seconds without work",
        "BACKOFF_MIN_S": "first pause before a failed batch is repeated; it doubles",
        "BACKOFF_MAX_S": "last pause",
        "SERVED": "what serving answers instead of a pause when nothing is left",
        "ROW_PAUSE_S": "pause before a renewal or release is repeated whose row, with claims in columns, is locked",
        "PART_PAUSE_S": "pause before a request is repeated whose server, one of several, is away",
    },
    "dibs.busy": {
        "BUSY_PAUSE_MIN_S": "first pause before a call is repeated that the store was too busy to take",
        "BUSY_PAUSE_MAX_S": "and the longest",
        "BUSY_TRIES": "tries in vain after which that pause doubles",
    },
    "dibs.renewer": {
        "RENEW_MAX": "leases renewed by one call",
        "COALESCE": "renewals due within this part of their interval go with those that are due now",
        "RETRY_PART": "pause before a renewal without an answer is tried again, as a part of its interval",
        "RETRY_MAX_S": "longest such pause",
        "IDLE_S": "the renewal lane's thread ends after so many seconds without leases",
    },
    "dibs.along": {
        "ALONG_MAX": "those who wait for permits of one name that are asked for along with the first, at most",
    },
    "dibs.hints": {"WATCH_RETRY_S": "pause before a broken source of hints is opened again"},
    "dibs.waiting": {
        "POLL_MIN_S": "a waiter asks again after a random time, at least this",
        "POLL_MAX_S": "and at most this",
        "POLL_BEAT_S": "those of one client that do so ask together, at multiples of this",
        "FRESH_S": "when a caller's time is over, an answer of no longer ago than this is its answer",
        "ASK_AGAIN_MIN_S": "no waiter asks sooner than this after it was refused",
        "LOOK_AGAIN_S": "whoever waits for jobs asks again so soon after a hint that brought nothing",
        "HINTS_MAX": "of so many names it is remembered when the last hint came",
        "LOOK_PART": "pause between looks for a change, as a part of the time waited so far",
        "LOOK_GROWTH_MAX": "longest such pause, as a multiple of the shortest (SQLite: 1 ms)",
        "IDLE_S": "the waiting thread ends after so many seconds without waiters",
        "NOTE_AFTER_S": "a caller that holds something and has waited for this long leaves a waiting note",
    },
    "dibs.notes": {
        "BEAT_S": "a waiting note is written anew this often",
        "BEAT_EACH_S": "or, where very many of a process wait, after so many seconds for each of them",
        "NOTE_TTL_S": "a waiting note ends this long after its process died",
        "PROOF_BEATS": "so many beats after a look prove that a waiter was there at it",
        "TOLD_WITHIN_S": "a ring is told within this of its closing",
        "LOOK_MIN_S": "the notes of others are read at most this often",
        "SOON_S": "what ends by itself within this is no part of a ring",
        "YOUNG_S": "a waiter reads notes often for this long",
        "LOOK_S": "and then this often",
        "LOOK_PART": "but after a pause of so many times what the reading took",
        "GATHER_S": "new waiters gather this long, to go in one call",
        "BEATS_MAX": "so many notes are written by one call",
        "NUMBERS_MIN": "numbers of notes are drawn from 1 to this",
        "NUMBERS_MAX": "and, where they are taken, up to this",
        "TRIES": "so many numbers are tried before the next beat",
        "NAMES_MAX": "so many names are looked at to make sure of a ring",
        "IDLE_S": "the thread for notes ends after so many seconds without waiters",
    },
    "dibs.note": {
        "HOLDS_BYTES_MAX": "what a note says of what is held, in bytes of info",
        "OWNER_CHARS_MAX": "and of its thread or task, in characters",
        "SHOWN_MAX": "so many waiters of a ring are spelled out in an error",
    },
    "dibs.steps": {
        "LOOK_MIN_S": "whoever waits for a run of a once, or the end of a job, looks after this (and so much more for "
        "each who waits for it in the same process)",
        "LOOK_GROWTH": "each further pause is so many times as long",
        "LOOK_MAX_S": "and no pause longer than this",
    },
    "dibs.lock_order": {
        "PAIRS_MAX": "pairs of names whose order is remembered",
        "HELD_MAX": "so many of the names that a caller holds are paired with the one it takes",
    },
    "dibs.pauses": {
        "PAUSES_FRESH_S": "a first request for a name is sent by a list of pauses that is no older than this",
        "PAUSED_FRESH_S": "and refused by one that is no older than this",
        "ASK_AGAIN_S": "a waiter that was told of a pause asks again after this at the latest",
    },
    "dibs.campaign": {
        "LOOK_MIN_S": "a reserve looks whether somebody leads after at least this long",
        "LOOK_MAX_S": "and after at most this long",
        "RESERVE_STEP_S": "how long a reserve sees nobody lead before it asks, for each step of its priority",
        "PRIORITY_MIN": "lowest priority of a candidate",
        "LOOK_UP_S": "a standby looks up from waiting this often, at what it was told and after its seat",
    },
    "dibs.leaders": {
        "OBSERVE_MIN_S": "an observer reads the store at most this often",
        "OBSERVE_JITTER": "by up to which part its pauses are longer than asked",
    },
    "dibs.standby": {
        "SEAT_TTL_S": "how long a standby's seat lasts without renewal",
        "STANDBY_MAX": "the greatest `standby_max`: a newcomer asks for one seat after the other",
        "REPLACE_TRIES": "how often a newcomer that replaces tries, when other newcomers are faster",
        "NAME_BYTES_MAX": "longest name that stands in the name of its seats as it is",
    },
    "dibs.succession": {
        "OFFER_S": "how long a leader waits by default for the successor that it named",
        "SPARE_S": "an offered term lasts this much longer",
        "LOOK_S": "a leader looks this often whether its offer was taken up",
    },
    "dibs.handover": {
        "STATE_VERSION": "the format of an exported lease",
        "CLAIM_CHARS_MAX": "longest claim id in one",
    },
    "dibs.store": {
        "LINE_GRACE_S": "a free name is kept this long for waiters ahead in line",
        "TOLD_MAX": "whom permits are told of at once, at most: so many of those in line",
        "LAST_TICKET": "the place of whoever did not line up",
        "ANY_TICKET": "the place of whoever was never told it",
        "ANY_SLOT": "the slot of whoever was never told it",
        "PERMITS_MAX": "the most permits a name may have; a lock for readers and writers has so many",
        "PIN_LOOK_S": "a name that only a pin keeps is worth asking for again after this long",
        "PIN_KEEP_S": "how long a lease that may be pinned is kept when it is given back",
    },
}


class Unexplained(Exception):
    """The code has something that the tables above know nothing of."""


# -- docstrings, signatures and tables as Markdown ---------------------------------------------------------------------


def doc(thing: object) -> str:
    """The docstring as Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(getattr(thing, "__doc__", None) or ""))


def annotation(value: Any) -> str:
    """An annotation as it is written (NamedTuple wraps it), or nothing."""
    if value is inspect.Parameter.empty:
        return ""
    text = getattr(value, "__forward_arg__", value)
    return text if isinstance(text, str) else str(getattr(text, "__name__", text))


def parameters(function: Any) -> list[str]:
    """The parameters without self, each with its annotation and default."""
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        name = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "") + name  # noqa: PLW2901
        kind = annotation(parameter.annotation)
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        words.append(name + (f": {kind}" if kind else "") + default)
    return words


def returned(function: Any) -> str:
    return annotation(inspect.signature(function).return_annotation)


def signature(name: str, function: Any) -> str:
    """A block with the signature, on several lines when it is long."""
    words, arrow = parameters(function), f" -> {returned(function)}"
    text = f"{name}({', '.join(words)}){arrow}"
    if len(text) > 100:
        text = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"
    return f"```text\n{text}\n```\n"


def table(head: Row, rows: list[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def number(value: object) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ".".join(map(str, value[:2]))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e6 else f"{value:,.6g}"
    if isinstance(value, int):
        for less, words in ((0, ""), (1, " - 1")):
            if value >= 2**40 and (value + less).bit_count() == 1:
                return f"2^{(value + less).bit_length() - 1}{words}"
        return f"{value:,}"
    return str(value)


# -- the pages ---------------------------------------------------------------------------------------------------------


def api() -> list[str]:
    parts = [API, "## connect and connect_async\n", signature("dibs.connect", dibs.connect), doc(dibs.connect) + "\n"]
    assert parameters(dibs.connect) == parameters(dibs.connect_async)
    parts.append(f"*asyncio:* `dibs.connect_async()`, with the same parameters. {doc(dibs.connect_async)}\n")
    for plain, awaited, prefix in FACES:
        parts.append(f"## {plain.__name__} and {awaited.__name__}\n\n{doc(plain)}\n\n*asyncio:* {doc(awaited)}\n")
        if set(members(plain)) != set(members(awaited)):
            raise Unexplained(f"{plain.__name__} and {awaited.__name__} do not have the same members")
        properties = [name for name in members(plain) if isinstance(static(plain, name), property)]
        if properties:
            rows = [property_row(prefix, name, plain, awaited) for name in properties]
            parts.append(table(("property", "type", "meaning"), rows))
        parts += [method(prefix, name, plain, awaited) for name in members(plain) if name not in properties]
        if plain in BLOCKS:
            parts.append(f"### with {prefix}\n\n{BLOCKS[plain]} *asyncio: `async with`.*\n")
        if any("__call__" in vars(base) for base in plain.__mro__):
            parts.append(f"### @{prefix}\n\n{doc(static(plain, '__call__'))} *asyncio: for async functions.*\n")
    for record, source in RECORDS.items():
        kinds = inspect.get_annotations(record)
        fields: list[Row] = [(f"`{name}`", f"`{annotation(kinds[name])}`") for name in kinds]
        parts += [f"## {record.__name__}\n\n{doc(record)} {source}\n", table(("field", "type"), fields)]
    parts += [
        f"## Capabilities\n\n{doc(Capabilities)} The fields: [capabilities](capabilities.md).\n",
        "## dibs.fencing\n",
        signature("dibs.fencing.advance", dibs.fencing.advance),
        doc(dibs.fencing.advance) + "\n",
        f"*asyncio:* `await dibs.fencing.advance_async(…)`. {doc(dibs.fencing.advance_async)}\n",
        signature("dibs.fencing.trigger_sql", dibs.fencing.trigger_sql),
        doc(dibs.fencing.trigger_sql) + "\n",
        "## dibs.columns\n",
        signature("dibs.columns.migration_sql", dibs.columns.migration_sql),
        doc(dibs.columns.migration_sql) + "\n",
        "## dibs.rows\n",
        signature("dibs.rows.lock", dibs.rows.lock),
        doc(dibs.rows.lock) + "\n",
        f"*asyncio:* `await dibs.rows.lock_async(…)`. {doc(dibs.rows.lock_async)}\n",
        "## Errors\n\nThe tree: [errors](errors.md).\n",
        "## dibs.testing\n",
        signature("dibs.testing.check_store", dibs.testing.check_store),
        doc(dibs.testing.check_store) + "\n",
    ]
    return parts


def members(kind: type) -> list[str]:
    """Public members in the order in which they are written, those of the base first."""
    found = [name for base in reversed(kind.__mro__[:-1]) for name in vars(base) if not name.startswith("_")]
    return list(dict.fromkeys(found))


def static(kind: type, name: str) -> Any:
    return inspect.getattr_static(kind, name)


def is_awaited(member: Any) -> bool:
    function = member.fget if isinstance(member, property) else member
    return inspect.iscoroutinefunction(function) or returned(function).startswith(("Awaitable[", "Coroutine["))


def property_row(prefix: str, name: str, plain: type, awaited: type) -> Row:
    one, two = static(plain, name), static(awaited, name)
    meaning = " ".join(doc(one).split()) + (" *asyncio: awaited.*" if is_awaited(two) else "")
    return f"`{prefix}.{name}`", f"`{filled(plain, returned(one.fget))}`", meaning


def method(prefix: str, name: str, plain: type, awaited: type) -> str:
    one, two = static(plain, name), static(awaited, name)
    if parameters(one) != parameters(two):
        raise Unexplained(f"{plain.__name__}.{name} and {awaited.__name__}.{name} have different parameters")
    notes = ["awaited."] if is_awaited(two) else []
    if not comparable(doc(one)).startswith(comparable(doc(two))) and not re.search(r"`dibs\.[A-Z]", doc(two)):
        notes.append(doc(two))
    note = f"\n*asyncio:* {' '.join(notes)}\n" if notes else ""
    shown = filled(plain, signature(f"{prefix}.{name}", one))
    return f"### {prefix}.{name}\n\n{shown}\n{doc(one)}\n{note}"


def filled(plain: type, text: str) -> str:
    """A signature with the type that its variable stands for: Lockable[Lease] has a T, and it is Lease."""
    for base in re.findall(r"\[(\w+)\]", inspect.getsource(plain).partition(":")[0]):
        text = re.sub(r"\b[TL]\b", base, text)
    return text


def comparable(text: str) -> str:
    """Docstrings of the two faces that say the same differ in these words alone."""
    text = text.replace("AsyncLease", "Lease").replace("an `Lease", "a `Lease").replace("task", "thread")
    text = text.replace("AsyncMulti", "Multi").replace("an `Multi", "a `Multi")
    return " ".join(text.split())


def capabilities() -> list[str]:
    stores = [locate(url)[0].capabilities for url in EXAMPLE_URLS.values()]
    rows: list[Row] = [
        (f"`{field}`", CAPABILITY_WORDS[field], *[number(getattr(store, field)) for store in stores])
        for field in Capabilities._fields
        if field != "store"
    ]
    return [CAPABILITIES, table(("field", "meaning", *[store.store for store in stores]), rows)]


def command_line() -> list[str]:
    return [
        CLI,
        table(("command", "prints"), JSON),
        *[
            f"## {' '.join(['dibs', *words])}\n\n```text\n{help_text(words)}\n```\n"
            for words in ([], *[[command] for command in dibs.cli.COMMANDS])
        ],
    ]


def help_text(words: list[str]) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        dibs.cli.main([*words, "--help"])
    # Until Python 3.13 the value stood behind the short option, too: -n N, --limit N.
    return re.sub(r"^(  -\w) (\w+)(, --\w+ \2) ", r"\1\3 " + "  ", text.getvalue().rstrip(), flags=re.MULTILINE)


def conformance() -> list[str]:
    cases = {run.case.name: (run.case, "store" if run.face == "store" else "threads and tasks") for run in runs()}
    numbers = {int(found) for case, _ in cases.values() for found in re.findall(r"\bP(\d+)\b", case.promise)}
    groups = [(f"P{n}", rf"\bP{n}\b") for n in sorted(numbers)]
    parts = [CONFORMANCE]
    for title, pattern in (*groups, ("What the contract asks besides", r"^(?!.*\bP\d)")):
        rows: list[Row] = [
            (f"`{case.name}`", where, re.sub(r"``(.+?)``", r"`\1`", case.sentence))
            for case, where in cases.values()
            if re.search(pattern, case.promise)
        ]
        if rows:
            parts.append(f"## {title}\n\n" + table(("case", "on", "what it proves"), rows))
    return parts


def errors() -> list[str]:
    tree = "\n".join(["DibsError", *below(dibs.DibsError, 1)])
    parts = [ERRORS, f"```text\n{tree}\n```\n"]
    for kind in error_kinds():
        code = dibs.cli.exit_code(kind("")) if kind is not dibs.DibsError else dibs.cli.BUG
        others = [base.__name__ for base in kind.__bases__ if base not in (dibs.DibsError, Exception)]
        facts = [f"is also a `{other}`" for other in others]
        facts += [f"`dibs` exits with {code}"] if code != dibs.cli.BUG else []
        parts.append(f"## {kind.__name__}\n\n{doc(kind)}\n" + (f"\n*{'; '.join(facts)}.*\n" if facts else ""))
    parts.append("## Exit codes\n\nOtherwise `dibs run` exits with the code of its command.\n")
    codes: list[Row] = [(getattr(dibs.cli, name, name), words) for name, words in EXIT_CODES]
    return [*parts, table(("code", "meaning"), codes)]


def error_kinds() -> list[type[dibs.DibsError]]:
    return [kind for kind in vars(dibs.errors).values() if isinstance(kind, type) and issubclass(kind, dibs.DibsError)]


def below(root: type, depth: int) -> list[str]:
    lines = []
    for kind in error_kinds():
        if root in kind.__bases__:
            others = ", ".join(base.__name__ for base in kind.__bases__ if base is not root)
            lines.append("  " * depth + kind.__name__ + (f"  ({others})" if others else ""))
            lines += below(kind, depth + 1)
    return lines


def schema() -> list[str]:
    shown = [(name, locate(url)[0].open().schema().rstrip()) for name, url in EXAMPLE_URLS.items()]
    return [
        SCHEMA,
        *[f"## {name}\n\n```{'sql' if 'CREATE TABLE' in text else 'text'}\n{text}\n```\n" for name, text in shown],
    ]


def urls_and_options() -> list[str]:
    check_constants()
    defaults = {**dibs.desk.DEFAULTS, "ttl": dibs.desk.TTL_DEFAULT_S}
    options: list[Row] = [
        (f"`{name}`", CLIENT_OPTION_WORDS[name], f"`{number(defaults[name])}`".replace("``", "none"))
        for name in dibs.connecting._CLIENT_OPTIONS
    ]
    return [
        URLS,
        table(("option", "meaning", "default"), options),
        STORE_OPTIONS,
        "## Limits\n",
        table(("limit", "value", "meaning"), constants(LIMITS)),
        "## Inside\n\nHow the machinery is tuned. Not options, and not promised to stay.\n",
        table(("constant", "value", "meaning"), constants(INSIDE)),
    ]


def versions() -> list[str]:
    from dibs.stores import memcached_check, mysql_link, postgres_login, redis_wire, sqlite_file

    needed = {
        "SQLite": sqlite_file.SQLITE_MIN[:2],
        "PostgreSQL": (postgres_login.SERVER_MIN // 10_000,),
        "MariaDB": mysql_link.MARIADB_MIN,
        "MySQL": mysql_link.MYSQL_MIN,
        "Redis, Valkey": (redis_wire.SERVER_MIN, 0),
        "memcached": memcached_check.SERVER_MIN,
        "etcd": (3, 4),
        "ZooKeeper": (3, 5),
    }
    rows: list[Row] = [("Python", "3.10", *RUN_ON["Python"])]
    rows += [(store, ".".join(map(str, least)), *RUN_ON[store]) for store, least in needed.items()]
    extras = (FOLDER.parent.parent / "pyproject.toml").read_text()
    for driver, run_on in DRIVERS.items():
        oldest = re.search(rf'"{driver}(?:\[\w+\])?>=([\d.]+)"', extras)
        assert oldest, f"{driver} is in no extra"
        rows.append((f"{driver} (Python)", oldest[1], *run_on))
    return [VERSIONS, table(("", "needs", "all tests", "in part"), rows)]


def constants(explained: dict[str, dict[str, str]]) -> list[Row]:
    return [
        (f"`{module.rpartition('.')[2]}.{name}`", number(getattr(import_module(module), name)), meaning)
        for module, words in explained.items()
        for name, meaning in words.items()
    ]


def check_constants() -> None:
    """Every number that a module of the core names where it defines it is explained."""
    for module_name, words in INSIDE.items():
        module = import_module(module_name)
        named = set(re.findall(r"^([A-Z][A-Z0-9_]*) = ", inspect.getsource(module), re.MULTILINE))
        numbers = {name for name in named if type(getattr(module, name)) in (int, float)} - {"FOREVER"}
        if numbers - set(words):
            raise Unexplained(f"{module_name}: {', '.join(sorted(numbers - set(words)))}; explain it in {__file__}")


PAGES = {
    "api.md": api,
    "capabilities.md": capabilities,
    "cli.md": command_line,
    "conformance.md": conformance,
    "errors.md": errors,
    "schema.md": schema,
    "urls-and-options.md": urls_and_options,
    "versions.md": versions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the reference pages that come from the code.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a page is out of date")
    args = parser.parse_args()
    os.environ["COLUMNS"] = "100"
    pages = {FOLDER / name: "\n".join([HEAD, "", *parts()]) for name, parts in PAGES.items()}
    stale = [page for page, text in pages.items() if not page.is_file() or page.read_text("utf-8") != text]
    strangers = sorted(set(FOLDER.glob("*.md")) - set(pages))
    if args.check:
        for page in stale:
            print(f"docs/reference/{page.name} is out of date: run `make docs`")
        for page in strangers:
            print(f"docs/reference/{page.name} is printed by nobody")
        return 1 if stale or strangers else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for page in stale:
        page.write_text(pages[page], "utf-8")
        print(f"wrote docs/reference/{page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
