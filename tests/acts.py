"""What a program may do with dibs, on either face: short acts, each on names of its own that begin with ``name``.

An act is a function of a face, a client and a name. What it has when something is raised in its middle it gives back,
as ``with`` blocks do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import dibs
from dibs.testing.client_bench import had, task, until
from dibs.testing.faces import Face

Act = Callable[[Face, Any, str], Awaitable[object]]


async def lock(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.lock(name)):
        pass


async def acquire_and_release(face: Face, client: Any, name: str) -> None:
    lease = await had(face, client.lock(name))
    await face.do(lease.release)


async def by_the_lock(face: Face, client: Any, name: str) -> None:
    lock = client.lock(name)
    if await face.do(lock.acquire, timeout=5):
        await face.do(lock.release)


async def decorated(face: Face, client: Any, name: str) -> None:
    await face.decorate(client.lock(name), lambda: None)()


async def nested(face: Face, client: Any, name: str) -> None:
    lock = client.lock(name, reentrant=True)
    async with face.holding(lock), face.holding(lock):
        pass


async def kept(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.lock(name, min_hold=0.01)):
        pass


async def renewed(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.lock(name)) as lease:
        await face.do(lease.renew)


async def waited_for(face: Face, client: Any, name: str) -> None:
    async def other() -> None:
        async with face.holding(client.lock(name, timeout=5)):
            pass

    waiter = None
    try:
        async with face.holding(client.lock(name)):
            waiter = task(other())
            await until(lambda: client._desk.session().waiting.everybody() or waiter.done(), "somebody waits")
    finally:
        if waiter is not None:
            await waiter


async def asked_twice(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.lock(name)):

        async def other() -> None:
            lease = await face.do(client.lock(name).acquire, timeout=0.02)
            assert lease is None

        await task(other())


async def semaphore(face: Face, client: Any, name: str) -> None:
    permits = client.semaphore(name, 3)
    async with face.holding(permits), face.holding(permits):
        assert await face.do(permits.available) == 1


async def weight(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.semaphore(name, 3, weight=2)):
        pass


async def readers(face: Face, client: Any, name: str) -> None:
    page = client.rwlock(name, timeout=5)
    async with face.holding(page.read()), face.holding(page.read()):
        pass


async def writer(face: Face, client: Any, name: str) -> None:
    page = client.rwlock(name)
    async with face.holding(page.write()):
        await face.do(page.downgrade)


async def several(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.multilock([f"{name}/{n}" for n in range(3)])):
        pass


async def once(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.once(name, "key", keep=60)) as run:
        if run:
            run.result = 1


async def failed_once(face: Face, client: Any, name: str) -> None:
    with suppress(ZeroDivisionError):
        async with face.holding(client.once(name, "key", keep=60)) as run:
            if run:
                raise ZeroDivisionError


async def lead(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.election(name, value="me").lead(timeout=5)) as term:
        assert term.number


async def campaign(face: Face, client: Any, name: str) -> None:
    term = await face.do(client.election(name).campaign, timeout=5)
    await face.do(term.resign)


async def stand_by(face: Face, client: Any, name: str) -> None:
    async with face.holding(client.lock(name)):

        async def other() -> None:
            term = await face.do(client.election(name, standby_max=1).campaign, timeout=0.02)
            assert term is None

        await task(other())


async def claims(face: Face, client: Any, name: str) -> None:
    claims = client.claims(name, max_tries=3)
    async with face.holding(await face.do(claims.take, [1, 2, 3])) as batch:
        following = partial(next if face.name == "threads" else anext, batch, None)
        if (first := await face.do(following)) is not None:
            await face.do(first.done)
        if (second := await face.do(following)) is not None:
            await face.do(second.fail)


async def hand_over(face: Face, client: Any, name: str) -> None:
    lease = await had(face, client.lock(name))
    try:
        state = await face.do(lease.export)
    except BaseException:
        await face.do(lease.release)
        raise
    try:
        lease = await face.do(client.adopt, state)
    except BaseException:  # if it was not adopted, it is for whoever has its state still
        with suppress(dibs.LeaseLost):
            await face.do((await face.do(client.adopt, state)).release)
        raise
    await face.do(lease.release)


async def looks(face: Face, client: Any, name: str) -> None:
    for look in (client.ping, client.leases, client.pauses, client.setup):
        await face.do(look)
    await face.do(client.holder, name)
    await face.do(client.election(name).leader)
    await face.real_capabilities(client)
    await face.do(client.purge, 3600)


async def broken(face: Face, client: Any, name: str) -> None:
    lease = await had(face, client.lock(name))
    try:
        await face.do(client.break_lease, name, fencing_token=lease.fencing_token, now=True)
    finally:
        with suppress(dibs.LeaseLost):
            await face.do(lease.release)


async def jobs(face: Face, client: Any, name: str) -> None:
    queue = client.queue(name)
    await face.do(queue.put_many, range(4))
    async with face.holding(await face.do(queue.take, 4)) as batch:
        if len(batch.won) == 4:  # an earlier one may have left some behind, which are taken first, and alone
            done, failed, skipped, extended = batch.won
            await face.do(done.done)
            await face.do(failed.fail, "it failed")
            await face.do(skipped.skip)
            await face.do(extended.extend, 10)


async def job_views(face: Face, client: Any, name: str) -> None:
    queue = client.queue(name)
    job = await face.do(queue.put, "x", delay=60)
    for look in (queue.depth, queue.jobs, queue.dead, queue.stats, queue.advice, client.queues):
        await face.do(look)
    await face.do(queue.job, job)
    await face.do(queue.cancel, job)
    with suppress(dibs.JobFailed):
        await face.do(queue.wait, job, timeout=1)
    await face.do(queue.purge, job)


async def worked(face: Face, client: Any, name: str) -> None:
    queue = client.queue(name)
    await face.do(queue.put_many, range(2))
    if face.name == "threads":
        await face.do(queue.run, lambda job: None, idle=0.02)
        return

    async def handler(job: Any) -> None:
        pass

    await face.do(queue.run, handler, idle=0.02)


ACTS: tuple[Act, ...] = (
    lock,
    acquire_and_release,
    by_the_lock,
    decorated,
    nested,
    kept,
    renewed,
    waited_for,
    asked_twice,
    semaphore,
    weight,
    readers,
    writer,
    several,
    once,
    failed_once,
    lead,
    campaign,
    stand_by,
    claims,
    hand_over,
    looks,
    broken,
    jobs,
    job_views,
    worked,
)
