"""studies/paper.py: arms, the rule of verdicts, which lines count, and a report from made cells."""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from studies import paper
from studies.paper import BEGIN, END, write_report
from studies.paper_bench import data, runs
from studies.paper_bench.arms import ARMS, SEEDS, START, STARTS, WORLDS, Cell, plan
from studies.paper_bench.claims import CLAIMS
from studies.paper_bench.evidence import TB_FRONT, TLDR_KL, TLDR_WIN, Evidence
from studies.paper_bench.runs import CellError, models_digest, prepare
from studies.paper_bench.verdicts import judge

ENDED_EARLY = ("redteam/paced-1/seed1", "math/dr_grpo-lag0/seed0", "tldr/tb/seed2")
"""They have fewer points, and unknown ones."""


def made_result(cell: Cell, number: int) -> dict[str, Any]:
    """Return a result whose numbers depend on the arm: the first arm of a world is the best one."""
    metric, arms = WORLDS[cell.arm.world].metric, [arm.name for arm in ARMS if arm.world == cell.arm.world]
    level = 0.9 - 0.02 * arms.index(cell.arm.name) + 0.001 * cell.seed if cell.arm.name in arms else 0.1
    evaluation = {
        "train_s": 10.0,
        "metrics": {metric: [level, 0.01], TLDR_KL: [1.2, None]},
        "attacks": {
            "num_modes": 7,
            "num_effective": 6 - 0.01 * number,
            "num_attacks": 1024,
            "families": {"taunt": 500 - number, "song": 20, "other": 100},
        },
    }
    common = {"models_sha256": "m", "load_average": [1.0, 2.0], "wall_s": 1.0}
    if cell.arm.name == START:
        return {"evaluations": {START: evaluation}, **common}
    lag = cell.arm.lag_steps or 0
    found = {
        "state": "done",
        "state_reason": None,
        "steps": 100,
        "evaluations": dict.fromkeys([*map(str, WORLDS[cell.arm.world].middle_steps), "last"], evaluation),
        "train_s": 50.0,
        "mean_policy_age": float(lag),
        "ages": {**{str(age): 10 for age in range(lag)}, str(lag): 10 * (100 - lag)},
        **common,
    }
    if cell.key in ENDED_EARLY:
        found |= {"state": "failed", "steps": 30}
        found["evaluations"] = {"last": evaluation}
    return found


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    lines = []
    for number, cell in enumerate(cells):
        line = {"world": cell.arm.world, "arm": cell.arm.name, "seed": cell.seed, "recipe": cell.arm.digest()}
        line |= {"source": "code", "commit": "abc", "at": "2026-11-26 06:00", "result": made_result(cell, number)}
        lines.append(json.dumps({"key": cell.key, **line}) + "\n")
    path.write_text("".join(lines))


def add_another_set(path: Path) -> None:
    """Add two runs of the MATH recipe from other models, and a control that ends at 0."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = ("math/tba_prime/seed1", "math/tba_prime/seed2", "math/control/seed1")
    for line in [line for line in lines if line["key"] in wanted]:
        line["result"]["models_sha256"] = "n"
        if line["arm"] == "control":
            line["result"]["evaluations"]["last"]["metrics"][WORLDS["math"].metric] = [0.0, 0.0]
        lines.append(line)
    for line in lines[-3:]:
        path.write_text(path.read_text() + json.dumps(line) + "\n")


def asked(path: Path, **changes: Any) -> argparse.Namespace:
    found = {"json": path, "worlds": "math", "arms": "", "seeds": 1, "max_minutes": None, "folder": path.parent}
    return argparse.Namespace(**{**found, **changes})


def test_every_arm_is_a_recipe_of_its_own_and_the_plan_goes_seed_by_seed() -> None:
    for world in WORLDS:
        arms = [arm for arm in ARMS if arm.world == world]
        # the first one is the recipe as it is shipped
        assert arms[0].digest() == STARTS[world].digest()
        assert len({arm.digest() for arm in arms}) == len(arms)
        assert len({arm.name for arm in arms}) == len(arms)
        assert all(arm.recipe(2).run.seed == 2 for arm in arms)
    cells = list(plan([*WORLDS], SEEDS))
    assert len({cell.key for cell in cells}) == len(cells) == len(WORLDS) + len(ARMS) * len(SEEDS)
    assert [cell.arm.name for cell in cells[: len(WORLDS)]] == [START] * len(WORLDS)
    runs = [cell.seed for cell in cells[len(WORLDS) :]]
    assert runs == sorted(runs)


def test_three_seeds_and_an_interval_on_one_side_decide() -> None:
    def word(differences: Sequence[float], **how: Any) -> str:
        return judge({seed: (0.5 + each, 0.5) for seed, each in enumerate(differences)}, **how).word

    assert word([0.10, 0.11, 0.12]) == "agrees"
    assert word([-0.10, -0.11, -0.12]) == "disagrees"
    # all of one sign is not enough
    assert word([0.01, 0.02, 0.12]) == "undecided"
    assert word([0.1, 0.11]) == "undecided"
    assert word([-0.01, -0.02, -0.03], margin=0.05) == "agrees"
    assert word([-0.10, -0.11, -0.12], margin=0.05) == "disagrees"
    ratio = judge({0: (4.0, 2.0), 1: (2.0, 1.0), 2: (6.0, 3.0)}, is_ratio=True)
    assert (ratio.word, "**2.00**" in ratio.text) == ("agrees", True)


def test_each_set_of_models_costs_a_degree_of_freedom_and_many_pairs_are_judged() -> None:
    values = {0: (0.58, 0.5), 1: (0.61, 0.5), 2: (0.64, 0.5)}
    assert judge(values).word == "agrees"
    of_two_sets = judge({("a", 0): values[0], ("b", 1): values[1], ("b", 2): values[2]})
    assert of_two_sets.word == "undecided"
    assert "3 pairs, 2 sets of models" in of_two_sets.text
    # no seed twice: nothing says how far runs of one set differ
    assert judge({(name, 0): pair for name, pair in zip("abc", values.values(), strict=True)}).word == "undecided"
    many = {(name, seed): (0.6 + 0.01 * (seed % 3), 0.5) for name in "abc" for seed in range(12)}
    assert judge(many).word == "agrees"
    assert "36 pairs, 3 sets of models" in judge(many).text
    # the quantile of 11 degrees of freedom, 2.201
    few = {seed: (0.5 + (-1) ** seed, 0.5) for seed in range(12)}
    assert f"{-2.201 * (1 / 11) ** 0.5:+.3f} to" in judge(few).text


def test_the_families_among_some_of_the_attacks_are_those_of_every_draw() -> None:
    kinds = ["taunt", "taunt", "taunt", "song", "other", None, None]
    families = {name: kinds.count(name) for name in ("taunt", "song", "other")}
    evaluation = {"attacks": {"num_attacks": len(kinds), "families": families}}
    names = dict.fromkeys(("world", "arm", "commit", "source", "at"), "")
    done = data.Done(**names, seed=0, result={"evaluations": {"40": evaluation}})
    # a failure counts for nothing, and neither does a success that belongs to no family
    found = [len({*drawn} - {"other", None}) for drawn in itertools.combinations(kinds, 3)]
    assert done.families_among(3, "40") == pytest.approx(sum(found) / len(found))
    assert done.families_among(len(kinds), "40") == pytest.approx(2)
    assert (done.families_among(len(kinds) + 1, "40"), done.families_among(3)) == (None, None)


def test_models_that_cannot_be_made_leave_their_cells_out_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[str]()

    def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
        ran.append(cell.arm.world)
        return made_result(cell, 0)

    monkeypatch.setattr(paper, "run_cell", run_cell)
    # a command that makes nothing
    monkeypatch.setattr(runs, "_python", lambda folder, name, words: (folder / f"{name}.log").write_text("made\n"))
    arms = {cell.arm.world: cell.arm for cell in plan(["math", "gsm8k"], range(1))}
    for model in arms["gsm8k"].models():
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(CellError, match=r"left no weights in one of models/small/math"):
        prepare(arms["math"], tmp_path)
    prepare(arms["gsm8k"], tmp_path)
    with pytest.raises(SystemExit, match=r"no result of math/\S+ \(its models\)$"):
        paper.run(asked(tmp_path / "cells.jsonl", worlds="math,gsm8k"))
    assert set(ran) == {"gsm8k"}


def test_a_cell_that_has_a_line_of_its_recipe_is_not_run_again_and_one_that_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran, broken = tmp_path / "cells.jsonl", list[str](), "math/dr_grpo-lag0/seed0"

    def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
        ran.append(cell.key)
        if cell.key == broken:
            raise CellError("no result")
        return made_result(cell, 0)

    monkeypatch.setattr(paper, "run_cell", run_cell)
    monkeypatch.setattr(paper, "prepare", lambda arm, folder: None)
    with pytest.raises(SystemExit, match=broken):
        paper.run(asked(path))
    num_cells = 1 + sum(arm.world == "math" for arm in ARMS)
    assert len(ran) == num_cells
    with pytest.raises(SystemExit, match=broken):
        paper.run(asked(path))
    assert ran[num_cells:] == [broken]
    # the recipe of an arm is changed: its line is of another recipe
    changed = replace(ARMS[0], world="math", name="tba_prime", changes={"trainer.num_steps": 90})
    monkeypatch.setattr(
        data, "ARMS", [changed, *(arm for arm in ARMS if (arm.world, arm.name) != ("math", "tba_prime"))]
    )
    assert [cell.key for cell in paper.left(asked(path))] == ["math/tba_prime/seed0", broken]
    assert data.num_other(path) == 1


def test_cells_of_other_models_are_run_again_where_the_folder_has_its_own_and_both_count(tmp_path: Path) -> None:
    cells = [cell for cell in plan(["math"], range(1)) if cell.arm.name in ("tba_prime", "control")]
    path = tmp_path / "cells.jsonl"
    write_cells(path, cells)
    keys = [cell.key for cell in cells]
    assert not set(keys) & {cell.key for cell in paper.left(asked(path))}
    for folder in cells[0].arm.models():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").write_bytes(folder.encode())
    # models of this machine: nothing has begun with them
    assert set(keys) <= {cell.key for cell in paper.left(asked(path))}
    here = models_digest(cells[0].arm, tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[:1]:
        line["result"]["models_sha256"] = here
        path.write_text(path.read_text() + json.dumps(line) + "\n")
    assert set(keys) & {cell.key for cell in paper.left(asked(path))} == set(keys[1:])
    assert set(Evidence.of(path).arm("math", "tba_prime")) == {("m", 0), (here, 0)}
    # its partner began elsewhere
    assert set(Evidence.of(path).pairs("math", "tba_prime", "control", lambda done: 1.0)) == {("m", 0)}
    assert data.num_other(path) == 0


def done(arm: str, result: Mapping[str, Any], world: str = "tldr", seed: int = 0) -> data.Done:
    common = {"models_sha256": "m", "state": "done"}
    return data.Done(world=world, arm=arm, seed=seed, commit="", source="", at="", result={**common, **result})


def test_a_front_never_falls_below_the_starting_model_and_counts_the_best_points_of_both_sides() -> None:
    def run(arm: str, **points: tuple[float, float]) -> data.Done:
        versions = {version: {"metrics": {TLDR_KL: [kl], TLDR_WIN: [win]}} for version, (kl, win) in points.items()}
        return done(arm, {"evaluations": versions})

    start, tb = run(START, start=(1.2, 0.6)), run("tb", first=(1.3, 0.7), last=(1.4, 0.8))
    betas = [run(name, last=(1.5, 0.1)) for name in TB_FRONT if name != "tb"]

    def front(*cells: data.Done, lag: int = 15) -> Mapping[data.Unit, tuple[float, float]]:
        return Evidence({(str(number), ""): each for number, each in enumerate([start, *betas, *cells])}).front(lag)

    # nearer than the start, as a policy of few probable summaries is: both fronts are the start's there
    near = run("rloo-lag15", first=(1.1, 0.3))
    assert front(tb, near) == {("m", 0): (0.6, 0.6)}
    # a rival's second point is worse than its first one, as a point of tb may be
    worse = run("rloo-lag15", first=(1.35, 0.75), last=(1.5, 0.2))
    assert front(tb, worse) == {("m", 0): (pytest.approx((0.7 + 0.8) / 2), pytest.approx(0.75))}
    assert front(tb, worse, lag=1) == {}
    # a beta is missing: the front of tb would lie lower
    assert front(replace(tb, seed=1), replace(worse, seed=1)) == {}


def test_a_run_that_ended_early_is_not_a_fast_one_and_other_starting_models_are_not_compared() -> None:
    pairs = next(claim.pairs for claim in CLAIMS if "gsm8k: seconds" in claim.figure)

    def cells(ours: Mapping[str, Any]) -> Evidence:
        theirs = done("grpo-lockstep", {"train_s": 100.0}, "gsm8k")
        mine = done("tba_prime", {"train_s": 50.0, **ours}, "gsm8k")
        return Evidence({("ours", "m"): mine, ("theirs", "m"): theirs})

    assert pairs(cells({})) == {("m", 0): (100.0, 50.0)}
    assert pairs(cells({"state": "failed"})) == {}
    assert pairs(cells({"models_sha256": "another"})) == {}


def test_two_processes_do_not_share_a_working_folder(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit, match="another process"):
            paper.run(asked(tmp_path / "cells.jsonl"))


def test_three_failures_in_a_row_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = itertools.count()

    def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
        next(ran)
        raise CellError("no result")

    monkeypatch.setattr(paper, "run_cell", run_cell)
    monkeypatch.setattr(paper, "prepare", lambda arm, folder: None)
    with pytest.raises(SystemExit):
        paper.run(asked(tmp_path / "cells.jsonl"))
    assert next(ran) == paper.MAX_FAILED_IN_ROW


def test_a_report_says_what_the_cells_say_and_what_is_not_run(tmp_path: Path) -> None:
    path, results = tmp_path / "cells.jsonl", tmp_path / "results.md"
    cells = [cell for cell in plan(["redteam", "math", "tldr"], SEEDS) if cell.arm.name != "no-filter"]
    results.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for nothing in ((), ({"world": "math", "arm": "control", "recipe": "of yesterday"},)):
        path.write_text("".join(json.dumps(line) + "\n" for line in nothing))
        with pytest.raises(SystemExit, match="nothing is written"):
            write_report(path, results)
    assert "\nold\n" in results.read_text()
    write_cells(path, cells)
    write_report(path, results)
    evidence = Evidence.of(path)
    words = {claim.figure: found.word for claim in CLAIMS if (found := claim.verdict(evidence)) is not None}
    assert words["redteam: success at the end, `tb` against `reinforce`"] == "agrees"
    assert [word for figure, word in words.items() if "`tb`'s front" in figure] == ["agrees", "agrees"]
    assert words["share of rollouts at exactly the age of the constant lag, against 0.99; mean of the arms"] == "agrees"
    assert not any("against without" in figure or figure.startswith("gsm8k") for figure in words)
    text = results.read_text()
    assert (text[:7], text[-6:]) == ("before\n", "after\n")
    assert "\nold\n" not in text
    num_gsm8k = 1 + len(SEEDS) * sum(arm.world == "gsm8k" for arm in ARMS)
    assert "| `math-small` | `m` | 0.100 | 0.900, 0.901, 0.902 | 0.880, 0.881, 0.882 |" in text
    assert "made on different processors" not in (tmp_path / "tables.md").read_text()
    assert f"**Not run**: {num_gsm8k + len(SEEDS)} of" in text
    tables = (tmp_path / "tables.md").read_text()
    assert "| `reinforce` | 3 | 0.861 ± 0.002" in tables
    assert "| `paced-1` (1 ended early: " in tables
    write_report(path, results)
    assert results.read_text() == text
    add_another_set(path)
    write_report(path, results)
    text, tables = results.read_text(), (tmp_path / "tables.md").read_text()
    assert "| `math-small` | `n` | - | -, 0.901, 0.902 | -, 0.000 |" in text
    assert "4 pairs, 2 sets of models" in text
    assert "`n` (3 cells; start not evaluated). Claims pair runs of one set; the means here are over all." in tables
    # 0.880, 0.881, 0.882 of one set and 0 of the other: two degrees of freedom, not three
    assert "| 0.661 ± 0.948 |" in tables
    # a run that was late at its pace says nothing about more searchers
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["result"]["pace_late_share"] = 0.5 if line["arm"] == "paced-4" else None
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not Evidence.of(path).pairs("redteam", "paced-4", "paced-1", lambda done: 1.0)
