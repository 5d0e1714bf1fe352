"""What is promised of a lease while it lives, where one thread is interrupted and another goes on for it."""

from __future__ import annotations

import itertools

import pytest

from dibs.hold import HELD, Hold
from dibs.store import Granted
from tests.between import Between
from tests.test_api import eventually

numbers = itertools.count()


@pytest.fixture
def between() -> Between:
    """A place between clients and a memory store of this test."""
    return Between(f"memory://session-{next(numbers)}")


def test_a_grant_too_old_to_trust_is_given_out_once(between: Between) -> None:
    """After a Ctrl-C an answer may be given out twice; one that is asked for anew by then is left on its way."""
    with between.client(ttl=5) as client:
        session = client._desk.session()
        ask = session.wish("default:old", client.lock("old")._core.terms, "me", blocking=True)
        first = ask.request.claim_id
        with session.mutex:
            session.waiting.enter(ask)
            session.lane._queue.clear()
            ask.t0 = session.clock.now() - 60
            for _ in range(2):
                ask.in_lane = False
                ask.received(Granted(1, 0.0))
                assert ask.in_lane
        session.lane.start()
        eventually(lambda: ask.settled, "no answer")
        assert isinstance(ask.outcome, Hold)
        assert ask.outcome.state == HELD
        assert ask.outcome.claim_id != first
        session.withdraw(ask)
