"""Planted bugs: known mistakes, put into the shipped code for a while, and the promises each must be caught breaking.

A simulator that does not find them is blind. Most are edits of one line, so that the mistake can be read here; an edit
that no longer fits the code says so, and is to be written anew.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import dibs.observing
import dibs.rwlock
import dibs.stores.memory
import dibs.trust
from dibs.hints import Hints
from dibs.keeper import Keeper
from dibs.lane import Lane
from dibs.lease import LeaseFacts
from dibs.lock import LockCore
from dibs.observing import Observing
from dibs.renewer import Renewer
from dibs.renewing import Reduction
from dibs.session import Session
from dibs.stores.memory import MemoryStore
from dibs.waiting import Waiting
from dibs.wishes import AcquireAsk
from tests.simulation.process import SimClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Edit(NamedTuple):
    """One place in a function of a class or module: what stands there, and what the mistake makes of it."""

    owner: Any
    function: str
    old: str
    new: str


class Value(NamedTuple):
    """A constant of a module, and what the mistake makes of it."""

    owner: Any
    name: str
    new: object


class Bug(NamedTuple):
    name: str
    #: The beginnings of what the checker may say about it.
    breaks: tuple[str, ...]
    #: It is found within this many seeds: six times what it took on average when this was written.
    seeds: int
    edits: tuple[Edit | Value, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The shipped code with this mistake in it."""
        with ExitStack() as stack:
            for edit in self.edits:
                if isinstance(edit, Value):
                    stack.enter_context(_replaced(*edit))
                else:
                    stack.enter_context(_replaced(edit.owner, edit.function, _edited(edit)))
            yield


#: What becomes of what is compiled, besides the edits.
transforms: list[Callable[[ast.Module], ast.Module]] = []


def _edited(edit: Edit) -> Callable[..., Any]:
    function = inspect.unwrap(vars(edit.owner)[edit.function])  # its decorators stand in its source, too
    source = textwrap.dedent(inspect.getsource(function))
    found = source.count(edit.old)
    assert found == 1, f"the planted bug no longer fits {edit.function}: {edit.old!r} stands there {found} times"
    flags = __future__.annotations.compiler_flag
    tree = ast.parse(source.replace(edit.old, edit.new))
    for transform in transforms:
        tree = transform(tree)
    code = compile(tree, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    namespace: dict[str, Any] = {}
    exec(code, function.__globals__, namespace)
    new: Callable[..., Any] = namespace[edit.function]
    return new


@contextmanager
def _replaced(owner: Any, name: str, new: object) -> Iterator[None]:
    old = vars(owner)[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


_TWO_HOLDERS = ("P1", "P5")
_MEMORY = dibs.stores.memory

BUGS = (
    Bug(
        "trust counted from the reply",
        _TWO_HOLDERS,
        130,
        (
            Edit(
                AcquireAsk,
                "_granted",
                "t0 = self._session, self.request, self.terms, self.t0\n",
                "t0 = self._session, self.request, self.terms, self._session.clock.now()\n",
            ),
        ),
    ),
    Bug(
        "trust counted from the retry that was answered",
        _TWO_HOLDERS,
        1000,
        (
            # Only a store that does not count a repeated acquire as a renewal makes it show.
            Edit(
                _MEMORY,
                "_acquire",
                "permit.info = request.info\n",
                "permit.info = request.info\n"
                "        if mine:\n"
                "            return Granted(permit.fencing_token, permit.acquired_at + shelf.wall_offset)\n",
            ),
            Edit(Lane, "_carry", "if ask.t0 is None:", "if True:"),
        ),
    ),
    Bug(
        "a renewal's trust counted from its reply",
        _TWO_HOLDERS,
        650,
        (Edit(Renewer, "_extend", "local_deadline(t0, ttl", "local_deadline(now, ttl"),),
    ),
    Bug(
        "a renewal that timed out taken for a success",
        _TWO_HOLDERS,
        2000,
        (
            Edit(
                Renewer,
                "_call",
                "answers = [without_frames(error)] * len(which)",
                "answers = [__import__('dibs.store').store.Renewed(0.0)] * len(which)",
            ),
        ),
    ),
    Bug(
        "clock rates ignored: trust lasts the whole ttl",
        _TWO_HOLDERS,
        60,
        (Value(dibs.trust, "DRIFT", 0.0),),
    ),
    Bug(
        "trust counted on a clock that stops while the machine sleeps",
        _TWO_HOLDERS,
        180,
        (Edit(SimClock, "boot", "self._world.now", "self._process.awake_s()"),),
    ),
    Bug(
        "expiry ignored by the holder",
        _TWO_HOLDERS,
        110,
        (
            Edit(
                Keeper,
                "is_held",
                "return self._clock.now() < hold.trusted_until or not self.expire(hold)",
                "return True",
            ),
        ),
    ),
    Bug(
        "an expired grant accepted",
        ("P6",),
        80,
        (
            # Twice: acquire looks again before it returns what was granted.
            Edit(AcquireAsk, "_granted", "now < t0 + terms.trust_s", "True"),
            Edit(Session, "made", "hold.state == HELD and self.clock.now() < hold.trusted_until", "True"),
        ),
    ),
    Bug(
        "a lost lease revived by a late renewal",
        ("P6",),
        900,
        (Edit(Renewer, "_extend", "if now < hold.trusted_until:", "if True:"),),
    ),
    Bug(
        "release without the claim id",
        ("P8", *_TWO_HOLDERS),
        20,
        (
            Edit(
                _MEMORY,
                "_act",
                "permit.claim_id != request.claim_id",
                "(isinstance(request, Renew) and permit.claim_id != request.claim_id)",
            ),
        ),
    ),
    Bug(
        "renewal by anybody",
        ("P8", *_TWO_HOLDERS),
        140,
        (
            Edit(
                _MEMORY,
                "_act",
                "permit.claim_id != request.claim_id",
                "(isinstance(request, Release) and permit.claim_id != request.claim_id)",
            ),
        ),
    ),
    Bug(
        "the store grants before the expiry",
        _TWO_HOLDERS,
        40,
        (Edit(_MEMORY, "_acquire", "permit.expires_at <= now\n", "permit.expires_at <= now + 0.3\n"),),
    ),
    Bug(
        "the token not raised at a takeover",
        ("P2",),
        20,
        (Edit(_MEMORY, "_acquire", "permit.fencing_token += 1", "permit.fencing_token += permit.claim_id is None"),),
    ),
    Bug(
        "a purge that drops the floor under the tokens",
        ("P2",),
        450,
        (
            Edit(
                MemoryStore,
                "purge",
                "shelf.token_floor = max(shelf.token_floor, shelf.permits.pop(name).fencing_token)",
                "shelf.permits.pop(name)",
            ),
        ),
    ),
    Bug(
        "an exporter that goes on trusting its lease",
        _TWO_HOLDERS,
        40,
        (Edit(Keeper, "is_held", "if hold.state != HELD or", "if (hold.state != HELD and not hold.exported) or"),),
    ),
    Bug(
        "a transfer under the old token",
        ("P2",),
        40,
        (Edit(_MEMORY, "_transfer", "last.fencing_token + 1", "last.fencing_token"),),
    ),
    Bug(
        "a transfer from whoever holds it",
        ("P8", *_TWO_HOLDERS),
        60,
        (Edit(_MEMORY, "_transfer", "permit.claim_id not in (request.claim_id, request.from_claim)", "False"),),
    ),
    Bug(
        "an export that does not wait for the renewal under way",
        ("P10",),
        92,
        (Edit(Keeper, "_part_with", "hold.after_renewal = ask", "ask.settle(None)"),),
    ),
    Bug(
        "a new claim id for a retry",
        ("P9", *_TWO_HOLDERS),
        60,
        (
            Edit(
                Lane,
                "_repeat",
                "again.append(ask)",
                "again.append(ask)\n"
                "            if hasattr(ask.request, 'wake'):\n"
                "                ask.request = ask.request._replace(claim_id=ask.request.claim_id + '+')",
            ),
        ),
    ),
    Bug(
        "a withdrawn ask whose grant is kept",
        ("P9",),
        70,
        (Edit(Session, "_withdraw", "if ask.hold is None and", "if False and"),),
    ),
    Bug(
        "what gives back a grant left lying in the lane",
        ("P9 something lies",),
        28,
        (Edit(Session, "_withdraw", "self.lane.start()", "pass"),),
    ),
    Bug(
        "a hold that nobody was given, kept and renewed",
        ("P9", "P7"),
        2700,
        (
            Edit(Session, "_withdraw", "self.keeper.give_back(*holds)", "pass"),
            Edit(Renewer, "_sort", "not hold.given", "False"),
        ),
    ),
    Bug(
        "an answer that needs a thread, and ends the one that brings it",
        ("the thread",),
        70,
        (Edit(Lane, "_perform", "ask.failed(without_frames(error))", "raise"),),
    ),
    Bug(
        "nobody serves where no thread can be had",
        ("liveness", "P7"),
        200,
        (Edit(Lane, "start", "self.drive(None)", "pass"),),
    ),
    Bug(
        "a loss that needs a thread to be told",
        ("the thread",),
        150,
        (Edit(Keeper, "_tell_loss", 'aside(self._clock, "dibs-on-lost"', 'self._clock.spawn("dibs-on-lost"'),),
    ),
    Bug(
        "a release that does not wait for the renewal under way",
        ("P10",),
        2900,
        (Edit(Renewer, "forget", "return hold.in_flight", "return False"),),
    ),
    Bug(
        "a renewal for less time that is not followed by another",
        ("renewal",),
        1440,
        (Edit(Renewer, "track", "if terms.renew and hold.trusted_until - trust_s > t0 + ROUNDING_S:", "if False:"),),
    ),
    Bug(
        "a min_hold of which a release leaves half",
        ("min_hold",),
        1320,
        (Edit(Keeper, "_end", "hold.t0 + hold.terms.min_hold - now", "(hold.t0 + hold.terms.min_hold - now) / 2"),),
    ),
    Bug(
        "who does not wait is refused, whatever the store has said",
        ("accuracy",),
        210,
        (Edit(LockCore, "obtain", "if session.made(lease, hold):", "if limit_s != 0 and session.made(lease, hold):"),),
    ),
    Bug(
        "a call that is given no time",
        ("accuracy",),
        280,
        (Edit(Lane, "_carry", "self._deadline.at = now + self._request_timeout_s", "self._deadline.at = now + 0.02"),),
    ),
    Bug(
        "a client that is closed and forgets one of its leases",
        ("P9",),
        1000,
        (Edit(Keeper, "close", "if hold.state == HELD]", "if hold.state == HELD][1:]"),),
    ),
    Bug(
        "a release that was confirmed and says that it was not",
        ("P8",),
        70,
        (Edit(LeaseFacts, "_releasing", "type(ask.outcome) is Released or self._confirmed(ask)", "False"),),
    ),
    Bug(
        "a release that takes its lease for lost",
        ("P4",),
        20,
        (Edit(Keeper, "release", "late = hold.state != HELD or now >= hold.trusted_until", "late = True"),),
    ),
    Bug("the connection of renewals left open", ("residue",), 20, (Edit(Renewer, "_run", "store.close()", "pass"),)),
    Bug("a watch left open", ("residue",), 20, (Edit(Hints, "close", "_close(self._store)", "pass"),)),
    Bug(
        "a thread that waits on with nobody to wait for",
        ("residue",),
        20,
        (Edit(Waiting, "_run", "now - busy_at >= IDLE_S", "False"),),
    ),
    Bug(
        "hints lost, and no poll",
        ("P7",),
        20,
        (Edit(Waiting, "fall_asleep", "min(free_in, pause, held.again_in)", "60.0"),),
    ),
    Bug(
        "a dead waiter keeps the line for ever",
        ("P7",),
        80,
        (Edit(_MEMORY, "_alive", "return now <", "return True or now <"),),
    ),
    Bug(
        "the last to come is the first to be served",
        ("P13",),
        50,
        (Edit(_MEMORY, "_acquire", "waiter.ticket < ticket and", "waiter.ticket > ticket and"),),
    ),
    Bug(
        "an interrupted thread stays the one that serves the lane",
        ("P7", "liveness"),
        200,
        (Edit(Lane, "drive", "            self._server = None\n", "            pass\n"),),
    ),
    Bug(
        "a loss of which the store is told before the holder",
        ("P5",),
        20,
        (Edit(Keeper, "_tell_loss", "if not hold.loud:", "if True:"),),
    ),
    Bug(
        "a loss that is not told",
        ("loss", "P4"),
        20,
        (Edit(Keeper, "_tell_loss", "if on_lost is None:", "if True:"),),
    ),
)

_POOL = dibs.stores.memory._Pool
_TOO_MANY = ("P14", "P15", "P5")

# In worlds of permits.
PERMIT_BUGS = (
    Bug(
        "a downgrade without an answer that gives back what was lost",
        ("P5",),
        1400,
        (Edit(Reduction, "failed", "self._hold.let_go", "self._hold.state != HELD"),),
    ),
    Bug(
        "permits given out before they expire",
        _TOO_MANY,
        40,
        (Edit(_POOL, "look", "permit.expires_at <= now", "permit.expires_at <= now + 0.3"),),
    ),
    Bug(
        "permits counted for ever",
        ("P7",),
        20,
        (Edit(_POOL, "look", "permit.expires_at <= now", "permit.expires_at <= now - 60"),),
    ),
    Bug(
        "one permit too many",
        ("P13", *_TOO_MANY),
        20,
        (Edit(_MEMORY, "decide", "if left - kept >= request.take:", "if left - kept >= request.take - 1:"),),
    ),
    Bug(
        "waiters ahead ignored",
        ("P13", "P15"),
        20,
        (Edit(_MEMORY, "decide", "if left - kept >= request.take:", "if left >= request.take:"),),
    ),
    Bug(
        "dead waiters never passed",
        ("P7",),
        190,
        (Edit(_MEMORY, "decide", "and waiter.silent_for < LINE_GRACE_S", ""),),
    ),
    Bug(
        "another limit obeyed",
        _TOO_MANY,
        110,
        (Edit(_MEMORY, "decide", "if other and mine is None and (", "if False and ("),),
    ),
    Bug(
        "a slot given twice",
        ("P14", "P5"),
        20,
        (Edit(_MEMORY, "decide", "if number not in taken)", "if number not in taken or number == 2)"),),
    ),
    Bug(
        "a token for each slot",
        ("P2",),
        20,
        (Edit(_MEMORY, "decide", "state.fencing_token + 1, None", "slot, None"),),
    ),
    Bug(
        "a withdrawn acquire undone for the first slot only",
        ("P9",),
        4300,
        (Edit(AcquireAsk, "undoing", "slot = ANY_SLOT if request.permits else 1", "slot = 1"),),
    ),
    Bug(
        "a downgrade that takes the name again",
        ("P9",),
        2400,
        (Edit(Reduction, "_undo", "session.lane.put(", "(lambda ask: None)("),),
    ),
    Bug(
        "a purge that drops the floor under the tokens of permits",
        ("P2",),
        350,
        (
            Edit(
                MemoryStore,
                "purge",
                "shelf.token_floor = max(shelf.token_floor, shelf.pools.pop(name).fencing_token)",
                "shelf.pools.pop(name)",
            ),
        ),
    ),
    Bug(
        "a transfer of permits under the old token",
        ("P2",),
        40,
        (Edit(_MEMORY, "_transfer", "last.fencing_token + 1", "last.fencing_token"),),
    ),
    Bug(
        "a transfer whose token the next grant gets again",
        ("P2",),
        70,
        (Edit(_MEMORY, "_transfer", "last.fencing_token = last.fencing_token + 1", "last.fencing_token + 1"),),
    ),
    Bug(
        "a transfer of permits from whoever has the slot",
        ("P8", *_TOO_MANY),
        360,
        (Edit(_MEMORY, "_transfer", "permit.claim_id not in (request.claim_id, request.from_claim)", "False"),),
    ),
    Bug(
        "an exporter that goes on trusting its permits",
        _TOO_MANY,
        50,
        (Edit(Keeper, "is_held", "if hold.state != HELD or", "if (hold.state != HELD and not hold.exported) or"),),
    ),
    Bug(
        "a downgraded lease exported as that of a writer",
        _TOO_MANY,
        30,
        (Edit(dibs.rwlock, "give_back_some", "hold.terms = hold.terms._replace(take=take)", "hold.terms"),),
    ),
)

# Found in worlds in which the store's clock is set, and leases are watched.
STEP_BUGS = (
    Bug(
        "a watch that trusts its own clock to the second",
        ("P5",),
        550,
        (Value(dibs.observing, "watched_for", lambda ttl: ttl),),
    ),
    Bug(
        "a watch as long as the watcher's own ttl",
        ("P5",),
        25,
        (Edit(Observing, "_seen", "_taken_apart(row.holder)", '_taken_apart("any;ttl=1.0")'),),
    ),
    Bug(
        "a watch that begins when it asked and not when it was answered",
        ("P5",),
        1100,
        (Edit(Observing, "_seen", "now = self._now()", "now = self._now() - 0.1"),),
    ),
    Bug(
        "a renewal that leaves the end where it was when the clock went back",
        ("P5",),
        240,
        (Value(_MEMORY, "RENEWED_S", 0.0),),
    ),
    Bug(
        "an end of whatever lease has this token",
        ("P5",),
        150,
        (Edit(MemoryStore, "end_unchanged", "permit.expires_at + shelf.wall_offset != expires_at", "False"),),
    ),
    Bug(
        "a renewal for longer than those who watch know of",
        ("P5",),
        700,
        (Edit(LeaseFacts, "_renewing", "session.address.observed and", "False and"),),
    ),
)
