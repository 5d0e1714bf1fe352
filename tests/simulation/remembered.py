"""What the checker remembers: leases that programs were given, claims the store has seen, acquires under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dibs.hold import Hold
    from dibs.wishes import AcquireAsk
    from tests.simulation.process import Process
    from tests.simulation.programs import SimSession


class Tenure:
    """A lease that a program was given, and what has become of it."""

    __slots__ = (
        "claim_id",
        "dropped",
        "given_at",
        "hold",
        "key",
        "min_hold",
        "over_at",
        "process",
        "release_called",
        "release_called_at",
        "released_at",
        "session",
        "stillborn",
        "told",
    )

    def __init__(self, process: Process, session: SimSession, hold: Hold, min_hold: float, told: list[float]) -> None:
        self.process = process
        self.session = session
        self.hold = hold
        self.key = hold.key
        self.claim_id = hold.claim_id
        self.min_hold = min_hold
        self.given_at = process.world.now
        #: When it was first seen not to be held.
        self.over_at: float | None = None
        self.release_called = False
        self.release_called_at: float | None = None
        self.released_at: float | None = None
        #: Nobody has the Lease object any more.
        self.dropped = False
        #: It was over when acquire returned it: its answer took that long to get there.
        self.stillborn = False
        #: When on_lost was called.
        self.told = told

    @property
    def take(self) -> int:
        """How many permits the program believes it has, where the name has permits."""
        return self.hold.terms.take


class Claim:
    """What the store and the network have seen of a claim id."""

    __slots__ = (
        "answered_at",
        "broken",
        "broken_at_once",
        "excused",
        "followed_up",
        "given",
        "granted",
        "late",
        "made",
        "process",
        "refused",
        "renewed",
        "renewed_after",
        "sent_after",
        "token",
        "unanswered",
        "withdrawn_at",
    )

    def __init__(self, process: Process) -> None:
        self.process = process
        self.token = 0
        #: It was granted by a call whose client was still there.
        self.granted = False
        #: An acquire of it was applied after its client had given up.
        self.late = False
        #: After the grant: it was given to a program, or another request about it was sent.
        self.followed_up = False
        self.given = False
        #: A Lease was made of it, though its program may have been interrupted before it had that in hand.
        self.made = False
        self.renewed = False
        #: When its process, by its own clock, had the answer to a call that would acquire it.
        self.answered_at = 0.0
        #: That answer was Held, and it had not lined up.
        self.refused = False
        #: No answer to the last grant of it has reached its process.
        self.unanswered = False
        #: An operator took it away,
        self.broken = False
        #: and without waiting for its trust to end.
        self.broken_at_once = False
        #: Its ttl may run out: its program was interrupted just as it was given, or its client was closed.
        self.excused = False
        self.withdrawn_at: float | None = None
        #: Calls begun since then that would acquire it, and that would renew it.
        self.sent_after = 0
        self.renewed_after = 0


class Attempt:
    """A program's acquire under way."""

    __slots__ = ("asked_at", "asks", "process", "since", "timeout")

    def __init__(self, process: Process, timeout: float | None, since: float) -> None:
        self.process = process
        self.timeout = timeout
        self.since = self.asked_at = since
        #: What the session was asked for it; of several, each after the one before, or together.
        self.asks: list[AcquireAsk] = []
