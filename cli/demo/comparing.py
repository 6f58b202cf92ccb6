"""``dpagent demo --compare``: a fleet for each method in turn, then a table and a page of all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cli.demo.console import FleetConsole
from cli.tables import print_table
from simulation.comparison import requests_by_method
from simulation.fleet import Fleet
from simulation.report.comparison_page import comparison_rows, write_comparison
from simulation.report.page import write_report
from simulation.report.results import as_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulation.record import RunRecord
    from simulation.request import BrokerRequest, Request


class Comparison:
    """Fleets of several methods, run one after the other. Making one starts nothing.

    Args:
        request: for all of them.
        methods: their names.
        root: each run has a directory in it.
        broker: for all of them.
        command: a command line that goes on with the comparison, kept for people.

    Raises:
        DpagentError: One of them cannot be run.
    """

    def __init__(
        self,
        request: Request,
        methods: Sequence[str],
        root: Path,
        *,
        broker: BrokerRequest,
        command: str,
    ) -> None:
        # All before the first one runs: what is wrong with the last shows at once.
        self._fleets = {
            method: Fleet(each, root / method, broker=broker, command=command)
            for method, each in requests_by_method(request, methods, root).items()
        }
        self.records: dict[str, RunRecord] = {}

    def run(self) -> None:
        """Run all of them; finished runs are read and not run again.

        Raises:
            DpagentError: One of them cannot run.
        """
        for number, (method, fleet) in enumerate(self._fleets.items(), start=1):
            typer.echo(f"Method {number} of {len(self._fleets)}: {method}", err=True)
            with FleetConsole() as console:
                self.records[method] = fleet.run(console)

    def write(self, directory: Path) -> Path:
        """Write the report of each run below ``directory``, and the page of all into it."""
        pages = {method: write_report(each, directory / method) for method, each in self.records.items()}
        return write_comparison(self.records, pages, directory)

    @property
    def results(self) -> dict[str, Any]:
        """For ``--json``: the results of each run by method."""
        return {"compare": {method: as_json(record) for method, record in self.records.items()}}

    @property
    def unverified(self) -> Mapping[str, Sequence[int]]:
        """The devices whose ledgers do not verify, by method."""
        return {method: each.unverified for method, each in self.records.items() if each.unverified}

    def print_table(self) -> None:
        """Print the runs side by side."""
        rows = comparison_rows(list(self.records.values()))
        # On a page, a number and its unit stay together; a terminal's table does not break cells anyhow.
        plain = [[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in rows]
        print_table(["", *self.records], plain)
        for method, record in self.records.items():
            for sentence in record.cautions:
                typer.echo(f"Note: {method}: {sentence}")
