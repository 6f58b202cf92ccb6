"""A Ray cluster of two nodes on this machine: ``python -m ray_cluster``, by Ray's own cluster utilities.

It prints the cluster's address, ends the second node when a line comes on standard input, and all of it when
that closes. Its processes listen on the loopback interface, and ask for the token of the environment.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token",
}  # fmt: skip

from ray.cluster_utils import Cluster

_STORE_BYTES = 128 << 20


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        # Wherever the cluster's own directory is, its utilities note its address in Ray's.
        Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
        cores = int(os.environ.get("CORES", "1"))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": cores, "object_store_memory": _STORE_BYTES, "include_dashboard": False,
                "temp_dir": directory,
            },
        )  # fmt: skip
        try:
            second = cluster.add_node(num_cpus=cores, object_store_memory=_STORE_BYTES)
            cluster.wait_for_nodes()
            print(cluster.address, flush=True)
            if sys.stdin.readline():
                cluster.remove_node(second, allow_graceful=False)
                print("killed", flush=True)
                sys.stdin.read()
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
