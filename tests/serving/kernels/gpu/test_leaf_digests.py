"""A device's digests of leaves are those of the CPU's library, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kvcache.handoff import tree_digest
from kvcache.handoff.tree_digest import leaves_of
from serving.kernels.gpu import leaf_digests
from serving.kernels.gpu.leaf_digests import as_digests

SMALL = 2048  # a leaf whose stripes are interpreted sooner


@pytest.fixture(autouse=True)
def many_to_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a program takes as long whatever it has."""
    monkeypatch.setattr(leaf_digests, "LEAVES", 256)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_digest, "LEAF", SMALL)


def digested(data: torch.Tensor, size: int, leaf: int = SMALL) -> bytes:
    out = torch.zeros(-(-size // leaf) * 16, dtype=torch.uint8)
    leaf_digests.leaf_digests(leaf_digests.constants(leaf), data, out, size=size, leaf=leaf)
    return as_digests(out.numpy().tobytes())


def test_leaves_as_they_travel() -> None:
    assert leaf_digests.LEAF == tree_digest.LEAF
    size, data = 2 * tree_digest.LEAF + 8, torch.randint(0, 256, (3 * tree_digest.LEAF,), dtype=torch.uint8)
    assert digested(data, size, tree_digest.LEAF) == leaves_of(data[:size].numpy().tobytes())


@pytest.mark.parametrize("size", [8, 64, 1024, SMALL - 8, SMALL, SMALL + 8, 3 * SMALL, 600 * SMALL - 1000])
def test_leaves_of_every_length(small: None, size: int) -> None:
    data = torch.randint(0, 256, (600 * SMALL,), dtype=torch.uint8)  # what follows the bytes is not zero
    assert digested(data, size) == leaves_of(data[:size].numpy().tobytes())


def test_a_bit_changes_its_leaf_alone(small: None) -> None:
    data = torch.randint(0, 256, (3 * SMALL,), dtype=torch.uint8)
    before = digested(data, 3 * SMALL)
    data[SMALL + 1234] ^= 16
    after = digested(data, 3 * SMALL)
    assert [before[i : i + 16] == after[i : i + 16] for i in (0, 16, 32)] == [True, False, True]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_leaves(small: None, count: int) -> None:
    data = torch.randint(-(2**63), 2**63 - 1, (count * SMALL // 8,), dtype=torch.int64).view(torch.uint8)
    assert digested(data, count * SMALL) == leaves_of(data.numpy().tobytes())
