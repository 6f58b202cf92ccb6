"""A model for one board: the fleet's, trained on with the board's own records, for the board's own use.

The result never leaves the board, so nothing of it is noised, clipped or charged. It holds private data: the
file says so in its metadata, in place of the fleet's guarantee, which is not its own. Fine-tuning is the
plain baseline of personalised federated learning (Yu, Bagdasaryan and Shmatikov, "Salvaging Federated
Learning by Local Adaptation", arXiv 2002.04758).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dpagent.errors import ConfigurationError, DataError, require_between, require_count
from dpagent.learning.data.dataset import Dataset, to_float32
from dpagent.learning.data.derived import Subset
from dpagent.learning.fitting import check_fits
from dpagent.learning.front_end.features import FeatureSet, FrontEnd
from dpagent.learning.inference.even_work import require_even_work
from dpagent.learning.inference.model_bytes import metadata_of, weights_of, with_metadata, with_weights
from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator
from dpagent.learning.models.description import ARCHITECTURE_KEY, from_description
from dpagent.learning.models.spec import ModelSpec
from dpagent.learning.models.stages import FrozenNetwork, Projection
from dpagent.learning.subnormals import flushed_subnormals
from dpagent.learning.training.local_sgd import LocalSgd
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.wording import counted

PERSONAL_KEY: Final = "dpagent.personal"
SENTENCE: Final = (
    "none: trained without noise on the private records of one board, which this file may reveal; it must "
    "not leave the board"
)
_OF_THE_FLEET: Final = ("dpagent.privacy_statement", "dpagent.spent", "dpagent.epsilon_spent")
_LARGEST_GRADIENT: Final = 1e6
_FEWEST_RECORDS: Final = 10
_PIECE: Final = 256
_MOST_STEPS: Final = 10_000
_COMPARED: Final = 16
_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained on.

    Args:
        layers: ``last`` trains the last layer alone, which suits few records.
        epochs: how often each record is used, on average, in (0, 1000].
        batch: records of a step.
        learning_rate: of every step, in (0, 10].
        held_out: share of the records that the accuracy is measured on, in [0.05, 0.9].
        seed: of the choice of these; None: another each time.

    Raises:
        ParameterError: a value is out of its range.
    """

    layers: Literal["last", "all"] = "last"
    epochs: float = 5.0
    batch: int = 16
    learning_rate: float = 0.05
    held_out: float = 0.2
    seed: int | None = None

    def __post_init__(self) -> None:
        require_between("epochs", self.epochs, 0.0, 1000.0, low_open=True)
        require_count("batch", self.batch, maximum=65_536)
        require_between("learning_rate", self.learning_rate, 0.0, 10.0, low_open=True)
        require_between("held_out", self.held_out, 0.05, 0.9)


@dataclass(frozen=True, slots=True)
class Personalised:
    """What came of it. Private, all of it.

    Attributes:
        model: the file.
        before, after: accuracy on the records that were held out.
        trained, held_out: how many records each.
        left_out: how many cannot be read, or are not finite.
    """

    model: bytes
    before: float
    after: float
    trained: int
    held_out: int
    left_out: int


@flushed_subnormals()
def personalise(model: bytes, dataset: Dataset, recipe: Recipe, scratch: Path) -> Personalised:
    """Train a copy of a model on a board's own records.

    Args:
        model: the fleet's, as its coordinator exported it.
        dataset: the board's records.
        recipe: how.
        scratch: a private directory, for features while it lasts.

    Raises:
        DataError: the model or the records cannot be used for that; the text says why.
        StorageError: the directory has no room.
    """
    require_even_work("The model's file", model)
    metadata = metadata_of(model)
    if PERSONAL_KEY in metadata:
        raise DataError("The model is a personal one already. Begin with that of the fleet.")
    spec = _spec_of(metadata)
    check_fits(dataset, spec)
    _require_same_classes(dataset, metadata)
    weights, usable = weights_of(model, spec), _usable(dataset)
    if len(usable) < _FEWEST_RECORDS:
        raise DataError(
            f"There are {counted(len(usable), 'record')} that can be used; expected at least "
            f"{_FEWEST_RECORDS}, some to train on and some to see whether it helps."
        )
    generator = np.random.default_rng(recipe.seed)
    order = generator.permutation(usable)
    count = min(max(1, round(recipe.held_out * len(order))), len(order) - 1)
    held_out, rest = Subset(dataset, np.sort(order[:count])), Subset(dataset, np.sort(order[count:]))
    engine = NumpyEngine(spec)
    _require_as_described(model, spec, weights, engine, held_out)
    records: Dataset = rest
    if spec.front_end:
        records = FeatureSet(rest, FrontEnd(spec), scratch)
    trained = _trained(engine, weights, records, recipe)
    changed = with_weights(model, spec, trained)
    kept = {key: text for key, text in metadata.items() if key not in _OF_THE_FLEET}
    changed = with_metadata(changed, kept | {"dpagent.privacy": SENTENCE, PERSONAL_KEY: "true"})
    before, after = (OnnxEvaluator(file).accuracy(held_out) for file in (model, changed))
    return Personalised(
        changed, before, after, trained=len(rest), held_out=len(held_out), left_out=len(dataset) - len(usable)
    )


def _spec_of(metadata: dict[str, str]) -> ModelSpec:
    text = metadata.get(ARCHITECTURE_KEY)
    if text is None:
        raise DataError(
            "The model's file does not say of what layers it is made, so it cannot be trained on. It is "
            "that of an older coordinator."
        )
    try:
        spec = from_description(json.loads(text), where="The architecture in the model's file")
    except (ValueError, RecursionError) as error:
        raise DataError("The architecture in the model's file is no JSON. Export it anew.") from error
    except ConfigurationError as error:
        raise DataError(str(error)) from error
    for stage in spec.front_end:
        if isinstance(stage, FrozenNetwork | Projection):
            raise DataError(
                f"Model {spec.name!r} has a front end with {stage.kind}, which its file holds as a part of "
                "the graph alone; a model without, or with scattering or random stages, can be trained on."
            )
    return spec


def _require_same_classes(dataset: Dataset, metadata: dict[str, str]) -> None:
    try:
        names = json.loads(metadata.get("dpagent.classes", "[]"))
    except (ValueError, RecursionError):
        names = []
    if dataset.class_names and names and list(dataset.class_names) != names:
        raise DataError(
            f"The classes of the data are {', '.join(dataset.class_names[:8])}; those of the model "
            f"{', '.join(map(str, names[:8]))}. List them in `data.classes` as the model does."
        )


def _usable(dataset: Dataset) -> NDArray[np.int64]:
    """The records that can be read and are finite."""
    found = []
    for start in range(0, len(dataset), _PIECE):
        indices = np.arange(start, min(start + _PIECE, len(dataset)))
        inputs, problems = dataset.try_read(indices)
        finite = np.isfinite(inputs).reshape(len(indices), -1).all(axis=1)
        finite[list(problems)] = False
        found.append(indices[finite])
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _require_as_described(
    model: bytes, spec: ModelSpec, weights: NDArray[np.float32], engine: NumpyEngine, records: Dataset
) -> None:
    """The graph has to be that of the layers that the file names: these are what is trained."""
    inputs, _ = records.batch(np.arange(min(_COMPARED, len(records))))
    features: NDArray[Any] = FrontEnd(spec)(inputs) if spec.front_end else inputs
    ours, theirs = engine.logits(weights, features), OnnxEvaluator(model).logits(to_float32(inputs))
    if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise DataError(
            "The model's file computes something else than the layers that it names: it cannot be trained on."
        )


def _trained(
    engine: NumpyEngine, weights: NDArray[np.float32], records: Dataset, recipe: Recipe
) -> NDArray[np.float32]:
    batch = min(recipe.batch, len(records))
    steps = min(_MOST_STEPS, max(1, round(recipe.epochs * len(records) / batch)))
    step = LocalSgd(1, batch, recipe.learning_rate, _LARGEST_GRADIENT)
    first = 0 if recipe.layers == "all" else engine.spec.nodes[-1].parameters.start
    trained = weights.copy()
    for _ in range(steps):
        trained[first:] = step.train(engine, trained, records)[first:]
    if not np.isfinite(trained).all():
        raise DataError(
            f"Training with --learning-rate {recipe.learning_rate:g} ran away: weights are not finite. Lower"
            " it."
        )
    return trained
