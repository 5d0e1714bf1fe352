"""What Redis is asked most often is tried before the rest: it is answered, and kept, as the rest would."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dibs.store import RELEASED, Acquire, Granted, Held, Outcome, Release, Request
from dibs.stores import redis_scripts
from tests.servers.redis import RedisServer
from tests.test_redis import opened
from tests.test_redis_permits import make_over, now_on
from tests.waits import soon

# What is written of times and tokens, which no two places have in common.
OF_TIME = ("fencing_token", "acquired_at", "expires_at", "free_since")


class Over(NamedTuple):
    """The time of whoever holds the name, or its first slot, comes to its end."""

    name: str


names = st.sampled_from(["n:x", "n:x", "n:x", "n:y"])
claims = st.sampled_from(["a", "b"])
sometimes = st.sampled_from([None, None, None, 5])
acquires = st.builds(
    Acquire,
    names,
    claims,
    st.just(60.0),
    st.just("h"),
    info=st.sampled_from([None, '{"a":1}']),
    wake=st.sampled_from([None, "w"]),
    ticket=sometimes,
    permits=st.sampled_from([0, 2, 2, 2, 3]),
    take=st.sampled_from([1, 1, 2, 3]),
    resize=st.booleans(),
)
keeps = st.sampled_from([0.0, 0.0, 0.0, 9.0])
releases = st.builds(Release, names, claims, st.sampled_from([0, 1, 1, 2]), sometimes, keeps)


@settings(max_examples=300)
@given(acts=st.lists(st.one_of(acquires, releases, st.builds(Over, names)), max_size=12))
@example([Acquire("n:x", "a", 60, "h"), Acquire("n:x", "b", 60, "h", None, "w"), Release("n:x", "a", 1)])
@example(
    [
        Acquire("n:x", "a", 60, "h", permits=2),
        Acquire("n:x", "b", 60, "h", None, "w", permits=2, take=2),
        Release("n:x", "a", 1),
        Acquire("n:x", "a", 60, "h", permits=2),
    ]
)
def test_it_is_as_the_rest_would_have_it(redis: RedisServer, acts: list[Request | Over]) -> None:
    """Whatever is asked, in any order, with it and without."""
    with opened(f"{redis.url()}?prefix=with") as store, opened(f"{redis.url()}?prefix=without") as general:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redis_scripts, "ALONE", {})
            for verb in ("acquire", "acquire_permits", "release"):
                general._flights.script(verb)  # type: ignore[attr-defined]
        with redis.client() as look:
            look.flushall()
            for act in acts:
                if isinstance(act, Over):
                    for prefix in ("with", "without"):
                        end(look, f"{prefix}:lease:{{{act.name}}}")
                    continue
                told, wanted = store.act([act], soon())[0], general.act([act], soon())[0]
                assert plain(told) == plain(wanted)
                assert kept(look, "with") == kept(look, "without")


def end(look: Any, key: str) -> None:
    if look.hexists(key, "claim_id"):
        look.hset(key, "expires_at", f"{now_on(look) - 0.001:.6f}")
    elif look.exists(f"{key}1"):
        make_over(look, key, 1)


def plain(outcome: Outcome) -> object:
    """An outcome without what is of its time."""
    if isinstance(outcome, Granted):
        return "granted", outcome.slot
    if isinstance(outcome, Held):
        return "held", outcome.holder, round(outcome.free_in, 0), outcome.ticket is None, outcome.ahead
    return outcome


def kept(look: Any, prefix: str) -> dict[str, object]:
    """Everything that is kept below a prefix, without what is of its time."""
    found: dict[str, object] = {}
    for key in look.keys(f"{prefix}:*"):
        expires = look.pttl(key) > 0
        if look.type(key) == "hash":
            fields = look.hgetall(key).items()
            value: object = sorted(
                (field.split(":")[0], "" if field in OF_TIME or key.startswith(f"{prefix}:waiters") else value)
                for field, value in fields
            )
        elif look.type(key) == "zset":
            value = [(member, score < 0) for member, score in look.zrange(key, 0, -1, withscores=True)]
        else:
            value = None
        found[key.removeprefix(prefix)] = value, expires
    return found


def test_a_lock_and_a_permit_are_taken_and_given_back_by_it(redis_url: str) -> None:
    """What a lone caller asks is of its kind: without the rest it works as well."""
    with opened(redis_url) as store:
        store.act([Acquire("n:permits", "c", 60, "h", permits=3)], soon())  # so that it is known how many there are
        store.act([Release("n:permits", "c")], soon())
        for verb in ("acquire", "acquire_permits", "release"):
            script = store._flights.script(verb)  # type: ignore[attr-defined]
            tried, _, _ = script.body.partition("local function otherwise")
            script.body = f"{tried}return redis.error_reply('it was of another kind')"
            script.digest = redis_scripts.digest_of(script.body)
        for name, permits, info in (("n:lock", 0, None), ("n:permits", 3, None), ("n:lock", 0, "{}")):
            (granted,) = store.act([Acquire(name, "c", 60, "h", info, "w", permits=permits)], soon())
            assert isinstance(granted, Granted)
            assert granted.slot == 1
            assert store.act([Release(name, "c", 1)], soon()) == [RELEASED]
