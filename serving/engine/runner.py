"""Runs a planned step on the model: builds the ragged batch, computes logits where a token is drawn, samples.

It knows torch and the model, and nothing of queues, leases or sockets. Sequences whose KV is kept otherwise than the
worker's own make a batch of theirs, and so do those whose embedding is wanted: no token of others is touched by these.
Those with KV in host memory are computed one by one, after all others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from serving.batch.ragged import OffloadedKV, RaggedBatch
from serving.engine.drafting import Computed
from serving.engine.launched import LaunchedStep, draw
from serving.engine.offload import OffloadMove, OffloadState
from serving.engine.overlap import Launched, OverlapRunner
from serving.engine.plan import Work
from serving.engine.pooling import pool, pooled_rows
from serving.engine.run import LayerDone, RunResult, RunTimes
from serving.engine.sequence import SequenceState
from serving.engine.work_batches import WorkBatches
from serving.errors import InternalError
from serving.expert_parallel.exchange import RankLost
from serving.forward.forward import Forward
from serving.grammar.grammars import Allowed, GrammarError, GrammarState
from serving.kvspec import AUTO
from serving.messages import TokenLogprob
from serving.model.spec import ModelSpec
from serving.sampling.allowed import best_allowed
from serving.sampling.penalties import PenaltyState
from serving.sampling.sampler import (
    GREEDY_BELOW,
    Sampled,
    Sampler,
    SampleRow,
    SamplingBackend,
    SamplingFailed,
    sampled,
)
from serving.sampling.torch_sampling import TorchSampling
from serving.streams import recorded, streams_of

Draws = tuple[list[list[Sampled | SamplingFailed]], dict[int, list[TokenLogprob | None]]]
"""For each work item what was drawn, and the prompt log-probabilities of those that asked."""

"""What a sequence may draw after its output and after each drafted token; or why it cannot draw."""


class OffloadBackend(Protocol):
    """The bytes of KV in host memory (kvcache.memory.host.HostKV)."""

    def move(self, moves: Sequence[OffloadMove]) -> None:
        """Copy these blocks to the host, for all layers; the device's may be written again when it returns."""

    def stream(self, offload: OffloadState, computed: int, kv_dtype: str) -> AbstractContextManager[OffloadedKV]:
        """What a step from position `computed` on reads of what has moved, of a sequence whose KV is kept so."""
        ...


class ModelRunner(OverlapRunner):
    """Runs plans through `forward`; block tables of its batches are in blocks of `block_size` tokens.

    `host` holds what sequences offload; without one, none may. `sampler` draws the tokens, with torch by default.
    `others` compute sequences whose blocks hold KV of another dtype, by that dtype. `computed` is told what `forward`
    has computed.
    """

    def __init__(
        self,
        forward: Forward,
        spec: ModelSpec,
        block_size: int,
        device: torch.device | str = "cpu",
        host: OffloadBackend | None = None,
        sampler: Sampler | None = None,
        others: Mapping[str, Forward] | None = None,
        computed: Computed | None = None,
    ):
        self.forward = forward
        self.forwards = {AUTO: forward, **(others or {})}
        self.host = host
        self.vocab_size = spec.vocab_size
        self.block_size = block_size
        self.eos_token_ids = tuple(sorted(set(spec.eos_token_ids)))
        self.sampler = sampler or Sampler(TorchSampling())
        self.device = device
        self.computed = computed
        self._batches = WorkBatches(block_size, device)

    @torch.inference_mode()
    def run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        lost = False
        try:
            return self._run(work, layer_done)
        except RankLost:  # what waits for that rank on the device may have no end, and nobody counts this step
            lost = True
            raise
        finally:
            # What has been launched is over: its KV is counted next, or its blocks are given to others. That tokens
            # are here does not say so: a chunk that is not a prompt's last draws none.
            if not lost:
                recorded(streams_of(self.device)).synchronize()

    def _run(self, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
        together, alone = batches(work)
        if len(together) == 1 and not alone:
            return self._compute(work, layer_done)
        parts = [(places, self._compute([work[i] for i in places], layer_done)) for places in together]
        parts += [([i], self._compute_offloaded(work[i], layer_done)) for i in alone]
        return joined(parts)

    def can_overlap(self, seq: SequenceState) -> bool:
        """True if a draw needs no earlier token and nothing on the host: no history, grammar or log-probabilities."""
        params = seq.request.sampling
        draws_ahead = params.logprobs is None and not params.penalised and not params.grammar
        return seq.request.prompt_logprobs is None and draws_ahead

    @torch.inference_mode()
    def launch(self, work: Sequence[Work], after: Launched | None) -> Launched:
        began = time.perf_counter()
        assert after is None or isinstance(after, LaunchedStep)
        before = after.rows if after is not None else {}
        rows = [before.get(id(item.seq)) for item in work]  # of `after`, which draws what this step computes
        starts = [item.seq.computed + (row is not None) for item, row in zip(work, rows, strict=True)]
        batch = RaggedBatch.build(
            tokens=[item.tokens if row is None else (0,) for item, row in zip(work, rows, strict=True)],
            starts=starts,
            block_tables=[item.seq.blocks for item in work],
            block_size=self.block_size,
            long_rope=[item.seq.long_rope for item in work],
            device=self.device,
        )
        if after is not None and any(row is not None for row in rows):
            batch = replace(batch, tokens=after.followed(batch.tokens, rows), arrays=None)
        built = time.perf_counter()
        if all(map(_greedy, work)):
            tokens = self.forward.greedy(batch, None)
        else:
            # Without penalties, only how many tokens there are matters: with the one that `after` draws, where it does.
            lengths = [item.seq.output_len + (row is not None) for item, row in zip(work, rows, strict=True)]
            draws = [self._row(item.seq, range(length)) for item, length in zip(work, lengths, strict=True)]
            tokens = draw(self.sampler.backend, self.forward.logits(batch, None), draws)
        if self.computed is not None:
            self.computed(work, starts)
        return LaunchedStep(work, tokens, began, built)

    def _compute_offloaded(self, item: Work, layer_done: LayerDone | None) -> RunResult:
        """One sequence that has KV in host memory."""
        offload = item.seq.offload
        assert self.host is not None and offload is not None
        self.host.move(offload.moves)
        offload.settle()
        with self.host.stream(offload, item.seq.computed, item.seq.kv_dtype) as offloaded:
            return self._compute([item], layer_done, offloaded)

    def _compute(
        self, work: Sequence[Work], layer_done: LayerDone | None, offloaded: OffloadedKV | None = None
    ) -> RunResult:
        if work[0].seq.request.pooling is not None:
            return self._embed(work, offloaded)
        began = time.perf_counter()
        wants_all = [i for i, item in enumerate(work) if item.seq.request.prompt_logprobs is not None]
        rows = logits_rows(work, frozenset(wants_all))
        batch = self._batches.of(work, rows, offloaded)
        greedy = not wants_all and all(map(_greedy, work))
        held = _held_rows(work) if greedy else []
        built = time.perf_counter()
        handed_over = [item for item in work if item.seq.prefill.handoff is not None]
        tell = partial(layer_done, handed_over) if layer_done is not None and handed_over else None
        forward = self.forwards[work[0].seq.kv_dtype]
        best: Tensor | None = None
        logits: Tensor | None = None
        if not greedy:
            logits = forward.logits(batch, tell)
        elif held:
            best, logits = forward.greedy_and_logits(batch, tell, held)
        else:
            best = forward.greedy(batch, tell)
        if self.computed is not None and forward is self.forward:
            self.computed(work, [item.seq.computed for item in work])
        computed = time.perf_counter()
        if work[0].left:
            return RunResult([[]], {}, RunTimes(built - began, computed - built, 0.0))
        if best is not None:
            drawn, prompt = _chosen(work, best, logits)
        else:
            assert logits is not None
            drawn, prompt = self._draw(work, rows, logits)
        times = RunTimes(built - began, computed - built, time.perf_counter() - computed)
        return RunResult(drawn, prompt, times)

    def _embed(self, work: Sequence[Work], offloaded: OffloadedKV | None) -> RunResult:
        """Work whose embeddings are wanted: no tokens are drawn."""
        began = time.perf_counter()
        rows = pooled_rows(work)
        batch = self._batches.of(work, rows, offloaded)
        built = time.perf_counter()
        hidden = self.forwards[work[0].seq.kv_dtype].hidden(batch, None)
        computed = time.perf_counter()
        embeddings = {} if work[0].left else pool(work, rows, hidden)
        times = RunTimes(built - began, computed - built, time.perf_counter() - computed)
        return RunResult([[] for _ in work], {}, times, embeddings)

    def _draw(self, work: Sequence[Work], rows: list[range], logits: Tensor) -> Draws:
        """Split the logits back to their sequences, and draw after each last token and after each drafted one."""
        prompt: dict[int, list[TokenLogprob | None]] = {}
        drawn: list[list[Sampled | SamplingFailed]] = [[] for _ in work]
        wanted: list[SampleRow] = []
        owners: list[list[Sampled | SamplingFailed]] = []
        picks: list[int] = []
        first = 0
        for i, (item, span) in enumerate(zip(work, rows, strict=True)):
            if item.seq.request.prompt_logprobs is not None:
                try:
                    prompt[i] = prompt_logprobs(item, logits[first : first + len(span)], self.sampler.backend)
                except InternalError as error:
                    drawn[i].append(SamplingFailed(error.message))
            first += len(span)
            if item.completes and not drawn[i]:
                seq = item.seq
                if seq.penalties is None and seq.request.sampling.penalised:
                    seq.penalties = PenaltyState(seq.request.prompt, self.vocab_size, self.device)
                try:
                    after = _allowed(item)
                except GrammarError as error:
                    drawn[i].append(SamplingFailed(str(error)))
                    continue
                for drafted in range(len(item.draft) + 1):
                    output = [*seq.output, *item.draft[:drafted]] if drafted else seq.output
                    wanted.append(self._row(seq, output, after[drafted]))
                    owners.append(drawn[i])
                    picks.append(first - 1 - len(item.draft) + drafted)
        if wanted:
            chosen = logits if len(picks) == len(logits) else logits[picks]
            for owner, sample in zip(owners, self.sampler(chosen, wanted), strict=True):
                owner.append(sample)
        return drawn, prompt

    def _row(self, seq: SequenceState, output: Sequence[int], allowed: Allowed | None = None) -> SampleRow:
        """The draw after the sequence's prompt and this output, which may be longer than what it has."""
        return SampleRow(
            params=seq.request.sampling,
            position=seq.prompt_len + len(output),
            output_tokens=output,
            prompt_tokens=seq.request.prompt,
            eos_token_ids=self.eos_token_ids,
            state=seq.penalties,
            allowed=allowed,
        )


def batches(work: Sequence[Work]) -> tuple[list[list[int]], list[int]]:
    """The places of the work that is computed together, batch by batch, and of what is computed alone."""
    together: dict[str, list[int]] = {}
    alone: list[int] = []
    for i, item in enumerate(work):
        offload = item.seq.offload
        (alone if offload is not None and offload.moved else together.setdefault(item.seq.batched_with, [])).append(i)
    return list(together.values()), alone


def joined(parts: Sequence[tuple[Sequence[int], RunResult]]) -> RunResult:
    """The results of parts of a step as one; each part comes with the places of its work in the step."""
    drawn: dict[int, list[Sampled | SamplingFailed]] = {}
    prompt: dict[int, list[TokenLogprob | None]] = {}
    for places, result in parts:
        drawn.update(zip(places, result.drawn, strict=True))
        prompt.update((places[i], found) for i, found in result.prompt_logprobs.items())
    embeddings: dict[int, bytes | SamplingFailed] = {}
    for places, result in parts:
        embeddings.update((places[i], found) for i, found in result.embeddings.items())
    times = [result.times for _, result in parts]
    total = RunTimes(
        sum(one.batch for one in times), sum(one.forward for one in times), sum(one.sample for one in times)
    )
    return RunResult([drawn[i] for i in sorted(drawn)], prompt, total, embeddings)


def _allowed(item: Work) -> Sequence[Allowed | None]:
    """What may be drawn after the output and after each drafted token. Raises GrammarError."""
    grammar = item.seq.grammar
    return [None] * (len(item.draft) + 1) if grammar is None else grammar.allowed(item.seq.output, item.draft)


def _draws(item: Work) -> int:
    """How many tokens a step draws for it at most."""
    return len(item.draft) + 1 if item.completes else 0


def _held_rows(work: Sequence[Work]) -> list[int]:
    """Of the rows that are drawn from, those of sequences with a grammar."""
    grammars = [item.seq.grammar for item in work for _ in range(_draws(item))]
    return [row for row, grammar in enumerate(grammars) if grammar is not None]


def _greedy(item: Work) -> bool:
    """True if the item draws the best-scored tokens of those allowed, and asks for nothing else of the scores."""
    if not item.completes:
        return True
    seq, params = item.seq, item.seq.request.sampling
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and not params.logit_bias
        and not params.penalised
        and seq.output_len >= params.min_tokens
    )


def _chosen(work: Sequence[Work], tokens: Tensor, logits: Tensor | None) -> Draws:
    """Give each sequence that draws its best-scored tokens; -1 marks scores that are no numbers.

    `logits` are those of the rows that grammars hold.
    """
    best, held = iter(tokens.tolist()), iter(logits if logits is not None else ())
    drawn: list[list[Sampled | SamplingFailed]] = []
    for item in work:
        found = list(islice(best, _draws(item)))
        if item.seq.grammar is None or not found:
            drawn.append([sampled(token) for token in found])
        else:
            drawn.append(_held(item, item.seq.grammar, found, list(islice(held, len(found)))))
    return drawn, {}


def _held(
    item: Work, grammar: GrammarState, best: Sequence[int], logits: Sequence[Tensor]
) -> list[Sampled | SamplingFailed]:
    """The best tokens, or the best of those that the grammar allows where it refuses them."""
    try:
        found = grammar.drawn(item.seq.output, item.draft, best, lambda i, allowed: best_allowed(logits[i], allowed))
    except GrammarError as error:
        return [SamplingFailed(str(error))]
    return [sampled(token) for token in found]


def logits_rows(work: Sequence[Work], all_rows: frozenset[int]) -> list[range]:
    """The batch rows whose logits each work item needs: its last and its draft's if it draws, all for the prompt's."""
    rows = []
    first = 0
    for i, item in enumerate(work):
        end = first + item.count
        in_prompt = item.seq.computed < item.seq.prompt_len
        if i in all_rows and in_prompt:
            rows.append(range(first, end))
        elif item.completes:
            rows.append(range(end - 1 - len(item.draft), end))
        else:
            rows.append(range(end, end))
        first = end
    return rows


def prompt_logprobs(item: Work, logits: Tensor, backend: SamplingBackend) -> list[TokenLogprob | None]:
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
        found += backend.logprobs(logits[: len(targets)], targets, k)
    return found
