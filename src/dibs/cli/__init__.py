"""The command line: parsing, help, exit codes, and errors told in one line. What a command does is in its own module.

argparse and not click, because ``dibs run`` stands in crontabs and its start time is paid every minute: on top of what
the core imports anyway argparse costs 0.8 ms and click 13 ms, where ``python -c pass`` takes 10 (medians of 40). For
the same reason a command's module and its options are loaded when that command is given, and no sooner.
"""

from __future__ import annotations

import argparse
import os
import sys

from dibs._typing import TYPE_CHECKING, Any
from dibs._version import __version__
from dibs.cli.streams import drop, flush, plain, prepare
from dibs.errors import (
    DibsError,
    InvalidName,
    InvalidOption,
    JobExists,
    LeaseLost,
    LimitMismatch,
    LockTimeout,
    SetupRequired,
    StoreUnavailable,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn, TypeVar

    from dibs.client import Client

    T = TypeVar("T")

# As in sysexits.h, where a number there means the same.
NOT_HELD = 1
USAGE = 64
UNREACHABLE = 69
BUG = 70
SYSTEM = 71
UNWRITABLE = 74
BUSY = 75
LOST = 76
MISCONFIGURED = 78
NOT_EXECUTABLE = 126
NOT_FOUND = 127
# A process ended by signal n, as shells count.
SIGNALLED = 128
INTERRUPTED = SIGNALLED + 2
BROKEN_PIPE = SIGNALLED + 13

COMMANDS = {
    "run": ("dibs.cli.run", "run a command while holding a lock"),
    "elect": ("dibs.cli.elect", "run a command on one machine, with a standby on every other"),
    "claim": ("dibs.cli.claim", "run a command on those of many items that nobody else has"),
    "put": ("dibs.cli.jobs", "put jobs into a queue"),
    "work": ("dibs.cli.work", "run a command for each job of a queue"),
    "take": ("dibs.cli.jobs", "take jobs from a queue, for a script"),
    "done": ("dibs.cli.jobs", "end a job that was taken"),
    "queues": ("dibs.cli.queues", "list the queues, and how much is in them"),
    "jobs": ("dibs.cli.queues", "list the jobs of a queue"),
    "dead": ("dibs.cli.queues", "list the jobs that failed for good, with their errors"),
    "requeue": ("dibs.cli.queues", "have dead jobs tried again"),
    "cancel": ("dibs.cli.queues", "end jobs that are not done"),
    "forget": ("dibs.cli.queues", "delete jobs that have ended"),
    "advise": ("dibs.cli.advise", "say how many workers a queue needs"),
    "ls": ("dibs.cli.operators", "list what is held"),
    "show": ("dibs.cli.operators", "show who holds a name"),
    "break": ("dibs.cli.operators", "take a lease from its holder"),
    "wait": ("dibs.cli.looking", "wait until nobody holds a name"),
    "top": ("dibs.cli.top", "watch who holds what, and who waits"),
    "history": ("dibs.cli.looking", "show who held a name before"),
    "pause": ("dibs.cli.pausing", "stop new grants of a name or prefix for a while"),
    "resume": ("dibs.cli.pausing", "end a pause"),
    "purge": ("dibs.cli.operators", "delete the rows of names that nobody uses any more"),
    "setup": ("dibs.cli.operators", "make the tables"),
    "schema": ("dibs.cli.operators", "print the SQL that setup would run"),
    "doctor": ("dibs.cli.doctor", "check which promises the store keeps"),
    "bench": ("dibs.cli.bench", "measure how fast locks are here"),
}


class CommandError(Exception):
    """The command ends here, with this exit code and this line on stderr."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Plain:
    """No colour for anything."""

    def __getattr__(self, name: str) -> str:
        return ""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, up to 110 columns."""

    # From Python 3.14 on argparse asks for colours when an option is added, not only when help is shown. What knows
    # them brings dataclasses and inspect: 8 ms of each start.
    _theme, _decolor = _Plain(), str

    def __init__(self, prog: str) -> None:
        # Given, because argparse would import shutil, and with it three compression libraries, to find it out.
        try:
            width = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns)
        except (OSError, ValueError):
            width = 110
        super().__init__(prog, max_help_position=26, width=max(40, min(width, 110) - 2))

    def _set_color(self, color: object, **where: object) -> None: ...


class Parser(argparse.ArgumentParser):
    """argparse with 64 for wrong usage, and with options that are added when they are needed."""

    def __init__(self, command: str | None = None, **settings: Any) -> None:
        self._command = command
        #: Everything behind the first "--" is a command line to run and none of the parser's business.
        self.takes_command = False
        #: Options may stand between NAME and what follows it, although that may be missing.
        self.intermixed = False
        self.commands: Any = {}  # the parsers of all, where one cannot tell by the first word which it is
        self._words: list[str] = []
        super().__init__(formatter_class=Help, allow_abbrev=False, **settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._command is not None:
            from importlib import import_module

            command, self._command = self._command, None
            _add_common(self, argparse.SUPPRESS)
            import_module(COMMANDS[command][0]).ARGUMENTS[command](self)
        words = list(sys.argv[1:] if args is None else args)
        if not self.commands:
            self._words = words
        if self.intermixed:
            self.intermixed = False  # what is called here calls this method
            return self._parse_intermixed(words, namespace)
        if not self.takes_command:
            return super().parse_known_args(words, namespace)
        end = words.index("--") if "--" in words else len(words)
        if words[end + 2 : end + 3] == ["--"] and words[end + 1].startswith("-"):  # a name, since no command begins so
            end += 2
        known, unknown = super().parse_known_args(words[:end], namespace)
        known.command_line = words[end + 1 :]
        if not known.command_line:
            self.error(f"put -- and the command behind the options: {self.usage}")
        return known, unknown

    def _parse_intermixed(
        self, words: list[str], namespace: argparse.Namespace | None
    ) -> tuple[argparse.Namespace, list[str]]:
        """argparse would forget the "--", and take for options again what stands behind it: that is marked here."""
        if "--" in words:
            end = words.index("--")
            is_number = self._negative_number_matcher.match
            words = words[:end] + [
                f"\0{word}" if word.startswith("-") and not is_number(word) else word for word in words[end + 1 :]
            ]
        known, unknown = super().parse_known_intermixed_args(words, namespace)
        for key, value in vars(known).items():
            if isinstance(value, str):
                setattr(known, key, value.removeprefix("\0"))
        return known, [word.removeprefix("\0") for word in unknown]

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from dibs.cli.mistakes import mistake

            parser = self.commands.get(vars(known).get("command"), self)
            parser.error(mistake(parser, unknown))
        return known

    def _print_message(self, message: str, file: object = None) -> None:
        sys.stdout.write(message)  # argparse would not mind that it cannot be written

    def error(self, message: str) -> NoReturn:
        from dibs.cli.mistakes import taken_for_option

        message = taken_for_option(self, self._words) or message.replace("\\x00", "")
        raise CommandError(USAGE, f"{message} (`{self.prog} --help` explains)")


def _add_common(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--url",
        default=default,
        help="where leases are kept, e.g. sqlite:////var/lib/app/dibs.db or postgresql://user@host/db "
        "(default: $DIBS_URL, else an SQLite file of this user)",
    )
    parser.add_argument(
        "--namespace", default=default, help="separates applications in one store (default: the URL's, else 'default')"
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace | None:
    """The arguments of a command, or None when there were none at all (help was printed)."""
    # dibs speaks English; argparse would look for translations of its words, and import locale for it, in 1 ms.
    argparse._ = str  # type: ignore[attr-defined]
    if argv and argv[0] in COMMANDS:
        # The short cut of nearly every call: not to make the parsers of all other commands saves 2 ms.
        command, what = argv[0], COMMANDS[argv[0]][1]
        args = Parser(command, prog=f"dibs {command}", description=_sentence(what)).parse_args(argv[1:])
        for option in ("url", "namespace"):
            vars(args).setdefault(option, None)
        args.command = command
        return args
    if argv and not argv[0].startswith("-"):
        from dibs.errors import did_you_mean

        near = did_you_mean(argv[0], COMMANDS)
        raise CommandError(USAGE, f"there is no command {argv[0]!r}{near}. dibs has {', '.join(COMMANDS)}")
    from dibs.cli.overview import EPILOG

    parser = Parser(
        prog="dibs",
        description="Who gets to do this? Locks and leases, kept in a database you already have.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dibs {__version__}")
    _add_common(parser, None)
    # prog is given, because argparse would format a usage line to find it out.
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="dibs", parser_class=Parser)
    for command, (_module, what) in COMMANDS.items():
        commands.add_parser(command, command=command, help=what, description=_sentence(what))
    parser.commands = commands.choices
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return None
    return args


def _sentence(what: str) -> str:
    return f"{what[0].upper()}{what[1:]}."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``dibs ARGV…`` and return its exit code.

    Without ARGV it is that of this process, and ``dibs run`` ends the process here: there is nothing left to do, and
    the interpreter would take 6 ms to take itself apart.
    """
    prepare()
    if argv is not None:
        return _main(argv)
    code = _main(sys.argv[1:])
    if "dibs.cli.run" in sys.modules:
        os._exit(code)
    return code


def _main(argv: Sequence[str]) -> int:
    code = _code_of(argv)
    unwritten = flush(sys.stdout)
    if unwritten is not None and code in (0, NOT_HELD):  # what has failed for another reason keeps its code
        code = _unwritten(unwritten)
    flush(sys.stderr)
    return code


def _code_of(argv: Sequence[str]) -> int:
    try:
        return _run(argv)
    except SystemExit as done:  # argparse ends --help and --version so
        return int(done.code or 0)
    except CommandError as error:
        say(str(error))
        return error.code
    except DibsError as error:
        say(str(error))
        return exit_code(error)
    except KeyboardInterrupt as interrupt:
        return getattr(interrupt, "exit_code", INTERRUPTED)
    except OSError as error:
        drop(sys.stdout)
        return _unwritten(error)
    except Exception as error:  # noqa: BLE001 - the last line of defence
        if sys.flags.dev_mode:
            import traceback

            traceback.print_exc()
        say(f"a fault of dibs: {type(error).__name__}: {error} (with PYTHONDEVMODE=1 it shows where)")
        return BUG


def _unwritten(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):  # whoever read our output has seen enough (`dibs ls | head`)
        return BROKEN_PIPE
    say(f"{error.filename}: {error.strerror}" if error.filename else f"reading or writing: {error.strerror or error}")
    return UNWRITABLE


def _run(argv: Sequence[str]) -> int:
    args = _parse(argv)
    if args is None:
        return 0
    from importlib import import_module

    code: int = getattr(import_module(COMMANDS[args.command][0]), args.command.replace("break", "break_"))(args)
    return code


def say(message: str) -> None:
    """One line on stderr, if there is anybody to read it."""
    write_line(f"dibs: {plain(' '.join(message.splitlines()))}")


def write_line(line: str) -> bool:
    """Write it on stderr; whether that could be done."""
    if sys.stderr is None:
        return False
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:  # nobody can be told that nobody can be told
        return False
    return True


def exit_code(error: DibsError) -> int:
    """The exit code that tells this error from the others."""
    for kind, code in (
        (LockTimeout, BUSY),
        (JobExists, BUSY),
        (LeaseLost, LOST),
        (StoreUnavailable, UNREACHABLE),
        (SetupRequired, MISCONFIGURED),
        (Unsupported, MISCONFIGURED),
        (LimitMismatch, MISCONFIGURED),
        (InvalidName, USAGE),
        (InvalidOption, USAGE),
    ):
        if isinstance(error, kind):
            return code
    return BUG


def connect(args: argparse.Namespace) -> Client:
    """The client that --url, $DIBS_URL and --namespace ask for. Nothing is sent yet."""
    from dibs.connecting import connect as client_of

    client = asked_for(args, lambda url, namespace: client_of(url, namespace=namespace))
    client._desk.warn_no_more()
    return client


def asked_for(args: argparse.Namespace, make: Callable[[str | None, str | None], T]) -> T:
    """What ``make`` makes of --url, or $DIBS_URL, and --namespace."""
    from dibs.names import check_namespace

    if args.namespace is not None:
        check_namespace(args.namespace)
    try:
        made = make(args.url, args.namespace)
    except InvalidOption as error:
        if args.url is None:  # not this command line is wrong but what surrounds it
            raise CommandError(MISCONFIGURED, f"$DIBS_URL: {error}") from None
        raise
    import gc

    from dibs.cli.ctrl_c import heed_ctrl_c

    if not gc.isenabled():  # as ``dibs.__main__`` has it, too; what was made by now stays
        gc.freeze()
        gc.enable()
    heed_ctrl_c()
    return made


# How durations may be written; a bare number is seconds.
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


def duration(text: str) -> float:
    """Seconds from ``30``, ``1.5``, ``500ms``, ``10m``, ``2h`` or ``30d``."""
    number = text.rstrip("msdh")
    unit = UNITS_S.get(text[len(number) :])
    if unit is None or not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 30, 1.5, 500ms, 10m, 2h or 30d")
    return float(number) * unit


def whole(text: str) -> int:
    """A whole number; whether it is in range is for whoever uses it to say."""
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 40:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number")
    return int(text)
