"""Where requests to Redis go: one server, the master that sentinels name, or the nodes of a cluster.

A link sends a vector of requests in one flight (in a cluster one to each node, all under way at once) and brings their
answers. When an answer is missing, or the caller was interrupted, it closes its connections. In a cluster the answer to
what a silent node was asked is PartUnavailable, and the other connections stay.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import SetupRequired, StoreUnavailable
from dibs.store import TakesNoWrites
from dibs.stores.parts import ONE_OF_SEVERAL
from dibs.stores.redis_keys import SLOTS
from dibs.stores.redis_wire import Refusal, connect, greet, packed, raised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dibs.clock import Deadline
    from dibs.stores.redis_wire import Place, Wire

# How often one request follows a cluster that says its keys have moved.
REDIRECTS_MAX = 5


class Request(NamedTuple):
    """A command as bytes. In a cluster it goes to the node of the slot, or to the node named."""

    data: bytes
    slot: int = 0
    node: str | None = None
    #: The node is taking the slot over, and answers only who says that it was sent there.
    asking: bool = False


class Link:
    """One server: the one that the URL names, or the master that sentinels name."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._wire: Wire | None = None
        self._was_silent = False  # the last flight was not answered
        #: The nodes to which requests went since this was cleared.
        self.flown: set[str | None] = set()

    def fly(self, requests: Iterable[Request], deadline: Deadline, *, patient: bool = False) -> list[Any]:
        """Send all of these in one flight, and bring their answers.

        A master that says nothing is left in time for another that sentinels may name, unless what it was asked may
        well take long (``patient``). But not twice in turn, or what is slow, and not away, would never be done.
        """
        wire = self._wire or self.open(deadline)
        hasty = self.place.sentinel is not None and not self._was_silent and not patient
        self.flown.add(None)
        try:
            for request in requests:  # the server is at work on one while the next is put together
                wire.send(request.data, 1, deadline)
            answers = wire.receive(deadline, _part_of(deadline) if hasty else None)
            self._was_silent = False
            return answers
        except StoreUnavailable:
            self._was_silent = True
            self.close()
            raise
        except BaseException:
            # Ctrl-C. The server is at work on it; were it to finish after the release that follows on another
            # connection, the name would stay granted to nobody. So let it finish first, if it is quick.
            try:
                wire.finish(deadline)
            finally:  # who presses twice interrupts that, too
                self.close()
            raise

    def open(self, deadline: Deadline) -> Wire:
        """Be connected to a server that takes writes."""
        if self._wire is None:
            self._wire = _greeted(self._find(deadline), self.place, deadline, _check_role)
        return self._wire

    def _find(self, deadline: Deadline) -> Wire:
        place = self.place
        if place.sentinel is not None:
            return connect(place, _master_of(place, place.sentinel, deadline), place.login, _part_of(deadline))
        return connect(place, None if place.path is not None else place.hosts[0], place.login, deadline)

    def servers(self, deadline: Deadline) -> list[tuple[str | None, Wire]]:
        """The servers that hold leases, and what to call each in a request."""
        return [(None, self.open(deadline))]

    def facts(self) -> list[dict[str, str]]:
        """What was read of the settings of those servers that are connected now."""
        return [] if self._wire is None else [self._wire.facts]

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def _greeted(wire: Wire, place: Place, deadline: Deadline, check: Callable[[Wire, Place], None]) -> Wire:
    try:
        greet(wire, place, deadline)
        check(wire, place)
    except BaseException:
        wire.close()
        raise
    return wire


def _check_role(wire: Wire, place: Place) -> None:
    if wire.facts.get("role") == "slave":
        if place.sentinel is not None:  # a failover is under way
            raise StoreUnavailable(f"{wire.where} is a replica at the moment", maybe_applied=False)
        hint = "name the master, or its sentinels with ?sentinel="
        raise TakesNoWrites(f"{wire.where} is a replica: {hint}", maybe_applied=False)


def _part_of(deadline: Deadline) -> Deadline:
    """Until when one server may say nothing where another one may be asked."""
    return deadline.within(deadline.remaining() * ONE_OF_SEVERAL)


def _master_of(place: Place, name: str, deadline: Deadline) -> tuple[str, int]:
    """Where the first sentinel that answers says the master is."""
    trouble: list[str] = []
    unknown = 0
    for host in place.hosts:
        some = _part_of(deadline)
        try:
            wire = connect(place, host, place.sentinel_login, some)
            try:
                (answer,) = wire.exchange(packed("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name), 1, some)
            finally:
                wire.close()
        except (StoreUnavailable, SetupRequired) as error:
            trouble.append(str(error))
            continue
        if isinstance(answer, list):
            return answer[0].decode(), int(answer[1])
        unknown += 1
        trouble.append(f"{wire.where}: " + (answer.text if answer else f"this sentinel knows no master {name!r}"))
    if unknown == len(place.hosts):
        raise SetupRequired("; ".join(trouble))
    raise StoreUnavailable("no sentinel names the master: " + "; ".join(trouble), maybe_applied=False)


class ClusterLink(Link):
    """The masters of a cluster, each with a connection of its own; a request goes to the one that has its slot."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._wires: dict[str, Wire] = {}
        self._nodes: list[str] = []  # by slot; empty until asked for
        self._seeds = [f"{host}:{port}" for host, port in place.hosts]
        self._parts = place.parts

    def fly(self, requests: Iterable[Request], deadline: Deadline, *, patient: bool = False) -> list[Any]:
        left = dict(enumerate(requests))
        answers: list[Any] = [None] * len(left)
        try:
            for _ in range(REDIRECTS_MAX):
                if not self._nodes:
                    self._learn_slots(deadline)
                moved = {}
                for index, answer in self._once(left, deadline, patient):
                    answers[index] = answer
                    if isinstance(answer, Refusal) and answer.code in ("MOVED", "ASK"):
                        moved[index] = self._redirected(left[index], answer)
                if not moved:
                    return answers
                left = moved
            raise StoreUnavailable(f"the cluster said {REDIRECTS_MAX} times in turn that keys had moved")
        except (StoreUnavailable, SetupRequired):
            self.close()
            raise
        except BaseException:  # as above
            try:
                for wire in self._wires.values():
                    wire.finish(deadline)
            finally:
                self.close()
            raise

    def _once(self, requests: dict[int, Request], deadline: Deadline, patient: bool) -> Iterator[tuple[int, Any]]:
        """One flight to each node, all under way at the same time."""
        flights: dict[str, list[int]] = {}
        for index, request in requests.items():
            flights.setdefault(request.node or self._nodes[request.slot], []).append(index)
        failed: list[tuple[str, StoreUnavailable]] = []
        sent = []

        def limit(node: str) -> Deadline:
            many = len(flights) > 1 and not patient
            return self._parts.limit_of_several(node, deadline) if many else self._parts.limit(node, deadline)

        # A node that was silent is asked last: what the others say is there by then.
        for node in sorted(flights, key=self._parts.is_away):
            commands = [requests[index].data for index in flights[node]]
            answers = len(commands) + sum(requests[index].asking for index in flights[node])
            try:
                wire = self._to(node, limit(node))
                wire.send(b"".join(commands), answers, limit(node))
                sent.append(node)
            except StoreUnavailable as error:
                failed.append((node, error))
        for node in sent:
            try:
                said = iter(self._wires[node].receive(limit(node)))
            except StoreUnavailable as error:
                failed.append((node, error))
                continue
            self._parts.answered(node)
            self.flown.add(node)
            for index in flights[node]:
                if requests[index].asking:
                    next(said)
                yield index, next(said)
        for node, why in failed:
            self._drop(node)
            part = self._parts.did_not(node, why)
            for index in flights[node]:
                yield index, part

    def _drop(self, node: str) -> None:
        """Forget a connection, and which node has which slot: others may take over what this one had."""
        wire = self._wires.pop(node, None)
        if wire is not None:
            wire.close()
        self._nodes = []

    def _redirected(self, request: Request, answer: Refusal) -> Request:
        _, _, node = answer.text.split()[:3]
        if answer.code == "MOVED":
            self._nodes[request.slot] = node
            return request._replace(node=None)
        return request._replace(data=packed("ASKING") + request.data, node=node, asking=True)

    def _to(self, node: str, deadline: Deadline) -> Wire:
        wire = self._wires.get(node)
        if wire is None:
            host, _, port = node.rpartition(":")
            wire = connect(self.place, (host, int(port)), self.place.login, deadline)
            self._wires[node] = _greeted(wire, self.place, deadline, lambda wire, place: None)
        return wire

    def _learn_slots(self, deadline: Deadline) -> None:
        """Ask the nodes that the URL names, and those seen since, who has which slot; the first that answers counts."""
        trouble: list[str] = []
        for seed in sorted(self._seeds, key=self._parts.is_away):
            some = self._parts.limit_of_several(seed, deadline)
            try:
                wire = self._to(seed, some)
                (ranges,) = wire.exchange(packed("CLUSTER", "SLOTS"), 1, some)
            except StoreUnavailable as error:
                trouble.append(str(error))
                self._drop(seed)
                self._parts.did_not(seed, error)
                continue
            self._parts.answered(seed)
            if isinstance(ranges, Refusal):
                raise raised(ranges, wire.where, maybe_applied=False)
            nodes = [""] * SLOTS
            for first, last, (name, port, *_), *_ in ranges:
                node = f"{name.decode() if name else seed.rpartition(':')[0]}:{port}"
                nodes[first : last + 1] = [node] * (last + 1 - first)
            if all(nodes):
                self._nodes = nodes
                self._seeds = list(dict.fromkeys([*self._seeds[: len(self.place.hosts)], *nodes]))
                return
            trouble.append(f"{wire.where}: some slots of the cluster have no node")
        raise StoreUnavailable("; ".join(trouble), maybe_applied=False)

    def open(self, deadline: Deadline) -> Wire:
        """Be connected to one of the nodes."""
        if not self._nodes:
            self._learn_slots(deadline)
        trouble: StoreUnavailable | None = None
        for node in sorted(set(self._nodes), key=lambda node: (self._parts.is_away(node), node)):
            try:
                return self._to(node, self._parts.limit_of_several(node, deadline))
            except StoreUnavailable as error:
                trouble = error
        assert trouble is not None
        raise trouble

    def servers(self, deadline: Deadline) -> list[tuple[str | None, Wire]]:
        try:
            if not self._nodes:
                self._learn_slots(deadline)
            return [(node, self._to(node, deadline)) for node in sorted(set(self._nodes))]
        except BaseException:
            self.close()
            raise

    def facts(self) -> list[dict[str, str]]:
        return [self._wires[node].facts for node in set(self._nodes) & self._wires.keys()]

    def close(self) -> None:
        wires, self._wires, self._nodes = self._wires, {}, []
        for wire in wires.values():
            wire.close()
