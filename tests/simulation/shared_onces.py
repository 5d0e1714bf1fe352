"""Worlds in which threads share works that are to be done once: they enter them, or begin runs of them.

All is checked that is checked of works that are done once, and of leases whose ``on_lost`` is several threads'.
"""

from __future__ import annotations

from dibs.errors import LockTimeout
from dibs.once import Once, OnceCore, OnceRun, once_options
from dibs.owners import this_thread
from tests.simulation.onces import KEEPS_S, OnceChecker, OnceProgram
from tests.simulation.programs import NAMES, TTLS_S, SimLease
from tests.simulation.several import SeveralChecker


class SharedOnceProgram(OnceProgram):
    checker: SharedOnceChecker

    def _round(self) -> None:
        rand = self.world.random
        once = self._shared(NAMES[int(rand() * self.habits.names)])
        core, timeout = once._core, once._core.terms.timeout
        self._maybe_interrupt()
        if rand() < 0.5:
            begun = self._begin(core, timeout, core.enter(this_thread()), *(() if timeout is None else (LockTimeout,)))
            if begun is not None and begun:
                self._do(once, begun, [])
            elif begun is not None:
                once.__exit__(None)
        else:
            timeout = 0.0 if rand() < 0.5 else timeout
            begun = self._begin(core, timeout, core.begin(this_thread(), timeout))
            if begun is not None and begun:
                self._do(begun, begun, [])

    def _shared(self, name: str) -> Once:
        """The work of that name which all threads of the process have."""
        rand, checker = self.world.random, self.checker
        once = self.host.onces.get(name)
        if once is None:

            def on_lost() -> None:
                checker.told_lost(on_lost)

            ttl, keep_s = TTLS_S[int(rand() * len(TTLS_S))], KEEPS_S[int(rand() * len(KEEPS_S))]
            timeout = None if rand() < self.habits.patience else 3.0 * rand()
            max_hold = self.world.max_hold()
            options = once_options(self.host.desk, keep_s, True, ttl, timeout, max_hold, on_lost, "raise", None)
            once = self.host.onces[name] = Once(OnceCore(self.host.desk, name, None, options, SimLease, OnceRun))
        return once


class SharedOnceChecker(SeveralChecker, OnceChecker):
    """Both."""
