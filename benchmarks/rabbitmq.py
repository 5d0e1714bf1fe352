"""A private RabbitMQ for the works on queues, where rabbitmq-server is installed, and what pika does with it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Bench
from tests.servers.process import ServerUnavailable, free_port
from tests.servers.server import Server

QUEUE = "jobs"
# Waiting for a message that was put there for longer than this is an error.
DELIVERED_WITHIN_S = 10.0
PROGRAMS = ("/usr/lib/rabbitmq/bin", "/opt/rabbitmq/sbin")


class RabbitServer(Server):
    """A RabbitMQ with nothing but AMQP, as durable as it is shipped."""

    NAME = "RabbitMQ"
    PORT_TAKEN = b"eaddrinuse"

    def __init__(self) -> None:
        # What Debian has on the PATH insists on being root or the user rabbitmq; what it calls does not.
        self._program = shutil.which("rabbitmq-server", path=os.pathsep.join([*PROGRAMS, os.environ.get("PATH", "")]))
        if self._program is None:
            raise ServerUnavailable("rabbitmq-server is not on this machine")
        self._ports = free_port(), free_port()
        super().__init__()

    def connection(self) -> Any:
        """A connection of pika's plainest kind. Close it."""
        import pika

        return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port))

    def facts(self) -> dict[str, str]:
        connection = self.connection()
        try:
            return {"RabbitMQ": str(connection._impl.server_properties["version"])}
        finally:
            connection.close()

    def _before_start(self) -> None:
        self._enabled.write_text("[].\n")  # no plugins
        self._enabled.chmod(0o644)  # for the server's user; nobody else can enter the folder

    @property
    def _enabled(self) -> Any:
        return self.folder / "enabled_plugins"

    def _command(self) -> Sequence[str | os.PathLike[str]]:
        names, nodes = self._ports
        settings = {
            "HOME": self.folder,
            "ERL_CRASH_DUMP": self.folder / "crash",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": names,
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CONFIG_FILE": self.folder / "none",
            "RABBITMQ_DIST_PORT": nodes,
            "RABBITMQ_ENABLED_PLUGINS_FILE": self._enabled,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": self.folder,
            "RABBITMQ_MNESIA_BASE": self.folder / "mnesia",
            "RABBITMQ_NODENAME": f"dibs-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
        }
        assert self._program is not None
        return ["env", *(f"{name}={value}" for name, value in settings.items()), self._program]

    def _answers(self) -> bool:
        import pika.exceptions

        try:
            self.connection().close()
            return True
        except (pika.exceptions.AMQPError, OSError):
            return False


@contextmanager
def broker(bench: Bench) -> Iterator[Any]:
    """A connection to the broker that works share; None, and a word why, where it is not installed."""
    if importlib.util.find_spec("pika") is None:
        print("RabbitMQ is left out: pika is not installed", file=sys.stderr)
        yield None
        return
    try:
        server = bench.started(RabbitServer)
    except ServerUnavailable as error:
        print(f"RabbitMQ is left out: {error}", file=sys.stderr)
        yield None
        return
    connection = server.connection()
    try:
        yield connection
    finally:
        connection.close()


def puts_with_confirms(connection: Any, seconds: float) -> list[float]:
    """Publish persistent messages to a durable queue, each once the one before was confirmed; messages a second."""
    with connection.channel() as channel:
        _empty_queue(channel)
        channel.confirm_delivery()
        done = 0
        start = time.perf_counter()
        while (took := time.perf_counter() - start) < seconds:
            _publish(channel, done)
            done += 1
    return [done / took]


def takes_with_acks(connection: Any, jobs: int, prefetch: int) -> list[float]:
    """Consume messages from a queue filled beforehand, acknowledging half a prefetch at a time; messages a second."""
    with connection.channel() as channel:
        _empty_queue(channel)
        for number in range(jobs):
            _publish(channel, number)
        while channel.queue_declare(QUEUE, passive=True).method.message_count < jobs:
            time.sleep(0.01)
        channel.basic_qos(prefetch_count=prefetch)
        done = 0
        start = time.perf_counter()
        for delivered, _, _ in channel.consume(QUEUE, inactivity_timeout=DELIVERED_WITHIN_S):
            assert delivered is not None, f"{jobs - done} messages are missing"
            done += 1
            if done % (prefetch // 2) == 0 or done == jobs:
                channel.basic_ack(delivered.delivery_tag, multiple=True)
            if done == jobs:
                break
        channel.queue_declare(QUEUE, passive=True)  # the answer comes after the last acknowledgement was heard
        return [done / (time.perf_counter() - start)]


def _empty_queue(channel: Any) -> None:
    channel.queue_delete(QUEUE)
    channel.queue_declare(QUEUE, durable=True)


def _publish(channel: Any, number: int) -> None:
    import pika

    properties = pika.BasicProperties(delivery_mode=pika.DeliveryMode.Persistent)
    channel.basic_publish("", QUEUE, str(number).encode(), properties)
