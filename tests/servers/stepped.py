"""Private servers whose wall clock can be set, with libfaketime between them and the C library.

(Not Redis: its allocator asks for the time before libfaketime is ready to answer.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.process import ServerUnavailable
from tests.servers.server import Server


def find_library() -> Path:
    """libfaketime, where Debian and others put it."""
    for place in ("*/faketime", "faketime"):
        for path in Path("/usr/lib").glob(f"{place}/libfaketime.so.1"):
            return path
    raise ServerUnavailable("libfaketime is not installed: `make setup-test` installs Debian's package libfaketime")


class Stepped(Server):
    """A server on a clock that `step` sets, forward or back; its monotonic clock goes on as it does everywhere."""

    def _prepare(self) -> None:
        super()._prepare()
        self._stepped_s = 0.0
        self._library = find_library()
        self._clock.write_text("+0\n")
        os.chmod(self._clock, 0o644)

    @property
    def _clock(self) -> Path:
        return self.folder / "clock"

    def step(self, seconds: float) -> None:
        """Set its wall clock by so many seconds, all at once."""
        self._stepped_s += seconds
        new = self._clock.with_suffix(".new")
        new.write_text(f"{self._stepped_s:+.3f}\n")
        os.chmod(new, 0o644)
        new.replace(self._clock)  # never read half written

    def _on_that_clock(self) -> list[str]:
        """What a command begins with whose wall clock is that of the file."""
        settings = {
            "LD_PRELOAD": self._library,
            "FAKETIME_TIMESTAMP_FILE": self._clock,
            "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1,
        }
        return ["/usr/bin/env", *(f"{name}={value}" for name, value in settings.items())]


class SteppedPostgres(Stepped, PostgresServer):
    def _command(self) -> Sequence[str | os.PathLike[str]]:
        return [*self._on_that_clock(), *super()._command()]


class SteppedMariaDB(Stepped, MariaDBServer):
    def _command(self) -> Sequence[str]:
        return [*self._on_that_clock(), *super()._command()]
