"""How many workers the sequences that decode now would need if as many came again.

Arrivals say what comes, and a worker that goes keeps what it has until that is done. So where answers are long, or longer
than those that have ended say, the rest may look idle by arrivals while each of them is full: who takes one away then has
the successors of its sequences decode beside all the others'. Those on workers that drain count, and those on workers that
were lent to prefill: their successors are elsewhere.

    rows    sequences ÷ FULL of a worker's rows
    KV      what they hold ÷ FULL of a worker's
    TPOT    the n workers on which a step over them takes FULL of the target: base + (their part of a step) ÷ n, and where
            prompts are computed by the same workers (unified), over the time that these leave

It keeps workers from being taken away or lent, and brings none: what is missed brings them (`needs`).
"""

from cluster.scaling.needs import mean_length, prefill_seconds, reference
from cluster.scaling.values import InFlight, Inputs
from headrace.values import Role

FULL = 0.9  # as sizing has it for rows and time, and `needs` for KV


def in_flight(inputs: Inputs) -> dict[str, InFlight]:
    """By the role that decodes; nothing of one where nothing does."""
    found = {}
    for role in (Role.DECODE, Role.UNIFIED):
        kept = _of(inputs, role)
        if kept is not None:
            found[role.value] = kept
    return found


def _of(inputs: Inputs, role: Role) -> InFlight | None:
    name = reference(inputs, role)
    pools = [
        pool
        for own, pool in inputs.pools.items()
        if (inputs.rules.pools[own].role is Role.UNIFIED) == (role is Role.UNIFIED)
    ]
    sequences = sum(pool.decoding.sequences for pool in pools)
    if name is None or not sequences:
        return None
    worker, cost = inputs.pools[name].worker, inputs.pools[name].worker.cost
    held_tokens = sum(pool.decoding.kv_workers * pool.worker.kv_tokens for pool in pools)
    bounds = {
        "of their rows": sequences / (FULL * worker.max_num_seqs),
        "of their KV": held_tokens / (FULL * worker.kv_tokens),
    }
    allowed = FULL * inputs.rules.target.tpot_seconds
    left = allowed - cost.decode_base_seconds
    if inputs.pools[name].decode_known and left > 0:
        context = sum(pool.decoding.context_tokens for pool in pools)
        adds = cost.decode_sequence_seconds * sequences + cost.decode_context_token_seconds * context
        prompts = 0.0
        if role is Role.UNIFIED and inputs.pools[name].prefill_known:
            prompts = inputs.traffic.per_second * prefill_seconds(worker, mean_length(inputs))
        bounds[f"of TPOT {inputs.rules.target.tpot_seconds:g} s"] = (adds + allowed * prompts) / left
    most = max(bounds, key=lambda bound: bounds[bound])
    return InFlight(
        bounds[most],
        f"{sequences} sequences decode, those on workers that leave or are lent among them; as many again would take "
        f"{FULL:.0%} {most} of {bounds[most]:.1f} workers",
    )
