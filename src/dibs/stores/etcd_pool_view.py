"""What one transaction shows of a name with permits, in the words of the decision: who holds, who waits, who is alive.

etcd tells no times, so whoever looks counts on its own clock since when a place in line has not changed. That decides
who asks first, never who holds.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.clock import boot_now
from dibs.store import LINE_GRACE_S
from dibs.stores import etcd_keys as keys
from dibs.stores.permits import Holding, State, Waiting

if TYPE_CHECKING:
    from dibs.store import Acquire, Release

# A waiter that was never seen to ask is given less than the whole grace: it may have been silent before. As for locks,
# the dead delay the line by a look and this together, within the promised 2 s.
SEEN_FIRST_S = 0.95
# What is remembered: names whose lines were seen, idle names, claims that were granted those.
NAMES_MAX = 10_000
# The revision of a view that nothing was read for.
ASSUMED = 0


class View(NamedTuple):
    """What there was of a name at a revision. Of the line also for how long each had not asked."""

    revision: int
    head: keys.Kept | None
    holders: list[keys.Kept]
    line: list[keys.Kept]
    silences: list[float]

    @property
    def permits(self) -> int | None:
        """How many the name has; 0 for a lock, or what is waited for as one, None for what is not known."""
        if self.head is not None:
            return int(self.head.number("permits")) or None
        return 0 if self.holders or any(not key.number("take") for key in self.line) else None

    def own(self, request: Acquire) -> keys.Kept | None:
        """The asker's place in line, if it stands there."""
        return next((key for key in self.line if key.place()[1] == request.claim_id), None)

    def state(self, ends_in: dict[str, float] | None = None) -> State:
        """What the decision is to know. When leases end, by etcd lease, is only wanted for a refusal."""
        holdings = []
        for key in self.holders:
            holder, token, since, _, take = key.shown()
            left = 0.0 if ends_in is None else ends_in[key.lease]
            holdings.append(Holding(*key.permit(), take, holder, token, since, left))
        line = [
            Waiting(*key.place(), int(key.number("take")) or 1, silence)
            for key, silence in zip(self.line, self.silences, strict=True)
        ]
        return State(self.permits, 0, holdings, line)


class _Sign(NamedTuple):
    """Of a place in line: its latest change, when that was seen, and whether an earlier one was."""

    change: int
    seen_at: float
    again: bool

    def silence(self, now: float) -> float:
        return now - self.seen_at + (0.0 if self.again else LINE_GRACE_S - SEEN_FIRST_S)


class Views:
    """Makes views, and remembers who was seen in line, and which names nobody held or waited for."""

    def __init__(self, layout: keys.Layout) -> None:
        self._layout = layout
        self._signs: dict[str, dict[str, _Sign]] = {}
        # What to assume of idle names, and of those whose single holder's claim ends.
        self._idle: dict[str, View] = {}
        self._lone: dict[str, View] = {}

    def asked(self, name: str) -> list[str]:
        """The operations whose answers make a view."""
        return [keys.get_all(self._layout.permit(name)), keys.get_all(self._layout.line(name))]

    def seen(self, name: str, answers: list[Any], revision: int) -> View:
        """What the last of these answers show."""
        holders, line = keys.kept(answers[-2]), keys.kept(answers[-1])
        head = holders.pop(0) if holders and holders[0].key == self._layout.head(name) else None
        before, signs, now = self._signs.pop(name, {}), {}, boot_now()
        for key in line:
            sign = before.get(key.key)
            if sign is None or sign.change != key.modified:
                sign = _Sign(key.modified, now, sign is not None)
            signs[key.key] = sign
        if line:
            if len(self._signs) >= NAMES_MAX:
                self._signs.clear()
            self._signs[name] = signs
        return View(revision, head, holders, line, [sign.silence(now) for sign in signs.values()])

    # -- names that were idle -------------------------------------------------------------------------------------

    def idle(self, request: Acquire) -> View | None:
        """What to assume of a name that was idle when it was last seen, of which only a grant can come; used once."""
        view = self._idle.pop(request.name, None)
        return view if view is not None and view.permits == request.permits else None

    def granted(self, request: Acquire, view: View, head: str, revision: int) -> None:
        """Note a grant that rested on this view; ``head`` is what it wrote there, if anything."""
        if view.holders or view.line:
            return
        kept = view.head
        if head:
            kept = keys.Kept(self._layout.head(request.name), revision, revision, "0", keys.b64(head))
        _put(self._lone, request.claim_id, View(ASSUMED, kept, [], [], []))

    def ended(self, release: Release) -> None:
        """Note that a claim has ended."""
        view = self._lone.pop(release.claim_id, None)
        if view is not None:
            _put(self._idle, release.name, view)


def _put(remembered: dict[str, View], key: str, view: View) -> None:
    if len(remembered) >= NAMES_MAX:
        remembered.clear()
    remembered[key] = view
