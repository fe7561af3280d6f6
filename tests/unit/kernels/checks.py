"""What every kernel must equal, on any device: its reference on fresh random inputs, and nothing else written."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.values import SamplingParams
from kernels import (
    dense_prefill,
    draws,
    noise,
    norm,
    paged_decode,
    paged_prefill,
    pull_blocks,
    rope_store,
    sample,
    sample_floor,
    silu_mul,
)
from kernels.cuda import CudaOps
from kernels.ops import AttentionBatch
from kernels.reference import ReferenceOps, gather_context
from kernels.tuning import DecodeTile, LongDecode, PrefillTile, PullTile, RopeTile, RowTile, tuning_of
from tests.unit.kernels.batches import filled_pool, paged_batch
from workers.ranks.drawn import Draw
from workers.ranks.sampler import Sampler
from workers.scheduling.plan import RowStart

REFERENCE = ReferenceOps()
POISON = 12345.0


def assert_near(got: Tensor, expected: Tensor) -> None:
    """By relative norm: matrix units round their operands, so single elements near zero may be off by more."""
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[got.dtype]
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    assert error <= limit, f"relative error {error:.2e} above {limit:.0e}"  # NaN fails too


def on(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return dataclasses.replace(batch, **moved)


def check_decode(
    contexts: Sequence[int],
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    num_programs: int,
    tile: DecodeTile,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> None:
    """Two launches over one scratch: the second shows that the first left it as it was."""
    generator = torch.Generator().manual_seed(seed + sum(contexts))
    num_blocks = sum(-(-context // block_size) for context in contexts) + 3
    batch = paged_batch([(1, context) for context in contexts], block_size, num_blocks, generator)
    pool = filled_pool((num_blocks, kv_heads, 2, 2, block_size, head_dim), 1, batch, generator).to(device, dtype)
    batch = on(batch, device)
    scratch = paged_decode.DecodeScratch.of(num_programs, len(contexts), kv_heads, head_dim, device)
    scratch.partial.fill_(torch.nan)
    for _ in range(2):
        # A slice of a wider projection, as a model hands it over.
        projection = torch.randn(len(contexts), kv_heads * (group + 2), head_dim, generator=generator)
        q = projection.to(device, dtype)[:, : kv_heads * group]
        out = torch.full(q.shape, POISON, dtype=dtype, device=device)
        paged_decode.paged_decode(q, pool, 1, batch, 0.17, out, scratch, tile)
        expected = REFERENCE.attention(q, pool, 1, batch, 0.17)
        computed = batch.contexts_R > 0
        if computed.any():
            assert_near(out[computed], expected[computed])
        assert (out[~computed] == torch.tensor(POISON, dtype=dtype)).all()
        assert not scratch.arrived.any()


def check_prefill(
    rows: Sequence[tuple[int, int]],
    group: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    tile: PrefillTile,
    device: torch.device,
    dtype: torch.dtype,
    whole_from: int | None = None,
    splits: int = 1,
) -> None:
    generator = torch.Generator().manual_seed(len(rows) + rows[0][0])
    num_blocks = sum(-(-context // block_size) for _, context in rows) + 3
    batch = paged_batch(rows, block_size, num_blocks, generator)
    pool = filled_pool((num_blocks, kv_heads, 3, 2, block_size, head_dim), 2, batch, generator).to(device, dtype)
    batch = on(batch, device)
    projection = torch.randn(sum(t for t, _ in rows), kv_heads * (group + 2), head_dim, generator=generator)
    q = projection.to(device, dtype)[:, : kv_heads * group]
    out = torch.full(q.shape, POISON, dtype=dtype, device=device)
    prefills, most = range(batch.num_decodes, len(rows)), batch.max_query
    shared = {"splits": splits, "whole_from": whole_from}
    paged_prefill.paged_prefill(q, pool, 2, batch, 0.17, out, prefills, most, tile, **shared)
    expected = REFERENCE.attention(q, pool, 2, batch, 0.17)
    starts = batch.starts_R1.tolist()
    for row, (num_query, context) in enumerate(rows):
        tokens = slice(starts[row], starts[row + 1])
        whole = whole_from is not None and num_query == context >= whole_from
        if row < batch.num_decodes or context == 0 or whole:
            assert (out[tokens] == torch.tensor(POISON, dtype=dtype)).all()
        else:
            assert_near(out[tokens], expected[tokens])


def check_gather_row(
    num_tokens: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """What lies beyond the row is zero, whatever the pool holds there: a weight of 0 times NaN would be NaN."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = -(-num_tokens // block_size) + 3
    batch = paged_batch([(num_tokens, num_tokens)], block_size, num_blocks, generator)
    pool = filled_pool((num_blocks, kv_heads, 3, 2, block_size, head_dim), 1, batch, generator).to(device, dtype)
    batch = on(batch, device)
    table = batch.block_tables_RB[0]
    gathered = dense_prefill.gather_row(pool, 1, table, batch.contexts_R, length)
    for got, wanted in zip(gathered, gather_context(pool, 1, table, num_tokens), strict=True):
        assert torch.equal(got[:, :num_tokens].float(), wanted)
        assert not got[:, num_tokens:].any()


def check_mixed_step(device: torch.device, dtype: torch.dtype, dense_from: int) -> None:
    """Decodes, whole prompts and chunks in one step, through CudaOps; then one whole prompt alone."""
    generator = torch.Generator().manual_seed(dense_from)
    long = dense_from
    for rows in (
        [(1, 20), (1, 3), (long, long), (long, long), (5, 5), (long, long + 7), (long + 1, long + 1)],
        [(long, long), (long, long)],
        [(1, 4), (3, 7)],
    ):
        num_blocks = sum(-(-context // 16) for _, context in rows) + 1
        batch = paged_batch(rows, 16, num_blocks, generator)
        pool = filled_pool((num_blocks, 2, 2, 2, 16, 16), 1, batch, generator).to(device, dtype)
        batch = dataclasses.replace(on(batch, device), prefill_lengths=tuple(rows[batch.num_decodes :]))
        q = torch.randn(sum(tokens for tokens, _ in rows), 6, 16, generator=generator).to(device, dtype)
        ops = CudaOps(device, num_multiprocessors=3, dense_from_tokens=(dense_from, dense_from))
        assert_near(ops.attention(q, pool, 1, batch, 0.2), REFERENCE.attention(q, pool, 1, batch, 0.2))


def check_long_decode(context: int, long: LongDecode, device: torch.device, dtype: torch.dtype) -> None:
    """One decode row through CudaOps where long contexts have a tile of their own, by batch.max_context: that of the row,
    as a step says it, and the bounds that graphs of shorter and of longer ones are captured with."""
    generator = torch.Generator().manual_seed(context)
    num_blocks = -(-context // 16) + 1
    tuning = dataclasses.replace(tuning_of(device), decode_long=long)
    ops = CudaOps(device, tuning, None if device.type == "cuda" else 5)
    batch = paged_batch([(1, context)], 16, num_blocks, generator)
    pool = filled_pool((num_blocks, 2, 2, 2, 16, 16), 1, batch, generator).to(device, dtype)
    q = torch.randn(1, 6, 16, generator=generator).to(device, dtype)
    assert ops.decode_contexts(1, 2) == (long.least_context,)
    for bound in (context, long.least_context - 1 if context >= long.least_context else long.least_context):
        given = dataclasses.replace(on(batch, device), max_context=bound)
        taken = ops._decode_tile(2, bound)
        assert taken == (long.tile if bound >= long.least_context else tuning.decode_few)
        assert_near(ops.attention(q, pool, 1, given, 0.2), REFERENCE.attention(q, pool, 1, given, 0.2))


def check_lone_prompt(num_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    """Through the dense kernel, among memory that holds NaN."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = -(-num_tokens // 32) + 1
    batch = paged_batch([(num_tokens, num_tokens)], 32, num_blocks, generator)
    pool = filled_pool((num_blocks, 2, 2, 2, 32, 128), 1, batch, generator).to(device, dtype)
    batch = dataclasses.replace(on(batch, device), prefill_lengths=((num_tokens, num_tokens),))
    q = torch.randn(num_tokens, 8, 128, generator=generator).to(device, dtype)
    poison = torch.full((64 * 2**20,), torch.nan, dtype=dtype, device=device)
    del poison  # the allocator hands it out again
    assert_near(CudaOps(device).attention(q, pool, 1, batch, 0.1), REFERENCE.attention(q, pool, 1, batch, 0.1))


def check_norms(shape: tuple[int, ...], tile: RowTile, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    wide = torch.randn(*shape[:-1], shape[-1] + 8, generator=generator).to(device, dtype)
    weight = torch.randn(shape[-1], generator=generator).to(device, dtype)
    strided = wide[..., : shape[-1]]
    out = torch.full(shape, POISON, dtype=dtype, device=device)
    norm.rms_norm(strided, weight, 1e-5, out, tile)
    assert_near(out, REFERENCE.rms_norm(strided, weight, 1e-5))
    if len(shape) == 2:
        x = strided.contiguous()
        residual = torch.randn(shape, generator=generator).to(device, dtype)
        out, total = torch.full_like(x, POISON), torch.full_like(x, POISON)
        norm.add_rms_norm(x, residual, weight, 1e-5, out, total, tile)
        expected_out, expected_total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total)
        assert_near(out, expected_out)
        norm.add_rms_norm(x, residual, weight, 1e-5, x, residual, tile)  # in place
        assert torch.equal(residual, total)
        assert torch.equal(x, out)


def check_rope_store(
    rows: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    tile: RopeTile,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(heads * head_dim)
    num_blocks = sum(-(-context // block_size) for _, context in rows) + 2
    batch = on(paged_batch(rows, block_size, num_blocks, generator), device)
    num_tokens = sum(tokens for tokens, _ in rows)
    projection = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    q, k, v = projection.split((heads, kv_heads, kv_heads), 1)
    cos_sin = torch.randn(max(c for _, c in rows) + 1, head_dim, generator=generator).to(device)
    pool = torch.full((num_blocks, kv_heads, 3, 2, block_size, head_dim), POISON, dtype=dtype, device=device)
    expected_pool = pool.clone()
    out = torch.full(q.shape, POISON, dtype=dtype, device=device)
    rope_store.rope_store(q, k, v, cos_sin, pool, 1, batch, out, tile)
    assert_near(out, REFERENCE.rope_store(q, k, v, cos_sin, expected_pool, 1, batch))
    untouched = expected_pool == torch.tensor(POISON, dtype=dtype)
    assert torch.equal(pool == torch.tensor(POISON, dtype=dtype), untouched)
    if not untouched.all():
        assert_near(pool[~untouched], expected_pool[~untouched])


def check_silu_mul(num_tokens: int, width: int, tile: RowTile, device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, 2 * width, generator=torch.Generator().manual_seed(width)).to(device, dtype)
    out = torch.full((num_tokens, width), POISON, dtype=dtype, device=device)
    silu_mul.silu_mul(x, out, tile)
    assert_near(out, REFERENCE.silu_mul(x))


def check_pull(
    source_shape: tuple[int, int, int],
    target_shape: tuple[int, int, int],
    heads: tuple[int, int, int],
    layers: tuple[int, int, int],
    num_pulled: int,
    words_of_layer: int,
    tile: PullTile,
    device: torch.device,
) -> None:
    """Shapes are (blocks, KV heads, layers); `heads` and `layers` are (source's first, target's first, count)."""
    generator = torch.Generator().manual_seed(num_pulled + words_of_layer)
    draw = lambda shape: torch.randint(-(2**31), 2**31 - 1, (*shape, words_of_layer), generator=generator)  # noqa: E731
    source, target = (draw(shape).to(torch.int32).to(device) for shape in (source_shape, target_shape))
    source_blocks = torch.randperm(source_shape[0], generator=generator)[:num_pulled]
    target_blocks = torch.randperm(target_shape[0], generator=generator)[:num_pulled]
    expected = target.clone()
    read = source[source_blocks, heads[0] : heads[0] + heads[2], layers[0] : layers[0] + layers[2]]
    expected[target_blocks, heads[1] : heads[1] + heads[2], layers[1] : layers[1] + layers[2]] = read
    shape = pull_blocks.PullShape.of(
        words_of_layer * 4,
        *source_shape[1:],
        *target_shape[1:],
        source_head=heads[0],
        target_head=heads[1],
        num_heads=heads[2],
        source_layer=layers[0],
        target_layer=layers[1],
        num_layers=layers[2],
    )
    numbers = [blocks.to(device, torch.int32) for blocks in (source_blocks, target_blocks)]
    for part in (slice(0, 2), slice(2, num_pulled)):
        pull_blocks.pull_blocks(source, target, numbers[0], numbers[1], shape, tile, part)
    assert torch.equal(target, expected)


def check_stale(num_blocks: int, num_pulled: int, num_moved: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_pulled)
    epochs = torch.randint(0, 2**62, (num_blocks,), generator=generator)
    blocks = torch.randperm(num_blocks, generator=generator)[:num_pulled]
    expected = epochs[blocks].to(device)
    epochs[blocks[:num_moved]] += 2**40
    stale = torch.zeros(1, dtype=torch.int32, device=device)
    pull_blocks.count_stale(epochs.to(device), blocks.to(device, torch.int32), expected, stale)
    assert stale.item() == num_moved


def draws_of(count: int, device: torch.device, generator: torch.Generator) -> noise.Keys:
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    indices, positions = torch.arange(count) % 3, torch.arange(count) + 5
    return noise.Keys(*(key.to(device) for key in noise.keys(seeds, indices, positions)))


def check_sample(num_draws: int, vocabulary: int, tile: RowTile, device: torch.device) -> None:
    """Greedy, warm, hot and floored rows: the token that the reference scores highest, or one within rounding of it."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(num_draws, vocabulary + 3, generator=generator) * 4).to(device)[:, :vocabulary]
    keys = draws_of(num_draws, device, generator)
    temperature = torch.tensor([0.0, 1.0, 0.3, 5.0], device=device).repeat(num_draws)[:num_draws]
    floor = torch.tensor([-0.1, -torch.inf, -3.0, -1.0], device=device).repeat(num_draws)[:num_draws]
    out = torch.full((num_draws,), -7, device=device)
    sample.sample(logits, keys, temperature, floor, out, tile)
    ids = torch.arange(vocabulary, device=device)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(1)
    scores = (scaled + noise.gumbel(keys.column(), ids)).masked_fill(scaled < floor.unsqueeze(1), -torch.inf)
    scores = torch.where(temperature.unsqueeze(1) > 0, scores, logits)
    chosen = scores.gather(1, out.unsqueeze(1)).squeeze(1)
    assert torch.equal(out[temperature == 0], logits[temperature == 0].argmax(-1))
    assert (scores.amax(-1) - chosen <= 1e-5).all()


def check_largest(num_draws: int, vocabulary: int, tile: RowTile, device: torch.device, dtype: torch.dtype) -> None:
    """Of equals, which bfloat16 makes many, the first."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(num_draws, vocabulary + 3, generator=generator).to(device, dtype)[:, :vocabulary]
    logits[0] = -torch.inf
    logits[0, vocabulary // 2] = -5.0
    out = torch.full((num_draws,), -7, device=device)
    sample.largest(logits, out, tile)
    first = (logits == logits.amax(-1, keepdim=True)).int().cpu().argmax(-1)
    assert torch.equal(out.cpu(), first)


def check_sample_floor(
    num_draws: int, vocabulary: int, ties: bool, tile: RowTile, device: torch.device, most_candidates: int
) -> None:
    """Every mix of the filters, over candidates or, where they are too many, over whole rows. The cut is the reference's,
    or, where sums round differently, a neighbour's."""
    generator = torch.Generator().manual_seed(vocabulary + num_draws)
    logits = torch.randn(num_draws, vocabulary, generator=generator) * 3
    logits = (logits.round() if ties else logits).to(device)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values * num_draws)[torch.randperm(num_draws * len(values), generator=generator)]

    temperature, min_p, top_p = pick(1.0, 0.4, 2.0), pick(0.0, 0.02, 0.3), pick(1.0, 0.95, 0.5, 0.01)
    top_k = pick(0, 1, 7, vocabulary)
    floor = torch.full((num_draws,), torch.nan, device=device)
    arguments = [t[:num_draws].to(device) for t in (temperature, min_p, top_k.to(torch.int32), top_p)]
    sample_floor.sample_floor(logits, *arguments, floor, tile, most_candidates)
    for i in range(num_draws):
        t, least_p, k, p = (float(a[i]) for a in arguments)
        scaled = (logits[i] - logits[i].max()) / t
        order = scaled.sort(descending=True).values
        order = order[order >= torch.tensor(least_p).log()]
        order = order[: int(k) or vocabulary]
        mass = order.double().exp()
        before = (mass.cumsum(0) - mass) / mass.sum()
        near = order[before < p + 1e-5][-1], order[(before < p - 1e-5) | (before == 0)][-1]
        if p == 1:
            near = order[-1], order[-1]
        limited = least_p > 0 or 0 < k < vocabulary or p < 1
        kept, wanted = int((scaled >= floor[i]).sum()), [int((scaled >= v).sum()) for v in near]
        assert floor[i] == floor[i]
        assert (wanted[1] <= kept <= wanted[0]) if limited else kept == vocabulary, (
            i,
            t,
            least_p,
            k,
            p,
            kept,
            wanted,
            float(floor[i]),
        )


def check_draws(kernels: draws.CudaDraws, device: torch.device, vocabulary: int) -> None:
    """A sampler with the kernels against one without: greedy, plain, filtered and adjusted rows in one batch. Rows whose
    best two scores are within rounding may differ; none of these seeds has one."""
    shared = {"max_tokens": 100, "ignore_eos": True}
    sampling = [
        SamplingParams(**shared, temperature=0.0),
        SamplingParams(**shared, temperature=1.0, seed=1),
        SamplingParams(**shared, temperature=0.8, seed=2**64 - 1, top_p=0.9),
        SamplingParams(**shared, temperature=1.3, seed=3, top_k=40, presence_penalty=1.0),
        SamplingParams(**shared, temperature=1.0, seed=4, min_p=0.05, top_k=20, top_p=0.8),
        SamplingParams(**shared, temperature=1e-35, seed=5),
        SamplingParams(**shared, temperature=0.7, seed=6, logit_bias=((5, 3.0),), repetition_penalty=1.4),
    ]
    plain, fast = (Sampler(8, vocabulary, (3,), device) for _ in range(2))
    plain._kernels, fast._kernels = None, kernels
    for sampler in (plain, fast):
        for row, each in enumerate(sampling):
            sampler.start(RowStart(row, (1, 2), (), each))
    generator = torch.Generator().manual_seed(vocabulary)
    for position in range(2, 8):
        logits = (torch.randn(len(sampling), vocabulary, generator=generator) * 3).to(device)
        sample_index = position % 3
        asked = [Draw(row, sample_index, position, sample_index == 0) for row in range(len(sampling))]
        assert fast.sample(logits, asked).token_ids == plain.sample(logits, asked).token_ids
