"""The event of a loss: what ``lease.lost`` is. Whether a lease is lost is decided by this process's clock alone."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Protocol
from dibs.names import check_event_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.clock import Gate
    from dibs.hold import Hold
    from dibs.names import Seconds
    from dibs.session import Session


class Losable(Protocol):
    """A lease, or a job."""

    @property
    def held(self) -> bool: ...
    @property
    def _hold(self) -> Hold: ...
    @property
    def _session(self) -> Session: ...
    def _is_lost(self) -> bool: ...
    def _when_over(self, listener: Callable[[], None]) -> Callable[[], None]: ...


class LostFacts:
    """The loss of a lease, or of the first of several: decided by the clock alone."""

    __slots__ = ("_leases",)

    def __init__(self, *leases: Losable) -> None:
        self._leases = leases

    def is_set(self) -> bool:
        """True once a lease is over without having been released."""
        return any(lease._is_lost() for lease in self._leases)

    def _held(self) -> list[Losable]:
        return [lease for lease in self._leases if lease.held]


class Lost(LostFacts):
    """The event of a lease's loss, as ``threading.Event`` without ``set``; it also fires by the clock alone."""

    __slots__ = ()

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Block until a lease is lost (True), or all are released, or ``timeout`` seconds went by (False)."""
        clock = self._leases[0]._session.clock
        wait_s = check_event_timeout(timeout)
        until = None if wait_s is None else clock.now() + wait_s
        gate: Gate | None = None
        unlisten: list[Callable[[], None]] = []
        try:
            while not self.is_set() and (held := self._held()):
                now = clock.now()
                if until is not None and now >= until:
                    break
                if gate is None:
                    gate = clock.gate()
                    unlisten += [lease._when_over(gate.open) for lease in held]
                # Trust moves on with each renewal: its end as known now is the time for another look.
                look_at = min(lease._hold.trusted_until for lease in held)
                if gate.wait(look_at - now if until is None else min(look_at, until) - now):
                    gate = None
        finally:
            for forget in unlisten:
                forget()
        return self.is_set()
