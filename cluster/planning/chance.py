"""How far a figure of a run is off by chance: by how few requests it was counted on, and which came together."""

import math
from collections.abc import Callable, Sequence

LEAST_STRETCHES = 5  # that a run is taken to consist of


def deviation(values: Sequence[float], figure: Callable[[Sequence[float]], float], stretch: int) -> float:
    """The standard deviation of `figure` of such values, in order of arrival. Neighbours queue behind each other and are
    late together, so that each by itself says less than one: stretches of so many do (Meketon and Schmeiser, 1984)."""
    number = len(values)
    stretch = max(min(stretch, number // LEAST_STRETCHES), 1)
    if number <= stretch:
        return 0.0
    whole = figure(values)
    off = [(figure(values[at : at + stretch]) - whole) ** 2 for at in range(number - stretch + 1)]
    return math.sqrt(sum(off) / len(off) * stretch / (number - stretch))


def of_all(figures: Sequence[float], deviations: Sequence[float]) -> float:
    """The standard deviation of the mean of several runs: what each of them knew of itself, or how far they are apart,
    where that is more. A run cannot know that its own traffic was heavier than another's."""
    number = len(figures)
    within = math.sqrt(sum(one * one for one in deviations)) / number
    if number < 2:
        return within
    mean = sum(figures) / number
    return max(within, math.sqrt(sum((one - mean) ** 2 for one in figures) / (number - 1) / number))
