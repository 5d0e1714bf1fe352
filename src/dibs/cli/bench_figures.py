"""What measured times amount to: how many a second, the one in the middle, and the slow ones."""

from __future__ import annotations

import math

from dibs._typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from array import array


class Samples(NamedTuple):
    """The seconds that each of many took, at least one, and the seconds in which all of them were done."""

    times: array[float]
    busy_s: float


class Figures(NamedTuple):
    """What samples amount to. Of fewer than a hundred, the 99th percentile is the slowest."""

    count: int  # type: ignore[assignment]  # nobody counts in it, as one can in a tuple
    per_second: float
    median_s: float
    p99_s: float
    least_s: float
    most_s: float


def figures_of(samples: Samples) -> Figures:
    times = sorted(samples.times)
    count = len(times)
    return Figures(
        count,
        count / samples.busy_s,
        (times[(count - 1) // 2] + times[count // 2]) / 2,
        times[math.ceil(count * 0.99) - 1],
        times[0],
        times[-1],
    )
