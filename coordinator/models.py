"""The coordinator's model files: the exported model, its accuracy, and the assets for devices."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.job import Job
from coordinator.model_making import training_graph, unfilled_model
from coordinator.settings import FleetSettings
from dpagent.errors import ConfigurationError, ParameterError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.input_form import METADATA_KEY, InputForm
from dpagent.learning.data.opening import advice_on_shape
from dpagent.learning.fitting import check_fits
from dpagent.learning.front_end.features import FeatureSet, FrontEnd
from dpagent.learning.inference.evaluation import Evaluation
from dpagent.learning.inference.model_bytes import with_metadata, with_weights
from dpagent.learning.models.description import ARCHITECTURE_KEY
from dpagent.learning.models.spec import ModelSpec
from dpagent.norm import Norm
from dpagent.privacy.covariance import leading_directions
from dpagent.privacy.statement import BudgetStatement
from dpagent.protocol.messages import MAX_WHOLE_BYTES
from dpagent.storage import disk_errors, write_atomically

log = logging.getLogger(__name__)


class ModelFiles:
    """The job's assets, and the export and evaluation of each round's weights.

    Args:
        settings: The fleet's.
        spec: The model.
        directory: For the files of the job.
        test: Public test records.
        test_inputs: What the inputs of these are.

    Attributes:
        assets: The devices' inputs besides plans and weights, by role.
        spec: The model.

    Raises:
        DataError: The test data do not fit the model.
        ConfigurationError: ``model.inputs`` does not fit the model, or the test data.
        StorageError: The directions of the projection cannot be read.
    """

    def __init__(
        self,
        settings: FleetSettings,
        spec: ModelSpec,
        directory: Path,
        test: Dataset | None,
        test_inputs: InputForm | None = None,
    ) -> None:
        self._settings, self.spec, self._directory = settings, spec, directory
        self._inputs = _inputs_of(settings, spec, test_inputs)
        self._class_names: tuple[str, ...] = tuple(settings.model.classes or ())
        self._test = test
        self._features: Dataset | None = None
        if test is not None:
            check_fits(test, spec, advise=advice_on_shape)
            self._class_names = self._class_names or test.class_names
        self.assets: dict[str, bytes] = settings.model.assets()
        if settings.privacy.gradient_norm is not Norm.L1:  # graphs clip in L2
            augmentation = settings.model.augmentation
            self.assets["training-graph"] = training_graph(
                spec.head,
                views=1 if augmentation is None else augmentation.views,
                per_layer=settings.privacy.clipping.kind == "layers",
            )
        self._unfilled: dict[ModelSpec, bytes] = {}
        """The model's file, and that of its layers alone, without weights."""
        self._projection_file = directory / "projection.f32"
        if spec.projection is not None:
            with disk_errors(self._projection_file):
                if self._projection_file.exists():
                    self.assets["projection"] = self._projection_file.read_bytes()
        if spec.projection is None:
            self._without_weights(spec)  # Before there is anything else to do, and in memory.

    def restore_projection(self, directions: bytes | None) -> None:
        """Take the directions that another machine's coordinator has found, unless they are here.

        Raises:
            StorageError: They cannot be written.
        """
        if directions is not None and "projection" not in self.assets:
            write_atomically(self._projection_file, directions)
            self.assets["projection"] = directions

    def set_projection(self, moments: NDArray[np.float64]) -> None:
        """Store the leading directions of the fleet's second moments permanently."""
        if self.spec.projection is None:
            raise ParameterError(f"Model {self.spec.name!r} has no projection.")
        directions = leading_directions(moments, self.spec.projection.components).astype("<f4").tobytes()
        write_atomically(self._projection_file, directions)
        self.assets["projection"] = directions

    @property
    def name(self) -> str:
        """The job's."""
        return self._directory.name

    @property
    def first_round(self) -> int:
        """The first round that steps the model: 2 where the first one only finds a projection."""
        return 1 + (self.spec.projection is not None)

    @property
    def final(self) -> Path:
        """Path of the finished model."""
        return self._directory / "model.onnx"

    def finished(self) -> dict[str, bytes]:
        """The finished model, as what devices are sent at the end; none where it is too large for that.

        Raises:
            StorageError: It cannot be read.
        """
        with disk_errors(self.final):
            data = self.final.read_bytes()
        if len(data) > MAX_WHOLE_BYTES:
            log.warning("the model has %d MiB: too many to send it to the devices", len(data) >> 20)
            return {}
        return {"model": data}

    def add_export(self, job: Job, number: int) -> bool:
        """Add the model's file without its weights to the assets, if devices are to have it and it is not
        there yet. Before the model has made its first step there is nothing to keep.

        Args:
            job: as it began.
            number: of the round that opens.

        Returns:
            Whether it was added.
        """
        if not self._settings.current_models or "export" in self.assets or number <= self.first_round:
            return False
        data = with_metadata(self._without_weights(self.spec), self._metadata(job))
        if len(data) > MAX_WHOLE_BYTES:
            log.warning("the model has %d MiB: too many for devices to keep each round's", len(data) >> 20)
            return False
        self.assets["export"] = data
        return True

    def of_round(self, number: int) -> Path:
        """Path of the model after a round."""
        return self._directory / "models" / f"round-{number:04d}.onnx"

    def write(
        self,
        path: Path,
        weights: NDArray[np.float32],
        job: Job,
        number: int,
        spent: Sequence[BudgetStatement],
        *,
        insecure: str = "",
    ) -> None:
        """Write the model after round ``number`` with the metadata that its users need.

        Args:
            path: of the file.
            weights: (parameters,).
            job: as it began.
            number: of the last round.
            spent: what the rounds have spent, the job's own guarantee first (:mod:`coordinator.columns`).
            insecure: why nothing is guaranteed, whatever was spent; empty where that is not so.
        """
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        metadata = self._metadata(job) | _spent_by(number, spent)
        if insecure:
            metadata |= _insecure(insecure, spent[0])
        write_atomically(path, with_metadata(self._filled(self.spec, weights), metadata))

    def accuracy(self, weights: NDArray[np.float32]) -> float | None:
        """The accuracy alone; see :meth:`evaluate`."""
        found = self.evaluate(weights)
        return None if found is None else found.accuracy

    def evaluate(self, weights: NDArray[np.float32]) -> Evaluation | None:
        """How the exported model does on the test data, in ONNX Runtime; None without test data.

        A front end runs once on the test data, and its features are kept; each call exports and runs
        only the layers.
        """
        if self._test is None:
            return None
        if self._features is None:
            self._features = self._test
            if self.spec.front_end:
                front_end = FrontEnd(self.spec, self.front_end_assets)
                self._features = FeatureSet(self._test, front_end, self._directory)
        # Who has no test data spares the memory of ONNX Runtime, a fifth of what a coordinator takes.
        from dpagent.learning.inference.onnx_evaluator import OnnxEvaluator

        return OnnxEvaluator(self._filled(self.spec.head, weights)).evaluate(self._features)

    def _filled(self, spec: ModelSpec, weights: NDArray[np.float32]) -> bytes:
        """A file of the model, or of its layers, with weights, and without metadata.

        Raises:
            ParameterError: they are not finite.
        """
        if not np.isfinite(weights).all():
            raise ParameterError(
                f"{np.count_nonzero(~np.isfinite(weights))} of the weights are not finite; expected none."
                " The training diverged: export an earlier round."
            )
        return with_weights(self._without_weights(spec), spec, weights)

    def _without_weights(self, spec: ModelSpec) -> bytes:
        if spec not in self._unfilled:
            # Directions of a projection are known before any model that needs them.
            assets = {} if spec == self.spec.head else self.front_end_assets
            self._unfilled[spec] = unfilled_model(spec, assets)
        return self._unfilled[spec]

    @property
    def front_end_assets(self) -> dict[str, bytes]:
        """The assets that a front end takes, by role."""
        return {role: self.assets[role] for role in self.assets.keys() - {"training-graph", "export"}}

    def _metadata(self, job: Job) -> dict[str, str]:
        """What the users of any round's model need."""
        privacy = self._settings.privacy
        statement = job.noise.mechanism.job_statement(privacy.epsilon, privacy.delta)
        metadata = {
            "dpagent.job": job.id.hex(),
            "dpagent.job_name": self.name,
            "dpagent.model": self.spec.name,
            ARCHITECTURE_KEY: json.dumps(self.spec.describe()),
            "dpagent.privacy": statement.sentence(),
            "dpagent.privacy_statement": json.dumps(statement.as_dict(), ensure_ascii=False),
            "dpagent.preprocessing": (
                "input: float32, channels last; images in [0, 1] (uint8 divided by 255). "
                "Offset and scale are part of the graph."
            ),
        }
        if self._class_names:
            metadata["dpagent.classes"] = json.dumps(list(self._class_names), ensure_ascii=False)
        if self._inputs is not None:
            metadata[METADATA_KEY] = self._inputs.text()
        return metadata


def _spent_by(number: int, spent: Sequence[BudgetStatement]) -> dict[str, str]:
    """What the model after a round has cost, the job's own guarantee first."""
    metadata = {
        "dpagent.round": str(number),
        "dpagent.spent": json.dumps([column.as_dict() for column in spent], ensure_ascii=False),
    }
    if spent[0].is_guarantee:
        metadata["dpagent.epsilon_spent"] = repr(spent[0].epsilon)
    return metadata


def _insecure(why: str, own: BudgetStatement) -> dict[str, str]:
    """In place of a guarantee."""
    return {
        "dpagent.insecure": why,
        "dpagent.privacy": own.sentence(),
        "dpagent.privacy_statement": json.dumps(own.as_dict(), ensure_ascii=False),
    }


def _inputs_of(settings: FleetSettings, spec: ModelSpec, test_inputs: InputForm | None) -> InputForm | None:
    """What the inputs are: as the operator says, and else as the test data are."""
    given = settings.model.inputs
    if given is None:
        return test_inputs
    if misfit := given.misfit(spec.input_shape):
        raise ConfigurationError(f"model.inputs: {misfit}. Correct it, or choose another model.")
    for key, expected, value in [] if test_inputs is None else given.differences(test_inputs):
        raise ConfigurationError(
            f"model.inputs.{key} is {expected!r}, and test_data.{key} is {value!r}; expected the same, or "
            "the model would be tested on other inputs than it is used for."
        )
    return given
