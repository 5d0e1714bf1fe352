"""What PostgreSQL plans for statements while the tables of jobs are new, and when all their rows are gone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import psycopg

from dibs.stores.postgres_jobs_tables import JobTables


def check_plans(url: str, tables: Sequence[str], expected: Mapping[str, tuple[str, Sequence[str]]], how: str) -> None:
    """Statements by their verbs, each with its values, find rows by these conditions, and ids by a primary key alone.

    They are prepared for any values, as a connection has them for as long as it lives. ``how``: options of EXPLAIN.
    """
    sql = JobTables("public", "dibs_lease").sql
    with psycopg.connect(url, autocommit=True) as connection:
        for setting in ("seqscan", "bitmapscan", "hashjoin", "mergejoin", "material"):
            connection.execute(f"SET enable_{setting} = off")
        connection.execute("SET plan_cache_mode = force_generic_plan")
        for state in ("new", "emptied"):
            if state == "emptied":
                for table in tables:
                    connection.execute(f"DELETE FROM {table}")
                connection.execute(f"VACUUM ANALYZE {', '.join(tables)}")
            for verb, (values, places) in expected.items():
                connection.execute(b"PREPARE s AS " + sql[verb])
                rows = connection.execute(f"EXPLAIN {how} EXECUTE s ({values})").fetchall()
                plan = "\n".join(row for (row,) in rows)
                for place in places:
                    assert place in plan, f"{verb} on a table that is {state}:\n{plan}"
                assert "Seq Scan on dibs" not in plan, f"{verb} on a table that is {state}:\n{plan}"
                by = re.findall(r"Scan using (\S+) on .*\n +Index Cond: \(id ", plan)
                assert all(index.endswith("_pkey") for index in by), f"{verb} on a table that is {state}:\n{plan}"
                connection.execute("DEALLOCATE s")
