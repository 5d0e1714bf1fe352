"""When a command that runs under a lease is told to end, and killed, by the time that the lease is still trusted."""

from __future__ import annotations

from dibs.trust import DRIFT, RENEWALS_PER_TTL

GRACE_DEFAULT_S = 10.0
# The grace lies inside the trusted time, so it takes from the time in which renewals may fail without harm. At most
# this part of the ttl, so that the third attempt at a renewal is still made before TERM is sent.
GRACE_PART_MAX = 0.25
assert (RENEWALS_PER_TTL - 1) / RENEWALS_PER_TTL < 1 - DRIFT - GRACE_PART_MAX
# KILL is sent this long before the trust ends: a process needs a moment to be woken, and another one to die.
LAST_MOMENT_S = 0.02
LAST_MOMENT_PART_MAX = 0.02
# The lease is looked at this often in a ttl, to tell the guard of renewals.
LOOKS_PER_TTL = 8
# How often to look whether a group that is being stopped is gone.
GONE_LOOK_S = 0.01
# How long to wait for killed processes to disappear. They run no more; but where process 1 does not collect the dead
# (some containers) they stay listed for ever.
DEAD_WAIT_S = 0.5
