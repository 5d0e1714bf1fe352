"""What MySQL is told, with the names of one store's tables in it."""

from __future__ import annotations

from dibs.stores import mysql_history, mysql_jobs_sql
from dibs.stores import mysql_sql as sql

_CLAIM = ("name", "claim_id", "us", "holder", "info", "ticket")
# The columns of the documents that statements take.
_ASKED: dict[str, tuple[str, ...]] = {
    "GRANT_ONE": (),
    "GRANT_ONE_IN_LINE": (),
    "GRANT_MANY": (),
    "GRANT_MANY_IN_LINE": _CLAIM,
    "REPEAT": _CLAIM,
    "MAKE": _CLAIM,
    "OURS": ("name", "claim_id"),
    "CLEAR": ("name", "ticket"),
    "SEEN": ("name", "claim_id", "ticket"),
    "LINE_UP": ("name", "claim_id", "wake"),
    "PLACES": ("name", "claim_id"),
    "LAST_TICKETS": ("name", "ticket"),
    "STILL_THERE": ("name", "claim_id", "wake", "ticket"),
    "RENEW": ("name", "claim_id", "slot", "us"),
    "IN_FORCE": ("name", "claim_id", "slot"),
    "TRANSFER": (),
    "TRANSFERRED": (),
    "RELEASE_ONE": (),
    "RELEASE": (),
    "KEEP": (),
    "SLOTS": ("name", "claim_id"),
    "DEPART": ("name", "claim_id", "ticket"),
    "LOOK": ("name",),
    "LIST": (),
    "BREAK": (),
    "BREAK_NOW": (),
    "END": (),
    "PURGE_FLOOR": (),
    "PURGE_SOME": (),
    "PURGE_THESE": ("name", "slot"),
    "PURGE_LINE": (),
}


class Tables:
    def __init__(self, database: str, table: str) -> None:
        #: As they are called, unquoted; the leases first.
        ends = ("", "_line", "_pool", "_meta", "_guard", "_job", "_job_end")
        self.called = [table + end for end in ends]
        self._names = {
            key: sql.quoted(name)
            for key, name in zip(("lease", "line", "pool", "meta", "guard", "job", "job_end"), self.called, strict=True)
        }
        self._names["database"] = sql.quoted(database)
        #: The statements, by their verbs, ready for their values.
        self.sql = {verb: self.text(getattr(sql, verb), *columns) for verb, columns in _ASKED.items()}
        self.sql["ANY_FREE"] = self.text(mysql_jobs_sql.ANY_FREE, "name")
        self.sql["READY"] = self.text(mysql_jobs_sql.READY)

    @property
    def lease(self) -> str:
        """The table of the leases, as a statement names it."""
        return self._names["lease"]

    def text(self, template: str, *columns: str) -> str:
        """A statement with our tables in it, ready for its values."""
        names = {key: name.replace("%", "%%") for key, name in self._names.items()}
        for key, lease in (("unpinned", "l"), ("unpinned_of_lease", names["lease"])):
            names[key] = sql.UNPINNED.format(lease=lease, guard=names["guard"])
        return template.format(**names, asked=sql.asked(*columns) if columns else "")

    def schema(self) -> str:
        return sql.SCHEMA.format(**self._names, version=sql.VERSION)

    def version(self) -> str:
        """The query that reads which version the tables are of."""
        return sql.READ_VERSION.format(**self._names)

    def jobs_schema(self) -> str:
        return mysql_jobs_sql.SCHEMA.format(**self._names)

    def within(self, template: str) -> str:
        """A statement on jobs for somebody else's connection, whichever database that one calls its own."""
        names = {key: f"{self._names['database']}.{self._names[key]}" for key in ("job", "job_end")}
        return template.format(**{key: name.replace("%", "%%") for key, name in names.items()})

    def history(self) -> str:
        """The statement that reads the history, ready for its values."""
        names = {key: name.replace("%", "%%") for key, name in self._history_names().items()}
        return mysql_history.READ.format(**names)

    def history_schema(self, keep: int) -> str:
        text = mysql_history.KEEP if keep else mysql_history.FORGET
        return text.format(**self._history_names(), keep=keep)

    def _history_names(self) -> dict[str, str]:
        names = {key: self.called[0] + end for key, end in mysql_history.NAMES.items()}
        return {"lease": self._names["lease"], **{key: sql.quoted(name) for key, name in names.items()}}
