"""``agent.yaml``: the integrator's settings for one device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from agent.charges import Budget
from agent.data_settings import DataSettings
from agent.heads import LedgerFiles, second_head_beside
from agent.profile import is_profile_path
from dpagent.configuration import FilePath, Settings, load_settings, resolve
from dpagent.errors import ConfigurationError
from dpagent.privacy.mechanisms.registry import DEFAULT_MECHANISM
from dpagent.protocol.messages import MIN_SLOT_S
from dpagent.protocol.signing import decode_public_key
from dpagent.protocol.topics import FleetName
from dpagent.transport.settings import MqttSettings


def _public_key(text: str) -> str:
    decode_public_key(text)
    return text


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class BudgetSettings(Settings):
    """The lifetime budget of the data, over all jobs and coordinators."""

    epsilon: Annotated[float, Field(gt=0, le=1000)]
    """Lifetime ε for each record."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Lifetime δ; each job takes its own δ from it. Choose it well below one over the number of records."""


class LedgerSettings(Settings):
    """The record of what the data have cost, in ``state_dir``."""

    second_head: FilePath | None = None
    """File that records how far the ledger has come, so that an older copy of ``state_dir`` is noticed;
    relative to this file. Default: ``state_dir`` with ``.head`` added to its name, which the agent can write
    and a backup of ``state_dir`` does not contain. If you back up more than that, give a place that this
    backup leaves out: another disk or partition, which the agent may write."""


class LimitSettings(Settings):
    """The device's own limits, and its traffic beyond them. It declines a plan beyond them, whoever signed
    it."""

    messages_per_second: Annotated[float, Field(gt=0, le=1000)] = 10.0
    """Maximum publications per second, including resends."""
    minimum_compute_slot_s: Annotated[float, Field(ge=MIN_SLOT_S, le=86_400)] = 5.0
    """Shortest compute slot that a plan may have, and the period of the grid on which this device acts."""
    maximum_training_s: Annotated[float, Field(gt=0, le=604_800)] = 3600.0
    """Longest that training for a round may take with the largest lot, by a trial with made-up records. The
    device publishes after as many slots as that takes, whatever the lot is."""
    minimum_jitter_window_s: Annotated[float, Field(ge=0, le=86_400)] = 5.0
    """Shortest time over which a plan may have this device spread its fragments."""
    minimum_fragments: Annotated[int, Field(ge=1, le=100_000)] = 4
    """Fewest fragments that a plan may cut an update into."""
    maximum_sampling_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest sampling rate. The price of a plan includes the rate, whatever it is."""
    maximum_job_epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Largest ε that one job may reserve; without it, all that the lifetime budget has left."""
    maximum_job_delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Largest δ of one job; without it, all that the lifetime budget has left."""
    mechanisms: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = (DEFAULT_MECHANISM,)
    """Mechanisms that this device takes part in, by name."""
    dummy_traffic: bool = False
    """Whether the device sends as many dummies, of the same size and at such times, for a round that it sits
    out, so that the broker cannot tell whether it takes part. They cost traffic and no privacy."""


class AgentSettings(Settings):
    """Everything in ``agent.yaml``."""

    fleet: FleetName
    """The fleet this device belongs to."""
    coordinator_key: Annotated[str, AfterValidator(_public_key)]
    """The coordinator's public key, as ``dpagent coordinator key`` prints it."""
    state_dir: FilePath = Path("state")
    """Directory of the ledger and the spool, relative to this file. ``dpagent budget init`` begins the
    ledger."""
    data: DataSettings
    budget: BudgetSettings
    ledger: LedgerSettings = LedgerSettings()
    mqtt: MqttSettings = MqttSettings()
    profile: Annotated[str, Field(min_length=1)] = "generic-linux"
    """A board in ``firmware_profiles/``, or the path of your own profile, relative to this file."""
    limits: LimitSettings = LimitSettings()
    engine: Literal["auto", "numpy", "onnx"] = "auto"
    """The engine that computes gradients; ``auto`` measures both on this board and keeps the faster one."""
    trusted_graphs: Annotated[tuple[Sha256, ...], Field(strict=False)] = ()
    """SHA-256 of ONNX files from the coordinator that the device may run: training graphs other than those of
    the built-in models (``dpagent model graph`` prints the digest) and frozen networks of front ends
    (``dpagent model show`` prints it). A graph determines the clipping, a network the features of a record:
    trust only graphs that you have built yourself, and networks that you have inspected."""

    @property
    def ledger_files(self) -> LedgerFiles:
        """Where the ledger is."""
        beside = second_head_beside(self.state_dir)
        return LedgerFiles(self.state_dir, self.ledger.second_head or beside)

    @property
    def lifetime_budget(self) -> Budget:
        """The budget of the data."""
        return Budget(self.budget.epsilon, self.budget.delta)


def load_agent_settings(file: Path) -> AgentSettings:
    """Read ``agent.yaml`` with its paths made relative to it.

    Raises:
        ConfigurationError: Something in the file is wrong; see :func:`load_settings`.
    """
    settings = load_settings(file, AgentSettings)
    second_head = settings.ledger.second_head and resolve(settings.ledger.second_head, file)
    settings = settings.model_copy(
        update={
            "state_dir": resolve(settings.state_dir, file),
            "ledger": LedgerSettings(second_head=second_head),
            "data": settings.data.model_copy(update={"path": resolve(settings.data.path, file)}),
            "mqtt": settings.mqtt.resolved(file),
            "profile": str(resolve(Path(settings.profile), file))
            if is_profile_path(settings.profile)
            else settings.profile,
        }
    )
    files = settings.ledger_files
    if files.second_head.resolve().is_relative_to(files.state_dir.resolve()):
        raise ConfigurationError(
            f"{file}: ledger.second_head: {files.second_head} is in the state directory {files.state_dir}; "
            "expected a place that a copy of that directory does not contain."
        )
    return settings
