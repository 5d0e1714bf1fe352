"""Runs of ``redis_lua/jobs.lua``: on which queue, with which words; and plain commands on the keys of a queue."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable
from dibs.jobs import CRASHES_MAX, HINT_EVERY_S, NO_TRIES_LEFT
from dibs.stores.redis_job_words import micros
from dibs.stores.redis_keys import QUEUES
from dibs.stores.redis_links import Request
from dibs.stores.redis_wire import packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dibs.clock import Deadline
    from dibs.stores.redis_keys import Keys
    from dibs.stores.redis_scripts import Call, Flights


class JobRuns:
    def __init__(self, flights: Flights, keys: Keys, min_replicas: int) -> None:
        self._flights = flights
        self._keys = keys
        self.key = keys.of_queue
        self._said = (keys.channel(QUEUES), micros(HINT_EVERY_S), str(CRASHES_MAX), NO_TRIES_LEFT)
        self._min_replicas = min_replicas

    def calling(self, kind: str, name: str, words: Iterable[str | bytes] = ()) -> Call:
        script = self._flights.script("jobs")
        return script.calling_raw(self.key(name), (kind, *self._said, *words), self._keys.slot(name))

    def run(self, calls: Iterable[Call], deadline: Deadline) -> list[Any]:
        answers = self._flights.run(calls, deadline)
        if not self._flights.place.worked:
            self._flights.place.worked.append(True)
        return answers

    def settle(self, deadline: Deadline) -> None:
        """Go on when as many replicas as are wanted have what the last run wrote."""
        if self._min_replicas and (trouble := self._flights.wait_for_replicas(self._min_replicas, deadline)):
            raise StoreUnavailable(trouble)

    def ask(self, name: str, commands: Sequence[Sequence[str]], deadline: Deadline) -> list[Any]:
        """The answers to plain commands that read what is kept of a queue."""
        slot = self._keys.slot(name)
        return self._flights.fly([Request(packed(*words), slot) for words in commands], deadline)

    def names(self, beginning: str, deadline: Deadline) -> set[str]:
        """The queues whose names begin so. All keys of the database are looked at on the way."""
        keys = self._flights.scan(self.key(beginning)[:-1], deadline)
        return {name for key in keys if (name := self._keys.queue_in(key)) is not None}

    def chunks(self, ids: Sequence[int], size: int) -> Iterator[list[str]]:
        for start in range(0, len(ids), size):
            yield [str(job) for job in ids[start : start + size]]
