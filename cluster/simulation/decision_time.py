"""How long one turn of the controller takes to decide: members → pools → forecast → decision → actions. JSON on stdout.

    python -m cluster.simulation.decision_time [--workers 1000] [--runs 20]

A thousand workers in four pools of both roles, a week of arrivals, a load that grows by a tenth each turn: nothing that was
sized for before is asked again, and caches are emptied. What is read from Redis and written there is not in it.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import replace

from cluster.lifecycle import Desired, DesiredPool, Observed, ObservedWorker, Phase
from cluster.planning.load import Worker
from cluster.reconcile import reconcile
from cluster.scaling import needs
from cluster.scaling.decide import decide
from cluster.scaling.forecast import BUCKET_SECONDS, DAY, History
from cluster.scaling.observe import Member, observe
from cluster.scaling.values import Inputs, Memory, PoolRules, Rules, Traffic
from cluster.simulation.fluid import World
from headrace.values import ParallelLayout, Role

POOLS = {
    "decode": (Role.DECODE, 1),
    "decode-wide": (Role.DECODE, 2),
    "prefill": (Role.PREFILL, 1),
    "prefill-wide": (Role.PREFILL, 2),
}


def turns(num_workers: int, num_runs: int) -> list[float]:
    """Milliseconds of CPU of each."""
    world = World.of()
    each = num_workers // len(POOLS)
    layouts = {name: ParallelLayout(tp) for name, (_, tp) in POOLS.items()}
    rules = Rules(
        {name: PoolRules(role, layouts[name], 1, 4 * each) for name, (role, _) in POOLS.items()}, world.target
    )
    desired = Desired({name: DesiredPool(role, each, layouts[name]) for name, (role, _) in POOLS.items()})
    workers = [
        ObservedWorker(name, index, 1, role, layouts[name], Phase.READY, 0.0)
        for name, (role, _) in POOLS.items()
        for index in range(each)
    ]
    history = History()
    for bucket in range(8 * DAY):
        rate = 3000 - 2000 * math.cos(2 * math.pi * bucket / DAY)
        history.add(round(rate * BUCKET_SECONDS), BUCKET_SECONDS, bucket * BUCKET_SECONDS + 1.0)
    memory, found = Memory(), []
    now = 8 * DAY * BUCKET_SECONDS
    for run in range(num_runs):
        for cached in (needs._size, needs._attainment, needs._lengths_around):
            cached.cache_clear()
        now += 30
        traffic = Traffic(4, 2000.0 * 1.1 ** (run % 8), 2000.0 + run, 250.0 + run, 0.3, judged=1000, in_flight=100)
        began = time.process_time()
        members = [
            Member(
                worker.pool, worker.role, worker.phase, 1000.0, speed=_speed(world, at), used_blocks=at, num_blocks=4000
            )
            for at, worker in enumerate(workers)
        ]
        pools = observe(rules, desired, members, {})
        forecast = history.forecast(traffic.per_second, rules.lead_seconds)
        decision = decide(Inputs(float(now), rules, pools, traffic, forecast, memory))
        wanted = {
            name: replace(pool, replicas=decision.pools[name].replicas, lent=decision.pools[name].lent)
            for name, pool in desired.pools.items()
        }
        reconcile(Desired(wanted), Observed(workers), float(now))
        found.append((time.process_time() - began) * 1e3)
        memory = decision.memory
    return found


def _speed(world: World, at: int) -> Worker:
    """No two fits are alike."""
    cost = world.worker.cost
    return replace(
        world.worker, cost=replace(cost, decode_base_seconds=cost.decode_base_seconds * (1 + at % 100 / 1000))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    print(json.dumps(turns(arguments.workers, arguments.runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
