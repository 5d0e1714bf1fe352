"""Several processes that do what they are told, for works that need more than one of them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

# Nothing measured here takes anywhere near as long.
STUCK_S = 120.0


@contextmanager
def crowd(count: int, work: Callable[..., Callable[..., object]], *arguments: object) -> Iterator[list[Connection]]:
    """So many processes, in each of which ``work(*arguments)`` makes a function; the ends of pipes to them.

    What is sent there is the function's arguments (a tuple), what comes back (``answer``) is what it returned. The
    processes start one after the other, as the first may have tables to make, and are killed on the way out.
    """
    spawn = multiprocessing.get_context("spawn")
    processes, ends = [], []
    try:
        for _ in range(count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_process, args=(work, arguments, there), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            ends.append(here)
            answer(here)
        yield ends
    finally:
        for end in ends:
            end.close()
        for process in processes:
            process.join(0.5)
            if process.is_alive():  # it waits for a lock, say, which nobody will release
                process.kill()
            process.join()


def answer(end: Connection, stuck_s: float = STUCK_S) -> Any:
    """What the process at the other end returned; raises what went wrong there."""
    if not end.poll(stuck_s):
        raise TimeoutError(f"a process did not answer in {stuck_s:g} s")
    returned, error = end.recv()
    if error is not None:
        raise RuntimeError(error)
    return returned


def _process(work: Callable[..., Callable[..., object]], arguments: tuple[object, ...], commands: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    function: Callable[..., object] | None = None
    while True:
        try:
            if function is None:
                function, returned = work(*arguments), None
            else:
                returned = function(*commands.recv())
            said: tuple[object, str | None] = returned, None
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - told to the first process, which stops the work
            said = None, repr(error)
        try:
            commands.send(said)
        except BrokenPipeError:
            return
