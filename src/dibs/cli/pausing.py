"""``dibs pause`` and ``dibs resume``: stop new grants for a while, and let them go on."""

from __future__ import annotations

from shlex import quote

from dibs._typing import TYPE_CHECKING
from dibs.cli import NOT_HELD, USAGE, CommandError, connect, duration, say
from dibs.cli.looks import json_option, lease_json, lease_row, local, pause_json, print_json, table
from dibs.cli.streams import plain
from dibs.names import check_name
from dibs.pauses import QUEUE

if TYPE_CHECKING:
    import argparse


def _pause_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Stop new grants of NAME, or with a * at its end of all names that begin so, for every client of the namespace.
Holders go on: they renew and release. Waiters go on waiting; a command that tries once, as `dibs run --nowait` does,
exits 75. Both are shown the note.

Returns when the pause is in force, after a second, and lists what is still held. It ends with `dibs resume`,
and by itself after --for. Pausing again replaces note and end. Without NAME, lists the pauses."""
    parser.epilog = """\
examples:
  dibs pause nightly --note 'OPS-7: disks'      one name, for an hour
  dibs pause 'deploy/*' --for 2h                all that begin with deploy/ (quoted: the shell has a * of its own)
  dibs pause '*' --for 30m && dibs wait '*'     everything in the namespace; go on when nobody holds anything
  dibs pause --queue mail                       no job of the queue "mail" is handed out (its name here is queue/mail)
  dibs pause                                    which pauses there are
  dibs pause --json | jq -r '.[].name'          for a script
"""
    parser.usage = "dibs pause [NAME | PREFIX* | --queue NAME] [options]"
    which = parser.add_mutually_exclusive_group()
    which.add_argument("name", metavar="NAME|PREFIX*", nargs="?", help="what to pause")
    which.add_argument("--queue", metavar="NAME", help="or a queue: jobs in hand go on, and nobody takes another")
    parser.add_argument(
        "--for", dest="ttl", type=duration, metavar="T", help="when it ends by itself: 2s or later (default: 1h)"
    )
    parser.add_argument("--note", metavar="TEXT", help="why, for whoever waits")
    json_option(parser)


def _resume_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "End a pause: NAME or PREFIX* as it was paused. Exits 1 when there is no such pause."
    parser.epilog = """\
examples:
  dibs resume nightly                           waiters go on within two seconds
  dibs resume 'deploy/*'                        what `dibs pause 'deploy/*'` has paused
  dibs resume --queue mail                      workers go on
  dibs resume '*'                               the pause of everything; those of single names go on
  dibs pause --json | jq -r '.[].name' | while read -r name; do dibs resume "$name"; done
                                                all pauses
"""
    parser.usage = "dibs resume (NAME | PREFIX* | --queue NAME) [options]"
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("name", metavar="NAME|PREFIX*", nargs="?", help="what was paused")
    which.add_argument("--queue", metavar="NAME", help="the queue to resume")


ARGUMENTS = {"pause": _pause_arguments, "resume": _resume_arguments}


def pause(args: argparse.Namespace) -> int:
    """``dibs pause``."""
    _name_queue(args)
    with connect(args) as client:
        if args.name is None:
            if args.ttl is not None or args.note is not None:
                raise CommandError(USAGE, "name what to pause: dibs pause NAME (`dibs pause --help` explains)")
            pauses = client.pauses()
            if args.json:
                print_json([pause_json(pause) for pause in pauses])
            else:
                print("\n".join(plain(str(pause)) for pause in pauses) or "Nothing is paused.")
            return 0
        try:
            made = client.pause(args.name, args.note, ttl=args.ttl)
        except KeyboardInterrupt:
            say(f"{args.name!r} may be paused by now; `dibs pause` lists the pauses")
            raise
        holders = [record for record in client.leases(args.name.removesuffix("*")) if made.covers(record.name)]
    if args.json:
        print_json({**pause_json(made), "holders": [lease_json(record, [made]) for record in holders]})
        return 0
    # What begins with - would be taken for an option where it stands alone.
    if args.queue is not None:
        which = f"--queue{'=' if args.queue.startswith('-') else ' '}{quote(args.queue)}"
    else:
        which = f"{'-- ' if made.name.startswith('-') else ''}{quote(made.name)}"
    print(f"Paused {made.name!r} until {local(made.until)}; `dibs resume {which}` ends it before.")
    if "*" in made.name[:-1]:
        print("(Only a * at the end stands for whatever follows; any other is just that character.)")
    if holders:
        print("\nThese hold still, and may finish:\n")
        print(table(("NAME", "SLOT", "HOLDER", "SINCE", "LEFT", "TOKEN", "WAITING", "INFO"), map(lease_row, holders)))
    return 0


def _name_queue(args: argparse.Namespace) -> None:
    """A queue is paused by a name."""
    if args.queue is not None:
        args.name = QUEUE + check_name(args.queue)


def resume(args: argparse.Namespace) -> int:
    """``dibs resume``."""
    _name_queue(args)
    with connect(args) as client:
        ended = client.resume(args.name)
        others = [] if ended else client.pauses()
    if not ended:
        shown = f"there are {', '.join(repr(pause.name) for pause in others)}" if others else "nothing is"
        raise CommandError(NOT_HELD, f"{args.name!r} is not paused; {shown}")
    print(f"Resumed {args.name!r}.")
    return 0
