"""Conformance cases on pauses: what an operator has stopped is granted to nobody new, through both faces."""

from __future__ import annotations

import asyncio
import time

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidName, InvalidOption, LockTimeout, StoreUnavailable, Unsupported
from dibs.pauses import PAUSES_FRESH_S
from dibs.testing.case import CLIENT_CASES, equal
from dibs.testing.client_bench import had, raises, task

if TYPE_CHECKING:
    from dibs.store import Capabilities
    from dibs.testing.faces import Face

case = CLIENT_CASES.case

# How soon a waiter has the name after a resume: its client looks, it asks, and a busy machine takes its time.
WOKEN_S = 5.0


def pauses(capabilities: Capabilities) -> bool:
    return capabilities.pause


def pools(capabilities: Capabilities) -> bool:
    return capabilities.pause and capabilities.permits


async def refused(face: Face, lock: Any, what: str) -> None:
    """Fail when it can be had."""
    equal(await face.do(lock.acquire, timeout=0), None, what)


async def nudged(face: Face, client: Any, name: str) -> None:
    """Take a name and give it back: the client has then been at work."""
    lease = await had(face, client.lock(name), timeout=10)
    await face.do(lease.release)


@case("pause")
async def what_cannot_be_paused_says_so(face: Face) -> None:
    """Where pauses cannot be kept, all of their verbs are Unsupported, before any I/O."""
    if face.capabilities.pause:
        return
    client = face.idle_client()
    for verb, args in ((client.pause, ("job",)), (client.resume, ("job",)), (client.pauses, ())):
        with raises(Unsupported):
            await face.do(verb, *args)


@case("pause", pauses)
async def a_paused_name_is_granted_to_nobody(face: Face) -> None:
    """When pause() has returned, no client is granted the name, by whatever kind of lock; others names are free."""
    ours, theirs = face.client(), face.client()
    await nudged(face, theirs, "other")
    pause = await face.do(ours.pause, "job", "OPS-7: new disks", ttl=60, by="ada")
    equal((pause.name, pause.note, pause.by), ("job", "OPS-7: new disks", "ada"), "what pause() returned")
    for client in (ours, theirs, face.client()):
        await refused(face, client.lock("job"), "the paused name")
        with raises(LockTimeout) as caught:
            async with face.holding(client.lock("job", timeout=0)):
                pass
        text = str(caught.error)
        for part in ("'job' is paused by ada since", "OPS-7: new disks"):
            assert part in text, f"the error says {text!r}, and not {part!r}"
        equal(text.count(caught.error.paused), 1, "how often the error says what its .paused says")
        async with face.holding(client.lock("job2", timeout=10)):
            pass
    equal(await face.do(ours.resume, "job"), True, "resume() of what is paused")
    equal(await face.do(ours.resume, "job"), False, "resume() of what is not paused any more")
    await nudged(face, theirs, "job")


@case("pause", pauses)
async def a_prefix_pauses_all_that_begin_so(face: Face) -> None:
    """A pause of ``deploy/*`` is one of every name that begins with ``deploy/``; ``*`` is one of all; no other."""
    client, other = face.client(), face.client(namespace=face.namespace + "-2")
    await face.do(client.pause, "deploy/*", ttl=60)
    for name, paused in (("deploy/web", True), ("deploy/", True), ("deploy", False), ("Deploy/web", False)):
        lease = await face.do(client.lock(name).acquire, timeout=0)
        equal(lease is None, paused, f"whether {name!r} is paused")
    async with face.holding(other.lock("deploy/web", timeout=10)):
        pass
    await face.do(client.pause, "*", ttl=60)
    await refused(face, client.lock("anything"), "a name while all are paused")
    equal(await face.do(client.resume, "deploy"), False, "resume() of a name that only a prefix covers")
    equal(await face.do(client.resume, "*"), True, "resume('*')")
    await refused(face, client.lock("deploy/web"), "a name whose other pause goes on")


@case("pause", pauses)
async def every_way_to_share_obeys(face: Face) -> None:
    """A multilock, a once and an election of a paused name are refused like a lock of it, also where none stand by."""
    client = face.client()
    await face.do(client.pause, "shared*", "why", ttl=60)
    await refused(face, client.multilock(["free", "shared/1"]), "a multilock with a paused name in it")
    async with face.holding(client.lock("free", timeout=10)):
        pass
    for lock in (
        client.once("shared", 1, keep=60, timeout=0),
        client.lock("shared", timeout=0),
        client.election("shared", standby_max=0).lead(),
    ):
        with raises(LockTimeout) as caught:
            async with face.holding(lock):
                pass
        assert caught.error.paused, f"{caught.error} does not know of the pause"
    equal(await face.do(client.election("shared").campaign, timeout=0), None, "a campaign for a paused name")
    equal(await face.do(client.election("shared", priority=-1).campaign, timeout=2), None, "one of a reserve")


@case("pause", pools)
async def permits_of_a_paused_name_are_not_granted(face: Face) -> None:
    """Semaphores and read/write locks of a paused name are refused; a writer that holds may become a reader."""
    ours, theirs = face.client(), face.client()
    permit = await had(face, ours.semaphore("gpu", 3), timeout=0)
    file = ours.rwlock("file")
    await had(face, file.write(), timeout=0)
    await face.do(theirs.pause, "*", ttl=60)
    await refused(face, ours.semaphore("gpu", 3), "a second permit")
    await refused(face, theirs.semaphore("gpu", 3), "another client's permit")
    await face.do(file.downgrade)
    await refused(face, theirs.rwlock("file").read(), "reading beside a reader")
    await face.do(permit.renew)
    await face.do(permit.release)
    await face.do(theirs.resume, "*")
    async with face.holding(ours.semaphore("gpu", 3, timeout=10)):
        pass


@case("pause", pauses)
async def holders_finish(face: Face) -> None:
    """Who holds a name when it is paused renews it, takes it again if reentrant, and releases it as ever."""
    ours, theirs = face.client(), face.client()
    lock = ours.lock("job", ttl=max(2.0, face.short_ttl), reentrant=True)
    lease = await had(face, lock, timeout=0)
    await face.do(theirs.pause, "job", ttl=60)
    again = await face.do(lock.acquire, timeout=0)
    equal(again is lease, True, "whether a reentrant lock is taken again by its holder")
    await face.do(lease.renew)
    end = time.monotonic() + 1.2 * lease.ttl
    while time.monotonic() < end:
        equal(lease.held, True, "held, past its first ttl")
        await asyncio.sleep(0.1)
    record = await face.do(theirs.holder, "job")
    equal(record is not None and record.fencing_token, lease.fencing_token, "the holder that is shown")
    await face.do(lock.release)
    equal(await face.do(lock.release), True, "the last release")
    await refused(face, ours.lock("job"), "the name, for its former holder")
    await refused(face, theirs.lock("job"), "the name, for another")


@case("pause", pauses)
async def what_is_held_may_change_hands(face: Face) -> None:
    """A lease that is exported can be adopted while its name is paused: it is there already. A term gets no heir."""
    ours, theirs = face.client(), face.client()
    lease = await had(face, ours.lock("job"), timeout=0)
    term = await face.do(ours.election("chief", value=1).campaign, timeout=0)
    reserve = task(face.do(face.client().election("chief", value=2, priority=-1).campaign, timeout=4))
    await face.do(theirs.pause, "*", "why", ttl=60)
    began = time.monotonic()
    adopted = await face.do(theirs.adopt, await face.do(lease.export))
    assert time.monotonic() - began < WOKEN_S, "the adoption had to wait"
    equal((adopted.held, adopted.fencing_token > lease.fencing_token), (True, True), "the adopted lease")
    await face.do(adopted.release)
    equal(await face.do(term.resign, to=2, timeout=2), False, "whether the reserve took the term over")
    equal(await reserve, None, "its campaign")
    await refused(face, ours.lock("job"), "the name, once it was released")


@case("pause", pauses)
async def waiters_wait_on_and_are_served_after_a_resume(face: Face) -> None:
    """Who waits for a name that is paused, before or meanwhile, goes on waiting, and has it soon after the resume."""
    ours, theirs, operator = face.client(), face.client(), face.client()
    lease = await had(face, ours.lock("job"), timeout=0)
    early = task(had(face, theirs.lock("job"), timeout=30))
    await asyncio.sleep(0.3)
    await face.do(operator.pause, "job", ttl=60)
    late = task(had(face, ours.lock("job"), timeout=30))
    await face.do(lease.release)
    await asyncio.sleep(2 * PAUSES_FRESH_S)
    equal((early.done(), late.done()), (False, False), "whether those who wait have come back while it is paused")
    await face.do(operator.resume, "job")
    resumed = time.monotonic()
    waiters = {early, late}
    while waiters:
        done, waiters = await asyncio.wait(waiters, timeout=WOKEN_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise AssertionError(f"nobody else had the name {time.monotonic() - resumed:.1f} s after the resume")
        for served in done:
            await face.do((await served).release)


@case("pause", pauses)
async def a_waiter_of_a_paused_name_can_give_up(face: Face) -> None:
    """A waiter's time-out ends its wait for a paused name, in time, and it is told why."""
    client = face.client()
    await face.do(client.pause, "job", "no", ttl=60)
    began = time.monotonic()
    with raises(LockTimeout) as caught:
        async with face.holding(client.lock("job", timeout=1.5)):
            pass
    waited = time.monotonic() - began
    assert 1.4 <= waited < 1.5 + 5.0, f"timeout=1.5 took {waited:.1f} s"
    assert "is paused by" in str(caught.error), f"the error says {caught.error}"
    await face.do(client.resume, "job")
    await nudged(face, client, "job")


@case("pause", pauses)
async def a_pause_ends_by_itself(face: Face) -> None:
    """A pause that nobody ends is over after its ttl."""
    client, other = face.client(), face.client()
    await face.do(client.pause, "job", ttl=max(3.0, face.capabilities.ttl_min_s))
    await refused(face, other.lock("job"), "the paused name")
    (pause,) = await face.do(other.pauses)
    assert 0 < pause.expires_in <= 3 + face.capabilities.resolution_s, f"a pause of 3 s is in force for {pause}"
    lease = await had(face, other.lock("job"), timeout=3 + WOKEN_S)
    await face.do(lease.release)
    equal(await face.do(client.pauses), [], "pauses() after its end")


@case("pause", pauses)
async def pausing_again_leaves_no_gap(face: Face) -> None:
    """Pausing again says note and end anew, and no client is granted the name between the old and the new."""
    client, busy = face.client(), face.client()
    await face.do(client.pause, "job", "first", ttl=60)
    seen: list[Any] = []
    over = asyncio.Event()

    async def hammer() -> None:
        while not over.is_set():
            seen.append(await face.do(busy.lock("job").acquire, timeout=0))
            await asyncio.sleep(0.002)

    hammering = task(hammer())
    for note in ("second", "third"):
        await face.do(client.pause, "job", note, ttl=120)
    over.set()
    await hammering
    equal([lease for lease in seen if lease is not None], [], "leases granted meanwhile")
    listed = await face.do(client.pauses)
    equal([(pause.name, pause.note) for pause in listed], [("job", "third")], "pauses()")
    assert listed[0].expires_in > 100, f"it ends in {listed[0].expires_in} s, and not in two minutes"
    await face.do(client.resume, "job")
    equal(await face.do(client.pauses), [], "pauses() after one resume()")


@case("pause", pauses)
async def pauses_are_shown_apart(face: Face) -> None:
    """Pauses are listed by name, to every client of the namespace; they are no leases, and outlive their client."""
    client = face.client()
    for name in ("b", "a/*"):
        await face.do(client.pause, name, ttl=60)
    await face.do(client.close)
    other = face.client()
    listed = await face.do(other.pauses)
    seen = [(pause.name, pause.note, pause.covers("a/1")) for pause in listed]
    equal(seen, [("a/*", None, True), ("b", None, False)], "pauses()")
    equal((await face.do(other.leases), await face.do(other.holder, "b")), ([], None), "leases(), holder()")
    equal(await face.do(face.client(namespace=face.namespace + "-2").pauses), [], "pauses() elsewhere")


@case("pause", pauses)
async def what_operators_say_is_shown_plainly(face: Face) -> None:
    """A note stays as it was given; where it is told in a sentence, nothing in it moves a cursor or begins a line."""
    client = face.client()
    pause = await face.do(client.pause, "job", "a\x1b[2J\nb é", ttl=60, by="ada\x9b")
    equal((pause.note, pause.by), ("a\x1b[2J\nb é", "ada\x9b"), "note and by")
    assert str(pause).isprintable(), str(pause)
    assert str(pause).endswith(": a\\x1b[2J\\nb é"), str(pause)
    with raises(LockTimeout) as refused:
        async with face.holding(client.lock("job", timeout=0)):
            pass
    assert str(refused.error).isprintable(), str(refused.error)


@case("pause", pauses)
async def wrong_pauses_are_refused_before_any_io(face: Face) -> None:
    """A name, note or ttl that cannot be is refused, and nothing is sent."""
    client = face.idle_client()
    for name, how, error in (
        ("", {}, InvalidName),
        ("a\nb", {}, InvalidName),
        ("job", {"note": 7}, InvalidOption),
        ("job", {"note": "x" * 5000}, InvalidOption),
        ("job", {"ttl": 0}, InvalidOption),
        ("job", {"ttl": 1}, InvalidOption),  # it would be over when pause() returns
        ("job", {"ttl": 10 * face.capabilities.ttl_max_s}, InvalidOption),
    ):
        with raises(error):
            await face.do(client.pause, name, **how)
    with raises(InvalidName):
        await face.do(client.resume, "")
    with raises(StoreUnavailable, AssertionError):  # the only one that is fit to be sent
        await face.do(client.pauses)
