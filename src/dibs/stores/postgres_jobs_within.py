"""Puts and ends of jobs as statements for somebody else's connection, whatever driver it belongs to.

The texts are those of our own connections. A value goes as text, with the type it is to have: drivers differ in how
they would send an array.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dibs.door import VALUE, Said

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARAMETER = re.compile(r"\$(\d+)::")


def said(sql: bytes, parameters: Sequence[bytes | None]) -> Said:
    """The statement, each place of a parameter with its value."""
    text = sql.decode()
    places = [int(number) - 1 for number in _PARAMETER.findall(text)]
    values: list[Any] = [None if (value := parameters[place]) is None else value.decode() for place in places]
    return Said(_PARAMETER.sub(f"CAST({VALUE} AS text)::", text), values)
