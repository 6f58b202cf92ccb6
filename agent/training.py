"""Training on this board: the records, their features and the engine, kept from round to round."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.admission import Declined
from agent.noisy_sums import noisy_gradients, noisy_moments
from agent.profile import Profile
from agent.records import Records
from agent.settings import AgentSettings
from dpagent.errors import StorageError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.front_end.features import FeatureSet, FrontEnd
from dpagent.learning.models.stages import FrozenNetwork
from dpagent.learning.training.engine import Engine, accumulation_slack
from dpagent.learning.training.engine_choice import Bench, EngineKind, UnsuitableEngineError, choose_engine
from dpagent.protocol.messages import Plan
from dpagent.protocol.task import RoundTask
from dpagent.storage import write_atomically
from dpagent.wording import counted

log = logging.getLogger(__name__)

_KINDS: Final[dict[str, EngineKind]] = {"numpy": "numpy", "onnx": "onnx"}


class Trainer:
    """The device's work in a round, between the plan and the ledger.

    Args:
        settings: ``agent.yaml``.
        profile: The board's.

    Raises:
        ConfigurationError, DataError: The records cannot be opened.
    """

    def __init__(self, settings: AgentSettings, profile: Profile) -> None:
        self._settings, self._profile = settings, profile
        self.records = Records(settings.data)
        self._engine: Engine | None = None
        self._engine_is_for = ""
        self._front_end: FrontEnd | None = None
        self._features: FeatureSet | None = None
        self._features_are_of: Dataset | None = None

    def needed_assets(self, plan: Plan) -> set[str]:
        """Roles of the assets that a round needs, for correctness or speed."""
        return {
            asset.role
            for asset in plan.assets
            if asset.role != "training-graph" or self._settings.engine != "numpy"
        }

    def noisy_update(
        self, task: RoundTask, assets: Mapping[str, bytes], weights: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """The round's noisy sum over the readable records, in wire units, shape (dimension,).

        Raises:
            Declined: This board cannot train the model as the guarantee requires.
            ConfigurationError: It has not the engine that it was told to use, or an asset is wrong.
            DataError: The records do not fit the model.
            ParameterError: A lot is too large for the engine's bound.
            StorageError: Features or the choice of an engine cannot be stored or read.
        """
        try:
            return self._noisy_update(task, assets, weights)
        except StorageError:
            self._features_are_of = None  # recomputed the next time
            raise

    def _noisy_update(
        self, task: RoundTask, assets: Mapping[str, bytes], weights: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        self._prepare_front_end(task, assets)
        if task.second_moments is not None:
            return self.records.attempt(lambda records: noisy_moments(task, self._inputs_of(records)))
        engine = self._engine_for(task, assets.get("training-graph"))
        slack, allowed = accumulation_slack(engine.microbatch), task.plan.clipping.accumulation_slack
        if slack > allowed:
            raise Declined(
                f"microbatches of {engine.microbatch} can add {slack:.3g} to a record's influence; the "
                f"plan's noise allows for {allowed:.3g}"
            )
        return self.records.attempt(
            lambda records: noisy_gradients(task, weights, self._inputs_of(records), engine)
        )

    def _inputs_of(self, records: Dataset) -> Dataset:
        """The engine's inputs: the records, or their features."""
        if self._front_end is None:
            return records
        if self._features is None or self._features_are_of is not records:
            if self._features is not None:
                self._features.close()
                self._features = None
            log.info("computing features of %s", counted(len(records), "record"))
            self._features = FeatureSet(records, self._front_end, self._settings.state_dir)
            self._features_are_of = records
            if unusable := self._features.unusable:
                # Only for the owner of the device: the number is private.
                total = counted(len(records), "record")
                log.warning("%d of %s have no finite features and do not count", unusable, total)
        return self._features

    def _prepare_front_end(self, task: RoundTask, assets: Mapping[str, bytes]) -> None:
        spec = task.spec
        if not spec.front_end:
            self._front_end = None
            return
        for stage in spec.front_end:
            if isinstance(stage, FrozenNetwork) and stage.digest not in self._settings.trusted_graphs:
                raise Declined(
                    f"the model {spec.name} has a frozen network with the SHA-256 {stage.digest}, which is"
                    " not in trusted_graphs of agent.yaml; look at the model file with `dpagent model show`,"
                    " which checks the network and prints its digest, and add it if you trust it"
                )
        needed = {role: data for role, data in assets.items() if role != "training-graph"}
        front_end = FrontEnd(spec, needed, before_projection=task.second_moments is not None)
        if self._front_end is None or self._front_end.key != front_end.key:
            self._front_end, self._features_are_of = front_end, None

    def _engine_for(self, task: RoundTask, graph: bytes | None) -> Engine:
        bench = Bench(
            spec=task.spec.head,
            graph=graph,
            microbatch=self._profile.microbatch,
            threads=self._profile.threads,
            views=1 if task.augmentation is None else task.augmentation.views,
            groups=len(task.clipping.norms),
            trusted=self._settings.trusted_graphs,
        )
        purpose = _purpose(bench)
        if self._engine is None or self._engine_is_for != purpose:
            self._engine = self._make_engine(bench, purpose)
            self._engine_is_for = purpose
        return self._engine

    def _make_engine(self, bench: Bench, purpose: str) -> Engine:
        """The configured engine, the one chosen before, or the faster one."""
        file = self._settings.state_dir / "engine.json"
        told = self._settings.engine
        kind = _KINDS.get(told) or _choice_kept(file, purpose)
        if kind is not None:
            try:
                return bench.make(kind)
            except UnsuitableEngineError:
                if told != "auto":
                    raise
        engine, trials = choose_engine(bench)
        best = max(trials, key=lambda trial: trial.examples_per_s)
        said = "; ".join(
            f"{trial.kind}: {trial.why_not or f'{trial.examples_per_s:,.0f} examples/s'}" for trial in trials
        )
        log.info("engine for %s: %s (%s)", bench.spec.name, best.kind, said)
        write_atomically(file, json.dumps({"purpose": purpose, "engine": best.kind}).encode())
        return engine


def _purpose(bench: Bench) -> str:
    """The key of an engine choice: another model, thread count or package version needs a new trial."""
    graph = b"" if bench.graph is None else hashlib.sha256(bench.graph).digest()
    what = (
        bench.spec.digest().hex(),
        graph.hex(),
        bench.microbatch,
        bench.threads,
        bench.views,
        bench.groups,
    )
    return hashlib.sha256(repr((what, *map(_version, ("numpy", "onnxruntime")))).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _choice_kept(file: Path, purpose: str) -> EngineKind | None:
    try:
        kept = json.loads(file.read_bytes())
        return _KINDS.get(kept["engine"]) if kept["purpose"] == purpose else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
