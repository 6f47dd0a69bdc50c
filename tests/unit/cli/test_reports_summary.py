"""summary.json and the table, from histories whose numbers are known by construction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba.api import FailedReason, RunSummary, Stats
from tba_cli.main import main
from tba_cli.reports.comparison import runs_markdown
from tba_cli.reports.history import load_history
from tba_cli.reports.outputs import result_lines, write_outputs
from tba_cli.reports.summary import summarise, trainer_wait_share
from tba_cli.run_folder import RunFolder
from tests.support.history_values import STEP_S, WAIT_S, entry, evaluation, history, stats


def test_the_summary_of_a_plain_run():
    summary = summarise(history())
    assert (summary["start_accuracy"], summary["final_accuracy"]) == (0.3, 0.7)
    assert summary["gain"] == pytest.approx(0.4)
    assert summary["final_greedy"] == pytest.approx(0.75)
    assert summary["num_heldout_prompts"] == 512
    assert summary["first_step_s"] == pytest.approx(11.0)
    assert summary["warm_start_s"] == 12.0
    assert summary["train_s"] == pytest.approx(110.0 - (101.0 - STEP_S - 3.0))
    assert summary["trainer_wait_share"] == pytest.approx(WAIT_S)  # the long first wait lies in the warm-up
    assert summary["mean_policy_age"] == pytest.approx(2.5)
    assert summary["policy_age_histogram"] == {"0": 30, "10": 10}
    assert summary["ledger_violations"] == []


def test_an_evaluation_that_never_finished_is_unknown_and_not_a_number():
    summary = summarise(history(evals=[evaluation("0-0", 0.3), evaluation("1-10", None, "expired")]))
    assert summary["final_accuracy"] is None
    assert summary["gain"] is None
    assert "0.300 -> unknown" in result_lines(summary, RunFolder(Path("/r")))[0]


def test_a_task_whose_rewards_have_grades_shows_its_mean_reward_first():
    def evaluated(version, accuracy, reward):
        return evaluation(version, accuracy).model_copy(update={"mean_reward": reward})

    graded = summarise(history(evals=[evaluated("0-0", 0.016, 0.12), evaluated("1-10", 0.059, 0.49)]))
    assert result_lines(graded, RunFolder(Path("/r")))[0] == "mean reward:    0.120 -> 0.490 on 512 held-out prompts"
    plain = summarise(history(evals=[evaluated("0-0", 0.3, 0.3), evaluated("1-10", 0.7, 0.7)]))
    assert result_lines(plain, RunFolder(Path("/r")))[0].startswith("pass@1 sampled: 0.300 -> 0.700")


def test_a_resumed_run_adds_up_the_training_time_of_its_lineages():
    first = [entry(step, at_s=100.0 + step) for step in (1, 2)]
    lost = [entry(3, at_s=103.0, abandoned=True)]
    second = [entry(step, lineage=2, at_s=1000.0 + step) for step in (3, 4)]
    evals = [evaluation("0-0", 0.3), evaluation("1-3", 0.9), evaluation("2-4", 0.6)]
    run = {"ledger": [*first, *lost, *second], "lineage": 2, "step": 4, "parents": {1: "0-0", 2: "1-2"}}
    summary = summarise(history(**run, evals=evals))
    assert summary["train_s"] == pytest.approx(3.0 + 2.0)
    assert summary["final_accuracy"] == 0.6
    assert summary["lineages"] == 2
    assert summary["ledger_violations"] == []


def test_the_wait_share_counts_waits_that_no_step_has_in_its_own_wait_and_leaves_the_warm_up_out():
    """Before step 7 an ack was refused, and the draw after it took 1 s that no `wait_s` names."""
    steps = [entry(step, at_s=100.0 + step) for step in range(1, 11)]
    later = [e.model_copy(update={"metrics": e.metrics | {"waited_s_total": 51.0 + e.step * WAIT_S}}) for e in steps]
    share = trainer_wait_share([*steps[:6], *later[6:]], 2)
    assert share == pytest.approx((6 * WAIT_S + 1.0) / 6.0)  # from the ack of step 4, the end of the warm-up
    assert trainer_wait_share(steps[:4], 2) is None


def test_a_resume_at_the_last_step_is_evaluated_under_the_name_of_its_own_lineage():
    ledger = [entry(step, at_s=100.0 + step) for step in range(1, 5)]
    resumed = {"ledger": ledger, "lineage": 2, "step": 4, "parents": {1: "0-0", 2: "1-4"}}
    start, own, older = evaluation("0-0", 0.3), evaluation("2-4", 0.6), evaluation("1-4", 0.6)
    assert summarise(history(**resumed, evals=[start, own]))["final_accuracy"] == 0.6
    assert summarise(history(**resumed, evals=[start, older]))["final_accuracy"] == 0.6  # the same weights
    pending = evaluation("2-4", None, "pending")
    assert summarise(history(**resumed, evals=[start, pending]))["final_accuracy"] is None


def test_a_run_that_was_stopped_before_its_first_step_has_a_summary():
    reasons = [FailedReason(reason="bad_data", num=63, example="bad_data: no column 'gold'")]
    counts = {"policy_age_histogram": {}, "num_failed": 63, "failed_reasons": reasons}
    of_run = stats().model_copy(update=counts)
    summary = summarise(history(ledger=[], step=0, evals=[evaluation("0-0", 0.3)], stats=of_run))
    assert (summary["rollouts_failed"], summary["failed_reasons"]) == (63, [reasons[0].model_dump()])
    assert summary["mean_policy_age"] is None
    assert summary["train_s"] is None
    assert summary["first_step_s"] is None
    assert summary["trainer_wait_share"] is None


def test_the_summary_is_computed_from_the_saved_history(tmp_path):
    folder = RunFolder(tmp_path)
    summary = write_outputs(folder, history())
    assert summarise(load_history(folder.history_path)) == summary == json.loads(folder.summary_path.read_bytes())
    assert "0.300 -> 0.700 on 512 held-out prompts" in result_lines(summary, folder)[0]


def test_the_table_has_a_row_per_run_and_a_dash_for_the_unknown(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_outputs(RunFolder(tmp_path / name), history(run=name))
    assert main(["table", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")][1:4] == ["run", "seed", "start accuracy"]
    assert [cell.strip() for cell in lines[2].split("|")][1:6] == ["a", "3", "0.300", "0.700", "+0.400"]
    assert len({line.count("|") for line in lines}) == 1
    assert runs_markdown([{"run": "x"}]).count("–") == 12


def test_a_table_of_a_folder_without_summary_is_one_sentence(tmp_path, capsys):
    assert main(["table", str(tmp_path)]) == 2
    assert f"is {tmp_path} the folder of a finished run?" in capsys.readouterr().err
    for damaged in ("x", "[1]", "{}"):
        (tmp_path / "summary.json").write_text(damaged)
        assert main(["table", str(tmp_path)]) == 2
        assert "summary.json is not the summary of a run" in capsys.readouterr().err


def test_a_fork_begins_with_the_evaluation_of_the_version_it_was_forked_from():
    origin = {"source": "old/x", "version": "1-40", "state": "complete", "lineage": 2}
    # lineage 2 is the other run's own resume; the fork's first lineage, 3, was killed before it announced
    parents = {1: "0-0", 2: "1-40", 3: "1-40", 4: "1-40"}
    evals = [evaluation("0-0", 0.1), evaluation("2-40", 0.2), evaluation("4-40", 0.4)]
    summary = summarise(history(ledger=[], origin=origin, lineage=4, step=40, parents=parents, evals=evals))
    assert (summary["start_accuracy"], summary["forked_from"], summary["began_with"]) == (0.4, "1-40", "old/x")
    assert summary["ledger_violations"] == []
    later = [entry(41, lineage=4, at_s=2.0)]
    trained_on = history(ledger=later, origin=origin, lineage=4, step=41, parents={4: "1-40"})
    lines = result_lines(summarise(trained_on), RunFolder(Path("/r")))
    assert any(line.startswith("1 steps from step 40 on in ") for line in lines), "40 are those of the other run"


WHY = "trained to version 1-10, step 10 of 40: trainer.max_train_s (280 s) is over"
TOKENS = Stats.model_validate({**stats().model_dump(), "tokens": {"generated": 2180, "trained": 1200}})
BEST = {"version": "1-4", "metric": "pass@2", "value": 0.875, "num_prompts": 64, "num_samples": 2}


FLAT = RunSummary(state="flat", doing="It runs.", learning=None, finding="It <is>.", remedy="Try `\x1b[2J x`.")
ENDED = FLAT.model_copy(update={"state": "ended"})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_steps": 40, "state_reason": WHY}, f"ended early:   {WHY}"),
        ({"stats": TOKENS}, "tokens: 2,180 generated, 1,200 trained"),
        ({"best": BEST, "evals": [evaluation("1-8", None, "expired")]}, "best version:  1-4 (pass@2 0.875)"),
        ({"summary": FLAT}, r"flat: It <is>. Try \x1b[2J x."),
    ],
)
def test_the_last_lines_say_what_there_is(changes, line):
    assert line in result_lines(summarise(history(**changes)), RunFolder(Path("/r")))
    plain = result_lines(summarise(history(state_reason="trained to 1-10", summary=ENDED)), RunFolder(Path("/r")))
    assert not any(each.startswith(line.partition(":")[0][:5]) for each in plain)


def test_a_run_without_searchers_says_that_nothing_was_evaluated():
    summary = summarise(history(evals=[], is_offline=True))
    assert (summary["start_accuracy"], summary["final_accuracy"]) == (None, None)
    lines = result_lines(summary, RunFolder(Path("/r")))
    assert lines[0].startswith("not evaluated: the run had no searchers")
    assert not any("pass@1" in line for line in lines)
