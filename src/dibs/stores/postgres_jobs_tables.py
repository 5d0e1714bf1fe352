"""What PostgreSQL is told about jobs, with the names of one store's tables in it."""

from __future__ import annotations

from hashlib import sha256

from dibs.jobs import KEEP, RAISE, REPLACE
from dibs.stores import postgres_jobs_sql as sql
from dibs.stores import postgres_jobs_turns_sql as turns
from dibs.stores import postgres_jobs_view_sql as view
from dibs.stores.identifiers import quoted_table
from dibs.stores.postgres_watch import job_channel

_INDEXES = ("order", "key", "put", "group", "ended", "kept")
# For a put in which some jobs have keys: which of those whose key a live job has are refused, and which replace it.
_KEYED = {
    RAISE: {"refused": "true", "replaces": "false", "look": sql.LOOK},
    KEEP: {"refused": "false", "replaces": "false", "look": sql.LOOK},
    REPLACE: {"refused": "s.claimed", "replaces": "true", "look": sql.LOOK_LOCKING},
}


class JobTables:
    def __init__(self, schema: str, table: str) -> None:
        qualified = quoted_table(schema, "schema") + "."
        self._names = {
            "job": qualified + quoted_table(table + "_job"),
            "end": qualified + quoted_table(table + "_job_end"),
            "turn": qualified + quoted_table(table + "_job_turn"),
        }
        #: As a statement names them.
        self.names = list(self._names.values())
        self._names |= {f"{index}_index": quoted_table(f"{table}_job_{index}") for index in _INDEXES}
        digest = sha256(self._names["job"].encode()).digest()
        self._names["lock_seed"] = str(int.from_bytes(digest[:6], "big"))
        #: What is made last: when it is there, everything is.
        self.last_made = self._names["turn"]
        #: Where puts are told of.
        self.channel = job_channel(schema, table)
        make = f"CREATE SCHEMA IF NOT EXISTS {quoted_table(schema, 'schema')};\n"
        #: What makes the tables.
        self.schema = ("" if schema == "public" else make) + self._filled(sql.SCHEMA + turns.SCHEMA)
        #: The statements, by their verbs.
        self.sql = {
            verb: self._filled(getattr(part, verb)).encode() for part in (sql, turns, view) for verb in part.VERBS
        }
        self.sql["DEAD"] = self.sql["KEEP"]
        self.sql["PUT_WITHIN"] = self._filled(sql.PUT, and_here=sql.AND_HERE, tell_here=sql.TELL_HERE).encode()
        for mode, modal in _KEYED.items():
            parts = {**modal, "look": self._filled(modal["look"])}
            self.sql["PUT_" + mode] = self._filled(sql.PUT_KEYED, **parts, or_else="", and_only_if="").encode()
            # For who cannot try again after an error.
            parts |= {"or_else": sql.OR_LEAVE_OUT, "and_only_if": sql.ONLY_IF_COMPLETE}
            parts |= {"and_here": sql.AND_HERE_KEYED, "tell_here": sql.TELL_ELSEWHERE}
            self.sql[f"PUT_{mode}_WITHIN"] = self._filled(sql.PUT_KEYED, **parts).encode()

    def _filled(self, text: str, and_here: str = "", tell_here: str = "", **parts: str) -> str:
        return text.format(**self._names, and_here=and_here, tell_here=tell_here, **parts)
