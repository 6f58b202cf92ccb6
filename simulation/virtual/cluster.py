"""Ray, started on this machine or joined elsewhere, and left without a trace.

A Ray that is started here has a temporary directory of its own, listens on the loopback interface alone, asks
for a token of this run, sends no usage report and has no dashboard. It ends with the block that it is used
in, and with this process, however that ends.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dpagent import __version__
from dpagent.errors import ClusterError, ConfigurationError
from dpagent.extras import extra_needed

_LEAST_STORE_BYTES: Final = 256 << 20
_STORE_SHARE: Final = 0.3
"""Of the machine's memory, at most; Ray keeps the rest of the records on the disk."""
_ANSWERS_S: Final = 5.0
_SPARE: Final = 2.0
"""So many times the records fit in the store: features take their place, and sums come beside them."""


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """Which Ray to use.

    Attributes:
        address: of a cluster, ``host:port``; None starts one on this machine.
        cores: that tasks may use at a time on this machine; None: all.
    """

    address: str | None = None
    cores: int | None = None


@contextmanager
def ray_on(request: ClusterRequest, record_bytes: int = 0) -> Iterator[Any]:
    """Ray, as long as the block runs; the module is handed in.

    Args:
        request: Which.
        record_bytes: that all records take in memory.

    Raises:
        ConfigurationError: The extra is missing, or a node of the cluster has another version of dpagent.
        ClusterError: Ray cannot be started, or there is no cluster at the address.
    """
    ray = ray_package(request)
    directory = None
    try:
        with _own_signals():
            if request.address is None:
                directory = Path(tempfile.mkdtemp(prefix="dpagent-ray-"))
                _start(ray, request, record_bytes, directory)
            else:
                _join(ray, request.address)
        yield ray
    finally:
        _shut_down(ray)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this program's handlers, in place of the one for SIGTERM that Ray installs when it starts.

    Raises:
        ClusterError: The signal came while Ray was starting; it has been passed on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit as error:  # Of Ray's handler.
        if callable(handler := kept[signal.SIGTERM]):
            handler(signal.SIGTERM, None)
        raise ClusterError("Ray was stopped while it was starting.") from error
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


def cores_of(ray: Any) -> int:
    """How many tasks run at a time."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def ray_package(request: ClusterRequest) -> Any:
    """The package. It reads these variables when it is imported, and what it starts inherits them.

    Args:
        request: Which Ray is to be used.

    Raises:
        ClusterError: Nothing answers at the address.
        ConfigurationError: The extra is missing; or others have imported the package before, so that a Ray
            that is started here would be open to the network.
    """
    # Its own handler for SIGTERM aborts the process, and leaves its children and their directory.
    wanted = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    if request.address is not None and _is_on_loopback(request.address):
        wanted |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    elif request.address is None:
        # What keeps Ray on the loopback interface on systems without clusters keeps it there on Linux; and
        # other users of this machine reach that interface too, so it asks for a token.
        wanted |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
    if sys.modules.get("ray") is not None and any(
        os.environ.get(name) != value for name, value in wanted.items()
    ):
        raise ConfigurationError(
            "Ray was imported in this process before, with settings of its own. Import it after this program "
            "has, or set " + ", ".join(f"{name}={value}" for name, value in wanted.items()) + " before."
        )
    os.environ.update(wanted)
    if request.address is None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with extra_needed("simulation", "A virtual fleet"):
        import ray
    return ray


def _is_on_loopback(address: str) -> bool:
    """Whether a cluster is on this machine's loopback interface alone. Ray itself waits for minutes where
    nothing answers, and takes a loopback address for that of another interface.

    Raises:
        ClusterError: Nothing answers.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    is_here = host == "localhost" or host.startswith("127.") or host == "::1"
    if is_here and _answers(_own_address(), int(port)):
        return False
    if not _answers(host, int(port)):
        raise ClusterError(
            f"--address {address}: nothing answers there. Expected HOST:PORT of a Ray cluster's head node, "
            "as `ray start --head` prints it."
        )
    return is_here


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _ANSWERS_S):
            return True
    except (OSError, OverflowError):
        return False


def _own_address() -> str:
    """This machine's on the interface to others; asking for it sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # An address for documentation (RFC 5737).
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _start(ray: Any, request: ClusterRequest, record_bytes: int, directory: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = min(max(_LEAST_STORE_BYTES, int(_SPARE * record_bytes)), int(_STORE_SHARE * memory))
    try:
        ray.init(
            address="local",  # Whatever RAY_ADDRESS says.
            num_cpus=request.cores or len(os.sched_getaffinity(0)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            object_store_memory=store,
            _temp_dir=str(directory),
        )
    except Exception as error:  # A bare one where a process of Ray's is slow to begin.
        raise ClusterError(
            f"Ray cannot be started on this machine: {_first_line(error)}. Free some memory and room in "
            f"{directory.parent}, or name a cluster with --address."
        ) from error


def _shut_down(ray: Any) -> None:
    with warnings.catch_warnings():
        # Ray ends its processes, and forgets them before they are gone.
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        gc.collect()


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        raise ClusterError(
            f"--address {address}: no Ray cluster can be used there ({_first_line(error)}). Expected "
            "HOST:PORT of its head node, as `ray start --head` prints it."
        ) from error
    _require_same_program(ray, address)


def _require_same_program(ray: Any, address: str) -> None:
    """See that each node has this program, in this version.

    Raises:
        ConfigurationError: One has not.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(_versions)
    wanted = _versions()
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        try:
            found = ray.get(ask.options(scheduling_strategy=place).remote())
        except ray.exceptions.RayError:
            found = None
        if found != wanted:
            has = "cannot import dpagent" if found is None else f"has {_in_words(found)}"
            raise ConfigurationError(
                f"--address {address}: node {node['NodeManagerAddress']} {has}; expected "
                f"{_in_words(wanted)}, as here. Install the same on every node."
            )


def _versions() -> dict[str, str]:
    """What decides on a device's numbers."""
    return {"dpagent": __version__, "numpy": importlib.metadata.version("numpy")}


def _in_words(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


def _first_line(error: Exception) -> str:
    return (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
