"""What a session knows of one grant: whose it is, until when it is trusted, and how it ended.

A hold is HELD until it is RELEASED by its holder or LOST; both ends are final. ``state`` and ``trusted_until`` change
only under the session's mutex; reading them needs none, because a reader that finds the trust run out takes the mutex
and looks again (``Keeper.expire``) before it says so.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.layout import laid_out
from dibs.store import ROW_MARK, Renew, Renewed

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable

    from dibs.ask import Ask
    from dibs.door import Door
    from dibs.store import Granted, Request
    from dibs.terms import Terms

HELD = 0
RELEASED = 1
LOST = 2
FOREVER = float("inf")
# What is set on a hold in its life (``dibs.layout``).
IN_ITS_LIFE = (
    "key claim_id granted terms ttl owner t0 trusted_until listeners queue due given watch in_flight renewed_until"
    " state finish ending"
)
GONE_REASON = "the store no longer knows it: it expired, was broken by an operator, or was deleted"


class Finish(NamedTuple):
    """How whoever is at work under a hold says that it ends."""

    #: Nobody is to have the name for so many seconds from now; it is shown with ``info`` then.
    keep: float = 0.0
    info: str | None = None
    #: What the store must be told before it is told of the release.
    first: Request | None = None
    #: The work was tried in vain.
    failed: bool = False


@laid_out(IN_ITS_LIFE)
class Hold:
    """One grant. What is the same for nearly all holds is a default of the class, so that making one stays cheap."""

    state = HELD
    #: Why it was lost, or given away but to whoever adopts it; and what the last renewal failed with.
    reason = ""
    last_error: BaseException | None = None
    #: Called when the hold is over; after a Ctrl-C perhaps twice.
    listeners: list[Callable[[], None]] | None = None
    #: Its loss is one of a lease that somebody has in hand, who is told; and it has been told to everybody.
    loud = False
    told = False
    #: It was lost, and whoever had it in hand has let go of it since: the store was told.
    let_go = False
    #: It was given away by this ask: the process holds it no more, and the store keeps it for whoever adopts it.
    exported: Ask | None = None
    #: A Lease object was made of it. Until then nobody can release it, so it is not renewed.
    given = False
    #: The store may by now know it by another slot than it was told.
    any_slot = False
    #: Tells when that Lease object is collected as garbage; None once it does not matter any more.
    watch: object = None
    #: It was collected while it was held.
    orphan = False
    #: Until when the store keeps it, as the last renewal told (Unix time); None before the first.
    renewed_until: float | None = None
    # The renewer's own: in which of its queues it is, when it looks next, and whether a renewal is under way.
    queue: OrderedDict[Hold, None] | None = None
    due = 0.0
    in_flight = False
    #: Not empty once it was pinned: the last transaction, and others that may have to be waited for.
    pins: tuple[Door, ...] = ()
    #: Its last transaction gives it back, too, if that is committed: to the release behind that the store says Gone.
    ends_within = False
    #: It is a claim on jobs (``dibs.job_hold``), not a lease.
    of_jobs = False
    #: What tells the store that it has ended.
    ending: Ask | None = None
    #: The release that waits for the renewal under way to be over, or what must be answered before it.
    after_renewal: Ask | None = None
    #: What the store must be told before it is told of the release; not of a lease that was lost.
    first: Request | None = None
    #: That, on its way.
    before: Ask | None = None
    #: How it ended, if whoever was at work has said so; set with ``state``.
    finish: Finish | None = None

    def __init__(
        self,
        key: str,
        claim_id: str,
        granted: Granted,
        terms: Terms,
        owner: object,
        t0: float,
    ) -> None:
        self.key = key
        self.claim_id = claim_id
        self.granted = granted
        self.terms = terms
        self.ttl = terms.ttl
        #: Thread or task that acquired it.
        self.owner = owner
        #: Boot-clock time just before it was asked for.
        self.t0 = t0
        #: Boot-clock time at which the holder's belief ends.
        self.trusted_until = t0 + terms.trust_s

    def renewal(self, ttl: float) -> Any:
        """The request that lets it go on for ``ttl`` seconds from now."""
        return Renew(self.key, self.claim_id, ttl, self.granted.slot)

    def renewed_by(self, outcome: Any) -> float | None:
        """Until when the store keeps it, by the answer to a renewal; None when it is gone."""
        return outcome.expires_at if type(outcome) is Renewed else None

    @property
    def ends_at(self) -> float:
        """Boot-clock time beyond which it is not renewed (max_hold)."""
        return self.t0 + self.terms.max_hold

    def reaches_its_end(self) -> bool:
        """Whether max_hold leaves no room for another renewal."""
        return self.terms.max_hold != FOREVER and self.trusted_until + self.ttl > self.ends_at

    def waits_for_us(self) -> bool:
        """Whether its release must wait for a transaction of our own caller's."""
        return ROW_MARK in self.key or any(door.blocks_all() for door in self.pins)

    def why_over(self) -> str:
        """Why its trusted time could run out, in words for the holder."""
        # What max_hold leaves to the last renewals is less than what a call may take: they may well fail.
        renewable = self.trusted_until + self.terms.ttl - self.terms.trust_s < self.ends_at
        if renewable and (self.last_error is not None or self.in_flight):
            return f"it could not be renewed in time: {self.last_error or 'the store has not answered'}"
        if not self.terms.renew:
            return f"its ttl of {self.ttl:g} s is over, and it was taken with renew=False"
        if self.reaches_its_end():
            return f"its max_hold of {self.terms.max_hold:g} s is over"
        return "it could not be renewed in time: this process was stopped, or too busy"
