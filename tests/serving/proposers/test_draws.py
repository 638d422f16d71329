"""Drafts are drawn with the sequence's own parameters and noise, without a look at its text."""

from __future__ import annotations

import pytest
import torch

from serving.engine.plan import Work
from serving.engine.sequence import OutputView
from serving.proposers.draws import DraftDraws
from serving.sampling.sampler import Sampler, SampleRow, sampled
from serving.sampling.torch_sampling import TorchSampling
from tests.fakes.sequences import make_sequence
from tests.prefill.scripted import make_decoding, make_kv


def test_a_draw_is_that_of_the_text_and_reads_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv(16, 4)
    seq = make_sequence(kv, [1, 2], stays=True, max_tokens=40, seed=5)
    params = seq.request.sampling.__class__(max_tokens=40, temperature=1.0, seed=5, min_tokens=9)
    object.__setattr__(seq.request, "sampling", params)
    seq.tokens += [7] * 5
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(TorchSampling())
    text = [7] * 5 + [3, 4]
    row = SampleRow(params=params, position=2 + 7, output_tokens=text, prompt_tokens=(1, 2), eos_token_ids=(11,))
    expected = sampler(logits, [row])
    for name in ("__iter__", "__getitem__"):
        monkeypatch.delattr(OutputView, name)
    work = Work(seq, 1, make_decoding(kv))
    (token,) = DraftDraws(sampler, (11,)).next([work], [[3, 4]], lambda: torch.zeros(1), lambda: logits)
    assert [sampled(token)] == expected
