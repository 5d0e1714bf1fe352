"""The servers that a PostgreSQL URL names, of which one takes writes; shared by all connections to them.

libpq would try them in turn, too, but it gives each all the time there is. So one that says nothing, as it is frozen or
its machine is gone, would be asked again and again, and the one that has taken over never. Here each may take a part
of the time, those that were of no use the last time come last, and a server that takes no writes is left for the next.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.store import TakesNoWrites
from dibs.stores.parts import ONE_OF_SEVERAL, Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline


class Hosts:
    def __init__(self, conninfos: Sequence[bytes]) -> None:
        self._conninfos = conninfos
        self._parts = Parts()
        self.several = len(conninfos) > 1
        #: One of them has let us in: from then on a refusal is an outage.
        self.known_good = False

    def first(self, connect: Callable[[bytes, Deadline], None], deadline: Deadline) -> None:
        """Connect to the first that will have us; StoreUnavailable when none will.

        SetupRequired when one of them says so, and TakesNoWrites when they all answer, and take none.
        """
        if not self.several:
            connect(self._conninfos[0], deadline)
            return
        troubles: list[StoreUnavailable] = []
        misconfigured: SetupRequired | None = None
        for conninfo in sorted(self._conninfos, key=self._parts.is_away):
            try:
                connect(conninfo, self._parts.limit_of_several(conninfo, deadline))
            except StoreUnavailable as error:
                self._parts.did_not(conninfo, error)
                troubles.append(error)
            except SetupRequired as error:
                misconfigured = misconfigured or error
            else:
                self._parts.answered(conninfo)
                return
        if misconfigured is not None:
            raise misconfigured
        kind = TakesNoWrites if all(isinstance(trouble, TakesNoWrites) for trouble in troubles) else StoreUnavailable
        raise kind("; ".join(map(str, troubles)), maybe_applied=False)

    def patience(self, deadline: Deadline, was_silent: bool) -> Deadline:
        """Until when an answer is waited for, where another server may have taken over.

        But not twice in turn, or what is slow, and not away, would never be done.
        """
        return deadline.within(deadline.remaining() * ONE_OF_SEVERAL) if self.several and not was_silent else deadline
