"""What a copied or unpickled lease is. Loaded only where one is made."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import LeaseLost

if TYPE_CHECKING:
    from typing import NoReturn

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

    def __repr__(self) -> str:
        return f"<copy of a lease on {self.name!r} token {self.fencing_token}, not held>"

    def __getattr__(self, what: str) -> NoReturn:
        raise AttributeError(f"this is a copy of a lease on {self.__dict__.get('name')!r}, and has no {what}")

    def __enter__(self) -> NoReturn:
        self._refuse()

    def __exit__(self, *exc: object) -> None:
        """Nothing was entered."""

    async def __aenter__(self) -> NoReturn:
        self._refuse()

    async def __aexit__(self, *exc: object) -> None:
        """Nothing was entered."""

    def remaining(self) -> float:
        """Always 0."""
        return 0.0

    def check(self) -> None:
        """Always raises LeaseLost."""
        self._refuse()

    def _refuse(self) -> NoReturn:
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
