"""Pictures made as a model takes them."""

from __future__ import annotations

from typing import Final

from dpagent.learning.data.opening import recognise
from dpagent.learning.data.settings import DatasetSettings, ImageSettings
from dpagent.learning.models.spec import ModelSpec

_MODES: Final = {1: "grey", 3: "rgb"}


def with_form_of(settings: DatasetSettings, spec: ModelSpec) -> DatasetSettings:
    """``settings`` with size and mode of pictures as the model takes them, where they are left open.

    Raises:
        DataError: The data are of no known kind.
    """
    if settings.shape is not None or len(spec.input_shape) != 3 or spec.input_shape[2] not in _MODES:
        return settings
    if (recognise(settings.path) if settings.kind == "auto" else settings.kind) != "images":
        return settings
    height, width, channels = spec.input_shape
    given = settings.images.model_dump(exclude_none=True)
    images = ImageSettings.model_validate({"size": [width, height], "mode": _MODES[channels]} | given)
    return DatasetSettings.model_validate(
        settings.model_dump(exclude_unset=True) | {"images": images.model_dump()}
    )
