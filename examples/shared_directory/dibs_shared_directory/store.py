"""The contract of dibs (``dibs.store``) over batons: what a request makes of a baton, and what it is told.

An act reads the server's clock once and then takes the requests in turn; each decides by the baton it sees and has
either nothing to change or one ``rename`` to try (``baton`` says why that is safe). A claim that finds itself on the
baton holds it, so repeating a request is safe. A token is the one before plus 1, and a baton is never removed.

Not promised: a waiting line, and signals; waiters poll once a second. While the file server hangs, so does a call:
the holder's trust ends by its own clock all the same.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported
from dibs.store import (
    GONE,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Held,
    Outcome,
    Release,
    Renew,
    Renewed,
    Request,
    StoreAddress,
    StoredLease,
    Transfer,
)
from dibs_shared_directory.baton import (
    FREE,
    KEPT,
    TRIES,
    Baton,
    OthersWereQuicker,
    Seen,
    ServerClock,
    called,
    found,
    has_links,
    look,
    read,
    remove,
    replace,
    swap,
    sync,
    tidy,
    token_of,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline

T = TypeVar("T")

CAPABILITIES = Capabilities(
    store="shared directory",
    survives_restart="yes",
    fencing_token="strict",
    clock="the file server's, as it stamps files",
    waiting_line="none",
    signal="poll",
    queue=False,
    durable=True,
    ttl_min_s=1.0,
    ttl_max_s=30 * 24 * 3600.0,
    # File servers stamp with a clock that ticks every 1 to 10 ms.
    resolution_s=0.02,
    margin_s=0.05,
)
# Folders of clocks that have not been read for this long belong to clients that are gone.
CLOCK_IDLE_NS = 24 * 3600 * 10**9


class SharedDirectoryStore:
    def __init__(self, root: str) -> None:
        self._root = root
        self._names = os.path.join(root, "names")
        self._clocks = os.path.join(root, "clocks")
        self._clock: ServerClock | None = None
        self._name_of: dict[str, str] = {}  # which name a folder is for; that never changes

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._translating():
            # Read once and first: a grant then counts from before it was made, and from after it was asked for.
            now_ns = self._now_ns()
            for request in requests:
                if deadline.remaining() <= 0:
                    raise StoreUnavailable(f"{self._root!r} was too slow: the request ran out of time")
                if isinstance(request, Acquire):
                    outcomes.append(self._acquire(request, now_ns))
                elif isinstance(request, Transfer):
                    outcomes.append(self._transfer(request, now_ns))
                else:
                    outcomes.append(self._extend_or_end(request, now_ns))
            # A grant is on the disk before it is told, and so is what a release keeps; all else need not be.
            lasting = {
                request.name
                for request, outcome in zip(requests, outcomes, strict=True)
                if isinstance(outcome, Granted)
                or (isinstance(request, Release) and request.keep > 0 and outcome is RELEASED)
            }
            for folder in (*map(self._folder, lasting), *([self._names] if lasting else [])):
                sync(folder)
        return outcomes

    def _acquire(self, request: Acquire, now_ns: int) -> Outcome:
        folder, claim, until_ns = self._folder(request.name), _digest(request.claim_id), now_ns + _ns(request.ttl)

        def decide(baton: Baton) -> tuple[Baton, Outcome] | None:
            since = baton.granted_ns / 1e9
            if baton.claim == claim:
                return baton._replace(until_ns=max(baton.until_ns, until_ns)), Granted(baton.token, since)
            if baton.in_force(now_ns):
                details = _details(folder, baton)
                if details is None:
                    return None
                return baton, Held(details["holder"], baton.token, since, (baton.until_ns - now_ns) / 1e9)
            mine = Baton(baton.token + 1, now_ns, until_ns, claim)
            write(os.path.join(folder, mine.details), json.dumps({"holder": request.holder, "info": request.info}))
            return mine, Granted(mine.token, now_ns / 1e9)

        before, after, outcome = self._change(request.name, decide, make=True)
        if after.token > before.baton.token:
            tidy(folder, before, after)
        return outcome

    def _transfer(self, request: Transfer, now_ns: int) -> Outcome:
        folder, claim, until_ns = self._folder(request.name), _digest(request.claim_id), now_ns + _ns(request.ttl)

        def decide(baton: Baton) -> tuple[Baton, Outcome]:
            if not baton.in_force(now_ns) or baton.claim not in (claim, _digest(request.from_claim)):
                return baton, GONE
            if baton.claim == claim:
                after = baton._replace(until_ns=max(baton.until_ns, until_ns))
                return after, Granted(baton.token, baton.granted_ns / 1e9)
            mine = Baton(baton.token + 1, now_ns, until_ns, claim)
            write(os.path.join(folder, mine.details), json.dumps({"holder": request.holder, "info": request.info}))
            return mine, Granted(mine.token, now_ns / 1e9)

        before, after, outcome = self._change(request.name, decide)
        if after.token > before.baton.token:
            tidy(folder, before, after)
        return outcome

    def _extend_or_end(self, request: Renew | Release, now_ns: int) -> Outcome:
        claim = _digest(request.claim_id)

        def decide(baton: Baton) -> tuple[Baton, Outcome]:
            if baton.claim != claim or not baton.in_force(now_ns):
                return baton, GONE
            if isinstance(request, Renew):
                until_ns = max(baton.until_ns, now_ns + _ns(request.ttl))
                return baton._replace(until_ns=until_ns), Renewed(until_ns / 1e9)
            if request.keep > 0 and request.info is not None:
                folder = self._folder(request.name)
                details = _details(folder, baton) or {"holder": "somebody unknown"}
                replace(folder, baton.details, json.dumps({**details, "info": request.info}))
            free_at_ns = now_ns + _ns(request.keep)
            return baton._replace(claim=claim + KEPT if request.keep > 0 else FREE, until_ns=free_at_ns), RELEASED

        return self._change(request.name, decide)[2]

    def _change(
        self, name: str, decide: Callable[[Baton], tuple[Baton, T] | None], *, make: bool = False
    ) -> tuple[Seen, Baton, T]:
        """Make of the baton what ``decide`` says; what was seen, what the baton is now, and what to answer.

        ``decide`` gives the baton back as it is when there is nothing to change, and None to look again.
        """
        folder = self._folder(name)
        for _ in range(TRIES):
            seen = look(folder)
            if make and not seen.file:
                found(folder, name)
                continue
            decision = decide(seen.baton)
            if decision is not None:
                after, answer = decision
                if after == seen.baton or swap(folder, seen.file, after):
                    return seen, after, answer
        raise OthersWereQuicker(f"others were quicker {TRIES} times in {folder!r}")

    def _folder(self, name: str) -> str:
        """Not called as the name: that may be too long, and a file system may fold case or accents."""
        return os.path.join(self._names, _digest(name))

    def _now_ns(self) -> int:
        if self._clock is not None:
            with suppress(FileNotFoundError):  # then somebody has tidied up, or the share is gone
                return self._clock.now_ns()
        if not os.path.isdir(self._clocks):
            raise SetupRequired(
                f"{self._root!r} is not set up for leases. Is the share mounted here? If so, run `dibs setup` once"
            )
        clock = ServerClock(self._clocks)
        if not clock.fine:
            clock.close()
            raise Unsupported(f"the time stamps of {self._root!r} are too coarse to tell the time by")
        self._clock = clock
        return clock.now_ns()

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        with self._translating():
            now_ns = self._now_ns()
            names = [name for name in map(self._name, os.scandir(self._names)) if name and first <= name < before]
            return [lease for name in sorted(names) if (lease := self._lease(name, now_ns))]

    def _lease(self, name: str, now_ns: int) -> StoredLease | None:
        def decide(baton: Baton) -> tuple[Baton, StoredLease | None] | None:
            if not baton.in_force(now_ns):
                return baton, None
            details = _details(self._folder(name), baton)
            if details is None:
                return None
            times = (baton.granted_ns / 1e9, baton.until_ns / 1e9, (baton.until_ns - now_ns) / 1e9)
            return baton, StoredLease(name, 1, details["holder"], baton.token, *times, details["info"], 0)

        return self._change(name, decide)[2]

    def _name(self, folder: os.DirEntry[str]) -> str | None:
        name = self._name_of.get(folder.name) or called(folder.path)
        if name:
            self._name_of[folder.name] = name
        return name

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        def decide(baton: Baton) -> tuple[Baton, bool]:
            if baton.token != fencing_token or not baton.in_force(now_ns):
                return baton, False
            kept = baton._replace(claim=baton.claim.removesuffix(KEPT) + KEPT)
            return (baton._replace(claim=FREE, until_ns=now_ns) if now else kept), True

        with self._translating():
            now_ns = self._now_ns()
            return self._change(name, decide)[2]

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        """Only the baton is left of a name, as the floor under its tokens."""
        count = 0
        with self._translating():
            now_ns = self._now_ns()
            for folder in os.scandir(self._names):
                name = self._name(folder)
                if name is None or not first <= name < before:
                    continue
                baton, _, entries = look(folder.path)
                old = [entry for entry in entries if token_of(entry) <= baton.token]
                if old and baton.until_ns <= now_ns - _ns(older_than):
                    count += 1
                    for entry in old:
                        remove(folder.path, entry)
            for clock in os.scandir(self._clocks):
                with suppress(OSError):  # whose owner wakes up after all notices, and makes another
                    if clock.stat().st_mtime_ns < now_ns - CLOCK_IDLE_NS:
                        os.rmdir(clock)
        return count

    def setup(self, deadline: Deadline) -> None:
        with self._translating():
            os.makedirs(self._names, exist_ok=True)
            os.makedirs(self._clocks, exist_ok=True)  # last, since it says that the rest is there

    def schema(self) -> str:
        return f"mkdir -p '{self._names}' '{self._clocks}'\n"

    def check(self, deadline: Deadline) -> list[Finding]:
        with self._translating():
            self._now_ns()
            links = has_links(self._clocks)
        return [
            Finding("reachable", True, f"{self._root} can be written to, and keeps fine time stamps"),
            Finding("exclusion", links, "hard links are counted" if links else "no hard links: use another share"),
            Finding("durable", True, "grants are synced; an NFS server must export with `sync`, which is its default"),
        ]

    # -- errors and the end ---------------------------------------------------------------------------------------

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:  # which is an OSError as well
            raise
        except OSError as error:
            self._clock = None  # whether the share is there is looked at again
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
                raise SetupRequired(f"{error}. Is the share mounted and writable, and has it hard links?") from error
            raise StoreUnavailable(str(error)) from error

    def watch(self, address: str, deadline: Deadline) -> None:
        """There is nothing to wait on: a file server tells its other clients nothing."""

    def close(self) -> None:
        if self._clock is not None:
            self._clock.close()
            self._clock = None


def _details(folder: str, baton: Baton) -> dict[str, Any] | None:
    """Who holds the baton; None when it has moved on."""
    text = read(os.path.join(folder, baton.details))
    if text is None and str(baton) not in os.listdir(folder):
        return None
    try:
        return dict(json.loads(text or ""))
    except ValueError:  # lost in a power cut, which is no reason to let somebody else in
        return {"holder": "somebody unknown", "info": None}


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=20).hexdigest()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``directory:///absolute/path`` points; it takes no options."""
    root = unquote(url.path)
    if url.netloc or root in ("", "/"):
        raise InvalidOption("a directory URL names a folder: directory:///mnt/share/locks (three slashes)")
    return StoreAddress(f"directory://{root}", CAPABILITIES, lambda: SharedDirectoryStore(root))
