"""Jobs as ``redis_lua/jobs.lua`` hears and tells of them: words with spaces between, times in microseconds."""

from __future__ import annotations

import re
from urllib.parse import unquote

from dibs._typing import TYPE_CHECKING
from dibs.jobs import CLAIMED, LATER, READY, NewJob, StoredJob, Taken, TakenJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NO_WORD = re.compile(r"[\x00-\x20%\x7f]")
# The words of a row; `read` in jobs_rows.lua has them, too.
ROW_WORDS = 15
LIVE = "live"


def word(text: str | None) -> str:
    """A text that somebody has chosen, as one word; None is a word that no text is."""
    if text is None:
        return "-"
    return "=" + (_NO_WORD.sub(_percent, text) if _NO_WORD.search(text) else text)


def _percent(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"


def text_in(said: bytes) -> str | None:
    if said == b"-":
        return None
    text = said[1:].decode()
    return unquote(text) if "%" in text else text


def micros(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def seconds_in(said: bytes) -> float:
    return int(said) / 1e6


def words_of(jobs: Sequence[NewJob]) -> Iterator[str | bytes]:
    """Of each new job how it is to be worked ('': as the one before), and its payload behind a letter for its type."""
    last: NewJob | None = None
    for job in jobs:
        if last is not None and job[1:] == last[1:]:
            yield ""
        else:
            due = f"+{micros(job.delay)}" if job.at is None else micros(job.at)
            yield f"{job.priority} {job.max_tries} {due} {word(job.key)} {word(job.group)}"
        last = job
        yield "j" + job.payload if isinstance(job.payload, str) else b"b" + job.payload


def ids_in(said: bytes) -> tuple[int, ...]:
    """The ids of a put."""
    first, several, count = said.partition(b"+")
    if several:
        return tuple(range(int(first), int(first) + int(count)))
    return tuple(map(int, said.split()))


def payload_in(said: bytes) -> str | bytes:
    return said[1:].decode() if said[:1] == b"j" else said[1:]


def taken_in(said: Sequence[bytes]) -> Taken:
    token, since, *jobs = said
    return Taken(int(token), seconds_in(since), tuple(map(_taken_job, jobs)))


def _taken_job(said: bytes) -> TakenJob:
    job, _, tries, max_tries, crashes, *_, created, _, key, group, payload = said.split(b" ", ROW_WORDS + 1)
    return TakenJob(
        int(job),
        payload_in(payload),
        int(tries),
        int(max_tries),
        int(crashes),
        seconds_in(created),
        text_in(key),
        text_in(group),
    )


class Row:
    """A row as it is kept."""

    def __init__(self, job: int, row: bytes) -> None:
        self.id = job
        words = row.split(b" ")
        self._state, self._tries, self._max_tries, self._crashes, self._token, due, expires, self._claim = words[:8]
        self._holder, self._ended, priority, self._created, _, self._key, self._group = words[8:]
        self.due, self.expires, self.priority = int(due), int(expires), int(priority)

    def state(self, now: int) -> str:
        if self._state != LIVE.encode():
            return self._state.decode()
        if self._claim != b"-" and self.expires > now:
            return CLAIMED
        return READY if self.due <= now else LATER

    def order(self) -> tuple[int, int, int]:
        """Its place among those that are live."""
        return -self.priority, self.due, self.id

    def shown(self, now: int, payload: bytes | None, error: bytes | None, result: bytes | None) -> StoredJob:
        return StoredJob(
            self.id,
            self.state(now),
            payload_in(payload or b""),
            self.priority,
            int(self._tries),
            int(self._max_tries),
            int(self._crashes),
            int(self._token),
            seconds_in(self._created),
            self.due / 1e6,
            text_in(self._key),
            text_in(self._group),
            text_in(self._holder),
            self.expires / 1e6 if self.expires else None,
            None if error is None else error.decode(),
            None if result is None else result.decode(),
            seconds_in(self._ended) if self._ended != b"0" else None,
        )
