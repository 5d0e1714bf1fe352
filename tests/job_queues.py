"""One queue of a store, over a connection of its own, as the tests on its jobs use it."""

import os
from typing import Any

from dibs.door import Door, Said, door_to
from dibs.jobs import DONE, Finish, NewJob, Put, PutDone, Take, Taken
from dibs.store import RowBusy
from tests.waits import soon

NAME = "default:letters"


def ids(taken: Taken) -> tuple[int, ...]:
    return tuple(job.id for job in taken.jobs)


def finishing(taken: Taken, end: str = DONE, *, name: str = NAME, **fields: Any) -> Finish:
    """A request that ends all jobs of a claim."""
    return Finish(name, ids(taken), taken.fencing_token, end, **fields)


class JobQueue:
    def __init__(self, store: Any, name: str = NAME) -> None:
        self.store = store
        self.jobs = store.jobs
        self.name = name

    def act(self, *requests: Any) -> list[Any]:
        """The outcomes of requests that go in one call."""
        outcomes: list[Any] = self.jobs.act(requests, soon())
        return outcomes

    def one(self, request: Any) -> Any:
        """The outcome of one request; RowBusy, a StoreBusy, is raised."""
        outcome = self.act(request)[0]
        if isinstance(outcome, RowBusy):
            raise outcome
        return outcome

    def asked(self, *payloads: str | NewJob, put_id: str | None = None, on_conflict: str = "raise") -> Put:
        """A request to put these."""
        new = tuple(job if isinstance(job, NewJob) else NewJob(job) for job in payloads)
        return Put(self.name, put_id or os.urandom(8).hex(), new, on_conflict)

    def put(self, *payloads: str | NewJob, put_id: str | None = None, on_conflict: str = "raise") -> tuple[int, ...]:
        """Put jobs that must be taken in; their ids."""
        done = self.one(self.asked(*payloads, put_id=put_id, on_conflict=on_conflict))
        assert isinstance(done, PutDone), done
        return done.ids

    def take(self, n: int = 1, ttl: float = 60.0, group_limit: int = 0) -> Any:
        """What a take is told, whatever it is."""
        return self.one(Take(self.name, os.urandom(8).hex(), n, ttl, "host/1", group_limit))

    def taken(self, n: int = 1, ttl: float = 60.0) -> Taken:
        """What is taken, of which there must be something."""
        taken = self.take(n, ttl)
        assert isinstance(taken, Taken), taken
        return taken

    def payloads(self, state: str) -> list[Any]:
        return [job.payload for job in self.jobs.jobs_in(self.name, state, 1000, soon())]

    def within(self, connection: Any, request: Put | Finish) -> Any:
        """The outcome of a request inside the transaction of a connection."""
        door = door_to(connection)
        talk = self.jobs.within(request, door.dialect, self.files(door), soon())
        try:
            said: Said = next(talk)
            while True:
                said = talk.send(door.execute(*said))
        except StopIteration as stop:
            return stop.value

    def files(self, door: Door) -> Any:
        """What the connection has attached, where that is asked."""
        return None
