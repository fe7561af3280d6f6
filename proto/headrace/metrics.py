"""The names of all metrics and spans, so that dashboards, alerts and code cannot drift apart.

Every name is defined once here and registered where it is measured. Labels are bounded: roles, worker ids, closed sets
of reasons, configured tenants and classes, and the served model's name; what a client chose never becomes a label.
"""

from enum import StrEnum
from typing import Final


class Stage(StrEnum):
    """Where the time to the first token went: together they are the TTFT. A span of a trace is named `headrace.STAGE`."""

    EDGE = "edge"  # router: from the whole request to a validated one, tokenised
    QUEUE = "queue"  # router: until it was its turn
    PLACEMENT = "placement"  # router: until it was submitted to a decode worker
    RETRY = "retry"  # router and decode worker: spent on attempts that failed
    WORKER_QUEUE = "worker_queue"  # decode worker: until it began, or until its ticket went
    TICKET_WAIT = "ticket_wait"  # prefill worker: until the ticket's prompt began
    PREFILL = "prefill"  # whoever computed the prompt
    TRANSFER = "transfer"  # decode worker: what the hand-off added to the prefill worker's own time
    JOIN = "join"  # decode worker: until the sequence was in the batch
    FIRST_TOKEN = "first_token"  # the rest: the wire in both directions, and the relay


SPAN_REQUEST: Final = "headrace.request"  # router; from arrival to end, parent of the stages'
SPAN_DECODE: Final = "headrace.decode"  # router; from the first token to the end


def span_of(stage: Stage) -> str:
    return f"headrace.{stage}"


REQUESTS: Final = "headrace_requests_total"  # router; model, outcome
ANSWERS: Final = "headrace_answers_total"  # router; model, outcome
TTFT: Final = "headrace_ttft_seconds"  # router; model
TTFT_STAGE: Final = "headrace_ttft_stage_seconds"  # router; model, stage
TPOT: Final = "headrace_tpot_seconds"  # router; model
ITL: Final = "headrace_itl_seconds"  # router; model
E2E: Final = "headrace_e2e_seconds"  # router; model
ROUTER_QUEUE: Final = "headrace_router_queue_seconds"  # router; model
DECISIONS_LOGGED: Final = "headrace_decisions_logged_total"  # router
DECISIONS_DROPPED: Final = "headrace_decisions_dropped_total"  # router; reason
PLACEMENTS: Final = "headrace_placements_total"  # router; why
SHED: Final = "headrace_shed_total"  # router; reason
ADMISSIONS: Final = "headrace_admissions_total"  # router; tenant, outcome
TENANT_TOKENS: Final = "headrace_tenant_tokens_total"  # router; tenant, kind
SLO: Final = "headrace_slo_total"  # router; service_class, outcome
QUOTA_LEFT: Final = "headrace_quota_left"  # router; tenant, quota
QUOTA_LEASES: Final = "headrace_quota_leases_total"  # router; outcome
SHARED_ANSWERS: Final = "headrace_shared_answers_total"  # router; tenant, how
DIVERTED: Final = "headrace_canary_diverted_total"  # router; reason
CANARY_PERCENT: Final = "headrace_canary_percent"  # router
CANARY_PHASE: Final = "headrace_canary_phase"  # keeper; revision, phase
REVISION_REQUESTS: Final = "headrace_revision_requests_total"  # router; revision, outcome
REVISION_TTFT: Final = "headrace_revision_ttft_seconds"  # router; revision
REVISION_TPOT: Final = "headrace_revision_tpot_seconds"  # router; revision
FALLBACKS: Final = "headrace_fallbacks_total"  # router; reason
PREDICTED_CACHED_TOKENS: Final = "headrace_predicted_cached_tokens_total"  # router; worker
ACTUAL_CACHED_TOKENS: Final = "headrace_actual_cached_tokens_total"  # router; worker
INDEX_FALLBACKS: Final = "headrace_index_fallbacks_total"  # router; reason
INDEX_ERROR: Final = "headrace_index_error_ratio"  # router; worker
INDEX_RESYNCS: Final = "headrace_index_resyncs_total"  # router; reason
INDEX_IGNORED: Final = "headrace_index_ignored_total"  # router; reason
SELF_CHECKS: Final = "headrace_self_checks_total"  # router; outcome
SELF_CHECK_PASSED: Final = "headrace_self_check_passed"  # router; worker
INDEX_BLOCKS: Final = "headrace_index_blocks"  # router; worker
KV_BLOCKS: Final = "headrace_kv_blocks"  # worker; state
STEPS: Final = "headrace_steps_total"  # worker
STEP_SECONDS: Final = "headrace_step_seconds"  # worker; kind
BATCH_SEQUENCES: Final = "headrace_batch_sequences"  # worker
SCHEDULED_TOKENS: Final = "headrace_scheduled_tokens_total"  # worker; kind
PREEMPTIONS: Final = "headrace_preemptions_total"  # worker
WORKER_INFO: Final = "headrace_worker_info"  # worker; worker, role, model
WORKER_QUEUE: Final = "headrace_worker_queue_seconds"  # worker; kind
PREFILL_BACKLOG: Final = "headrace_prefill_backlog_tokens"  # worker
LINKS: Final = "headrace_links"  # worker; kind, state
LINK_ENDS: Final = "headrace_link_ends_total"  # worker; kind
COST_PER_HOUR: Final = "headrace_cost_per_hour"  # worker; where a price is configured
DEVICE_ERRORS: Final = "headrace_device_errors_total"  # worker; kind
GPU_BUSY: Final = "headrace_gpu_busy_ratio"  # worker; gpu
GPU_MEMORY: Final = "headrace_gpu_memory_bytes"  # worker; gpu, state
GPU_TEMPERATURE: Final = "headrace_gpu_temperature_celsius"  # worker; gpu
GPU_POWER: Final = "headrace_gpu_power_watts"  # worker; gpu
GPU_ERRORS: Final = "headrace_gpu_errors_total"  # worker; gpu, kind
HANDOFF_SECONDS: Final = "headrace_handoff_seconds"  # worker; side
HANDOFF_BYTES: Final = "headrace_handoff_bytes_total"  # worker; side
HANDOFF_FAILURES: Final = "headrace_handoff_failures_total"  # worker; reason
PREFIX_HIT_TOKENS: Final = "headrace_prefix_hit_tokens_total"  # worker; tier
PREFIX_QUERY_TOKENS: Final = "headrace_prefix_query_tokens_total"  # worker
IN_FLIGHT: Final = "headrace_requests_in_flight"  # router, worker; state
TASKS: Final = "headrace_asyncio_tasks"  # router, worker
CERTIFICATE_END: Final = "headrace_certificate_end_seconds"  # router; Unix time, 0 without TLS
REDIS_BREAKER: Final = "headrace_redis_breaker_open"  # any; 1 while Redis is not waited for
POOL_DESIRED: Final = "headrace_pool_desired_workers"  # keeper; pool
POOL_ADVISED: Final = "headrace_pool_advised_workers"  # keeper; pool
POOL_WORKERS: Final = "headrace_pool_workers"  # keeper; pool, phase
WORKERS_READY: Final = "headrace_workers_ready"  # router; role
WORKERS_PASSED_OVER: Final = "headrace_workers_passed_over"  # router; the breakers that are open
