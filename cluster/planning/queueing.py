"""Waiting in queues, in closed form. Rates per second, times in seconds.

Poisson arrivals: by Allen and Cunneen, the mean is Erlang's times half of (1 + the squared coefficient of variation of
service); who waits at all waits about exponentially long. Gaps of a Gamma distribution: the same with the chance that an
arrival finds a server busy, exact for one server, in the place of how busy it is. Beyond EXACT_SERVERS servers Erlang's C
is Halfin and Whitt's limit of it.
All are approximations: `tests/unit/cluster/planning` and docs/planning.md say how far off.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

EXACT_SERVERS = 64


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def normal_quantile(share: float) -> float:
    low, high = -8.0, 8.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if normal_cdf(middle) < share else (low, middle)
    return (low + high) / 2


def erlang_c(num_servers: int, offered: float) -> float:
    """The chance to wait, of Poisson arrivals that bring `offered` seconds of work a second. 1 from saturation on."""
    if offered <= 0:
        return 0.0
    if offered >= num_servers:
        return 1.0
    if num_servers > EXACT_SERVERS:
        beta = (1 - offered / num_servers) * math.sqrt(num_servers)
        density = math.exp(-beta * beta / 2) / math.sqrt(2 * math.pi)
        return 1 / (1 + beta * normal_cdf(beta) / density) if density > 1e-300 else 0.0
    blocked = 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1 - offered / num_servers * (1 - blocked))


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody waits with a chance of 1 − `chance`; who waits, exponentially long with this mean, but never beyond `most`."""

    chance: float
    mean_if_any: float
    most: float = math.inf

    @property
    def mean(self) -> float:
        if not self.chance or self.mean_if_any <= 0:
            return 0.0
        return self.chance * self.mean_if_any * -math.expm1(-self.most / self.mean_if_any)

    def within(self, seconds: float) -> float:
        """The share that waits no longer."""
        if seconds < 0:
            return 0.0
        if self.mean_if_any <= 0 or seconds >= self.most:
            return 1.0
        return 1 - self.chance * math.exp(-seconds / self.mean_if_any)


NO_WAIT = Wait(0.0, 0.0)


def wait(
    num_servers: int, per_second: float, service: float, service_scv: float = 1.0, gap_scv: float = 1.0
) -> Wait | None:
    """In front of `num_servers` that share one queue. `scv`: variance over squared mean. None: they never catch up."""
    offered = per_second * service
    if offered >= num_servers:
        return None
    if offered <= 0:
        return NO_WAIT
    arriving = busy_when_arriving(offered / num_servers, gap_scv)
    mean_if_any = service / (num_servers * (1 - arriving)) * (service_scv + gap_scv) / (1 + gap_scv)
    return Wait(erlang_c(num_servers, arriving * num_servers), mean_if_any)


def busy_when_arriving(busy: float, gap_scv: float) -> float:
    """The chance that an arrival finds the one server busy, with gaps of a Gamma distribution and exponential service: the
    root of x = E exp(−(1 − x) gap / service). `busy` itself for Poisson arrivals, more where they come in bursts."""
    if gap_scv == 1.0:
        return busy
    scv = max(gap_scv, 1e-3)
    low, high = 0.0, 1 - 1e-9
    for _ in range(40):
        middle = (low + high) / 2
        found = math.exp(-math.log1p(scv * (1 - middle) / busy) / scv)
        low, high = (middle, high) if found > middle else (low, middle)
    return low


def quantile(within: Callable[[float], float], share: float) -> float:
    """The least value within which lies that share of a distribution on [0, ∞), to a thousandth of it."""
    high = 1e-4
    while within(high) < share:
        high *= 2
        if high > 1e7:
            return math.inf
    low = high / 2 if high > 1e-4 else 0.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if within(middle) >= share else (middle, high)
    return high
