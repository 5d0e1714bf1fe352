"""The history of grants, as users see it: to have it kept by the store, and to read who had a name.

Stores write it down themselves, in the same transaction as the grant (``dibs.stores.*_history``), so nothing here is
needed for it to be complete.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple, cast
from dibs.errors import InvalidOption, Unsupported
from dibs.names import check_name, info_in

if TYPE_CHECKING:
    from datetime import datetime

    from dibs.abilities import Historian
    from dibs.desk import Desk
    from dibs.steps import Steps

# Grants that a store keeps of one name at most.
HISTORY_KEPT_MAX = 100_000


class HistoryRecord(NamedTuple):
    """A grant of a name in the past, or the one in force. Times are the store's.

    ``ended_at`` and ``ending`` are None while it is in force. ``ending`` is "released", "expired" (the store let it
    end because nobody had renewed it), "broken" (by an operator) or "transferred" (exported, and adopted under the
    next token; or a term that was handed over).
    """

    name: str
    slot: int
    holder: str
    fencing_token: int
    acquired_at: datetime
    ended_at: datetime | None
    ending: str | None
    info: dict[str, Any] | None


def keeping(desk: Desk, history: int) -> Steps[None]:
    _check(desk, "history", history, 0)
    yield from desk.setting_up()
    yield from desk._acting(lambda store, deadline: cast("Historian", store).keep_history(history, deadline))


def reading(desk: Desk, name: str, limit: int) -> Steps[list[HistoryRecord]]:
    from datetime import datetime, timezone

    name = check_name(name)
    key = desk.key_prefix + name
    _check(desk, "limit", limit, 1)
    rows = yield from desk._acting(lambda store, deadline: cast("Historian", store).history(key, limit, deadline))
    return [
        HistoryRecord(
            name,
            row.slot,
            row.holder,
            row.fencing_token,
            datetime.fromtimestamp(row.acquired_at, timezone.utc),
            None if row.ended_at is None else datetime.fromtimestamp(row.ended_at, timezone.utc),
            row.ending,
            info_in(row.info),
        )
        for row in rows
    ]


def _check(desk: Desk, what: str, value: object, least: int) -> None:
    if not desk.address.capabilities.history:
        raise Unsupported(f"{desk.address.capabilities.store} cannot write down who held a name")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= HISTORY_KEPT_MAX:
        raise InvalidOption(f"{what} is a whole number from {least} to {HISTORY_KEPT_MAX}, not {value!r}")
