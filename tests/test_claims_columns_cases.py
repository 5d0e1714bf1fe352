"""The conformance cases on claims, with the claims in columns of the user's tables. What they promise is one promise,
wherever they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from string import ascii_lowercase
from typing import Any

import pytest

from dibs.connecting import locate
from dibs.testing.conformance import Run, runs
from tests.yard import Yard

CASES = [run for run in runs() if run.case.anywhere]
_numbers = count()


class Tables:
    """Makes claims on the items of a source, each a row of a table of its own."""

    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        self._made: dict[str, str] = {}

    def claims(self, client: Any, source: str, **options: Any) -> Any:
        return client.claims(source, mode="columns", table=self._table(source), key="code", **options)

    def _table(self, source: str) -> str:
        table = self._made.get(source)
        if table is None:
            table = self._made[source] = f"{source}_{next(_numbers)}"
            self.yard.run(f"CREATE TABLE {table} (code VARCHAR(40) PRIMARY KEY)")
            codes = ",".join(f"('{code}')" for code in (*range(100), *ascii_lowercase))
            self.yard.run(f"INSERT INTO {table} VALUES {codes}")
            self.yard.migrate(table)
        return table


@pytest.fixture(params=["sqlite_url", "postgres_url", "mysql_url"], ids=["sqlite", "postgres", "mysql"])
def tables(request: pytest.FixtureRequest) -> Iterator[Tables]:
    yard = Yard(request.getfixturevalue(request.param))
    yield Tables(yard)
    yard.close()


@pytest.mark.parametrize("run", [pytest.param(run, id=f"{run.face}-{run.case.name}") for run in CASES])
def test_case(run: Run, tables: Tables) -> None:
    """Claims in columns keep the promises of claims."""
    assert run.on(locate(tables.yard.url)[0], tables.claims)


def test_there_are_cases() -> None:
    """The cases on claims are among those that are run, but for those on leases as such."""
    assert len(CASES) == 2 * 14
