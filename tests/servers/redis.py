"""A private Redis, a sentinel beside it, and a small cluster of them."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from tests.servers.certificates import make_certificates
from tests.servers.process import ServerUnavailable, free_port, wait_until
from tests.servers.server import Server, find_program

CLUSTER_LIMIT_S = 30.0


class RedisServer(Server):
    """A Redis of the tests' own, as durable as Redis can be, where everybody needs a password.

    It listens on 127.0.0.1 and on a Unix socket. `settings` are lines of its configuration; None leaves one out.
    """

    NAME = "Redis"
    POLITE_SIGNAL = signal.SIGTERM
    USER = "default"

    def __init__(self, settings: Mapping[str, object] | None = None, *, password: str | None = None) -> None:
        self._program = find_program("redis-server", "valkey-server", package="redis-server")
        self.password = secrets.token_urlsafe(16) if password is None else password
        self._settings: dict[str, object] = {
            "appendonly": "yes",
            "appendfsync": "always",
            "save": '""',
            "requirepass": self.password,
            "masterauth": self.password,
            "unixsocketperm": "777",
            "repl-diskless-sync-delay": 0,
            **(settings or {}),
        }
        self._places = 0
        super().__init__()

    @property
    def socket_path(self) -> Path:
        return self.folder / "redis.sock"

    # Where it is

    def url(self, *, user: str | None = None, password: str | None = None, scheme: str = "redis") -> str:
        """A URL over TCP; the password is the server's unless another one, say a wrong one, is given."""
        return f"{scheme}://{user or ''}:{self.password if password is None else password}@127.0.0.1:{self.port}/0"

    def create_place(self) -> str:
        """The URL of a place where nothing is kept yet."""
        self._places += 1
        return f"{self.url()}?prefix=test-{self._places}"

    def client(self, **options: Any) -> redis.Redis:
        """redis-py, text in and out, to look at the server and to change it. Close it."""
        settings = {"password": self.password, "decode_responses": True, "socket_timeout": 10, **options}
        return redis.Redis(host="127.0.0.1", port=self.port, **settings)

    def ask(self, *words: object) -> Any:
        """One command on a connection made for it."""
        with self.client() as client:
            return client.execute_command(*words)

    def facts(self) -> dict[str, str]:
        with self.client() as client:
            settings = {**client.config_get("append*"), **client.config_get("save")}
            shown = ", ".join(f"{key}={settings[key]}" for key in ("appendonly", "appendfsync"))
            return {"Redis": client.info("server")["redis_version"], "its durability": shown}

    # How it starts

    def _listening(self) -> dict[str, object]:
        return {"bind": "127.0.0.1", "port": self.port}

    def _before_start(self) -> None:
        settings = {
            **self._listening(),
            "unixsocket": self.socket_path,
            "dir": self.folder,
            "daemonize": "no",
            **self._settings,
        }
        lines = [f"{key} {value}\n" for key, value in settings.items() if value is not None]
        self._configuration.write_text("".join(lines))
        self._configuration.chmod(0o666)  # for the server's user; nobody else can enter the folder

    @property
    def _configuration(self) -> Path:
        return self.folder / "redis.conf"

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        return [self._program, self._configuration]

    def _answers(self) -> bool:
        try:
            with self.client(socket_timeout=2) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


class TlsRedisServer(RedisServer):
    """A Redis that speaks TLS alone, with a certificate for 127.0.0.1 by an authority of its own."""

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    def _prepare(self) -> None:
        make_certificates(self.folder)

    def _listening(self) -> dict[str, object]:
        return {
            "bind": "127.0.0.1",
            "port": 0,
            "tls-port": self.port,
            "tls-cert-file": self.folder / "server.pem",
            "tls-key-file": self.folder / "server.key",
            "tls-ca-cert-file": self.authority,
            "tls-auth-clients": "no",
        }

    def client(self, **options: Any) -> redis.Redis:
        return super().client(**{"ssl": True, "ssl_ca_certs": str(self.authority), **options})


class RedisSentinel(RedisServer):
    """A sentinel that alone decides that a master is dead, after half a second, and which replica takes over."""

    NAME = "Redis Sentinel"
    MASTER = "lead"

    def __init__(self, master: RedisServer) -> None:
        self._master = master
        super().__init__(password="")

    def url(self, *, user: str | None = None, password: str | None = None, scheme: str = "redis") -> str:
        """A URL of the master, whoever that is."""
        secret = self._master.password if password is None else password
        return f"{scheme}://{user or ''}:{secret}@127.0.0.1:{self.port}/0?sentinel={self.MASTER}"

    def client(self, **options: Any) -> redis.Redis:
        return super().client(**{"password": None, **options})

    def _before_start(self) -> None:
        name = self.MASTER
        self._configuration.write_text(
            f"bind 127.0.0.1\nport {self.port}\ndir {self.folder}\n"
            f"sentinel monitor {name} 127.0.0.1 {self._master.port} 1\n"
            f"sentinel auth-pass {name} {self._master.password}\n"
            f"sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 3000\n"
        )
        self._configuration.chmod(0o666)

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        return [self._program, self._configuration, "--sentinel"]


class RedisCluster:
    """Three masters that share the slots, without replicas. What one of them has can be had while another is away."""

    def __init__(self, count: int = 3) -> None:
        self.nodes: list[RedisServer] = []
        self.password = secrets.token_urlsafe(16)
        try:
            for _ in range(count):
                settings = {
                    "cluster-enabled": "yes",
                    "cluster-port": free_port(),
                    "cluster-node-timeout": 2000,
                    "cluster-require-full-coverage": "no",
                }
                self.nodes.append(RedisServer(settings, password=self.password))
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        first, share = self.nodes[0], 16384 // len(self.nodes)
        for number, node in enumerate(self.nodes):
            last = 16383 if node is self.nodes[-1] else (number + 1) * share - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", number * share, last)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            bus = int(str(node._settings["cluster-port"]))
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        if not wait_until(lambda: all(self._is_whole(node) for node in self.nodes), CLUSTER_LIMIT_S):
            raise ServerUnavailable(f"the cluster did not come together in {CLUSTER_LIMIT_S:g} s")

    def _is_whole(self, node: RedisServer) -> bool:
        info = node.ask("CLUSTER INFO")
        return info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(len(self.nodes))

    def url(self) -> str:
        """A URL that names two of the nodes."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:2])
        return f"redis://:{self.password}@{hosts}/?cluster=true"

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> RedisCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
