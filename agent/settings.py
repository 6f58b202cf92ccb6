"""``agent.yaml``: the integrator's settings for one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from agent.charges import Budget
from agent.columns import account_name
from agent.data_settings import DataSettings
from agent.governor_settings import GovernorSettings
from agent.heads import LedgerFiles, second_head_beside
from agent.home_assistant_settings import HomeAssistantSettings
from agent.limit_settings import LimitSettings
from agent.profile import AUTO, Profile, is_profile_path
from agent.serve_settings import ServeSettings
from dpagent.configuration import load_settings, resolve
from dpagent.errors import ConfigurationError
from dpagent.overrides import Override
from dpagent.privacy.statement import Trust
from dpagent.protocol.signing import CoordinatorKey
from dpagent.protocol.topics import FleetName
from dpagent.schema.base import rule
from dpagent.schema.limits import Limits
from dpagent.settings import FilePath, Settings
from dpagent.storage import real_path
from dpagent.transport.settings import MqttSettings

Sha256 = Annotated[str, Limits(pattern="^[0-9a-f]{64}$")]


class TrustingBudgetSettings(Settings):
    """The lifetime budget of the jobs whose guarantee trusts a party."""

    epsilon: Annotated[float, Limits(gt=0, le=1000)]
    """Lifetime ε for the device as a whole."""
    delta: Annotated[float, Limits(gt=0, lt=1)]
    """Lifetime δ; each job takes its own δ from it."""


class BudgetSettings(Settings):
    """The lifetime budget of the data, over all jobs and coordinators."""

    epsilon: Annotated[float, Limits(gt=0, le=1000)]
    """Lifetime ε for each record."""
    delta: Annotated[float, Limits(gt=0, lt=1)]
    """Lifetime δ; each job takes its own δ from it. Choose it well below one over the number of records."""
    coordinator: TrustingBudgetSettings | None = None
    """A second budget, of jobs that trust the coordinator (``limits.trust``), against everybody else. Without
    it, the device declines them. ``epsilon`` and ``delta`` above say nothing of them."""


class LedgerSettings(Settings):
    """The record of what the data have cost, in ``state_dir``."""

    second_head: FilePath | None = None
    """File that records how far the ledger has come, so that an older copy of ``state_dir`` is noticed;
    relative to this file. Default: ``state_dir`` with ``.head`` added to its name, which the agent can write
    and a backup of ``state_dir`` does not contain. If you back up more than that, give a place that this
    backup leaves out: another disk or partition, which the agent may write."""


class ModelFileSettings(Settings):
    """Which models of the fleet this board keeps for its own use, and where."""

    keep: Literal["finished", "current"] = "finished"
    """``finished``: the model of a finished job. ``current``: while a job goes on, also the model of its
    round, at most one in ten minutes, if the coordinator's fleet.yaml sets ``current_models``."""
    file: FilePath | None = None
    """File that the model is written to (ONNX), replaced in one step; relative to this file. The
    one before stays beside it, with ``.previous`` in its name. Default: ``model.onnx`` in ``state_dir``."""
    command: tuple[str, ...] = ()
    """Program and arguments to run when the file has changed, with its path as the last argument; it has at
    least 60 seconds, without the times in which a round is decided on or trains: as it may read records, it
    is stopped then (``SIGSTOP``). So it is with all that it leaves running: what is to go on has to leave its
    process group (``setsid``), and must not read records. Nothing is run by default."""

    @property
    def reader(self) -> str | None:
        """What may read records besides the agent, by its name here."""
        return "model.command" if self.command else None


class MembershipSettings(Settings):
    """How the board renews its certificate, ``mqtt.cert_file``. Written by ``dpagent enrol``."""

    url: Annotated[str, Limits(pattern=r"^https://[A-Za-z0-9.:\[\]-]+$", max_length=300)]
    """The fleet's enrolment endpoint, ``https://host[:port]``."""
    ca_file: FilePath
    """The fleet's certificate authority (PEM), relative to this file."""


class AgentSettings(Settings):
    """Everything in ``agent.yaml``."""

    fleet: FleetName
    """The fleet this device belongs to."""
    coordinator_key: CoordinatorKey
    """The coordinator's public key, as ``dpagent coordinator key`` prints it."""
    state_dir: FilePath = Path("state")
    """Directory of the ledger and the spool, relative to this file. ``dpagent budget init`` begins the
    ledger."""
    data: DataSettings
    budget: BudgetSettings
    ledger: LedgerSettings = LedgerSettings()
    model: ModelFileSettings = ModelFileSettings()
    serve: ServeSettings = ServeSettings()
    home_assistant: HomeAssistantSettings | None = None
    mqtt: MqttSettings = MqttSettings()
    enrolment: MembershipSettings | None = None
    profile: Annotated[str, Limits(min_length=1)] = AUTO
    """A board, as ``dpagent profiles list`` names it, or the path of your own profile, relative to this file.
    ``auto``: the one that ``dpagent profiles detect`` finds."""
    limits: LimitSettings = LimitSettings()
    governor: GovernorSettings = GovernorSettings()
    engine: Literal["auto", "numpy", "onnx"] = "auto"
    """The engine that computes gradients; ``auto`` measures both on this board, and keeps ``onnx`` if that is
    half as fast again, since it takes 45 MiB more, else ``numpy``. By default the profile's."""
    trusted_graphs: tuple[Sha256, ...] = ()
    """SHA-256 of ONNX files from the coordinator that the device may run: training graphs other than those of
    the built-in models (``dpagent model graph`` prints the digest) and frozen networks of front ends
    (``dpagent model show`` prints it). A graph determines the clipping, a network the features of a record:
    trust only graphs that you have built yourself, and networks that you have inspected."""

    @rule
    def _trust_has_a_budget(self) -> None:
        if Trust.COORDINATOR in self.limits.trust and self.budget.coordinator is None:
            raise ValueError(
                "limits.trust has coordinator, and budget.coordinator is not set; expected the ε and δ that "
                "jobs which trust the coordinator may spend"
            )

    @property
    def ledger_files(self) -> LedgerFiles:
        """Where the ledger is."""
        beside = second_head_beside(self.state_dir)
        return LedgerFiles(self.state_dir, self.ledger.second_head or beside)

    @property
    def model_file(self) -> Path:
        """Where the latest model is, as ``model.keep`` has it."""
        return self.model.file or self.state_dir / "model.onnx"

    @property
    def lifetime_budgets(self) -> dict[str, Budget]:
        """The budgets of the data, by the ledger's name of the account (:mod:`agent.columns`)."""
        budgets = {self.data.name: Budget(self.budget.epsilon, self.budget.delta)}
        if (trusting := self.budget.coordinator) is not None:
            account = account_name(self.data.name, Trust.COORDINATOR)
            budgets[account] = Budget(trusting.epsilon, trusting.delta)
        return budgets


def on_board(settings: AgentSettings, profile: Profile) -> AgentSettings:
    """The settings of an agent on a board: its profile's where ``agent.yaml`` is silent."""
    limits = profile.limits.as_dict(only_given=True) | settings.limits.as_dict(only_given=True)
    governor = profile.governor.as_dict(only_given=True) | settings.governor.as_dict(only_given=True)
    data = settings.data
    if data.max_records is None:
        data = data.with_values({"max_records": profile.max_records})
    engine = settings.engine if "engine" in settings.given else profile.engine
    return settings.with_values(
        {
            "limits": LimitSettings.checked(limits),
            "governor": GovernorSettings.checked(governor),
            "data": data,
            "engine": engine,
        }
    )


def load_agent_settings(file: Path, overrides: Sequence[Override] = ()) -> AgentSettings:
    """Read ``agent.yaml`` with its paths, and those of overrides, made relative to it.

    Raises:
        ConfigurationError: Something in the file or the overrides is wrong; see :func:`load_settings`.
    """
    settings = load_settings(file, AgentSettings, overrides=overrides)
    second_head = settings.ledger.second_head and resolve(settings.ledger.second_head, file)
    settings = settings.with_values(
        {
            "state_dir": resolve(settings.state_dir, file),
            "ledger": LedgerSettings(second_head=second_head),
            "model": settings.model.with_values(
                {"file": settings.model.file and resolve(settings.model.file, file)}
            ),
            "serve": settings.serve.resolved(file),
            "home_assistant": settings.home_assistant and settings.home_assistant.resolved(file),
            "data": settings.data.with_values({"path": resolve(settings.data.path, file)}),
            "mqtt": settings.mqtt.resolved(file),
            "enrolment": settings.enrolment
            and settings.enrolment.with_values({"ca_file": resolve(settings.enrolment.ca_file, file)}),
            "profile": str(resolve(Path(settings.profile), file))
            if is_profile_path(settings.profile)
            else settings.profile,
        }
    )
    files = settings.ledger_files
    if real_path(files.second_head).is_relative_to(real_path(files.state_dir)):
        names = [each.source for each in overrides if each.key[0] in ("ledger", "state_dir")]
        where = ", ".join([str(file), *names])
        raise ConfigurationError(
            f"{where}: ledger.second_head: {files.second_head} is in the state directory "
            f"{files.state_dir}; expected a place that a copy of that directory does not contain."
        )
    return settings
