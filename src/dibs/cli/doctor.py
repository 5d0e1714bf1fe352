"""``dibs doctor``: can the store be reached, is it set up, and which promises do its settings keep?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dibs.cli import connect, exit_code
from dibs.errors import DibsError, StoreUnavailable
from dibs.steps import run
from dibs.store import Capabilities, Finding

if TYPE_CHECKING:
    import argparse

NOT_KEPT = 1


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Check the store: one line for each promise, ok or FAIL, with what to change; then what the store offers.

Exits 1 when a promise is not kept, 69 when the store cannot be reached, 78 when it is not set up."""
    parser.epilog = """\
examples:
  dibs doctor                                   the default store
  dibs --url postgresql://app@db/prod doctor    before the first deployment
  dibs doctor --json | jq '.findings[] | select(.kept | not)'
                                                only what is wrong
  dibs doctor > /dev/null || alert "dibs"       in monitoring
"""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


ARGUMENTS = {"doctor": _arguments}


def doctor(args: argparse.Namespace) -> int:
    """``dibs doctor``."""
    code = 0
    offered: Capabilities | None = None
    with connect(args) as client:
        shown = client._desk.address.shown
        try:
            offered = client.capabilities
            findings = run(client._desk.checking())
        except DibsError as error:
            code = exit_code(error)
            promise = "reachable" if isinstance(error, StoreUnavailable) else "set up"
            findings = [Finding(promise, False, " ".join(str(error).split()))]
    if offered is not None and not any(finding.promise == "durable" for finding in findings):
        findings.append(Finding("durable", offered.durable, f"survives a restart: {offered.survives_restart}"))
    if code == 0 and not all(finding.kept for finding in findings):
        code = NOT_KEPT
    if args.json:
        import json

        answer = {
            "store": shown,
            "ok": code == 0,
            "findings": [finding._asdict() for finding in findings],
            "capabilities": None if offered is None else offered._asdict(),
        }
        json.dump(answer, sys.stdout, indent=2)
        print()
        return code
    print(shown)
    for finding in findings:
        print(f"{'ok  ' if finding.kept else 'FAIL'}  {finding.promise}: {finding.detail}")
    if offered is not None:
        print()
        for word, value in offered._asdict().items():
            text = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
            print(f"      {word.replace('_', ' ')}: {text}")
    return code
