"""``dibs doctor``: can the store be reached, is it set up, and which promises do its settings keep?

A promise that is not kept is a failure when it was asked for: without ``--require`` everything is, with it what it
names and whatever cannot be left out by name (that the store can be written to, that leases exclude each other).
"""

from __future__ import annotations

import sys

from dibs._typing import TYPE_CHECKING
from dibs.cli import asked_for, exit_code
from dibs.cli.streams import plain
from dibs.connecting import undemanding
from dibs.errors import DibsError, StoreUnavailable
from dibs.promises import PROMISES, broken, parse, told
from dibs.steps import run
from dibs.store import Capabilities, Finding

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

NOT_KEPT = 1
# Whether tables and rights suffice shows a lock that is taken: of a name of its own, so that nobody waits for it.
TRIED = "dibs-doctor"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"""\
Check the store: one line for each promise, ok or FAIL, with what to change; then what the store offers. It takes a lock
of its own, {TRIED}, and gives it back.

Exits 1 when a promise that was asked for is not kept, 69 when the store cannot be reached, 78 when it is not set up.
Every promise is asked for, unless --require, or require= in the URL, names those that are: then the others of
{", ".join(PROMISES)} say no instead of FAIL."""
    parser.epilog = """\
examples:
  dibs doctor                                   the default store
  dibs --url postgresql://app@db/prod doctor    before the first deployment
  dibs doctor --require durable,fencing_token   only these have to hold
  dibs doctor --json | jq '.findings[] | select(.kept | not)'
                                                only what is wrong
  dibs doctor > /dev/null || alert "dibs"       in monitoring
"""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--require",
        metavar="PROMISES",
        help="the promises that must be kept, besides those that the URL requires, as in durable,signal",
    )


ARGUMENTS = {"doctor": _arguments}


def doctor(args: argparse.Namespace) -> int:
    """``dibs doctor``."""
    named = parse(args.require or "")
    client, in_url = asked_for(args, undemanding)
    client._desk.warn_no_more()
    required = list(dict.fromkeys([*parse(in_url), *named]))
    code = 0
    offered: Capabilities | None = None
    findings: list[Finding] = []
    with client:
        shown = client._desk.address.shown
        try:
            offered = client.capabilities
            findings += run(client._desk.checking())
            lease = client.lock(TRIED).acquire(timeout=0)
            seen = "is not free at the moment"  # another doctor has it, or it is paused; the store has answered
            if lease is not None:
                lease.release()
                seen = "was taken and given back"
            findings.append(Finding("set up", True, f"the lock {TRIED} {seen}"))
        except DibsError as error:
            code = exit_code(error)
            promise = "reachable" if isinstance(error, StoreUnavailable) else "set up"
            findings.append(Finding(promise, False, " ".join(str(error).split())))
    if offered is not None:
        findings = _with_promises(findings, required, offered)
    selective = bool(required) or args.require is not None
    failed = [f for f in findings if not f.kept and not (selective and _is_optional(f, required))]
    if code == 0 and failed:
        code = NOT_KEPT
    if args.json:
        import json

        answer = {
            "store": shown,
            "ok": code == 0,
            "required": required,
            "findings": [finding._asdict() for finding in findings],
            "capabilities": None if offered is None else offered._asdict(),
        }
        json.dump(answer, sys.stdout, indent=2)
        print()
        return code
    print(plain(shown))
    for finding in findings:
        word = "ok  " if finding.kept else "FAIL" if finding in failed else "no  "
        print(plain(f"{word}  {finding.promise}: {finding.detail}"))
    if offered is not None:
        print()
        for word, value in offered._asdict().items():
            text = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
            print(f"      {word.replace('_', ' ')}: {text}")
    return code


def _with_promises(findings: Sequence[Finding], required: Sequence[str], offered: Capabilities) -> list[Finding]:
    """The store's findings, made complete: one at least for durability and for each promise that is required."""
    found = list(findings)
    for name in dict.fromkeys(["durable", *required]):
        kept = not broken([name], offered)
        # A finding of the store says more, unless it says that all is well while its capabilities say that it is not.
        if not any(_is_about(finding, name) and finding.kept <= kept for finding in found):
            found.append(Finding(name, kept, told(name, offered)))
    return found


def _is_about(finding: Finding, name: str) -> bool:
    return finding.promise in (name, PROMISES[name].words)


def _is_optional(finding: Finding, required: Sequence[str]) -> bool:
    """Whether it is about promises that can be required, and are not."""
    return any(_is_about(finding, name) for name in PROMISES) and not any(_is_about(finding, n) for n in required)
