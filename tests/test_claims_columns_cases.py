"""The conformance cases on claims, with the claims in columns of the user's tables. What they promise is one promise,
wherever they are kept."""

from __future__ import annotations

from itertools import count
from string import ascii_lowercase
from typing import Any

import pytest

from dibs.connecting import locate
from dibs.testing.conformance import runs
from tests.yard import Yard

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


# (What a face does is the same for every store: that for tasks is run on one of them.)
@pytest.mark.parametrize(
    "fixture, face",
    [("sqlite_url", "threads"), ("postgres_url", "threads"), ("postgres_url", "tasks"), ("mysql_url", "threads")],
)
def test_cases(fixture: str, face: str, request: pytest.FixtureRequest) -> None:
    """Claims in columns keep the promises of claims. (A case that fails is named by its error.)"""
    yard = Yard(request.getfixturevalue(fixture))
    address, _ = locate(yard.url)
    cases = [run for run in runs() if run.face == face and run.case.anywhere]
    for run in cases:
        assert run.on(address, Tables(yard).claims)
    assert len(cases) == 14  # all on claims, but those on claims as leases
    yard.close()
