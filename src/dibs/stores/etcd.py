"""etcd: a lease is a key that one transaction made because the name had none, attached to an etcd lease of its ttl.

*A lock* is the range of keys ``<prefix>lease/<name>\\0/``; *a grant* is the transaction "no key in that range: put
``…/1/<claim id>``". As the claim id stands in the key, being the holder is the existence of one's own key: a release
deletes that key and no other, a repetition finds it there. Values are JSON for people: holder, since, ttl, info. A name
with permits has one more key there, its head, so that it is never a lock as well; ``etcd_pools`` grants them.

*The token* is the revision of the granting transaction (the key's ``create_revision``): it rises with every write to
the cluster, for ever, and renewals leave it alone. Nothing has to be kept for it when a lease ends, so nothing is.

*The clock* is etcd's: each key hangs on an etcd lease and goes when that runs out. Its ttl is the next whole second
above the one asked for; the end is noticed up to half a second late, never early; a change of leader starts it anew.
Grants of one call share an etcd lease, and since a keepalive prolongs whatever hangs on it, an etcd lease is kept alive
only by a renewal of *all* that hang on it; others get a new one. A keepalive can be answered for what is gone, or by a
leader that no longer leads: a renewal is believed when the keys are still there *afterwards*, seen in the same term of
raft. Etcd leases whose keys were all released are used again, since granting one is a write to disk: as they are while
they certainly last the ttl asked for, else after a keepalive in the same flight.

*The line* of a name is the range ``<prefix>line/<name>\\0/``: keys by ticket, the revision at which the waiter came.
They hang on an etcd lease of the client, kept alive by asking, so that the dead leave by themselves. Who asks for a
free name with others before it needs to know how long it has been free, which etcd cannot tell: it is counted on this
process's clock from when it was *seen* free. That decides who asks, never who holds.

Times shown (``acquired_at``) are the wall clocks of clients. Not promised: anything after a restore of older data, or
with ``--unsafe-no-fsync`` (see ``check``).
"""

from __future__ import annotations

from math import ceil
from operator import itemgetter
from shlex import quote

from dibs._typing import TYPE_CHECKING, Any
from dibs.clock import wall_now
from dibs.errors import InvalidOption, StoreUnavailable
from dibs.store import (
    ANY_SLOT,
    ANY_TICKET,
    GONE,
    RELEASED,
    Acquire,
    Capabilities,
    Finding,
    Granted,
    Outcome,
    Release,
    Renew,
    Request,
    StoreAddress,
    StoreBusy,
    StoredLease,
    Transfer,
)
from dibs.stores import etcd_check, etcd_watch
from dibs.stores import etcd_keys as keys
from dibs.stores.etcd_address import Access, access_to
from dibs.stores.etcd_flights import Flights, LeaseGone
from dibs.stores.etcd_gateway import Gateway
from dibs.stores.etcd_leases import Leases, Row, whole
from dibs.stores.etcd_locks import Locks
from dibs.stores.etcd_pools import ASK_AGAIN, Pools
from dibs.stores.etcd_renewals import Renewals
from dibs.stores.turns import rounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from urllib.parse import SplitResult

    from dibs.clock import Deadline
    from dibs.stores.etcd_watch import EtcdWatch

CAPABILITIES = Capabilities(
    store="etcd",
    survives_restart="yes, and failover",
    fencing_token="revision",
    clock="server lease",
    waiting_line="FIFO",
    signal="watch" if etcd_watch.available else "poll",
    queue=False,
    durable=True,
    # As shipped, etcd grants no lease shorter than 2 s, which is what a ttl of 1 s becomes.
    ttl_min_s=1.0,
    ttl_max_s=30 * 24 * 3600.0,
    # Etcd leases last whole seconds, and their end is noticed up to half a second late; never early.
    resolution_s=0.99,
    margin_s=0.010,
    permits=True,
    pause=True,
    tries=True,
    steady=True,
)
# What a URL may carry besides.
OPTIONS = ("prefix", "ca", "cert", "key")
PREFIX = "dibs/"
# How often a transfer looks again because the lease changed between the look and the write.
TRANSFER_TRIES = 8


class EtcdStore:
    def __init__(self, access: Access, prefix: str, watches: dict[str, EtcdWatch]) -> None:
        self._access = access
        self._gateway = Gateway(access)
        self._flights = Flights(self._gateway)
        self._leases = Leases(self._gateway, self._flights)
        self._layout = keys.Layout(prefix)
        self._watches = watches  # of the clients of this process, by their addresses
        self._renewals = Renewals(self._layout, self._flights, self._leases)
        self._locks = Locks(self._layout, self._flights, self._leases, watches, self._renewals)
        self._pools = Pools(self._layout, self._flights, self._leases, watches, self._renewals)
        self._facts: etcd_check.Facts | None = None

    @property
    def capabilities(self) -> Capabilities:
        if self._facts is not None and self._facts.unsafe:
            return CAPABILITIES._replace(
                survives_restart="yes, but for what the system had not written yet",
                durable=False,
                fencing_token="revision, unless a crash loses writes",
            )
        return CAPABILITIES

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[Request], deadline: Deadline) -> list[Outcome]:
        if not requests:
            if self._facts is None:
                self._facts = self._read_facts(deadline)
            else:
                self._gateway.one("maintenance/status", "{}", deadline)
            return []
        outcomes: list[Any] = [GONE] * len(requests)
        for places in rounds_of(requests):
            rows = [Row(place, requests[place]) for place in places]
            for kind, act in (
                (Release, self._release),
                (Renew, self._renewals.renew),
                (Transfer, self._transfer),
                (Acquire, self._acquire),
            ):
                mine = [row for row in rows if type(row.request) is kind]
                if mine:
                    act(mine, outcomes, deadline)
        if all(outcome is ASK_AGAIN for outcome in outcomes):
            raise StoreBusy("etcd: others were quicker, time after time")
        return outcomes

    # -- releasing ------------------------------------------------------------------------------------------------

    def _release(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        rows, places = self._found([row for row in rows if _unsure(row.request)], rows, deadline)
        deletions: list[str] = []
        owners: list[Row | None] = []  # whose grant a deletion ends, if any
        for row in rows:
            release = row.request
            if release.ticket is not None:
                place = self._layout.place(release.name, release.ticket, release.claim_id)
                standing = places.get(row.place, [place])
                deletions += map(keys.delete, standing)
                owners += [None] * len(standing)
            if release.claim_id and not release.keep:
                deletions.append(keys.delete(self._layout.claim_of(row.request)))
                owners.append(row)
        for owner, answer in zip(owners, self._flights.operations(deletions, deadline)[0], strict=True):
            if owner is not None:
                self._ended(owner, "deleted" in answer["response_delete_range"], outcomes)
        keeping = [row for row in rows if row.request.claim_id and row.request.keep]
        if keeping:
            self._release_later(keeping, outcomes, deadline)

    def _release_later(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Put a key that is no claim's in the place of the holder's, for as long as the name is kept."""
        looks = [keys.get_whole(self._layout.claim_of(row.request)) for row in rows]
        found = self._flights.operations(looks, deadline)[0]
        mine: dict[int, keys.Kept] = {}
        for row, answer in zip(rows, found, strict=True):
            for key in keys.kept(answer):
                mine[row.place] = key
        rows = [row for row in rows if row.place in mine]

        def text(row: Row, lease: str) -> str:
            key = mine[row.place]
            value = keys.marker_of(key, row.request.info)
            marker = keys.put(self._layout.claim(row.request.name, "", row.request.slot), value, lease)
            return keys.txn([keys.unchanged(key)], [keys.delete(key.key), marker])

        _, sent = self._leases.attach(rows, text, [ceil(row.request.keep) for row in rows], deadline)
        for row, (released, _, _) in zip(rows, sent.results, strict=True):
            self._ended(row, released, outcomes)

    def _found(self, unsure: list[Row], rows: list[Row], deadline: Deadline) -> tuple[list[Row], dict[int, list[str]]]:
        """The rows, with the slots of those that were never told theirs; and the places in line of these."""
        looks = []
        for row in unsure:
            spans = self._layout.line(row.request.name), self._layout.permit(row.request.name)
            looks += [keys.get_all(span, keys.KEYS_ONLY) for span in spans]
        answers = iter(self._flights.operations(looks, deadline)[0])
        places: dict[int, list[str]] = {}
        slots: dict[int, int] = {}
        for row in unsure:
            claim_id = row.request.claim_id
            line, permit = keys.kept(next(answers)), keys.kept(next(answers))
            if row.request.ticket == ANY_TICKET:
                places[row.place] = [key.key for key in line if key.place()[1] == claim_id]
            if row.request.slot == ANY_SLOT:  # a claim that is not found has no slot, and no key in that
                slots[row.place] = next(
                    (slot for slot, whose in map(keys.Kept.permit, permit) if whose == claim_id), ANY_SLOT
                )
        rows = [Row(row.place, row.request._replace(slot=slots.get(row.place, row.request.slot))) for row in rows]
        return rows, places

    def _ended(self, row: Row, released: bool, outcomes: list[Any]) -> None:
        outcomes[row.place] = RELEASED if released else GONE
        self._leases.ended(row.request.claim_id, released=released)
        self._pools.views.ended(row.request)

    # -- transferring ---------------------------------------------------------------------------------------------

    def _transfer(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        """Put a key on an etcd lease of ours in the place of the holder's: the revision of that is the token."""
        rows = [row for row in rows if row.request.from_claim]
        for _ in range(TRANSFER_TRIES):
            looks = [
                keys.get_whole(key)
                for row in rows
                for key in (self._layout.claim_of(row.request), self._source_of(row))
            ]
            answers = iter(self._flights.operations(looks, deadline)[0])
            again: dict[int, keys.Kept] = {}
            sources: dict[int, keys.Kept] = {}
            for row in rows:
                for found in (again, sources):
                    for key in keys.kept(next(answers)):
                        if bool(key.number("take")) == bool(row.request.permits):  # (a lock takes none)
                            found[row.place] = key
            repeated = [row for row in rows if row.place in again]
            if repeated:
                self._renewals.confirm(repeated, again, outcomes, deadline)
            rows = [row for row in rows if row.place in sources and row.place not in again]
            if rows:
                rows = self._move(rows, sources, outcomes, deadline)
            if not rows:
                return
        raise StoreUnavailable("etcd: others wrote to the same lease all the time")

    def _move(
        self, rows: list[Row], sources: dict[int, keys.Kept], outcomes: list[Any], deadline: Deadline
    ) -> list[Row]:
        """Put the new claims in the place of those that were seen; the rows whose lease had changed."""
        since = wall_now()

        def text(row: Row, lease: str) -> str:
            seen = sources[row.place]
            value = keys.value_of(row.request, since, seen.shown().take)
            mine = keys.put(self._layout.claim_of(row.request), value, lease)
            # (As it was read: had it been reduced since, this would take more again.)
            return keys.txn([keys.same(seen)], [keys.delete(seen.key), mine])

        ttls = [whole(row.request.ttl) for row in rows]
        leases, sent = self._leases.attach(rows, text, ttls, deadline)
        changed, granted = [], []
        for row, ttl, (succeeded, _, revision) in zip(rows, ttls, sent.results, strict=True):
            if succeeded:
                outcomes[row.place] = Granted(revision, since, row.request.slot)
                self._leases.ended(row.request.from_claim, released=False)
                granted.append((ttl, row.request.claim_id))
            else:
                changed.append(row)
        self._leases.granted(leases, granted)
        return changed

    def _source_of(self, row: Row) -> str:
        return self._layout.claim(row.request.name, row.request.from_claim, row.request.slot)

    # -- acquiring ------------------------------------------------------------------------------------------------

    def _acquire(self, rows: list[Row], outcomes: list[Any], deadline: Deadline) -> None:
        pools = [row for row in rows if row.request.permits]
        if pools:
            self._pools.acquire(pools, outcomes, deadline)
        locks = [row for row in rows if not row.request.permits]
        if locks:
            self._locks.acquire(locks, outcomes, deadline)

    # -- see and mend ---------------------------------------------------------------------------------------------

    def leases(self, first: str, before: str, deadline: Deadline) -> list[StoredLease]:
        held, waiting = self._layout.between(first, before)
        answers, _ = self._flights.operations([keys.get_all(held), keys.get_all(waiting, keys.KEYS_ONLY)], deadline)
        count: dict[str, int] = {}
        for key in keys.kept(answers[1]):
            name = key.name(self._layout.lines)
            count[name] = count.get(name, 0) + 1
        start = self._layout.leases
        found = [key for key in keys.kept(answers[0]) if key.key != self._layout.head(key.name(start))]
        times, _ = self._leases.times_left(dict.fromkeys(key.lease for key in found), deadline)
        now = wall_now()
        shown = []
        for key in found:
            name, left = key.name(start), times[key.lease].free_in
            holder, token, since, info, take = key.shown()
            others = count.get(name, 0)
            shown.append(StoredLease(name, key.permit()[0], holder, token, since, now + left, left, info, others, take))
        return sorted(shown, key=itemgetter(0, 1))

    def break_lease(self, name: str, fencing_token: int, now: bool, deadline: Deadline) -> bool:
        answers, _ = self._flights.operations([keys.get_all(self._layout.slots(name))], deadline)
        for key in keys.kept(answers[0]):
            if key.shown().fencing_token != fencing_token:
                continue
            marker = self._layout.claim(name, "", key.permit()[0])
            if key.key == marker and not now:
                return True
            ends = [keys.delete(key.key)]
            if not now:
                ends.append(keys.put(marker, keys.marker_of(key), key.lease))
            try:
                return self._flights.transactions([keys.txn([keys.unchanged(key)], ends)], deadline).results[0][0]
            except LeaseGone:
                return False
        return False

    def purge(self, first: str, before: str, older_than: float, deadline: Deadline) -> int:
        """Of free locks nothing is kept: the floor under tokens is the cluster's revision. Of others the head is."""
        return self._pools.purge(first, before, older_than, deadline)

    def setup(self, deadline: Deadline) -> None:
        """Nothing to make; but what is wrong with address, login or rights is said now."""
        permit = self._layout.permit("")
        self._flights.operations([keys.get_all(permit, keys.FIRST), keys.delete(permit.first)], deadline)

    def schema(self) -> str:
        prefix = quote(self._layout.prefix)
        return (
            f"# Nothing to make. With authentication on, a user for dibs needs this and no more:\n"
            f"etcdctl role add dibs\netcdctl role grant-permission dibs readwrite --prefix=true {prefix}\n"
            f"etcdctl user add dibs\netcdctl user grant-role dibs dibs\n"
        )

    def check(self, deadline: Deadline) -> list[Finding]:
        self._facts = self._read_facts(deadline)
        shortest_s = whole(CAPABILITIES.ttl_min_s)
        return etcd_check.findings(self._gateway, self._access, self._facts, shortest_s, deadline)

    def _read_facts(self, deadline: Deadline) -> etcd_check.Facts:
        return etcd_check.read(self._gateway, self._layout.claim("", ""), deadline)

    def watch(self, address: str, deadline: Deadline) -> EtcdWatch | None:
        if not etcd_watch.available:
            return None
        return etcd_watch.EtcdWatch(address, Gateway(self._access), self._watches)

    def close(self) -> None:
        self._gateway.close()


def _unsure(release: Release) -> bool:
    """Whether it is for a claim that was never told its ticket or its slot."""
    return release.ticket == ANY_TICKET or release.slot == ANY_SLOT


def address(url: SplitResult, options: dict[str, str]) -> StoreAddress:
    """Where ``etcd://user:password@host:port,host:port/?prefix=dibs/`` points; ``etcds://`` is with TLS.

    Options: prefix (of all keys, ``dibs/``); with TLS ca (certificates to trust; the system's by default), cert and key
    (this client's own). Several hosts are members of one cluster.
    """
    prefix = options.pop("prefix", PREFIX)
    if not prefix.isprintable():
        raise InvalidOption("the URL option prefix must be printable characters, for people who look at the keys")
    access = access_to(url, options)
    hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in access.endpoints)
    watches: dict[str, EtcdWatch] = {}
    shown = f"{url.scheme}://{hosts}/" + ("" if prefix == PREFIX else f"?prefix={prefix}")
    return StoreAddress(shown, CAPABILITIES, lambda: EtcdStore(access, prefix, watches))
