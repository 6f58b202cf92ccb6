"""Model files: the YAML an operator writes, and the networks that it names by their files.

A stage ``onnx: {file: features.onnx}`` names a network beside the model file in place of its digest and
output shape, which are found here. The network's operators are checked first
(:mod:`dpagent.learning.front_end.network_check`): this is where networks are shipped and trusted. A device
reads no model files; it gets descriptions, and runs the networks that its owner trusts by digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from dpagent.errors import ConfigurationError
from dpagent.extras import extra_needed
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.description import from_description
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork
from dpagent.yaml_file import load_yaml


def find_model(name: str) -> ModelSpec:
    """The built-in model called ``name``, or the one in the YAML file that ``name`` is the path of.

    >>> find_model("sensor-cnn").input_shape
    (128, 9)

    Raises:
        ConfigurationError: there is no such model; the text lists the choices.
    """
    return load_model(Path(name)) if is_model_file(name) else built_in(name)


def is_model_file(name: str) -> bool:
    """Whether ``name`` is the path of a model file and not the name of a built-in model.

    >>> is_model_file("porch.yaml"), is_model_file("digits")
    (True, False)
    """
    return name.endswith((".yaml", ".yml"))


def load_model(path: Path) -> ModelSpec:
    """Read a model file.

    Raises:
        ConfigurationError: the file is missing, is not YAML, or describes no model; or a file that it
            names is missing, or no network.
    """
    description = load_yaml(path, example="name: …")
    for network in _networks(description, path):
        description = _with_digest(description, network, path)
    return from_description(description, where=str(path))


def load_assets(path: Path) -> dict[str, bytes]:
    """The files that a model file names, by role; see :func:`load_model`.

    Raises:
        ConfigurationError: as of :func:`load_model`.
    """
    # A model has one network at most.
    networks = _networks(load_yaml(path, example="name: …"), path)
    return {"frozen-network": networks[0].data} if networks else {}


class _Network(NamedTuple):
    """A network of a front end: the number of its stage, the beginning of its errors, and its file."""

    stage: int
    where: str
    data: bytes


def _networks(description: dict[Any, Any], path: Path) -> list[_Network]:
    """The networks that a description names by file, read and checked."""
    stages = description.get("front_end")
    networks = []
    for number, stage in enumerate(stages if isinstance(stages, list) else ()):
        values = stage.get(FrozenNetwork.kind) if isinstance(stage, dict) else None
        if not isinstance(values, dict) or "file" not in values:
            continue
        file = path.parent / str(values["file"])
        where = f"{path}, front end, stage {number} {FrozenNetwork.kind}"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"{where}: {file}: {error.strerror}. Give the path of an ONNX file, relative to the model"
                " file."
            ) from error
        _check(f"{where}: {file}", data)
        networks.append(_Network(number, where, data))
    return networks


def _check(where: str, network: bytes) -> None:
    with extra_needed("coordinator", f"{where}: the check of its network"):
        from dpagent.learning.front_end.network_check import check_network
    check_network(where, network)


def _with_digest(description: dict[Any, Any], network: _Network, path: Path) -> dict[Any, Any]:
    """``description`` with the digest and the output shape of a network in place of its file's name.

    Raises:
        ConfigurationError: it is no network for the stages before it.
    """
    # ONNX Runtime is not on every machine, and a file without networks needs none.
    from dpagent.learning.front_end.frozen_network import OnnxFeatures

    stages = list(description["front_end"])
    before = from_description(
        {
            **description,
            "front_end": stages[: network.stage],
            "layers": [{"dense": description.get("classes")}],
        },
        where=str(path),
    )
    features = OnnxFeatures(network.where, network.data, before.feature_shape)
    values = {key: value for key, value in stages[network.stage][FrozenNetwork.kind].items() if key != "file"}
    stages[network.stage] = {
        FrozenNetwork.kind: {
            "digest": hashlib.sha256(network.data).hexdigest(),
            "output_shape": list(features.output_shape),
            **values,
        }
    }
    return {**description, "front_end": stages}
