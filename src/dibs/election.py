"""The face for threads of elections: ``Election`` and ``Term``. How candidates are elected is in ``dibs.campaign``.

A module of its own because ``dibs run``, which stands in crontabs, has no need of it.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import LeaseLost
from dibs.leaders import Over, Watch
from dibs.lease import Lease
from dibs.lock import check_decorated
from dibs.lockable import Lockable, given_back
from dibs.names import check_flag, check_timeout
from dibs.owners import this_thread
from dibs.steps import run
from dibs.succession import OFFER_S, TermFacts
from dibs.threads import aside

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.campaign import ElectionCore, Leader
    from dibs.names import Seconds
    from dibs.steps import Steps

    OnElected = Callable[["Term"], object]
    OnLost = Callable[["Term"], object]


class Term(TermFacts, Lease):
    """One reign: a ``Lease`` on the name of an election. ``with term:`` resigns at the end."""

    __slots__ = ()

    def resign(self, *, to: Any = None, timeout: Seconds = OFFER_S) -> bool:
        """Stop leading, and let the next candidate win at once; with ``to``, the one with that value, out of its turn.

        Without ``to`` it is the same as ``release()``. With it, the term is over for this process at once, too, and
        offered to the candidate with this value for up to ``timeout`` seconds, in which nobody leads. True when that
        one leads; False when none with this value took it up: then whoever is next in line wins, as without ``to``.

        Raises InvalidOption for a ``to`` that is no JSON, LeaseLost when the term had been lost, StoreUnavailable when
        the answer is unknown: it has resigned all the same.
        """
        return run(self._resigning(to, timeout))


class Leaders:
    """Who leads, one after the other: an iterator of ``Leader``, and of None when nobody does. For one thread."""

    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def close(self) -> None:
        """End the iteration, also from another thread while it waits."""
        self._watch.close()

    def __iter__(self) -> Leaders:
        return self

    def __next__(self) -> Leader | None:
        try:
            return run(self._watch.next())
        except Over:
            raise StopIteration from None


class Lead:
    """``with election.lead() as term:`` campaigns, leads, and resigns at the end."""

    __slots__ = ("_block", "_campaign")

    def __init__(self, core: ElectionCore[Term], campaign: Callable[[object], Steps[Term | None]]) -> None:
        self._block = Lockable(core)
        self._campaign = campaign

    def __enter__(self) -> Term:
        return self._block._enter(self._campaign(this_thread()))

    def __exit__(self, *exc: Any) -> None:
        self._block.__exit__(*exc)


class Election:
    """One leader among candidates. A description: campaigning gives a ``Term``. Safe to share among threads."""

    __slots__ = ("_core",)

    def __init__(self, core: ElectionCore[Term]) -> None:
        self._core = core

    @property
    def name(self) -> str:
        """What the election is about. A lock of the same name excludes it: they are the same."""
        return self._core.name

    def campaign(self, timeout: Seconds | None = None) -> Term | None:
        """Wait up to ``timeout`` seconds to be elected; the term, or None if it was not.

        ``timeout=None`` waits for ever, 0 asks exactly once. None is returned at once when ``standby_max`` standbys are
        there already. The term is renewed until it is resigned or lost.

        Raises StoreUnavailable when the store gives no answer, SetupRequired when it is not set up, WouldDeadlock when
        this thread leads already and would wait without limit.
        """
        return run(self._core.campaign(this_thread(), timeout))

    def lead(self, timeout: Seconds | None = None) -> Lead:
        """Lead for the length of a block: ``with election.lead() as term:``.

        Raises LockTimeout where ``campaign`` returns None. At the end it resigns, and raises LeaseLost if the term was
        lost and the block has no error of its own.
        """
        limit_s, core = check_timeout(timeout), self._core
        return Lead(core, lambda owner: core.campaign(owner, limit_s))

    def _stand_by(self, tell: Callable[[str], object]) -> Lead:
        """The same without a limit, also while the store is away; what happens is told."""
        core = self._core
        return Lead(core, lambda owner: core.stand_by(owner, tell))

    def run(self, on_elected: OnElected, on_lost: OnLost | None = None, *, forever: bool = False) -> None:
        """Campaign, call ``on_elected(term)`` in this thread, and resign when it returns; with ``forever`` again.

        When the term is lost meanwhile, ``on_lost(term)`` is called at once, in a thread of its own, before another can
        win. A running function cannot be stopped from outside: ``on_elected`` has to return, which ``term.check()`` or
        ``term.lost`` tell it. Once both have returned, LeaseLost is raised, or with ``forever`` the next campaign
        begins. Any other error of ``on_elected`` ends the term and is raised.

        Raises what ``campaign`` raises, and LockTimeout when there are standbys enough. With ``forever`` it waits for a
        store that goes away meanwhile, without limit, and logs that once a minute (``dibs``, WARNING); one that it has
        not reached yet it gives the client's ``patience``.
        """
        check_flag("forever", forever)
        check_decorated(on_elected, awaited=False)
        if on_lost is not None:
            check_decorated(on_lost, awaited=False)
        while True:
            term = run(self._core.stand_by(this_thread())) if forever else self.campaign()
            if term is None:
                raise self._core.timed_out()
            try:
                with _Told(term, on_lost), term:
                    on_elected(term)
            except LeaseLost:
                if not (forever and term.lost.is_set()):
                    raise
            finally:
                term._end()  # nothing is left of it, unless its block was not entered: no thread could be begun
            if not forever:
                return

    def resign(self, *, to: Any = None, timeout: Seconds = OFFER_S) -> bool:
        """Stop leading, if it was through this object, and let the next candidate win at once; or the one with value
        ``to``, as ``Term.resign``.

        Raises NotHeld when it does not lead through this object, LeaseLost when the term had been lost. Returns
        False when the store did not confirm; the term then ends by its ttl.
        """
        core = self._core
        return given_back(core, lambda aim: core.resigning(aim, to, timeout))

    def leader(self) -> Leader | None:
        """Who leads now, or None."""
        return run(self._core.leader())

    def observe(self, interval: Seconds = 1.0) -> Leaders:
        """Who leads, at once and then whenever that changes: ``for leader in election.observe():``.

        Gives a ``Leader``, or None when nobody leads. It reads the store every ``interval`` seconds (1 or more), or up
        to 30 % later, so a reign that was shorter, or a time without one, may not be seen. It ends when it or the
        client is closed, and holds nothing meanwhile. Raises StoreUnavailable when the store gives no answer; the same
        iterator can then be asked again.
        """
        return Leaders(Watch(self._core, interval))

    def __repr__(self) -> str:
        return f"<dibs.Election {self.name!r}>"


class _Told:
    """Sees to it that ``on_lost`` is called once if the term is lost; at the end of the block it has returned."""

    def __init__(self, term: Term, on_lost: OnLost | None) -> None:
        self._term = term
        self._on_lost = on_lost
        self._called = False
        self._gate = term._session.clock.gate()

    def __enter__(self) -> None:
        if self._on_lost is not None:
            self._term._session.clock.spawn("dibs-on-lost", self._watch)

    def _watch(self) -> None:
        try:
            if self._term.lost.wait():
                self._call()
        finally:
            self._gate.open()

    def _call(self) -> None:
        self._called = True
        if self._on_lost is not None:
            self._on_lost(self._term)

    def __exit__(self, *exc: object) -> None:
        if self._on_lost is not None:
            self._term._end()  # nothing is left of it, unless Ctrl-C came before its block
            self._gate.wait(None)  # the term is over, and so the thread has done its part
            if self._term.lost.is_set() and not self._called:  # that it was lost has shown only when it was resigned
                self._gate = self._term._session.clock.gate()
                aside(self._term._session.clock, "dibs-on-lost", self._watch)
                self._gate.wait(None)
