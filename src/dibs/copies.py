"""What a copied or unpickled lease is. Loaded only where one is made."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import LeaseLost

if TYPE_CHECKING:
    from dibs.names import Seconds


class _LongLost:
    """The event of a loss that has already happened."""

    def is_set(self) -> bool:
        """Always True."""
        return True

    def wait(self, timeout: Seconds | None = None) -> bool:
        """True at once."""
        return True


class LostLease:
    """What a copied or unpickled lease is: a name and a token, holding nothing and able to do nothing."""

    held = False
    lost = _LongLost()

    def __init__(self, name: str, fencing_token: int) -> None:
        self.name = name
        self.fencing_token = fencing_token

    def remaining(self) -> float:
        """Always 0."""
        return 0.0

    def check(self) -> None:
        """Always raises LeaseLost."""
        raise LeaseLost(f"this is a copy of a lease on {self.name!r}; only the original object holds it")

    def renew(self, ttl: Seconds | None = None) -> None:
        """Always raises LeaseLost."""
        self.check()

    def release(self) -> bool:
        """Always raises LeaseLost."""
        self.check()
        return False

    def export(self) -> dict[str, Any]:
        """Always raises LeaseLost."""
        self.check()
        return {}

    def guard(self, connection: Any) -> None:
        """Always raises LeaseLost."""
        self.check()

    def release_after_commit(self, connection: Any) -> None:
        """Always raises LeaseLost."""
        self.check()


class LostMultiLease(LostLease):
    """The same of several names."""

    def __init__(self, fencing_tokens: dict[str, int]) -> None:
        self.name = ", ".join(fencing_tokens)
        self.names = tuple(fencing_tokens)
        self.fencing_tokens = fencing_tokens
        self.leases = {name: LostLease(name, token) for name, token in fencing_tokens.items()}
