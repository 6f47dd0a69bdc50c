"""Writes docs/asynchrony/tables.md and the plots from the data file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from studies.study import plan as arms_of
from studies.study.cells import Line, World
from studies.study.data import digests, read_lines, same_results, sources_digest
from studies.study.plan import BASE_LAG, LAGS, Arm, Study
from studies.study.plots import has_curves, write_plots
from studies.study.tables import (
    PACES,
    TARGETS,
    Found,
    arms_table,
    by_lag,
    generated_table,
    kept_table,
    noise_table,
    pace_table,
    screening_table,
    standings_table,
    tuning_table,
)
from studies.study.world import TASKS

BUDGETS = (2_560, 4_864, 9_600, 19_200, 38_400)


def write_report(data: Path, folder: Path) -> None:
    """Tables and plots of what has been run: of this code, or else of the newest code that made a line."""
    counts = digests(data)
    lines, digest = newest_study(data)
    same = same_results(data, digest)
    num_other = sum(number for other, number in counts.items() if other not in same)
    taken_over = {other: number for other, number in counts.items() if other in same - {digest}}
    study = Study(lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text(report_text(study, digest, num_other=num_other, taken_over=taken_over))
    write_plots(study, folder)


def newest_study(data: Path) -> tuple[dict[str, Line], str]:
    """Return the lines of this code, or else of the newest code that made a line, and its digest."""
    counts = digests(data)
    is_known = bool(counts.keys() & same_results(data, sources_digest()))
    digest = sources_digest() if is_known or not counts else [*counts][-1]
    return read_lines(data, digest), digest


def report_text(
    study: Study, digest: str, *, num_other: int = 0, taken_over: Mapping[str, int] = MappingProxyType({})
) -> str:
    """The tables as one Markdown document.

    Args:
        num_other: lines of code that does not count.
        taken_over: lines of older code that do, by its digest.
    """
    return (
        "\n\n".join([*_head(study, digest, num_other, taken_over), *_lag_parts(study), *_question_parts(study)]) + "\n"
    )


def _head(study: Study, digest: str, num_other: int, taken_over: Mapping[str, int]) -> list[str]:
    code = f"the code with the digest `{digest}`"
    for older, number in taken_over.items():
        code += f", {number} of them taken over from `{older}` (cells.adopted.jsonl)"
    if digest != sources_digest():
        code += f" (not the code beside this file, which is `{sources_digest()}`)"
    cpu_h = sum(line.result["cpu_s"] for line in study.lines.values()) / 3600
    left = sum(1 for _ in study.plan())
    return [
        "# The studies: tables",
        "Made by `python studies/asynchrony.py report` from [cells.jsonl](cells.jsonl); do not edit. "
        f"{len(study.lines)} cells of {code} are done, {cpu_h:.2f} CPU hours; {left} of those known now are left; "
        f"{num_other} lines of other code are not used. What the words mean: "
        "[results.md](../results.md#asynchrony-study). Means ± 95 % t interval over 5 seeds (n says where there are "
        "fewer); differences and ratios: paired bootstrap over seeds.",
        "## Screening",
        screening_table(study),
    ]


def _lag_parts(study: Study) -> list[str]:
    parts = []
    for task in TASKS:
        parts += [f"## {task}: which objective at which lag"]
        for lag in (0, BASE_LAG, 64):
            parts += [f"Lag {lag}, best first:", standings_table(study, task, lag)]
        parts += [
            "Area under the sampled curve:",
            by_lag(study, task, lambda line: line.area),
            "Area over the method's own at lag 0:",
            kept_table(study, task),
            "The same, the curve of lag L moved back by L steps, since its first L steps have no newer data than its "
            "first one. (They teach, too, so more than 100 % is possible.)",
            kept_table(study, task, is_moved=True),
            "Final sampled accuracy:",
            by_lag(study, task, lambda line: line.final),
            "Area under the greedy curve:",
            by_lag(study, task, lambda line: line.area_greedy),
            "Share of steps whose gradient was clipped:",
            by_lag(study, task, lambda line: line.clip_share, ".0%"),
        ]
        if has_curves(study, task):
            parts.append(f"![learning curves of {task}](curves_{task}.png)")
    arms = [arm for task in TASKS for lag in LAGS for arm in study.at_lag(task, lag)]
    others = [*arms_of.replay_arms(), *arms_of.sync_arms(), *arms_of.correction_arms(), *arms_of.hazard_arms()]
    return [*parts, "## Tuning", tuning_table(study, [*arms, *others, *arms_of.scale_arms()])]


def _question_parts(study: Study) -> list[str]:
    replay = {_label(arm): (arm, study.found(arm)) for arm in arms_of.replay_arms()}
    return [
        "## Does replay pay?",
        arms_table(
            {label: lines for label, (_, lines) in replay.items()},
            labels={label: f"`{arm.method}`, no buffer" for label, (arm, _) in replay.items()},
        ),
        "Sampled accuracy:",
        generated_table(replay, BUDGETS),
        "Cost until sampled accuracy is at a target: rollouts, and the time by pace, which is the cost of generating a "
        f"rollout where training on it costs 1 ({PACES[0]:g} to {PACES[-1]:g}). Generation and training overlap, so it "
        "is that of the slower side; unit: training on 128 rollouts.",
        *(text for target in TARGETS for text in (f"To {target:g}:", pace_table(replay, target))),
        "## Priority of replay slots, 4 trained per generated",
        _against(study, arms_of.priority_arms(), lambda arm: arm.world.priority == "off"),
        "## m and the sync interval",
        _against(study, arms_of.sync_arms(), lambda arm: (arm.world.sync_interval, arm.world.replay_m) == (4, 0.5)),
        "## K at 128 rollouts a batch",
        _against(study, arms_of.group_size_arms(), lambda arm: arm.world.group_size == 8),
        "Variance of TB's gradient over the squared norm of its mean, on-policy (studies/study/gradients.py has the "
        "formulas):",
        noise_table(study),
        "## Delay correction",
        _corrections(study),
        "## Wrong rewards",
        _against(study, arms_of.hazard_arms(), lambda arm: arm.world.hazard == "none", same=("replay_m",)),
        "## beta and its schedule",
        _against(study, arms_of.beta_arms(), lambda arm: (arm.beta_factor, arm.beta_end_factor) == (1.0, None)),
        f"## A log Z per prompt, {arms_of.EPOCHS_STEPS} steps",
        arms_table({_label(arm): study.found(arm) for arm in arms_of.log_z_arms()}, against=f"`tb`, lag {arms_of.LAG}"),
        "## A-form and raw scale, without a clip",
        _against(study, arms_of.scale_arms(), lambda arm: not arm.world.is_raw and arm.beta_end_factor is None),
    ]


def _against(study: Study, arms: list[Arm], is_reference: Callable[[Arm], bool], same: tuple[str, ...] = ()) -> str:
    """Arms with their difference to the reference of the same method."""

    def family(arm: Arm) -> tuple[object, ...]:
        return (arm.method, *(getattr(arm.world, name) for name in same))

    references = {family(arm): _label(arm) for arm in arms if is_reference(arm)}
    return arms_table(
        {_label(arm): study.found(arm) for arm in arms},
        labels={_label(arm): references[family(arm)] for arm in arms},
    )


def _corrections(study: Study) -> str:
    arms = arms_of.correction_arms()
    found: Mapping[str, Found] = {_label(arm): study.found(arm) for arm in arms}
    plain = {method: method.removesuffix("_truncate").removesuffix("_mask") for method in arms_of.CORRECTIONS}
    plain = {method: base.removesuffix("_uncorrected").removesuffix("_unweighted") for method, base in plain.items()}
    labels = {_label(arm): _label(Arm(method=plain[arm.method], world=arm.world, tuned_in=arm.world)) for arm in arms}
    return arms_table(found, labels=labels)


def _label(arm: Arm) -> str:
    """The arm in words: what differs from a plain world."""
    world, parts = arm.world, []
    if world.replay_m is None and world.num_steps == arms_of.REPLAY.num_steps:
        parts.append("no buffer")
    if world.num_steps == arms_of.REPLAY.num_steps and world.replay_m is not None:
        parts.append(f"{world.samples_per_insert} per insert")
    if world.priority != "off":
        parts.append(f"priority {world.priority}")
    if arm.tuned_in.sync_interval > 1:
        parts.append(f"m {world.replay_m:g}, k {world.sync_interval}")
    elif world.replay_m is not None and world.num_steps == 0:
        parts.append("buffer")
    if world.group_size != World().group_size:
        parts.append(f"K {world.group_size}")
    if world.hazard != "none":
        parts.append("hackable" if world.hazard == "hack" else f"{world.hazard_prob:.0%} flipped")
    if arm.beta_factor != 1 or arm.beta_end_factor is not None:
        end = "" if arm.beta_end_factor is None else f" to x {arm.beta_end_factor:g}"
        parts.append(f"beta x {arm.beta_factor:g}{end}")
    if world.clip == "none":
        parts.append("raw" if world.is_raw else "A-form")
    return ", ".join([f"`{arm.method}`", *(parts or [f"lag {world.lag}"])])
