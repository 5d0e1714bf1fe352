"""``dibs claim SOURCE --ids - -- COMMAND``: one command on as many of these items as nobody else works.

The keeper (``dibs.cli.keeper``) runs the command, because a take of many items may go through threads of the session;
it is stopped when one of the claims is lost, like the command of ``dibs run``.
"""

from __future__ import annotations

import json
import os
import signal

from dibs._typing import TYPE_CHECKING
from dibs.cli import BUSY, LOST, SIGNALLED, UNWRITABLE, USAGE, CommandError, connect, duration, say, whole, write_line
from dibs.cli.command import find
from dibs.cli.keeper import Keeper
from dibs.cli.looks import pause_of
from dibs.cli.moments import LOOKS_PER_TTL
from dibs.cli.run import add_grace
from dibs.cli.signals import ENDING, PASSED_ON, Interrupted, Signals
from dibs.errors import InvalidOption
from dibs.names import counted

if TYPE_CHECKING:
    import argparse

    from dibs.claims import Batch, Claims
    from dibs.cli.keeper import Ended

EPILOG = """\
examples:
  psql -XAtc "select id from orders where state = 'new'" shop | dibs claim orders --ids - -- ./work-on-orders
      the command reads the ids that nobody else works from its standard input, one a line
  ls incoming | dibs claim incoming --ids - --limit 100 -- sh -c "tr '\\n' '\\0' | xargs -0 ./import"
      a hundred at most
  dibs claim orders --ids today.txt --busy later.txt -- ./work-on-orders
      ids from a file; those that others work are written to another
  dibs claim orders --ids today.txt --json -- ./work-on-orders
      at the end, a line of JSON on stderr: how many were won, busy, and lost
  dibs --url postgresql://host/shop claim event --ids today.txt --columns app.event -- ./work-on-events
      the rows of a table keep the claims themselves; `dibs schema --claims app.event` prints the columns for it

Claim first, then look again whether an id is still due: somebody may have finished it between your query and the claim.

The command finds DIBS_SOURCE in its environment. When it ends, however it ends, all its ids are free again; what need
not be done again is for your data to say. The claims are renewed while it runs. When one is lost, the command is
stopped, its whole process group, before anybody else can have the id; also when dibs is killed with -9 or paused.

exit codes:
  the command's own, 128+n when signal n ended it; 0 without running it when there are no ids, or no rows, 75 when
  others have them all, 76 a claim was lost, 69 store unreachable, 78 not set up or misconfigured, 64 wrong usage,
  126 not executable, 127 not found
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dibs claim SOURCE --ids FILE [options] -- COMMAND [argument …]"
    parser.description = "Claim as many of these items as are free, in one go, and run a command on them."
    parser.epilog = EPILOG
    parser.takes_command = True  # type: ignore[attr-defined]
    parser.add_argument("source", metavar="SOURCE", help="what the items are of; the same wherever they are claimed")
    parser.add_argument("--ids", metavar="FILE", required=True, help="their ids, one a line; - is standard input")
    parser.add_argument("--columns", metavar="TABLE", help="keep the claims in columns of this table, in the ids' rows")
    parser.add_argument("--key", metavar="COLUMN", help="of which column the ids are, with --columns (default: id)")
    parser.add_argument("--limit", type=whole, metavar="N", help="claim N of them at most")
    parser.add_argument(
        "--ttl",
        type=duration,
        metavar="T",
        help="how long the claims outlive this machine; renewed every third of it (default: 30s)",
    )
    parser.add_argument("--no-renew", action="store_true", help="the command is stopped when the ttl is over")
    parser.add_argument("--busy", metavar="FILE", help="write there the ids that others have")
    parser.add_argument("--json", action="store_true", help="tell on stderr, in JSON, how many were won, busy and lost")
    add_grace(parser)


ARGUMENTS = {"claim": _arguments}


def claim(args: argparse.Namespace) -> int:
    """``dibs claim``: returns the exit code."""
    path = find(args.command_line[0])
    client = connect(args)
    if client._desk.address.shown.startswith("memory:"):
        raise InvalidOption("memory:// is seen by one process only, so a claim in it would keep nobody out")
    if args.key is not None and args.columns is None:
        raise CommandError(USAGE, "--key needs --columns TABLE: the table that the column is in")
    mode = "leases" if args.columns is None else "columns"
    options = {"mode": mode, "table": args.columns, "key": args.key}
    claims = client.claims(args.source, ttl=args.ttl, renew=not args.no_renew, **options)
    ids = _ids(args.ids)
    if not ids:
        _write_busy(args.busy, [])
        return _code(0, _tell(args, 0, 0, 0, 0, None))
    keeper = Keeper(path, args.command_line, claims._core.terms.ttl, args.grace)  # before there are threads
    signals = Signals()
    try:
        with signals, client, claims.take(ids, limit=args.limit) as batch:
            signals.collect()
            _write_busy(args.busy, batch.busy)
            if not len(batch):
                told = _tell_of(args, batch, None)
                if not batch.busy:
                    say(f"{args.columns} has no row for {_any_of(len(batch.stale))}")
                    return _code(0, told)
                paused = pause_of(client, (f"{claims.source}/{each}" for each in batch.busy))
                raise CommandError(BUSY, paused or _others_have(len(batch.busy)))
            ended = _run(keeper, signals, claims, batch)
        told = _tell_of(args, batch, ended)
        if ended.stopped or batch.lost:
            how = "the command was stopped" if ended.stopped else f"the command ended with code {ended.code}"
            lost = len(batch.lost)
            raise CommandError(
                LOST,
                f"{how}, but {lost or 'some'} of {counted(len(batch), 'claim')} {'was' if lost == 1 else 'were'} lost",
            )
        return _code(ended.code, told)
    except Interrupted as interrupted:
        return SIGNALLED + interrupted.signum
    finally:
        keeper.close()
        signals.over()


def _ids(file: str) -> list[str]:
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as source:
            text = source.read()
        # Not splitlines(), for which a line ends with other characters, too. Windows may put a mark before the first.
        lines = (line.removesuffix("\r") for line in text.decode("utf-8-sig").split("\n"))
        return [line for line in lines if line.strip()]
    except UnicodeDecodeError as error:
        raise CommandError(USAGE, f"the ids are not UTF-8: {error}") from None
    except OSError as error:
        raise CommandError(USAGE, f"cannot read the ids: {error.strerror}: {file}") from None


def _any_of(count: int) -> str:
    return "the id" if count == 1 else f"any of the {count:,} ids"


def _others_have(count: int) -> str:
    return "somebody else has the only one" if count == 1 else f"others have all {count:,} of them"


def _run(keeper: Keeper, signals: Signals, claims: Claims, batch: Batch[str]) -> Ended:
    """Run the command on what was won, until it has ended."""
    items = batch.items

    def trust() -> tuple[bool, float]:
        return all(item.held for item in items), min(item._hold.trusted_until for item in items)

    ids = "".join(f"{item.value}\n" for item in items).encode()
    keeper.start(1, ids, {"DIBS_SOURCE": claims.source}, trust)
    while True:
        for ended in keeper.tend(claims._core.terms.ttl / LOOKS_PER_TTL, signals.fd):
            return ended
        for signum in signals.taken():
            if signum == signal.SIGTSTP:
                keeper.signal(signum)
                signals.stop_here()
                keeper.signal(signal.SIGCONT)
            elif signum in PASSED_ON or signum in ENDING:
                keeper.signal(signum)
                if signum in ENDING:
                    keeper.hurry()


def _write_busy(file: str | None, busy: list[str]) -> None:
    if file is not None:
        try:
            with open(file, "w", encoding="utf-8") as sink:
                sink.writelines(f"{each}\n" for each in busy)
        except OSError as error:
            raise CommandError(UNWRITABLE, f"{error.strerror}: {file}") from None


def _tell_of(args: argparse.Namespace, batch: Batch[str], ended: Ended | None) -> bool:
    if batch.busy and ended is not None and args.busy is None and not args.json and os.isatty(2):
        say(f"others have {len(batch.busy)} of {len(batch) + len(batch.busy)}")
    code = None if ended is None else ended.code
    return _tell(args, len(batch), len(batch.busy), len(batch.lost), len(batch.stale), code)


def _tell(args: argparse.Namespace, won: int, busy: int, lost: int, without_row: int, code: int | None) -> bool:
    """With --json, how it went; whether that could be written."""
    if not args.json:
        return True
    facts = {"won": won, "busy": busy, "lost": lost, "exit_code": code}
    if args.columns is not None:
        facts["without_row"] = without_row
    return write_line(json.dumps(facts))


def _code(code: int, told: bool) -> int:
    """The exit code, which is not success where what was asked for could not be told."""
    return code if told or code else UNWRITABLE
