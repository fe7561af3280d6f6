"""What one rendering of a chat template may cost. Templates come with checkpoints, and variables with requests: neither
may loop for ever, fill the memory, or hold a thread in one endless operation.

Three bounds are counted where a template can do anything at all (`sandbox`): steps (loop rounds, calls, filters, tests, and
what they work on by its size), the size of any one value, and the characters made in all; a fourth is the thread's own CPU
time. No value outgrows its bound, so no single operation on values takes long, and between two operations the steps are
counted. What multiplies is estimated before it is done (`estimates`).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

MAX_INT_BITS = 4096
MAX_DEPTH = 128
ELEMENT_CHARACTERS = 8
ELEMENTS_PER_STEP = 64
CHARACTERS_PER_STEP = 512
STEPS_PER_LOOK = 256


class OverBudget(Exception):
    """The rendering would cost more than it may."""


class Budget:
    """What is left of one rendering. Mutable; owned by the call that renders, and in force in its thread alone."""

    def __init__(
        self,
        steps: int,
        value_characters: int,
        all_characters: int,
        seconds: float,
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._max_steps = self._steps = steps
        self._value_characters = value_characters
        self._max_characters = self._characters = all_characters
        self._seconds = seconds
        self._cpu_seconds = cpu_seconds
        self._began = cpu_seconds()
        self._next_look = max(steps - STEPS_PER_LOOK, 0)

    @classmethod
    def brief(cls) -> "Budget":
        """What may be done between two turns of an event loop: some milliseconds."""
        return cls(4000, 2**16, 2**18, 0.02)

    @classmethod
    def full(cls, input_characters: int = 0) -> "Budget":
        """What is spent on one request, on a thread."""
        return cls(2**20, 2**22 + 4 * input_characters, 2**26 + 16 * input_characters, 1.0)

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps >= self._next_look:
            return
        self._next_look = max(self._steps - STEPS_PER_LOOK, 0)
        if self._steps < 0:
            raise OverBudget(f"it takes more than {self._max_steps} steps")
        if self._cpu_seconds() - self._began > self._seconds:
            raise OverBudget(f"it takes more than {self._seconds:g} s")

    def fits(self, characters: int) -> None:
        """A value of so many characters may be."""
        if characters > self._value_characters:
            raise OverBudget(f"it makes a value of more than {self._value_characters} characters")

    def charge(self, characters: int) -> None:
        """So many characters are made."""
        self.fits(characters)
        self._characters -= characters
        if self._characters < 0:
            raise OverBudget(f"it makes more than {self._max_characters} characters")

    def size(self, value: Any) -> int:
        """The characters that `value` takes when it is written out, containers by their elements, however often one is
        in it; counted as steps too. Raises once it is too large or too deep."""
        if isinstance(value, str):
            self.step(len(value) // CHARACTERS_PER_STEP)
            self.fits(len(value))
            return len(value)
        total, level = 0, [value]
        for _ in range(MAX_DEPTH):
            inner: list[Any] = []
            for one in level:
                if isinstance(one, str | bytes):
                    total += len(one)
                elif isinstance(one, int):
                    check_bits(one.bit_length())
                elif isinstance(one, list | tuple | dict):
                    total += ELEMENT_CHARACTERS * len(one)
                    self.fits(total + ELEMENT_CHARACTERS * len(inner))
                    inner.extend((*one.keys(), *one.values()) if isinstance(one, dict) else one)
            self.fits(total)
            if not inner:
                self.step(total // CHARACTERS_PER_STEP)
                return total
            self.step(len(inner) // ELEMENTS_PER_STEP)
            level = inner
        raise OverBudget(f"it makes a value nested deeper than {MAX_DEPTH}")


def characters_of(values: Iterable[Any], at_most: float = math.inf) -> int:
    """About how much there is to render, of JSON values; counts no further than a little beyond `at_most`."""
    total, waiting = 0, list(values)
    while waiting and total <= at_most:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, list | dict):
            total += ELEMENT_CHARACTERS * len(one)
            if total <= at_most:
                waiting.extend(one.values() if isinstance(one, dict) else one)
    return total


_IN_FORCE: ContextVar[Budget] = ContextVar("template budget")


@contextmanager
def within(budget: Budget) -> Iterator[None]:
    token = _IN_FORCE.set(budget)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def in_force() -> Budget:
    """Of the rendering that this thread is in."""
    return _IN_FORCE.get()


def check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise OverBudget(f"it makes an integer of more than {MAX_INT_BITS} bits")
