"""The section ``limits`` of ``agent.yaml`` and of a board's profile."""

from __future__ import annotations

from typing import Annotated, Final

from dpagent.privacy.methods import METHODS, MethodName
from dpagent.privacy.statement import Trust
from dpagent.protocol.messages import MIN_SLOT_S, Linkability
from dpagent.protocol.mixing import MixerKey
from dpagent.schema.base import rule
from dpagent.schema.limits import Limits
from dpagent.settings import Settings

FRAGMENT_BYTES: Final = 1_200
"""Of a fragment in the database, besides its values: two rows, two places in indexes, and what its last page
has too much. 1,159 were measured at the most, with values of 231 bytes."""

_TRUST_NOBODY: Final = tuple(name for name, method in METHODS.items() if method.trust is Trust.NONE)


class LimitSettings(Settings):
    """The device's own limits, and its traffic beyond them. It declines a plan beyond them, whoever signed
    it."""

    messages_per_second: Annotated[float, Limits(gt=0, le=1000)] = 10.0
    """Maximum fragments per second on average, including resends, and as many probes besides. How long each
    waits for its turn is random, so twice as many may leave in one second."""
    minimum_compute_slot_s: Annotated[float, Limits(ge=MIN_SLOT_S, le=86_400)] = 5.0
    """Shortest compute slot that a plan may have, and the period of the grid on which this device acts; its
    first connection waits for the end of a period, or of 5 s."""
    maximum_training_s: Annotated[float, Limits(gt=0, le=604_800)] = 3600.0
    """Longest that training for a round may take with the largest lot, by a trial with made-up records. The
    device publishes after as many slots as that takes, whatever the lot is."""
    minimum_jitter_window_s: Annotated[float, Limits(ge=0, le=86_400)] = 5.0
    """Shortest time over which a plan may have this device spread its fragments."""
    minimum_fragments: Annotated[int, Limits(ge=1, le=100_000)] = 4
    """Fewest fragments that a plan may cut an update into; one of fewer values has one for each."""
    maximum_fragments: Annotated[int, Limits(ge=1, le=100_000)] = 4_096
    """Most fragments that a plan may cut an update into, as many as coordinators can ask for. Each takes
    up to 1,200 bytes of disk besides its values."""
    maximum_update_mib: Annotated[int, Limits(ge=1, le=256)] = 8
    """Most that the fragments of an update may take on disk, with 1,200 bytes for each besides its values.
    The agent takes two and a half times as much when it starts, so that no round asks the disk for room."""
    maximum_model_mib: Annotated[int, Limits(ge=1, le=800)] = 128
    """Most that weights and assets of a plan may take together. The agent holds them up to three times, and
    keeps nothing of a larger model."""
    maximum_sampling_rate: Annotated[float, Limits(gt=0, le=1)] = 1.0
    """Largest sampling rate. The price of a plan includes the rate, whatever it is."""
    maximum_job_epsilon: Annotated[float, Limits(gt=0, le=1000)] | None = None
    """Largest ε that one job may reserve; without it, all that the lifetime budget has left."""
    maximum_job_delta: Annotated[float, Limits(gt=0, lt=1)] | None = None
    """Largest δ of one job; without it, all that the lifetime budget has left."""
    maximum_charges: Annotated[int, Limits(ge=1, le=10_000_000)] = 10_000
    """Most charges, one for each round and account, that the ledger takes in the device's life. Each has 1.9
    kB on disk, which the agent takes when it first starts, and is priced again at each start. With
    `dummy_traffic`, also the most jobs that it takes part in or sits out: it remembers each, and is silent in
    any further one."""
    methods: Annotated[tuple[MethodName, ...], Limits(min_length=1)] = _TRUST_NOBODY
    """Methods that this device takes part in, by name (``dpagent methods list``); by default all that trust
    nobody."""
    trust: Annotated[tuple[Trust, ...], Limits(min_length=1)] = (Trust.NONE,)
    """The parties that a job's guarantee may rest on: ``none`` is a guarantee that rests on nobody."""
    linkability: Annotated[tuple[Linkability, ...], Limits(min_length=1)] = ("fragment", "none")
    """What a plan's tokens may let the coordinator link: ``fragment`` and ``none`` nothing, ``round`` which
    fragments of a round are one board's."""
    mixer_keys: tuple[MixerKey, ...] = ()
    """Public keys of mixers that this device's owner trusts not to work with the coordinator. A plan that
    names another mixer is declined, unless the list is empty: then nothing is claimed of any mixer."""
    require_mixer: bool = False
    """Whether a plan without one of ``mixer_keys`` is declined."""
    allow_unproven: bool = False
    """Whether this device runs rounds that guarantee nothing (`cap.kind: published`). The first one ends the
    privacy budget of its records for good: no other job is admitted on them. For data that are not private
    alone."""
    dummy_traffic: bool = False
    """Whether the device sends as many dummies, of the same size and at such times, for a round that it sits
    out, so that the broker cannot tell whether it takes part. They cost traffic and the work of a round, and
    no privacy."""

    @rule
    def _required_mixer_is_known(self) -> None:
        if self.require_mixer and not self.mixer_keys:
            raise ValueError(
                "require_mixer is true and mixer_keys is empty; expected the keys of mixers that you trust, "
                "as `dpagent mixer key` prints them"
            )
