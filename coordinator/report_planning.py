"""The job's plan where devices send two-point reports (``ldp-fl``)."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.settings import FleetSettings
from dpagent.errors import ConfigurationError
from dpagent.learning.models.spec import ModelSpec
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds, calibrated_reports
from dpagent.protocol.messages import MAX_PAYLOAD_BYTES, WireTerms
from dpagent.protocol.sizes import packed_bytes, report_width
from dpagent.protocol.terms import ReportTerms, TrainingTerms


def report_rounds(settings: FleetSettings, spec: ModelSpec) -> tuple[TwoPointRounds, tuple[float, ...]]:
    """The reports that spend the target over the rounds, and the ε that each round brings it to.

    Raises:
        ConfigurationError: The model has fewer weights than the settings ask for.
        PlanError: No bit can be sent for so little.
    """
    privacy, dimension = settings.privacy, spec.parameter_count
    wanted = privacy.two_point.coordinates
    if isinstance(wanted, int) and wanted > dimension:
        raise ConfigurationError(
            f"privacy.two_point.coordinates is {wanted:,}; expected at most {dimension:,}, the weights of "
            "the model."
        )
    rounds, budget = calibrated_reports(
        privacy.spending,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        rounds=settings.rounds,
        dimension=dimension,
        coordinates=dimension if wanted == "all" else wanted,
    )
    return rounds, budget.epsilon_by_round


def first_radii(settings: FleetSettings, spec: ModelSpec) -> tuple[float, ...]:
    """The radii of the first round's reports, for each tensor."""
    return (settings.privacy.two_point.radius,) * len(spec.parameter_shapes)


def report_terms(settings: FleetSettings, reports: TwoPointRounds, radii: Sequence[float]) -> ReportTerms:
    """What a plan says of its reports, with the radii of its round."""
    privacy = settings.privacy
    return ReportTerms(
        kind="two-point",
        noise_multipliers=list(reports.multipliers),
        coordinates=reports.coordinates,
        radii=list(radii),
        training=TrainingTerms(**privacy.local_training.as_dict()),
    )


def report_wire(settings: FleetSettings, reports: TwoPointRounds, spec: ModelSpec) -> WireTerms:
    """How the reports are cut: into as many fragments as the settings ask for, or as there are reports."""
    block = -(-reports.coordinates // settings.fragments_per_update)
    width = report_width(spec.parameter_count, reports.coordinates)
    return WireTerms(block=block, bytes=packed_bytes(block, width))


def fragments_for_reports(reports: TwoPointRounds, spec: ModelSpec) -> int:
    """The smallest number of fragments that holds the reports of a round."""
    width = report_width(spec.parameter_count, reports.coordinates)
    return -(-reports.coordinates // ((MAX_PAYLOAD_BYTES - 1) * 8 // width))
