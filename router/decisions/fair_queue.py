"""The order of those who wait: fair among tenants; within each, quick answers first as far as the others can bear. Pure.

Among tenants: the next is always of the tenant that was served least, in tokens ÷ weight, since it has been waiting. One
that joins starts level with the least served of those who wait, so nobody saves up by staying away; when nobody waits
any more all accounts are closed. What was generated for it counts too, but no more than `most_owed` against one turn: a
tenant whose short prompts need no turn and get long answers would else never have one for a long prompt. So of two who
wait all the time each gets its weight's share of the tokens, whatever their prompts' lengths.

Within a tenant a newcomer goes to the end, and from there passes, one after another, those who are longer or have more time
than it, as long as each of them can bear it: everybody lets at most `patience` tokens pass in all, and some more for each
step by which those have a higher priority. One that is too late for its target lets those pass that are not, as far as
anybody waits for others. So none starves: what is served before a request is what stood before it when
it came, and then no more than its patience, whether all others are shorter, longer, or more urgent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf


@dataclass(slots=True, eq=False)
class Waiting:
    """One who waits. `num_tokens`: what someone must compute of its prompt; `latest`: when that must begin to meet its
    target; `patience`: how many tokens of others it lets pass, and `passed`: how many have."""

    name: str
    tenant: str
    num_sequences: int
    num_tokens: int
    patience: float = 0.0
    priority: int = 0
    latest: float = inf
    passed: float = field(default=0.0, init=False)


class FairQueue:
    """Owns those who wait, a line for each tenant. Tenants without a weight have 1. Lines are as long as queues may be, so
    walking along one costs little."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._by_name: dict[str, Waiting] = {}
        self._lines: dict[str, list[Waiting]] = {}  # of tenants of whom somebody waits
        self._served: dict[str, float] = {}  # tokens ÷ weight, of this busy period
        self._served_before: dict[str, float] = {}  # the same of those who wait, when they began to wait for this turn
        self._most_owed = inf

    def __len__(self) -> int:
        return len(self._by_name)

    def num_of(self, tenant: str) -> int:
        return len(self._lines.get(tenant, ()))

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def place(self, waiting: Waiting, now: float, step_tokens: float, late_patience: float = 0.0) -> int:
        """How many of its tenant a newcomer would have before it. A step of priority is worth `step_tokens`; who is too
        late for its target lets at least `late_patience` tokens pass of those who are not."""
        line = self._lines.get(waiting.tenant, [])
        place = len(line)
        while place and _lets_pass(line[place - 1], waiting, now, step_tokens, late_patience):
            place -= 1
        return place

    def push(self, waiting: Waiting, place: int, most_owed: float = inf) -> None:
        """At the place that was just found for it."""
        tenant = waiting.tenant
        self._most_owed = most_owed
        if tenant not in self._lines:
            least = self._least_served()
            self._served_before[tenant] = least
            self._served[tenant] = min(max(self._served.get(tenant, 0.0), least), least + most_owed)
            self._lines[tenant] = []
        line = self._lines[tenant]
        for passed in line[place:]:
            passed.passed += waiting.num_tokens
        line.insert(place, waiting)
        self._by_name[waiting.name] = waiting

    def num_ahead(self, tenant: str, place: int) -> int:
        """How many are served before who stands at that place, as things stand: its own tenant's, and as many of each other
        tenant as its weight gets it meanwhile."""
        turns = (place + 1) / self.weight(tenant)
        others = (
            min(len(line), ceil(turns * self.weight(other))) for other, line in self._lines.items() if other != tenant
        )
        return place + sum(others)

    def tokens_ahead(self, tenant: str, place: int) -> int:
        """What its own tenant has before that place."""
        return sum(waiting.num_tokens for waiting in self._lines.get(tenant, ())[:place])

    def head(self) -> Waiting | None:
        """Who is next."""
        tenant = min(self._lines, key=self._served.__getitem__, default=None)
        return self._lines[tenant][0] if tenant is not None else None

    def pop(self) -> Waiting:
        """Takes the next one out, and charges its tenant."""
        waiting = self.head()
        assert waiting is not None, "nobody waits"
        tenant = waiting.tenant
        self._served[tenant] += waiting.num_tokens / self.weight(tenant)
        self._served_before[tenant] = self._served[tenant]
        self.remove(waiting.name)
        return waiting

    def remove(self, name: str) -> bool:
        """Somebody goes away. False when it does not wait."""
        waiting = self._by_name.pop(name, None)
        if waiting is None:
            return False
        line = self._lines[waiting.tenant]
        line.remove(waiting)
        if not line:
            del self._lines[waiting.tenant], self._served_before[waiting.tenant]
        if not self._by_name:
            self._served.clear()
        return True

    def charge(self, tenant: str, num_tokens: int) -> None:
        """The tenant had so many tokens more than its prompts' own. Nothing is kept while nobody waits."""
        if self._by_name:
            served = self._served.get(tenant, self._least_served())
            most = self._served_before[tenant] + self._most_owed if tenant in self._lines else inf
            self._served[tenant] = max(min(served + num_tokens / self.weight(tenant), most), served)

    def last_of_the_greediest(self) -> Waiting | None:
        """The last in order of the tenant that has most waiting for its weight."""
        tenant = max(self._lines, key=lambda name: len(self._lines[name]) / self.weight(name), default=None)
        return self._lines[tenant][-1] if tenant is not None else None

    def _least_served(self) -> float:
        return min((self._served[tenant] for tenant in self._lines), default=0.0)


def _lets_pass(waiting: Waiting, new: Waiting, now: float, step_tokens: float, late_patience: float) -> bool:
    steps, patience = new.priority - waiting.priority, waiting.patience
    saves = waiting.latest < now <= new.latest < inf
    if saves and patience < late_patience:
        patience = late_patience
    if steps < 0 or waiting.passed + new.num_tokens > patience + steps * step_tokens:
        return False
    return steps > 0 or saves or new.num_tokens < waiting.num_tokens or new.latest < waiting.latest
