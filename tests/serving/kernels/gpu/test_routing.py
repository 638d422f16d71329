"""Routing against the model's own formula, and rows in the order of experts: every pair once, in blocks of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serving.kernels.gpu.routing import HEIGHTS, MOST_EXPERTS, ExpertRows, block_height, by_expert, most_blocks, route
from serving.model import moe
from serving.model.moe_spec import MoeSpec


def spec(experts: int, top_k: int, *, normalized: bool) -> MoeSpec:
    return MoeSpec(experts=experts, top_k=top_k, intermediate=8, sparse=(True,), normalized=normalized)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(1, 8, 2), (37, 6, 1), (5, 40, 8), (3, 8, 8), (4, 1, 1), (0, 8, 2), (70, 5, 3)]
)
def test_the_experts_and_weights_of_rows(
    rows: int, experts: int, top_k: int, normalized: bool, device: torch.device
) -> None:
    logits = 3 * torch.randn(rows, experts)
    chosen, weights = route(logits.to(device), top_k, normalized=normalized)
    expected, expected_weights = moe.route(logits, spec(experts, top_k, normalized=normalized))
    assert chosen.dtype is torch.int32 and weights.dtype is torch.float32
    assert torch.equal(chosen.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_weighed_as_they_are(dtype: torch.dtype, device: torch.device) -> None:
    """All differ, so that no tie has two answers."""
    logits = torch.stack([torch.randperm(12) for _ in range(9)]).to(dtype) / 4
    chosen, weights = route(logits.to(device), 3, normalized=True)
    expected, expected_weights = moe.route(logits, spec(12, 3, normalized=True))
    assert torch.equal(chosen.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
def test_ties_and_what_is_no_number(device: torch.device) -> None:
    """Whatever the logits are, a row has as many different experts as it should: addresses are found by them."""
    rows = [
        [1.0, 2.0, 2.0, 2.0, 0.0],
        [float("-inf")] * 5,
        [float("nan")] * 5,
        [float("nan"), 1.0, float("inf"), float("-inf"), -float("nan")],
        [0.0, -1e38, 1e38, float("-inf"), float("-inf")],
        [-1.0, -0.0, 0.0, -0.0, -2.0],
    ]
    logits = torch.tensor(rows)
    logits[2] = torch.tensor([-1] * 5, dtype=torch.int32).view(torch.float32)  # NaN with every bit
    chosen, weights = route(logits.to(device), 4, normalized=False)
    for number, experts in enumerate(chosen.tolist()):
        assert sorted(set(experts)) == sorted(experts) and all(0 <= expert < 5 for expert in experts), number
    assert chosen[0].tolist() == chosen[5].tolist() == [1, 2, 3, 0], "of equal ones the first"
    assert torch.isnan(weights[2]).all() and torch.isnan(weights[3]).all()


def checked(chosen: Tensor, experts: int, first: int = 0) -> ExpertRows:
    rows = by_expert(chosen, range(first, first + experts), first + experts)
    flat = [expert - first if first <= expert < first + experts else -1 for expert in chosen.flatten().tolist()]
    order, blocks = rows.order.tolist(), rows.blocks.T.tolist()
    found: list[int] = []
    there = [block for block in blocks if block[0] >= 0]
    assert all(expert == -1 for expert, _, _ in blocks[len(there) :])
    for expert, first, end in there:
        assert 0 < end - first <= rows.height and first == len(found)
        found += order[first:end]
        assert {flat[pair] for pair in order[first:end]} == {expert}
    assert found == sorted((pair for pair, expert in enumerate(flat) if expert >= 0), key=lambda pair: flat[pair])
    return rows


@pytest.mark.parametrize(
    ("rows", "experts", "top_k"), [(1, 8, 2), (1, 1, 1), (40, 3, 1), (70, 6, 2), (9, 40, 8), (2, 70, 1), (100, 2, 2)]
)
def test_every_pair_is_in_one_block_of_its_expert(rows: int, experts: int, top_k: int, device: torch.device) -> None:
    chosen = torch.rand(rows, experts).argsort(dim=1)[:, :top_k].int().contiguous()
    checked(chosen.to(device), experts)


@pytest.mark.parametrize("expert", [0, 2, 4])
def test_all_rows_go_to_one_expert(expert: int, device: torch.device) -> None:
    rows = checked(torch.full((150, 1), expert, dtype=torch.int32, device=device), 5)
    assert rows.height == 64 and int((rows.blocks[0] == expert).sum()) == 3


def test_rows_that_nobody_here_takes_are_left_out(device: torch.device) -> None:
    checked(torch.tensor([[-1, 2], [0, -1], [-1, -1]], dtype=torch.int32, device=device), 3)
    checked(torch.full((3, 2), -1, dtype=torch.int32, device=device), 3)
    checked(torch.tensor([[4, 2], [0, 5], [6, 3]], dtype=torch.int32, device=device), 3, first=3)
    assert by_expert(torch.empty((0, 2), dtype=torch.int32, device=device), range(3), 3).blocks.shape == (3, 0)


def test_how_blocks_are_sized() -> None:
    assert [block_height(pairs, 128) for pairs in (8, 1024, 1025, 4096, 65536)] == [16, 16, 32, 64, 128]
    for pairs, experts in ((1, 8), (8, 8), (9, 8), (1000, 7)):
        height = block_height(pairs, experts)
        assert height in HEIGHTS
        uneven = [1] * (min(pairs, experts) - 1)
        uneven.append(pairs - len(uneven))
        assert sum(-(-count // height) for count in uneven) <= most_blocks(pairs, experts, height) <= pairs


def test_what_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="cannot take 9 of 8"):
        route(torch.zeros(1, 8, device=device), 9, normalized=True)
    with pytest.raises(ValueError, match=f"1 to {MOST_EXPERTS}"):
        route(torch.zeros(1, MOST_EXPERTS + 1, device=device), 1, normalized=True)
    with pytest.raises(ValueError, match="int32"):
        by_expert(torch.zeros(1, 1, dtype=torch.int64, device=device), range(8), 8)
    with pytest.raises(ValueError, match="contiguous"):
        route(torch.zeros(8, 2, device=device).T, 1, normalized=True)
