"""Protobuf messages to values and back: the only place where both are known.

Functions come in pairs `x_to_pb` / `x_from_pb`. What arrives malformed raises InvalidRequest or ValueError here, before
anything else sees it.
"""

from collections.abc import Iterable

from headrace.blocks import pack_tokens, unpack_tokens
from headrace.costmodel import CostModel
from headrace.errors import HeadraceError, rebuild
from headrace.v1 import control_pb2, transfer_pb2, worker_pb2
from headrace.values import (
    STABLE,
    BlockCounts,
    Capacity,
    Compatibility,
    FinishReason,
    Load,
    LoadReport,
    ParallelLayout,
    PrefillTarget,
    Request,
    RequestKey,
    Role,
    SamplingParams,
    SequenceOutput,
    Ticket,
    Timeline,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)


def key_to_pb(key: RequestKey) -> worker_pb2.RequestKey:
    return worker_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)


def key_from_pb(pb: worker_pb2.RequestKey) -> RequestKey:
    return RequestKey(pb.request_id, pb.attempt)


def sampling_to_pb(s: SamplingParams) -> worker_pb2.WorkerSampling:
    return worker_pb2.WorkerSampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        bias_token_ids=[token for token, _ in s.logit_bias],
        bias_values=[bias for _, bias in s.logit_bias],
        seed=s.seed,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        ignore_eos=s.ignore_eos,
        stop_token_ids=s.stop_token_ids,
        num_logprobs=s.num_logprobs,
    )


def sampling_from_pb(pb: worker_pb2.WorkerSampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=pb.max_tokens,
        temperature=pb.temperature,
        top_p=pb.top_p,
        top_k=pb.top_k,
        min_p=pb.min_p,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        repetition_penalty=pb.repetition_penalty,
        logit_bias=tuple(zip(pb.bias_token_ids, pb.bias_values, strict=True)),
        seed=pb.seed,
        min_tokens=pb.min_tokens,
        ignore_eos=pb.ignore_eos,
        stop_token_ids=tuple(pb.stop_token_ids),
        num_logprobs=pb.num_logprobs if pb.HasField("num_logprobs") else None,
    )


def prefill_to_pb(target: PrefillTarget) -> worker_pb2.PrefillTarget:
    return worker_pb2.PrefillTarget(worker_id=target.worker_id, generation=target.generation, address=target.address)


def prefill_from_pb(pb: worker_pb2.PrefillTarget) -> PrefillTarget:
    return PrefillTarget(pb.worker_id, pb.generation, pb.address)


def request_to_pb(r: Request, first_sample: int = 0) -> worker_pb2.Submit:
    return worker_pb2.Submit(
        first_sample=first_sample,
        key=key_to_pb(r.key),
        prompt_token_ids=pack_tokens(r.prompt_token_ids),
        sampling=sampling_to_pb(r.sampling),
        n=r.n,
        adapter=r.adapter,
        cache_salt=r.cache_salt,
        priority=r.priority,
        seconds_left=r.seconds_left,
        local_prefill_max_tokens=r.local_prefill_max_tokens,
        prefill=prefill_to_pb(r.prefill) if r.prefill else None,
        traceparent=r.traceparent,
        offer_held=r.offer_held,
    )


def request_from_pb(pb: worker_pb2.Submit) -> Request:
    return Request(
        key=key_from_pb(pb.key),
        prompt_token_ids=tuple(unpack_tokens(pb.prompt_token_ids)),
        sampling=sampling_from_pb(pb.sampling),
        n=pb.n,
        adapter=pb.adapter,
        cache_salt=pb.cache_salt,
        priority=pb.priority,
        seconds_left=pb.seconds_left if pb.HasField("seconds_left") else None,
        local_prefill_max_tokens=pb.local_prefill_max_tokens,
        prefill=prefill_from_pb(pb.prefill) if pb.HasField("prefill") else None,
        traceparent=pb.traceparent,
        offer_held=pb.offer_held,
    )


def ticket_to_pb(ticket: Ticket) -> transfer_pb2.Ticket:
    """Of the request: what the prompt and its first tokens depend on."""
    r = ticket.request
    return transfer_pb2.Ticket(
        key=key_to_pb(r.key),
        prompt_token_ids=pack_tokens(r.prompt_token_ids),
        sampling=sampling_to_pb(r.sampling),
        n=r.n,
        adapter=r.adapter,
        cache_salt=r.cache_salt,
        priority=r.priority,
        seconds_left=r.seconds_left,
        held_blocks=ticket.held_blocks,
        traceparent=r.traceparent,
        router_id=ticket.router_id,
        offered_blocks=[block for block, _ in ticket.offered],
        offered_epochs=[epoch for _, epoch in ticket.offered],
        ahead=ticket.ahead,
    )


def ticket_from_pb(pb: transfer_pb2.Ticket) -> Ticket:
    request = Request(
        key=key_from_pb(pb.key),
        prompt_token_ids=tuple(unpack_tokens(pb.prompt_token_ids)),
        sampling=sampling_from_pb(pb.sampling),
        n=pb.n,
        adapter=pb.adapter,
        cache_salt=pb.cache_salt,
        priority=pb.priority,
        seconds_left=pb.seconds_left if pb.HasField("seconds_left") else None,
        traceparent=pb.traceparent,
    )
    offered = tuple(zip(pb.offered_blocks, pb.offered_epochs, strict=True))
    return Ticket(request, pb.held_blocks, pb.router_id, offered, pb.ahead)


def compatibility_to_pb(c: Compatibility) -> worker_pb2.Compatibility:
    return worker_pb2.Compatibility(**{name: getattr(c, name) for name in _COMPATIBILITY_FIELDS})


def compatibility_from_pb(pb: worker_pb2.Compatibility) -> Compatibility:
    return Compatibility(**{name: getattr(pb, name) for name in _COMPATIBILITY_FIELDS})


_COMPATIBILITY_FIELDS = tuple(f.name for f in worker_pb2.Compatibility.DESCRIPTOR.fields)
_CAPACITY_FIELDS = tuple(f.name for f in worker_pb2.Capacity.DESCRIPTOR.fields)
_COST_FIELDS = tuple(f.name for f in worker_pb2.CostModel.DESCRIPTOR.fields)
_LOAD_FIELDS = tuple(f.name for f in worker_pb2.Load.DESCRIPTOR.fields)
_TIMELINE_FIELDS = tuple(f.name for f in worker_pb2.WorkerTimeline.DESCRIPTOR.fields)
_COUNT_FIELDS = tuple(f.name for f in control_pb2.BlockCounts.DESCRIPTOR.fields)


def layout_to_pb(layout: ParallelLayout) -> worker_pb2.Layout:
    return worker_pb2.Layout(tp=layout.tp, pp=layout.pp)


def layout_from_pb(pb: worker_pb2.Layout) -> ParallelLayout:
    return ParallelLayout(pb.tp, pb.pp)


def cost_to_pb(cost: CostModel) -> worker_pb2.CostModel:
    return worker_pb2.CostModel(**{name: getattr(cost, name) for name in _COST_FIELDS})


def cost_from_pb(pb: worker_pb2.CostModel) -> CostModel:
    return CostModel(**{name: getattr(pb, name) for name in _COST_FIELDS})


def worker_to_pb(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        worker_id=info.worker_id,
        generation=info.generation,
        role=info.role,
        address=info.address,
        compatibility=compatibility_to_pb(info.compatibility),
        layout=layout_to_pb(info.layout),
        capacity=worker_pb2.Capacity(**{name: getattr(info.capacity, name) for name in _CAPACITY_FIELDS}),
        cost=cost_to_pb(info.cost),
        model_path=info.model_path,
        node=info.node,
        probe=info.probe,
        revision=info.revision,
    )


def worker_from_pb(pb: worker_pb2.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        worker_id=pb.worker_id,
        generation=pb.generation,
        role=Role(pb.role),
        address=pb.address,
        compatibility=compatibility_from_pb(pb.compatibility),
        layout=layout_from_pb(pb.layout),
        capacity=Capacity(**{name: getattr(pb.capacity, name) for name in _CAPACITY_FIELDS}),
        model_path=pb.model_path,
        node=pb.node,
        cost=cost_from_pb(pb.cost),
        probe=pb.probe,
        revision=pb.revision or STABLE,
    )


def load_to_pb(load: Load) -> worker_pb2.Load:
    return worker_pb2.Load(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_pb(pb: worker_pb2.Load) -> Load:
    return Load(**{name: getattr(pb, name) for name in _LOAD_FIELDS})


def report_to_pb(report: LoadReport) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(
        total=load_to_pb(report.total),
        yours=load_to_pb(report.yours),
        cost=cost_to_pb(report.cost),
        role=report.role,
        free_blocks=report.free_blocks,
        draining=report.draining,
        unhealthy_reason=report.unhealthy_reason,
    )


def report_from_pb(pb: worker_pb2.LoadReport) -> LoadReport:
    return LoadReport(
        total=load_from_pb(pb.total),
        yours=load_from_pb(pb.yours),
        cost=cost_from_pb(pb.cost),
        role=Role(pb.role),
        free_blocks=pb.free_blocks,
        draining=pb.draining,
        unhealthy_reason=pb.unhealthy_reason,
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> worker_pb2.Logprobs:
    return worker_pb2.Logprobs(
        token_ids=[logprobs.token_id, *(token for token, _ in logprobs.top)],
        values=[logprobs.logprob, *(value for _, value in logprobs.top)],
    )


def logprobs_from_pb(pb: worker_pb2.Logprobs) -> TokenLogprobs:
    return TokenLogprobs(pb.token_ids[0], pb.values[0], tuple(zip(pb.token_ids[1:], pb.values[1:], strict=True)))


def output_to_pb(o: SequenceOutput) -> worker_pb2.SequenceOutput:
    pb = worker_pb2.SequenceOutput(
        key=key_to_pb(o.key),
        index=o.index,
        token_ids=o.token_ids,
        num_generated=o.num_generated,
        finish=o.finish or "",
    )
    if o.logprobs:
        pb.logprobs.extend(map(logprobs_to_pb, o.logprobs))
    if o.usage is not None:
        pb.usage.prompt_tokens, pb.usage.cached_tokens = o.usage.prompt_tokens, o.usage.cached_tokens
        pb.usage.SetInParent()
    if o.timeline is not None:
        pb.timeline.CopyFrom(
            worker_pb2.WorkerTimeline(**{name: getattr(o.timeline, name) for name in _TIMELINE_FIELDS})
        )
    return pb


def output_from_pb(pb: worker_pb2.SequenceOutput, key: RequestKey | None = None) -> SequenceOutput:
    """`key` where the caller has it already. Repeated fields are read by slices, which costs a tenth of iterating over
    them."""
    ids = pb.token_ids
    finish = pb.finish
    return SequenceOutput(
        key_from_pb(pb.key) if key is None else key,
        pb.index,
        (ids[0],) if len(ids) == 1 else tuple(ids[:]),
        pb.num_generated,
        tuple(map(logprobs_from_pb, pb.logprobs[:])) if pb.logprobs else (),
        FinishReason(finish) if finish else None,
        Usage(pb.usage.prompt_tokens, pb.num_generated, pb.usage.cached_tokens) if pb.HasField("usage") else None,
        Timeline(**{name: getattr(pb.timeline, name) for name in _TIMELINE_FIELDS})
        if pb.HasField("timeline")
        else None,
    )


def steps_to_pb(outputs: Iterable[tuple[int, SequenceOutput]]) -> list[worker_pb2.StepOutputs]:
    """Outputs, each with its sample's number, in as few messages as keep every sample's tokens in order: one, unless an
    output that is more than a plain token follows a plain one of the same sample."""
    steps = [worker_pb2.StepOutputs()]
    plain: set[int] = set()  # the numbers in the last step: to look through its own would take the square of what waits
    for number, o in outputs:
        step = steps[-1]
        if number and len(o.token_ids) == 1 and not (o.finish or o.logprobs or o.usage or o.timeline):
            plain.add(number)
            step.samples.append(number)
            step.token_ids.append(o.token_ids[0])
            step.num_generated.append(o.num_generated)
        else:
            if number in plain:
                step = worker_pb2.StepOutputs()
                steps.append(step)
                plain.clear()
            step.outputs.append(output_to_pb(o))
    return steps


def counts_to_pb(counts: BlockCounts) -> control_pb2.BlockCounts:
    return control_pb2.BlockCounts(**{name: getattr(counts, name) for name in _COUNT_FIELDS})


def counts_from_pb(pb: control_pb2.BlockCounts) -> BlockCounts:
    return BlockCounts(**{name: getattr(pb, name) for name in _COUNT_FIELDS})


def error_to_pb(error: HeadraceError) -> worker_pb2.ErrorInfo:
    return worker_pb2.ErrorInfo(type=error.type, message=error.message, numbers=error.numbers)


def error_from_pb(pb: worker_pb2.ErrorInfo) -> HeadraceError:
    return rebuild(pb.type, pb.message, dict(pb.numbers))
