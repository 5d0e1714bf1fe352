"""Looks after the command of ``dibs run``: it runs only while the lease is trusted.

This is the wrapper's main thread (see ``dibs.cli.run``) while the command runs. It is in one of two states:

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

import select
import signal

from dibs._typing import TYPE_CHECKING
from dibs.cli.guard import NEVER, OUT_OF_REACH, GuardDiedError, out_of_reach, send
from dibs.cli.moments import (
    DEAD_WAIT_S,
    GONE_LOOK_S,
    GRACE_PART_MAX,
    LAST_MOMENT_PART_MAX,
    LAST_MOMENT_S,
    LOOKS_PER_TTL,
)
from dibs.cli.signals import PASSED_ON
from dibs.cli.stderr import say_if_read
from dibs.cli.terminal import Terminal
from dibs.clock import boot_now
from dibs.errors import LeaseLost

if TYPE_CHECKING:
    from dibs.cli.command import Command
    from dibs.cli.guard import Guard
    from dibs.cli.signals import Signals
    from dibs.lease import Lease

GUARD_DIED = "the process that would end it if dibs were killed is gone"


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
        #: It runs as another user, and no signal of ours reaches it.
        self._out_of_reach = False
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
            raise LeaseLost(f"the command {self._how_it_ended()}: {self._reason}")
        return self._command.exit_code()

    def _how_it_ended(self) -> str:
        if self._out_of_reach:
            return "went on to its end as another user"
        return "was stopped" + (", but not what it runs as another user" if out_of_reach(self._group) else "")

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
        self._send(signal.SIGTERM)
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
        self._send(signum)

    def _send(self, signum: int) -> None:
        """Signal the group, and say so, once, when that does not reach the command."""
        send(self._group, signum)
        if not self._out_of_reach and self._command.status is None and out_of_reach(self._group):
            self._out_of_reach = True
            say_if_read(f"the command {OUT_OF_REACH}")

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
