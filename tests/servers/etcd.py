"""A private etcd: one member, or a cluster of them."""

from __future__ import annotations

import http.client
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.servers.process import free_port
from tests.servers.server import Server, find_program


class EtcdServer(Server):
    """An etcd of the tests' own with a single member, durable and timed as shipped, open to everybody.

    `settings` go on the command line. With `certificates` (a folder with ca.pem, server.pem and server.key) clients
    must use TLS.
    """

    NAME = "etcd"

    def __init__(
        self,
        settings: Sequence[str] = (),
        certificates: Path | None = None,
        *,
        name: str = "test",
        peers: dict[str, int] | None = None,
    ) -> None:
        self._program = find_program("etcd", package="etcd-server")
        self._settings = settings
        self._certificates = certificates
        self._name = name
        self._peers = peers
        self._places = 0
        self.user = ""
        super().__init__()

    # Where it is

    @property
    def scheme(self) -> str:
        return "etcd" if self._certificates is None else "etcds"

    def url(self, *, user: str = "", password: str = "", options: str = "") -> str:
        """Its URL, with a login if one is given."""
        login = f"{user}:{password}@" if user else ""
        return f"{self.scheme}://{login}127.0.0.1:{self.port}/{'?' if options else ''}{options}"

    def create_place(self) -> str:
        """The URL of a prefix that is empty yet."""
        self._places += 1
        return self.url(options=f"prefix=test-{self._places}/")

    def ask(self, path: str, body: object, token: str = "") -> Any:
        """A request to the JSON gateway; the answer, whatever it is. Not with TLS."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            headers = {"Authorization": token} if token else {}
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def keys(self, prefix: str = "") -> dict[str, str]:
        """Every key that starts with this, and its value."""
        first = b64encode(prefix.encode() or b"\0").decode()
        last = b64encode(prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1]) if prefix else b"\0").decode()
        found = self.ask("kv/range", {"key": first, "range_end": last}).get("kvs", [])
        return {b64decode(kv["key"]).decode(): b64decode(kv.get("value", "")).decode() for kv in found}

    def delete_everything(self) -> None:
        self.ask("kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    def let_in(self, user: str, password: str, prefix: str | None = None) -> None:
        """Make a user; with `prefix` it may read and write there and nowhere else, without it do everything."""
        self.ask("auth/user/add", {"name": user, "password": password})
        if prefix is None:
            self.ask("auth/role/add", {"name": "root"})
            self.ask("auth/user/grant", {"user": user, "role": "root"})
            return
        self.ask("auth/role/add", {"name": user})
        first = b64encode(prefix.encode()).decode()
        last = b64encode(prefix[:-1].encode() + bytes([ord(prefix[-1]) + 1])).decode()
        permission = {"permType": "READWRITE", "key": first, "range_end": last}
        self.ask("auth/role/grant", {"name": user, "perm": permission})
        self.ask("auth/user/grant", {"user": user, "role": user})

    def facts(self) -> dict[str, str]:
        """Its version and settings; what is not named is as shipped."""
        status = self.ask("maintenance/status", {})
        return {"etcd": status["version"], "its settings": " ".join(self._settings) or "as shipped, one member"}

    # How it starts

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        scheme = "http" if self._certificates is None else "https"
        client = f"{scheme}://127.0.0.1:{self.port}"
        if self._peers is None:
            self._peers = {self._name: free_port()}
        peer = f"http://127.0.0.1:{self._peers[self._name]}"
        command: list[str | os.PathLike[str]] = [
            self._program,
            "--name",
            self._name,
            "--data-dir",
            self.folder / "data",
        ]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in self._peers.items())
        command += ["--initial-cluster", cluster]
        if self._certificates is not None:
            command += [
                "--cert-file",
                self._certificates / "server.pem",
                "--key-file",
                self._certificates / "server.key",
            ]
        return [*command, *self._settings]

    def _answers(self) -> bool:
        if self._certificates is not None:
            log = self.process.log_path.read_bytes()
            return b"serving client requests" in log or b"serving client traffic" in log  # 3.4, 3.5
        try:
            return "error" not in self.ask("kv/range", {"key": "AA=="})
        except (OSError, ValueError, http.client.HTTPException):
            return False
