"""The section ``data`` of ``agent.yaml``: the device's records, and what decoding them may take."""

from __future__ import annotations

from typing import Annotated

from dpagent.learning.data.settings import DatasetSettings
from dpagent.schema.limits import Limits
from dpagent.settings import Settings


class DecodingSettings(Settings):
    """Limits on decoding one picture, or one row of a table; a record beyond them is left out."""

    memory_mib: Annotated[int, Limits(ge=1, le=1 << 20)] | None = None
    """Memory besides the program itself. Default: for pictures 20 bytes for each of ``images.max_pixels`` and
    96 MiB, for tables 64 MiB."""
    seconds: Annotated[float, Limits(gt=0, le=60)] | None = None
    """Processor time. Default: 5 for a picture, 0.2 for a row of a table. While the agent runs, a record that
    is not decoded after 3.6 times as long by the clock is left for the next look (at once, after thirty
    times), and it takes in at most 240 seconds' worth of new records every fifteen minutes, at twice this
    price each."""


class DataSettings(DatasetSettings):
    """The data that stay on the device."""

    name: Annotated[str, Limits(min_length=1, max_length=128, pattern="^[^@]*$")]
    """The ledger's name for these records, without an ``@``. The lifetime budget belongs to it."""
    features_mib: Annotated[int, Limits(ge=0, le=1 << 24)] = 0
    """Room in ``state_dir`` for the features of models with a front end, taken when the agent starts. A plan
    that needs more for ``max_records`` records is declined; ``dpagent model show`` prints what a model
    needs."""
    decoding: DecodingSettings = DecodingSettings()
