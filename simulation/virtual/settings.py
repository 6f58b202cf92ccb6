"""A run of a virtual fleet: the request, and the run with every value settled."""

from __future__ import annotations

from typing import ClassVar, Final

from simulation.request import Request, Seed
from simulation.settings import RunSettings

_INSECURE: Final = (
    "All lots and all noise of this run were drawn from --insecure-noise-seed {seed}: whoever knows the seed "
    "can take the noise off. Nothing is guaranteed, and no model of this run may leave."
)


class VirtualRequest(Request):
    """A run that is asked for. ``engine``, ``mixer`` and the jitter window have no meaning in it."""

    baseline: bool = False
    insecure_noise_seed: Seed | None = None
    """Draws lots and noise from this seed, so that a run can be repeated to the bit; None: from the operating
    system."""


class VirtualSettings(RunSettings):
    """A run, every value settled."""

    insecure_noise_seed: Seed | None = None

    FILE: ClassVar[str] = "simulation.json"

    @property
    def insecure(self) -> str:
        """As of :class:`~simulation.settings.RunSettings`."""
        seed = self.insecure_noise_seed
        return "" if seed is None else _INSECURE.format(seed=seed)

    @property
    def ledger_name(self) -> str:
        """The ledger's name for the records; it says where nothing that it adds up holds."""
        seed = self.insecure_noise_seed
        return self.data.name if seed is None else f"{self.data.name}, insecure-noise-seed {seed}"

    @classmethod
    def of(cls, settings: RunSettings, request: VirtualRequest) -> VirtualSettings:
        """The settings of a virtual fleet that trains as a fleet of programs with ``settings`` does."""
        values = {name: getattr(settings, name) for name in RunSettings.names}
        return cls.checked({**values, "insecure_noise_seed": request.insecure_noise_seed})
