"""`[ray]` in a placement file: what it means, and what is refused, with its line."""

from __future__ import annotations

import pytest

from deploy.placement.ray_table import RayReservation, RayTable
from deploy.placement.reader import read_placement
from serving.options import ConfigError

WORKERS = """
[[workers]]
role = "prefill"

[[workers]]
role = "decode"
name = "decode-long"
"""


def test_a_table_left_out_is_one_packed_set() -> None:
    assert read_placement(WORKERS).ray == RayTable(name="millrace", strategy="PACK", sets=1, groups={})


def test_groups_reserve_what_their_tables_say() -> None:
    text = """
[ray]
name = "blue"
sets = 2
strategy = "STRICT_SPREAD"
[ray.prefill]
cpus = 8
gpus = 0.5
memory = "2GiB"
[ray.decode-long]
resources = { h100 = 1 }
[ray.kvcache]
cpus = 2
[kvcache]
"""
    table = read_placement(WORKERS + text).ray
    assert (table.name, table.sets, table.strategy) == ("blue", 2, "STRICT_SPREAD")
    assert table.groups == {
        "prefill": RayReservation(cpus=8, gpus=0.5, memory=2 << 30),
        "decode-long": RayReservation(resources={"h100": 1.0}),
        "kvcache": RayReservation(cpus=2),
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sets = 0", "is not a number from 1"),
        ("sets = true", "is not a number from 1"),
        ('strategy = "pack"', "is none of PACK"),
        ('name = "A"', "is no name"),
        ("spread = true", "unknown key 'spread'"),
        ("[ray.decode]\ncpus = 1", "unknown key 'decode'"),
        ("[ray.kvcache]\ncpus = 1", "unknown key 'kvcache'"),
        ("[ray.prefill]\ncpus = 0.5", "is not a whole number of cores"),
        ("[ray.prefill]\ngpus = -1", "is not a number from 0"),
        ("[ray.prefill]\ngpus = nan", "is not a number from 0"),
        ('[ray.prefill]\nmemory = "much"', "is not a size"),
        ("[ray.prefill]\nresources = { a = true }", "is not a table of the cluster's own resources"),
        ("[ray.prefill]\nthreads = 1", "unknown key 'threads'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        read_placement(f"{WORKERS}\n[ray]\n{text}\n")
    assert refused.value.message.startswith("placement.toml:")
