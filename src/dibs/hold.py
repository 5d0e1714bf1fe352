"""What a session knows of one grant: whose it is, until when it is trusted, and how it ended.

A hold is HELD until it is RELEASED by its holder or LOST; both ends are final. ``state`` and ``trusted_until`` change
only under the session's mutex; reading them needs none, because a reader that finds the trust run out takes the mutex
and looks again (``Session.expire``) before it says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable

    from dibs.lane import Ask

HELD = 0
RELEASED = 1
LOST = 2


class Hold:
    __slots__ = (
        "acquired_at",
        "after_renewal",
        "claim_id",
        "due",
        "ends_at",
        "expires_at",
        "fencing_token",
        "generation",
        "given",
        "in_flight",
        "key",
        "last_error",
        "listeners",
        "min_until",
        "on_lost",
        "orphan",
        "owner",
        "queue",
        "reason",
        "renew",
        "slot",
        "state",
        "trusted_until",
        "ttl",
    )

    def __init__(
        self,
        key: str,
        claim_id: str,
        slot: int,
        fencing_token: int,
        acquired_at: float,
        ttl: float,
        trusted_until: float,
        owner: object,
        renew: bool,
        on_lost: Callable[[], object] | None,
        min_until: float,
        ends_at: float,
    ) -> None:
        self.key = key
        self.claim_id = claim_id
        self.slot = slot
        self.fencing_token = fencing_token
        #: Unix times by the store's clock, for people.
        self.acquired_at = acquired_at
        self.expires_at = acquired_at + ttl
        self.ttl = ttl
        #: Boot-clock time at which the holder's belief ends.
        self.trusted_until = trusted_until
        #: Thread or task that acquired it.
        self.owner = owner
        self.renew = renew
        self.on_lost = on_lost
        #: Boot-clock times: not free before (min_hold), not renewed beyond (max_hold).
        self.min_until = min_until
        self.ends_at = ends_at
        #: Rises with every renewal the holder asks for itself.
        self.generation = 0
        self.state = HELD
        self.reason = ""
        self.last_error: BaseException | None = None
        #: Called once each when the hold is over.
        self.listeners: list[Callable[[], None]] | None = None
        #: A Lease object was made of it. Until then nobody can release it, so it is not renewed.
        self.given = False
        #: The Lease object was collected as garbage while it was held.
        self.orphan = False
        # The renewer's own: when it looks next, in which of its queues, and whether a renewal is under way.
        self.due = 0.0
        self.queue: OrderedDict[Hold, None] | None = None
        self.in_flight = False
        #: The release that waits for the renewal under way to be over.
        self.after_renewal: Ask | None = None
