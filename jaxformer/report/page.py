"""The page: one HTML file that loads nothing from anywhere. All text in it is escaped by the template engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxformer.report import charts, explorer, sample_tables, sections, sweeps, templating
from jaxformer.report.blocks import Block, Details, Figure, Figures, Heading
from jaxformer.report.charts import Chart
from jaxformer.report.runs import Run


def render(runs: Sequence[Run], live: str = "") -> str:
    """The page of one run, or of several compared.

    Args:
      live: what the page of a server compares with the server's answers to see that its charts are others; "": the
        page is a file.
    """
    blocks = content(runs)
    explored = explorer.of_runs(runs) if not live else explorer.NOTHING
    embedded = charts.scripts(
        [*all_charts(blocks), *explored.charts], extra=templating.text("page.js") + explored.script, live=live
    )
    html = (
        templating.environment()
        .get_template("page.html")
        .render(
            title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            notes=[*sections.notes(runs), *explored.notes],
            sections={name: section for name, section in blocks.items() if section},
            policy=embedded.policy(connect=bool(live)),
            scripts=embedded.html,
            styles=charts.style() + explored.style,
            explorer=explored.html,
            figure=charts.figure,
            live=live,
        )
    )
    return html.encode("utf-8", "replace").decode()  # UTF-8 has no surrogates, which JSON can hold


def content(runs: Sequence[Run]) -> dict[str, list[Block]]:
    """The blocks of each section."""
    several = len(runs) > 1
    settings = sweeps.all_charts(runs) if several else []
    return {
        "Results": sections.results(runs),
        "Seeds": sections.seed_means(runs),
        "Curves": sections.curve_blocks(runs),
        "Settings": [Figure(settings[0]), Figures(tuple(settings[1:]))] if settings else [],
        "Evaluation": sections.evaluations(runs),
        "Samples": _per_run(
            runs, sample_tables.samples if len(runs) <= sections.MAX_COLUMNS else sample_tables.extremes
        ),
        "Differences": sections.differences(runs) if several else [],
        "Configuration": _per_run(runs, sections.configuration),
        "Reproduce": _per_run(runs, sections.reproduction),
        "Environment": sections.environment(runs),
        "Parameters": _per_run(_distinct(runs), sections.parameters),
    }


def _distinct(runs: Sequence[Run]) -> list[Run]:
    """The first run of each list of parameters."""
    return list({run.parameters: run for run in reversed(runs)}.values())[::-1]


def all_charts(blocks: dict[str, list[Block]]) -> list[Chart]:
    """Every chart of a page, in its order."""
    found: list[Chart] = []
    for block in (block for section in blocks.values() for block in section):
        if isinstance(block, Figure):
            found.append(block.chart)
        elif isinstance(block, Figures):
            found += block.charts
        elif isinstance(block, Details) and isinstance(block.body, Figure):
            found.append(block.body.chart)
    return found


def _per_run(runs: Sequence[Run], section: Callable[[Run], Sequence[Block]]) -> list[Block]:
    """`section` of every run, under its name if there are several."""
    blocks: list[Block] = []
    for run in runs:
        body = section(run)
        blocks += [Heading(run.name)] if body and len(runs) > 1 else []
        blocks += body
    return blocks
