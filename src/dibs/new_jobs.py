"""What may be put into a queue: payloads, times, keys, groups and tries are checked here, before any I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime

from dibs import jobs as rows
from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import InvalidName, InvalidOption
from dibs.jobs import ERROR_CHARS_MAX, KEEP, ON_CONFLICT, PAYLOAD_BYTES_MAX, PRIORITY_MAX, PUT_MAX, RAISE
from dibs.names import WAIT_MAX_S, check_name, check_seconds
from dibs.once_keys import check_key

if TYPE_CHECKING:
    from dibs.names import Seconds
    from dibs.once_keys import Key

# Bytes of payload of one put.
PUT_BYTES_MAX = 2**26
TRIES_MAX = 10_000
RESULT_BYTES_MAX = 2**20
# The years that every store can write as a date.
AT_MIN_S, AT_MAX_S = 0.0, 4_000_000_000.0


class NewJob(NamedTuple):
    """A job for ``put_many`` that has something of its own: what is None is as said for all of them."""

    payload: Any
    delay: Seconds | None = None
    at: datetime | None = None
    priority: int | None = None
    key: Key | None = None
    group: Key | None = None
    max_tries: int | None = None


class PutOptions(NamedTuple):
    """What counts for every job of a put that says nothing else."""

    delay: Seconds | None
    at: datetime | None
    priority: int
    group: Key | None
    max_tries: int | None
    on_conflict: str = RAISE


def packed(payload: Any) -> str | bytes:
    """A payload as it is kept: bytes as they are, everything else as JSON text."""
    is_bytes = isinstance(payload, (bytes, bytearray, memoryview))
    kept: str | bytes = bytes(payload) if is_bytes else as_json("a payload is JSON or bytes", payload)
    size = len(kept)  # of text as well: it is ASCII
    if size > PAYLOAD_BYTES_MAX:
        raise InvalidOption(
            f"a payload has at most {PAYLOAD_BYTES_MAX:,} bytes, not {size:,}: put what is large elsewhere, and its "
            "address into the queue"
        )
    return kept


def as_json(rule: str, value: Any) -> str:
    """JSON text, in ASCII; InvalidOption, which begins with the rule, for what is none."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"{rule}: {error}") from None


def unpacked(payload: str | bytes) -> Any:
    """The payload as it was given."""
    return json.loads(payload) if isinstance(payload, str) else payload


def new_jobs(payloads: Iterable[Any], options: PutOptions) -> tuple[tuple[rows.NewJob, ...], list[int]]:
    """The jobs of a put, and which of them stands for which payload; raises InvalidOption and InvalidName.

    Two payloads of one key are one job: that of the first with KEEP, that of the last with REPLACE.
    """
    if options.on_conflict not in ON_CONFLICT:
        raise InvalidOption(f"on_conflict is one of {', '.join(ON_CONFLICT)}, not {options.on_conflict!r}")
    if isinstance(payloads, (str, bytes, bytearray, memoryview, Mapping, NewJob)) or not isinstance(payloads, Iterable):
        raise InvalidOption(f"put_many takes a list of payloads, not {type(payloads).__name__}; put takes one")
    common = _new_job(NewJob(None), options)
    jobs: list[rows.NewJob] = []
    of_key: dict[str, int] = {}
    places: list[int] = []
    size = 0
    for payload in payloads:
        job = _new_job(payload, options) if isinstance(payload, NewJob) else common._replace(payload=packed(payload))
        place = len(jobs) if job.key is None else of_key.setdefault(job.key, len(jobs))
        places.append(place)
        if place == len(jobs):
            jobs.append(job)
        elif options.on_conflict == RAISE:
            raise InvalidOption(f"two jobs of one put have the key {job.key!r}")
        elif options.on_conflict != KEEP:
            jobs[place] = job
        size += len(job.payload)
        if len(places) > PUT_MAX:
            raise InvalidOption(f"one put takes up to {PUT_MAX:,} jobs: put them in several")
        if size > PUT_BYTES_MAX:
            raise InvalidOption(f"one put takes up to {PUT_BYTES_MAX:,} bytes of payload: put them in several")
    return tuple(jobs), places


def _new_job(job: NewJob, options: PutOptions) -> rows.NewJob:
    if isinstance(job.payload, NewJob):  # to JSON it would be a list, and its key and all else would be lost in it
        raise InvalidOption("a NewJob is no payload: put_many takes it, put takes what is in it (payload, key=, …)")
    at = options.at if job.at is None and job.delay is None else job.at
    delay = options.delay if job.at is None and job.delay is None else job.delay
    if at is not None and delay is not None:
        raise InvalidOption("a job has a delay or a time (at), not both")
    return rows.NewJob(
        packed(job.payload),
        check_priority(options.priority if job.priority is None else job.priority),
        0.0 if delay is None else check_seconds("delay", delay, most=WAIT_MAX_S),
        None if at is None else _unix_time(at),
        None if job.key is None else _word("key", job.key),
        None if (group := options.group if job.group is None else job.group) is None else _word("group", group),
        check_tries(options.max_tries if job.max_tries is None else job.max_tries),
    )


def _word(what: str, given: Key) -> str:
    try:
        return check_name(check_key(given))
    except InvalidName as error:
        raise InvalidName(f"{what} of a job: {error}") from None


def _unix_time(at: object) -> float:
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise InvalidOption(f"at is a datetime with a time zone (datetime.now(timezone.utc) + …), not {at!r}")
    seconds = at.timestamp()
    if not AT_MIN_S <= seconds <= AT_MAX_S:
        raise InvalidOption(f"at lies between 1970 and 2096, not in {at.year}")
    return seconds


def check_priority(priority: object) -> int:
    """A priority; raises InvalidOption."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > PRIORITY_MAX:
        raise InvalidOption(
            f"priority is a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX}, the greatest first, not {priority!r}"
        )
    return priority


def check_tries(max_tries: object) -> int:
    """How many tries a job has, 0 for no limit; raises InvalidOption."""
    if max_tries is None:
        return 0
    if isinstance(max_tries, bool) or not isinstance(max_tries, int) or not 1 <= max_tries <= TRIES_MAX:
        raise InvalidOption(
            f"max_tries is a whole number from 1 to {TRIES_MAX:,}, or None for no limit, not {max_tries!r}"
        )
    return max_tries


def error_text(error: BaseException | str | None) -> str:
    """What is kept of a failure: the last words of a traceback are worth most."""
    if error is None:
        return "failed"
    if isinstance(error, BaseException):
        import traceback

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
        if len(text) > ERROR_CHARS_MAX:
            text = "…" + text[-ERROR_CHARS_MAX + 1 :]
    elif isinstance(error, str):
        text = error if len(error) <= ERROR_CHARS_MAX else error[: ERROR_CHARS_MAX - 1] + "…"
    else:
        raise InvalidOption(f"error is an exception or a str, not {type(error).__name__}")
    # What a store cannot keep is shown as what it is.
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def result_text(result: Any) -> str | None:
    """A result as it is kept; raises InvalidOption for what is no JSON."""
    if result is None:
        return None
    text = as_json("a result is JSON", result)
    if len(text) > RESULT_BYTES_MAX:
        raise InvalidOption(f"a result has at most {RESULT_BYTES_MAX:,} bytes")
    return text
