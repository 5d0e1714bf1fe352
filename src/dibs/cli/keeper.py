"""The keeper: a process that runs commands one after the other for a wrapper, and ends those that are trusted no more.

``dibs run`` forks its command and a guard before it starts a thread. Whoever runs a command for each job has threads
by then, and must not fork; so the keeper is forked first. It has no threads, makes all commands, feeds their standard
input, and passes on their stderr. It is a guard as well (see ``dibs.cli.guard``): a command is made only after it was
said by when it must end, and for each command one of these is true:

* *running*: its two moments, TERM and KILL, are moved by the wrapper with each renewal;
* *stopped*: TERM was sent, KILL follows at ``kill_at``. It is *ended* once nobody of its group is left.

A pipe that breaks means that the wrapper died: KILL for all groups at once. When the keeper dies instead, Linux kills
its commands, and the wrapper kills the groups that it knows of; and those that are there after their last moment. So
neither waits for the other: what the keeper does not read is kept here, and a keeper that does not end is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.cli import SIGNALLED, SYSTEM, CommandError
from dibs.cli.guard import NEVER, send
from dibs.cli.keeping import LAST_WORDS_S, be_keeper
from dibs.cli.moments import GRACE_PART_MAX, LAST_MOMENT_PART_MAX, LAST_MOMENT_S, LOOKS_PER_TTL
from dibs.clock import boot_now

if TYPE_CHECKING:
    from collections.abc import Callable

# The wrapper kills a group that is there so long after its last moment: the keeper is paused or hangs. At most this
# part of the time from there to the end of the trust, so that others enter after both.
KEEPER_LATE_S = 0.2
KEEPER_LATE_PART_MAX = 0.5
# So long after it was told to end, the keeper is killed. It may take some time to say what is left on stderr.
KEEPER_ENDS_S = 10.0
assert KEEPER_ENDS_S > LAST_WORDS_S
_CHUNK = 65536


class Ended(NamedTuple):
    """How a command ended: its exit code as a shell tells it, whether it was stopped, the last of its stderr.

    ``refused``: it never began, the system would not run it.
    """

    number: int
    code: int
    stopped: bool
    tail: str
    refused: bool


class Kept:
    """What the wrapper knows of a command. ``trust`` says whether it may run, and the last moment at which it might.

    ``group`` is 0 before the command is there, and when it has ended by itself: the number may be somebody else's then.
    """

    def __init__(self, trust: Callable[[], tuple[bool, float]]) -> None:
        self.trust = trust
        self.group = 0
        self.term_at = self.kill_at = NEVER
        #: The moments that the keeper was told.
        self.told = (NEVER, NEVER)
        self.stopped = False
        #: The wrapper has killed it.
        self.killed = False


class Keeper:
    """The wrapper's side. All of it is called by one thread."""

    def __init__(self, path: str, argv: list[str], ttl: float, grace_s: float) -> None:
        """Fork the keeper of this command line. The calling process must have a single thread."""
        self._grace_s = min(grace_s, ttl * GRACE_PART_MAX)
        self._last_moment_s = min(LAST_MOMENT_S, ttl * LAST_MOMENT_PART_MAX)
        self._late_s = min(KEEPER_LATE_S, self._last_moment_s * KEEPER_LATE_PART_MAX)
        self._look_s = ttl / LOOKS_PER_TTL
        self._kept: dict[int, Kept] = {}
        self._unread = b""
        self._unsent = bytearray()
        #: By when everything must have ended, trusted or not.
        self.end_by = NEVER
        orders_fd, self._orders_fd = os.pipe()
        self._news_fd, news_fd = os.pipe()
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # there would be no ended keeper to ask how it ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._pid = os.fork()
            if not self._pid:
                be_keeper(orders_fd, news_fd, path, argv, mask)
        except OSError as error:
            raise CommandError(SYSTEM, f"cannot start a process: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(orders_fd)
        os.close(news_fd)
        os.set_blocking(self._orders_fd, False)
        self._poll = select.poll()
        self._poll.register(self._news_fd, select.POLLIN)

    def __len__(self) -> int:
        return len(self._kept)

    def start(
        self, number: int, payload: bytes, environment: dict[str, str], trust: Callable[[], tuple[bool, float]]
    ) -> None:
        """Run the command with this on its standard input, for as long as it is trusted. ``number`` tells it."""
        kept = self._kept[number] = Kept(trust)
        self._look_at(kept)
        if kept.stopped:  # too late: it is not begun at all
            kept.kill_at = boot_now()
        kept.told = (kept.term_at, kept.kill_at)
        order = {"start": number, "term_at": kept.term_at, "kill_at": kept.kill_at, "environment": environment}
        self._order({**order, "bytes": len(payload)}, payload)

    def tend(self, seconds: float, *others: int) -> list[Ended]:
        """Tell the keeper of renewals and losses, and wait up to ``seconds``, or until one of the others is readable.

        Which commands have ended. Raises CommandError when the keeper died; the commands are dead then as well.
        """
        wait_s = min(seconds, self._look_s) if self._kept else seconds
        for kept in self._kept.values():
            self._look_at(kept)
            late_s = boot_now() - kept.kill_at - self._late_s
            if late_s > 0 and kept.group:
                send(kept.group, signal.SIGKILL)
                kept.killed = True
            elif late_s <= 0:
                wait_s = min(wait_s, -late_s)
        if not self._unsent:  # or it reads nothing, and is told the latest when it reads again
            self._tell_moments()
        self._send()
        if self._unsent:
            self._poll.register(self._orders_fd, select.POLLOUT)
        for fd in others:
            self._poll.register(fd, select.POLLIN)
        ready = {fd for fd, _event in self._poll.poll(int(wait_s * 1000) + 1)}
        if self._orders_fd in ready:
            self._poll.unregister(self._orders_fd)
        return self._news() if self._news_fd in ready else []

    def signal(self, signum: int) -> None:
        """Pass a signal on to every command."""
        for kept in self._kept.values():
            if kept.group:
                send(kept.group, signum)

    def hurry(self) -> None:
        """From now on a command has ended when it has, also when nobody reads what it had said."""
        self._order({"hurry": True})

    def close(self) -> None:
        """End the keeper, and what it runs still: nobody of it is left afterwards."""
        if self._orders_fd >= 0:
            os.close(self._orders_fd)
            self._orders_fd = -1
            os.kill(self._pid, signal.SIGCONT)  # a stopped one would not hear of it
            if not self._ended_within(KEEPER_ENDS_S):
                os.kill(self._pid, signal.SIGKILL)
            _pid, status = os.waitpid(self._pid, 0)
            os.close(self._news_fd)
            if status:  # it did not end in order, and perhaps left something behind
                self.signal(signal.SIGKILL)

    def _ended_within(self, seconds: float) -> bool:
        """Wait for the end of the news, which is that of the keeper."""
        poll = select.poll()
        poll.register(self._news_fd, select.POLLIN)
        end_at = boot_now() + seconds
        while (left_s := end_at - boot_now()) > 0:
            if poll.poll(int(left_s * 1000) + 1) and not os.read(self._news_fd, _CHUNK):
                return True
        return False

    def _look_at(self, kept: Kept) -> None:
        """Decide by when it is to be stopped."""
        if kept.stopped:
            return
        now = boot_now()
        trusted, until = kept.trust()
        kill_at = min(until - self._last_moment_s, self.end_by)
        term_at = kill_at - self._grace_s
        if not trusted or now >= term_at:
            kept.stopped = True
            term_at, kill_at = now, min(kill_at, now + self._grace_s)
        kept.term_at, kept.kill_at = term_at, kill_at

    def _tell_moments(self) -> None:
        moved = {}
        for number, kept in self._kept.items():
            if kept.told != (kept.term_at, kept.kill_at):
                kept.told = moved[number] = (kept.term_at, kept.kill_at)
        if moved:
            self._order({"move": moved})

    def _order(self, order: dict[str, Any], payload: bytes = b"") -> None:
        self._unsent += json.dumps(order).encode() + b"\n" + payload
        self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._orders_fd, self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._died() from error

    def _news(self) -> list[Ended]:
        data = os.read(self._news_fd, _CHUNK)
        if not data:
            raise self._died()
        lines = (self._unread + data).split(b"\n")
        self._unread = lines.pop()
        ended = []
        for number, group, code, stopped, tail, refused in map(json.loads, lines):
            if code is None:
                self._kept[number].group = group
            else:
                killed = self._kept.pop(number).killed and code == SIGNALLED + signal.SIGKILL
                ended.append(Ended(number, code, stopped or killed, tail, refused))
        return ended

    def _died(self) -> CommandError:
        self.signal(signal.SIGKILL)
        return CommandError(SYSTEM, "the process that looks after the commands is gone; they were ended")
