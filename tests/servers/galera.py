"""A private Galera cluster: nodes of MariaDB that all take writes, and certify them among each other."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from itertools import cycle
from pathlib import Path

import pymysql

from tests.servers.mysql import MariaDBServer
from tests.servers.process import ServerUnavailable, free_port, wait_until

# Where packages put the library that does it.
PROVIDERS = ("lib/galera", "lib64/galera", "lib/galera-4", "lib64/galera-4", "lib/*/galera")
STATE = """\
version: 2.1
uuid: {cluster}
seqno: {seqno}
safe_to_bootstrap: 1
"""
SETTLE_LIMIT_S = 30.0


class GaleraNode(MariaDBServer):
    """One node. The first makes the cluster; others begin with the same data, and so need none sent to them."""

    NAME = "Galera"
    # Alone it is back in 4 s. But scripts send what it has missed, which a busy machine slows down sevenfold.
    START_LIMIT_S = 120.0

    def __init__(self, nodes: list[GaleraNode], cluster: str) -> None:
        self._others = nodes
        self._cluster = cluster
        self._makes_it = not nodes
        self._started = False
        self.group_port = free_port()
        super().__init__(
            {
                "wsrep-on": "ON",
                "wsrep-provider": _provider(),
                "wsrep-cluster-name": cluster[:8],
                "wsrep-node-address": "127.0.0.1",
                "binlog-format": "ROW",
            }
        )
        self._makes_it, self._started = False, True
        for node in nodes:
            node._others = [*node._others, self]

    def _prepare(self) -> None:
        if self._others:
            self._passwords = self._others[0]._passwords
        super()._prepare()
        if not self.is_mariadb:
            raise ServerUnavailable("Galera is MariaDB's: leave mysqld out of DIBS_TEST_WITH")
        # They have the same in them, for all have begun in the same way.
        self._write_state(self._others[0].last_committed() if self._others else 0)

    def _write_state(self, seqno: int) -> None:
        state = self.folder / "grastate.dat"
        state.write_text(STATE.format(cluster=self._cluster, seqno=seqno))
        state.chmod(0o644)
        self.process.run_tool(["cp", "--no-preserve=mode", state, self.data_folder / "grastate.dat"])

    def _before_start(self) -> None:
        super()._before_start()
        if self._started:  # how far it had come, after a crash, stands in InnoDB's own files
            log = self.data_folder / "recovered.log"
            recover = ["--wsrep-cluster-address=gcomm://", "--wsrep-recover", f"--log-error={log}"]
            self.process.run_tool([*super()._command(), *recover])
            self._write_state(int(re.findall(r"Recovered position: *\S+:(-?\d+)", log.read_text())[-1]))

    def _command(self) -> Sequence[str]:
        # (Ports that nothing may listen at in the end, but which would be the same for all nodes.)
        options = f"gmcast.listen_addr=tcp://127.0.0.1:{self.group_port};ist.recv_addr=127.0.0.1:{free_port()}"
        group = ",".join(f"127.0.0.1:{node.group_port}" for node in self._others)
        return [
            *super()._command(),
            f"--wsrep-provider-options={options};gcache.size=32M;pc.recovery=false",
            f"--wsrep-sst-receive-address=127.0.0.1:{free_port()}",
            f"--wsrep-cluster-address=gcomm://{group}",
            *(["--wsrep-new-cluster"] if self._makes_it else []),
        ]

    def _answers(self) -> bool:
        with suppress(pymysql.err.OperationalError):  # while it joins, it may end what it has let in
            return super()._answers() and self.status("wsrep_local_state_comment") == "Synced"
        return False

    def status(self, name: str) -> str:
        ((_, value),) = self.sql("SHOW STATUS LIKE %s", (name,))
        return str(value)

    def last_committed(self) -> int:
        """How many of the cluster's changes it has applied."""
        return int(self.status("wsrep_last_committed"))


class GaleraCluster:
    """Several nodes, three of which go on when one is lost. What happens to it happens to one of them, by turns."""

    def __init__(self, size: int = 3) -> None:
        self.nodes: list[GaleraNode] = []
        cluster = str(uuid.uuid4())
        try:
            for _ in range(size):
                self.nodes.append(GaleraNode(list(self.nodes), cluster))
        except BaseException:
            self.close()
            raise
        self._turns = cycle(self.nodes)
        self._lost = self.nodes[0]

    def __enter__(self) -> GaleraCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    @property
    def port(self) -> int:
        """That of the first."""
        return self.nodes[0].port

    @property
    def ports(self) -> list[int]:
        return [node.port for node in self.nodes]

    def create_database(self) -> str:
        """A new empty database; its URL on the first, when all of them have it."""
        url = self.nodes[0].create_database()
        goal = self.nodes[0].last_committed()
        for node in self.nodes:
            if not wait_until(lambda: node.last_committed() >= goal, SETTLE_LIMIT_S):  # noqa: B023 - called here
                raise ServerUnavailable(f"a node of Galera lags behind for {SETTLE_LIMIT_S:g} s")
        return url

    def kill(self) -> None:
        """SIGKILL to one of them; `start` brings it back."""
        self._lost = next(self._turns)
        self._lost.kill()

    def start(self) -> None:
        self._lost.start()

    def paused(self) -> AbstractContextManager[None]:
        """One of them is frozen inside the `with` block."""
        return next(self._turns).paused()


def _provider() -> Path:
    for place in PROVIDERS:
        for found in Path("/usr").glob(f"{place}/libgalera*smm.so"):
            return found
    raise ServerUnavailable("Galera is not on this machine; `make test` installs Debian's package mariadb-server")
