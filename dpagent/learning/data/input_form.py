"""What the inputs of a model are, whatever file they come from: the form of records in each format.

It stands in ``fleet.yaml`` (``model.inputs``), goes with the model's file as one entry of its metadata, and
is applied to what the model is asked about. Without it, rows that are not scaled as those of training get
wrong answers, and nothing shows it. The metadata may be anyone's: they are of bounded size, and checked.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, Self

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.opening import section_of
from dpagent.learning.data.record_form import Difference, RecordForm
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings
from dpagent.schema.base import with_fields
from dpagent.schema.problems import SchemaError
from dpagent.settings import Settings
from dpagent.wording import named

METADATA_KEY: Final = "dpagent.inputs"
"""Under which a model's file has it."""
_VERSION: Final = 1
_MOST_CHARACTERS: Final = 4 << 20


def with_forms(schema: type[InputForm]) -> type[InputForm]:
    """``schema`` with a section for the form of each registered format that has one."""
    forms: dict[str, Any] = {
        kind: (known.form | None, None) for kind, known in FORMATS.items() if known.form is not None
    }
    return with_fields(schema, **forms)


@with_forms
class InputForm(Settings):
    """What the inputs of a model are, by the format that they come in. All of it is public.

    >>> form = InputForm.checked({"csv": {"features": ["ax", "ay"], "scale": 10, "window": 64}})
    >>> InputForm.parse(form.text()) == form
    True
    >>> form.misfit((64, 3))
    'csv makes records of shape (64, 2), and the model takes (64, 3)'
    """

    @classmethod
    def of(cls, settings: DatasetSettings) -> Self | None:
        """The form of records as declared, or None where no setting makes them what they are."""
        known = FORMATS.get(settings.kind)
        if known is None or known.form is None:
            return None
        return cls.checked({known.kind: known.form.of(section_of(settings, known))})

    @classmethod
    def parse(cls, text: str) -> Self:
        """The form in the metadata of a model's file.

        Raises:
            DataError: it is none.
        """
        if len(text) > _MOST_CHARACTERS:
            raise DataError(f"it has {len(text):,} characters; expected at most {_MOST_CHARACTERS:,}")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise DataError(f"got {text[:80]!r}; expected a JSON object")
        version = value.pop("version", None)
        if version != _VERSION:
            # Anything may stand there, and what it looks like may be as long as the metadata.
            which = f"version {str(version)[:20]}" if isinstance(version, int | float) else "no version"
            raise DataError(f"it is of {which}; expected version {_VERSION}. Update dpagent")
        try:
            return cls.checked(value)
        except SchemaError as error:
            raise DataError(error.first.sentence()) from error

    def text(self) -> str:
        """As the metadata of a model's file have it."""
        return json.dumps({"version": _VERSION} | self.as_dict(only_set=True), ensure_ascii=False)

    def of_kind(self, kind: str) -> RecordForm | None:
        """The form of records in a format."""
        form: RecordForm | None = getattr(self, kind, None)
        return form

    def misfit(self, shape: tuple[int, ...]) -> str:
        """Why these cannot be the inputs of a model that takes ``shape``, without a full stop; or nothing."""
        for kind in type(self).names:
            if (form := self.of_kind(kind)) is None:
                continue
            if (given := form.record_shape) is None:
                return f"{kind} does not settle what a record is"
            if math.prod(given) != math.prod(shape):
                return f"{kind} makes records of shape {given}, and the model takes {shape}"
        return ""

    def differences(self, other: InputForm) -> list[Difference]:
        """The settings by which records are others in ``other``, in formats that both speak of."""
        found = []
        for kind in type(self).names:
            one, two = self.of_kind(kind), other.of_kind(kind)
            if one is not None and two is not None:
                found += _below(kind, one.differences(two, one.compared))
        return found

    def require_same(self, settings: DatasetSettings, model: str) -> None:
        """Refuse settings of data that contradict the form; what is not set is open.

        Args:
            settings: of data.
            model: the name of the model, for the sentence.

        Raises:
            ConfigurationError: naming the first.
        """
        for kind in type(self).names:
            form, section = self.of_kind(kind), getattr(settings, kind)
            if form is None:
                continue
            given = type(form).of(section)
            for key, expected, value in _below(kind, form.differences(given, section.given)):
                trained = "without" if expected is None else f"with {named(key, expected)}"
                raise ConfigurationError(
                    f"{named(key, value)} is given, and model {model!r} was trained {trained}, as its file"
                    f" says. Leave {named(key)} out."
                )

    def completed(self, settings: DatasetSettings, kind: str, shape: tuple[int, ...]) -> DatasetSettings:
        """``settings`` with all that the form says of records in a format.

        Args:
            settings: that do not contradict it.
            kind: of the format.
            shape: of the model's inputs.

        Raises:
            ConfigurationError: they do not go together.
        """
        form = self.of_kind(kind)
        if form is None:
            return settings
        section = getattr(settings, kind)
        values = form.as_dict(only_set=True) | section.as_dict(only_given=True)
        try:
            whole = type(section).checked(values)
        except SchemaError as error:
            raise ConfigurationError(
                f"With what the model says of its inputs: {error.first.complaint()}."
            ) from error
        return settings.with_values({kind: whole, "shape": settings.shape or list(shape)})


def _below(kind: str, found: list[Difference]) -> list[Difference]:
    return [one._replace(key=f"{kind}.{one.key}") for one in found]
