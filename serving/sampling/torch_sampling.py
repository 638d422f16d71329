"""Sampling with torch, on any device: the reference for faster backends.

Probabilities and their running sums are float64. On CUDA nothing here waits for the device but `sample`, for its
tokens, and `logprobs`. It knows rows of logits, and no sequences.

Shapes: R rows of the call, G rows of a group, V vocabulary, K best-ranked candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serving.batch.device_copy import all_on_device, on_device
from serving.errors import InternalError
from serving.messages import TokenLogprob
from serving.sampling.allowed import only_allowed
from serving.sampling.penalties import add_bias, mask, penalise
from serving.sampling.randomness import uniforms
from serving.sampling.sampler import ALL_MASKED, NOT_NUMBERS, REASONS, SampleRow, take

# On a CPU the filters look at the best few tokens first, and sort the whole vocabulary only for rows not settled by
# them: none of SmolLM2's at temperature 1 and top-p 0.9. Elsewhere the whole is sorted at once: to ask which rows are
# settled would wait for the device.
CANDIDATES = 4096

TIE_MARGIN = 8  # ranks looked at beyond those asked for, so that a tie at the edge seldom costs a sort


# Makes of edited logits [G, V], their highest [G] and rows that are not greedy a token [G] for each.
Draw = Callable[[Tensor, Tensor, Sequence[SampleRow]], Tensor]


class TorchSampling:
    """Samples with torch (serving.sampling.sampler.SamplingBackend), and draws by `draw_tokens`: by default `draw`."""

    def __init__(self, draw_tokens: Draw | None = None):
        self.draw_tokens = draw_tokens

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        return self.on_device(logits, rows).tolist()

    def on_device(self, logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """The tokens of `sample`, int64 [R], on the logits' device, without waiting for it."""
        return sample_on_device(logits, rows, self.draw_tokens)

    def logprobs(self, logits: Tensor, chosen: Sequence[int], k: int) -> list[TokenLogprob]:
        logprobs = logits.log_softmax(dim=-1)
        tokens = torch.tensor(chosen, dtype=torch.int64, device=logits.device)
        of_chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
        if any(value != value for value in of_chosen):  # NaN: one bad logit spoils its whole row
            raise InternalError(REASONS[NOT_NUMBERS])
        ids = best_ids(logits, k)
        best = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
        return [
            TokenLogprob(value, tuple(zip(row_ids, row_values, strict=True)))
            for value, (row_ids, row_values) in zip(of_chosen, best, strict=True)
        ]


def sample_on_device(logits: Tensor, rows: Sequence[SampleRow], draw_tokens: Draw | None = None) -> Tensor:
    """The tokens of `TorchSampling.sample`, int64 [R], on the logits' device, without waiting for it."""
    logits = only_allowed(logits, [row.allowed for row in rows])
    if all(row.greedy and not row.edited for row in rows):
        peaks, tokens = logits.max(dim=-1)
    else:
        peaks, tokens = _sample(logits, rows, draw_tokens or draw)
    return tokens.masked_fill_(~peaks.isfinite(), NOT_NUMBERS).masked_fill_(peaks == float("-inf"), ALL_MASKED)


def _sample(logits: Tensor, rows: Sequence[SampleRow], draw_tokens: Draw) -> tuple[Tensor, Tensor]:
    """The highest logit [R] of each row after edits, and the token [R] sampled from it.

    A row whose highest logit is no finite number keeps that, whatever its edits are; its token means nothing.
    """
    peaks = raw_peaks = logits.amax(dim=-1)
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    for edited in (False, True):
        group = [r for r, row in enumerate(rows) if row.edited == edited]
        if not group:
            continue
        group_logits, group_peaks, group_rows = take(logits, group), take(peaks, group), [rows[r] for r in group]
        if edited:
            group_logits = edit_logits(group_logits, group_rows)
            group_peaks = group_logits.amax(dim=-1)
            peaks = _put(peaks, group, group_peaks)
        greedy = [g for g, row in enumerate(group_rows) if row.greedy]
        drawn = [g for g, row in enumerate(group_rows) if not row.greedy]
        if greedy:
            tokens = _put(tokens, [group[g] for g in greedy], take(group_logits, greedy).argmax(dim=-1))
        if drawn:
            ids = draw_tokens(take(group_logits, drawn), take(group_peaks, drawn), [group_rows[g] for g in drawn])
            tokens = _put(tokens, [group[g] for g in drawn], ids)
    return peaks.where(raw_peaks.isfinite(), raw_peaks), tokens


def edit_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The logits [G, V] after bias, the mask of stop tokens before `min_tokens`, and penalties, as a new tensor."""
    logits = logits.clone()
    add_bias(logits, [row.params.logit_bias for row in rows])
    mask(logits, [row.masked_tokens for row in rows])
    counted = [r for r, row in enumerate(rows) if row.params.penalised]
    if not counted:
        return logits
    states = [rows[r].counted(logits.shape[1], logits.device) for r in counted]
    after = penalise(take(logits, counted), [rows[r].params for r in counted], states)
    return _put(logits, counted, after)


def best_ids(logits: Tensor, k: int) -> Tensor:
    """The ids [R, k] of the best-ranked tokens of each row of `logits` [R, V], best first."""
    vocab = logits.shape[1]
    k = min(k, vocab)
    values, ids = logits.topk(min(k + TIE_MARGIN, vocab), dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, by_value)[:, :k]
    # If the last candidate ties with the last chosen, so may tokens that are not among the candidates.
    doubtful = (values[:, -1] == values[:, k - 1]).nonzero().squeeze(1)
    if k and values.shape[1] < vocab and doubtful.numel():
        sorted_ids = logits[doubtful].sort(dim=-1, descending=True, stable=True).indices
        ids = ids.index_copy(0, doubtful, sorted_ids[:, :k])
    return ids


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of G rows as columns [G, 1]."""

    min_p: Tensor  # float64
    top_k: Tensor  # int64, V where the row has none
    top_p: Tensor  # float64
    bounded: Tensor  # bool: min-p or top-k may drop tokens

    @staticmethod
    def of(rows: Sequence[SampleRow], vocab: int, device: torch.device) -> Filters:
        params = [row.params for row in rows]
        ks = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
        bounded = [k < vocab or p.min_p > 0.0 for p, k in zip(params, ks, strict=True)]
        return Filters(
            _column([p.min_p for p in params], torch.float64, device),
            _column(ks, torch.int64, device),
            _column([p.top_p for p in params], torch.float64, device),
            _column(bounded, torch.bool, device),
        )

    def take(self, index: Tensor) -> Filters:
        return Filters(self.min_p[index], self.top_k[index], self.top_p[index], self.bounded[index])

    def count(self, ranked: Tensor, vocab: int) -> Tensor:
        """How many tokens pass, int64 [G, 1], given the highest K of `vocab` probabilities, `ranked` [G, K].

        Min-p keeps tokens of at least min_p times the best one's probability; top-k the k best; top-p the fewest whose
        share of what the first two kept reaches top_p. A count of K, with K < V, means K or more.
        """
        width = ranked.shape[1]
        cumulative = ranked.cumsum(dim=-1)
        enough = (ranked >= self.min_p * ranked[:, :1]).sum(dim=-1, keepdim=True)
        first = torch.minimum(self.top_k, enough).clamp_(min=1)  # none is enough in a row that is no numbers
        mass = torch.where(self.bounded, cumulative.gather(1, first - 1), 1.0)
        before = cumulative.roll(1, dims=-1)
        before[:, 0] = 0.0
        nucleus = (before < self.top_p * mass).sum(dim=-1, keepdim=True)
        count = torch.where(self.top_p < 1.0, torch.minimum(first, nucleus), first)
        if width < vocab:  # where min-p and top-k are not settled within K, neither is what top-p takes its share of
            count = torch.where(self.bounded & (first == width), width, count)
        return count.clamp(min=1)

    def mask(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Which tokens pass, bool [G, V], given `logits` and `probabilities` [G, V]."""
        vocab = logits.shape[1]
        kept = torch.zeros_like(logits, dtype=torch.bool)
        rows, filters = torch.arange(logits.shape[0], device=logits.device), self
        for width in (min(CANDIDATES, vocab), vocab) if logits.device.type == "cpu" else (vocab,):
            values = highest(logits, width)
            ranked = values.softmax(dim=-1, dtype=torch.float64)
            ranked *= probabilities.amax(dim=-1, keepdim=True) / ranked[:, :1]
            count = filters.count(ranked, vocab)
            kept[rows] = best(logits, count, values.gather(1, count - 1))
            if width == vocab:
                break
            wider = (count.squeeze(1) == width).nonzero().squeeze(1)
            if not wider.numel():
                break
            rows, logits, probabilities, filters = rows[wider], logits[wider], probabilities[wider], filters.take(wider)
        return kept


def highest(logits: Tensor, width: int) -> Tensor:
    """The `width` highest values of each row of `logits` [G, V], the highest first."""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values[:, :width]
    values = logits.detach().numpy()  # on a CPU its vectorised selection is several times faster than topk
    rest = values.shape[1] - width
    chosen = np.partition(values, rest, axis=-1)[:, rest:] if rest else values
    return torch.from_numpy(np.sort(chosen, axis=-1)[:, ::-1].copy())


def best(logits: Tensor, count: Tensor, lowest: Tensor) -> Tensor:
    """Which tokens are the `count` [G, 1] best-ranked of their row of `logits` [G, V], as bool [G, V].

    `lowest` [G, 1] is the logit of the last of them.
    """
    passing = logits >= lowest
    surplus = passing.sum(dim=-1, keepdim=True) - count
    # Of rows without a surplus this drops nothing: a CPU leaves them out, where elsewhere asking for them would wait.
    tied = surplus.squeeze(1).nonzero().squeeze(1) if logits.device.type == "cpu" else slice(None)
    equal = logits[tied] == lowest[tied]
    room = equal.sum(dim=-1, keepdim=True) - surplus[tied]
    passing[tied] &= ~equal | (equal.cumsum(dim=-1) <= room)
    return passing


def draw(logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """A token [G] for each row of edited `logits` [G, V] whose highest are `peaks` [G]."""
    numbers = uniforms([row.params.seed for row in rows], [row.position for row in rows])
    return invert(token_weights(logits, peaks, rows), all_on_device([numbers], logits.device)[0])


def token_weights(logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The probability float64 [G, V] of each token, 0 where a filter drops it; what is left is not normalised again."""
    device = logits.device
    temperature = _column([row.params.temperature for row in rows], torch.float32, device)
    # The highest logit is taken off first, so that a small temperature cannot overflow.
    scaled = (logits - peaks.unsqueeze(1)).div_(temperature)
    # A softmax over the last dimension sums each row by itself; `sum` and `logsumexp` may split a lone row in threads.
    weights = scaled.softmax(dim=-1, dtype=torch.float64)
    filtered = [r for r, row in enumerate(rows) if row.filtered]
    if filtered:
        filters = Filters.of([rows[r] for r in filtered], logits.shape[1], device)
        filtered_weights = take(weights, filtered)
        passing = filters.mask(take(scaled, filtered), filtered_weights)
        weights = _put(weights, filtered, filtered_weights.masked_fill_(~passing, 0.0))
    return weights


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The id [G] at which the running sum of `weights` [G, V] first passes `numbers` [G], in [0, 1), of the whole."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # Rounding must not carry the target to the total: past the last weight there is no token.
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)


def _put(tensor: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """The tensor with `values` in the given rows: just `values` when the rows are all of them."""
    if len(rows) == tensor.shape[0]:
        return values
    return tensor.index_copy(0, on_device(rows, torch.int64, tensor.device), values)


def _column(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return on_device(list(values), dtype, device).unsqueeze(1)
