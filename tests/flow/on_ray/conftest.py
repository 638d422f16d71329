"""One Ray cluster for all tests of this folder, since starting it takes as long as most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flow.on_ray.nodes import STORE, RayNodes


@pytest.fixture(scope="package")
def nodes() -> Iterator[RayNodes]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "resources": {"front": 1},
            "object_store_memory": STORE,
            "include_dashboard": False,
            "_system_config": {"prestart_worker_first_driver": False},  # idle processes that take the cores of ours
        },
    )
    found = RayNodes(ray, cluster, {"head": cluster.head_node})
    try:
        found.add("other")
        ray.init(address=cluster.address, namespace="tests", log_to_driver=False)
        yield found
    finally:
        ray.shutdown()
        cluster.shutdown()
