"""Several of one line for permits in one call: those behind the first, who are asked for along with it.

Only the first in a line of this process waits at the store (see ``dibs.waiting``). Where a name has many permits, a
thousand tasks would get through it at one a round trip. So some of those behind the first are asked for in the same
call: as many as gave back a lease of the name in this process since the last one; and where nobody was refused in that
one, twice as many as were in it. Whoever is asked for along with the first enters no line at the store: refused, it
stands where it stood, unknown to the store. So nobody of another process who waits is passed.

Only who takes as many permits as the first is asked for with it: a smaller wish must not pass a larger one before it.
"""

from __future__ import annotations

from itertools import islice

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dibs.wishes import AcquireAsk

# At most so many are asked for along with the first.
ALONG_MAX = 63


class Along:
    """What is kept of the lines, under the session's mutex."""

    def __init__(self, send: Callable[[AcquireAsk], None]) -> None:
        self._send = send
        #: How many went along in the call before, where nobody was refused; by line.
        self._went_well: dict[str, int] = {}
        #: How many leases were given back while the first was under way.
        self._room: dict[str, int] = {}

    def released(self, first: AcquireAsk, behind: Iterable[AcquireAsk]) -> None:
        """A lease was given back here. Its release is queued; if ``first`` is, too, another one can go along."""
        if not first.terms.permits or not first.in_lane:
            return
        if first.under_way:  # if it is refused, and had no place at the store yet, who is queued now would pass it
            self._room[first.line] = self._room.get(first.line, 0) + 1
        else:
            self._bring(first, behind, 1)

    def join(self, first: AcquireAsk, behind: Iterable[AcquireAsk], *, granted: bool = False) -> None:
        """The first in line is queued: bring some of those behind; ``granted``: the one before it got its permits."""
        line, number = first.line, self._room.pop(first.line, 0) if self._room else 0
        if granted and first.terms.permits:
            number = self._went_well[line] = min(max(number, 2 * self._went_well.get(line, 0) + 1), ALONG_MAX)
        if number:
            self._bring(first, behind, number)

    def _bring(self, first: AcquireAsk, behind: Iterable[AcquireAsk], number: int) -> None:
        request = first.request
        room = request.permits - request.take
        for ask in islice(behind, ALONG_MAX):
            if ask.request.take != request.take:
                break
            room -= request.take
            if room < 0:
                break
            if ask.along or ask.in_lane:
                continue
            # In this order: a Ctrl-C in between leaves it behind as before, or on its way.
            ask.request = ask.request._replace(wake=None)
            self._send(ask)
            ask.along = True
            number -= 1
            if not number:
                break

    def went_ill(self, line: str) -> None:
        """Somebody was refused: what was asked for is more than there is."""
        if self._went_well:
            self._went_well.pop(line, None)

    def forget(self, line: str) -> None:
        """Nobody is left in the line."""
        self.went_ill(line)
        if self._room:
            self._room.pop(line, None)
