"""Has agl start verl's trainer in a Ray cluster of two nodes, of which agl's own has no core to spare, and says where
it ran, and where Ray would have put it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from verl.trainer import main_ppo

from agl_runtime.trainer.backends.verl import launch

FILE = "AGL_TEST_FILE"


@ray.remote
class Runner:
    """In place of verl's, which takes a minute."""

    def run(self, _: object) -> None:
        Path(os.environ[FILE]).write_text(self.where())

    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    own = cluster.add_node(node_ip_address="127.0.0.1", num_cpus=0)  # of nodes on a machine, a driver joins the newest
    main_ppo.TaskRunnerV1 = Runner
    launch.before.require_model = launch.validate = lambda _: None  # there is no model
    address = {"+ray_kwargs.ray_init.address": cluster.address}
    try:
        launch.drive(address, {FILE: sys.argv[1]})
        ray.init(cluster.address)
        print(json.dumps({"here": own.node_id, "elsewhere": ray.get(Runner.remote().where.remote())}))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
