"""Draws a draft's next tokens from a model's scores as the sequences themselves would: the same parameters and noise.

A sampled token is a function of (logits, parameters, seed, position). So a model whose logits are near those of the one
it drafts for draws the same token nearly always, also where that is not the most likely one.

Shapes: R sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from serving.engine.plan import Work
from serving.sampling.sampler import GREEDY_BELOW, Sampled, Sampler, SampleRow


class DraftDraws:
    """Chooses for work and the tokens drafted for it so far. Penalties and grammars are left out: see `greedy`."""

    def __init__(self, sampler: Sampler, eos_token_ids: tuple[int, ...]):
        self.sampler = sampler
        self.eos_token_ids = eos_token_ids

    def next(
        self,
        work: Sequence[Work],
        drafts: Sequence[Sequence[int]],
        best: Callable[[], Tensor],
        logits: Callable[[], Tensor],
    ) -> list[int]:
        """A token for each sequence, below 0 where there is none.

        One of the two is called: `best` for the tokens [R] of the highest logits where that is all it takes, else
        `logits` for [R, V] float32.
        """
        if all(map(greedy, work)):
            found: list[int] = best().tolist()
            return found
        rows = [self._row(item, draft) for item, draft in zip(work, drafts, strict=True)]
        return [one.token if isinstance(one, Sampled) else -1 for one in self.sampler(logits(), rows)]

    def _row(self, item: Work, draft: Sequence[int]) -> SampleRow:
        seq = item.seq
        output = range(seq.output_len + len(draft))  # without penalties only how many there are matters
        params = seq.request.sampling
        if params.logprobs is not None:
            params = replace(params, logprobs=None)
        return SampleRow(
            params=params,
            position=seq.prompt_len + len(output),
            output_tokens=output,
            prompt_tokens=seq.request.prompt,
            eos_token_ids=self.eos_token_ids,
        )


def greedy(item: Work) -> bool:
    """True if the sequence's next token is the best-scored one, as far as a draft is to know."""
    params = item.seq.request.sampling
    return params.temperature < GREEDY_BELOW and not params.logit_bias and item.seq.output_len >= params.min_tokens
