"""Several memcached servers as one store: each name is kept on one of them, chosen by its hash. At the user's risk.

Programs agree on who holds what only while all of them list the same servers in the same order: where one lists
another, some names have two holders. So a name never moves: while its server is away it cannot be had.
"""

from __future__ import annotations

from hashlib import sha256

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable
from dibs.store import GONE, Finding

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dibs.clock import Deadline
    from dibs.store import Capabilities, Outcome, PartUnavailable, Request, Store, StoredLease, Watch
    from dibs.stores.parts import Parts

# What the user writes into the URL, so that whoever reads it there knows.
RISK = "two-holders-possible"


class SpreadStore:
    def __init__(self, stores: Sequence[Store], parts: Parts) -> None:
        self._stores = stores
        self._parts = parts

    def _place(self, name: str) -> int:
        return int.from_bytes(sha256(name.encode()).digest()[:8], "big") % len(self._stores)

    @property
    def capabilities(self) -> Capabilities:
        return self._stores[0].capabilities

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        parts: dict[int, list[int]] = {} if requests else {place: [] for place in range(len(self._stores))}
        for index, request in enumerate(requests):
            parts.setdefault(self._place(request.name), []).append(index)
        outcomes: list[Any] = [GONE] * len(requests)
        trouble: StoreUnavailable | None = None
        # A server that was silent is asked last.
        for place in sorted(parts, key=self._parts.is_away):
            these = [requests[index] for index in parts[place]]
            answers: Sequence[Outcome | PartUnavailable]
            try:
                limit = self._parts.limit_of_several if len(parts) > 1 else self._parts.limit
                answers = self._stores[place].act(these, limit(place, deadline))
                self._parts.answered(place)
            except StoreUnavailable as error:
                if not requests:
                    raise
                trouble = error
                answers = [self._parts.did_not(place, error)] * len(these)
            for index, answer in zip(parts[place], answers, strict=True):
                outcomes[index] = answer
        if trouble is not None and not self._parts.worked:
            raise trouble  # that is more likely a wrong address than an outage
        return outcomes

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        return sorted(lease for store in self._stores for lease in store.leases(first, before, deadline))

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        return self._stores[self._place(name)].break_lease(name, fencing_token, now, deadline)

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        return sum(store.purge(first, before, older_than, deadline) for store in self._stores)

    def setup(self, deadline: Deadline) -> None:
        for store in self._stores:
            store.setup(deadline)

    def schema(self) -> str:
        return self._stores[0].schema()

    def check(self, deadline: Deadline) -> list[Finding]:
        count = len(self._stores)
        found = [
            Finding(
                "all programs ask the same server",
                False,
                f"names are spread over {count} servers: where a program lists others, or in another order, two hold "
                "one name. Name one server",
            )
        ]
        for number, store in enumerate(self._stores, 1):
            found += [
                finding._replace(detail=f"server {number} of {count}: {finding.detail}")
                for finding in store.check(deadline)
            ]
        return found

    def watch(self, address: str, deadline: Deadline) -> Watch:
        watches = [store.watch(address, deadline) for store in self._stores]
        return _SpreadWatch(self, [watch for watch in watches if watch is not None])

    def close(self) -> None:
        for store in self._stores:
            store.close()


class _SpreadWatch:
    def __init__(self, store: SpreadStore, watches: Sequence[Watch]) -> None:
        self._store = store
        self._watches = watches
        self.interval_s = watches[0].interval_s

    def fileno(self) -> int | None:
        return None  # it would have to be several: the answers are read at the next look

    def changed(self, names: Collection[str]) -> Collection[str]:
        found: list[str] = []
        for place, watch in enumerate(self._watches):
            found += watch.changed([name for name in names if self._store._place(name) == place])
        return found

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
