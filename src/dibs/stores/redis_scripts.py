"""Runs of Lua scripts on Redis: many in one flight, each named by its digest, or sent whole to a server without it."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import StoreUnavailable
from dibs.store import PartUnavailable
from dibs.stores.parts import error_of, unavailable
from dibs.stores.redis_links import ClusterLink, Link, Request
from dibs.stores.redis_wire import Place, Refusal, packed, packed_raw, raised

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dibs.clock import Deadline

# Keys that one step of a SCAN looks at.
SCAN_COUNT = 1000
# The part of the time that is left which replicas get to acknowledge; the rest is for giving back what they did not.
WAIT_PART = 0.5
# What stands before a script, as the server knows no libraries of ours.
PARTS = {
    "acquire": ("grants",),
    "acquire_permits": ("grants", "pools"),
    "transfer": ("grants", "pools"),
    "renew": ("pools",),
    "break": ("pools",),
    "show": ("pools",),
    "purge": ("pools",),
    "jobs": ("jobs_rows", "jobs_writes", "jobs_put", "jobs_take", "jobs_finish", "jobs_mend"),
}
# What stands there as a function, ``of_permits``: a run that meets none need not make what is done with them.
OF_PERMITS = {"release": ("pools", "release_permits")}
# What is tried before, for the kind of request that is most frequent, and what it has read that the rest need not read
# again. All the rest is a function, which is not made where that was enough: a lock that is taken and given back then
# costs the server 16 us instead of 21, one permit 25 instead of 41 (one after the other, medians).
ALONE = {
    "acquire": (("grants_alone", "acquire_alone"), ""),
    "acquire_permits": (("grants_alone", "acquire_permits_alone"), ""),
    "release": (("release_alone",), "row"),
}


def digest_of(body: str) -> str:
    """Under which the server remembers a script."""
    return sha1(body.encode(), usedforsecurity=False).hexdigest()


def _text(*parts: str) -> str:
    folder = files("dibs.stores") / "redis_lua"
    return "\n".join([(folder / f"{part}.lua").read_text("utf-8") for part in parts])


class Script:
    """A Lua script by its name, and the digest under which the server remembers it."""

    def __init__(self, name: str) -> None:
        body = _text(*PARTS.get(name, ()), name)
        if name in OF_PERMITS:
            body = f"local function of_permits(...)\n{_text(*OF_PERMITS[name])}\nend\n{body}"
        if name in ALONE:
            parts, seen = ALONE[name]
            body = f"{_text(*parts)}\nlocal function otherwise(...)\n{body}\nend\nreturn otherwise({seen})"
        self.body = body
        self.digest = digest_of(self.body)

    def calling(self, keys: Sequence[str], arguments: Sequence[str], slot: int) -> Call:
        return Call(self, [str(len(keys)), *keys, *arguments], slot)

    def calling_raw(self, key: str, arguments: Sequence[str | bytes], slot: int) -> Call:
        """The same where some arguments are bytes, which need not be text."""
        return RawCall(self, ["1", key, *arguments], slot)  # type: ignore[list-item]


class Call:
    """One run of a script, on its way."""

    __slots__ = ("_script", "_words", "slot")

    def __init__(self, script: Script, words: list[str], slot: int) -> None:
        self._script = script
        self._words = words
        self.slot = slot

    def by_digest(self) -> Request:
        return Request(self._packed("EVALSHA", self._script.digest, *self._words), self.slot)

    def by_text(self) -> Request:
        """For a server that does not know the script (yet, or any more after SCRIPT FLUSH): run and remember it."""
        return Request(self._packed("EVAL", self._script.body, *self._words), self.slot)

    _packed = staticmethod(packed)


class RawCall(Call):
    __slots__ = ()
    _packed = staticmethod(packed_raw)


class Flights:
    """What a store sends, over its link."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.link = ClusterLink(place) if place.cluster else Link(place)
        self._scripts: dict[str, Script] = {}

    def script(self, name: str) -> Script:
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = Script(name)
        return script

    def run(self, calls: Iterable[Call], deadline: Deadline, *, by_text: int = 0, parts: bool = False) -> list[Any]:
        """Run scripts, all in one flight; in two when they are named by digests that the server does not know.

        ``by_text``: so many at the beginning come by their texts, so that they run before the rest in any case.
        ``parts``: the answer to what a node of a cluster could not be asked, or refuses for now, is PartUnavailable.
        """
        made: list[Call] = []

        def flying() -> Iterator[Request]:
            for call in calls:
                made.append(call)
                yield call.by_text() if len(made) <= by_text else call.by_digest()

        self.link.flown.clear()
        answers = self.link.fly(flying(), deadline)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, Refusal) and answer.code == "NOSCRIPT"]
        if unknown:
            again = self.link.fly([made[index].by_text() for index in unknown], deadline)
            for index, answer in zip(unknown, again, strict=True):
                answers[index] = answer
        return self._accepted(answers, parts=parts, in_script=True)

    def fly(self, requests: Sequence[Request], deadline: Deadline, *, patient: bool = False) -> list[Any]:
        """Send commands in one flight; their answers, of which none is a refusal."""
        return self._accepted(self.link.fly(requests, deadline, patient=patient))

    def wait_for_replicas(self, wanted: int, deadline: Deadline) -> str | None:
        """Wait until so many replicas have what the last run wrote; if they have not in time, what is to be said."""
        wait_s = deadline.remaining() * WAIT_PART
        wait = packed("WAIT", str(wanted), str(int(wait_s * 1000) + 1))
        waits = [Request(wait, node=node) for node in self.link.flown]
        reached = min(self.fly(waits, deadline, patient=True), default=wanted)
        if reached >= wanted:
            return None
        return f"{reached} replicas acknowledged in {wait_s:.1f} s where min_replicas={wanted} are wanted"

    def scan(self, start: str, deadline: Deadline) -> Iterator[bytes]:
        """The keys that begin so; some come twice. All keys of the database are looked at on the way."""
        pattern = "".join(f"\\{c}" if c in "*?[]^\\" else c for c in start) + "*"
        for node, _ in self.link.servers(deadline):
            cursor = "0"
            while True:
                command = packed("SCAN", cursor, "MATCH", pattern, "COUNT", str(SCAN_COUNT))
                ((after, keys),) = self.fly([Request(command, node=node)], deadline)
                cursor = after.decode()
                yield from keys
                if cursor == "0":
                    break

    def _accepted(self, answers: list[Any], *, parts: bool = False, in_script: bool = False) -> list[Any]:
        for index, answer in enumerate(answers):
            if isinstance(answer, Refusal):
                error = self.failure(answer, maybe_applied=len(answers) > 1, in_script=in_script)
                if not (self.place.cluster and isinstance(error, StoreUnavailable)):
                    raise error
                answers[index] = unavailable(error)
        away = [] if parts or not self.place.cluster else [a for a in answers if type(a) is PartUnavailable]
        if away:
            raise error_of(away[0]) if len(answers) == 1 else StoreUnavailable(str(away[0]))
        return answers

    def failure(self, answer: Refusal, *, maybe_applied: bool, in_script: bool) -> Exception:
        """The error of dibs for a refusal that concerns the whole call."""
        if answer.code in ("READONLY", "MASTERDOWN", "NOAUTH"):
            self.link.close()  # the master may be another by now
        return raised(answer, "Redis", maybe_applied=maybe_applied, in_script=in_script)
