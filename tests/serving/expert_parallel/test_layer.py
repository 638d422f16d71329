"""A model whose experts are spread over real processes gives the bits that it gives in one."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from serving.checkpoint.checkpoint import SafetensorsFolder
from serving.expert_parallel.exchange import ExchangeShape
from serving.expert_parallel.layer import apply_expert_parallel, exchange_shape, hold_experts, moe_layers
from serving.expert_parallel.local import LocalExchange
from serving.loader.loading import load
from serving.model.decoder import Decoder
from serving.model.expert_balance import ExpertPlacement
from serving.parallel.holding import hold_share
from serving.parallel.layout import ParallelLayout
from serving.quantization.apply import apply_scales, find_scales
from serving.quantization.folder import write_model
from serving.quantization.scheme import Int8Scheme
from serving.rank_group.share import hold_spread
from tests.serving.expert_parallel.ranks import Ranks
from tests.serving.expert_parallel.served import greedy, placements, serve_rank
from tests.serving.model.oracle import VOCAB, build, configs, save

LENGTHS = (9, 1, 14, 5, 3)
PROMPTS = [[random.Random(length).randrange(VOCAB) for _ in range(length)] for length in LENGTHS]

MODELS = ("mixtral", "qwen3_moe", "qwen3_moe_dense", "gpt_oss", "mixtral_int8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("moe")
    found = {name: save(build(configs()[name]), root / name) for name in MODELS[:-1]}
    model, out = load(found["mixtral"], "float32").model, root / "mixtral_int8"
    out.mkdir()
    scheme = Int8Scheme()
    apply_scales(model, scheme, find_scales(model, scheme, None))
    write_model(model, json.loads((found["mixtral"] / "config.json").read_text()), out)
    return found | {"mixtral_int8": out}


@pytest.mark.parametrize("expert", [0, -1])
def test_a_layer_with_some_experts_in_int8_is_refused_on_every_rank(folders: dict[str, Path], expert: int) -> None:
    layout = ParallelLayout(sequence=2, spread_experts=True)
    for hold in (partial(hold_share, layout=layout), partial(hold_spread, ranks=2, redundant=0)):
        for rank in range(2):
            model, wide = (load(folders[name], "float32").model for name in ("mixtral_int8", "mixtral"))
            (_, mlp), (_, other) = list(moe_layers(model))[-1], list(moe_layers(wide))[-1]
            mlp.experts[expert] = other.experts[expert]
            with pytest.raises(
                ValueError, match=r"some experts of MoE layer .* quantize all experts of a layer, or none"
            ):
                hold(model, rank=rank)


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "spare"),
    [
        ("mixtral", "shared_memory", 2, 0),
        ("mixtral", "shared_memory", 4, 1),
        ("qwen3_moe", "shared_memory", 2, 1),
        ("qwen3_moe", "shared_memory", 4, 0),
        ("qwen3_moe_dense", "hierarchical", 4, 1),
        ("qwen3_moe", "all_to_all", 2, 1),
        ("gpt_oss", "shared_memory", 2, 1),
        ("mixtral_int8", "shared_memory", 2, 1),
        ("mixtral_int8", "all_to_all", 2, 0),
        ("mixtral_int8", "hierarchical", 4, 1),
    ],
)
def test_ranks_compute_the_bits_of_one_process(
    folders: dict[str, Path], name: str, kind: str, ranks: int, spare: int
) -> None:
    prompts = PROMPTS[: max(3, ranks - 1)]  # of four ranks one has none
    with Ranks() as group:
        started = group.start_all(ranks, serve_rank, folders[name], kind, ranks, spare, prompts)
        answers = [rank.answer() for rank in started]
    alone = load(folders[name], "float32").model
    assert alone.spec.moe is not None
    for rank, (found, held, traffic) in enumerate(answers):
        own = prompts[rank::ranks]
        for (tokens, logits), (wanted_tokens, wanted) in zip(found, greedy(alone, own) if own else [], strict=True):
            assert tokens == wanted_tokens
            assert torch.equal(torch.from_numpy(logits), wanted)
        assert len(held) == sum(len(set(placement.slots[rank])) for placement in placements(alone, ranks, spare))
        assert traffic.combine_bytes > 0
    together = greedy(alone, prompts)  # other batches, the same text
    texts = {index: answers[index % ranks][0][index // ranks][0] for index in range(len(prompts))}
    assert [tokens for tokens, _ in together] == [texts[index] for index in range(len(prompts))]


def test_a_rank_reads_its_own_experts_alone(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    reading = SafetensorsFolder.read

    def noted(self: SafetensorsFolder, name: str) -> torch.Tensor:
        read.append(name)
        return reading(self, name)

    monkeypatch.setattr(SafetensorsFolder, "read", noted)
    spread: list[ExpertPlacement] = []

    def layout(model: Decoder) -> None:
        spread.extend(placements(model, 2, 0))
        hold_experts(model, spread, 1)

    load(folders["mixtral"], "float32", layout=layout)
    found = {(int(words[2]), int(words[5])) for words in (name.split(".") for name in read) if "experts" in words}
    assert found == {(layer, expert) for layer, one in enumerate(spread) for expert in one.slots[1]}
    assert any("q_proj" in name for name in read)


def test_a_part_of_a_model_is_not_quantized_while_it_loads(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="millrace quantize"):
        load(folders["mixtral"], "float32", quantization="int8", layout=lambda model: None)


def test_a_group_of_one_changes_nothing(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_moe"], "float32").model
    wanted = greedy(model, PROMPTS)
    spread = placements(model, 1, 0)
    apply_expert_parallel(model, spread, LocalExchange(exchange_shape(model, spread[0], 64)))
    for (tokens, logits), (wanted_tokens, wanted_logits) in zip(greedy(model, PROMPTS), wanted, strict=True):
        assert tokens == wanted_tokens
        assert torch.equal(logits, wanted_logits)


def test_what_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    model = load(folders["mixtral"], "float32").model
    spread = placements(model, 1, 0)
    shape = exchange_shape(model, spread[0], 8)
    int8 = ExchangeShape(
        ranks=1, slots=5, top_k=3, hidden=shape.hidden, max_tokens=8, wire=torch.int8, back=torch.float32
    )
    with pytest.raises(ValueError, match="INT8 experts alone"):
        apply_expert_parallel(model, spread, LocalExchange(int8))
    with pytest.raises(ValueError, match="does not fit an exchange"):
        apply_expert_parallel(model, placements(model, 2, 0), LocalExchange(shape))
