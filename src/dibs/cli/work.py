"""``dibs work QUEUE -- COMMAND``: a worker in any language; the command is run once for each job.

Three parts of one process. The *keeper* (``dibs.cli.keeper``) runs the commands. Threads of ``Queue.run`` take jobs; a
handler only asks for the command and waits for what became of it. The *main thread* is in between: it tells the keeper
what is wanted and by when each must end, tells the handlers how their commands ended, and hears the signals. It is
*working* until the first of these, then *draining*: nothing is taken, and ``Keeper.end_by`` is the end for all.
"""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from queue import Empty, SimpleQueue

from dibs._typing import TYPE_CHECKING
from dibs.cli import BUSY, INTERRUPTED, SIGNALLED, USAGE, CommandError, connect, duration, whole
from dibs.cli.command import find
from dibs.cli.keeper import Ended, Keeper
from dibs.cli.moments import LOOKS_PER_TTL
from dibs.cli.run import add_grace
from dibs.cli.stderr import say_if_read
from dibs.clock import boot_now
from dibs.errors import InvalidOption, LeaseLost, StoreUnavailable

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from dibs.queue import Job, Queue

DRAIN_DEFAULT_S = 30.0
WORKERS_MAX = 100
# A job whose command says "not now" is kept for so long before others may have it: nobody shall spin around it.
NOT_NOW_S = 1.0
# The threads are given so much longer than the commands: the commands have been stopped when a job is given back.
AFTER_DRAIN_S = 15.0
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TOO_LONG = "it did not end within --max-hold"

EPILOG = """\
examples:
  dibs work mail -- ./send-mail                 the payload is on its standard input; exit 0 means done
  dibs work resize --workers 4 -- ./resize      four at a time
  dibs work import --idle 10s -- ./import       until nothing has come for ten seconds: for cron
  dibs work mail --ttl 2m -- sh -c 'jq -r .to | xargs ./send-mail'
                                                jobs of a worker whose machine died are handed out after two minutes
  dibs work crawl --max-hold 10m -- ./crawl     a command that takes longer is stopped; the job is tried again

The command finds DIBS_QUEUE, DIBS_JOB_ID, DIBS_FENCING_TOKEN and DIBS_TRIES (1 on the first try) in its environment.
A payload of JSON ends with a new line; one of bytes is as it was put.

What the command exits with is what becomes of the job:
  0        it is done
  75       not now: it is given back a second later, and the try is not counted
  another  this try has failed; the code and the end of its stderr are kept as the error. It is tried again after a
           second, two, four, …; when no try is left it is dead (`dibs dead`)

The command is stopped, its whole process group with TERM and then KILL, before anybody else can have the job: when the
store is away for too long (0.37 of the ttl can be), when the job is cancelled, and when dibs itself is killed with -9
or paused.

TERM and Ctrl-C end it in order: nothing more is taken, and commands have --drain-timeout to end; the last part of it,
--grace, after a TERM. Jobs whose command was stopped so are given back and cost no try. A second one does not wait for
commands.

exit codes:
  0 ended by --idle or TERM, 130 by Ctrl-C, 69 store unreachable, 71 the system refused a process, 78 not set up or
  misconfigured, 64 wrong usage, 126 not executable, 127 not found
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dibs work QUEUE [options] -- COMMAND [argument …]"
    parser.description = (
        "Take jobs from QUEUE and run a command for each, until told to stop. Tells on stderr what has failed."
    )
    parser.epilog = EPILOG
    parser.takes_command = True  # type: ignore[attr-defined]
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument("--workers", type=whole, default=1, metavar="N", help="so many commands at a time (default: 1)")
    parser.add_argument(
        "--ttl",
        type=duration,
        metavar="T",
        help="how long jobs outlive this machine; renewed every third of it (default: 30s)",
    )
    parser.add_argument("--idle", type=duration, metavar="T", help="end when nothing has come for so long")
    parser.add_argument(
        "--max-hold", type=duration, metavar="T", help="stop a command that has had its job this long; the try counts"
    )
    parser.add_argument(
        "--group-limit",
        type=whole,
        metavar="N",
        help="work N jobs of a group at a time, 1 in the order of their puts; the same everywhere (default: no limit)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=duration,
        default=DRAIN_DEFAULT_S,
        metavar="T",
        help=f"how long commands may go on after TERM or Ctrl-C (default: {DRAIN_DEFAULT_S:g}s)",
    )
    add_grace(parser, "a command")


ARGUMENTS = {"work": _arguments}


def work(args: argparse.Namespace) -> int:
    """``dibs work``: returns the exit code."""
    if not 1 <= args.workers <= WORKERS_MAX:
        raise CommandError(USAGE, f"--workers is a number from 1 to {WORKERS_MAX}, not {args.workers}")
    path = find(args.command_line[0])
    client = connect(args)
    if client._desk.address.shown.startswith("memory:"):
        raise InvalidOption("memory:// is seen by one process only: nobody could put jobs into this queue")
    queue = client.queue(args.queue, ttl=args.ttl, max_hold=args.max_hold, group_limit=args.group_limit)
    keeper = Keeper(path, args.command_line, queue._core.terms.ttl, args.grace)  # before there are threads
    logging.getLogger("dibs").addHandler(Saying())
    try:
        with client:
            return Worker(queue, keeper, args).work()
    finally:
        keeper.close()
        for signum in HEARD:  # a last line may be left to say, for which nobody waits who asks for the end
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)


class Saying(logging.Handler):
    """What the library warns of is said like everything else on this command line."""

    def emit(self, record: logging.LogRecord) -> None:
        say_if_read(record.getMessage())


class Errand:
    """A handler's wish for the command, and where it waits for the answer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.answer: SimpleQueue[Ended | None] = SimpleQueue()


class Worker:
    """The main thread, and the handlers' side of it."""

    def __init__(self, queue: Queue, keeper: Keeper, args: argparse.Namespace) -> None:
        self._queue = queue
        self._keeper = keeper
        self._workers: int = args.workers
        self._drain_s: float = args.drain_timeout
        self._idle_s: float | None = args.idle
        self._asked: SimpleQueue[Errand] = SimpleQueue()
        self._errands: dict[int, Errand] = {}
        self._numbers = 0
        self._draining = False
        self._interrupted = False
        #: The code to exit with when the system does not run the command, as it did not where `find` looked.
        self._refused = 0
        self._finished: SimpleQueue[BaseException | None] = SimpleQueue()
        self._bell_fd, self._ring_fd = os.pipe()
        for fd in (self._bell_fd, self._ring_fd):
            os.set_blocking(fd, False)

    def work(self) -> int:
        """Until a signal, or until nothing has come for as long as --idle says."""
        session = self._queue._core.desk.session()
        session.on_paused = self._say
        look_s = self._queue._core.terms.ttl / LOOKS_PER_TTL
        signal.set_wakeup_fd(self._ring_fd, warn_on_full_buffer=False)
        for signum in HEARD:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup means it
                signal.signal(signum, self._stop)
        session.clock.spawn("dibs-work", self._take)
        try:
            while True:
                self._begin_errands()
                self._answer(self._keeper.tend(look_s, self._bell_fd))
                self._hear_bell()
                if not self._errands and not self._finished.empty():
                    break
        except BaseException:
            self._draining = True
            for errand in self._errands.values():
                errand.answer.put(None)
            raise
        error = self._finished.get()
        if error is not None:
            raise error
        return INTERRUPTED if self._interrupted else self._refused

    # -- the main thread --------------------------------------------------------------------------------------------

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        # Between two lines of the main thread: it only marks.
        now = boot_now()
        self._keeper.end_by = min(self._keeper.end_by, now if self._draining else now + self._drain_s)
        self._draining = True
        self._interrupted |= signum == signal.SIGINT

    def _hear_bell(self) -> None:
        try:
            os.read(self._bell_fd, 4096)
        except BlockingIOError:
            pass

    def _ring(self) -> None:
        try:
            os.write(self._ring_fd, b"\0")
        except BlockingIOError:  # full: it will wake anyway
            pass

    def _begin_errands(self) -> None:
        while True:
            try:
                errand = self._asked.get_nowait()
            except Empty:
                return
            self._numbers += 1
            self._errands[self._numbers] = errand
            job = errand.job
            payload = job._row.payload
            environment = {
                "DIBS_QUEUE": job.queue,
                "DIBS_JOB_ID": str(job.id),
                "DIBS_FENCING_TOKEN": str(job.fencing_token),
                "DIBS_TRIES": str(job.tries),
            }
            data = payload if isinstance(payload, bytes) else payload.encode() + b"\n"
            self._keeper.start(self._numbers, data, environment, partial(trust, job))

    def _answer(self, ends: list[Ended]) -> None:
        for ended in ends:
            self._errands.pop(ended.number).answer.put(ended)

    # -- threads ------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        error: BaseException | None = None
        try:
            self._queue.run(
                self._handle,
                workers=self._workers,
                prefetch=0,
                drain_timeout=self._drain_s + AFTER_DRAIN_S,
                idle=self._idle_s,
                stop=lambda: self._draining,
            )
        except BaseException as raised:  # noqa: BLE001 - the main thread raises it
            error = raised
        self._finished.put(error)
        self._ring()

    def _handle(self, job: Job) -> None:
        """Have the command run, and end the job as that ended; a return means done, LeaseLost that it was lost."""
        errand = Errand(job)
        self._asked.put(errand)
        self._ring()
        ended = errand.answer.get()
        try:
            self._end(job, ended)
        except StoreUnavailable as error:  # the claim ends by itself: the job is worked again
            self._say(f"job {job.id}: {error}")

    def _say(self, message: str) -> None:
        while not say_if_read(message) and not self._draining:
            pass

    def _end(self, job: Job, ended: Ended | None) -> None:
        if ended is None:
            job.skip()
        elif ended.stopped:
            self._stopped(job)
        elif ended.refused:  # as it would for every job: none is to be dead for that
            self._refused, self._draining = ended.code, True
            job.skip()
        elif ended.code == BUSY:
            self._not_now(job)
        elif ended.code:
            error = failure(ended)
            self._say(f"job {job.id} failed on try {job.tries}: {error.splitlines()[0]}")
            job.fail(error)

    def _stopped(self, job: Job) -> None:
        hold = job._hold
        if not job.held:
            raise LeaseLost(f"job {job.id} was stopped: {job._why()}")
        if not self._draining and hold.last_error is None and hold.reaches_its_end():
            self._say(f"job {job.id} was stopped on try {job.tries}: {TOO_LONG}")
            job.fail(TOO_LONG)
        else:
            why = "did not end within the drain time" if self._draining else "could not be renewed"
            self._say(f"job {job.id} was stopped and is given back: it {why}")
            job.skip()

    def _not_now(self, job: Job) -> None:
        session = job._session
        until = session.clock.now() + NOT_NOW_S
        while not self._draining and (left_s := until - session.clock.now()) > 0:
            session.wait(session.pause(), min(0.1, left_s))
        job.skip()


def trust(job: Job) -> tuple[bool, float]:
    """Whether a job may be worked, and the last moment at which it might."""
    return job.held, job._hold.trusted_until


def failure(ended: Ended) -> str:
    """What is kept as the error of a command that failed."""
    how = f"signal {ended.code - SIGNALLED}" if ended.code > SIGNALLED else f"exit code {ended.code}"
    return f"{how}\n{ended.tail}" if ended.tail else how
