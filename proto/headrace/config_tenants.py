"""The sections that say who may ask for how much, and what they are owed."""

from typing import Annotated

from pydantic import Field

from headrace.config_section import Name, Section


class ServiceClassConfig(Section):
    """What requests of a class are owed; null: nothing of that kind. TTFT counts from the arrival at the router."""

    ttft_seconds: float | None = Field(default=None, gt=0, le=3600)
    tpot_seconds: float | None = Field(default=None, gt=0, le=60)


class TenantConfig(Section):
    """Whoever holds one of its keys. Keys are secrets: they stand in files (one a line) or environment variables, and only
    where is said here. Of a quota null: no limit. The tenant `default` has the keys of `router.api_keys`, and is everybody
    where no keys are configured at all."""

    key_files: tuple[Annotated[str, Field(pattern="^/")], ...] = Field(
        default=(), strict=False, description="from the root: routers may run anywhere"
    )
    key_env: tuple[str, ...] = Field(default=(), strict=False, description="names of environment variables")
    requests_per_minute: int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12)
    max_concurrent: int | None = Field(default=None, ge=1, le=10**6)
    weight: float = Field(default=1.0, gt=0, le=1000)
    max_priority: int = Field(default=100, ge=-100, le=100)
    service_class: Name | None = Field(default=None, description="of its requests that name none")
    service_classes: tuple[Name, ...] | None = Field(
        default=None, strict=False, description="that it may name; null: all"
    )
    cache_domain: str | None = Field(
        default=None,
        max_length=64,
        pattern=r"^[^\x00]*$",
        description="tenants of one domain share cached prefixes; null: its own",
    )
    coalesce: bool = Field(default=False, description="identical requests in flight are computed once")
    cache_results: bool = Field(default=False, description="repeatable answers are kept and given again")


class AdmissionConfig(Section):
    """Who waits, for what, and what of quotas routers may spend without asking."""

    service_class: Name | None = Field(default=None, description="of requests that neither name one nor their tenant")
    prefill_backlog_seconds: float = Field(
        default=2.0,
        gt=0,
        le=3600,
        description="of prefill that workers have before them on average; beyond it prompts wait in the router",
    )
    max_bypass_seconds: float = Field(default=10.0, ge=0, le=3600, description="of prefill that may pass a prompt")
    quota_lease_seconds: float = Field(default=10.0, ge=1, le=3600)
    quota_sync_seconds: float = Field(default=0.5, ge=0.05, le=60)
    quota_burst_seconds: float = Field(default=60.0, ge=1, le=60, description="of a rate that may be spent at once")
    unleased_fraction: float = Field(
        default=0.5, gt=0, le=1, description="of a quota, by a router that never saw Redis"
    )
    result_cache_bytes: int = Field(default=16 * 2**20, ge=2**16, le=2**36)
    result_cache_seconds: float = Field(default=300.0, gt=0, le=86400)
