"""A private memcached."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from tests.servers.server import Server, find_program


class MemcachedServer(Server):
    """A memcached of the tests' own on 127.0.0.1, without UDP.

    `options` go on its command line, after the general ones; `files` are put into its folder, which it starts in.
    `quiet` is one that wants TLS or a password before it answers.
    """

    NAME = "memcached"
    PORT_TAKEN = b"Address already in use"
    MEMORY_MB = 64

    def __init__(
        self, options: Sequence[str] = (), *, files: Mapping[str, str] | None = None, quiet: bool = False
    ) -> None:
        self.program = find_program("memcached", package="memcached")
        self._options = list(options)
        self._files = dict(files or {})
        self._quiet = quiet
        super().__init__()

    def url(self) -> str:
        return f"memcached://127.0.0.1:{self.port}"

    def ask(self, command: str) -> list[str]:
        """Send one command on a connection made for it; the lines of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(command.encode() + b"\r\nmn\r\n")
            answer = b""
            while not answer.endswith(b"MN\r\n"):
                received = connection.recv(65536)
                if not received:
                    raise ConnectionError("memcached closed the connection")
                answer += received
        return answer.decode().split("\r\n")[:-2]

    def facts(self) -> dict[str, str]:
        stats = dict(line.split(" ", 2)[1:] for line in self.ask("stats") if line.startswith("STAT "))
        return {"memcached": f"{stats['version']}, -m {self.MEMORY_MB}, {stats['threads']} threads"}

    def _prepare(self) -> None:
        for name, text in self._files.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o644)  # for the server's user; nobody else can enter the folder

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        # Without a file of its own, one that wants logins by SASL (-S) does not start.
        command = ["env", f"SASL_CONF_PATH={self.folder}", self.program, "-l", "127.0.0.1", "-p", str(self.port)]
        return [*command, "-U", "0", "-m", str(self.MEMORY_MB), *self._options]

    def _answers(self) -> bool:
        try:
            if self._quiet:
                socket.create_connection(("127.0.0.1", self.port), timeout=10).close()
                return True
            return self.ask("version")[0].startswith("VERSION ")
        except OSError:
            return False
