"""What operators see and mend of queues: ``queues``, ``jobs``, ``dead``, ``requeue``, ``cancel`` and ``forget``."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli import NOT_HELD, USAGE, CommandError, connect, duration, say, whole
from dibs.cli.jobs import payload_json
from dibs.cli.looks import json_option, json_text, local, pauses_of, prefix_argument, print_json, print_pauses, table
from dibs.cli.streams import plain
from dibs.errors import Unsupported
from dibs.jobs import CLAIMED, DEAD, LATER, READY, STATES
from dibs.names import counted, lasting, people_call
from dibs.pauses import QUEUE
from dibs.queue_core import LIST_DEFAULT

if TYPE_CHECKING:
    import argparse

    from dibs.queue import Queue
    from dibs.queue_records import JobRecord

# Payloads and errors are cut to so many characters in a table.
SHOWN_MAX = 60


def _queues_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
List the queues that have jobs: how many are ready, due later, claimed by a worker and dead, and for how long the oldest
has been ready. Pauses stand beneath."""
    parser.epilog = """\
examples:
  dibs queues                                   all queues of the namespace "default"
  dibs queues mail                              those whose names start with mail
  dibs --namespace billing queues               another namespace
  dibs queues --json | jq -r '.[] | select(.dead > 0) | .queue'
                                                the queues with dead jobs
"""
    prefix_argument(parser)
    json_option(parser)


def _jobs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
List the jobs of QUEUE that have not ended, in the order in which they are taken; with --state those in that state,
ended ones the latest first; with IDs these jobs in full, and exit 1 when one is not there. (A job that is done leaves
the queue, unless it was done with --keep.)"""
    parser.epilog = """\
examples:
  dibs jobs mail                                claimed, ready and due later, a hundred of each
  dibs jobs mail --state claimed                who works what
  dibs jobs mail 7                              all there is to know of job 7
  dibs jobs mail --state later --json | jq -r '.[].due_at'
                                                when they are due
"""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument("ids", metavar="ID", type=whole, nargs="*", default=[], help="these jobs in full")
    parser.add_argument("--state", choices=STATES, help="only jobs in this state")
    _limit_option(parser)
    json_option(parser)


def _dead_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
List the dead jobs of QUEUE, the latest first: those that failed on their last try, or whose worker died on it. They
stay until somebody has them tried again (`dibs requeue`) or deletes them (`dibs forget`)."""
    parser.epilog = """\
examples:
  dibs dead mail                                with the last line of each error
  dibs jobs mail 7                              the whole error of job 7
  dibs dead mail -n 1000 --json | jq -r '.[].error' | sort | uniq -c
                                                which errors there are
  dibs dead mail --json | jq '.[] | select(.crashes > 0) | .id'
                                                those that took a worker with them
"""
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    _limit_option(parser)
    json_option(parser)


def _requeue_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Make dead jobs of QUEUE ready again, with all their tries before them: those with these IDs, else all. One whose key
another job has meanwhile stays dead. Exits 1 when none of the IDs was revived."""
    parser.epilog = """\
examples:
  dibs requeue mail                             all dead jobs of "mail"
  dibs requeue mail 7 9                         these two
  dibs dead mail -n 1000 --json | jq '.[] | select(.error | test("timed out")) | .id' | xargs -r dibs requeue mail
                                                those with a certain error (-r: nothing, where there is none)
  dibs dead mail                                look first
"""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument(
        "ids", metavar="ID", type=whole, nargs="*", default=[], help="which (default: all that are dead)"
    )


def _cancel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
End jobs of QUEUE that have not ended, whoever works them. A worker hears of it at its next renewal, within a third of
its ttl: `dibs work` stops the command; and what it says of the job from now on is refused. They can be seen
for a minute at least (`dibs jobs QUEUE --state cancelled`). Exits 1 when one of the jobs had ended."""
    parser.epilog = """\
examples:
  dibs cancel mail 7                            job 7 is not to be done
  dibs cancel mail 7 8 9                        nor these
  dibs jobs mail --state later -n 10000 --json | jq '.[].id' | xargs -r dibs cancel mail
                                                whatever is due later, up to ten thousand
  dibs pause --queue mail                       nothing is lost, but nothing is taken: perhaps that will do
"""
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument("ids", metavar="ID", type=whole, nargs="+", help="which jobs")


def _forget_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Delete jobs of QUEUE that have ended: dead ones, and those that were kept with a result. Jobs that have not ended are
never deleted (`dibs cancel` ends them). Exits 1 when IDs were given and none of them was deleted."""
    parser.epilog = """\
examples:
  dibs forget mail 7 9                          these two dead jobs, and their errors
  dibs forget mail --older-than 30d             what died or ended a month ago
  dibs forget mail --older-than 0               all that have ended
  5 4 * * 0  dibs forget mail --older-than 90d   in a crontab
"""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument("ids", metavar="ID", type=whole, nargs="*", default=[], help="which (default: by --older-than)")
    parser.add_argument("--older-than", type=duration, metavar="T", help="only what ended so long ago")


def _limit_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--limit", type=whole, default=LIST_DEFAULT, metavar="N", help=f"so many (default: {LIST_DEFAULT})"
    )


ARGUMENTS = {
    "queues": _queues_arguments,
    "jobs": _jobs_arguments,
    "dead": _dead_arguments,
    "requeue": _requeue_arguments,
    "cancel": _cancel_arguments,
    "forget": _forget_arguments,
}

# -- what each does ----------------------------------------------------------------------------------------------------


def queues(args: argparse.Namespace) -> int:
    """``dibs queues``."""
    with connect(args) as client:
        capabilities = client._desk.address.capabilities
        if not capabilities.queue:
            raise Unsupported(f"{capabilities.store} keeps no queues")
        depths = client.queues(args.prefix)
        pauses = [pause for pause in pauses_of(client) if _concerns_queues(pause.name)]
    if args.json:
        covered = [next((pause.name for pause in pauses if pause.covers(QUEUE + each.queue)), None) for each in depths]
        shown = [each._asdict() for each in depths]
        print_json([{**each, "oldest_s": round(each["oldest_s"], 3), "paused": name}
                    for each, name in zip(shown, covered, strict=True)])  # fmt: skip
        return 0
    if depths:
        rows = [(*each[:-1], lasting(each.oldest_s) if each.ready else "") for each in depths]
        print(table(("QUEUE", "READY", "LATER", "CLAIMED", "DEAD", "OLDEST"), rows))
    else:
        print(f"No jobs in queues that start with {args.prefix!r}." if args.prefix else "No jobs.")
    print_pauses(pauses)
    return 0


def _concerns_queues(paused: str) -> bool:
    return paused.startswith(QUEUE) or (paused.endswith("*") and QUEUE.startswith(paused[:-1]))


def jobs(args: argparse.Namespace) -> int:
    """``dibs jobs``."""
    if args.ids and args.state is not None:
        raise CommandError(USAGE, "give IDs or --state")
    with connect(args) as client:
        queue = client.queue(args.queue)
        if args.ids:
            return _show_jobs(queue, args)
        states = (CLAIMED, READY, LATER) if args.state is None else (args.state,)
        found = [record for state in states for record in queue.jobs(state, args.limit)]
    if args.json:
        print_json([record_json(record) for record in found])
    elif found:
        headers = ("ID", "STATE", "PRIORITY", "TRIES", "DUE", "HOLDER", "KEY", "GROUP", "PAYLOAD")
        print(table(headers, map(_row, found)))
    else:
        print(f"No jobs in {args.queue!r}" + (f" that are {args.state}." if args.state else "."))
    return 0


def _show_jobs(queue: Queue, args: argparse.Namespace) -> int:
    found = {number: queue.job(number) for number in args.ids}
    records = [record for record in found.values() if record is not None]
    if args.json:
        print_json([record_json(record) for record in records])
    elif records:
        print("\n\n".join(map(_in_full, records)))
    missing = [str(number) for number, record in found.items() if record is None]
    if missing:
        raise CommandError(NOT_HELD, f"not in {args.queue!r}, or not any more: {', '.join(missing)}")
    return 0


def dead(args: argparse.Namespace) -> int:
    """``dibs dead``."""
    with connect(args) as client:
        found = client.queue(args.queue).jobs(DEAD, args.limit)
    if args.json:
        print_json([record_json(record) for record in found])
    elif found:
        print(table(("ID", "TRIES", "CRASHES", "ENDED", "KEY", "ERROR", "PAYLOAD"), map(_dead_row, found)))
    else:
        print(f"No dead jobs in {args.queue!r}.")
    return 0


def requeue(args: argparse.Namespace) -> int:
    """``dibs requeue``."""
    with connect(args) as client:
        count = client.queue(args.queue).requeue(*args.ids)
    print(f"Requeued {counted(count, 'job')}.")
    others = len(set(args.ids)) - count
    if args.ids and others:
        say(
            f"not dead in {args.queue!r}, or another job has the key meanwhile: {counted(others, 'job')} of those named"
        )
    return NOT_HELD if args.ids and not count else 0


def cancel(args: argparse.Namespace) -> int:
    """``dibs cancel``."""
    with connect(args) as client:
        ended = client.queue(args.queue).cancel(*args.ids)
    print(f"Cancelled {counted(len(ended), 'job')}.")
    others = [str(number) for number in args.ids if number not in ended]
    if others:
        raise CommandError(NOT_HELD, f"not in {args.queue!r}, or ended before: {', '.join(others)}")
    return 0


def forget(args: argparse.Namespace) -> int:
    """``dibs forget``."""
    if not args.ids and args.older_than is None:
        raise CommandError(USAGE, "name jobs, or say which with --older-than (0: all that have ended)")
    with connect(args) as client:
        count = client.queue(args.queue).purge(*args.ids, older_than=args.older_than or 0)
    print(f"Deleted {counted(count, 'job')}.")
    return NOT_HELD if args.ids and not count else 0


# -- how it looks ------------------------------------------------------------------------------------------------------


def record_json(record: JobRecord) -> dict[str, Any]:
    """A job as programs see it."""
    shown = record._asdict()
    payload = shown.pop("payload")
    for name in ("created_at", "due_at", "expires_at", "ended_at"):
        shown[name] = None if shown[name] is None else shown[name].isoformat()
    return {**shown, **payload_json(payload)}


def _row(record: JobRecord) -> tuple[object, ...]:
    return (
        record.id,
        record.state,
        record.priority or "",
        _tries(record),
        local(record.due_at),
        people_call(record.holder) if record.state == CLAIMED and record.holder else "",
        record.key or "",
        record.group or "",
        _cut(_payload(record)),
    )


def _dead_row(record: JobRecord) -> tuple[object, ...]:
    last = (record.error or "").rstrip().rpartition("\n")[2]
    ended = "" if record.ended_at is None else local(record.ended_at)
    crashes = record.crashes or ""
    return record.id, _tries(record), crashes, ended, record.key or "", _cut(last), _cut(_payload(record))


def _in_full(record: JobRecord) -> str:
    lines = {
        "id": record.id,
        "state": record.state,
        "tries": _tries(record) + (f", of which {record.crashes} ended with their worker" if record.crashes else ""),
        "priority": record.priority,
        "key": record.key,
        "group": record.group,
        "put": local(record.created_at),
        "due": local(record.due_at),
        "holder": people_call(record.holder) if record.holder else None,
        "until": local(record.expires_at) if record.expires_at and record.state == CLAIMED else None,
        "token": record.fencing_token or None,
        "ended": local(record.ended_at) if record.ended_at else None,
        "payload": _payload(record),
        "result": None if record.result is None else json_text(record.result),
        "error": None if record.error is None else "\n           ".join(map(plain, record.error.splitlines())),
    }
    shown = {
        name: value if name == "error" else plain(str(value)) for name, value in lines.items() if value is not None
    }
    return "\n".join(f"{name:<9}{value}" for name, value in shown.items())


def _tries(record: JobRecord) -> str:
    return f"{record.tries}/{record.max_tries}" if record.max_tries else str(record.tries)


def _payload(record: JobRecord) -> str:
    if isinstance(record.payload, bytes):
        return repr(record.payload)
    return json_text(record.payload)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"
