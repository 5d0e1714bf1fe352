"""What is left when everything is over: a client with nothing to do keeps one connection, and no thread.

What is opened is counted as it is opened and closed: threads, what they sleep on, connections, watches. A fault, a
Ctrl-C or a cancellation on the way must not leave any of it behind, where nobody would close it any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dibs.lane
import dibs.notes
import dibs.renewer
import dibs.waiting

if TYPE_CHECKING:
    from dibs.session import Session
    from tests.simulation.network import Network
    from tests.simulation.world import World

# Threads that have nothing to do end after this, on the slowest clock; they begin to wait when what they did is over.
IDLE_S = max(dibs.lane.IDLE_S, dibs.notes.IDLE_S, dibs.renewer.IDLE_S, dibs.waiting.IDLE_S) / 0.95
ENDED_AFTER_S = 2 * IDLE_S + 2.0
# What is taken out when the next comes by: where a thread could not be begun, or a Ctrl-C came in between.
LEFT_TO_THE_NEXT = ("others", "renewals", "sleepers")


def look_for_residue(world: World, network: Network) -> None:
    """Let everything come to its end; raises BrokenPromise when something does not."""
    world.run_for(ENDED_AFTER_S)
    for process, session in network.checker.lanes.clients():
        if process.dead:
            continue
        threads = [task.name for task in world.tasks if task.process is process and not task.over]
        if threads:
            world.broken(f"residue: {process.name} has nothing to do, and its threads {', '.join(threads)} go on")
        if process.bells:
            world.broken(f"residue: {len(process.bells)} bells of {process.name} were not closed")
        for name, left in _remembered(session).items():
            if left and not (name in LEFT_TO_THE_NEXT and (process.starved_until or process.interrupted)):
                world.broken(f"residue: {process.name} remembers in {name} what is over: {left!r}")
        kept = 0 if session.closed else 1
        if len(process.connections) > kept:
            world.broken(f"residue: {process.name} has {len(process.connections)} connections open, not {kept}")
    watches = [hints for hints in network.listeners if not hints.process.dead]
    if watches:
        world.broken(f"residue: {len(watches)} watches are open, and nobody waits")


def _remembered(session: Session) -> dict[str, Any]:
    """What a client knows of that is under way: holds, waiters, requests."""
    holdings, waiting, renewer, lane = session.holdings, session.waiting, session.renewer, session.lane
    notes, along = session.rings._notes, waiting._along
    return {
        "held": holdings.held,
        "owned": holdings.owned,
        "shares": holdings.shares,
        "first": waiting._first,
        "behind": waiting._behind,
        "others": waiting._others,
        "asleep": waiting._asleep,
        "overdue": waiting._overdue.asks,
        "sleepers": waiting._heap,
        "went_well": None if along is None else along._went_well,
        "room": None if along is None else along._room,
        "renewals": [*renewer._queues.values(), *renewer._heap],
        "renewing": [*renewer._batch, *renewer._unwanted, *renewer._meanwhile],
        "asks": [ask for ask in (*lane.pending.asks, *lane.pending.later, *lane._batch) if not ask.dropped],
        "notes": None if notes is None else notes._waiters,
    }
