"""A private ZooKeeper, alone or as one of an ensemble, with short ticks so that sessions end soon."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.servers.process import ServerProcess, ServerUnavailable, free_port, wait_until
from tests.servers.server import Server, find_program

JARS = Path("/usr/share/java")
TICK_MS = 200
SESSION_MAX_MS = 120_000
# A small, quick virtual machine; what it has to say in case of trouble goes to the log.
JAVA_OPTIONS = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dzookeeper.preAllocSize=4096",  # KiB of log laid out in advance, not 64 MiB
)
ANSWER_LIMIT_S = 2.0


def java_command(config: Path, options: Sequence[str] = ()) -> list[str | os.PathLike[str]]:
    """The command that runs a server in the foreground."""
    java = find_program("java", package="zookeeper")
    # The jar names the others it needs in its manifest, but for two that TLS needs; one more prints messages.
    jars = [JARS / f"{name}.jar" for name in ("zookeeper", "netty-codec", "netty-resolver", "slf4j-simple")]
    if not jars[0].exists():
        raise ServerUnavailable("ZooKeeper is not on this machine; `make test` installs Debian's package zookeeper")
    path = ":".join(str(jar) for jar in jars)
    main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
    return [java, *JAVA_OPTIONS, *options, "-cp", path, main, config]


def ask(port: int, word: str) -> str:
    """What the server on this port answers to one of its four letter words; nothing while it does not."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_LIMIT_S) as connection:
            connection.settimeout(ANSWER_LIMIT_S)
            connection.sendall(word.encode())
            answer = b""
            while chunk := connection.recv(8192):
                answer += chunk
            return answer.decode()
    except OSError:
        return ""


class ZooKeeperServer(Server):
    """A ZooKeeper of the tests' own on 127.0.0.1, durable as shipped. `settings` are further lines of its zoo.cfg."""

    NAME = "ZooKeeper"

    def __init__(self, settings: Mapping[str, object] | None = None, *, secure: bool = False) -> None:
        self._settings = {"tickTime": TICK_MS, "maxSessionTimeout": SESSION_MAX_MS, **(settings or {})}
        self._secure = secure
        #: Of the secureClientPort, where there is one.
        self.secure_port = 0
        self._roots = 0
        super().__init__()

    def url(self, root: str = "/dibs", *, login: str = "", options: str = "", secure: bool = False) -> str:
        """A URL of the nodes under ``root``; ``login`` is user:password."""
        at = f"{login}@" if login else ""
        ticks = f"tickTime={self._settings['tickTime']}&maxSessionTimeout={self._settings['maxSessionTimeout']}"
        port = self.secure_port if secure else self.port
        return f"zookeeper://{at}127.0.0.1:{port}{root}?{ticks}{'&' + options if options else ''}"

    def create_root(self) -> str:
        """The URL of a place that nobody has used."""
        self._roots += 1
        return self.url(f"/test_{self._roots}")

    def facts(self) -> dict[str, str]:
        said = dict(line.partition(": ")[::2] for line in ask(self.port, "srvr").splitlines())
        return {"ZooKeeper": said.get("Zookeeper version", "?").partition("-")[0] + ", forceSync as shipped"}

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        if self._secure and not self.secure_port:
            self.secure_port = free_port()
        lines: dict[str, object] = {
            "dataDir": self.folder / "data",
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "ruok,srvr,conf",
            **({"secureClientPort": self.secure_port} if self._secure else {}),
            **self._settings,
        }
        config = self.folder / "zoo.cfg"
        config.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        config.chmod(0o644)
        return java_command(config)

    def _answers(self) -> bool:
        return "Mode: " in ask(self.port, "srvr")


class Ensemble:
    """Three servers that agree; each can be killed and paused by itself."""

    SIZE = 3

    def __init__(self) -> None:
        self.servers: list[ServerProcess] = []
        self.ports = [free_port() for _ in range(self.SIZE)]
        peers = [(free_port(), free_port()) for _ in range(self.SIZE)]
        try:
            for number in range(self.SIZE):
                server = ServerProcess(f"ZooKeeper {number + 1} of {self.SIZE}", polite_signal=signal.SIGTERM)
                self.servers.append(server)
                data = server.folder / "data"
                server.run_tool(["mkdir", data])
                config = server.folder / "zoo.cfg"
                lines: dict[str, Any] = {
                    "tickTime": TICK_MS,
                    "initLimit": 25,
                    "syncLimit": 10,
                    "maxSessionTimeout": SESSION_MAX_MS,
                    "dataDir": data,
                    "clientPort": self.ports[number],
                    "clientPortAddress": "127.0.0.1",
                    "maxClientCnxns": 0,
                    "admin.enableServer": "false",
                    "4lw.commands.whitelist": "ruok,srvr,conf",
                }
                lines |= {f"server.{n + 1}": f"127.0.0.1:{one}:{two}" for n, (one, two) in enumerate(peers)}
                config.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
                config.chmod(0o644)
                server.run_tool(["sh", "-c", f"echo {number + 1} > {data}/myid"])
                self.start(number)
            if not wait_until(lambda: len(self.modes()) == self.SIZE, 60):
                raise ServerUnavailable(f"no ensemble in 60 s: {self.servers[0].log_tail()}")
        except BaseException:
            self.close()
            raise

    def start(self, number: int) -> None:
        self.servers[number].spawn(java_command(self.servers[number].folder / "zoo.cfg"))

    def modes(self) -> dict[int, str]:
        """Who of those that answer is "leader" or "follower"."""
        modes = {}
        for number, port in enumerate(self.ports):
            _, found, rest = ask(port, "srvr").partition("Mode: ")
            if found:
                modes[number] = rest.split()[0]
        return modes

    def url(self, root: str = "/dibs") -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"zookeeper://{hosts}{root}?tickTime={TICK_MS}&maxSessionTimeout={SESSION_MAX_MS}"

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def __enter__(self) -> Ensemble:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tls_settings(pem: Path) -> dict[str, object]:
    """What a server with a secure port needs: ``pem`` holds its key and its certificate, and is its authority, too."""
    return {
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": pem,
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": pem,
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "none",
    }
