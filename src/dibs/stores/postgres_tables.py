"""What PostgreSQL is told, with the names of one store's tables in it."""

from __future__ import annotations

from hashlib import sha256

from dibs._typing import TYPE_CHECKING
from dibs.stores import postgres_history, postgres_pools_sql, postgres_renewals_sql, postgres_sql
from dibs.stores.identifiers import dollar_quote, quoted_table

if TYPE_CHECKING:
    from dibs.store import Release, Renew

_VERBS = ("ENTER", "RELEASE_HELD", "TRANSFER", "LIST", "BREAK", "BREAK_NOW", "END", "PURGE", "PINNED")


class Tables:
    def __init__(self, schema: str, table: str) -> None:
        qualified = quoted_table(schema, "schema") + "."
        self._names = {
            "lease": qualified + quoted_table(table),
            "line": qualified + quoted_table(table + "_line"),
            "pool": qualified + quoted_table(table + "_pool"),
            "meta": qualified + quoted_table(table + "_meta"),
        }
        # Of 48 bits, so that a slot's number can be added.
        self._names["pin_seed"] = str(int.from_bytes(sha256(self._names["lease"].encode()).digest()[:6], "big"))
        self._names["version"] = str(postgres_sql.VERSION)
        # Quotes around what has these names in it.
        self._names |= {key: dollar_quote(tag, self._names["lease"]) for key, tag in (("do", "do"), ("quote", "dibs"))}
        self._schema = schema
        self._table = table
        #: The statements, by their verbs: of those that take rows one for many, and one for a single row (…_ONE).
        self.sql = {verb: getattr(postgres_sql, verb).format(**self._names).encode() for verb in _VERBS}
        for module in (postgres_pools_sql, postgres_renewals_sql):
            self.sql |= {verb: getattr(module, verb).format(**self._names).encode() for verb in module.VERBS}
        for verb in postgres_sql.ASKED:
            text = getattr(postgres_pools_sql if verb.startswith("POOL_") else postgres_sql, verb)
            many = postgres_sql.folded(verb, text).format(asked=postgres_sql.many(verb), **self._names)
            self.sql[verb] = many.encode()
            self.sql[verb + "_ONE"] = text.format(asked=postgres_sql.one(verb), **self._names).encode()

    @property
    def names(self) -> list[str]:
        """The tables of leases, as a statement names them."""
        return [self._names[key] for key in ("lease", "line", "pool", "meta")]

    @property
    def lease(self) -> str:
        """The table of the leases, as a statement names it."""
        return self._names["lease"]

    def pin(self, request: Renew) -> str:
        """What the transaction does in which the lease is to be pinned."""
        return postgres_sql.PIN.format(name=request.name.encode().hex(), slot=request.slot, **self._names)

    def ending(self, request: Release) -> str:
        """What a transaction does with which a lease is to end."""
        name, claim_id = request.name.encode().hex(), request.claim_id.encode().hex()
        return postgres_sql.ENDING.format(name=name, claim_id=claim_id, slot=request.slot, **self._names)

    def first(self) -> str:
        """What goes before whatever makes tables, in its transaction."""
        return postgres_sql.FIRST.format(**self._names)

    def schema(self) -> str:
        make = f"CREATE SCHEMA IF NOT EXISTS {quoted_table(self._schema, 'schema')};\n"
        return ("" if self._schema == "public" else make) + postgres_sql.SCHEMA.format(**self._names)

    def history(self) -> bytes:
        """The statement that reads the history."""
        return postgres_history.READ.format(**self._history_names()).encode()

    def history_schema(self, keep: int) -> str:
        text = postgres_history.KEEP if keep else postgres_history.FORGET
        return text.format(**self._history_names(), keep=keep)

    def _history_names(self) -> dict[str, str]:
        table, schema = self._table, quoted_table(self._schema, "schema")
        names = {key: f"{schema}.{quoted_table(table + end)}" for key, end in postgres_history.NAMES.items()}
        triggers = {key: quoted_table(table + end) for key, end in postgres_history.TRIGGERS.items()}
        return {"lease": self._names["lease"], "quote": self._names["quote"], **names, **triggers}
