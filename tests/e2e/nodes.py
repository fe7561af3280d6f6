"""Ray nodes in this process's care, with GPUs that nothing computes on: they stand for room, so that placement is real."""

from collections.abc import Iterator
from contextlib import contextmanager

from ray.cluster_utils import Cluster


@contextmanager
def three_nodes() -> Iterator[Cluster]:
    """Of 2, 1 and 1 GPUs."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False},
    )
    try:
        for _ in range(2):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Cluster) -> None:
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80 * 2**20)
