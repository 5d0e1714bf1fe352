"""For whoever writes or operates a store: ``check_store`` runs the conformance suite against it.

>>> from dibs.testing import check_store
>>> check_store("memory://docs", only=["grant_then_held"])
"""

from __future__ import annotations

from dibs.testing.conformance import check_store

__all__ = ["check_store"]
