"""Writes docs/paper/tables.md, the plots, and the generated section of docs/results.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.paper_bench.arms import ROOT
from benchmarks.paper_bench.data import num_other
from benchmarks.paper_bench.evidence import Evidence
from benchmarks.paper_bench.plots import write_plots
from benchmarks.paper_bench.tables import section_text, tables_text

RESULTS = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- paper:begin -->", "<!-- paper:end -->"


def write_report(data: Path, results: Path = RESULTS) -> None:
    """Write tables and plots beside the data file, and the claims into the results.

    Raises:
        SystemExit: the results have no place for them.
    """
    evidence = Evidence.of(data)
    data.parent.mkdir(parents=True, exist_ok=True)
    (data.parent / "tables.md").write_text(tables_text(evidence, num_other(data)))
    plots = write_plots(evidence, data.parent)
    text = results.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{results} must hold {BEGIN} and {END} once each: the claims go between them")
    before, _, rest = text.partition(BEGIN)
    images = "\n\n".join(f"![{path.stem}](paper/{path.name})" for path in plots)
    results.write_text(f"{before}{BEGIN}\n{section_text(evidence)}\n\n{images}\n{END}{rest.partition(END)[2]}")
