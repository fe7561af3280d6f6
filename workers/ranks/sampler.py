"""Logits to tokens: penalties, bias, temperature, filters, and a draw that depends on (seed, sample index, position) and
the model alone, so that any worker can continue any request.

Shape suffixes: S draws of a step, A those that ask for log-probabilities, V vocabulary, R rows of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.values import SamplingParams
from kernels import noise
from kernels.choose import choose_draws
from kernels.ops import DrawNumbers
from workers.ranks.drawing import LEAST_TEMPERATURE, as_int64, perturb
from workers.ranks.drawn import Best, Draw, Drawn
from workers.ranks.staging import to_device
from workers.scheduling.plan import RowStart

ALIGNMENT = 16  # logits


@dataclass(slots=True)
class _Row:
    """What is known of a row that has a sequence. `plain`: nothing of it adjusts logits or asks for logprobs."""

    sampling: SamplingParams
    sample_index: int
    num_prompt: int
    bias: tuple[Tensor, Tensor] | None
    forbidden: Tensor | None
    greedy: bool = field(init=False)
    penalised: bool = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        s = self.sampling
        self.greedy = s.greedy
        self.penalised = s.presence_penalty != 0 or s.frequency_penalty != 0 or s.repetition_penalty != 1
        adjusts = self.penalised or self.bias is not None or self.forbidden is not None
        self.plain = not adjusts and s.num_logprobs is None

    def adjusted(self, position: int) -> bool:
        return self.penalised or self.bias is not None or self.forbids(position)

    def forbids(self, position: int) -> bool:
        return self.forbidden is not None and position - self.num_prompt < self.sampling.min_tokens


class Sampler:
    """Owns the sampling state of all rows; lives on the one rank that draws."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        device: torch.device,
        *,
        record_margins: bool = False,
        deterministic: bool = False,
    ) -> None:
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._device = device
        self._record_margins = record_margins
        self._deterministic = deterministic
        self._counts: Counts | None = None
        self._numbers = _Numbers(max_num_seqs)
        self._kernels = None if record_margins else choose_draws(device)

    def start(self, start: RowStart) -> None:
        """A sequence takes its row; what its output so far means for penalties is rebuilt."""
        sampling = start.sampling
        bias = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            bias = (self._tensor(ids), to_device(self._device, [np.array(values, dtype=np.float32)])[0])
        forbidden = None
        if sampling.min_tokens:
            stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._eos_ids))
            # where every token would end the sequence, one must be drawn all the same
            forbidden = self._tensor(sorted(stops)) if 0 < len(stops) < self._vocab_size else None
        row = _Row(sampling, start.sample_index, len(start.prompt_ids), bias, forbidden)
        self._rows[start.row] = row
        self._numbers.start(start.row, sampling, start.sample_index)
        if row.penalised:
            if self._counts is None:
                self._counts = Counts(self._max_num_seqs, self._vocab_size, self._device)
            self._counts.start(start.row, self._tensor(start.prompt_ids), self._tensor(start.output_ids))

    def end(self, row: int) -> None:
        self._rows[row] = None

    def draws(self, row: int, position: int, num_samples: int) -> list[Draw]:
        """The draws of one RowWork."""
        first = self._row(row).sample_index
        return [Draw(row, first + i, position, i == 0) for i in range(num_samples)]

    def sample(self, logits_SV: Tensor, draws: Sequence[Draw]) -> Drawn:
        """Draws one token for each row of logits, which are left as they are."""
        rows = [self._row(draw.row) for draw in draws]
        special = not all(row.plain for row in rows)
        adjusted_SV = self._adjust(logits_SV, draws, rows) if special else logits_SV
        random = [i for i, row in enumerate(rows) if not row.greedy]
        margins_S = None
        if self._kernels is not None and not random:
            token_ids_S = self._kernels.largest(adjusted_SV)
        elif self._kernels is not None:
            token_ids_S = self._kernels.draw(adjusted_SV, self._numbers.of(draws, self._device))
        elif not random or len(random) == len(rows):
            scores_SV = self._perturb(adjusted_SV, draws, [row.sampling for row in rows]) if random else adjusted_SV
            token_ids_S, margins_S = self._largest(scores_SV)
        else:
            token_ids_S, margins_S = self._mixed(adjusted_SV, draws, rows, random)
        if not special:
            return Drawn(token_ids_S, None, margins_S)
        self._count(draws, rows, token_ids_S)
        return Drawn(token_ids_S, self._best(logits_SV, token_ids_S, rows), margins_S)

    def _row(self, row: int) -> _Row:
        found = self._rows[row]
        if found is None:
            raise LookupError(f"row {row} works but was never started")
        return found

    def _adjust(self, logits_SV: Tensor, draws: Sequence[Draw], rows: Sequence[_Row]) -> Tensor:
        """Penalties, then bias, then what min_tokens forbids. A copy, unless no row asks for any."""
        touched = [i for i, row in enumerate(rows) if row.adjusted(draws[i].position)]
        if not touched:
            return logits_SV
        adjusted_SV = logits_SV.to(torch.float32, copy=True)
        for i in touched:
            row, logits_V = rows[i], adjusted_SV[i]
            if row.penalised and self._counts is not None:
                self._counts.penalise(logits_V, draws[i].row, row.sampling)
            if row.bias is not None:
                logits_V.index_add_(0, *row.bias)
            if row.forbidden is not None and row.forbids(draws[i].position):
                logits_V.index_fill_(0, row.forbidden, -torch.inf)
        return adjusted_SV

    def _mixed(
        self, logits_SV: Tensor, draws: Sequence[Draw], rows: Sequence[_Row], random: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Greedy rows take the plain way, whatever their neighbours ask for."""
        greedy = [i for i, row in enumerate(rows) if row.sampling.greedy]
        perturbed = self._perturb(logits_SV[random], [draws[i] for i in random], [rows[i].sampling for i in random])
        parts = self._largest(perturbed), self._largest(logits_SV[greedy])
        token_ids_S = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        margins_S = torch.empty(len(rows), device=self._device) if self._record_margins else None
        for where, (found_S, their_margins_S) in zip((random, greedy), parts, strict=True):
            token_ids_S[where] = found_S
            if margins_S is not None and their_margins_S is not None:
                margins_S[where] = their_margins_S
        return token_ids_S, margins_S

    def _perturb(self, logits_SV: Tensor, draws: Sequence[Draw], sampling: Sequence[SamplingParams]) -> Tensor:
        """Row by row where who else draws must not matter: how sums are made, and which way is long enough, does."""
        if not self._deterministic:
            return perturb(logits_SV, draws, sampling)
        rows = zip(logits_SV.split(1), draws, sampling, strict=True)
        return torch.cat([perturb(row_1V, [draw], [asked]) for row_1V, draw, asked in rows])

    def _log_softmax(self, logits_AV: Tensor) -> Tensor:
        if not self._deterministic:
            return logits_AV.log_softmax(-1)
        # a GPU's sums begin where a row is aligned, a CPU's are cut up among all rows
        aligned = functional.pad(logits_AV, (0, -logits_AV.shape[1] % ALIGNMENT), value=-torch.inf)
        rows = aligned.split(1) if self._device.type == "cpu" else (aligned,)
        return torch.cat([row.log_softmax(-1) for row in rows])[:, : logits_AV.shape[1]]

    def _largest(self, scores_SV: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self._record_margins:
            return scores_SV.argmax(-1), None
        top_S2 = scores_SV.topk(min(2, self._vocab_size), -1).values
        return scores_SV.argmax(-1), top_S2[:, 0] - top_S2[:, -1]

    def _best(self, logits_SV: Tensor, token_ids_S: Tensor, rows: Sequence[_Row]) -> Best | None:
        """Of the model's own distribution, for the rows that ask."""
        counts = tuple(row.sampling.num_logprobs for row in rows)
        asked = [i for i, count in enumerate(counts) if count is not None]
        if not asked:
            return None
        if len(asked) < len(rows):
            asked_A = self._tensor(asked)
            logits_SV, token_ids_S = logits_SV[asked_A], token_ids_S[asked_A]
        logprobs_AV = self._log_softmax(logits_SV.float())
        chosen_A = logprobs_AV.gather(1, token_ids_S.unsqueeze(1)).squeeze(1)
        most = max(count or 0 for count in counts)
        top = logprobs_AV.topk(min(most, logits_SV.shape[1]), -1)
        return Best(counts, chosen_A, top.values, top.indices)

    def _count(self, draws: Sequence[Draw], rows: Sequence[_Row], token_ids_S: Tensor) -> None:
        own = [i for i, row in enumerate(rows) if row.penalised and draws[i].own]
        if own and self._counts is not None:
            rows_S, own_S = self._tensor([draws[i].row for i in own]), self._tensor(own)
            self._counts.add(rows_S, token_ids_S[own_S])

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return to_device(self._device, [np.array(values, dtype=np.int64)])[0]


class _Numbers:
    """What the kernels ask of each draw, by row: kept as arrays, since a step has no time to make them anew."""

    def __init__(self, max_num_seqs: int) -> None:
        self._seeds, self._first, self._second = (np.zeros(max_num_seqs, dtype=np.int64) for _ in range(3))
        self._floats = np.zeros((3, max_num_seqs), dtype=np.float32)  # temperature, min-p, top-p
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._filtered = np.zeros(max_num_seqs, dtype=bool)

    def start(self, row: int, sampling: SamplingParams, sample_index: int) -> None:
        s, seed = sampling, as_int64(sampling.seed)
        key = noise.seeded(np.array([seed], dtype=np.int64), np.array([sample_index], dtype=np.int64))
        self._seeds[row], (self._first[row], self._second[row]) = seed, (word[0] for word in key)
        self._floats[:, row] = 0.0 if s.greedy else max(s.temperature, LEAST_TEMPERATURE), s.min_p, s.top_p
        self._top_k[row] = s.top_k
        self._filtered[row] = not s.greedy and (s.top_p < 1 or bool(s.top_k) or bool(s.min_p))

    def of(self, draws: Sequence[Draw], device: torch.device) -> DrawNumbers:
        rows_, samples_, positions_, own_ = zip(*draws, strict=True)
        rows = np.array(rows_, dtype=np.int64)
        first, second = self._first[rows], self._second[rows]
        if not all(own_):
            first, second = noise.seeded(self._seeds[rows], np.array(samples_, dtype=np.int64))
        words = noise.placed(first, second, np.array(positions_, dtype=np.int64))
        # Each by itself, so that each begins aligned: kernels are compiled anew for addresses of another alignment.
        first_S, second_S, temperature_S, min_p_S, top_p_S, top_k_S = to_device(
            device, [*words, *self._floats.take(rows, 1), self._top_k[rows]]
        )
        filtered = bool(self._filtered[rows].any())
        return DrawNumbers(noise.Keys(first_S, second_S), temperature_S, min_p_S, top_k_S, top_p_S, filtered)


class Counts:
    """What penalties need: how often each row's output holds each token, and which tokens are in its prompt."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._output_RV = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt_RV = torch.zeros(max_num_seqs, vocab_size, dtype=torch.bool, device=device)

    def start(self, row: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        self._in_prompt_RV[row].zero_().index_fill_(0, prompt_ids, True)
        self._output_RV[row].zero_().index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def add(self, rows_S: Tensor, token_ids_S: Tensor) -> None:
        self._output_RV[rows_S, token_ids_S] += 1

    def penalise(self, logits_V: Tensor, row: int, sampling: SamplingParams) -> None:
        """In place. Repetition counts prompt and output; frequency and presence the output alone."""
        counts_V = self._output_RV[row]
        present_V = counts_V > 0
        if sampling.repetition_penalty != 1:
            seen_V = present_V | self._in_prompt_RV[row]
            factor = sampling.repetition_penalty
            weakened_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
            torch.where(seen_V, weakened_V, logits_V, out=logits_V)
        logits_V -= sampling.frequency_penalty * counts_V
        logits_V -= sampling.presence_penalty * present_V
