"""The section that says how workers are replaced."""

from pydantic import Field

from headrace.config_section import Section


class RolloutsConfig(Section):
    """How workers of a pool are replaced where its layout changes, or a canary is promoted or taken back: Kubernetes'
    maxUnavailable and maxSurge, in workers of each pool. Who is replaced drains, within `autoscaling.drain_seconds`; a pool
    of N takes N ÷ (both together) rounds of a drain and a start. StatefulSets' workers are Kubernetes' to replace."""

    max_unavailable: int = Field(
        default=1, ge=0, le=4096, description="that a pool may serve with fewer than it should; 0 only with `max_surge`"
    )
    max_surge: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="that may hold GPUs beyond its `replicas`, those that drain among them; within "
        "`autoscaling.budget_gpus`",
    )
