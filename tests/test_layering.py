"""Who may import whom, where time and asyncio live, what `import dibs` costs, and how long a module may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "dibs"
LINES_MAX = 400

# Imports point one way: faces → primitives → session → lanes → contract. Each module may import, when it runs, what is
# listed here and nothing else of dibs; imports for type checkers only are free.
CONTRACT = {"dibs.clock", "dibs.errors", "dibs.store", "dibs.trust"}
DATA = {"dibs.names", "dibs.hold", "dibs.holdings", "dibs.owners", "dibs.terms", "dibs.steps"}
LANES = {
    "dibs.ask",
    "dibs.pending",
    "dibs.lane",
    "dibs.along",
    "dibs.hints",
    "dibs.waiting",
    "dibs.wishes",
    "dibs.renewer",
    "dibs.before",
    "dibs.notes",
    "dibs.lock_order",
}
PRIMITIVES = {"dibs.grips", "dibs.lease", "dibs.lock", "dibs.multilock", "dibs.semaphore", "dibs.rwlock"}
AIO = {
    f"dibs.aio.{subject}"
    for subject in ("lease", "lockable", "multilock", "semaphore", "rwlock", "once", "election", "claims", "queue")
}
ALLOWED: dict[str, set[str]] = {
    # The contract, and what has no opinion on anything above it.
    "dibs._version": set(),
    "dibs._typing": set(),
    "dibs.clock": set(),
    "dibs.errors": set(),
    "dibs.trust": set(),
    "dibs.store": {"dibs.errors"},
    "dibs.abilities": set(),
    "dibs.threads": {"dibs.errors"},
    "dibs.jobs": {"dibs.store"},
    "dibs.queries": {"dibs.errors"},
    "dibs.urls": set(),
    "dibs.columns": {"dibs.door", "dibs.errors", "dibs.store", "dibs.stores.identifiers"},
    # Stores: the contract and their own kind. Never a session, and never each other.
    "dibs.stores": set(),
    "dibs.stores.identifiers": {"dibs.errors"},
    "dibs.stores.greetings": {"dibs.clock"},
    "dibs.stores.inlet": {"dibs.clock", "dibs.stores.keepalive"},
    "dibs.stores.keepalive": set(),
    # What several of them share: one decision, and one way through a vector of requests.
    "dibs.stores.permits": {"dibs.store"},
    "dibs.stores.rounds": {"dibs.store"},
    "dibs.stores.told": {"dibs.jobs", "dibs.store"},
    "dibs.stores.parts": {"dibs.errors", "dibs.store"},
    "dibs.stores.columns": {
        "dibs.columns",
        "dibs.errors",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.rounds",
        "dibs.stores.tables",
    },
    "dibs.stores.tables": {"dibs._version", "dibs.errors"},
    "dibs.stores.turns": set(),
    "dibs.stores.memory_forks": {"dibs.clock"},
    "dibs.stores.memory": {
        "dibs.clock",
        "dibs.store",
        "dibs.stores.memory_forks",
        "dibs.stores.memory_jobs",
        "dibs.stores.permits",
    },
    "dibs.stores.memory_jobs": {"dibs.errors", "dibs.jobs", "dibs.store", "dibs.stores.memory_forks"},
    "dibs.stores.sqlite": {
        *CONTRACT,
        "dibs.stores",
        "dibs.stores.identifiers",
        "dibs.stores.sqlite_address",
        "dibs.stores.sqlite_check",
        "dibs.stores.sqlite_columns",
        "dibs.stores.sqlite_file",
        "dibs.stores.sqlite_history",
        "dibs.stores.sqlite_jobs",
        "dibs.stores.sqlite_many",
        "dibs.stores.sqlite_pins",
        "dibs.stores.sqlite_pools",
        "dibs.stores.sqlite_query",
        "dibs.stores.sqlite_sql",
        "dibs.stores.sqlite_watch",
    },
    "dibs.stores.sqlite_address": {"dibs.errors"},
    "dibs.stores.sqlite_boots": {"dibs.clock", "dibs.errors", "dibs.stores.sqlite_sql"},
    "dibs.stores.sqlite_check": {"dibs.errors", "dibs.store", "dibs.stores.sqlite_file"},
    "dibs.stores.sqlite_columns": {
        "dibs.clock",
        "dibs.columns",
        "dibs.errors",
        "dibs.store",
        "dibs.stores.columns",
        "dibs.stores.identifiers",
        "dibs.stores.sqlite_errors",
        "dibs.stores.sqlite_pins",
        "dibs.stores.sqlite_sql",
        "dibs.stores.tables",
    },
    "dibs.stores.sqlite_errors": {"dibs.errors", "dibs.store"},
    "dibs.stores.sqlite_file": {
        "dibs.clock",
        "dibs.errors",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.sqlite_boots",
        "dibs.stores.sqlite_errors",
        "dibs.stores.sqlite_forks",
        "dibs.stores.sqlite_inodes",
        "dibs.stores.sqlite_sql",
        "dibs.stores.tables",
    },
    "dibs.stores.sqlite_forks": {"dibs.clock", "dibs.store"},
    "dibs.stores.sqlite_inodes": set(),
    "dibs.stores.sqlite_history": {
        "dibs.clock",
        "dibs.store",
        "dibs.stores.identifiers",
        "dibs.stores.sqlite_sql",
        "dibs.stores.tables",
    },
    "dibs.stores.sqlite_jobs": {
        "dibs.clock",
        "dibs.door",
        "dibs.errors",
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.sqlite_jobs_sql",
        "dibs.stores.sqlite_jobs_talks",
        "dibs.stores.sqlite_jobs_turns",
        "dibs.stores.sqlite_pins",
        "dibs.stores.sqlite_sql",
        "dibs.stores.tables",
    },
    "dibs.stores.sqlite_jobs_turns": {"dibs.clock", "dibs.jobs", "dibs.stores.sqlite_jobs_talks"},
    "dibs.stores.sqlite_jobs_sql": {"dibs.door", "dibs.stores.identifiers"},
    "dibs.stores.sqlite_jobs_talks": {
        "dibs.door",
        "dibs.jobs",
        "dibs.stores.sqlite_jobs_sql",
    },
    "dibs.stores.sqlite_pins": {"dibs.clock", "dibs.errors", "dibs.store", "dibs.stores.identifiers"},
    "dibs.stores.sqlite_pools": {"dibs.clock", "dibs.store", "dibs.stores.permits", "dibs.stores.sqlite_sql"},
    "dibs.stores.sqlite_query": {
        "dibs.clock",
        "dibs.errors",
        "dibs.queries",
        "dibs.stores.sqlite_errors",
    },
    "dibs.stores.sqlite_many": {"dibs.clock", "dibs.store", "dibs.stores.sqlite_file", "dibs.stores.sqlite_sql"},
    "dibs.stores.sqlite_sql": {"dibs.stores.identifiers"},
    "dibs.stores.sqlite_watch": {"dibs.clock", "dibs.store", "dibs.stores", "dibs.stores.sqlite_jobs_sql"},
    "dibs.stores.postgres": {
        *CONTRACT,
        "dibs.columns",
        "dibs.stores",
        "dibs.stores.columns",
        "dibs.stores.postgres_address",
        "dibs.stores.postgres_check",
        "dibs.stores.postgres_columns",
        "dibs.stores.postgres_jobs",
        "dibs.stores.postgres_hosts",
        "dibs.stores.postgres_link",
        "dibs.stores.postgres_pools",
        "dibs.stores.postgres_query",
        "dibs.stores.postgres_sql",
        "dibs.stores.postgres_tables",
        "dibs.stores.postgres_watch",
        "dibs.stores.postgres_wire",
        "dibs.stores.rounds",
        "dibs.stores.tables",
    },
    "dibs.stores.postgres_address": {
        "dibs.stores.identifiers",
        "dibs.stores.keepalive",
        "dibs.stores.postgres_login",
    },
    "dibs.stores.postgres_check": {"dibs.store", "dibs.stores.postgres_wire", "dibs.stores.tables"},
    "dibs.stores.postgres_columns": {
        "dibs.columns",
        "dibs.errors",
        "dibs.store",
        "dibs.stores.columns",
        "dibs.stores.identifiers",
        "dibs.stores.postgres_errors",
        "dibs.stores.postgres_wire",
    },
    "dibs.stores.postgres_errors": {"dibs.errors", "dibs.store", "dibs.stores.postgres_sql", "dibs.stores.tables"},
    "dibs.stores.postgres_history": set(),
    "dibs.stores.postgres_jobs": {
        "dibs.errors",
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.postgres_jobs_flights",
        "dibs.stores.postgres_jobs_places",
        "dibs.stores.postgres_jobs_tables",
        "dibs.stores.postgres_jobs_takes",
        "dibs.stores.postgres_jobs_wire",
        "dibs.stores.postgres_jobs_within",
        "dibs.stores.postgres_wire",
        "dibs.stores.told",
    },
    "dibs.stores.postgres_jobs_flights": {"dibs.store", "dibs.stores.tables"},
    "dibs.stores.postgres_jobs_places": {"dibs.jobs"},
    "dibs.stores.postgres_jobs_sql": {"dibs.jobs"},
    "dibs.stores.postgres_jobs_tables": {
        "dibs.jobs",
        "dibs.stores",
        "dibs.stores.identifiers",
        "dibs.stores.postgres_jobs_sql",
        "dibs.stores.postgres_jobs_turns_sql",
        "dibs.stores.postgres_jobs_view_sql",
        "dibs.stores.postgres_watch",
    },
    "dibs.stores.postgres_jobs_takes": {
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.postgres_jobs_flights",
        "dibs.stores.postgres_jobs_places",
        "dibs.stores.postgres_jobs_turns",
        "dibs.stores.postgres_jobs_wire",
        "dibs.stores.postgres_wire",
    },
    "dibs.stores.postgres_jobs_turns": {
        "dibs.stores",
        "dibs.stores.postgres_jobs_flights",
        "dibs.stores.postgres_jobs_wire",
        "dibs.stores.postgres_wire",
    },
    "dibs.stores.postgres_jobs_turns_sql": {"dibs.stores.postgres_jobs_sql"},
    "dibs.stores.postgres_jobs_view_sql": {"dibs.stores.postgres_jobs_sql"},
    "dibs.stores.postgres_jobs_wire": {"dibs.jobs", "dibs.stores.postgres_wire"},
    "dibs.stores.postgres_jobs_within": {"dibs.door", "dibs.errors"},
    "dibs.stores.postgres_hosts": {"dibs.errors", "dibs.store", "dibs.stores.parts"},
    "dibs.stores.postgres_leftover": {"dibs.clock", "dibs.errors"},
    "dibs.stores.postgres_link": {
        *CONTRACT,
        "dibs.stores.postgres_errors",
        "dibs.stores.postgres_leftover",
        "dibs.stores.postgres_login",
        "dibs.stores.postgres_wire",
        "dibs.stores.tables",
    },
    "dibs.stores.postgres_login": CONTRACT,
    "dibs.stores.postgres_pools": {
        "dibs.store",
        "dibs.stores",
        "dibs.stores.postgres_pools_close",
        "dibs.stores.postgres_wire",
    },
    "dibs.stores.postgres_pools_close": {"dibs.store", "dibs.stores.permits", "dibs.stores.postgres_wire"},
    "dibs.stores.postgres_line_sql": {"dibs.store"},
    "dibs.stores.postgres_pools_sql": {"dibs.store", "dibs.stores.postgres_line_sql", "dibs.stores.postgres_sql"},
    "dibs.stores.postgres_query": {"dibs.queries"},
    "dibs.stores.postgres_renewals_sql": set(),
    "dibs.stores.postgres_sql": {"dibs.store", "dibs.stores.postgres_line_sql"},
    "dibs.stores.postgres_tables": {
        "dibs.stores",
        "dibs.stores.identifiers",
        "dibs.stores.postgres_history",
        "dibs.stores.postgres_pools_sql",
        "dibs.stores.postgres_renewals_sql",
        "dibs.stores.postgres_sql",
    },
    "dibs.stores.postgres_watch": set(),
    "dibs.stores.postgres_wire": {"dibs.errors", "dibs.store"},
    "dibs.stores.mysql": {
        *CONTRACT,
        "dibs.columns",
        "dibs.stores",
        "dibs.stores.columns",
        "dibs.stores.mysql_address",
        "dibs.stores.mysql_check",
        "dibs.stores.mysql_columns",
        "dibs.stores.mysql_jobs",
        "dibs.stores.mysql_link",
        "dibs.stores.mysql_operators",
        "dibs.stores.mysql_pins",
        "dibs.stores.mysql_pools",
        "dibs.stores.mysql_pools_plain",
        "dibs.stores.mysql_pools_purge",
        "dibs.stores.mysql_query",
        "dibs.stores.mysql_sql",
        "dibs.stores.mysql_tables",
        "dibs.stores.mysql_values",
        "dibs.stores.mysql_watch",
        "dibs.stores.rounds",
        "dibs.stores.tables",
    },
    "dibs.stores.mysql_address": {
        "dibs.errors",
        "dibs.stores.identifiers",
        "dibs.stores.mysql_drivers",
        "dibs.stores.mysql_mysqlclient",
        "dibs.stores.mysql_pymysql",
    },
    "dibs.stores.mysql_check": {"dibs.store", "dibs.stores", "dibs.stores.mysql_sql", "dibs.stores.tables"},
    "dibs.stores.mysql_columns": {
        "dibs.columns",
        "dibs.errors",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.columns",
        "dibs.stores.identifiers",
        "dibs.stores.mysql_errors",
        "dibs.stores.mysql_sql",
        "dibs.stores.mysql_values",
    },
    "dibs.stores.mysql_drivers": {"dibs.clock", "dibs.stores.keepalive"},
    "dibs.stores.mysql_errors": {"dibs.errors", "dibs.store", "dibs.stores.mysql_drivers", "dibs.stores.tables"},
    "dibs.stores.mysql_history": set(),
    "dibs.stores.mysql_jobs": {
        "dibs.door",
        "dibs.errors",
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.mysql_jobs_ends",
        "dibs.stores.mysql_jobs_put",
        "dibs.stores.mysql_jobs_sql",
        "dibs.stores.mysql_jobs_take",
        "dibs.stores.mysql_jobs_turns",
        "dibs.stores.mysql_values",
        "dibs.stores.told",
    },
    "dibs.stores.mysql_jobs_ends": {
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.mysql_jobs_sql",
        "dibs.stores.mysql_values",
    },
    "dibs.stores.mysql_jobs_put": {
        "dibs.errors",
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.mysql_jobs_sql",
        "dibs.stores.mysql_sql",
        "dibs.stores.mysql_values",
    },
    "dibs.stores.mysql_jobs_sql": {"dibs.stores.mysql_sql"},
    "dibs.stores.mysql_jobs_take": {
        "dibs.clock",
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.mysql_jobs_sql",
        "dibs.stores.mysql_sql",
        "dibs.stores.mysql_values",
    },
    "dibs.stores.mysql_jobs_turns": {
        "dibs.clock",
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.mysql_jobs_sql",
        "dibs.stores.mysql_jobs_take",
        "dibs.stores.mysql_values",
    },
    "dibs.stores.mysql_link": {
        *CONTRACT,
        "dibs.stores",
        "dibs.stores.mysql_drivers",
        "dibs.stores.mysql_errors",
        "dibs.stores.mysql_leftover",
        "dibs.stores.mysql_sql",
        "dibs.stores.tables",
    },
    "dibs.stores.mysql_leftover": {"dibs.clock", "dibs.errors"},
    "dibs.stores.mysql_pins": {"dibs.stores", "dibs.stores.mysql_sql", "dibs.stores.mysql_values"},
    "dibs.stores.mysql_mysqlclient": {"dibs.stores.mysql_drivers"},
    "dibs.stores.mysql_operators": {
        "dibs.store",
        "dibs.stores",
        "dibs.stores.mysql_sql",
        "dibs.stores.mysql_values",
        "dibs.stores.tables",
    },
    "dibs.stores.mysql_pools": {
        "dibs.store",
        "dibs.stores.mysql_pools_plain",
        "dibs.stores.mysql_sql",
        "dibs.stores.mysql_values",
        "dibs.stores.permits",
        "dibs.stores.tables",
    },
    "dibs.stores.mysql_pools_plain": {
        "dibs.store",
        "dibs.stores.mysql_sql",
        "dibs.stores.mysql_values",
        "dibs.stores.permits",
    },
    "dibs.stores.mysql_pools_purge": {"dibs.stores.mysql_sql", "dibs.stores.mysql_values"},
    "dibs.stores.mysql_pymysql": {"dibs.errors", "dibs.stores.mysql_drivers"},
    "dibs.stores.mysql_query": {"dibs.errors", "dibs.queries", "dibs.stores.mysql_values"},
    "dibs.stores.mysql_sql": {"dibs.store"},
    "dibs.stores.mysql_tables": {
        "dibs.stores",
        "dibs.stores.mysql_history",
        "dibs.stores.mysql_jobs_sql",
        "dibs.stores.mysql_sql",
    },
    "dibs.stores.mysql_values": set(),
    "dibs.stores.mysql_watch": {
        "dibs.clock",
        "dibs.errors",
        "dibs.jobs",
        "dibs.stores.mysql_values",
        "dibs.stores.tables",
    },
    "dibs.stores.memcached": {
        *CONTRACT,
        "dibs.stores",
        "dibs.stores.memcached_address",
        "dibs.stores.memcached_check",
        "dibs.stores.memcached_spread",
        "dibs.stores.memcached_values",
        "dibs.stores.memcached_verbs",
        "dibs.stores.memcached_watch",
        "dibs.stores.memcached_wire",
        "dibs.stores.parts",
    },
    "dibs.stores.memcached_address": {"dibs.errors", "dibs.stores.memcached_spread", "dibs.stores.memcached_wire"},
    "dibs.stores.memcached_check": {"dibs.errors", "dibs.store"},
    "dibs.stores.memcached_spread": {"dibs.errors", "dibs.store"},
    "dibs.stores.memcached_values": {"dibs.errors", "dibs.stores.memcached_wire"},
    "dibs.stores.memcached_verbs": {"dibs.store", "dibs.stores.memcached_values", "dibs.stores.memcached_wire"},
    "dibs.stores.memcached_watch": {"dibs.stores.memcached_values", "dibs.stores.memcached_wire"},
    "dibs.stores.memcached_wire": {*CONTRACT, "dibs.stores.greetings", "dibs.stores.inlet"},
    "dibs.stores.redis": {
        *CONTRACT,
        "dibs.stores",
        "dibs.stores.redis_address",
        "dibs.stores.redis_check",
        "dibs.stores.redis_jobs",
        "dibs.stores.redis_keys",
        "dibs.stores.redis_links",
        "dibs.stores.redis_operators",
        "dibs.stores.redis_scripts",
        "dibs.stores.redis_wire",
        "dibs.stores.redis_words",
    },
    "dibs.stores.redis_address": {"dibs.errors", "dibs.stores.parts", "dibs.stores.redis_wire"},
    "dibs.stores.redis_check": {"dibs.store", "dibs.stores.redis_wire"},
    "dibs.stores.redis_job_runs": {
        "dibs.errors",
        "dibs.jobs",
        "dibs.stores.redis_job_words",
        "dibs.stores.redis_keys",
        "dibs.stores.redis_links",
        "dibs.stores.redis_wire",
    },
    "dibs.stores.redis_job_view": {"dibs.jobs", "dibs.stores.redis_job_words", "dibs.stores.redis_keys"},
    "dibs.stores.redis_job_words": {"dibs.jobs"},
    "dibs.stores.redis_jobs": {
        "dibs.errors",
        "dibs.jobs",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.redis_job_runs",
        "dibs.stores.redis_job_view",
        "dibs.stores.redis_job_words",
        "dibs.stores.redis_wire",
    },
    "dibs.stores.redis_keys": set(),
    "dibs.stores.redis_links": {
        *CONTRACT,
        "dibs.stores.parts",
        "dibs.stores.redis_keys",
        "dibs.stores.redis_wire",
    },
    "dibs.stores.redis_operators": {
        "dibs.errors",
        "dibs.store",
        "dibs.stores.redis_keys",
        "dibs.stores.redis_words",
    },
    "dibs.stores.redis_scripts": {*CONTRACT, "dibs.stores.parts", "dibs.stores.redis_links", "dibs.stores.redis_wire"},
    "dibs.stores.redis_wire": {*CONTRACT, "dibs.stores.greetings", "dibs.stores.inlet"},
    "dibs.stores.redis_words": {"dibs.store"},
    "dibs.stores.etcd": {
        *CONTRACT,
        "dibs.stores",
        "dibs.stores.etcd_address",
        "dibs.stores.etcd_check",
        "dibs.stores.etcd_flights",
        "dibs.stores.etcd_gateway",
        "dibs.stores.etcd_keys",
        "dibs.stores.etcd_leases",
        "dibs.stores.etcd_locks",
        "dibs.stores.etcd_pools",
        "dibs.stores.etcd_renewals",
        "dibs.stores.etcd_watch",
        "dibs.stores.turns",
    },
    "dibs.stores.etcd_address": {*CONTRACT},
    "dibs.stores.etcd_check": {*CONTRACT, "dibs.stores.etcd_address", "dibs.stores.etcd_gateway", "dibs.stores.parts"},
    "dibs.stores.etcd_flights": {"dibs.stores", "dibs.stores.etcd_gateway", "dibs.stores.etcd_keys"},
    "dibs.stores.etcd_gateway": {
        *CONTRACT,
        "dibs.stores.etcd_address",
        "dibs.stores.etcd_wire",
        "dibs.stores.greetings",
        "dibs.stores.parts",
    },
    "dibs.stores.etcd_keys": set(),
    "dibs.stores.etcd_leases": {*CONTRACT, "dibs.stores.etcd_flights", "dibs.stores.etcd_gateway", "dibs.trust"},
    "dibs.stores.etcd_locks": {
        "dibs.clock",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.etcd_keys",
        "dibs.stores.etcd_leases",
    },
    "dibs.stores.etcd_renewals": {
        "dibs.clock",
        "dibs.errors",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.etcd_keys",
        "dibs.stores.etcd_leases",
    },
    "dibs.stores.etcd_pools": {
        *CONTRACT,
        "dibs.stores",
        "dibs.stores.etcd_flights",
        "dibs.stores.etcd_keys",
        "dibs.stores.etcd_leases",
        "dibs.stores.etcd_pool_view",
        "dibs.stores.permits",
    },
    "dibs.stores.etcd_pool_view": {
        "dibs.clock",
        "dibs.store",
        "dibs.stores",
        "dibs.stores.etcd_keys",
        "dibs.stores.permits",
    },
    "dibs.stores.etcd_watch": {
        "dibs.clock",
        "dibs.errors",
        "dibs.stores",
        "dibs.stores.etcd_gateway",
        "dibs.stores.etcd_keys",
        "dibs.stores.etcd_wire",
    },
    "dibs.stores.etcd_wire": {"dibs.clock", "dibs.stores.keepalive"},
    "dibs.stores.zookeeper": {
        *CONTRACT,
        "dibs.stores",
        "dibs.stores.turns",
        "dibs.stores.zookeeper_address",
        "dibs.stores.zookeeper_check",
        "dibs.stores.zookeeper_ends",
        "dibs.stores.zookeeper_flights",
        "dibs.stores.zookeeper_line",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_locks",
        "dibs.stores.zookeeper_nodes",
        "dibs.stores.zookeeper_operators",
        "dibs.stores.zookeeper_permits",
        "dibs.stores.zookeeper_pool",
        "dibs.stores.zookeeper_renewals",
    },
    "dibs.stores.zookeeper_address": {"dibs.errors", "dibs.stores.zookeeper_link"},
    "dibs.stores.zookeeper_ends": {
        "dibs.clock",
        "dibs.errors",
        "dibs.store",
        "dibs.stores.zookeeper_flights",
        "dibs.stores.zookeeper_ledger",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
        "dibs.stores.zookeeper_pool",
    },
    "dibs.stores.zookeeper_flights": {"dibs.errors", "dibs.stores.zookeeper_link"},
    "dibs.stores.zookeeper_locks": {
        "dibs.clock",
        "dibs.store",
        "dibs.stores.zookeeper_flights",
        "dibs.stores.zookeeper_ledger",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
        "dibs.stores.zookeeper_pool",
    },
    "dibs.stores.zookeeper_operators": {
        "dibs.errors",
        "dibs.store",
        "dibs.stores.zookeeper_flights",
        "dibs.stores.zookeeper_ledger",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
        "dibs.stores.zookeeper_pool",
    },
    "dibs.stores.zookeeper_renewals": {
        "dibs.clock",
        "dibs.errors",
        "dibs.store",
        "dibs.stores.zookeeper_flights",
        "dibs.stores.zookeeper_ledger",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
        "dibs.stores.zookeeper_pool",
    },
    "dibs.stores.zookeeper_check": {"dibs.store"},
    "dibs.stores.zookeeper_link": {"dibs.clock", "dibs.errors", "dibs.stores.greetings"},
    "dibs.stores.zookeeper_nodes": set(),
    "dibs.stores.zookeeper_pool": {
        "dibs.clock",
        "dibs.errors",
        "dibs.store",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
        "dibs.threads",
    },
    "dibs.stores.zookeeper_line": {
        "dibs.clock",
        "dibs.store",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
        "dibs.stores.zookeeper_pool",
    },
    "dibs.stores.zookeeper_ledger": {
        "dibs.store",
        "dibs.stores.permits",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
    },
    "dibs.stores.zookeeper_permits": {
        "dibs.clock",
        "dibs.errors",
        "dibs.store",
        "dibs.stores.permits",
        "dibs.stores.zookeeper_ledger",
        "dibs.stores.zookeeper_line",
        "dibs.stores.zookeeper_link",
        "dibs.stores.zookeeper_nodes",
        "dibs.stores.zookeeper_pool",
    },
    # Plain data.
    "dibs.names": {"dibs.errors"},
    "dibs.layout": set(),
    "dibs.hold": {"dibs.layout", "dibs.store"},
    "dibs.holdings": set(),
    "dibs.owners": set(),
    "dibs.terms": {"dibs.errors", "dibs.names", "dibs.trust"},
    "dibs.steps": {"dibs.errors"},
    # Lanes.
    "dibs.pauses": {"dibs.names", "dibs.store"},
    "dibs.ask": {"dibs.errors", "dibs.layout"},
    "dibs.busy": CONTRACT,
    "dibs.pending": {"dibs.ask", "dibs.errors", "dibs.store"},
    "dibs.lane": {*CONTRACT, "dibs.ask", "dibs.busy", "dibs.pending", "dibs.signalled", "dibs.threads"},
    "dibs.along": set(),
    "dibs.hints": {"dibs.clock"},
    "dibs.overdue": set(),
    "dibs.waiting": {*CONTRACT, "dibs.along", "dibs.ask", "dibs.hints", "dibs.overdue", "dibs.threads"},
    "dibs.wishes": {*CONTRACT, "dibs.ask", "dibs.hold", "dibs.layout"},
    "dibs.before": {"dibs.ask"},
    "dibs.renewer": {*CONTRACT, "dibs.ask", "dibs.busy", "dibs.hold", "dibs.threads"},
    # How waiters of several processes know of each other, and what follows.
    "dibs.note": {"dibs.names"},
    "dibs.deadlock": {"dibs.store"},
    "dibs.notes": {*CONTRACT, "dibs.ask", "dibs.hold", "dibs.waiting", "dibs.note", "dibs.deadlock", "dibs.threads"},
    "dibs.lock_order": {"dibs.errors", "dibs.hold"},
    "dibs.rings": {"dibs.hold", "dibs.waiting", "dibs.notes", "dibs.lock_order"},
    # The session, and the desk at which both faces stand.
    "dibs.dropped": {"dibs.hold"},
    "dibs.keeper": {*CONTRACT, "dibs.ask", "dibs.before", "dibs.hold", "dibs.renewer", "dibs.threads"},
    "dibs.session": CONTRACT | DATA | LANES | {"dibs.dropped", "dibs.keeper", "dibs.rings", "dibs.threads"},
    "dibs.renewing": {*CONTRACT, "dibs.ask", "dibs.hold"},
    "dibs.promises": {"dibs.errors", "dibs.store"},
    "dibs.observing": {"dibs.errors", "dibs.names", "dibs.store", "dibs.trust"},
    "dibs.desk": {*CONTRACT, *DATA, "dibs.observing", "dibs.pauses", "dibs.promises", "dibs.session"},
    "dibs.history": {"dibs.errors", "dibs.names"},
    "dibs.pausing": {*CONTRACT, "dibs.names", "dibs.pauses", "dibs.trust"},
    # The caller's own transactions.
    "dibs.door": {"dibs.errors"},
    "dibs.guarding": {*CONTRACT, *DATA, "dibs.door"},
    "dibs.rows": {"dibs.errors", "dibs.door", "dibs.guarding"},
    "dibs.fencing": {"dibs.errors", "dibs.door", "dibs.guarding", "dibs.stores.identifiers"},
    # Primitives.
    "dibs.lost": {"dibs.hold", "dibs.names"},
    "dibs.copies": {"dibs.errors"},
    "dibs.lease": {
        *CONTRACT,
        *DATA,
        "dibs.copies",
        "dibs.door",
        "dibs.guarding",
        "dibs.handover",
        "dibs.lost",
        "dibs.renewing",
    },
    "dibs.grips": {"dibs.errors", "dibs.owners"},
    "dibs.lock": {*CONTRACT, *DATA, "dibs.dropped", "dibs.grips", "dibs.lease"},
    # The verbs of the face for threads, which the lock objects below share (those for tasks are in dibs.aio).
    "dibs.lockable": {"dibs.errors", "dibs.owners", "dibs.steps", "dibs.grips", "dibs.lease", "dibs.lock"},
    "dibs.multilock": {
        "dibs.copies",
        "dibs.dropped",
        "dibs.errors",
        "dibs.hold",
        "dibs.names",
        "dibs.steps",
        "dibs.grips",
        "dibs.lease",
        "dibs.lost",
        "dibs.lock",
        "dibs.lockable",
    },
    "dibs.semaphore": {*CONTRACT, *DATA, "dibs.lease", "dibs.lock", "dibs.lockable"},
    "dibs.rwlock": {*CONTRACT, *DATA, "dibs.lease", "dibs.lock", "dibs.lockable", "dibs.renewing", "dibs.semaphore"},
    "dibs.once_blocks": {"dibs.errors", "dibs.owners"},
    "dibs.once_keys": {"dibs.errors"},
    "dibs.once_record": set(),
    "dibs.once": {
        *CONTRACT,
        *DATA,
        "dibs.lease",
        "dibs.lock",
        "dibs.once_blocks",
        "dibs.once_keys",
        "dibs.once_record",
    },
    "dibs.handover": {*CONTRACT, *DATA},
    "dibs.standby": {*CONTRACT, *DATA, "dibs.lease", "dibs.lock"},
    "dibs.succession": {*CONTRACT, *DATA, "dibs.lease"},
    "dibs.absence": set(),
    "dibs.campaign": {
        *CONTRACT,
        *DATA,
        "dibs.absence",
        "dibs.lease",
        "dibs.lock",
        "dibs.handover",
        "dibs.standby",
        "dibs.succession",
    },
    "dibs.leaders": {"dibs.errors", "dibs.names"},
    # Queues.
    "dibs.new_jobs": {"dibs.errors", "dibs.jobs", "dibs.names", "dibs.once_keys"},
    "dibs.job_hold": {*CONTRACT, "dibs.ask", "dibs.hold", "dibs.jobs", "dibs.layout"},
    "dibs.taking": {*CONTRACT, "dibs.ask", "dibs.job_hold", "dibs.jobs", "dibs.layout", "dibs.waiting", "dibs.wishes"},
    "dibs.job": {
        *CONTRACT,
        *DATA,
        "dibs.door_jobs",
        "dibs.dropped",
        "dibs.job_hold",
        "dibs.jobs",
        "dibs.new_jobs",
        "dibs.renewing",
    },
    "dibs.job_batch": {"dibs.errors", "dibs.job", "dibs.job_hold", "dibs.jobs", "dibs.new_jobs"},
    "dibs.door_jobs": {*CONTRACT, *DATA, "dibs.door", "dibs.job_hold", "dibs.jobs", "dibs.new_jobs", "dibs.steps"},
    "dibs.load": {"dibs.clock", "dibs.names", "dibs.store"},
    "dibs.advice": {"dibs.load", "dibs.steps"},
    "dibs.queue_records": set(),
    "dibs.queue_core": {
        *CONTRACT,
        *DATA,
        "dibs.ask",
        "dibs.door_jobs",
        "dibs.job",
        "dibs.job_batch",
        "dibs.jobs",
        "dibs.advice",
        "dibs.load",
        "dibs.lock",
        "dibs.new_jobs",
        "dibs.pauses",
        "dibs.queue_records",
        "dibs.taking",
    },
    "dibs.finishing": {
        "dibs.ask",
        "dibs.errors",
        "dibs.job",
        "dibs.jobs",
        "dibs.names",
        "dibs.new_jobs",
        "dibs.queue_core",
        "dibs.steps",
    },
    "dibs.crew": {
        "dibs.absence",
        "dibs.errors",
        "dibs.names",
        "dibs.job",
        "dibs.jobs",
        "dibs.new_jobs",
        "dibs.queue_core",
        "dibs.steps",
    },
    "dibs.worker_signals": set(),
    "dibs.entry": set(),
    "dibs.signalled": set(),
    "dibs.workers": {"dibs.errors", "dibs.lock", "dibs.owners", "dibs.steps", "dibs.crew", "dibs.worker_signals"},
    "dibs.tries": {*CONTRACT, *DATA, "dibs.once_keys"},
    "dibs.batch": {*CONTRACT, *DATA, "dibs.door", "dibs.guarding", "dibs.lease", "dibs.tries"},
    "dibs.claiming": {
        *CONTRACT,
        *DATA,
        "dibs.batch",
        "dibs.columns",
        "dibs.dropped",
        "dibs.once_keys",
        "dibs.searching",
        "dibs.tries",
    },
    "dibs.claims": {*DATA, "dibs.batch", "dibs.claiming", "dibs.entry", "dibs.errors"},
    "dibs.searching": {*CONTRACT, *DATA, "dibs.batch", "dibs.once_keys", "dibs.queries"},
    # Faces.
    "dibs.queue": {
        *CONTRACT,
        *DATA,
        "dibs.door",
        "dibs.entry",
        "dibs.guarding",
        "dibs.job",
        "dibs.job_batch",
        "dibs.lost",
        "dibs.new_jobs",
        "dibs.pausing",
        "dibs.queue_core",
        "dibs.crew",
        "dibs.workers",
        "dibs.finishing",
    },
    "dibs.election": {
        "dibs.errors",
        "dibs.names",
        "dibs.owners",
        "dibs.steps",
        "dibs.threads",
        "dibs.lease",
        "dibs.lock",
        "dibs.lockable",
        "dibs.campaign",
        "dibs.leaders",
        "dibs.succession",
    },
    "dibs.client": {
        "dibs.errors",
        "dibs.names",
        "dibs.owners",
        "dibs.steps",
        "dibs.threads",
        *PRIMITIVES,
        "dibs.lockable",
        "dibs.handover",
        "dibs.once",
        "dibs.campaign",
        "dibs.election",
        "dibs.history",
        "dibs.pausing",
        "dibs.batch",
        "dibs.claiming",
        "dibs.claims",
        "dibs.queue",
        "dibs.queue_core",
    },
    # The same for asyncio, a subject a module; all of them take steps by way of the first.
    "dibs.aio.tasks": {"dibs.steps", "dibs.threads"},
    "dibs.aio.lease": {
        "dibs.errors",
        "dibs.names",
        "dibs.door",
        "dibs.guarding",
        "dibs.handover",
        "dibs.lease",
        "dibs.lost",
        "dibs.threads",
        "dibs.aio.tasks",
    },
    "dibs.aio.block": {"dibs.hold", "dibs.owners", "dibs.aio.tasks"},
    "dibs.aio.lockable": {
        "dibs.errors",
        "dibs.grips",
        "dibs.lock",
        "dibs.aio.tasks",
        "dibs.aio.lease",
        "dibs.aio.block",
    },
    "dibs.aio.multilock": {
        "dibs.errors",
        "dibs.multilock",
        "dibs.aio.tasks",
        "dibs.aio.lease",
        "dibs.aio.lockable",
    },
    "dibs.aio.semaphore": {"dibs.aio.tasks", "dibs.aio.lease", "dibs.aio.lockable"},
    "dibs.aio.rwlock": {"dibs.aio.tasks", "dibs.aio.lockable"},
    "dibs.aio.once": {
        "dibs.errors",
        "dibs.lock",
        "dibs.once",
        "dibs.aio.tasks",
        "dibs.aio.lease",
        "dibs.aio.block",
    },
    "dibs.aio.election": {
        "dibs.errors",
        "dibs.names",
        "dibs.lock",
        "dibs.campaign",
        "dibs.leaders",
        "dibs.succession",
        "dibs.aio.tasks",
        "dibs.aio.lease",
        "dibs.aio.lockable",
    },
    "dibs.aio.queue": {
        "dibs.door",
        "dibs.job",
        "dibs.job_batch",
        "dibs.names",
        "dibs.new_jobs",
        "dibs.pausing",
        "dibs.queue",
        "dibs.queue_core",
        "dibs.aio.lease",
        "dibs.aio.tasks",
        "dibs.aio.workers",
        "dibs.crew",
        "dibs.finishing",
    },
    "dibs.aio.workers": {"dibs.errors", "dibs.lock", "dibs.crew", "dibs.aio.tasks", "dibs.worker_signals"},
    "dibs.aio.claims": {"dibs.batch", "dibs.claiming", "dibs.aio.tasks", "dibs.aio.lease", "dibs.door"},
    "dibs.aio.client": {
        "dibs.names",
        "dibs.steps",
        "dibs.threads",
        "dibs.lock",
        "dibs.multilock",
        "dibs.semaphore",
        "dibs.rwlock",
        "dibs.handover",
        "dibs.once",
        "dibs.once_keys",
        "dibs.campaign",
        "dibs.history",
        "dibs.pausing",
        "dibs.claiming",
        "dibs.claims",
        "dibs.queue_core",
        "dibs.aio.tasks",
        *AIO,
    },
    "dibs.aio": {*AIO, "dibs.aio.client"},
    "dibs.borrowed": {"dibs.errors"},
    "dibs.connecting": {
        "dibs.clock",
        "dibs.errors",
        "dibs.store",
        "dibs.aio",
        "dibs.client",
        "dibs.desk",
        "dibs.borrowed",
        "dibs.stores",
        "dibs.stores.sqlite",
        "dibs.urls",
    },
    "dibs": {"dibs._version"},
    # The command line stands on the faces; it shows what stores tell, and its guard reads the clock.
    "dibs.__main__": {"dibs.cli"},
    "dibs.cli": {
        "dibs._version",
        "dibs.cli.ctrl_c",
        "dibs.cli.mistakes",
        "dibs.cli.overview",
        "dibs.cli.streams",
        "dibs.connecting",
        "dibs.errors",
        "dibs.names",
    },
    "dibs.cli.overview": set(),
    "dibs.cli.streams": {"dibs.names"},
    "dibs.cli.ctrl_c": set(),
    "dibs.cli.mistakes": {"dibs.errors"},
    "dibs.cli.bench": {
        "dibs._version",
        "dibs.cli",
        "dibs.cli.bench_figures",
        "dibs.cli.bench_works",
        "dibs.cli.looks",
        "dibs.cli.streams",
        "dibs.errors",
        "dibs.names",
    },
    "dibs.cli.bench_figures": set(),
    "dibs.cli.bench_works": {"dibs.cli", "dibs.cli.bench_figures", "dibs.client", "dibs.desk", "dibs.errors"},
    "dibs.cli.claim": {
        "dibs.cli",
        "dibs.cli.command",
        "dibs.cli.keeper",
        "dibs.cli.looks",
        "dibs.cli.moments",
        "dibs.cli.run",
        "dibs.cli.signals",
        "dibs.errors",
        "dibs.names",
    },
    "dibs.cli.command": {"dibs.cli", "dibs.cli.guard"},
    "dibs.cli.doctor": {
        "dibs.cli.streams",
        "dibs.cli",
        "dibs.connecting",
        "dibs.errors",
        "dibs.promises",
        "dibs.steps",
        "dibs.store",
    },
    "dibs.cli.elect": {"dibs.cli", "dibs.cli.run"},
    "dibs.cli.guard": {"dibs.clock"},
    "dibs.cli.jobs": {
        "dibs.cli",
        "dibs.cli.lines",
        "dibs.cli.looks",
        "dibs.errors",
        "dibs.jobs",
        "dibs.names",
        "dibs.pauses",
        "dibs.queue_records",
    },
    "dibs.cli.keeper": {"dibs.cli", "dibs.cli.guard", "dibs.cli.keeping", "dibs.cli.moments", "dibs.clock"},
    "dibs.cli.keeping": {
        "dibs.cli.command",
        "dibs.cli.guard",
        "dibs.cli.moments",
        "dibs.cli.stderr",
        "dibs.clock",
    },
    "dibs.cli.lines": {
        "dibs.cli",
        "dibs.cli.streams",
        "dibs.clock",
        "dibs.errors",
        "dibs.jobs",
        "dibs.names",
        "dibs.new_jobs",
    },
    "dibs.cli.looking": {"dibs.cli", "dibs.cli.looks", "dibs.names", "dibs.steps"},
    "dibs.cli.looks": {"dibs.cli.streams", "dibs.names"},
    "dibs.cli.operators": {
        "dibs.cli.streams",
        "dibs.cli",
        "dibs.cli.looks",
        "dibs.columns",
        "dibs.door",
        "dibs.errors",
        "dibs.fencing",
        "dibs.history",
        "dibs.names",
        "dibs.steps",
        "dibs.store",
        "dibs.urls",
    },
    "dibs.cli.pausing": {"dibs.cli.streams", "dibs.cli", "dibs.cli.looks", "dibs.names", "dibs.pauses"},
    "dibs.cli.advise": {"dibs.cli.streams", "dibs.cli", "dibs.cli.looks"},
    "dibs.cli.queues": {
        "dibs.cli.streams",
        "dibs.cli",
        "dibs.cli.jobs",
        "dibs.cli.looks",
        "dibs.errors",
        "dibs.jobs",
        "dibs.names",
        "dibs.pauses",
        "dibs.queue_core",
    },
    "dibs.cli.top": {"dibs.absence", "dibs.cli", "dibs.cli.looks", "dibs.cli.streams", "dibs.errors", "dibs.names"},
    "dibs.cli.work": {
        "dibs.cli",
        "dibs.cli.command",
        "dibs.cli.keeper",
        "dibs.cli.moments",
        "dibs.cli.run",
        "dibs.cli.stderr",
        "dibs.clock",
        "dibs.errors",
    },
    "dibs.cli.moments": {"dibs.trust"},
    "dibs.cli.signals": {"dibs.cli.ctrl_c", "dibs.cli.stderr"},
    "dibs.cli.stderr": {"dibs.cli"},
    "dibs.cli.terminal": set(),
    "dibs.cli.supervisor": {
        "dibs.cli.guard",
        "dibs.cli.moments",
        "dibs.cli.signals",
        "dibs.cli.stderr",
        "dibs.cli.terminal",
        "dibs.clock",
        "dibs.errors",
    },
    "dibs.cli.run": {
        "dibs.cli",
        "dibs.cli.command",
        "dibs.cli.guard",
        "dibs.cli.moments",
        "dibs.cli.signals",
        "dibs.cli.supervisor",
        "dibs.errors",
        "dibs.trust",
    },
}
# Time is read and slept, and threads are made, in one module. Who else may import these, and what of them it may use.
CLOCKWORK: dict[tuple[str, str], set[str]] = {
    ("dibs.clock", "time"): {"*"},
    ("dibs.clock", "threading"): {"*"},
    ("dibs.clock", "select"): {"*"},
    ("dibs.lock", "threading"): {"TIMEOUT_MAX"},  # the standard library's limit, for the same OverflowError
    ("dibs.stores.etcd_watch", "select"): {"epoll", "EPOLLIN"},  # several streams are one descriptor to wait for
    ("dibs.cli.supervisor", "select"): {"*"},  # the wrapper waits for its child and its lease at once
    ("dibs.cli.keeper", "select"): {"poll", "POLLIN", "POLLOUT"},  # as the wrapper of `dibs run`
    ("dibs.cli.keeping", "select"): {"*"},  # as the guard
    ("dibs.cli.stderr", "select"): {"*"},  # room, in a file that is not to be waited for
    ("dibs.cli.top", "select"): {"select"},  # the keyboard and the next look
    ("dibs.cli.guard", "select"): {"*"},  # the guard outlives the wrapper and has no session to ask
}
DRIVERS = {
    "kazoo": "dibs.stores.zookeeper_link",
    "psycopg": "dibs.stores.postgres_link",
    "psycopg_pool": "",
    "pymysql": "dibs.stores.mysql_pymysql",
    "MySQLdb": "dibs.stores.mysql_mysqlclient",
    "sqlite3": "dibs.stores.sqlite_file",
    "pymemcache": "dibs.stores.memcached_wire",
    "redis": "dibs.stores.redis_wire",
    "sqlalchemy": "",
    "django": "",
}
# Modules that are worth their length, and why.
LONG = {
    "dibs.client": "what a client gives, each with what its user must know",
    "dibs.lane": "one state machine: who serves, and what becomes of failures",
    "dibs.stores.memory": "the executable specification: the whole contract in one place",
    "dibs.stores.mysql": "the acts on leases: acquiring, the line, renewing, releasing, each for one and for many",
}


def module_name(path: Path) -> str:
    parts = ("dibs", *path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def is_library(name: str) -> bool:
    """Whether the rules of the library hold for it; what tests stores may use everything."""
    return not (name == "dibs.testing" or name.startswith("dibs.testing."))


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def running_imports(node: ast.AST) -> Iterator[str]:
    """The modules imported when the code runs, wherever the import stands; `from a import b` gives a and a.b."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from running_imports(other)
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative import"
            assert child.module is not None
            inner = {f"{child.module}.{alias.name}" for alias in child.names} & MODULES.keys()
            yield from inner
            if len(inner) < len(child.names):
                yield child.module
        else:
            yield from running_imports(child)


LIBRARY = [name for name in MODULES if is_library(name)]


def test_imports_point_one_way() -> None:
    """A module imports only what stands below it: faces → primitives → session → lanes → contract."""
    new = [name for name in LIBRARY if name not in ALLOWED]
    assert not new, "say in ALLOWED where these stand"
    # dibs._typing stands in for what everybody may import.
    reaching = {name: own_imports(name) - ALLOWED[name] - {"dibs._typing"} for name in LIBRARY}
    assert not {name: sorted(up) for name, up in reaching.items() if up}, "these reach up or sideways"


def own_imports(name: str) -> set[str]:
    return {module for module in running_imports(tree(name)) if module.split(".")[0] == "dibs"}


def test_nobody_pays_for_typing() -> None:
    """No module imports `typing` when it runs: dibs._typing says why."""
    assert not [name for name in MODULES if "typing" in running_imports(tree(name))]


def test_the_map_is_of_what_there_is() -> None:
    """The allow-lists name no module that is gone, and form no circle among modules."""
    assert set(ALLOWED) <= set(MODULES)
    assert set(LONG) <= set(MODULES)
    assert {name for name, _ in CLOCKWORK} <= set(MODULES)
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {name for name, below in ALLOWED.items() if name not in done and below <= done}
        # `dibs` itself is loaded before any of its modules, and `dibs.cli` loads its commands by their names.
        assert ready, f"a circle among {sorted(set(ALLOWED) - done)}"
        done |= ready


def test_asyncio_lives_in_one_package() -> None:
    """Only the package `dibs.aio` imports asyncio."""
    importing = [name for name in LIBRARY if any(m.split(".")[0] == "asyncio" for m in running_imports(tree(name)))]
    assert not [name for name in importing if not name.startswith("dibs.aio.")]


def test_time_and_threads_live_in_one_module() -> None:
    """Only `dibs.clock` reads a clock, sleeps, waits for descriptors or makes threads; exceptions have reasons."""
    wrong: dict[tuple[str, str], list[str]] = {}
    for name in LIBRARY:
        module = tree(name)
        imported = set(running_imports(module))
        for library in imported & {"time", "threading", "select", "sched", "selectors"}:
            allowed = CLOCKWORK.get((name, library), set())
            used = used_of(library, module)
            if "*" not in allowed and not (allowed and used <= allowed):
                wrong[name, library] = sorted(used - allowed)
    assert not wrong


def used_of(library: str, module: ast.Module) -> set[str]:
    """What a module takes out of a library, by `library.name` or `from library import name`."""
    attributes = {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == library
    }
    return attributes | {
        alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and node.module == library
        for alias in node.names
    }


def test_the_wall_clock_is_asked_in_one_module() -> None:
    """Nobody asks datetime what time it is."""
    asked = [
        f"{name}, line {node.lineno}: {node.func.value.id}.{node.func.attr}()"
        for name in LIBRARY
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("datetime", "date")
        and node.func.attr in ("now", "utcnow", "today")
    ]
    assert not asked


def test_drivers_stay_in_their_stores() -> None:
    """A driver is imported by its store alone; what borrows an address may let the driver read its own string."""
    allowed = {
        "dibs.borrowed": {"psycopg"},
        "dibs.stores.postgres_errors": {"psycopg"},
        "dibs.stores.postgres_leftover": {"psycopg"},
        "dibs.stores.postgres_login": {"psycopg"},
        "dibs.stores.postgres_wire": {"psycopg"},
        # What SQLite's errors, and its versions, are called.
        "dibs.stores.sqlite": {"sqlite3"},
        "dibs.stores.sqlite_jobs": {"sqlite3"},
        "dibs.stores.sqlite_check": {"sqlite3"},
        "dibs.stores.sqlite_query": {"sqlite3"},
        "dibs.stores.sqlite_many": {"sqlite3"},
        "dibs.stores.sqlite_columns": {"sqlite3"},
        "dibs.stores.sqlite_history": {"sqlite3"},
    }
    wrong = [
        f"{name} imports {module}"
        for name in LIBRARY
        for module in running_imports(tree(name))
        for driver in [module.split(".")[0]]
        if DRIVERS.get(driver, name) != name and driver not in allowed.get(name, set())
    ]
    assert not wrong


def test_every_module_says_what_it_answers_for() -> None:
    """A module opens with a sentence about itself."""
    opening = {name: (ast.get_docstring(tree(name)) or "").split("\n\n")[0].rstrip() for name in MODULES}
    assert not {name: text for name, text in opening.items() if not text.endswith((".", "::", ":", "?"))}


def test_modules_are_short() -> None:
    """A module has at most 400 lines, or a reason."""
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    long = {name: count for name, count in lines.items() if count > LINES_MAX and name not in LONG}
    assert not long, "split these, or say in LONG why not"


# -- what is loaded ---------------------------------------------------------------------------------------------------


def loaded(code: str) -> set[str]:
    """The modules that a program has loaded at its end, beyond those of a bare interpreter."""
    ask = "import sys; print(*sys.modules)"
    bare = subprocess.run([sys.executable, "-I", "-c", ask], capture_output=True, text=True, check=True)
    done = subprocess.run([sys.executable, "-I", "-c", f"{code}\n{ask}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split()) - set(bare.stdout.split())


def test_importing_dibs_is_cheap() -> None:
    """`import dibs` loads no driver, no asyncio and nothing else that not every program needs."""
    modules = loaded("import dibs")
    for heavy in (
        "psycopg sqlite3 asyncio tabulate urllib json dataclasses inspect logging socket ssl threading "
        "datetime argparse random selectors subprocess importlib.metadata typing re dibs.aio dibs.client dibs.desk "
        "dibs.session dibs.stores"
    ).split():
        assert heavy not in modules, f"import dibs loads {heavy}"


def test_a_lock_on_sqlite_loads_nothing_else(sqlite_url: str) -> None:
    """Taking and releasing a lock in an SQLite file loads neither asyncio nor another store's driver."""
    modules = loaded(f"import dibs\nwith dibs.connect({sqlite_url!r}) as c:\n  with c.lock('x'): pass")
    assert "sqlite3" in modules
    for heavy in (
        "psycopg asyncio tabulate dataclasses inspect logging ssl urllib.parse argparse subprocess typing"
    ).split():
        assert heavy not in modules, f"a lock on SQLite loads {heavy}"


def test_dibs_run_is_light(sqlite_url: str) -> None:
    """`dibs run` on SQLite loads no asyncio, psycopg, tabulate, typing or dataclasses: it stands in crontabs."""
    command = [sys.executable, "-X", "importtime", "-m", "dibs", "--url", sqlite_url, "run", "x", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "sqlite3" in modules
    for heavy in (
        "psycopg asyncio tabulate dataclasses inspect logging ssl socket subprocess importlib.metadata typing"
    ).split():
        assert heavy not in modules, f"dibs run loads {heavy}"
