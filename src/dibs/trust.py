"""How long a holder may believe in its lease: the one inequality that exclusion rests on.

The store lets nobody else in before ``granted + ttl`` on its clock. The holder read ``t0`` on its own clock before
the first byte of the first attempt left, so ``t0`` is before ``granted``. While it counts ``d`` seconds, the store
counts at most ``d / (1 - DRIFT)``; hence trust that ends at ``t0 + ttl * (1 - DRIFT) - margin`` ends before the
store's expiry. A renewal moves the end by the same formula with its own ``t0``; a time-out or an unknown result
never moves it.
"""

from __future__ import annotations

DRIFT = 0.05
RENEWALS_PER_TTL = 3
# By which sums of the same moments may differ, and more.
ROUNDING_S = 1e-3


def local_deadline(t0: float, ttl: float, margin: float) -> float:
    """The boot-clock time at which a lease asked for at ``t0`` stops being trusted."""
    return t0 + ttl * (1.0 - DRIFT) - margin


def watched_for(ttl: float) -> float:
    """How long somebody else counts before it may take that trust for over, from an answer that still shows the lease.

    Its own clock may be as much too fast as the holder's is too slow.
    """
    return ttl * (1.0 + DRIFT)


# Two renewals can fail before trust ends: the third attempt starts at 2/3 of the ttl, before 0.95 of it.
assert 2 / RENEWALS_PER_TTL < 1 - DRIFT
