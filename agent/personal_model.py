"""The board's own model: that of the fleet, trained on with the board's records, in a file beside it."""

from __future__ import annotations

from pathlib import Path

from agent.governor import require_public_room
from agent.latest_model import personal_of
from agent.model_keeping import disagreements
from agent.personal_scratch import scratch_in
from agent.priority import give_way_to_all
from agent.profile import open_profile
from agent.settings import AgentSettings, on_board
from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.opening import open_declared
from dpagent.learning.inference.personal import Personalised, Recipe, personalise
from dpagent.storage import disk_errors, write_atomically


def personalise_board(settings: AgentSettings, recipe: Recipe) -> tuple[Personalised, Path | None]:
    """Train the latest model on with the board's records; keep what is no worse on others of them.

    Args:
        settings: ``agent.yaml``.
        recipe: how.

    Returns:
        What came of it, and its file; None if it is not kept.

    Raises:
        DataError: there is no model yet, or model or records cannot be used for that.
        ConfigurationError: the data are declared to be others than the model was trained on; or the board
            trains, or does not, by how full the disk is.
        StorageError: the disk is full.
    """
    give_way_to_all()
    settings = on_board(settings, open_profile(settings.profile).profile)
    require_public_room(
        settings.governor, settings.state_dir, settings.data.path, reader="`dpagent personalise`"
    )
    file = settings.model_file
    with disk_errors(file):
        model = file.read_bytes() if file.exists() else None
    if model is None:
        raise DataError(f"There is no model yet: {file} comes when a job of the fleet is finished.")
    if odd := disagreements(model, settings.data):
        raise ConfigurationError(f"{odd[0]}. Correct agent.yaml, or ask the operator.")
    dataset = open_declared(settings.data)
    with disk_errors(settings.state_dir):
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with scratch_in(settings.state_dir) as scratch:
        found = personalise(model, dataset, recipe, scratch)
    if found.after < found.before:
        return found, None
    target = personal_of(file)
    write_atomically(target, found.model, mode=0o600)
    return found, target
