"""What a user may ask of a store with ``?require=``, and a store that hands out nothing while it breaks that.

The names are the fields of ``Capabilities`` that declare the promises. What is declared before a store was reached may
turn out otherwise by the server's settings. So only what no setting can give is refused when the client is made; the
rest is judged when a connection is, by what it then says.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, cast
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable, Unsupported, did_you_mean, without_frames
from dibs.store import Release

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dibs.clock import Deadline
    from dibs.jobs import Finish, JobOutcome, JobRequest, Put
    from dibs.store import Capabilities, Outcome, Request, Store, StoreAddress


class Promise(NamedTuple):
    """A promise that may be required. ``words`` is what a finding of a store's ``check`` may call it instead."""

    words: str
    kept: Callable[[Capabilities], bool]
    #: The field of Capabilities that says in words how far it is kept.
    told_by: str


PROMISES = {
    "durable": Promise("grants survive a crash of the server", lambda c: c.durable, "survives_restart"),
    "survives_restart": Promise(
        "leases survive a restart", lambda c: c.survives_restart.partition(",")[0] == "yes", "survives_restart"
    ),
    "fencing_token": Promise(
        "fencing tokens rise", lambda c: c.fencing_token in ("strict", "revision", "zxid"), "fencing_token"
    ),
    "waiting_line": Promise("waiters are served in order", lambda c: c.waiting_line == "FIFO", "waiting_line"),
    "signal": Promise(
        "waiters are woken by the release", lambda c: not c.signal.startswith(("poll", "none")), "signal"
    ),
}
# How a field begins that no setting of the server changes for the better.
NEVER = ("no", "poll", "best effort")


def parse(text: str) -> list[str]:
    """The promises that ``durable,fencing_token`` names; InvalidOption for what is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PROMISES:
            raise InvalidOption(
                f"require={name!r} names no promise of a store{did_you_mean(name, PROMISES)}. "
                f"There are {', '.join(PROMISES)}"
            )
    return names


def broken(names: Sequence[str], capabilities: Capabilities) -> list[str]:
    """Which of these promises a store with these capabilities does not keep."""
    return [name for name in names if not PROMISES[name].kept(capabilities)]


def told(name: str, capabilities: Capabilities) -> str:
    """What the store says about a promise, in its words."""
    field = PROMISES[name].told_by
    text = str(getattr(capabilities, field))
    return text if field == name else f"{field.replace('_', ' ')}: {text}"


def requiring(address: StoreAddress, text: str) -> StoreAddress:
    """The address, opened only to stores that keep these promises; Unsupported when that cannot be."""
    names = parse(text)
    declared = address.capabilities
    hopeless = [name for name in broken(names, declared) if getattr(declared, PROMISES[name].told_by).startswith(NEVER)]
    if hopeless:
        said = "; ".join(told(name, declared) for name in hopeless)
        raise Unsupported(f"{declared.store} cannot promise what is required of it: {', '.join(hopeless)} ({said})")
    return address._replace(open=lambda: cast("Store", Requiring(address.open, names)))


def _hands_out_nothing(request: Request) -> bool:
    return type(request) is Release and not request.keep


class Requiring:
    """A store that takes no requests before its connection was seen to keep what is required; the rest it passes on.

    A connection that was lost may have been opened anew within a call, to a server that was started with other
    settings, or to another one. What such a call brought is told to nobody, and the next one finds out why. Plain
    releases are taken in any case: by them nothing is handed out.
    """

    def __init__(self, open_store: Callable[[], Store], names: Sequence[str]) -> None:
        self._open = open_store
        self._names = names
        self.inner: Any = open_store()
        self._checked = False

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        plain = [request for request in requests if _hands_out_nothing(request)]
        if plain and len(plain) == len(requests):
            return self.inner.act(requests, deadline)  # type: ignore[no-any-return]
        try:
            store = self.seen(deadline)
        except SetupRequired as error:
            if not plain:
                raise
            released, refused = iter(self.inner.act(plain, deadline)), cast("Outcome", without_frames(error))
            return [next(released) if _hands_out_nothing(request) else refused for request in requests]
        outcomes = store.act(requests, deadline)
        self.look_again()
        return outcomes  # type: ignore[no-any-return]

    @property
    def jobs(self) -> RequiringJobs:
        return RequiringJobs(self)

    def seen(self, deadline: Deadline) -> Any:
        """The store, once its connection was seen to keep what is required; SetupRequired."""
        if not self._checked:
            self.inner.act((), deadline)  # connects, so that what a setting decides has been read
            seen = self.inner.capabilities
            lacking = broken(self._names, seen)
            if lacking:
                # The next connection may find the settings mended.
                self.inner.close()
                self.inner = self._open()
                said = "; ".join(told(name, seen) for name in lacking)
                raise SetupRequired(
                    f"{seen.store} does not promise what is required of it: {', '.join(lacking)} ({said}). "
                    "`dibs doctor` says what to change"
                )
            self._checked = True
        return self.inner

    def look_again(self) -> None:
        """Raise StoreUnavailable unless the connection, which may be another one by now, still keeps what it did."""
        if broken(self._names, self.inner.capabilities):
            self._checked = False
            raise StoreUnavailable(f"{self.inner.capabilities.store} no longer promises what is required of it")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class RequiringJobs:
    """The queues of such a store."""

    def __init__(self, store: Requiring) -> None:
        self._store = store

    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        outcomes = self._store.seen(deadline).jobs.act(requests, deadline)
        self._store.look_again()
        return outcomes  # type: ignore[no-any-return]

    def within(self, request: Put | Finish, dialect: str, files: Any, deadline: Deadline) -> Any:
        # (What SQLite promises is in no setting, and to open its file here would be to wait for this very transaction.)
        store = self._store.seen(deadline) if files is None else self._store.inner
        return store.jobs.within(request, dialect, files, deadline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store.inner.jobs, name)
