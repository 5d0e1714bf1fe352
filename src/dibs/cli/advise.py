"""``dibs advise``: how many workers a queue needs, for people, for programs, and as metrics."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.cli import USAGE, CommandError, connect
from dibs.cli.looks import json_option, print_json, table
from dibs.cli.streams import plain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from dibs.advice import Advice

# What is exported, in the text format of Prometheus: name, kind, and where it stands in an Advice.
METRICS = (
    ("dibs_workers_needed", "Workers that the queue needs.", "needed"),
    ("dibs_workers", "Workers that took jobs in the last minute.", "workers"),
    ("dibs_queue_depth", "Jobs that wait for a worker.", "depth"),
    ("dibs_queue_arrivals_per_second", "Jobs that arrive.", "arrival_rate"),
    ("dibs_job_seconds", "Work on one job.", "held_s"),
)


def _advise_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Say how many workers each QUEUE needs, and why: measured over the last minute, from what all processes that take its
jobs have counted. Without QUEUE, of all queues that have jobs."""
    parser.epilog = """\
examples:
  dibs advise mail                              too many, too few, and what binds
  dibs advise                                   the same of every queue that has jobs
  dibs advise mail --json | jq '.[].needed'     for a program that starts and stops workers
  cd /var/lib/node_exporter && dibs advise --metrics > dibs.tmp && mv dibs.tmp dibs.prom
                                                dibs_workers_needed{queue="mail"} and others, for Prometheus, whose
                                                exporter reads *.prom, and so never half a file
"""
    parser.add_argument("queues", metavar="QUEUE", nargs="*", help="which (default: all that have jobs)")
    json_option(parser)
    parser.add_argument("--metrics", action="store_true", help="print metrics in the text format of Prometheus")


ARGUMENTS = {"advise": _advise_arguments}


def advise(args: argparse.Namespace) -> int:
    """``dibs advise``."""
    if args.json and args.metrics:
        raise CommandError(USAGE, "give --json or --metrics")
    with connect(args) as client:
        names = args.queues or [depth.queue for depth in client.queues()]
        advices = [client.queue(name).advice() for name in names]
    if args.json:
        print_json([advice._asdict() for advice in advices])
    elif args.metrics:
        print(metrics(advices), end="")
    elif advices:
        print(table(("QUEUE", "WORKERS", "NEEDED", "BUSY", "BINDS"), map(_row, advices)))
        print("", *(plain(f"{advice.queue}: {advice.why}.") for advice in advices), sep="\n")
    else:
        print("No queue has jobs: name those that you mean.")
    return 0


def _row(advice: Advice) -> tuple[str, ...]:
    if advice.needed is None:
        return advice.queue, str(advice.workers), "?", "", ""
    return advice.queue, str(advice.workers), str(advice.needed), f"{advice.use:.0%}", advice.binds


def metrics(advices: Sequence[Advice]) -> str:
    """Advice in the text format of Prometheus; what is not known is left out."""
    lines = []
    for name, words, field in METRICS:
        lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge"]
        for advice in advices:
            value = getattr(advice, field)
            if advice.needed is None and field not in ("workers", "depth"):
                continue
            label = advice.queue.replace("\\", "\\\\").replace('"', '\\"')
            lines.append(f'{name}{{queue="{label}"}} {value:.15g}')
    return "\n".join(lines) + "\n"
