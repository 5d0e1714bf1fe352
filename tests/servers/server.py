"""What every private server can do: start on a free port and keep it, stop, be killed and paused, and be closed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tests.servers import process
from tests.servers.process import PORT_TRIES, START_LIMIT_S, ServerProcess, ServerUnavailable, free_port, wait_until

S = TypeVar("S", bound="Server")

# Where Debian puts programs, some of which are not on the PATH of those who are not root.
PLACES = ("/usr/bin", "/usr/sbin", "/usr/local/bin")

_in_use: set[Server] = set()
_fallen: list[tuple[float, str]] = []  # when each was closed, and its last words


class Server(ABC):
    """One server on 127.0.0.1, in a private folder. It keeps its port and data through `stop`, `kill` and `start`.

    A kind of server says how it is prepared (`_prepare`), started (`_command`) and asked whether it answers
    (`_answers`). `close()` ends it for good.
    """

    NAME: str
    #: What ends it quickly and cleanly.
    POLITE_SIGNAL = signal.SIGTERM
    #: What its log says when another program has its port.
    PORT_TAKEN = b"ddress already in use"
    #: For how long it may be starting, also on a machine that is busy.
    START_LIMIT_S = START_LIMIT_S

    def __init__(self) -> None:
        self.process = ServerProcess(self.NAME, polite_signal=self.POLITE_SIGNAL)
        self.folder = self.process.folder
        self.port = 0
        _in_use.add(self)
        try:
            self._prepare()
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def facts(self) -> dict[str, str]:
        """Its version and the settings that figures measured on it depend on, for `benchmarks`."""
        return {}

    # What a kind of server is

    def _prepare(self) -> None:  # noqa: B027 - most need nothing
        """Make what it needs in its folder, once."""

    def _before_start(self) -> None:  # noqa: B027 - the same
        """Clear away what a killed run left."""

    @abstractmethod
    def _command(self) -> Sequence[str | os.PathLike[str]]:
        """The command that runs it in the foreground on `self.port`."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it serves requests; False, not an exception, while it does not."""

    # What can happen to it

    def start(self) -> None:
        """Start it again on its port, after `stop` or `kill`, and wait until it answers."""
        # Another program may have the port for a moment. URLs in use name it, so it cannot change.
        if not wait_until(self._try_to_start, process.PORT_PATIENCE_S):
            raise ServerUnavailable(f"port {self.port} was taken by another program")

    def stop(self) -> None:
        """End it as an operator would."""
        self.process.end(self.POLITE_SIGNAL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def kill(self) -> None:
        """SIGKILL to the server and all its processes; `start` brings it back with what was durable."""
        self.process.kill()

    def pause(self) -> None:
        """Freeze it, connections and all, until `resume`."""
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Frozen inside the `with` block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def close(self) -> None:
        """End it and remove all its data. Twice is fine."""
        _in_use.discard(self)
        if self.process.fell:
            _fallen.append((time.monotonic(), self._epitaph()))
        self.process.close()

    def _epitaph(self) -> str:
        return f"{self.NAME} ended by itself; its log says at the end:\n{self.process.log_tail(60)}\n"

    # How it starts

    def _start_on_a_free_port(self) -> None:
        for _ in range(PORT_TRIES):
            self.port = free_port()
            if self._try_to_start():
                return
        raise ServerUnavailable(f"{PORT_TRIES} ports in turn were taken by other programs before {self.NAME} had them")

    def _try_to_start(self) -> bool:
        """True when it answers, False when the port was taken; anything else is an error."""
        if not self.process.processes():
            self._before_start()
        log_start = self.process.log_path.stat().st_size if self.process.log_path.exists() else 0
        self.process.spawn(self._command())
        answered = wait_until(lambda: self._answers() or not self.process.running, self.START_LIMIT_S)
        if self.process.running:
            if answered:
                return True
            self.kill()
            late = f"{self.NAME} did not answer in {self.START_LIMIT_S:g} s"
            raise ServerUnavailable(f"{late}\n{self.process.log_tail()}")
        if self.PORT_TAKEN in self.process.log_path.read_bytes()[log_start:]:
            return False
        raise ServerUnavailable(f"{self.NAME} ended while it was starting\n{self.process.log_tail()}")


def ended_by_themselves(since: float) -> list[str]:
    """What servers of this process did so: those closed since then, and those in use, which are started again."""
    fallen = [words for closed, words in _fallen if closed >= since]
    for server in [server for server in _in_use if server.process.fell]:
        fallen.append(server._epitaph())
        with contextlib.suppress(ServerUnavailable):  # what needs it will fail, and is told why
            server.start()
    return fallen


def find_program(*names: str, package: str) -> str:
    """The path of a server's program, the first of these names that is there: on PATH, else where Debian puts it.

    Names in the environment variable DIBS_TEST_WITH go before others: ``DIBS_TEST_WITH="mysqld valkey-server"``.
    """
    preferred = os.environ.get("DIBS_TEST_WITH", "").split()
    for name in sorted(names, key=lambda name: name not in preferred):
        for folder in [*os.environ.get("PATH", os.defpath).split(os.pathsep), *PLACES]:
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK) and os.path.isfile(path):
                return path
    raise ServerUnavailable(
        f"{' or '.join(names)} is not on this machine; "
        f"`make test` installs Debian's package {package} as root or with sudo"
    )
