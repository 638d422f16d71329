"""Placements that no other beats in everything at once: goodput per device, cost, p90 TTFT and TPOT, devices.

Pure. All of a small space are compared; of one too large to walk NSGA-II (pymoo) finds them, from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

OBJECTIVES = ("goodput per device", "cost", "p90 TTFT", "p90 TPOT", "devices")
JudgedValues = tuple[float, float, float, float, float]
"""As OBJECTIVES has them, each the smaller the better: the first is negative."""
GENERATIONS, POPULATION = 60, 120


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """True if `one` is nowhere worse and somewhere better."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def pareto_front(values: Sequence[Sequence[float]]) -> list[int]:
    """Indices, ascending, of those that none dominates. Equal ones all stay."""
    if not values:
        return []
    points = np.asarray(values, dtype=float)
    kept = []
    for index, point in enumerate(points):
        beaten = np.all(points <= point, axis=1) & np.any(points < point, axis=1)
        if not beaten.any():
            kept.append(index)
    return kept


def evolved_front(
    sizes: Sequence[int],
    judge: Callable[[tuple[int, ...]], Sequence[float] | None],
    seed: int,
    generations: int | None = None,
) -> list[tuple[int, ...]]:
    """Genomes on the front of a space of integers, gene i from 0 to sizes[i] - 1. `judge` gives None for none.

    Deb et al., A fast and elitist multiobjective genetic algorithm: NSGA-II (2002). Raises ValueError without pymoo.
    """
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.core.problem import ElementwiseProblem
        from pymoo.operators.crossover.sbx import SBX
        from pymoo.operators.mutation.pm import PM
        from pymoo.operators.repair.rounding import RoundingRepair
        from pymoo.operators.sampling.rnd import IntegerRandomSampling
        from pymoo.optimize import minimize
    except ImportError:
        raise ValueError("this space is too large to walk: pip install 'millrace[plan]' for a search in it") from None
    seen: dict[tuple[int, ...], Sequence[float]] = {}

    class Space(ElementwiseProblem):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(
                n_var=len(sizes), n_obj=len(OBJECTIVES), n_ieq_constr=1, xl=0, xu=np.array(sizes) - 1, vtype=int
            )

        def _evaluate(self, genes: Any, out: dict[str, Any], *_: Any, **__: Any) -> None:
            genome = tuple(int(gene) for gene in genes)
            judged = judge(genome)
            if judged is not None:
                seen[genome] = judged
            out["F"] = [1e9] * len(OBJECTIVES) if judged is None else list(judged)
            out["G"] = [1.0 if judged is None else -1.0]

    algorithm = NSGA2(
        pop_size=POPULATION,
        sampling=IntegerRandomSampling(),
        crossover=SBX(prob=0.9, eta=3, vtype=float, repair=RoundingRepair()),
        mutation=PM(prob=0.5, eta=3, vtype=float, repair=RoundingRepair()),
        eliminate_duplicates=True,
    )
    minimize(Space(), algorithm, ("n_gen", generations or GENERATIONS), seed=seed, verbose=False)
    genomes = sorted(seen)
    return [genomes[index] for index in pareto_front([seen[genome] for genome in genomes])]
