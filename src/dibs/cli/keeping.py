"""What the keeper's process does: it makes commands, feeds them, passes on their stderr, and ends them in time.

What it is for, and the states of a command, are told in ``dibs.cli.keeper``, the wrapper's side of it.

It waits for nobody, or commands would not be ended in time. What the reader of stderr has not taken yet is kept, up to
a bound; beyond it commands are not listened to, and wait in their own writes. The end of a command is told when all
that it had said is written, so that nothing of it is lost and the next one speaks after it; but it is told at once of
one that had to be stopped, whose time is over, or that was asked to end.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import termios

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli.command import Command
from dibs.cli.guard import NEVER, OUT_OF_REACH, SLICE_S, close_all_but, name_process, out_of_reach, send
from dibs.cli.moments import DEAD_WAIT_S, GONE_LOOK_S
from dibs.cli.stderr import Stderr, say_if_read
from dibs.clock import boot_now

if TYPE_CHECKING:
    from typing import NoReturn

# So much of the end of what a command says on stderr is kept.
TAIL_BYTES = 3_500
# While nobody reads stderr, so many commands that have ended may have something in their pipes to be read later.
ENDED_MAX = 100
# At the end, what is still unsaid is written for as long as somebody reads some of it in this time, and this long.
LAST_WORDS_STEP_S = 1.0
LAST_WORDS_S = 5.0
_CHUNK = 65536


def be_keeper(orders_fd: int, news_fd: int, path: str, argv: list[str], mask: set[Any]) -> NoReturn:
    """Be the keeper, in a process that was forked for it, and end with it."""
    code = 1
    try:
        os.setsid()
        close_all_but(0, 1, 2, orders_fd, news_fd)
        name_process("dibs-keeper")
        Keeping(orders_fd, news_fd, path, argv, mask).run()
        code = 0
    except Exception as error:  # noqa: BLE001 - the last thing this process can do about it
        say_if_read(f"the process that looks after the commands failed: {error!r}")
    finally:
        os._exit(code)  # also after an error: the wrapper sees the pipe break


class Run:
    """A command that runs: what is left of its input, and by when it must end."""

    def __init__(self, command: Command, error_fd: int, payload: bytes, term_at: float, kill_at: float) -> None:
        self.command = command
        self.error_fd = error_fd
        self.rest = memoryview(payload)
        self.term_at = term_at
        self.kill_at = kill_at
        self.over_at = NEVER
        self.stopped = False
        #: It ended by itself, and the wrapper was told not to signal it any more.
        self.ended = False
        #: It runs as another user: it was told to stop, and could not be.
        self.out_of_reach = False
        self.tail = bytearray()
        #: How much of what it had said by its end is still in its pipe; None before the end.
        self.unheard: int | None = None
        #: Where its last word stands in all that goes to stderr, once that is known.
        self.last_word = -1


class Keeping:
    """What the keeper does, one thing after the other."""

    def __init__(self, orders_fd: int, news_fd: int, path: str, argv: list[str], mask: set[Any]) -> None:
        self._orders_fd = orders_fd
        self._news_fd = news_fd
        self._path = path
        self._argv = argv
        self._mask = mask
        self._runs: dict[int, Run] = {}
        self._inputs: dict[int, Run] = {}
        # Stays open when its command has ended: what that left behind may go on to write.
        self._errors: dict[int, Run] = {}
        self._stderr = Stderr()
        self._listening = True
        # Somebody wants an end, and does not wait for who reads stderr.
        self._hurried = False
        self._unread = bytearray()
        self._unsent = bytearray()
        for fd in (orders_fd, news_fd):
            os.set_blocking(fd, False)
        # An ended command wakes the poll by way of this pipe.
        self._child_fd, write_fd = os.pipe()
        for fd in (self._child_fd, write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self._poll = select.poll()
        for fd in (orders_fd, self._child_fd):
            self._poll.register(fd, select.POLLIN)

    def run(self) -> None:
        """Until the wrapper closes its end, or has died."""
        while True:
            self._look()
            self._attend_stderr()
            for fd, _event in self._poll.poll(int(self._slice_s() * 1000) + 1 if self._runs else None):
                if fd == self._orders_fd:
                    if not self._hear():
                        return self._end_all()
                elif fd == self._child_fd:
                    os.read(fd, _CHUNK)
                elif fd == self._news_fd:
                    self._send()
                elif fd == self._stderr.fd:
                    self._stderr.send()
                elif fd in self._inputs:
                    self._feed(fd)
                elif fd in self._errors and not self._stderr.full:
                    self._pass_on(fd)

    def _slice_s(self) -> float:
        """How long nothing is due. The system's waiting does not count the time a machine sleeps."""
        now = boot_now()
        slice_s = SLICE_S
        for run in self._runs.values():
            if run.stopped and run.command.status is not None:
                return GONE_LOOK_S  # its group is to go, too
            slice_s = min(slice_s, (run.kill_at if run.stopped else run.term_at) - now)
        return max(0.0, slice_s)

    # -- orders ---------------------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        try:
            data = os.read(self._orders_fd, 2**20)
        except BlockingIOError:
            return True
        self._unread += data
        while (end := self._unread.find(b"\n")) >= 0:
            order = json.loads(self._unread[:end])
            begin = end + 1
            size = order.get("bytes", 0)
            if len(self._unread) < begin + size:
                break
            payload = bytes(self._unread[begin : begin + size])
            del self._unread[: begin + size]
            if "start" in order:
                self._start(order, payload)
            self._hurried |= "hurry" in order
            for number, (term_at, kill_at) in order.get("move", {}).items():
                run = self._runs.get(int(number))
                if run is not None and not run.stopped:
                    run.term_at, run.kill_at = term_at, kill_at
        return bool(data)

    def _start(self, order: dict[str, Any], payload: bytes) -> None:
        number = order["start"]
        input_fd, feed_fd = os.pipe()
        error_fd, write_fd = os.pipe()
        command = Command(self._path, self._argv, self._mask, ((input_fd, 0), (write_fd, 2)))
        os.close(input_fd)
        os.close(write_fd)
        run = self._runs[number] = Run(command, error_fd, payload, order["term_at"], order["kill_at"])
        self._inputs[feed_fd] = self._errors[error_fd] = run
        for fd in (feed_fd, error_fd):
            os.set_blocking(fd, False)
        self._poll.register(feed_fd, select.POLLOUT)
        if self._listening:
            self._poll.register(error_fd, select.POLLIN)
        self._tell(number, command.pid, None, False, "", False)
        if boot_now() < run.kill_at:
            command.start(order["environment"])
        else:
            run.stopped = True
            command.end()

    def _tell(self, *news: object) -> None:
        self._unsent += json.dumps(news).encode() + b"\n"
        self._send()

    def _send(self) -> None:
        try:
            del self._unsent[: os.write(self._news_fd, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the other pipe tells that, too
            self._unsent.clear()
        self._await_room(self._news_fd, bool(self._unsent))

    def _await_room(self, fd: int, wanted: bool) -> None:
        if wanted:
            self._poll.register(fd, select.POLLOUT)
        else:
            try:
                self._poll.unregister(fd)
            except KeyError:
                pass

    # -- commands -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = boot_now()
        for number, run in list(self._runs.items()):
            group = run.command.pid
            run.command.look()
            if not run.stopped and run.command.status is None and now >= run.term_at:
                run.stopped = True
                send(group, signal.SIGTERM)
                send(group, signal.SIGCONT)  # a stopped process would not hear of it
                if out_of_reach(group):
                    run.out_of_reach = True
                    self._stderr.add(f"dibs: the command {OUT_OF_REACH}\n".encode())
            if run.stopped and now >= run.kill_at:
                send(group, signal.SIGKILL)
                run.kill_at, run.over_at = NEVER, now + DEAD_WAIT_S
            if run.command.status is None:
                continue
            if not self._over(run, now):
                if not run.stopped and not run.ended:
                    run.ended = True
                    self._tell(number, 0, None, False, "", False)
            else:
                del self._runs[number]
                tail = bytes(run.tail).decode("utf-8", "replace").strip()
                stopped = run.stopped and not run.out_of_reach
                self._tell(number, group, run.command.exit_code(), stopped, tail, run.command.refused())

    def _over(self, run: Run, now: float) -> bool:
        """Whether it is time to tell of a command that has ended."""
        said = self._said(run)
        if run.stopped:
            return not send(run.command.pid, 0) or now >= run.over_at
        return said or now >= run.term_at or self._hurried

    def _feed(self, fd: int) -> None:
        run = self._inputs[fd]
        try:
            run.rest = run.rest[os.write(fd, run.rest[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the command does not want to read it
            run.rest = run.rest[:0]
        if not run.rest:
            self._forget(fd, self._inputs)

    # -- stderr ---------------------------------------------------------------------------------------------------

    def _attend_stderr(self) -> None:
        """Wait for room as long as something is unsaid, and listen to commands only while it is not too much."""
        self._await_room(self._stderr.fd, self._stderr.written < self._stderr.added)
        if self._listening == self._stderr.full:
            self._listening = not self._listening
            for fd in self._errors:
                if self._listening:
                    self._poll.register(fd, select.POLLIN)
                else:
                    self._poll.unregister(fd)
        if self._stderr.full and len(self._errors) > len(self._runs) + ENDED_MAX:
            ended = next(fd for fd, run in self._errors.items() if run not in self._runs.values())
            self._errors[ended].unheard = 0
            self._forget(ended, self._errors)

    def _pass_on(self, fd: int) -> None:
        """Read some of what a command says, show it, and keep the end of it."""
        run = self._errors[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            run.unheard = 0
            self._forget(fd, self._errors)
            return
        if run.unheard is not None:
            run.unheard -= len(data)
        run.tail += data
        del run.tail[:-TAIL_BYTES]
        self._stderr.add(data)

    def _said(self, run: Run) -> bool:
        """Whether all that a command had said by its end is written. What it left behind may go on to speak."""
        if run.unheard is None:
            run.unheard = self._unread_of(run)
        while run.unheard > 0 and not self._stderr.full:
            self._pass_on(run.error_fd)
        if run.unheard <= 0 and run.last_word < 0:
            run.last_word = self._stderr.added
        return 0 <= run.last_word <= self._stderr.written

    def _say_last_words(self) -> None:
        runs = [*self._runs.values(), *(run for run in self._errors.values() if run.unheard)]
        end_at = boot_now() + LAST_WORDS_S
        while boot_now() < end_at:
            for run in runs:
                self._said(run)
            if not self._stderr.send(LAST_WORDS_STEP_S):  # nothing is left, or nobody reads
                return

    def _unread_of(self, run: Run) -> int:
        if self._errors.get(run.error_fd) is not run:
            return 0
        return int.from_bytes(fcntl.ioctl(run.error_fd, termios.FIONREAD, bytes(4)), sys.byteorder)

    def _forget(self, fd: int, where: dict[int, Run]) -> None:
        if where is self._inputs or self._listening:
            self._poll.unregister(fd)
        del where[fd]
        os.close(fd)

    def _end_all(self) -> None:
        for run in self._runs.values():
            if not run.ended:
                send(run.command.pid, signal.SIGKILL)
        for run in self._runs.values():
            run.command.end()
        self._say_last_words()
