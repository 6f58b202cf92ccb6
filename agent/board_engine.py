"""The engine that computes gradients on this board: told, kept from the last start, or tried."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from pathlib import Path
from typing import Final

import numpy as np

from agent.engine_file import EngineFile, KeptChoice
from agent.marked_log import PRIVATE
from agent.training_messages import UsedProcessError
from agent.training_settings import TrainingSettings
from dpagent.errors import ParameterError, StorageError, require_count
from dpagent.extras import ONNX_RUNTIME
from dpagent.learning.training.bounds import MAX_PROCESSES
from dpagent.learning.training.engine import Engine
from dpagent.learning.training.engine_choice import (
    Bench,
    EngineKind,
    Trial,
    UnsuitableEngineError,
    choose_engine,
    parallel,
    preferred,
)
from dpagent.norm import Norm
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.task import RoundTask
from dpagent.wording import counted

log = logging.getLogger(__name__)

_KINDS: Final[dict[str, EngineKind]] = {"numpy": "numpy", "onnx": "onnx"}


class BoardEngine:
    """Makes the engine for a round, and keeps it for the next ones that need the same.

    Args:
        settings: of training on this board.

    Attributes:
        purpose: a digest of what the last engine is for; empty before the first.
        may_try: whether this process may try engines. One that has read records may not: which engine a trial
            finds, and whether the round is declined, would depend on what they have left in its memory.
    """

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self._engine: Engine | None = None
        self.purpose, self.may_try = "", True

    def of(self, task: RoundTask, graph: bytes | None) -> Engine:
        """The engine for a round, made when it is for another purpose than before.

        Args:
            task: of the round.
            graph: its training graph, or None.

        Raises:
            UsedProcessError: engines are to be tried, and this process may not.
            ConfigurationError: the board has not the engine that it was told to use.
        """
        views, groups, norm = 1, 1, Norm.L2
        if isinstance(release := task.release, NoisySum):
            views = 1 if release.augmentation is None else release.augmentation.views
            groups, norm = len(release.clipping.norms), release.mechanism.norm
        bench = Bench(
            spec=task.spec.head,
            graph=graph,
            microbatch=self._settings.microbatch,
            processes=self._settings.processes,
            memory_mib=self._settings.engine_memory_mib,
            trusted=self._settings.trusted_graphs,
            views=views,
            groups=groups,
            norm=norm,
            processor_share=self._settings.processor_share,
        )
        purpose = _purpose(bench)
        if self._engine is None or self.purpose != purpose or not _is_whole(self._engine):
            if (several := parallel(self._engine)) is not None:
                several.close()
            self._engine, self.purpose = self._make(bench, purpose), purpose
        return self._engine

    def _make(self, bench: Bench, purpose: str) -> Engine:
        """The configured engine, the one chosen before, or the one that a trial finds."""
        file = EngineFile(self._settings.state_dir)
        told = self._settings.engine
        kinds = [_KINDS[told]] if told in _KINDS else [*_KINDS.values()]
        is_given = len(kinds) == bench.processes == 1 and bench.memory_mib is None
        choice = (kinds[0], 1) if is_given else _choice_kept(file, purpose)
        if choice is not None and choice[0] in kinds:
            try:
                return bench.make(*choice)
            except UnsuitableEngineError:
                if len(kinds) == 1:
                    raise
        if not self.may_try:
            raise UsedProcessError(f"an engine for {bench.spec.name} is tried in a new training process")
        engine, trials = choose_engine(bench, kinds)
        best = preferred(trials)
        results = "; ".join(map(_result, trials))
        log.info("engine for %s: %s (%s)", bench.spec.name, best.kind, results)
        try:
            file.save(purpose, KeptChoice(best.kind, best.processes))
        except StorageError as error:  # How full the disk is must not show: records may lie on it.
            log.warning("the choice of the engine is made again at the next start: %s", error, extra=PRIVATE)
        return engine


def _is_whole(engine: Engine) -> bool:
    return (several := parallel(engine)) is None or several.is_whole


def _result(trial: Trial) -> str:
    if trial.why_not:
        return f"{trial.kind}: {trial.why_not}"
    return f"{trial.kind}: {trial.examples_per_s:,.0f} examples/s in {counted(trial.processes, 'process')}"


def _purpose(bench: Bench) -> str:
    """The key of an engine choice: another model, limit or package needs a new trial."""
    graph = b"" if bench.graph is None else hashlib.sha256(bench.graph).digest()
    what = (
        bench.spec.digest().hex(),
        graph.hex(),
        bench.microbatch,
        bench.processes,
        bench.memory_mib,
        bench.views,
        bench.groups,
        bench.norm,
    )
    return hashlib.sha256(repr((what, np.__version__, _onnx_runtime())).encode()).hexdigest()


def _onnx_runtime() -> str:
    """Which one is installed: packages of several names (``onnxruntime-gpu``) have the same module, and so
    has a board's own build, which may be of none."""
    if (found := importlib.util.find_spec(ONNX_RUNTIME)) is None:
        return "absent"
    (module, *_) = map(Path, found.submodule_search_locations or [str(found.origin)])
    packages = sorted(file.name for file in module.parent.glob(f"{ONNX_RUNTIME}*.*-info"))
    libraries = sorted((file.name, file.stat().st_size) for file in module.glob("capi/*.so*"))
    return repr((packages, libraries))


def _choice_kept(file: EngineFile, purpose: str) -> tuple[EngineKind, int] | None:
    """The kind and its processes; the purpose says how many there may be at most."""
    if (kept := file.load(purpose)) is None:
        return None
    try:
        return _KINDS[kept.engine], require_count("processes", kept.processes, maximum=MAX_PROCESSES)
    except (KeyError, ParameterError):
        return None
