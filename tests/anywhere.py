"""Ctrl-C at any point of dibs's own code: wherever CPython would run a signal handler that raises."""

from __future__ import annotations

import dis
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.simulation.world import _INTERRUPTIBLE, COLLECTING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_JUMPS = frozenset(dis.opmap[name] for name in ("JUMP_BACKWARD", "JUMP_ABSOLUTE") if name in dis.opmap)
# A jump back is interrupted within the ``try`` that it comes from, so before it. By Python 3.12 it is where it goes to,
# but in the ``try`` of what stands before that, which nobody who traces can do.
_INTERRUPTED_BEFORE = frozenset() if sys.version_info[:2] == (3, 12) else _JUMPS
_INTERRUPTED_AFTER = _INTERRUPTIBLE - _JUMPS


class CtrlC:
    """Calls a function, and interrupts it in this thread at the given point of dibs's code; not in its stores."""

    def __init__(self, point: int) -> None:
        self._left = point
        self._last: dict[FrameType, int] = {}
        #: Where it came; empty when the function ended before.
        self.arrived = ""

    def during(self, act: Callable[[], object]) -> None:
        before = sys.gettrace()
        # Python 3.12 counts opcodes for those only who trace after somebody has asked for it, in whichever frame.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            assert self.arrived
        finally:
            sys.settrace(before)
            for frame in self._last:  # a frame that is kept keeps its leases
                frame.f_trace = None
            self._last.clear()

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            code = frame.f_code
            if "/dibs/" not in code.co_filename or "/stores/" in code.co_filename:
                return None
            if code.co_filename.endswith(COLLECTING):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            before = self._last.get(frame)
            self._last[frame] = frame.f_lasti
            codes = frame.f_code.co_code
            after = before is not None and codes[before] in _INTERRUPTED_AFTER
            if not after and codes[frame.f_lasti] not in _INTERRUPTED_BEFORE:
                return self._trace
            self._left -= 1
            if not self._left:
                self.arrived = f"{frame.f_code.co_name}, line {frame.f_lineno} of {frame.f_code.co_filename}"
                raise KeyboardInterrupt
        elif event in ("exception", "return"):
            self._last.pop(frame, None)  # a call that raises is not followed by a look for signals
        return self._trace


def anywhere() -> Iterator[CtrlC]:
    """A Ctrl-C for each point of what is called during it, one after the other."""
    for point in count(1):
        ctrl_c = CtrlC(point)
        yield ctrl_c
        if not ctrl_c.arrived:
            return
