"""docs/paper/tables.md: every arm with all its figures, by world; and the table of claims for docs/paper/claims.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from studies.data_file import PRODUCT, source_digest
from studies.markdown import markdown
from studies.pace import MAX_LATE_SHARE
from studies.paper_bench.arms import ARMS, SEEDS, START, WORLDS, World, plan
from studies.paper_bench.claims import CLAIMS
from studies.paper_bench.data import Done
from studies.paper_bench.evidence import TLDR_KL, Evidence
from studies.paper_bench.verdicts import half_width

Column = tuple[str, Callable[[Done], float | None], str]


def tables_text(evidence: Evidence, num_other: int) -> str:
    """Return docs/paper/tables.md.

    Args:
        num_other: lines that do not count.
    """
    num_left = len(_not_run(evidence))
    parts = [
        "# The paper in small: tables",
        "Made by `python studies/paper.py report` from [cells.jsonl](cells.jsonl); do not edit. "
        f"{len(evidence.cells)} cells, {num_left} of the plan are not run, {num_other} lines of other recipes are not "
        "used. Means ± 95 % t interval over the runs (each set of models takes a degree of freedom), n where there are "
        "not three; standard errors of single evaluations are in the data. `train_s` and shares of waiting are those "
        "of a shared machine (load average in the last column). What the arms change: studies/paper_bench/arms.py. "
        "Claims: [claims.md](claims.md).",
        _sources(evidence),
    ]
    for world in WORLDS.values():
        parts += [f"## {world.name}", *_world_parts(evidence, world)]
    return "\n\n".join(parts) + "\n"


def section_text(evidence: Evidence) -> str:
    """Return the generated part of docs/paper/claims.md."""
    rows, missing = [], []
    for claim in CLAIMS:
        if (found := claim.verdict(evidence)) is None:
            missing.append(claim.about)
        else:
            figure = f"{claim.figure}: {found.text}"
            rows.append([claim.about, claim.paper, figure, f"**{found.word}**", claim.why])
    # what a row shares with the one above is said once
    shared = list(zip([["", ""], *(row[:2] for row in rows)], rows, strict=False))
    rows = [["" if row[:2] == above else row[0], "" if row[:2] == above else row[1], *row[2:]] for above, row in shared]
    table = markdown(["claim", "the paper, as our notes have it", "ours", "", "why, and limits"], rows)
    words = Counter(row[3].strip("*") for row in rows)
    counts = ", ".join(f"{words[word]} {word}" for word in ("agrees", "disagrees", "undecided"))
    done = f"{len(evidence.cells)} cells"
    left = _not_run(evidence)
    parts = [
        f"{done}, {_sources(evidence)} Claims by measurement: {counts}; {len(missing)} have no data.",
        _learned(evidence),
        table,
        f"**Not run**: {len(left)} of {sum(1 for _ in plan([*WORLDS], SEEDS))} cells of the plan"
        + (f"; no pair yet for {len(missing)} rows: {', '.join(dict.fromkeys(missing))}." if missing else "."),
    ]
    return "\n\n".join(parts)


def _learned(evidence: Evidence) -> str:
    """Return what the recipe as it is shipped learns, run by run, beside its control."""
    rows = []
    for world in WORLDS.values():
        recipe = next(arm for arm in ARMS if arm.world == world.name)
        for models in dict.fromkeys(models for models, _ in evidence.arm(world.name, recipe.name)):
            shown = []
            for name, version in ((START, START), (recipe.name, "last"), ("control", "last")):
                by_seed = {seed: done for (of, seed), done in evidence.arm(world.name, name).items() if of == models}
                values = [by_seed[seed].value(world.metric, version) if seed in by_seed else None
                          for seed in range(max(by_seed, default=-1) + 1)]  # fmt: skip
                shown.append(", ".join("-" if value is None else f"{value:.3f}" for value in values) or "-")
            rows.append([f"`{world.name}-small`", f"`{models[:4]}`", *shown])
    header = ["recipe", "models", "start", "end: seeds 0, 1, ...", "end with shuffled rewards: seeds 0, 1, ..."]
    metrics = ", ".join(f"{world.name}: `{world.metric}`" for world in WORLDS.values())
    return f"Held-out, sampled ({metrics}):\n\n{markdown(header, rows)}"


def _not_run(evidence: Evidence) -> list[str]:
    done = {key for key, _ in evidence.cells}
    return [cell.key for cell in plan([*WORLDS], SEEDS) if cell.key not in done]


def _sources(evidence: Evidence) -> str:
    """Return which code made the cells."""
    cells = list(evidence.cells.values())
    if not cells:
        return "none run."
    commits = Counter(done.commit for done in cells)
    now = source_digest(PRODUCT)
    text = ", ".join(f"{commit} ({count})" for commit, count in commits.items())
    days = sorted({done.at[:10] for done in cells})
    same = sum(done.source == now for done in cells)
    return (
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}, by commit: {text}; "
        f"{len({done.source for done in cells})} digests of the code, {same} of them that of today's (`{now}`)."
    )


def _world_parts(evidence: Evidence, world: World) -> Iterator[str]:
    names = [START, *(arm.name for arm in ARMS if arm.world == world.name)]
    found = {name: list(cells.values()) for name in names if (cells := evidence.arm(world.name, name))}
    models = Counter(done.unit[0] for cells in found.values() for done in cells)
    if len(models) > 1:
        starts = {name: done.value(world.metric, START) for name, done in evidence.starts(world.name).items()}
        sets = ", ".join(
            f"`{name}` ({count} cells; start "
            + ("not evaluated)" if (start := starts.get(name)) is None else f"{start:.3f})")
            for name, count in models.items()
        )
        yield (
            f"Cells from {len(models)} sets of models, made on different processors: {sets}. Claims pair runs of one "
            "set; the means here are over all."
        )
    columns = [*_metric_columns(world), *_run_columns()]
    rows = []
    for name, cells in found.items():
        failed = [done.result["state_reason"] for done in cells if done.result.get("state", "done") != "done"]
        label = f"`{name}`" + (f" ({len(failed)} ended early: {failed[0]})" if failed else "")
        rows.append([label, str(len(cells)), *(_shown(cells, *column[1:]) for column in columns)])
    yield markdown(["arm", "n", *(column[0] for column in columns)], rows)


def _last(done: Done) -> str:
    """Return the version that a run ends with; the starting model has one version, and stands in the same columns."""
    return START if done.arm == START else "last"


def _metric_columns(world: World) -> Iterator[Column]:
    def of(metric: str, version: str | None = None) -> Callable[[Done], float | None]:
        return lambda done: done.value(metric, version or _last(done))

    for step in world.middle_steps:
        yield f"{world.metric}, step {step}", of(world.metric, str(step)), ".3f"
    yield f"{world.metric}, end", of(world.metric), ".3f"
    if world.name == "redteam":
        yield "distance of successes", of("sampled.diversity.cosine_distance_of_successes"), ".3f"
        for label, name, how in (("modes of 7", "num_modes", ".1f"), ("effective modes", "num_effective", ".2f")):
            yield label, lambda done, name=name: done.attacks(name, _last(done)), how
        return
    yield "greedy, end", of(world.metric.replace("sampled", "greedy")), ".3f"
    if world.name == "tldr":
        yield "score of the proxy", of("sampled.tldr.mean_reward"), ".3f"
        yield "good by the rule", of("sampled.tldr_good.success_rate"), ".3f"
        for step in world.middle_steps:
            yield f"perplexity per token, step {step}", of(TLDR_KL, str(step)), ".3f"
        yield "perplexity per token, end", of(TLDR_KL), ".3f"
        yield "the same, as published", of("sampled.perplexity.published"), ".3f"
    yield "response tokens", of("sampled.mean_response_tokens"), ".1f"


def _run_columns() -> Iterator[Column]:
    for label, name, how in (
        ("realised m", "realised_most_on_policy", ".2f"),
        ("mean age", "mean_policy_age", ".1f"),
        ("generated", "rollouts_generated", ",.0f"),
        ("trained", "rollouts_trained", ",.0f"),
        ("steps clipped", "clipped_steps_share", ".0%"),
        ("train_s", "train_s", ".0f"),
        ("trainer waits", "trainer_wait_share", ".0%"),
        ("CPU s", "cpu_s", ".0f"),
        (f"late: engines (claims: at most {MAX_LATE_SHARE:.0%})", "pace_late_share", ".1%"),
        ("late: trainer", "trainer_late_share", ".1%"),
    ):
        yield label, lambda done, name=name: done.result.get(name), how
    yield "load", lambda done: sum(done.result["load_average"]) / 2, ".1f"


def _shown(cells: Sequence[Done], figure: Callable[[Done], float | None], how: str) -> str:
    with_value = [(done, value) for done in cells if (value := figure(done)) is not None]
    known = [value for _, value in with_value]
    if not known:
        return "-"
    mean, around = sum(known) / len(known), half_width(known, num_sets=len({done.unit[0] for done, _ in with_value}))
    has_interval = how.endswith("3f") and math.isfinite(around)
    text = format(mean, how) + (f" ± {format(around, how)}" if has_interval else "")
    return text if len(known) == len(cells) else f"{text} (n {len(known)})"
