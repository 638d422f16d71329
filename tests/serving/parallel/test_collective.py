"""What ranks do together gives each of them the same bits, and those that one process would have had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serving.expert_parallel.exchange import RankLost
from serving.forward.cpu_forward import supports
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.model.quantized_linear import QuantizedLinear
from serving.model.rope import Rope
from serving.parallel import collective
from serving.parallel.applying import apply_parallel
from serving.parallel.collective import Collective
from serving.parallel.holding import hold_share
from serving.parallel.layout import ParallelLayout, share
from serving.parallel.tensor_parallel import summed
from tests.serving.expert_parallel.served import greedy
from tests.serving.parallel.groups import Threads
from tests.serving.parallel.models import written
from tests.serving.parallel.test_layout import SPEC


@pytest.fixture(scope="module", params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[Threads]:
    with Threads(ParallelLayout(tensor=request.param)) as group:
        yield group


def groups_of(threads: Threads) -> list[Collective]:
    return [rank.tensor for rank in threads.ranks if rank.tensor is not None]


def values(size: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, generator=generator) for _ in range(size)]


@pytest.mark.parametrize("gathered", [1 << 16, 0], ids=["one exchange", "two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sums_are_made_in_the_order_of_ranks(
    threads: Threads, dtype: torch.dtype, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "GATHERED", gathered)
    size = len(groups_of(threads))
    parts = [(one * 1000).to(dtype) for one in values(size, 7, 5)]
    wanted = parts[0].float() if dtype.is_floating_point else parts[0]
    for part in parts[1:]:
        wanted = wanted + part
    for found in threads.each(lambda rank: groups_of(threads)[rank].sum(parts[rank])):
        assert found.dtype is dtype and torch.equal(found, wanted.to(dtype))


def test_rows_of_unequal_counts_are_gathered(threads: Threads) -> None:
    counts = [3, 0, 2][: len(groups_of(threads))]
    rows = [torch.full((count, 2), float(rank)) for rank, count in enumerate(counts)]
    for found in threads.each(lambda rank: groups_of(threads)[rank].gathered_rows(rows[rank], counts)):
        assert torch.equal(found, torch.cat(rows))


def test_what_is_sent_is_what_it_was_when_it_was_sent() -> None:
    """The second is sent while the first may still be on its way."""
    sent = [torch.arange(6.0), torch.arange(6.0, 12.0)]

    with Threads(ParallelLayout(pipeline=2)) as threads:

        def run(rank: int) -> list[Tensor]:
            link = threads.ranks[rank].previous if rank else threads.ranks[rank].following
            assert link is not None
            if rank:
                return [link.receive(torch.empty(6), sender=0) for _ in sent]
            for one in sent:
                link.send(one, to=1)
            return sent

        first, second = threads.each(run)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_one_rank_shares_what_it_has(threads: Threads) -> None:
    size = len(groups_of(threads))
    given = [torch.full((2, 3), float(rank)) for rank in range(size)]
    for found in threads.each(lambda rank: groups_of(threads)[rank].shared(given[rank], size - 1)):
        assert torch.equal(found, given[-1])


def test_bytes_to_others_are_counted(threads: Threads) -> None:
    size = len(groups_of(threads))
    before = [group.bytes_sent for group in groups_of(threads)]
    threads.each(lambda rank: groups_of(threads)[rank].sum(torch.zeros(10)))
    assert [group.bytes_sent - had for group, had in zip(groups_of(threads), before, strict=True)] == [
        (size - 1) * 40
    ] * size


@pytest.mark.parametrize("biased", [False, True])
def test_int8_linears_cut_by_columns_have_the_bits_of_one(threads: Threads, biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 48, generator=generator) * torch.rand(48, generator=generator) * 10
    weight = torch.randint(-127, 128, (20, 48), dtype=torch.int8, generator=generator)
    scale, bias = torch.rand(20, generator=generator), torch.randn(20, generator=generator) if biased else None
    size = len(groups_of(threads))

    def run(rank: int) -> Tensor:
        held = share(48, rank, size)
        part = QuantizedLinear(weight[:, held.start : held.stop].contiguous(), scale, bias)
        with torch.inference_mode():
            found: Tensor = summed(part, groups_of(threads)[rank])(x[:, held.start : held.stop])
            return found

    for found in threads.each(run):
        assert torch.equal(found, QuantizedLinear(weight, scale, bias)(x))


def test_a_bias_is_added_once(threads: Threads) -> None:
    whole = torch.nn.Linear(12, 4)
    x, size = torch.randn(3, 12), len(groups_of(threads))

    @torch.inference_mode()
    def run(rank: int) -> Tensor:
        held, part = share(12, rank, size), torch.nn.Linear(1, 4)
        part.weight = torch.nn.Parameter(whole.weight[:, held.start : held.stop])
        part.bias = whole.bias
        found: Tensor = summed(part, groups_of(threads)[rank])(x[:, held.start : held.stop])
        return found

    for found in threads.each(run):
        torch.testing.assert_close(found, whole(x).detach(), atol=1e-5, rtol=0)


def test_a_closed_group_says_so() -> None:
    with Threads(ParallelLayout(tensor=2)) as threads:
        rank = threads.ranks[0]
        rank.close()
        assert rank.tensor is not None
        with pytest.raises(RankLost, match="closed"):
            rank.tensor.sum(torch.zeros(2))


def test_compiled_kernels_leave_a_shared_model_to_torch() -> None:
    with torch.device("meta"):
        model = Decoder(replace(SPEC, rope=Rope(frequencies=(1.0,))))
    assert supports(model, "float32") is None
    with Threads(ParallelLayout(tensor=2)) as threads:
        hold_share(model, threads.layout, 0)
        apply_parallel(model, threads.ranks[0])
    assert supports(model, "float32") == "the fused step computes no model that ranks share"


@pytest.mark.parametrize("layout", [ParallelLayout(tensor=2), ParallelLayout(sequence=2), ParallelLayout(pipeline=2)])
def test_bfloat16_shares_come_near_one_process(tmp_path: Path, layout: ParallelLayout) -> None:
    path = written(tmp_path, ["qwen3"])["qwen3"]
    prompts = [[5, 9, 33, 2, 71, 8, 40], [4, 4, 19]]
    ((_, wanted), (_, other)) = greedy(load(path, "bfloat16").model, prompts)
    most = 0.5 if layout.tensor > 1 else 0.05  # of logits up to 20; shares of a sum are rounded before it
    with Threads(layout) as threads:

        def run(rank: int) -> list[Tensor]:
            model = load(path, "bfloat16", layout=partial(hold_share, layout=layout, rank=rank)).model
            found = greedy(apply_parallel(model, threads.ranks[rank]), prompts)
            return [logits for _, logits in found]

        first, second = threads.each(run)
    for found in (first, second):
        for one, whole, count in zip(found, (wanted, other), map(len, prompts), strict=True):
            torch.testing.assert_close(one[:count], whole[:count], atol=most, rtol=0)
    assert all(torch.equal(one, same) for one, same in zip(first, second, strict=True))
