"""A worker's lease in Redis: a hash with a TTL, one field a fact, so that an operator can read it (design 5.4).

The worker writes it whole at every renewal; its TTL runs on Redis' time. A lease is for discovery alone.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headrace.costmodel import CostModel
from headrace.values import STABLE, Capacity, Compatibility, ParallelLayout, Role, WorkerInfo


def lease_fields(info: WorkerInfo, *, draining: bool = False) -> dict[str, str]:
    """The hash of a worker's lease. `draining` is for those who look; routers learn it from the session."""
    return {
        "worker_id": info.worker_id,
        "generation": str(info.generation),
        "role": info.role.value,
        "address": info.address,
        "node": info.node,
        "model_path": info.model_path,
        "layout": json.dumps(asdict(info.layout)),
        "compatibility": json.dumps(asdict(info.compatibility)),
        "capacity": json.dumps(asdict(info.capacity)),
        "cost": json.dumps(asdict(info.cost)),
        "probe": info.probe.hex(),
        "revision": info.revision,
        "draining": "1" if draining else "0",
    }


def parse_lease(fields: Mapping[bytes, bytes]) -> WorkerInfo | None:
    """The inverse of lease_fields, from what HGETALL returned; None when the lease is gone (no fields).

    ValueError on a hash that lease_fields of this version did not make.
    """
    if not fields:
        return None
    text = {key.decode(): value.decode() for key, value in fields.items()}
    try:
        return WorkerInfo(
            worker_id=text["worker_id"],
            generation=int(text["generation"]),
            role=Role(text["role"]),
            address=text["address"],
            compatibility=Compatibility(**_object(text["compatibility"])),
            layout=ParallelLayout(**_object(text["layout"])),
            capacity=Capacity(**_object(text["capacity"])),
            model_path=text["model_path"],
            node=text["node"],
            cost=CostModel(**_object(text["cost"])),
            probe=bytes.fromhex(text["probe"]),
            revision=text.get("revision", STABLE),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a lease of this version: {error}") from error


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"not a lease of this version: {text[:80]!r} is no JSON object")
    return value
