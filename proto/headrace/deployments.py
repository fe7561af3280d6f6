"""How benches, and the model of what they run, name the workers that share some GPUs: `2U:512`, `1P1D+tight/256:2048`."""

import re
from dataclasses import dataclass

from headrace.values import Role

SPLIT_CHUNK = 2048
NAME = re.compile(r"(?:(\d+)U|(\d+)P(\d+)D)(\+([a-z]*)(?:/(\d+))?)?(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Deployment:
    """`num_prefill` 0: all workers do both. `placed`: by production's placement, which knows the targets named `targets`,
    if any; decode workers' steps are then of at most `decode_chunk`. `name` is without `chunk`."""

    name: str
    num_prefill: int
    num_decode: int
    chunk: int
    decode_chunk: int
    placed: bool = False
    targets: str = ""

    @classmethod
    def parse(cls, text: str) -> "Deployment":
        """One pool says its chunk, two have one of their own; ValueError where it is no name of any."""
        match = NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"a deployment must be like 2U:512, 1P1D:4096 or 1P1D+tight/256, got {text}")
        both, prefill, decode, placed, targets, decode_chunk, given = match.groups()
        if both and (not given or decode_chunk):
            raise ValueError(f"one pool has one chunk, after a colon, as 2U:512 has, got {text}")
        chunk = int(given or SPLIT_CHUNK)
        counts = (0, int(both)) if both else (int(prefill), int(decode))
        name = text.split(":")[0]
        return cls(name, *counts, chunk, int(decode_chunk or chunk), placed is not None, targets or "")

    @property
    def num_gpus(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of its workers: first those that prefill alone."""
        others = Role.DECODE if self.num_prefill else Role.UNIFIED
        return (Role.PREFILL,) * self.num_prefill + (others,) * self.num_decode

    def step_tokens(self, role: Role) -> int:
        """At most so many in a step of such a worker."""
        return self.chunk if role is Role.PREFILL else self.decode_chunk
