"""A long prompt takes more ranks than a short one, where that is quicker, or needed; all widths say the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from serving.loader.loading import load
from serving.parallel.joining import ParallelRank
from serving.parallel.teams import join_teams, team_models
from serving.parallel.widths import choose_width
from serving.step_cost import StepCost, StepLoad
from tests.serving.expert_parallel.served import greedy
from tests.serving.parallel.models import written

RANKS = 2
PROMPTS = [[5, 9, 33, 2, 71, 8, 40], [4, 4, 19]]
# Each exchange costs a millisecond a layer or so; rows and pairs are shared.
COSTS = {
    width: StepCost(fixed=0.005 + 0.06 * (width > 1), token=1e-3 / width, pair=1e-6 / width) for width in (1, 2, 4)
}


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (64, 1), (200, 4), (100_000, 4)])
def test_without_an_objective_the_quickest(tokens: int, width: int) -> None:
    assert choose_width(tokens, COSTS) == width


@pytest.mark.parametrize(
    ("tokens", "within", "width"),
    [(500, 2.0, 1), (500, 0.5, 2), (500, 0.25, 4), (500, 0.01, 4), (64, 0.01, 1)],
    ids=str,
)
def test_an_objective_takes_as_few_ranks_as_meet_it(tokens: int, within: float, width: int) -> None:
    assert choose_width(tokens, COSTS, within) == width


@given(
    tokens=st.integers(1, 10**6),
    within=st.none() | st.floats(1e-3, 1e3),
    costs=st.dictionaries(
        st.sampled_from([1, 2, 4, 8]),
        st.builds(StepCost, fixed=st.floats(0, 1), token=st.floats(1e-6, 1e-2), pair=st.floats(0, 1e-6)),
        min_size=1,
    ),
)
def test_no_other_width_is_better(tokens: int, within: float | None, costs: dict[int, StepCost]) -> None:
    chosen, load = choose_width(tokens, costs, within), StepLoad.of(0, tokens)
    seconds = {width: cost.seconds(load) for width, cost in costs.items()}
    met = {width for width, needed in seconds.items() if within is not None and needed <= within}
    if met:
        assert chosen in met
        assert all(chosen * seconds[chosen] <= width * seconds[width] for width in met)
    else:
        assert seconds[chosen] == min(seconds.values())


@pytest.mark.parametrize(("tokens", "costs"), [(0, COSTS), (5, {})], ids=["no tokens", "no widths"])
def test_no_width_for_nothing(tokens: int, costs: dict[int, StepCost]) -> None:
    with pytest.raises(ValueError, match="no width"):
        choose_width(tokens, costs)


def test_teams_fill_the_ranks() -> None:
    with pytest.raises(ValueError, match="teams of 3 do not make up 4 ranks"):
        join_teams((1, 3), 4, 0, HashStore(), deadline=1.0)


@pytest.fixture
def teams() -> Iterator[list[dict[int, ParallelRank]]]:
    store = HashStore()
    with ThreadPoolExecutor(RANKS) as threads:
        joined = list(threads.map(lambda rank: join_teams((1, 2), RANKS, rank, store, deadline=120.0), range(RANKS)))
    yield joined
    for one in joined:
        for ranks in one.values():
            ranks.close()


@pytest.mark.parametrize("name", ["llama3", "deepseek_v2_lite"])
def test_every_width_computes_over_the_same_weights(
    tmp_path: Path, teams: list[dict[int, ParallelRank]], name: str
) -> None:
    whole = load(written(tmp_path, [name])[name], "float32").model
    models = [team_models(whole, of_rank) for of_rank in teams]
    down = whole.layers[0].get_submodule("mlp.down").weight
    for by_width in models:
        for model in by_width.values():
            assert model.layers[0].get_submodule("mlp.down").weight is down
    wanted = greedy(whole, PROMPTS)

    def run(rank: int, width: int) -> list[list[int]]:
        torch.set_num_threads(1)
        return [tokens for tokens, _ in greedy(models[rank][width], PROMPTS)]

    with ThreadPoolExecutor(RANKS) as threads:
        for width in (1, 2):
            for found in threads.map(lambda rank, width=width: run(rank, width), range(RANKS)):
                assert found == [tokens for tokens, _ in wanted]
