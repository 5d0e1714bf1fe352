"""``dibs elect NAME -- COMMAND``: a command on one machine, and a standby on every other that is ready to take over.

It is ``dibs run`` that waits without limit, in the words of elections; how the command is run, watched and stopped is
all in ``dibs.cli.run``. A standby has nothing to lose: it also waits for a store that is away.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.cli import duration, say, whole
from dibs.cli.run import add_common, parse_info, run_under

if TYPE_CHECKING:
    import argparse

    from dibs.client import Client
    from dibs.election import Lead

EPILOG = """\
examples:
  dibs elect scheduler -- scheduler --foreground
      on every machine: one of them runs the scheduler, the others stand by; when it dies, the next one runs it
  dibs elect scheduler --value http://$(hostname):8080 -- scheduler --port 8080
      tell everybody where the leader is: `dibs show scheduler`, or election.observe() in Python
  dibs elect scheduler --standby-max 1 -- scheduler
      one leader and one standby are enough: exit 75 where both are there already
  dibs elect scheduler --standby-max 1 --standby-full replace -- scheduler
      the newest is the standby: after a deploy it is the new version that takes over
  dibs elect scheduler --priority -1 -- scheduler
      on the machines of the other site: lead only when no machine of this site stands by
  dibs elect scheduler --ttl 10s -- scheduler
      a dead machine is replaced within ten seconds or so, and a store may be away for three

The command finds DIBS_NAME, DIBS_SLOT and DIBS_FENCING_TOKEN in its environment. The token is the number of the term,
greater than that of every earlier one; what the command writes to can compare it and refuse latecomers.

When leadership is lost, the command is stopped, its whole process group with TERM and then KILL, before another
machine can win; also when dibs itself is killed with -9 or paused. When the command ends by itself, leadership is
resigned and the next standby starts its own. Either way dibs ends: let the service manager start it again as a standby.

exit codes:
  the command's own, 128+n when signal n ended it; 75 standbys enough or replaced as one, 76 leadership lost, 69 store
  never reached, 78 not set up or misconfigured, 64 wrong usage, 126 not executable, 127 not found
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dibs elect NAME [options] -- COMMAND [argument …]"
    parser.description = (
        "Wait to be elected the leader of NAME, then run a command for as long as the leadership lasts.\n"
        "Says nothing unless something is wrong. A store that goes away meanwhile is waited for."
    )
    parser.epilog = EPILOG
    parser.takes_command = True  # type: ignore[attr-defined]
    parser.add_argument("name", metavar="NAME", help="what one machine at a time leads")
    parser.add_argument(
        "--ttl",
        type=duration,
        metavar="T",
        help="how long a dead leader keeps the others waiting; renewed every third of it (default: 30s)",
    )
    parser.add_argument("--value", metavar="TEXT", help="what observers see of the leader, its address for example")
    parser.add_argument(
        "--priority",
        type=whole,
        default=0,
        metavar="P",
        help="-1 to -9: lead only when no candidate of a higher priority is there (default: 0)",
    )
    parser.add_argument(
        "--standby-max",
        type=whole,
        metavar="N",
        help="exit 75 at once when N candidates with this option stand by already (default: no limit)",
    )
    parser.add_argument(
        "--standby-full",
        choices=("refuse", "replace"),
        default="refuse",
        help="then rather stand by in the place of the one that has done so the longest, which exits 75 "
        "(default: refuse)",
    )
    add_common(parser)


ARGUMENTS = {"elect": _arguments}


def elect(args: argparse.Namespace) -> int:
    """``dibs elect``: returns the exit code."""
    info = parse_info(args.info)

    def lead(client: Client) -> Lead:
        election = client.election(
            args.name,
            value=args.value,
            ttl=args.ttl,
            priority=args.priority,
            standby_max=args.standby_max,
            standby_full=args.standby_full,
            info=info,
        )
        return election._stand_by(say)

    return run_under(args, lead)
