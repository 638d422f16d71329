"""Runs a planned step on the model: builds the ragged batch, computes logits where a token is drawn, samples.

It knows torch and the model, and nothing of queues, leases or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serving.engine.batch import RaggedBatch
from serving.engine.engine import LayerDone, Runner, RunResult
from serving.engine.penalties import PenaltyState, penalised
from serving.engine.plan import Work
from serving.engine.sampling import Sampled, Sampler, SampleRow, SamplingFailed, token_logprobs
from serving.engine.sequence import Sequence
from serving.errors import InternalError
from serving.messages import TokenLogprob
from serving.model.decoder import Decoder


class ModelRunner(Runner):
    """`planes[layer]` are the layer's KV tensors, each [num_blocks, block_size, ...]; see kvcache.device."""

    def __init__(self, model: Decoder, planes: Seq[tuple[Tensor, ...]], block_size: int, eos_token_ids: frozenset[int]):
        self.model = model
        self.planes = planes
        self.block_size = block_size
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.sampler = Sampler()
        self.device = planes[0][0].device

    @torch.inference_mode()
    def run(self, work: Seq[Work], layer_done: LayerDone | None) -> RunResult:
        wants_all = [i for i, item in enumerate(work) if item.seq.request.prompt_logprobs is not None]
        rows = logits_rows(work, frozenset(wants_all))
        batch = RaggedBatch.build(
            tokens=[item.seq.tokens[item.seq.computed : item.seq.computed + item.count] for item in work],
            starts=[item.seq.computed for item in work],
            block_tables=[item.seq.blocks for item in work],
            block_size=self.block_size,
            logits_rows=[row for span in rows for row in span],
            long_rope=[item.seq.long_rope for item in work],
            device=self.device,
        )
        hidden = self.model(batch, self.planes, layer_done)
        if not len(batch.logits_rows):
            return RunResult([None] * len(work), {})
        logits = self.model.logits(hidden[batch.logits_rows])
        return self._draw(work, rows, logits)

    def _draw(self, work: Seq[Work], rows: list[range], logits: Tensor) -> RunResult:
        """Split the logits back to their sequences, draw where a sequence's last token was computed."""
        prompt: dict[int, list[TokenLogprob | None]] = {}
        sampled: list[Sampled | SamplingFailed | None] = [None] * len(work)
        drawn: list[int] = []
        picks: list[int] = []
        first = 0
        for i, (item, span) in enumerate(zip(work, rows, strict=True)):
            if item.seq.request.prompt_logprobs is not None:
                try:
                    prompt[i] = prompt_logprobs(item, logits[first : first + len(span)])
                except InternalError as error:
                    sampled[i] = SamplingFailed(error.message)
            first += len(span)
            if item.completes and sampled[i] is None:
                drawn.append(i)
                picks.append(first - 1)
        if drawn:
            chosen = logits if len(picks) == len(logits) else logits[picks]
            for i, sample in zip(drawn, self.sampler(chosen, [self._row(work[i].seq) for i in drawn]), strict=True):
                sampled[i] = sample
        return RunResult(sampled, prompt)

    def _row(self, seq: Sequence) -> SampleRow:
        if seq.sampler_state is None and penalised(seq.request.sampling):
            seq.sampler_state = PenaltyState(seq.request.prompt, self.model.spec.vocab_size, self.device)
        return SampleRow(
            params=seq.request.sampling,
            position=len(seq.tokens),
            output_tokens=seq.output,
            prompt_tokens=seq.request.prompt,
            eos_token_ids=self.eos_token_ids,
            state=seq.sampler_state,
        )


def logits_rows(work: Seq[Work], all_rows: frozenset[int]) -> list[range]:
    """The batch rows whose logits each work item needs: its last if it draws, all for prompt log-probabilities."""
    rows = []
    first = 0
    for i, item in enumerate(work):
        end = first + item.count
        in_prompt = item.seq.computed < item.seq.prompt_len
        if i in all_rows and in_prompt:
            rows.append(range(first, end))
        elif item.completes:
            rows.append(range(end - 1, end))
        else:
            rows.append(range(end, end))
        first = end
    return rows


def prompt_logprobs(item: Work, logits: Tensor) -> list[TokenLogprob | None]:
    """Log-probabilities of the prompt tokens that these rows predict; the first token of a prompt has none.

    Row r predicts the token after position computed + r.
    """
    seq = item.seq
    if seq.computed >= seq.prompt_len:
        return []
    k = seq.request.prompt_logprobs
    assert k is not None
    found: list[TokenLogprob | None] = [None] if seq.computed == 0 else []
    targets = seq.tokens[seq.computed + 1 : min(seq.computed + item.count + 1, seq.prompt_len)]
    if targets:
        found += token_logprobs(logits[: len(targets)], torch.tensor(targets, device=logits.device), k)
    return found
