"""Private real servers for tests: on a free port, in a folder of their own, and gone afterwards whatever happens.

`free_port` and `ServerProcess` are for any server; the modules beside this one make the servers of the stores of them.

**Nothing outlives its owner.** Between the process that wants a server (the *owner*: pytest) and the server stands a
*guard*, this same file run as a program. It starts the server on the owner's word and adopts every process of it that
loses its parent (PR_SET_CHILD_SUBREAPER), so that *all processes below the guard are the server, and all of the server
is below the guard*, although PostgreSQL puts each of its processes into a session of its own. When the owner closes its
end of the pipe, or dies in any way, the guard ends them, removes the folder and ends. It is not in the terminal's
process group, so that Ctrl-C reaches the tests alone.

Linux only: processes are read from /proc, of which only what every user may read is used; in a container root may not
look at the current folder or the environment of another user's processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pwd
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

START_LIMIT_S = 30.0
STOP_LIMIT_S = 20.0
TOOL_LIMIT_S = 60.0
PORT_TRIES = 5
PORT_PATIENCE_S = 10.0
POLL_S = 0.01

# Where servers may keep their data: short paths that every user can reach; a Unix socket's has at most 107 bytes.
DISK = Path("/tmp")
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 6 << 30  # Four test processes with six servers each need less than half of it.
WORKER_NEEDED = 800 << 20  # One such, and what its tests start.

# How long the guard lets a server end by itself, and how often it looks whether its owner lives. The pipe tells it at
# once, except where a forked child of a killed owner still holds the owner's end.
GUARD_PATIENCE_S = 3.0
GUARD_LOOKS_S = 0.25


class ServerUnavailable(Exception):
    """A server that the tests need cannot be had; the text says why. A failure, never a reason to skip."""


class Process(NamedTuple):
    pid: int
    parent: int
    state: str  # The kernel's letter: R, S, D, T (stopped), Z (ended, not yet waited for)

    @property
    def lives(self) -> bool:
        return self.state not in "ZX"


def processes_below(ancestor: int) -> list[Process]:
    """The live processes that descend from this one, parents before their children."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := look_at(int(entry))) is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    parents = [ancestor]
    while parents:
        below = children.pop(parents.pop(0), [])
        found += [process for process in below if process.lives]
        parents += [process.pid for process in below]
    return found


def look_at(pid: int) -> Process | None:
    """What the kernel says of a process; None when there is none of this number, or not any more."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    state, parent, threads = fields[0], int(fields[1]), int(fields[17])
    # A process whose first thread has ended looks dead, while others of its threads still hold its sockets.
    return Process(pid, parent, "R" if state == "Z" and threads > 1 else state)


def send(signal_number: int, processes: Sequence[Process]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)


def wait_until(condition: Callable[[], object], limit_s: float) -> bool:
    """True as soon as the condition holds, False when it did not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on, from below the range the system takes client ports from.

    A port from that range, as binding to port 0 gives, may be taken by an outgoing connection while the server is
    stopped; worse, a client that keeps trying to reach the stopped server can be connected to itself.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first_client_port = int(file.read().split()[0])
    ports = range(10_000, first_client_port) if first_client_port > 12_000 else range(61_000, 65_536)
    for port in random.sample(ports, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            return port
    raise ServerUnavailable("no free TCP port was found in 200 tries")


def data_in_memory() -> None:
    """From now on servers keep their data in memory, where there is enough.

    They run as durable as shipped, but a disk that needs a second to sync, as those of shared machines do now and then,
    no longer makes a server miss a ttl that a test keeps short. What a test kills are processes; no file is lost.
    """
    with contextlib.suppress(OSError):
        space = os.statvfs(MEMORY)
        if os.access(MEMORY, os.W_OK) and min(space.f_bavail * space.f_frsize, memory_left()) >= MEMORY_NEEDED:
            ServerProcess.data_root = MEMORY


def memory_left() -> int:
    """Bytes that programs may still take."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


def server_user() -> str | None:
    """The user to run servers as: None for the current one; for root an unprivileged one, as servers refuse root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ServerUnavailable("servers refuse to run as root, and there is neither a user postgres nor a user nobody")


class ServerProcess:
    """One server in a private folder: at most one run of it at a time, and everything that this run starts.

    `polite_signal` is what makes it end quickly and cleanly, for the guard.
    """

    #: In what its folder is made: on the disk, as benchmarks need it, unless `data_in_memory` was called.
    data_root = DISK

    def __init__(self, name: str, *, polite_signal: int = signal.SIGTERM) -> None:
        self.name = name
        self._user = server_user()
        self.folder = Path(tempfile.mkdtemp(prefix="dibs-", dir=self.data_root))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self.log_path = self.folder / "server.log"
        self._pid = 0
        # -I -S: nothing of the tests' environment, no site-packages; it is up in 20 ms.
        command = [sys.executable, "-I", "-S", __file__, str(self.folder), str(os.getpid()), str(int(polite_signal))]
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd="/"
        )

    def close(self) -> None:
        """End the server and remove its folder. Twice is fine."""
        self._pid = 0
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        self._guard.stdin.close()
        code = self._guard.wait(STOP_LIMIT_S)
        self._guard.stdout.close()
        if code != 0:
            raise ServerUnavailable(f"the guard of {self.name} in {self.folder} failed with exit code {code}")

    # Starting

    def run_tool(self, command: Sequence[str | os.PathLike[str]]) -> None:
        """Run a program of the server, as the server's user, to its end (initdb and the like)."""
        answer = self._ask("run", command)
        if answer["exit_code"]:
            raise ServerUnavailable(f"{command[0]} failed with exit code {answer['exit_code']}:\n{answer['output']}")

    def spawn(self, command: Sequence[str | os.PathLike[str]]) -> None:
        """Start the server; what it prints goes to the log. When it is ready is for the caller to find out."""
        if self.running:
            raise ServerUnavailable(f"{self.name} runs already")
        self._pid = self._ask("spawn", command)["pid"]

    def _ask(self, act: str, command: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
        assert self._guard.stdin is not None
        assert self._guard.stdout is not None
        request = {"act": act, "command": [os.fspath(part) for part in command], "user": self._user}
        print(json.dumps(request), file=self._guard.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._guard.stdout.readline() or '{"error": "its guard is gone"}')
        if "error" in answer:
            raise ServerUnavailable(f"{self.name}: {command[0]} could not be started: {answer['error']}")
        return answer

    # Looking

    @property
    def pid(self) -> int:
        """The id of the process that was spawned; an error when it is not running."""
        if not self.running:
            raise ServerUnavailable(f"{self.name} is not running")
        return self._pid

    @property
    def running(self) -> bool:
        return self._runs(self._pid)

    def _runs(self, pid: int) -> bool:
        # Not a look at all processes of the machine: whoever waits for a start or an end asks a hundred times a second.
        process = look_at(pid)
        return process is not None and process.lives and process.parent == self._guard.pid

    @property
    def fell(self) -> bool:
        """Whether it ended although nobody here ended it."""
        return self._pid != 0 and not self.running

    def processes(self) -> list[Process]:
        """All live processes of this server."""
        return processes_below(self._guard.pid)

    def log_tail(self, lines: int = 20) -> str:
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(it wrote no log)"

    # What can happen to it

    def end(self, signal_number: int) -> None:
        """Ask the server to end and wait until all its processes have; an error when it does not."""
        if not self.running:
            return
        self.resume()
        pid, self._pid = self._pid, 0
        os.kill(pid, signal_number)
        if not wait_until(lambda: not self._runs(pid) and not self.processes(), STOP_LIMIT_S):
            self.kill()
            raise ServerUnavailable(f"{self.name} did not end in {STOP_LIMIT_S:g} s and was killed\n{self.log_tail()}")

    def kill(self) -> None:
        """SIGKILL to every process of the server: what a power cut does to programs."""
        self._pid = 0

        def killed() -> bool:
            left = self.processes()
            send(signal.SIGKILL, left)
            return not left

        if not wait_until(killed, STOP_LIMIT_S):
            raise ServerUnavailable(f"{self.name} could not be killed: {self.processes()} are left")

    def pause(self) -> None:
        """Stop every process of the server in its tracks, and return when all stand still. Connections stay open."""

        def still() -> bool:
            # Parents before their children, so that those who could start new ones stand still first.
            send(signal.SIGSTOP, self.processes())
            return all(process.state == "T" for process in self.processes())

        if not wait_until(still, STOP_LIMIT_S):
            raise ServerUnavailable(f"{self.name} could not be paused: {self.processes()}")

    def resume(self) -> None:
        """Let a paused server go on; nothing happens to one that runs."""
        send(signal.SIGCONT, self.processes())


# --- The guard ---


class _Guard:
    """The program that stands between owner and server; see the head of this file."""

    def __init__(self, folder: Path, owner: int, polite_signal: int) -> None:
        self._folder = folder
        self._owner = owner
        self._polite_signal = polite_signal

    def main(self) -> None:
        pr_set_child_subreaper = 36  # <linux/prctl.h>
        if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Not SIG_IGN, which the server would inherit, and Java respects: a handler ends with the exec.
            signal.signal(number, lambda *_: None)
        try:
            self._serve()
        finally:
            self._end_processes()
            shutil.rmtree(self._folder)

    def _serve(self) -> None:
        """Answer the owner's requests, one line each, until it closes the pipe or is no longer there."""
        while os.getppid() == self._owner:
            self._reap()
            if select.select([0], [], [], GUARD_LOOKS_S)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                try:
                    answer = self._do(**json.loads(line))
                except (OSError, subprocess.SubprocessError) as error:
                    answer = {"error": str(error)}
                with contextlib.suppress(BrokenPipeError):
                    print(json.dumps(answer), flush=True)

    def _do(self, act: str, command: list[str], user: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "cwd": self._folder,
            # Not the owner's: PGHOST, PGDATA or a locale from there would make every machine's tests different.
            "env": {"PATH": os.defpath, "HOME": str(self._folder), "LC_ALL": "C.UTF-8"},
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        if user is not None:
            options |= {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        if act == "run":
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, errors="replace", timeout=TOOL_LIMIT_S, **options
            )
            return {"exit_code": done.returncode, "output": done.stdout.strip()}
        with open(self._folder / "server.log", "ab") as log:
            return {"pid": subprocess.Popen(command, stdout=log, **options).pid}

    def _end_processes(self) -> None:
        # Politely first, to the server's first process: one that ends by itself frees its shared memory.
        deadline = time.monotonic() + GUARD_PATIENCE_S
        processes = processes_below(os.getpid())
        send(signal.SIGCONT, processes)
        send(self._polite_signal, [process for process in processes if process.parent == os.getpid()])
        while not self._reap() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        # Then firmly, for as long as there are any: what loses its parent becomes ours and is found in the next look.
        while not self._reap():
            send(signal.SIGKILL, processes_below(os.getpid()))
            time.sleep(POLL_S)

    def _reap(self) -> bool:
        """Wait for those that have ended; whether nothing is left below, as what lives on there has come to us."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return True
        return False


if __name__ == "__main__":
    _Guard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).main()
