"""Callers whose time is over, and who only wait for a first answer to whoever asks the store for their line."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dibs.store import Held
    from dibs.wishes import AcquireAsk


class Overdue:
    def __init__(self) -> None:
        #: By line; seldom any.
        self.asks: dict[str, dict[AcquireAsk, None]] = {}

    def add(self, ask: AcquireAsk) -> None:
        self.asks.setdefault(ask.line, {})[ask] = None

    def forget(self, ask: AcquireAsk) -> None:
        """It was answered, or is waited for no longer."""
        asks = self.asks.get(ask.line)
        if asks is not None:
            asks.pop(ask, None)
            if not asks:
                del self.asks[ask.line]

    def tell(self, line: str, held: Held) -> None:
        """Somebody has the name, which is their answer: they leave the line as they are withdrawn, and not before."""
        for ask in self.asks.pop(line, ()):
            ask.seen = held
            ask.settle(held)
