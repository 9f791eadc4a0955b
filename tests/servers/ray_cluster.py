"""A Ray cluster of two nodes on this machine, in processes of its own, for as long as a block runs.

python -m tests.servers.ray_cluster        prints its address, and the pids of its nodes; ends with its standard input
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

#: What everybody has to be told who takes part: nodes are on loopback, and nobody is told of them.
ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}

#: Bytes of each node's store of objects: the least that Ray takes. Nothing of ours is put there.
OBJECT_BYTES = 80 * 2**20


@dataclass
class RayCluster:
    """Where it is, and how a node of it ends."""

    address: str
    process: subprocess.Popen[str]

    def remove_node(self) -> None:
        """End the second node, as if its machine were gone."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("remove\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "removed\n"


def is_installed() -> bool:
    """Whether there is Ray."""
    return importlib.util.find_spec("ray") is not None


@contextlib.contextmanager
def running() -> Iterator[RayCluster]:
    """Two nodes with two processors each, as far as Ray knows."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.servers.ray_cluster"], cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stdin
        try:
            told: dict[str, Any] = json.loads(process.stdout.readline())
            yield RayCluster(told["address"], process)
        finally:
            process.stdin.close()
            process.wait(60)


def main() -> int:
    """Serve until standard input ends."""
    said, sys.stdout = sys.stdout, sys.stderr  # Ray prints what it likes
    cluster_utils: Any = importlib.import_module("ray.cluster_utils")
    size = {"num_cpus": 2, "object_store_memory": OBJECT_BYTES, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=size)
    other = cluster.add_node(**{name: value for name, value in size.items() if name != "include_dashboard"})
    cluster.wait_for_nodes()
    print(json.dumps({"address": cluster.address}), file=said, flush=True)
    for line in sys.stdin:
        if line == "remove\n":
            cluster.remove_node(other, allow_graceful=False)
            print("removed", file=said, flush=True)
    cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
