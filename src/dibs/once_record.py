"""The mark of a successful run: how it stands in the info that is shown with the name, and what it tells others."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from datetime import datetime

    from dibs.desk import LeaseRecord

# It stands under this key.
MARK = "once"


class OnceRecord(NamedTuple):
    """A successful run, as the store shows it to anybody while it is kept.

    ``name`` is name/key, ``result`` what it left behind, ``holder`` who ran it (host/pid/client). It began at
    ``began_at``, was done at ``done_at``, and is kept until ``kept_until``, ``expires_in`` seconds after the store was
    asked, all by the store's clock.
    """

    name: str
    result: Any
    holder: str
    fencing_token: int
    began_at: datetime
    done_at: datetime
    kept_until: datetime
    expires_in: float


def kept_result(text: str | None) -> Any:
    """The result as it can be read back from a mark."""
    import json

    return json.loads(text or "{}")[MARK]["result"]


def record_of(name: str, shown: LeaseRecord | None) -> OnceRecord | None:
    """What a name shows of a successful run; None where nothing is shown, or a run that goes on."""
    mark = None if shown is None or shown.info is None else shown.info.get(MARK)
    if shown is None or not isinstance(mark, dict):
        return None
    from datetime import timedelta

    kept_until = shown.expires_at
    done_at = kept_until - timedelta(seconds=mark.get("keep", 0.0))
    result, holder, token = mark.get("result"), shown.holder, shown.fencing_token
    return OnceRecord(name, result, holder, token, shown.acquired_at, done_at, kept_until, shown.expires_in)
