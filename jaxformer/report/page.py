"""The page: one HTML file that loads nothing from anywhere. All text in it is escaped by the template engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxformer.report import sections, templating
from jaxformer.report.blocks import Block, Heading
from jaxformer.report.runs import Run


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of several compared."""
    blocks = {
        "Results": sections.results(runs),
        "Seeds": sections.seed_means(runs),
        "Curves": sections.curves(runs),
        "Evaluation": sections.evaluations(runs),
        "Samples": _per_run(runs, sections.samples),
        "Differences": sections.differences(runs) if len(runs) > 1 else [],
        "Configuration": _per_run(runs, sections.configuration),
        "Environment": sections.environment(runs),
        "Parameters": _per_run(runs, sections.parameters),
    }
    html = (
        templating.environment()
        .get_template("page.html")
        .render(
            title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            notes=sections.notes(runs),
            sections={name: section for name, section in blocks.items() if section},
        )
    )
    return html.encode("utf-8", "replace").decode()  # UTF-8 has no surrogates, which JSON can hold


def _per_run(runs: Sequence[Run], section: Callable[[Run], Sequence[Block]]) -> list[Block]:
    """`section` of every run, under its name if there are several."""
    blocks: list[Block] = []
    for run in runs:
        body = section(run)
        blocks += [Heading(run.name)] if body and len(runs) > 1 else []
        blocks += body
    return blocks
