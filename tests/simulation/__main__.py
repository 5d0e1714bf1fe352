"""A long hunt: ``python -m tests.simulation --seeds 100000 --start 0 --processes 2``; one seed with its time line: ``--show 4711``."""

import argparse
import sys
import time

from tests.simulation.programs import simulate
from tests.simulation.world import BrokenPromise


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--all", action="store_true")
    a = parser.parse_args()
    t = time.perf_counter()
    bad = 0
    kinds = {}
    steps = 0
    ev = 0
    gr = 0
    for seed in range(a.start, a.start + a.seeds):
        try:
            r = simulate(seed)
            steps += r.steps
            ev += r.events
            gr += r.grants
        except BrokenPromise as e:
            bad += 1
            k = str(e).split("\n")[0]
            kinds.setdefault(" ".join(k.split(": ", 1)[1].split()[:1]), []).append(k)
            if not a.all:
                print(e)
                return 1
    dt = time.perf_counter() - t
    print(f"{a.seeds} seeds, {a.seeds / dt:.0f}/s, {steps / a.seeds:.0f} steps, {ev / a.seeds:.0f} events {gr / a.seeds:.1f} grants; {bad} bad")
    for k, v in kinds.items():
        print(k, len(v))
        for x in v[:4]:
            print("   ", x)
    return 0


sys.exit(main())
