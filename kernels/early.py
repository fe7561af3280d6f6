"""Kernels that begin while the one before them still runs: programmatic dependent launch, from sm_90 on.

A kernel lets the next one begin by `gdc_launch_dependents`, as soon as all of its programs said so or ended. One launched
with `launch_pdl=True` may do what it likes up to its `gdc_wait` with what was written before the kernel ahead of it began,
and sees all of that kernel's writes after it; every launch must come to one, or the kernel behind it would not have waited
for the one ahead. Other launches wait for the kernel ahead of them to end, whatever it says.
"""

# Triton has no types.
# mypy: disable-error-code="no-untyped-call"

from triton import knobs
from triton.runtime.driver import driver


def begins_early() -> bool:
    """Whether this process launches kernels, or compiles them ahead, for a card that can; the interpreter cannot."""
    if knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)
