"""The command line as tests use it: every process that comes of it is known, and none may be left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

DIBS = [sys.executable, "-m", "dibs"]
# The longest any of these tests waits for something that should happen at once.
PATIENCE_S = 20.0


def until(condition: Callable[[], Any], timeout: float = PATIENCE_S) -> Any:
    """Return what the condition returns, once that is true."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.005)
    raise AssertionError(f"did not happen within {timeout} s: {condition}")


class Started(subprocess.Popen[str]):
    """A ``dibs`` that runs, and the pid of its command if that has told it."""

    command_pid = 0


class Dibs:
    """The command line, in an environment of its own; knows every process that came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"DIBS_TEST_MARK={uuid.uuid4().hex}"
        self.url = f"sqlite:///{folder}/locks.db"
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "DIBS_URL": self.url,
            "PYTHONWARNINGS": "error",
            "LC_ALL": "C.UTF-8",
            **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            self.mark.partition("=")[0]: self.mark.partition("=")[2],
        }
        self._started: list[Started] = []

    def __call__(self, *args: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run it to its end."""
        settings: dict[str, Any] = {
            "env": self.env,
            "cwd": self.folder,
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "timeout": 60,
        }
        settings.update(options)
        return subprocess.run([*DIBS, *args], text=True, **settings)

    def start(self, *args: str, **options: Any) -> "Started":
        """Start it in a session of its own."""
        settings: dict[str, Any] = {
            "env": self.env,
            "cwd": self.folder,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
        }
        settings.update(options)
        process = Started([*DIBS, *args], text=True, **settings)
        self._started.append(process)
        return process

    def start_holder(self, name: str, *options: str, traps: str = ":", body: str = "sleep 60") -> "Started":
        """Start ``dibs run`` with a shell script, and wait until the script runs and its traps are set."""
        ready = self.folder / f"ready-{uuid.uuid4().hex}"
        process = self.start("run", name, *options, "--", "sh", "-c", f"{traps}; echo $$ > {ready}; {body}")
        until(lambda: process.poll() is not None or (ready.exists() and ready.read_text().endswith("\n")))
        assert process.poll() is None, process.communicate()
        process.command_pid = int(ready.read_text())
        return process

    def processes(self) -> dict[int, str]:
        """The name of every process that lives and has our mark in its environment, by pid."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "comm").read_text().strip()
                except OSError:
                    continue
        return found

    def guard_pid(self) -> int:
        """The one guard that is alive."""
        guards = [pid for pid, name in self.processes().items() if name == "dibs-guard"]
        assert len(guards) == 1, self.processes()
        return guards[0]

    def holder(self, name: str) -> Any:
        """Who holds the name, as ``dibs show --json`` tells it."""
        return json.loads(self("show", name, "--json").stdout)

    def close(self) -> None:
        """End what is left; fail if anything was left that should have ended by itself."""
        left = {}
        if all(process.poll() is not None for process in self._started):
            try:
                until(lambda: not self.processes(), 5.0)
            except AssertionError:
                left = self.processes()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.communicate()
        assert not left, f"left behind: {left}"
