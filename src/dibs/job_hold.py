"""What a session knows of one claim on jobs: a hold like that of a lease, on as many rows as one take was granted.

It is renewed, lost and given back as a whole, under one token and until one moment. Its jobs leave it one by one: when
they are finished, or when a renewal finds that the store does not know them as claimed any more (an operator cancelled
them). When the last has left it, it is over.
"""

from __future__ import annotations

import os

from dibs._typing import TYPE_CHECKING, Any
from dibs.ask import ON_ITS_WAY, JobAsk
from dibs.errors import StoreUnavailable
from dibs.hold import HELD, IN_ITS_LIFE, RELEASED, Hold
from dibs.jobs import BACK, DONE, Extend, Extended, Finish, Finished
from dibs.layout import laid_out
from dibs.store import Granted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.jobs import Taken
    from dibs.session import Session
    from dibs.terms import Terms


@laid_out(f"{IN_ITS_LIFE} taken live lost ends within refused grouped")
class JobHold(Hold):
    """One claim. ``live`` are the jobs that are not finished, with whom to tell when they are, or are lost."""

    of_jobs = True

    def __init__(self, key: str, claim_id: str, taken: Taken, terms: Terms, owner: object, t0: float) -> None:
        super().__init__(key, claim_id, Granted(taken.fencing_token, taken.acquired_at), terms, owner, t0)
        self.taken = taken
        # Changed under the session's mutex, like everything of a hold.
        self.live: dict[int, list[Callable[[], None]]] = {job.id: [] for job in taken.jobs}
        #: Jobs that were found not to be ours any more while the rest was, or were given back over a handler's head.
        self.lost: set[int] = set()
        #: What was sent to end each of the others: whoever ends a job again is told what came of the first end.
        self.ends: dict[int, JobAsk] = {}
        #: Those that were ended in a transaction of the caller's.
        self.within: set[int] = set()
        #: Those whose end such a transaction has refused, and with what: to go on to the next job is not to have done
        #: them, as what was to be committed with their end has been undone.
        self.refused: dict[int, str] = {}
        # The end of a job of a group lets the next of the group be taken.
        self.grouped = any(job.group is not None for job in taken.jobs)

    def renewal(self, ttl: float) -> Extend:
        return Extend(self.key, tuple(self.live), self.granted.fencing_token, ttl)

    def renewed_by(self, outcome: Any) -> float | None:
        """As of any hold. Who is to be told of a job's loss is called under the mutex, and takes no lock of dibs."""
        if type(outcome) is not Extended:
            return None
        for job in outcome.gone:
            listeners = self.live.pop(job, None)
            if listeners is not None:
                self.lost.add(job)
                for listener in listeners:
                    listener()
        return outcome.expires_at if self.live else None

    def giving_back(self) -> Finish:
        """The request that gives back what is not finished."""
        return Finish(self.key, tuple(self.live), self.granted.fencing_token, BACK)


@laid_out(f"{ON_ITS_WAY} weight _session _hold _trusted_until _echoes")
class EndAsk(JobAsk):
    """The end of a claim on some of its jobs. Answered Finished; those that it says are gone are lost.

    When an answer was lost and the request repeated, the jobs may be gone because the first attempt has ended them. It
    has, if the claim was in force until now: nobody else could take them. (An operator who cancelled them at just that
    moment is not told apart.) If it was not, nobody knows: StoreUnavailable.
    """

    def __init__(self, request: Finish, give_up_at: float, session: Session, hold: JobHold) -> None:
        super().__init__(request, give_up_at)
        self._session = session
        self._hold = hold
        # Renewals that are answered from now on are not of these jobs.
        self._trusted_until = hold.trusted_until

    def received(self, outcome: Any) -> None:
        if self.settled:
            return
        gone: tuple[int, ...] = getattr(outcome, "gone", ())
        repeated = self.maybe_applied
        # An attempt ends all of the jobs that are ours: had the first been carried out, none would be there now.
        if repeated and len(gone) == len(self.request.ids):
            if self._session.clock.now() < self._trusted_until:
                outcome = Finished()
            else:
                outcome = StoreUnavailable(f"what became of it is unknown, the claim is over: {self.trouble}")
        else:
            self._hold.lost.update(gone)
        if isinstance(outcome, StoreUnavailable):
            self.failed(outcome)
        else:
            self.settle(outcome)


def finish(
    session: Session,
    hold: JobHold,
    ids: Sequence[int],
    end: str,
    note: str | None = None,
    delay: float = 0.0,
    keep: float = 0.0,
    *,
    lost: bool = False,
    sent: list[JobAsk] | None = None,
) -> JobAsk | None:
    """End the claim on some of its jobs; None when none of them is held any more. Whoever calls serves the lane.

    The ask is answered Finished. It is repeated until the claim has certainly ended: what was done is not to be done
    again for a store that is away for a moment. ``lost``: whoever still works them is to hear that they are. ``sent``
    gets the ask, also where a Ctrl-C comes in before it is returned.
    """
    if session.pid != os.getpid():
        return None
    ask: JobAsk | None = None
    mine: tuple[int, ...] = ()
    listeners: list[Callable[[], None]] = []
    try:
        with session.mutex:
            if hold.state != HELD:
                return None
            now = session.clock.now()
            over = now >= hold.trusted_until
            if not over:
                mine = tuple(job for job in ids if job in hold.live)
            if mine:
                request = Finish(hold.key, mine, hold.granted.fencing_token, end, note, delay, keep)
                ask = EndAsk(request, max(now + session.patience_s, hold.trusted_until), session, hold)
                ask.weight = len(note or "")
                hold.ends.update(dict.fromkeys(mine, ask))  # with this it is decided
                _end(session, hold, ask, lost, sent, listeners)
        _call(listeners)
    except BaseException:
        # Ctrl-C in between: what was decided is carried out. (An ask that is sent twice is answered by the first.)
        if ask is not None and hold.ends.get(mine[0]) is ask:
            with session.mutex:
                _end(session, hold, ask, lost, sent, listeners)
            session.lane.start()
            _call(listeners)
        raise
    if over:
        session.keeper.lose(hold, hold.why_over())
    return ask


def _end(
    session: Session,
    hold: JobHold,
    ask: JobAsk,
    lost: bool,
    sent: list[JobAsk] | None,
    listeners: list[Callable[[], None]],
) -> None:
    """Look after its jobs no more, queue it, and add who is to be told. Under the mutex; again after a Ctrl-C."""
    for job in ask.request.ids:
        listeners += hold.live.get(job, ())
        hold.live.pop(job, None)
    if lost:
        hold.lost.update(ask.request.ids)
    if not hold.live:
        hold.state = RELEASED
        hold.watch = None
        session.renewer.forget(hold)
        listeners += hold.listeners or ()
        hold.listeners = None
    if sent is not None and ask not in sent:
        sent.append(ask)
    if not ask.in_lane:
        session.lane.put(ask)
    if ask.request.end != DONE or hold.grouped:
        session.waiting.nudge(hold.key)


def _call(listeners: Sequence[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()


def forsake(session: Session, hold: JobHold, ids: Sequence[int], forsaken: dict[int, list[Callable[[], None]]]) -> None:
    """Look after some of its jobs no more, and leave them to the end of the claim, or to whoever ends it elsewhere.

    ``forsaken`` gets them, also before a Ctrl-C. Who is to be told that they are over is for the caller to tell.
    """
    with session.mutex:
        for job in ids:
            listeners = hold.live.get(job)
            if listeners is not None:
                forsaken[job] = listeners
                hold.live.pop(job)
        if not hold.live and hold.state == HELD:
            hold.state = RELEASED
            session.renewer.forget(hold)


def take_up(session: Session, hold: JobHold, forsaken: dict[int, list[Callable[[], None]]]) -> None:
    """Look after jobs again that were forsaken: the claim on them goes on until its trust ends."""
    with session.mutex:
        hold.live.update(forsaken)
        if forsaken and hold.state == RELEASED and not session.closed:
            hold.state = HELD
            session.renewer.take_up(hold)


def tell(forsaken: dict[int, list[Callable[[], None]]]) -> None:
    """Tell who waits for it that these jobs are over."""
    for listeners in forsaken.values():
        _call(listeners)
