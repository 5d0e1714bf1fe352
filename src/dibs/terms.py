"""The terms of a lock: how long, how renewed, what happens at the end. Checked once, then passed along as they are."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.errors import InvalidOption
from dibs.names import check_flag, check_info, check_on_lost, check_seconds, check_timeout
from dibs.trust import RENEWALS_PER_TTL, local_deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.names import Seconds
    from dibs.store import Capabilities

FOREVER = float("inf")


class Terms(NamedTuple):
    ttl: float
    renew: bool
    timeout: float | None
    reentrant: bool
    min_hold: float
    max_hold: float
    on_lost: Callable[[], object] | None
    on_busy: str
    info: str | None
    #: Seconds of trust that one grant gives, counted from before it was asked for.
    trust_s: float
    #: Seconds after which the renewer looks at a hold: to renew it, or to tell its loss.
    delay_s: float
    #: Of a pool: how many permits it has in all, how many are taken, whether it is to have that many from now on.
    permits: int = 0
    take: int = 1
    resize: bool = False


def make_terms(
    limits: Capabilities,
    default_ttl: float,
    default_info: str | None,
    ttl: Seconds | None,
    renew: bool,
    timeout: Seconds | None,
    reentrant: bool,
    min_hold: Seconds,
    max_hold: Seconds | None,
    on_lost: Callable[[], object] | None,
    on_busy: str,
    info: dict[str, Any] | None,
) -> Terms:
    """Check what a caller gave; raises InvalidOption before any I/O."""
    ttl_s = default_ttl if ttl is None else check_seconds("ttl", ttl, least=limits.ttl_min_s, most=limits.ttl_max_s)
    min_s = check_seconds("min_hold", min_hold, most=limits.ttl_max_s)
    max_s = FOREVER
    if max_hold is not None:
        max_s = check_seconds("max_hold", max_hold, least=limits.ttl_min_s)
        if max_s < min_s:
            raise InvalidOption(f"max_hold ({max_s:g} s) is shorter than min_hold ({min_s:g} s)")
        ttl_s = min(ttl_s, max_s)
    check_on_lost(on_lost)
    if on_busy not in ("raise", "skip"):
        raise InvalidOption(f"on_busy is 'raise' or 'skip', not {on_busy!r}")
    trust_s = local_deadline(0.0, ttl_s, limits.margin_s)
    return Terms(
        ttl_s,
        check_flag("renew", renew),
        check_timeout(timeout),
        check_flag("reentrant", reentrant),
        min_s,
        max_s,
        on_lost,
        on_busy,
        default_info if info is None else check_info(info),
        trust_s,
        ttl_s / RENEWALS_PER_TTL if renew else trust_s,
    )
