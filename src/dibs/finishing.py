"""The end of a job that another process took: by its id and its token, which are all that is known of it."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.ask import JobAsk
from dibs.errors import InvalidOption, LeaseLost, StoreUnavailable
from dibs.job import backoff_s
from dibs.jobs import BACK, DEAD, DONE, RETRY, Finish
from dibs.names import check_seconds
from dibs.new_jobs import error_text, result_text
from dibs.queue_core import check_ids, whole
from dibs.steps import sending

if TYPE_CHECKING:
    from dibs.names import Seconds
    from dibs.queue_core import QueueCore
    from dibs.steps import Steps

#: What may be said of it, and how it ends then.
OUTCOMES = {"done": DONE, "failed": RETRY, "dead": DEAD, "skipped": BACK}
TOKEN_MAX = 2**63 - 1


def finishing(
    core: QueueCore[Any, Any],
    job: int,
    token: int,
    result: Any,
    outcome: str,
    error: BaseException | str | None,
    retry_in: Seconds | None,
) -> Steps[None]:
    """End it; raises LeaseLost (see ``Queue.finish``)."""
    if outcome not in OUTCOMES:
        raise InvalidOption(f"outcome is one of {', '.join(OUTCOMES)}, not {outcome!r}")
    end = OUTCOMES[outcome]
    failed = end in (RETRY, DEAD)
    fitting = (("result", result, end == DONE), ("error", error, failed), ("retry_in", retry_in, end == RETRY))
    for what, given, fits in fitting:
        if given is not None and not fits:
            raise InvalidOption(f"{what} does not go with the outcome {outcome!r}")
    (job,) = check_ids([job])
    whole("token", token, TOKEN_MAX)
    note, keep_s = (error_text(error), 0.0) if failed else (result_text(result), core.keep_s if end == DONE else 0.0)
    session = core.desk.session()
    delay_s = 0.0 if retry_in is None else check_seconds("retry_in", retry_in)
    if end == RETRY and retry_in is None:
        known = yield from core.job(job)
        delay_s = backoff_s(session, 1 if known is None else max(1, known.tries))
    request = Finish(core._key, (job,), token, end, note if failed or keep_s else None, delay_s, keep_s, elsewhere=True)
    ask = JobAsk(request, session.clock.now() + session.patience_s)
    yield from sending(session, lambda: session.send(ask))
    load = core.load()  # for how long it was worked nobody here knows
    load.tell()
    if ask.outcome.gone:
        load.count(late=1)
        what = f"the claim with token {token} on job {job} of {core.name!r} is not in force"
        if ask.maybe_applied:
            raise StoreUnavailable(f"{what}; it may have been ended just now, by an attempt whose answer was lost")
        raise LeaseLost(f"{what}: it has expired, or was ended; nothing was changed")
    load.count(**{"returned" if end in (RETRY, BACK) else "ended": 1})
