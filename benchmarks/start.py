"""The start of the command line: what a cron job pays for ``dibs run``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import MS, Bench, Target

STARTS = 40


def run_start(bench: Bench) -> None:
    """``dibs run x -- true`` on SQLite, from fork to exit, beside ``python -c pass`` of the same interpreter; in ms.

    It is the installed console script, the database is there already, and the command's own process (``true``) is part
    of the time. ``flock`` of util-linux, a small C program, shows what the least is where it is installed.
    """
    script = Path(sys.executable).with_name("dibs")
    with bench.folder() as folder:
        environment = dict(os.environ, DIBS_URL=f"sqlite:///{folder}/dibs.db")
        # An installed package has its byte code beside it: so has this one from the first, uncounted round on.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def start(*command: str) -> list[float]:
            before = time.perf_counter()
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
            return [(time.perf_counter() - before) * 1000]

        contestants = {
            "dibs run": lambda: start(str(script), "run", "x", "--", "true"),
            "python -c pass": lambda: start(sys.executable, "-c", "pass"),
        }
        if shutil.which("flock"):
            contestants["flock"] = lambda: start("flock", str(folder / "flock"), "true")
        bench.race("whole process", MS, contestants, [Target(4.0, "python -c pass")], rounds=max(STARTS, bench.rounds))
