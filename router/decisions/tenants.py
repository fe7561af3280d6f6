"""Who asks, what is owed to them, and what they may have: tenants and classes of service as frozen values. Pure.

A tenant is whoever holds one of its API keys. DEFAULT_TENANT holds those of `router.api_keys`, and where no keys are
configured at all, it is everyone. A class of service is a pair of targets; the request names it, else its tenant's, else
the configured default; where there is none of these, nothing is owed and placement goes by its prices alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from headrace.config import ClusterConfig
from headrace.config_tenants import TenantConfig
from headrace.errors import InvalidRequest
from headrace.values import DEFAULT_TENANT

NO_CLASS = "none"
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request is owed, in seconds; None: nothing of that kind. TTFT counts from its arrival at the router."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_seconds is not None or self.tpot_seconds is not None

    def judge(self, ttft_seconds: float, tpot_seconds: float | None) -> str:
        """How an answer did: "met", or what it missed: "ttft", "tpot", "both"."""
        late = self.ttft_seconds is not None and ttft_seconds > self.ttft_seconds
        slow = self.tpot_seconds is not None and tpot_seconds is not None and tpot_seconds > self.tpot_seconds
        if late and slow:
            return "both"
        return "ttft" if late else "tpot" if slow else "met"


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class Tenant:
    """None of a quota: without limit. `cache_domain`: tenants of one domain may hit each other's cached prefixes; the
    empty one is that of requests without a tenant. `service_classes` None: all that there are."""

    name: str = DEFAULT_TENANT
    weight: float = 1.0
    max_priority: int = MAX_PRIORITY
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    service_class: str | None = None
    service_classes: tuple[str, ...] | None = None
    cache_domain: str = ""
    coalesce: bool = False
    cache_results: bool = False

    def salt(self, cache_salt: str) -> str:
        """The client's salt within the tenant's domain. No client's salt holds NUL, so no salt reaches another domain."""
        return f"\0{self.cache_domain}\0{cache_salt}" if self.cache_domain else cache_salt


EVERYONE = Tenant()


@dataclass(frozen=True, slots=True)
class Tenancy:
    """All tenants and classes of a cluster's configuration."""

    tenants: Mapping[str, Tenant] = field(default_factory=lambda: MappingProxyType({DEFAULT_TENANT: EVERYONE}))
    classes: Mapping[str, Targets] = field(default_factory=lambda: MappingProxyType({}))
    default_class: str | None = None

    @classmethod
    def of(cls, config: ClusterConfig) -> "Tenancy":
        tenants = {DEFAULT_TENANT: EVERYONE} | {name: _tenant(name, its) for name, its in config.tenants.items()}
        classes = {name: Targets(its.ttft_seconds, its.tpot_seconds) for name, its in config.service_classes.items()}
        return cls(MappingProxyType(tenants), MappingProxyType(classes), config.admission.service_class)

    def class_for(self, tenant: Tenant, asked: str | None) -> tuple[str, Targets]:
        """The name and targets of the class in which a tenant's request is served; InvalidRequest for one that it may not
        have."""
        if asked is None:
            name = tenant.service_class or self.default_class
            return (name, self.classes[name]) if name is not None else (NO_CLASS, NO_TARGETS)
        allowed = tuple(self.classes) if tenant.service_classes is None else tenant.service_classes
        if asked not in allowed:
            shown = ", ".join(allowed) or "absent: no classes are configured"
            raise InvalidRequest.out_of_range("service_class", asked, f"one of {shown}" if allowed else shown)
        return asked, self.classes[asked]


def _tenant(name: str, its: TenantConfig) -> Tenant:
    domain = its.cache_domain if its.cache_domain is not None else "" if name == DEFAULT_TENANT else name
    return Tenant(
        name,
        its.weight,
        its.max_priority,
        its.requests_per_minute,
        its.tokens_per_minute,
        its.max_concurrent,
        its.service_class,
        its.service_classes,
        domain,
        its.coalesce,
        its.cache_results,
    )
