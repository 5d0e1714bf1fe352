"""``dibs put``, ``dibs take`` and ``dibs done``: a job from its put to its end, by scripts that hold nothing open."""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, Any
from dibs.cli import BUSY, NOT_HELD, USAGE, CommandError, connect, duration, say, whole
from dibs.cli.lines import json_value, lines_of, put_lines
from dibs.cli.looks import json_option, pause_of, print_json, print_json_line
from dibs.errors import InvalidOption, JobExists
from dibs.jobs import ON_CONFLICT, PAYLOAD_BYTES_MAX, TAKE_MAX
from dibs.names import counted
from dibs.pauses import QUEUE
from dibs.queue_records import shown_payload

if TYPE_CHECKING:
    import argparse

    from dibs.client import Client
    from dibs.queue import Job, Queue


def _put_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dibs put QUEUE [PAYLOAD] [--delay T | --at TIME] [options]"
    parser.description = """\
Put a job into QUEUE, and print its id once it is stored for good. PAYLOAD is JSON; - reads it from standard input, as
when nothing is given and that is no terminal. With --lines each line of standard input is a job.

--lines puts what it has read so far, up to 10,000 lines at a time, each time all or none. When something is wrong it
says how many lines were put, so that you can go on behind them (tail -n +N)."""
    parser.epilog = """\
examples:
  dibs put mail '{"to": "ann@example.org"}'     a job; prints its id
  dibs put mail '"ann@example.org"'             a text is JSON in quotes
  make-report | dibs put reports --bytes -      whatever bytes come, as they are
  dibs put mail '{"to": 42}' --delay 10m        not before ten minutes have passed
  dibs put sync '{"user": 42}' --key user/42 --on-conflict keep
                                                unless a job with this key waits, or is being worked
  psql -XAtc 'select row_to_json(e) from event e' shop | dibs put events --lines
                                                a job for each row
"""
    parser.intermixed = True  # type: ignore[attr-defined]
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument("payload", metavar="PAYLOAD", nargs="?", help="JSON, or - for standard input")
    parser.add_argument("--bytes", action="store_true", help="the payload is bytes, not JSON")
    parser.add_argument("--lines", action="store_true", help="each line of standard input is a payload; no empty ones")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--delay", type=duration, metavar="T", help="how long it is not due")
    when.add_argument(
        "--at", metavar="TIME", help="when it is due: 2026-12-24T18:00, with +01:00 or Z, else in this machine's zone"
    )
    parser.add_argument("--priority", type=whole, metavar="P", help="-100 to 100, the greatest first (default: 0)")
    parser.add_argument("--key", metavar="KEY", help="unique among the jobs of the queue that have not ended")
    parser.add_argument(
        "--on-conflict",
        choices=ON_CONFLICT,
        default="raise",
        help="when there is a job with that key: fail with exit code 75, keep that one and print its id, or replace "
        "what it carries unless it is being worked (default: raise)",
    )
    parser.add_argument("--group", metavar="GROUP", help="what takers with --group-limit work only N of at a time")
    parser.add_argument("--max-tries", type=whole, metavar="N", help="after so many tries it is dead (default: 10)")
    json_option(parser)


def _take_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Take jobs from QUEUE, print each as a line of JSON, and leave them to you for --ttl. Nobody renews that: end each job
with `dibs done QUEUE ID --token N` before, or others get it. Exits 1 when there is no job; when the queue is paused,
that is told on stderr.

To run a command for each job, with renewal, `dibs work` is less work."""
    parser.epilog = """\
examples:
  dibs take mail                                a job, if there is one: {"id": 7, "token": 1, "payload": …}
  dibs take mail --n 10 --timeout 1m            up to ten; wait for the first up to a minute
  dibs take mail --ttl 10m > job.json && send-mail < job.json &&
    dibs done mail "$(jq .id job.json)" --token "$(jq .token job.json)"
                                                in a script
  dibs take mail --n 100 | jq -c .payload       what is in them; all are handed out again after 30 s

A payload of bytes is in "payload_base64" instead of "payload".
"""
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument(
        "--n", type=whole, default=1, metavar="N", help=f"up to so many, {TAKE_MAX} at most (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=duration, default=0.0, metavar="T", help="how long to wait for the first (default: not)"
    )
    parser.add_argument("--ttl", type=duration, metavar="T", help="how long they are yours (default: 30s)")
    parser.add_argument(
        "--group-limit", type=whole, metavar="N", help="only while less than N of their group are being worked"
    )


def _done_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dibs done QUEUE ID --token N [--result JSON | --fail ERROR | --skip] [options]"
    parser.description = """\
End a job that `dibs take` gave you: it is done, or with --fail it has failed, or with --skip it is given back. Exits 76
when it is not yours any more: its time was over, or somebody cancelled it; nothing is changed then."""
    parser.epilog = """\
examples:
  dibs done mail 7 --token 1                    it is done, and leaves the queue
  dibs done mail 7 --token 1 --result '{"sent": 3}' --keep 1d
                                                done, and kept with its result for a day (`dibs jobs mail 7`)
  dibs done mail 7 --token 1 --fail 'no such mailbox'
                                                failed: it is tried again, or dead when no try is left
  dibs done mail 7 --token 1 --fail 'no address' --dead
                                                failed, and not to be tried again
  dibs done mail 7 --token 1 --skip             ready again for others; the try is not counted
"""
    parser.add_argument("queue", metavar="QUEUE", help="the name of the queue")
    parser.add_argument("id", metavar="ID", type=whole, help="as `dibs take` printed it")
    parser.add_argument("--token", type=whole, metavar="N", required=True, help="as `dibs take` printed it")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--result", metavar="JSON", help="kept with the job for as long as --keep says")
    how.add_argument("--fail", metavar="ERROR", help="this try has failed, and why")
    how.add_argument("--skip", action="store_true", help="give it back as it was")
    parser.add_argument("--keep", type=duration, metavar="T", help="how long the job and its result can be seen")
    parser.add_argument(
        "--retry-in", type=duration, metavar="T", help="when it is tried again (default: 1s, 2s, 4s, … by its tries)"
    )
    parser.add_argument("--dead", action="store_true", help="with --fail: do not try again")


ARGUMENTS = {"put": _put_arguments, "take": _take_arguments, "done": _done_arguments}


def put(args: argparse.Namespace) -> int:
    """``dibs put``."""
    options = {
        "delay": args.delay,
        "at": None if args.at is None else _moment(args.at),
        "priority": args.priority,
        "on_conflict": args.on_conflict,
        "group": args.group,
        "max_tries": args.max_tries,
    }
    with connect(args) as client:
        queue = _queue_of_many(client, args.queue)
        if args.lines:
            if args.key is not None or args.payload not in (None, "-"):
                raise CommandError(USAGE, "--lines reads the payloads from standard input; each has no key of its own")
            count = put_lines(queue, lines_of(0), args.bytes, options)
            _print_count(args, count)
            return 0
        job = _put_one(queue, args, options)
    if args.json:
        print_json({"queue": args.queue, "id": job})
    else:
        print(job)
    return 0


def _queue_of_many(client: Client, name: str, **options: Any) -> Queue:
    """A queue that other processes see as well; InvalidOption for one that ends with this command."""
    if client._desk.address.shown.startswith("memory:"):
        raise InvalidOption("memory:// is seen by one process only: a job in it would be gone when this command ends")
    return client.queue(name, **options)


def _put_one(queue: Queue, args: argparse.Namespace, options: dict[str, Any]) -> int:
    if args.payload is not None and args.payload != "-":
        data = os.fsencode(args.payload)
    elif args.payload is None and os.isatty(0):
        raise CommandError(USAGE, "the payload is missing: give JSON, or - to type it")
    else:
        with open(0, "rb", closefd=False) as file:
            data = file.read(PAYLOAD_BYTES_MAX + 1)
    if args.bytes or len(data) > PAYLOAD_BYTES_MAX:
        payload: Any = data  # what is too long is refused like any other
    else:
        if not data.strip():
            raise CommandError(
                USAGE, "the payload is empty: give JSON, as an argument or on standard input, or --bytes"
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise CommandError(USAGE, f"the payload is not UTF-8: {error}; bytes want --bytes") from None
        payload = json_of("the payload", text, "; bytes want --bytes")
    try:
        return queue.put(payload, key=args.key, **options)
    except JobExists as error:
        job = f"job {error.id} of {queue.name!r} has the key {error.key!r}, and"
        what = "is being worked" if error.claimed else "waits for a worker: --on-conflict replace gives it this payload"
        raise CommandError(BUSY, f"{job} {what}; --on-conflict keep leaves it as it is") from None


def _print_count(args: argparse.Namespace, count: int) -> None:
    if args.json:
        print_json({"queue": args.queue, "put": count})
    else:
        print(f"Put {counted(count, 'job')}.")


def take(args: argparse.Namespace) -> int:
    """``dibs take``."""
    with connect(args) as client:
        queue = _queue_of_many(client, args.queue, ttl=args.ttl, renew=False, group_limit=args.group_limit)
        client._desk.session().on_paused = say
        with queue.take(args.n, timeout=args.timeout) as batch:
            expires_at = None if batch.deadline is None else batch.deadline.isoformat()
            for job in batch.won:
                print_json_line({**_job_json(job), "expires_at": expires_at})
            batch.leave()  # not before they were printed: what nobody has seen is given back
        if not len(batch) and not args.timeout:  # (Whoever waits is told by the session.)
            paused = pause_of(client, [QUEUE + args.queue])
            if paused is not None:
                say(paused)
    return 0 if len(batch) else NOT_HELD


def _job_json(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "token": job.fencing_token,
        **payload_json(shown_payload(job._row.payload)),
        "tries": job.tries,
        "max_tries": job.max_tries,
        "crashes": job.crashes,
        "key": job.key,
        "group": job.group,
        "created_at": job.created_at.isoformat(),
    }


def payload_json(payload: Any) -> dict[str, Any]:
    """A payload as it is shown in JSON."""
    if isinstance(payload, bytes):
        from base64 import b64encode

        return {"payload_base64": b64encode(payload).decode()}
    return {"payload": payload}


def done(args: argparse.Namespace) -> int:
    """``dibs done``."""
    if args.fail is None and (args.dead or args.retry_in is not None):
        raise CommandError(USAGE, "--dead and --retry-in say more about --fail ERROR, which is missing")
    if args.dead and args.retry_in is not None:
        raise CommandError(USAGE, "give --dead or --retry-in: it is tried again, or it is not")
    if args.keep is not None and (args.fail is not None or args.skip):
        raise CommandError(USAGE, "--keep is for jobs that are done")
    if args.result is not None and args.keep is None:
        raise CommandError(USAGE, "say for how long the result is to be kept: --keep 1d")
    result = None if args.result is None else json_of("--result", args.result)
    outcome = "done"
    if args.skip:
        outcome = "skipped"
    elif args.fail is not None:
        outcome = "dead" if args.dead else "failed"
    with connect(args) as client:
        queue = client.queue(args.queue, keep_results=args.keep or 0)
        queue.finish(args.id, args.token, result, outcome=outcome, error=args.fail, retry_in=args.retry_in)
    return 0


def json_of(what: str, text: str, hint: str = "") -> Any:
    """The value; raises CommandError for what is no JSON."""
    try:
        return json_value(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(USAGE, f"{what} is no JSON: {error}; a text stands in quotes{hint}") from None


def _moment(text: str) -> Any:
    from datetime import datetime

    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
    except (ValueError, OverflowError, OSError):
        raise InvalidOption(f"{text!r} is no time; write 2026-12-24T18:00 or 2026-12-24T18:00+01:00") from None
