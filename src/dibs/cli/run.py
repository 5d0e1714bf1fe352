"""``dibs run NAME -- COMMAND``: a command that runs only while a lease is trusted. ``dibs elect`` uses it, too.

Two processes are forked before this one starts any thread. The *command* waits, as a process group of its own, at the
end of a pipe until the lease is held, and then becomes the command. The *guard* (``dibs.cli.guard``) ends the group
when this process, the *wrapper*, cannot. The guard is told a deadline before the command may start, so there is no
moment at which the command runs unguarded.

How the wrapper looks after the command while it runs is told in ``dibs.cli.supervisor``.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli import LOST, SIGNALLED, SYSTEM, USAGE, CommandError, connect, duration, say, whole
from dibs.cli.command import Command, find
from dibs.cli.guard import Guard, GuardDiedError
from dibs.cli.moments import GRACE_DEFAULT_S
from dibs.cli.signals import PASSED_ON, Interrupted, Signals
from dibs.cli.supervisor import GUARD_DIED, Supervisor
from dibs.errors import InvalidOption, LeaseLost, LockTimeout
from dibs.trust import watched_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from dibs.client import Client
    from dibs.lease import Lease

EPILOG = """\
examples:
  dibs run nightly -- ./backup.sh --full
      wait until nobody else runs "nightly", however long that takes, then run it
  dibs run nightly --nowait -- ./backup.sh
      run it now or exit 75; with --on-busy skip instead of --nowait, or exit 0 without a word
  dibs run nightly --timeout 10m -- ./backup.sh
      wait ten minutes at most
  dibs run nightly --on-busy skip --min-hold 5m -- ./backup.sh
      in the crontabs of several hosts: one of them runs it, also when it is over in a second and the hosts' clocks
      differ by a minute
  dibs run report/$(date +%F) --once-per 2d -- send-report
      once a day, on whichever host comes first: run it again when it has failed, and not when it has succeeded
  dibs run gpu --slots 2 -- sh -c 'CUDA_VISIBLE_DEVICES=$((DIBS_SLOT - 1)) ./train'
      two at a time, each with a GPU of its own
  dibs run memory-gb --slots 64 --weight 48 -- ./large-job
      as many at a time as fit into 64 GB, of which this one takes 48
  dibs run deploy/web --info '{"ticket": "OPS-7"}' -- make deploy
      show others why (`dibs ls`)
  dibs run report --max-hold 2h -- sh -c 'make-report | mail -s "Report $DIBS_FENCING_TOKEN" boss'
      stop it after two hours; the shell is yours to call when you need one
  dibs run --nowait -- -strange-name -- ./backup.sh
      a name that looks like an option

The command finds DIBS_NAME, DIBS_SLOT and DIBS_FENCING_TOKEN in its environment. The token is greater than that of
every earlier run; what the command writes to can compare it and refuse latecomers.

The command is stopped, its whole process group with TERM and then KILL, before anybody else can get the lock: when the
store is away for too long (0.37 of the ttl can be), when the lease is broken by an operator, and also when dibs itself
is killed with -9 or paused.

exit codes:
  the command's own, 128+n when signal n ended it; 75 held by another, 76 lost, 69 store unreachable, 78 not set up or
  misconfigured, 64 wrong usage, 126 not executable, 127 not found
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dibs run NAME [options] -- COMMAND [argument …]"
    parser.description = "Run a command while holding the lock NAME. Says nothing unless something is wrong."
    parser.epilog = EPILOG
    parser.takes_command = True  # type: ignore[attr-defined]
    parser.add_argument("name", metavar="NAME", help="what at most one command at a time may be doing")
    parser.add_argument(
        "--ttl",
        type=duration,
        metavar="T",
        help="how long the lease outlives this machine; it is renewed every third of it (default: 30s)",
    )
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument("--timeout", type=duration, metavar="T", help="how long to wait for it (default: for ever)")
    waiting.add_argument("--nowait", action="store_true", help="do not wait: the same as --timeout 0")
    parser.add_argument(
        "--slots",
        type=whole,
        metavar="N",
        help="let N run at a time, each with a number from 1 to N in DIBS_SLOT; the same N everywhere",
    )
    parser.add_argument(
        "--weight",
        type=whole,
        metavar="K",
        help="take K of the N slots, all or nothing; DIBS_SLOT is still one number of its own (default: 1)",
    )
    parser.add_argument(
        "--on-busy",
        choices=("fail", "skip"),
        default="fail",
        help="when it cannot be had in time: exit 75 and say who has it, or exit 0 silently. "
        "skip without --timeout does not wait (default: fail)",
    )
    parser.add_argument(
        "--min-hold",
        type=duration,
        default=0.0,
        metavar="T",
        help="nobody else gets it before this long after the start, however soon the command ends",
    )
    parser.add_argument(
        "--once-per",
        type=duration,
        metavar="T",
        help="when the command has succeeded (exit code 0), nobody runs it again for this long: another try exits 0 "
        "silently",
    )
    parser.add_argument(
        "--max-hold", type=duration, metavar="T", help="stop the command when it has held the lock this long"
    )
    add_common(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of all commands that run a command."""
    parser.add_argument("--info", metavar="JSON", help="a small JSON object to show to others")
    add_grace(parser)


def add_grace(parser: argparse.ArgumentParser, what: str = "the command") -> None:
    parser.add_argument(
        "--grace",
        type=duration,
        default=GRACE_DEFAULT_S,
        metavar="T",
        help=f"time between TERM and KILL when {what} must be stopped (default: {GRACE_DEFAULT_S:g}s, at most a "
        "quarter of the ttl)",
    )


ARGUMENTS = {"run": _arguments}


class AlreadyDone(Exception):
    """Within the time of ``--once-per`` a command has succeeded."""


def run(args: argparse.Namespace) -> int:
    """``dibs run``: returns the exit code."""
    info = parse_info(args.info)
    timeout = 0.0 if args.nowait or (args.on_busy == "skip" and args.timeout is None) else args.timeout

    if args.once_per is not None and args.min_hold:
        raise CommandError(USAGE, "give --min-hold or --once-per: each says how long the name stays taken")
    if args.once_per is not None and args.slots is not None:
        raise CommandError(USAGE, "give --slots or --once-per: what is done once has one slot")
    if args.weight is not None and args.slots is None:
        raise CommandError(USAGE, "give --slots with --weight: it is how many of the slots are taken")

    @contextmanager
    def lock(client: Client) -> Iterator[Lease]:
        desk = client._desk
        if desk.address.observed and timeout is not None:
            least = watched_for(desk.ttl if args.ttl is None else args.ttl)
            if timeout <= least:
                raise InvalidOption(
                    f"with takeover=observe a holder that died is followed by who has waited for its ttl: give "
                    f"--timeout more than {least:g}s (or --ttl less), or nobody may ever have {args.name!r} again"
                )
        weight = 1 if args.weight is None else args.weight
        same: dict[str, Any] = {"ttl": args.ttl, "timeout": timeout, "max_hold": args.max_hold, "info": info}
        if args.once_per is None:
            same["min_hold"] = args.min_hold
            with (
                client.lock(args.name, **same)
                if args.slots is None
                else client.semaphore(args.name, args.slots, weight=weight, **same) as lease
            ):
                yield lease
        else:
            with client.once(args.name, keep=args.once_per, **same) as attempt:
                if not attempt:
                    raise AlreadyDone
                yield attempt.lease

    try:
        return run_under(args, lock)
    except AlreadyDone:
        return 0
    except LockTimeout:
        if args.on_busy == "skip":
            return 0
        raise


def run_under(args: argparse.Namespace, lease_of: Callable[[Client], AbstractContextManager[Lease]]) -> int:
    """Run the command of ``args`` for as long as it runs and ``with lease_of(client)`` goes on; its exit code."""
    path = find(args.command_line[0])
    # Nothing may interrupt the forks: each process first decides for itself what a signal does.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        command = Command(path, args.command_line, mask)
        guard = Guard(command.pid)
    except OSError as error:
        raise CommandError(SYSTEM, f"cannot start a process: {error.strerror}") from error
    signals = Signals()
    try:
        with signals:
            return _run(args, lease_of, command, guard, signals, mask)
    except Interrupted as interrupted:
        return SIGNALLED + interrupted.signum
    finally:
        command.end()
        guard.close()
        signals.over()


def _run(
    args: argparse.Namespace,
    lease_of: Callable[[Client], AbstractContextManager[Lease]],
    command: Command,
    guard: Guard,
    signals: Signals,
    mask: set[int | signal.Signals],
) -> int:
    code: int | None = None
    # Most loading is over before a signal may interrupt it.
    client = connect(args)
    # Blocked or not before (the command has it as it was), SIGCHLD is how the end of the command is heard of.
    signal.pthread_sigmask(signal.SIG_SETMASK, mask - {signal.SIGCHLD})
    if client._desk.address.shown.startswith("memory:"):
        raise InvalidOption("memory:// is seen by one process only, so a command run under it would exclude nobody")
    client._desk.session().on_paused = say
    try:
        with lease_of(client) as lease:
            signals.collect()
            lease._session.keeper.when_over(lease._hold, signals.ring)
            code = Supervisor(command, guard, signals, lease, args.grace).supervise()
            if code:
                lease.release()  # before the end of the block, which would mark a once as done
    except LeaseLost as error:
        # With a code, the command had ended by itself before anybody noticed the loss.
        ended = "" if code is None else f"the command ended with code {code}, but "
        raise CommandError(LOST, f"{ended}{error}") from None
    except GuardDiedError as error:
        raise CommandError(SYSTEM, f"the command was not started: {GUARD_DIED}") from error
    finally:
        client.close()
    assert code is not None
    return code


def parse_info(text: str | None) -> dict[str, object] | None:
    """What stands behind ``--info``."""
    if text is None:
        return None
    import json

    try:
        info = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(USAGE, f"--info is no JSON: {error}") from None
    if not isinstance(info, dict):
        raise CommandError(USAGE, """--info is a JSON object, as in --info '{"ticket": "OPS-7"}'""")
    return info
