"""Statements about jobs, by their verbs, on a store's connection; the tables are made when there are none."""

from __future__ import annotations

from functools import partial

from dibs._typing import TYPE_CHECKING, TypeVar
from dibs.store import RowBusy
from dibs.stores.tables import with_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.clock import Deadline
    from dibs.stores.postgres_jobs_tables import JobTables
    from dibs.stores.postgres_link import Connection, Sql

    # A verb with its parameters.
    Statement = tuple[str, Sequence[bytes | None]]

_T = TypeVar("_T")
BEGIN: Sql = (b"BEGIN ISOLATION LEVEL READ COMMITTED", ())
COMMIT: Sql = (b"COMMIT", ())


class JobFlights:
    def __init__(self, connection: Connection, tables: JobTables) -> None:
        self._connection = connection
        self._schema = tables.schema
        self.sql = tables.sql

    def run(self, statements: Sequence[Statement], deadline: Deadline) -> list[PGresult]:
        """Execute statements in one round trip; make the tables when it turns out that there are none."""
        flight = [(self.sql[verb], given) for verb, given in statements]
        return self._with_tables(partial(self._connection.execute_all, flight, deadline), deadline)

    def run_unless_locked(self, statements: Sequence[Statement], why: str, deadline: Deadline) -> list[PGresult]:
        """The same; RowBusy, saying ``why``, when others have locked for longer than a moment what is to be changed.

        (A libpq before 14, which sends each statement in a transaction of its own, waits for as long as it may.)
        """
        try:
            return self.run([("HURRY", ()), *statements], deadline)[1:]
        except RowBusy as error:
            raise RowBusy(why) from error

    def _with_tables(self, attempt: Callable[[], _T], deadline: Deadline) -> _T:
        self._connection.open(deadline)
        return with_tables(attempt, partial(self._connection.make, self._schema, deadline))

    def set_up(self, last_made: str, deadline: Deadline) -> bool:
        """Whether the tables are there, of which this index is made last."""
        self._connection.open(deadline)
        found = self._connection.execute(b"SELECT to_regclass($1::text) IS NOT NULL", (last_made.encode(),), deadline)
        return found.get_value(0, 0) == b"\x01"

    def transaction(self, work: Callable[[], None], deadline: Deadline) -> None:
        self._with_tables(partial(self._connection.transaction_once, work, deadline), deadline)

    def execute(self, statements: Sequence[Sql], deadline: Deadline) -> list[PGresult]:
        """One flight of such a transaction."""
        return self._connection.execute_all(statements, deadline)
