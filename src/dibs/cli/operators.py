"""What operators do by hand: ``ls``, ``show``, ``break``, ``purge``, ``setup`` and ``schema``."""

from __future__ import annotations

from argparse import ArgumentTypeError

from dibs._typing import TYPE_CHECKING, cast
from dibs.cli import NOT_HELD, USAGE, CommandError, connect, duration, whole
from dibs.cli.looks import (
    json_option,
    json_text,
    lease_json,
    lease_row,
    local,
    pauses_of,
    prefix_argument,
    print_json,
    print_pauses,
    table,
)
from dibs.cli.streams import plain
from dibs.errors import Unsupported
from dibs.history import HISTORY_KEPT_MAX
from dibs.names import counted, lasting, people_call
from dibs.steps import run
from dibs.store import PERMITS_MAX

if TYPE_CHECKING:
    import argparse

    from dibs.abilities import Historian
    from dibs.client import Client
    from dibs.desk import LeaseRecord

# -- what each is told -------------------------------------------------------------------------------------------------


def _ls_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the leases in force: who holds what, since when, for how long still, and who waits."
    parser.epilog = """\
examples:
  dibs ls                                       everything in the namespace "default"
  dibs ls deploy/                               names that start with deploy/
  dibs --namespace billing ls                   another namespace
  dibs ls --json | jq -r '.[] | select(.waiting > 0) | .name'
                                                the names somebody waits for

LEFT is the time after which the store lets others in unless the lease is renewed, as a live holder does. (ZooKeeper,
which tells its time only to who writes, shows the whole ttl: the most it can be.) Pauses (`dibs pause`) stand beneath.
"""
    prefix_argument(parser)
    json_option(parser)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show who holds NAME. Exits 1 when nobody does."
    parser.epilog = """\
examples:
  dibs show nightly                             who holds it
  dibs show nightly | awk '/^token/ {print $2}' the token that `dibs break` asks for
  dibs show nightly > /dev/null && echo busy    in a script; any code but 0 and 1 means that it is not known
  dibs show -- --strange-name                   a name that looks like an option
"""
    parser.add_argument("name", metavar="NAME", help="the name of the lock")
    json_option(parser)


def _break_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Take the lease on NAME from its holder, whatever that is doing.

It cannot be renewed any more. Its holder hears so at its next renewal (within a third of its ttl) and stops: `dibs run`
ends its command and exits 76. The name is free for others when the lease would have expired, so the two never meet.

With --now the name is free at once. The old holder may still believe in its lease, until its next renewal at the
latest; for that long there may be two, and only what compares fencing tokens can tell them apart. Use it when you know
that the holder is dead, or does no harm.

Without --token it shows the holder and the command to type. The token makes sure that you break the lease you looked
at, and not that of somebody who got the name since."""
    parser.epilog = """\
examples:
  dibs break nightly                            look first: shows the holder and the command to type
  dibs break nightly --token 42                 break that lease; the name is free at its expiry
  dibs break nightly --token 42 --now           the same, and the name is free now
  dibs break nightly --now --token "$(dibs show nightly | awk '/^token/ {print $2}')"
                                                whoever has it
"""
    parser.add_argument("name", metavar="NAME", help="the name of the lock")
    parser.add_argument("--token", type=whole, metavar="N", help="the fencing token of the lease to break")
    parser.add_argument("--now", action="store_true", help="free the name at once, although its holder may go on")


def _purge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Delete the rows of names that have been free for so long. Tidiness: leases end by themselves."
    parser.epilog = """\
examples:
  dibs purge --older-than 30d                   what nobody has held for thirty days
  dibs purge --older-than 0                     everything that is free now
  5 4 * * 0  dibs purge --older-than 90d        in a crontab, where names are many (one per customer or file)
  dibs --url sqlite:////var/lib/app/dibs.db purge --older-than 12h

Other namespaces keep theirs. Fencing tokens go on rising for purged names too: the store keeps a floor under them.
"""
    parser.add_argument(
        "--older-than", type=duration, metavar="T", required=True, help="how long a name must have been free, e.g. 30d"
    )


def _setup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make the tables. Harmless when they exist, also when several do it at once."
    parser.epilog = """\
examples:
  dibs setup                                    in the default store
  dibs --url postgresql://owner@db/prod setup   once, as a role that may make tables; then run dibs as one that may not
  dibs --url 'postgresql://owner@db/prod?schema=ops&table=locks' setup
                                                under other names; the same options go into every URL
  dibs --url postgresql://host/prod schema | psql prod
                                                or let somebody else read and run the SQL
  dibs setup --history 100                      from now on, write down who has each name (`dibs history`)
  dibs setup --history 0                        no more, and forget them

It is needed only where the role that dibs runs as may not make tables (and when an SQLite file has moved to another
machine); otherwise they are made at first use. A history is kept by triggers on the tables, on SQLite, PostgreSQL and
MySQL: it is complete whoever takes the names, and costs each grant and release a little.
"""
    _history_option(parser)


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Print the SQL that `dibs setup` would run. Nothing is connected to.

With --fence it prints, instead, a trigger for a table of yours in the database of --url: it refuses every UPDATE that
makes the column of fencing tokens smaller, as one of a holder that was superseded does.

With --claims it prints, instead, what adds three columns to a table of yours in which its rows keep their claims
(client.claims(…, mode="columns"), `dibs claim --columns`). They may be NULL, without default: no row is rewritten."""
    parser.epilog = """\
examples:
  dibs schema                                   for the default store
  dibs --url postgresql://host/db schema        for PostgreSQL
  dibs --url 'postgresql://host/db?schema=ops' schema > 0042_dibs.sql
                                                into a migration
  dibs schema | sqlite3 other.db                into another file
  dibs schema --history 100                     with what writes down who held each name
  dibs --url postgresql://host/shop schema --fence account
                                                a trigger for the column "fence" of the table "account"
  dibs --url mysql://host/shop schema --fence account --column token
                                                for the column "token"
  dibs --url postgresql://host/shop schema --claims app.event
                                                columns for claims, for the table "event" in the schema "app"
"""
    _history_option(parser)
    parser.add_argument("--fence", metavar="TABLE", help="print a trigger that fences this table")
    parser.add_argument("--claims", metavar="TABLE", help="print what adds the columns for claims to this table")
    parser.add_argument("--column", metavar="NAME", help="where its rows keep tokens (default: fence)")


def _history_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history", type=_count, metavar="N", help="keep the last N grants of each name; 0: none (default: as it is)"
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > HISTORY_KEPT_MAX:
        raise ArgumentTypeError(f"{text!r} is no number of grants: write 0 to {HISTORY_KEPT_MAX}")
    return int(text)


ARGUMENTS = {
    "ls": _ls_arguments,
    "show": _show_arguments,
    "break": _break_arguments,
    "purge": _purge_arguments,
    "setup": _setup_arguments,
    "schema": _schema_arguments,
}

# -- what each does ----------------------------------------------------------------------------------------------------


def ls(args: argparse.Namespace) -> int:
    """``dibs ls``."""
    with connect(args) as client:
        records = client.leases(args.prefix)
        pauses = pauses_of(client)
    if args.json:
        print_json([lease_json(record, pauses) for record in records])
        return 0
    if not records:
        print(f"No leases on names that start with {args.prefix!r}." if args.prefix else "No leases.")
    else:
        headers = ("NAME", "SLOT", "HOLDER", "SINCE", "LEFT", "TOKEN", "WAITING", "INFO")
        print(table(headers, map(lease_row, records)))
    print_pauses(pauses)
    return 0


def show(args: argparse.Namespace) -> int:
    """``dibs show``."""
    with connect(args) as client:
        record, others = _holders(client, args.name)
        pauses = [pause for pause in pauses_of(client) if pause.covers(args.name)]
    if args.json:
        print_json(None if record is None else lease_json(record, pauses))
        return NOT_HELD if record is None else 0
    if record is None:
        print(f"Nobody holds {args.name!r}.")
    else:
        _print_record(record, others)
    for pause in pauses:
        print(f"paused   {plain(str(pause))}")
    return NOT_HELD if record is None else 0


def break_(args: argparse.Namespace) -> int:
    """``dibs break``."""
    with connect(args) as client:
        record, others = _holders(client, args.name)
        if args.token is None:
            if record is None:
                print(f"Nobody holds {args.name!r}.")
                return NOT_HELD
            _print_record(record, others)
            print(f"\nTo break this lease, type:\n\n  {_break_command(args, record)}\n")
            print("Its holder stops at its next renewal; the name is free when the lease would have expired.")
            print("With --now it is free at once, and the old holder may still be at work (dibs break --help).")
            raise CommandError(USAGE, "nothing was broken: --token is missing")
        done = client.break_lease(args.name, fencing_token=args.token, now=args.now)
    if not done:
        if record is None or record.fencing_token == args.token:
            raise CommandError(NOT_HELD, f"nothing was broken: nobody holds {args.name!r} any more")
        raise CommandError(
            NOT_HELD,
            f"nothing was broken: {args.name!r} is held with token {record.fencing_token}, not {args.token} "
            f"(by {people_call(record.holder)} since {local(record.acquired_at)})",
        )
    when = "now" if args.now or record is None else f"in {lasting(record.expires_in)} at the latest"
    print(f"Broke the lease on {args.name!r} with token {args.token}. The name is free {when}.")
    return 0


def purge(args: argparse.Namespace) -> int:
    """``dibs purge``."""
    with connect(args) as client:
        purged = client.purge(args.older_than)
    print(f"Purged {counted(purged, 'name')}.")
    return 0


def setup(args: argparse.Namespace) -> int:
    """``dibs setup``."""
    with connect(args) as client:
        client.setup(history=args.history)
        print(f"Ready: {client._desk.address.shown}")
    return 0


def schema(args: argparse.Namespace) -> int:
    """``dibs schema``."""
    if (args.fence is not None) + (args.claims is not None) + (args.history is not None) > 1:
        raise CommandError(
            USAGE,
            "--fence prints a trigger for a table of yours, --claims columns for one, --history tables of dibs: one of "
            "them",
        )
    if args.fence is not None:
        return _print_fence(args)
    if args.column is not None:
        raise CommandError(USAGE, "--column needs --fence TABLE: the table that the column is in")
    if args.claims is not None:
        return _print_claims(args)
    address = connect(args)._desk.address
    if args.history is not None and not address.capabilities.history:
        raise Unsupported(f"{address.capabilities.store} cannot write down who held a name")
    store = address.open()
    print(store.schema().rstrip())
    if args.history is not None:
        print(cast("Historian", store).history_schema(args.history).rstrip())
    return 0


def _print_claims(args: argparse.Namespace) -> int:
    from dibs.columns import migration_sql

    print(migration_sql(_dialect(args, "whose rows keep claims"), args.claims).rstrip())
    return 0


def _dialect(args: argparse.Namespace, purpose: str) -> str:
    """Of the database that --url names."""
    from dibs.door import MYSQL, POSTGRESQL, SQLITE

    store = connect(args)._desk.address.capabilities.store
    dialect = {"PostgreSQL": POSTGRESQL, "MySQL / MariaDB": MYSQL, "SQLite": SQLITE}.get(store)
    if dialect is None:
        raise CommandError(USAGE, f"{store} has no tables {purpose}; name the database of the table with --url")
    return dialect


def _print_fence(args: argparse.Namespace) -> int:
    from dibs.fencing import MYSQL, trigger_sql

    dialect = _dialect(args, "to fence")
    text = trigger_sql(dialect, args.fence, args.column or "fence").rstrip()
    # The semicolons inside are not the end for the program `mysql`.
    print(f"DELIMITER $$\n{text}$$\nDELIMITER ;" if dialect == MYSQL else text)
    return 0


# -- how it looks ------------------------------------------------------------------------------------------------------


def _holders(client: Client, name: str) -> tuple[LeaseRecord | None, int]:
    """The first of those who hold a name, and how many others do."""
    records = run(client._desk.leases_of(name))
    return (records[0], len(records) - 1) if records else (None, 0)


def _print_record(record: LeaseRecord, others: int) -> None:
    print(f"name     {plain(record.name)}")
    print(f"slot     {record.slot}")
    if record.take > 1:
        print(f"permits  {'all' if record.take == PERMITS_MAX else record.take}")
    print(f"holder   {plain(people_call(record.holder))}")
    print(f"since    {local(record.acquired_at)}")
    print(f"left     {lasting(record.expires_in)} unless renewed")
    print(f"token    {record.fencing_token}")
    print(f"waiting  {record.waiting}")
    if others:
        print(f"others   {others} more {'holds' if others == 1 else 'hold'} it: `dibs ls` shows all")
    if record.info is not None:
        print(f"info     {plain(json_text(record.info))}")


def _break_command(args: argparse.Namespace, record: LeaseRecord) -> str:
    from shlex import quote

    words = ["dibs"]
    if args.url is not None:
        # A password in it is on the screen already, but need not stay there.
        words += ["--url", "URL" if _has_password(args.url) else quote(args.url)]
    if args.namespace is not None:
        words += ["--namespace", quote(args.namespace)]
    token = f"--token {record.fencing_token}"
    name = quote(record.name) if record.name.isprintable() else _quoted_escapes(record.name)
    words += ["break", token, "--", name] if name.startswith("-") else ["break", name, token]
    return " ".join(words)


def _quoted_escapes(name: str) -> str:
    """As bash, zsh and others read it, without showing what does something to a terminal."""
    chars = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}" for c in name)
    return f"$'{''.join(chars)}'"


def _has_password(url: str) -> bool:
    from dibs.urls import split_url

    parts = split_url(url)
    return parts.password is not None or "password" in parts.query
