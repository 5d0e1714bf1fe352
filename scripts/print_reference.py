"""Print the reference pages from the code: `make docs`. With --check: say which pages are out of date, and exit 1.

What a page says comes from docstrings, signatures, constants and parsers, so it cannot drift from them. The output is the
same under every supported Python. A new constant or capability that no page explains is an error here: explain it in the
tables below.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import dibs
import dibs.aio
import dibs.cli
import dibs.client
import dibs.connecting
import dibs.desk
import dibs.errors
import dibs.lease
from dibs.connecting import locate
from dibs.store import Capabilities
from dibs.stores import memory, postgres, sqlite
from dibs.testing.conformance import runs

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
HEAD = "<!-- Printed by scripts/print_reference.py (`make docs`). Change the code, not this page. -->\n"

STORES = (memory, sqlite, postgres)
EXAMPLE_URLS = {"SQLite": "sqlite:////var/lib/app/dibs.db", "PostgreSQL": "postgresql://app@db/prod"}

CAPABILITY_WORDS = {
    "survives_restart": "A restart of the store keeps leases and tokens",
    "fencing_token": "How reliably tokens rise",
    "clock": "The clock on which leases end",
    "waiting_line": "In which order waiters are served",
    "signal": "What wakes a waiter",
    "queue": "Could keep a durable queue (not in this version)",
    "durable": "An acknowledged grant outlives a crash and a power cut (SQLite: its token is never repeated)",
    "ttl_min_s": "Shortest ttl, in seconds",
    "ttl_max_s": "Longest ttl, in seconds",
    "resolution_s": "How far around an expiry the answer may go either way, in seconds",
    "margin_s": "How much earlier than the allowance for clock rates trust ends, in seconds",
}

# Constants by module: what a user meets, and what goes on inside.
LIMITS = {
    "dibs.names": {
        "NAME_BYTES_MAX": "longest name, in bytes of UTF-8",
        "NAMESPACE_CHARS_MAX": "longest namespace, in characters",
        "INFO_BYTES_MAX": "longest info, in bytes of JSON",
        "TTL_MAX_S": "longest ttl that any store may offer, in seconds",
        "WAIT_MAX_S": "longest finite timeout, in seconds",
    },
    "dibs.desk": {
        "TTL_DEFAULT_S": "ttl where none is given, in seconds",
        "REQUEST_TIMEOUT_MAX_S": "longest request_timeout, in seconds",
        "TERMS_MAX": "different sets of lock options that a client remembers having checked",
    },
    "dibs.stores.sqlite": {
        "SQLITE_MIN": "oldest SQLite",
        "TOKENS_PER_BOOT": "by how much the floor under the tokens rises at each boot of the machine",
    },
    "dibs.stores.postgres": {"SERVER_MIN": "oldest PostgreSQL (120000 is 12)"},
    "dibs.stores.identifiers": {"TABLE_BYTES_MAX": "longest table name, in bytes"},
}
INSIDE = {
    "dibs.session": {
        "REQUEST_TIMEOUT_S": "one call to the store takes at most this long (option `request_timeout`)",
        "PATIENCE_S": "a store that was reached before is tried again for this long (option `patience`)",
    },
    "dibs.trust": {
        "DRIFT": "by which part clocks may run faster or slower than each other",
        "RENEWALS_PER_TTL": "renewals in a ttl",
    },
    "dibs.lane": {
        "BATCH_MAX": "requests in one call to the store",
        "QUEUE_MAX": "requests that may wait for a batch; more acquires are refused at once",
        "IDLE_S": "the claim lane's thread ends after so many seconds without work",
        "BACKOFF_MIN_S": "first pause before a failed batch is repeated; it doubles",
        "BACKOFF_MAX_S": "last pause",
        "BUSY_PAUSE_S": "pause before a batch is repeated that the store was too busy to take",
    },
    "dibs.renewer": {
        "RENEW_MAX": "leases renewed by one call",
        "COALESCE": "renewals due within this part of their interval go with those that are due now",
        "RETRY_PART": "pause before a renewal without an answer is tried again, as a part of its interval",
        "RETRY_MAX_S": "longest such pause",
        "IDLE_S": "the renewal thread ends after so many seconds without leases",
    },
    "dibs.waiting": {
        "POLL_MIN_S": "a waiter asks again after a random time, at least this",
        "POLL_MAX_S": "and at most this",
        "ASK_AGAIN_MIN_S": "no waiter asks sooner than this after it was refused",
        "LOOK_PART": "pause between looks for a change, as a part of the time waited so far",
        "LOOK_GROWTH_MAX": "longest such pause, as a multiple of the shortest (SQLite: 1 ms)",
        "WATCH_RETRY_S": "pause before a broken source of hints is opened again",
        "IDLE_S": "the waiting thread ends after so many seconds without waiters",
    },
    "dibs.store": {
        "LINE_GRACE_S": "a free name is kept this long for waiters ahead in line",
        "LAST_TICKET": "the place of whoever did not line up",
    },
}

CLIENT_OPTION_WORDS = {
    "namespace": "separates applications in one store",
    "ttl": "the default ttl of its locks, in seconds",
    "info": "a small JSON object shown with its leases (not in a URL)",
    "request_timeout": "seconds one call to the store may take",
    "patience": "seconds for which a store that was reached before is tried again",
}
VARIABLES = {
    "DIBS_URL": "where leases are kept, for `dibs.connect()` without an argument and for the command line",
    "XDG_STATE_HOME": "the folder in which `dibs/dibs.db` is the default file (`~/.local/state` if unset)",
    "DIBS_NAME, DIBS_SLOT, DIBS_FENCING_TOKEN": "set by `dibs run` for its command",
    "PGPASSWORD, PGPASSFILE, PGSERVICE, …": "read by PostgreSQL's client library, as by `psql`",
}


# -- what a docstring and a signature look like ------------------------------------------------------------------------


def doc(thing: object) -> str:
    """The docstring as Markdown."""
    text = inspect.cleandoc(getattr(thing, "__doc__", None) or "")
    return re.sub(r"``(.+?)``", r"`\1`", text)


def annotation(value: Any) -> str:
    """An annotation as it is written; NamedTuple wraps it."""
    if value is inspect.Parameter.empty:
        return ""
    text = getattr(value, "__forward_arg__", value)
    return text if isinstance(text, str) else getattr(text, "__name__", repr(text))


def parameters(function: Any) -> str:
    """The parameters without self, each with its annotation and default."""
    words = []
    kind = None
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            words.append("*")
        kind = parameter.kind
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        word = f"{stars}{name}"
        if annotation(parameter.annotation):
            word += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            word += f" = {parameter.default!r}"
        words.append(word)
    return ", ".join(words)


def returned(function: Any) -> str:
    return annotation(inspect.signature(function).return_annotation)


def call(name: str, function: Any) -> str:
    """A signature, on several lines when it is long."""
    text = f"{name}({parameters(function)})"
    arrow = f" -> {returned(function)}" if returned(function) else ""
    if len(text + arrow) > 100:
        inner = parameters(function).replace(", ", ",\n    ") if "[" not in parameters(function) else _split(function)
        text = f"{name}(\n    {inner},\n)"
    return text + arrow


def _split(function: Any) -> str:
    """Parameters on a line each; commas inside brackets separate nothing."""
    return re.sub(r", (?![^\[]*\])", ",\n    ", parameters(function))


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# -- the pages ---------------------------------------------------------------------------------------------------------


def capabilities() -> str:
    """What stores declare; the conformance suite holds them to it."""
    shown = [store.CAPABILITIES for store in STORES]
    rows: list[tuple[object, ...]] = []
    for field in Capabilities._fields:
        if field != "store":
            values = [_plain(getattr(each, field)) for each in shown]
            rows.append((f"`{field}`", CAPABILITY_WORDS[field], *values))
    return (
        "# Capabilities\n\n"
        "What each store declares. `client.capabilities` tells the same of the store in use, after a look at the\n"
        "server's settings: behind a connection pooler `signal` differs, and where the server forgets acknowledged\n"
        "commits `durable` and `fencing_token` do. The [conformance suite](conformance.md) runs what is declared.\n\n"
        + table(("field", "meaning", *[each.store for each in shown]), rows)
    )


def _plain(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else _number(value)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}" if value < 1e6 else f"{value:,.0f}"
    if isinstance(value, int) and value >= 2**40 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    if isinstance(value, int) and value >= 2**40 and (value + 1) & value == 0:
        return f"2^{(value + 1).bit_length() - 1} - 1"
    if isinstance(value, int):
        return f"{value:,}" if value != postgres.SERVER_MIN else str(value)
    if isinstance(value, tuple):
        return ".".join(map(str, value[:2]))
    return str(value)


FACES = (
    (dibs.Client, dibs.AsyncClient, "client"),
    (dibs.Lock, dibs.AsyncLock, "lock"),
    (dibs.Lease, dibs.AsyncLease, "lease"),
    (dibs.lease.Lost, dibs.aio.AsyncLost, "lease.lost"),
)
BLOCK_WORDS = {
    dibs.Client: "`with client:` closes it at the end.",
    dibs.Lock: "`with lock as lease:` acquires, or raises LockTimeout; releases at the end, and raises LeaseLost if the "
    "lease was lost and the block has no error of its own.",
    dibs.Lease: "`with lease:` releases at the end, with LeaseLost as above.",
}


def api() -> str:
    check_store = import_module("dibs.testing").check_store
    parts = [
        "# API\n\n"
        "Everything public is in the package `dibs`. The face for asyncio has the same verbs with the same parameters; where\n"
        "*awaited* stands it returns an awaitable. Seconds are numbers or `timedelta`.\n",
        "## connect and connect_async\n",
        _signature(call("dibs.connect", dibs.connect)),
        doc(dibs.connect) + "\n",
        f"*asyncio:* `dibs.connect_async()`, with the same parameters. {doc(dibs.connect_async)}\n",
    ]
    assert parameters(dibs.connect) == parameters(dibs.connect_async)
    for plain, awaited, prefix in FACES:
        parts.append(f"## {plain.__name__} and {awaited.__name__}\n\n{doc(plain)}\n\n*asyncio:* {doc(awaited)}\n")
        if set(_members(plain)) != set(_members(awaited)):
            differing = set(_members(plain)) ^ set(_members(awaited))
            raise SystemExit(f"{plain.__name__} and {awaited.__name__} differ in {', '.join(sorted(differing))}")
        properties = [name for name in _members(plain) if isinstance(_static(plain, name), property)]
        if properties:
            rows = [_property(prefix, name, plain, awaited) for name in properties]
            parts.append(table(("property", "type", "meaning"), rows))
        parts += [_method(prefix, name, plain, awaited) for name in _members(plain) if name not in properties]
        if plain in BLOCK_WORDS:
            parts.append(f"### with {prefix}\n\n{BLOCK_WORDS[plain]} *asyncio: `async with`.*\n")
        if "__call__" in vars(plain):
            parts.append(f"### @lock\n\n{doc(plain.__call__)} *asyncio: for async functions.*\n")
    kinds = inspect.get_annotations(dibs.LeaseRecord)
    fields: list[tuple[object, ...]] = [(f"`{name}`", f"`{annotation(kinds[name])}`") for name in dibs.LeaseRecord._fields]
    fields.append(("`expires_at`", f"`{returned(_function(dibs.LeaseRecord.expires_at))}`"))
    parts += [
        f"## LeaseRecord\n\n{doc(dibs.LeaseRecord)} `client.leases()` and `client.holder()` return it.\n",
        table(("field", "type"), fields),
        f"`expires_at`: {doc(dibs.LeaseRecord.expires_at)}\n",
        f"## Capabilities\n\n{doc(Capabilities)} The fields: [capabilities](capabilities.md).\n",
        "## Errors\n\nThe tree: [errors](errors.md).\n",
        f"## dibs.testing\n\n{_signature(call('dibs.testing.check_store', check_store))}\n{doc(check_store)}\n",
    ]
    return "\n".join(parts)


def _static(kind: type, name: str) -> Any:
    return inspect.getattr_static(kind, name)


def _signature(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _members(kind: type) -> list[str]:
    """Public members in the order in which they are written, those of the base first."""
    names: list[str] = []
    for base in reversed(kind.__mro__[:-1]):
        names += [name for name in vars(base) if not name.startswith("_") and name not in names]
    return names


def _function(member: Any) -> Any:
    return member.fget if isinstance(member, property) else member


def _awaited(member: Any) -> bool:
    function = _function(member)
    return inspect.iscoroutinefunction(function) or returned(function).startswith("Awaitable[")


def _property(prefix: str, name: str, plain: type, awaited: type) -> tuple[object, ...]:
    one, two = _static(plain, name), _static(awaited, name)
    meaning = doc(one) + (" *asyncio: awaited.*" if _awaited(two) else "")
    return f"`{prefix}.{name}`", f"`{returned(one.fget)}`", meaning


def _method(prefix: str, name: str, plain: type, awaited: type) -> str:
    one, two = _static(plain, name), _static(awaited, name)
    if parameters(one) != parameters(two):
        raise SystemExit(f"{plain.__name__}.{name} and {awaited.__name__}.{name} have different parameters")
    lines = [f"### {prefix}.{name}\n", _signature(call(f"{prefix}.{name}", one)), doc(one) + "\n"]
    notes = ["awaited."] if _awaited(two) else []
    if _comparable(doc(one)) != _comparable(doc(two)) and not _comparable(doc(one)).startswith(_comparable(doc(two))):
        notes += [] if "dibs.Client." in doc(two) else [doc(two)]
    if notes:
        lines.append(f"*asyncio:* {' '.join(notes)}\n")
    return "\n".join(lines)


def _comparable(text: str) -> str:
    """Docstrings of the two faces say the same with these words changed."""
    return " ".join(text.replace("AsyncLease", "Lease").replace("an `Lease", "a `Lease").replace("task", "thread").split())


def errors() -> str:
    tree = ["DibsError", *_below(dibs.DibsError, 1)]
    parts = [
        "# Errors\n\n"
        "Everything dibs raises on purpose is a `DibsError`, except `TypeError`, `ValueError` and `OverflowError` where the\n"
        "standard library's locks raise them. *Held by another*, *store unreachable* and *misconfigured* are three classes.\n",
        "```text\n" + "\n".join(tree) + "\n```\n",
    ]
    for kind in _kinds(dibs.DibsError):
        code = dibs.cli.exit_code(kind.__new__(kind))
        others = [f"`{base.__name__}`" for base in kind.__bases__ if base is not dibs.DibsError and base is not Exception]
        facts = [f"is also a {', '.join(others)}"] if others else []
        facts += [f"`dibs` exits with {code}"] if code != dibs.cli.BUG else []
        parts.append(f"## {kind.__name__}\n\n{doc(kind)}\n")
        if facts:
            parts.append(f"*{'; '.join(facts)}.*\n")
    codes: list[tuple[object, ...]] = [
        (0, "done; with `--on-busy skip` also: not run, because somebody else had it"),
        (dibs.cli.NOT_HELD, "`show`, `break`: nobody holds it, or not with that token; `doctor`: a promise is not kept"),
        (dibs.cli.USAGE, "wrong usage"),
        (dibs.cli.UNREACHABLE, "the store cannot be reached"),
        (dibs.cli.BUG, "a fault of dibs"),
        (dibs.cli.SYSTEM, "the system refused a process"),
        (dibs.cli.UNWRITABLE, "output could not be written"),
        (dibs.cli.BUSY, "held by another for as long as it was to wait"),
        (dibs.cli.LOST, "the lease was lost, the command stopped"),
        (dibs.cli.MISCONFIGURED, "not set up, or misconfigured"),
        (dibs.cli.NOT_EXECUTABLE, "the command cannot be executed"),
        (dibs.cli.NOT_FOUND, "the command was not found"),
        (f"{dibs.cli.SIGNALLED}+n", "signal n ended the command, or dibs while it waited"),
    ]
    parts.append("## Exit codes\n\nOtherwise `dibs run` exits with the code of its command.\n")
    parts.append(table(("code", "meaning"), codes))
    return "\n".join(parts)


def _kinds(root: type) -> list[type]:
    return [kind for kind in vars(dibs.errors).values() if isinstance(kind, type) and issubclass(kind, root)]


def _below(root: type, depth: int) -> list[str]:
    lines = []
    for kind in _kinds(root):
        if root in kind.__bases__:
            others = ", ".join(base.__name__ for base in kind.__bases__ if base is not root)
            lines.append("  " * depth + kind.__name__ + (f"  ({others})" if others else ""))
            lines += _below(kind, depth + 1)
    return lines


def command_line() -> str:
    commands = list(dibs.cli.COMMANDS)
    parts = [
        "# Command line\n\nWhat `--help` prints, 100 columns wide. The codes: [errors](errors.md#exit-codes).\n",
        f"## dibs\n\n```text\n{_help([])}```\n",
    ]
    for command in commands:
        parts.append(f"## dibs {command}\n\n```text\n{_help([command])}```\n")
    return "\n".join(parts)


def _help(words: list[str]) -> str:
    text = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(text):
            dibs.cli.main([*words, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return text.getvalue().rstrip() + "\n"


def urls_and_options() -> str:
    schemes = sorted(dibs.connecting._SCHEMES)
    client_rows: list[tuple[object, ...]] = [
        (f"`{name}`", CLIENT_OPTION_WORDS[name], f"`{_number(dibs.desk.DEFAULTS[name])}`")
        for name in dibs.connecting._CLIENT_OPTIONS
    ]
    return "\n".join(
        [
            "# URLs, options and limits\n",
            "## URLs\n",
            table(
                ("URL", "store"),
                [
                    ("`sqlite:////absolute/path.db`", "SQLite, a file; three slashes: relative to the working directory"),
                    ("`postgresql://user@host:5432/database`", "PostgreSQL; several hosts: `host1:5432,host2:5432`"),
                    ("`memory://`", "this client only, in memory"),
                    ("`memory://name`", "all clients of this process that use this name"),
                    ("none", "`$DIBS_URL`, else the default SQLite file of this user"),
                ],
            ),
            f"Schemes: {', '.join(f'`{scheme}`' for scheme in schemes)}. `postgresql+driver://`, as SQLAlchemy writes it, is taken "
            "as `postgresql://`.\nOther packages can add stores with the entry point group "
            f"`{dibs.connecting.ENTRY_POINT_GROUP}`. An unknown option is an error, and so is one that stands twice.\n",
            "## Options of every URL\n",
            "An argument of `connect()` wins over the option in the URL.\n",
            table(("option", "meaning", "default"), client_rows),
            f"`info` is an argument of `connect()` only: {CLIENT_OPTION_WORDS['info'].split(' (')[0]}.\n",
            "## Options of a store\n",
            table(
                ("store", "option", "meaning", "default"),
                [
                    ("SQLite", "`table`", "the table; two more are named after it", "`dibs_lease`"),
                    ("PostgreSQL", "`table`", "the same", "`dibs_lease`"),
                    ("PostgreSQL", "`schema`", "the schema of the tables", "`public`"),
                ],
            ),
            "A PostgreSQL URL also carries the parameters of PostgreSQL's client library that is installed (`sslmode`,\n"
            "`sslrootcert`, `target_session_attrs`, `application_name`, `options`, `service` and the others), except\n"
            "`connect_timeout`: `request_timeout` is that.\n",
            "## Environment\n",
            table(("variable", "meaning"), [(f"`{name}`", words) for name, words in VARIABLES.items()]),
            "## Limits\n",
            table(("limit", "value", "meaning"), _constants(LIMITS)),
            "## Inside\n",
            "How the machinery is tuned. Not options, and not promised to stay.\n",
            table(("constant", "value", "meaning"), _constants(INSIDE)),
        ]
    )


def _constants(explained: dict[str, dict[str, str]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for module_name, words in explained.items():
        module = import_module(module_name)
        for name, meaning in words.items():
            rows.append((f"`{module_name.rpartition('.')[2]}.{name}`", _number(getattr(module, name)), meaning))
    return rows


def _check_constants() -> None:
    """Every number that a core module names is explained, as seen where it is defined."""
    for module_name, words in INSIDE.items():
        module = import_module(module_name)
        source = inspect.getsource(module)
        found = {name for name in re.findall(r"^([A-Z][A-Z0-9_]*)(?:: \w+)? = ", source, re.MULTILINE)}
        found = {name for name in found if type(getattr(module, name)) in (int, float) and name != "FOREVER"}
        unexplained = found - set(words)
        if unexplained:
            raise SystemExit(f"explain in scripts/print_reference.py: {module_name}: {', '.join(sorted(unexplained))}")


def schema() -> str:
    parts = [
        "# Tables\n\n"
        "What `dibs setup` runs and `dibs schema` prints. The tables are made to be read; only dibs should write to them.\n"
        "A row without a claim id is a name that was released.\n"
    ]
    for name, url in EXAMPLE_URLS.items():
        address, _ = locate(url)
        parts.append(f"## {name}\n\n```sql\n{address.open().schema().rstrip()}\n```\n")
    return "\n".join(parts)


def conformance() -> str:
    """The cases by promise."""
    cases = {}
    for run in runs():
        where = "store" if run.face == "store" else "threads and tasks"
        cases[run.case.name] = (run.case, where)
    promises = sorted({int(number) for case, _ in cases.values() for number in re.findall(r"P(\d+)", case.promise)})
    parts = [
        "# The conformance suite\n\n"
        "`dibs.testing.check_store(url)` runs these cases against a store, and `make test` runs them against every store\n"
        "that ships with dibs. A case is either for the contract of stores, or runs twice, through the face for threads\n"
        "and through the one for tasks. The promises are numbered in [safety](../explanation/safety.md#the-promises).\n"
    ]
    groups = [(f"P{number}", rf"\bP{number}\b") for number in promises]
    for title, pattern in (*groups, ("What the contract asks besides", r"^(?!.*\bP\d)")):
        rows: list[tuple[object, ...]] = [
            (f"`{case.name}`", where, re.sub(r"``(.+?)``", r"`\1`", case.sentence))
            for case, where in cases.values()
            if re.search(pattern, case.promise)
        ]
        if rows:
            parts.append(f"## {title}\n\n" + table(("case", "on", "what it proves"), rows))
    return "\n".join(parts)


PAGES = {
    "api.md": api,
    "capabilities.md": capabilities,
    "cli.md": command_line,
    "conformance.md": conformance,
    "errors.md": errors,
    "schema.md": schema,
    "urls-and-options.md": urls_and_options,
}


def printed() -> dict[str, str]:
    """The pages as they should be, by file name."""
    _check_constants()
    return {name: HEAD + "\n" + re.sub(r"\n{3,}", "\n\n", page()).strip() + "\n" for name, page in PAGES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the reference pages that come from the code.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a page is out of date")
    args = parser.parse_args()
    pages = printed()
    strangers = {path.name for path in FOLDER.glob("*.md")} - set(pages)
    stale = [
        name for name, text in pages.items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text("utf-8") != text
    ]
    if args.check:
        for name in stale:
            print(f"docs/reference/{name} is out of date: run `make docs`")
        for name in sorted(strangers):
            print(f"docs/reference/{name} is printed by nobody")
        return 1 if stale or strangers else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(pages[name], "utf-8")
        print(f"wrote docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
