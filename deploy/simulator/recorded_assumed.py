"""DistServe's simulator as a configuration of ours: its assumptions, so that its outputs can be checked.

No step waits for KV, nothing is moved, no process around the engines takes time.
"""

from __future__ import annotations

from dataclasses import replace

from deploy.simulator.profiles import PIPELINE_MS, STEP_MS, PhaseTables
from deploy.simulator.recorded_systems import UNBOUNDED_TOKENS, ColocatedSystem, SplitSystem, paced

UNBOUNDED = 1 << 20  # sequences, tokens of a step


def assumed_split(prefill: str = "a100-opt13b", decode: str = "a100-opt13b") -> SplitSystem:
    """A prefill and a decode instance by their profiles; a prompt's batch holds what fits the KV of its instance."""
    prompts = paced(prefill, step_ms=PIPELINE_MS + STEP_MS)
    tokens = paced(decode, step_ms=STEP_MS)
    return SplitSystem(
        replace(prompts, max_num_seqs=UNBOUNDED, max_num_batched_tokens=prompts.kv_tokens, kv_tokens=UNBOUNDED_TOKENS),
        replace(tokens, max_num_seqs=UNBOUNDED, max_num_batched_tokens=UNBOUNDED, kv_tokens=UNBOUNDED_TOKENS),
    )


def assumed_colocated(profile: str = "a100-opt13b-vllm") -> ColocatedSystem:
    """One instance; prompts first, never beside decoding."""
    engine = paced(profile, step_ms=STEP_MS)
    tables = engine.steps
    assert isinstance(tables, PhaseTables)
    prompts = replace(tables.prefill, a=tables.prefill.a + PIPELINE_MS)  # decode steps are not charged for it
    return ColocatedSystem(
        replace(
            engine,
            steps=replace(tables, prefill=prompts),
            kv_tokens=UNBOUNDED_TOKENS,
            max_num_seqs=UNBOUNDED,
            max_num_batched_tokens=engine.kv_tokens,
        )
    )
