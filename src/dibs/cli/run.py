"""``dibs run NAME -- COMMAND``: a command that runs only while a lease is trusted. ``dibs elect`` uses it, too.

Two processes are forked before this one starts any thread. The *command* waits, as a process group of its own, at the
end of a pipe until the lease is held, and then becomes the command. The *guard* (``dibs.cli.guard``) ends the group
when this process, the *wrapper*, cannot. The guard is told a deadline before the command may start, so there is no
moment at which the command runs unguarded.

While it runs, the wrapper's main thread looks after it, in one of two states:

* *running*: the guard knows when the trust ends. Signals are passed on. The command's end is the wrapper's end.
* *stopping*: the lease is lost, or will be in a moment because it could not be renewed, or the guard is gone. TERM was
  sent, KILL follows at ``kill_at``, which is never later than the end of the trust. There is no way back.

The moments, on the boot clock, in the order in which they come when no renewal succeeds::

    kill_at - grace       the wrapper sends TERM
    kill_at - grace / 2   the guard sends TERM, if the wrapper did not tell it that it had
    kill_at               both send KILL
    lease.trusted_until   others may be about to enter
"""

from __future__ import annotations

import gc
import os
import select
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dibs.cli import (
    LOST,
    SIGNALLED,
    SYSTEM,
    USAGE,
    CommandError,
    connect,
    duration,
    say,
)
from dibs.cli.command import Command, find
from dibs.cli.guard import NEVER, Guard, GuardDiedError, send
from dibs.clock import boot_now
from dibs.errors import InvalidOption, LeaseLost, LockTimeout
from dibs.trust import DRIFT, RENEWALS_PER_TTL

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    from dibs.client import Client
    from dibs.lease import Lease

GRACE_DEFAULT_S = 10.0
# The grace lies inside the trusted time, so it takes from the time in which renewals may fail without harm. At most
# this part of the ttl, so that the third attempt at a renewal is still made before TERM is sent.
GRACE_PART_MAX = 0.25
assert (RENEWALS_PER_TTL - 1) / RENEWALS_PER_TTL < 1 - DRIFT - GRACE_PART_MAX
# KILL is sent this long before the trust ends: a process needs a moment to be woken, and another one to die.
LAST_MOMENT_S = 0.02
LAST_MOMENT_PART_MAX = 0.02
# The lease is looked at this often in a ttl, to tell the guard of renewals.
LOOKS_PER_TTL = 8
# How often to look whether a group that is being stopped is gone.
GONE_LOOK_S = 0.01
# How long to wait for killed processes to disappear. They run no more; but where process 1 does not collect the dead
# (some containers) they stay listed for ever.
DEAD_WAIT_S = 0.5

GUARD_DIED = "the process that would end it if dibs were killed is gone"

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP)

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
  dibs run deploy/web --info '{"ticket": "OPS-7"}' -- make deploy
      show others why (`dibs ls`)
  dibs run report --max-hold 2h -- sh -c 'make-report | mail -s "Report $DIBS_FENCING_TOKEN" boss'
      stop it after two hours; the shell is yours to call when you need one

The command finds DIBS_NAME, DIBS_SLOT and DIBS_FENCING_TOKEN in its environment. The token is greater than that of
every earlier run; what the command writes to can compare it and refuse latecomers.

The command is stopped, its whole process group with TERM and then KILL, before anybody else can get the lock: when the
store cannot be reached for most of a ttl, when the lease is broken by an operator, and also when dibs itself is killed
with -9 or paused.

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
        type=int,
        metavar="N",
        help="let N run at a time, each with a number from 1 to N in DIBS_SLOT; the same N everywhere",
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
        help="when the command has succeeded (exit code 0), nobody runs it again for this long: who tries exits 0 "
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


class Interrupted(BaseException):
    """A signal asked this process to end while it was waiting for the lock."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


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

    @contextmanager
    def lock(client: Client) -> Iterator[Lease]:
        same: dict[str, Any] = {"ttl": args.ttl, "timeout": timeout, "max_hold": args.max_hold, "info": info}
        if args.once_per is None:
            same["min_hold"] = args.min_hold
            with (
                client.lock(args.name, **same)
                if args.slots is None
                else client.semaphore(args.name, args.slots, **same) as lease
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
    open_standard_files()
    # Nothing may interrupt the forks: each process first decides for itself what a signal does.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        command = Command(path, args.command_line, mask)
        guard = Guard(command.pid)
    except OSError as error:
        raise CommandError(SYSTEM, f"cannot start a process: {error.strerror}") from error
    signals = Signals()
    code: int | None = None
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        client = connect(args)
        if client._desk.address.shown.startswith("memory:"):
            raise InvalidOption("memory:// is seen by one process only, so a command run under it would exclude nobody")
        client._desk.session().on_paused = say
        try:
            with lease_of(client) as lease:
                signals.collect()
                lease._session.when_over(lease._hold, signals.ring)
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
    except Interrupted as interrupted:
        return SIGNALLED + interrupted.signum
    finally:
        command.end()
        guard.close()
    assert code is not None
    return code


def parse_info(text: str | None) -> dict[str, object] | None:
    """What stands behind ``--info``."""
    if text is None:
        return None
    import json

    try:
        info = json.loads(text)
    except ValueError as error:
        raise CommandError(USAGE, f"--info is no JSON: {error}") from None
    if not isinstance(info, dict):
        raise CommandError(USAGE, """--info is a JSON object, as in --info '{"ticket": "OPS-7"}'""")
    return info


def open_standard_files() -> None:
    """Let no file of ours get a number that others take for stdin, stdout or stderr. The command sees them closed."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class Signals:
    """Signals to this process: until ``collect`` they interrupt the waiting, afterwards they are collected."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        for fd in (self.fd, self._write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._collecting = False
        for signum in (*PASSED_ON, signal.SIGCHLD):
            # What is ignored stays ignored, here and in the command: nohup means it. And Ctrl-Z stops who waits.
            if signum == signal.SIGCHLD or (signum != signal.SIGTSTP and not _ignored(signum)):
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if not self._collecting and signum in ENDING:
            self._collecting = True  # a second one shall not interrupt the cleaning up
            raise Interrupted(signum)

    def collect(self) -> None:
        """From now on, whatever comes is for the command."""
        self.taken()
        self._collecting = True
        if not _ignored(signal.SIGTSTP):
            signal.signal(signal.SIGTSTP, self._handle)

    def taken(self) -> bytes:
        """The numbers of the signals that came since the last look (and zeros for ``ring``)."""
        try:
            return os.read(self.fd, 4096)
        except BlockingIOError:
            return b""

    def ring(self) -> None:
        """Wake whoever polls ``fd``; from any thread."""
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:  # full: it will wake anyway
            pass

    def stop_here(self) -> None:
        """Stop this process and the others of its group, as Ctrl-Z does; returns when somebody continues it."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.killpg(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)


def _ignored(signum: int) -> bool:
    return signal.getsignal(signum) is signal.SIG_IGN


class Terminal:
    """Whose turn it is at the keyboard: the wrapper's group, or the command's when that wants it."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._fd: int | None = None
        self.given = False
        # In `dibs run … | less` the keyboard is the reader's, unless the command asks for it (see ``Supervisor``).
        self.wanted = os.isatty(0) and not _is_pipe(1)

    def give(self) -> bool:
        """If it is wanted and ours to give, let the command read from the terminal and be reached by Ctrl-C."""
        if not self.wanted:
            return False
        try:
            if self._fd is None:
                self._fd = os.open("/dev/tty", os.O_RDWR)
            if os.tcgetpgrp(self._fd) == os.getpgrp():
                # Taking it back is done from the background, for which a process is stopped unless it ignores this.
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                os.tcsetpgrp(self._fd, self._group)
                self.given = True
        except OSError:  # no terminal, or not this session's
            pass
        return self.given

    def take_back(self) -> None:
        """Put the wrapper's group into the foreground again, if the command's was."""
        if self.given and self._fd is not None:
            self.given = False
            try:
                os.tcsetpgrp(self._fd, os.getpgrp())
            except OSError:  # it was closed meanwhile
                pass


def _is_pipe(fd: int) -> bool:
    return os.fstat(fd).st_mode & 0o170000 == 0o010000  # stat.S_ISFIFO


class Supervisor:
    """Looks after the command from its start to its end."""

    def __init__(self, command: Command, guard: Guard, signals: Signals, lease: Lease, grace_s: float) -> None:
        self._command = command
        self._group = command.pid
        self._guard = guard
        self._signals = signals
        self._terminal = Terminal(self._group)
        self._lease = lease
        self._grace_s = min(grace_s, lease.ttl * GRACE_PART_MAX)
        self._last_moment_s = min(LAST_MOMENT_S, lease.ttl * LAST_MOMENT_PART_MAX)
        self._look_s = lease.ttl / LOOKS_PER_TTL
        #: The last moment that the guard knows of.
        self._told = NEVER
        #: Why the command is being stopped; None while it runs.
        self._reason: str | None = None
        self._kill_at = NEVER
        #: When whoever is left of the group after the KILL is waited for no longer.
        self._over_at = NEVER
        #: A Ctrl-Z was passed on: when the command stops, so does the wrapper.
        self._stop_too = False
        self._poll = select.poll()
        self._poll.register(signals.fd, select.POLLIN)
        self._poll.register(guard.fd, 0)  # that it broke is reported without being asked for

    def supervise(self) -> int:
        """Start the command; return its exit code, or raise LeaseLost when it had to be stopped."""
        lease = self._lease
        try:
            self._tell_guard()
            self._terminal.give()
            self._command.start(
                {"DIBS_NAME": lease.name, "DIBS_SLOT": str(lease.slot), "DIBS_FENCING_TOKEN": str(lease.fencing_token)}
            )
            gc.enable()
            while not self._over():
                self._look_at_lease()
                self._wait()
        except BaseException:
            send(self._group, signal.SIGKILL)  # before the lease is released
            raise
        finally:
            self._command.end()
            self._terminal.take_back()
        if self._reason is None and not lease.held:
            # The command ended by itself, but nobody was awake to see whether in time.
            self._reason = self._lost()
        if self._guard.dismiss() and self._reason is None:
            self._reason = "dibs was paused"
        if self._reason is not None:
            raise LeaseLost(f"the command was stopped: {self._reason}")
        return self._command.exit_code()

    def _over(self) -> bool:
        stopped_by = self._command.look()
        if stopped_by is not None and self._reason is None:
            self._stopped(stopped_by)
        if self._command.status is None:
            return False
        if self._reason is None:
            return True
        # Being stopped, all of the group must be gone. What a command that ended by itself left behind may stay.
        return not send(self._group, 0) or boot_now() >= self._over_at

    def _wait(self) -> None:
        """Sleep until something happens or is to be done; take note of what happened."""
        now = boot_now()
        if self._reason is None:
            wake_at = min(now + self._look_s, self._last_moment() - self._grace_s)
        elif self._command.status is None:
            wake_at = self._kill_at
        else:
            wake_at = now + GONE_LOOK_S
        events = self._poll.poll(None if wake_at == NEVER else int(max(0.0, wake_at - now) * 1000) + 1)
        for fd, _event in events:
            if fd == self._guard.fd:
                self._poll.unregister(fd)
                self._stop(GUARD_DIED)
        for signum in self._signals.taken():
            if signum in PASSED_ON:
                self._pass_on(signum)

    # -- the lease ------------------------------------------------------------------------------------------------

    def _look_at_lease(self) -> None:
        """Tell the guard of renewals; stop the command when there were none for too long, or never will be."""
        now = boot_now()
        if self._reason is not None:
            if now >= self._kill_at:
                send(self._group, signal.SIGKILL)
                self._kill_at = NEVER
                self._over_at = now + DEAD_WAIT_S
        elif not self._lease.held:
            self._stop(self._lost())
        elif now >= self._last_moment() - self._grace_s:
            hold = self._lease._hold
            if hold.last_error is None and hold.reaches_its_end():
                self._stop(f"it has held {self._lease.name!r} for as long as --max-hold lets it")
            else:
                self._stop(
                    f"{self._lease.name!r} could not be renewed and is lost in {self._lease.trusted_until - now:.1f} s"
                    + (f": {hold.last_error}" if hold.last_error is not None else "")
                )
        else:
            try:
                self._tell_guard()
            except GuardDiedError:
                self._stop(GUARD_DIED)

    def _last_moment(self) -> float:
        """When KILL is due unless the lease is renewed."""
        return self._lease.trusted_until - self._last_moment_s

    def _tell_guard(self) -> None:
        kill_at = self._last_moment()
        if kill_at != self._told:
            self._guard.tell(kill_at - self._grace_s / 2, kill_at)
            self._told = kill_at

    def _stop(self, reason: str) -> None:
        """Send TERM, and see to it that KILL follows. The first reason counts."""
        if self._reason is not None:
            return
        self._reason = reason
        self._kill_at = min(self._last_moment(), boot_now() + self._grace_s)
        try:
            self._guard.tell(NEVER, self._kill_at)
        except GuardDiedError:  # one stopper is left
            pass
        send(self._group, signal.SIGTERM)
        send(self._group, signal.SIGCONT)  # a stopped process would not hear of it

    def _lost(self) -> str:
        lease = self._lease
        return f"lost {lease.name!r} (token {lease.fencing_token}): {lease._hold.reason}"

    # -- signals and stops ----------------------------------------------------------------------------------------

    def _pass_on(self, signum: int) -> None:
        if signum == signal.SIGCONT:
            self._terminal.give()  # a job that was put into the foreground again
        elif signum == signal.SIGTSTP:
            self._stop_too = True
        send(self._group, signum)

    def _stopped(self, signum: int) -> None:
        """The command was stopped: by Ctrl-Z, by a wish for the terminal, or by somebody's kill -STOP."""
        asks = signum in (signal.SIGTTIN, signal.SIGTTOU)
        if asks and not self._terminal.given:
            self._terminal.wanted = True
            if self._terminal.give():
                send(self._group, signal.SIGCONT)
                return
        if self._terminal.given or self._stop_too or asks:
            # The shell must get its terminal back, and sees the job stopped only when the wrapper is. Nobody renews
            # then: a job that stays stopped loses its lock, and the guard ends it.
            self._stop_too = False
            self._terminal.take_back()
            self._signals.stop_here()
            self._terminal.give()
            send(self._group, signal.SIGCONT)
