"""The order of those who wait: fair among tenants, early enough within each. Pure.

Among tenants: the next is always of the tenant that was served least, in tokens ÷ weight, since it has been waiting. One
that joins starts level with the least served of those who wait, so nobody saves up by staying away; when nobody waits
any more all accounts are closed. So of two who wait all the time each gets its weight's share of the tokens, whatever
their prompts' lengths.

Within a tenant: by `due`, the time until which a request lets later ones pass. A request is passed only by those whose
due time is earlier, and nothing that comes after its own due time is; so what passes it is bounded by what arrives until
then, whether all others are longer or shorter.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil


@dataclass(slots=True, eq=False)
class Waiting:
    """One who waits. `num_tokens`: what someone must compute of its prompt; `due`: until when later ones may pass it."""

    name: str
    tenant: str
    num_sequences: int
    num_tokens: int
    due: float
    number: int = field(default=0, init=False)
    left: bool = field(default=False, init=False)

    def __lt__(self, other: "Waiting") -> bool:
        return (self.due, self.number) < (other.due, other.number)


class FairQueue:
    """Owns those who wait, a heap for each tenant. Tenants without a weight have 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._by_name: dict[str, Waiting] = {}
        self._heaps: dict[str, list[Waiting]] = {}
        self._numbers: dict[str, int] = {}  # of those who wait, by tenant; no zeros
        self._served: dict[str, float] = {}  # tokens ÷ weight, of this busy period
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def num_of(self, tenant: str) -> int:
        return self._numbers.get(tenant, 0)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def push(self, waiting: Waiting) -> None:
        tenant = waiting.tenant
        if tenant not in self._numbers:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._least_served())
        waiting.number = self._next_number
        self._next_number += 1
        self._by_name[waiting.name] = waiting
        self._numbers[tenant] = self._numbers.get(tenant, 0) + 1
        heapq.heappush(self._heaps.setdefault(tenant, []), waiting)

    def num_ahead(self, tenant: str, due: float) -> int:
        """How many are served before one that is pushed now, as things stand: its own tenant's that are due no later, and
        as many of each other tenant as its weight gets it meanwhile."""
        own = sum(1 for other in self._heaps.get(tenant, ()) if not other.left and other.due <= due)
        turns = (own + 1) / self.weight(tenant)
        others = (
            min(number, ceil(turns * self.weight(other))) for other, number in self._numbers.items() if other != tenant
        )
        return own + sum(others)

    def head(self) -> Waiting | None:
        """Who is next."""
        tenant = min(self._numbers, key=self._served.__getitem__, default=None)
        if tenant is None:
            return None
        heap = self._heaps[tenant]
        while heap[0].left:
            heapq.heappop(heap)
        return heap[0]

    def pop(self) -> Waiting:
        """Takes the next one out, and charges its tenant."""
        waiting = self.head()
        assert waiting is not None, "nobody waits"
        heapq.heappop(self._heaps[waiting.tenant])
        self._served[waiting.tenant] += waiting.num_tokens / self.weight(waiting.tenant)
        self._forget(waiting)
        return waiting

    def remove(self, name: str) -> bool:
        """Somebody goes away unserved. False when it does not wait."""
        waiting = self._by_name.get(name)
        if waiting is None:
            return False
        waiting.left = True
        heap = self._heaps[waiting.tenant]
        self._forget(waiting)
        if len(heap) > 2 * self.num_of(waiting.tenant) + 64:
            heap[:] = [other for other in heap if not other.left]
            heapq.heapify(heap)
        return True

    def charge(self, tenant: str, num_tokens: int) -> None:
        """The tenant had so many tokens more than its prompts' own. Nothing is kept while nobody waits."""
        if self._by_name:
            served = self._served.get(tenant, self._least_served())
            self._served[tenant] = served + num_tokens / self.weight(tenant)

    def last_of_the_greediest(self) -> Waiting | None:
        """The last in order of the tenant that has most waiting for its weight."""
        tenant = max(self._numbers, key=lambda name: self._numbers[name] / self.weight(name), default=None)
        return max(self._live(tenant), default=None) if tenant is not None else None

    def _live(self, tenant: str) -> Iterator[Waiting]:
        return (waiting for waiting in self._heaps[tenant] if not waiting.left)

    def _least_served(self) -> float:
        return min((self._served[tenant] for tenant in self._numbers), default=0.0)

    def _forget(self, waiting: Waiting) -> None:
        del self._by_name[waiting.name]
        tenant, number = waiting.tenant, self._numbers[waiting.tenant] - 1
        if number:
            self._numbers[tenant] = number
        else:
            del self._numbers[tenant], self._heaps[tenant]
        if not self._by_name:
            self._served.clear()
