"""Chaos for as long as you like: see ``--help``.

python -m tests.chaos --store postgres --seconds 600     ten minutes, with a line of progress
python -m tests.chaos --seconds 60                       a minute on every store
python -m tests.chaos --store sqlite --no-fence          what is lost where nobody compares tokens
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos.bugs import BUGS
from tests.chaos.run import KINDS, run
from tests.servers.process import data_in_memory

# Of the counts, those that a line of progress has room for.
SHOWN = ("granted", "refused", "cancelled", "failed", "lost", "stale", "kill", "stop", "crash", "freeze", "cut")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Break everything around dibs.")
    parser.add_argument(
        "--store", action="append", choices=list(KINDS), help="this one; may be repeated (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="for each store (default 30)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="decides what is done when (default 1)")
    parser.add_argument("--bug", choices=[bug for bug in BUGS if bug], help="with this mistake planted")
    parser.add_argument("--no-fence", action="store_true", help="have the resource take whatever comes")
    parser.add_argument("--keep", action="store_true", help="keep the history, and say where")
    options = parser.parse_args()
    data_in_memory()
    failed = 0
    for kind in options.store or KINDS:
        with tempfile.TemporaryDirectory(prefix=f"chaos-{kind}-") as name:
            folder = Path(tempfile.mkdtemp(prefix=f"chaos-{kind}-")) if options.keep else Path(name)

            def told(passed_s: float, counts: Counter[str], kind: str = kind) -> None:
                if sys.stderr.isatty():
                    shown = ", ".join(f"{counts[what]} {what}" for what in SHOWN if counts[what])
                    print(f"\r\x1b[K{kind}: {passed_s:.0f} s: {shown}", end="", file=sys.stderr, flush=True)

            verdict = run(
                kind,
                folder,
                options.seconds,
                options.seed,
                fenced=not options.no_fence,
                bug=options.bug or "",
                told=told,
            )
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)
        words = {True: "passed", False: "BROKEN", None: "says nothing"}[verdict.passed]
        print(f"{kind}: {words}; {', '.join(f'{count} {what}' for what, count in sorted(verdict.counts.items()))}")
        for text in (*verdict.broken, *(f"too little: {text}" for text in verdict.missing)):
            print(f"  {text}")
        if options.keep:
            print(f"  the history is in {folder}")
        failed += verdict.passed is not True
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
