"""`tba evaluate` with real processes: a version of a run, an exported folder, and what goes wrong on the way."""

from __future__ import annotations

import contextlib
import io
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tba.evaluation.evaluation_job import load_report
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_cli.local import evaluate as local_evaluate
from tba_cli.main import main
from tba_cli.reports.answers import AnswerComparison
from tba_cli.run_folder import RunFolder
from tests.support.exports import BEST, make_facts, published
from tests.support.history_values import history
from tests.support.reward_server import Item, RewardServer
from tests.support.searcher_world import publish_version
from tests.support.tiny_model import make_tiny_model

NUM_PROMPTS, NUM_SAMPLES = 12, 3
PAPER: dict[str, Any] = {"name": "a paper", "metric": "greedy.addition.success_rate", "value": 0.25}
PAPER |= {"setting": "7 steps", "source": "p. 3"}
PUBLISHED: dict[str, Any] = {"num_samples": NUM_SAMPLES, "tasks": ["addition", "other"], "references": [PAPER]}
PUBLISHED |= {"success_above": {"other": 0.5}, "perplexity": True}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an ended run `demo` of three versions: 0-0, 1-4 (the best one) and 1-8."""
    folder = tmp_path_factory.mktemp("workplace")
    texts = ("0-0", "1-4", "1-8")
    models = {text: make_tiny_model(folder / "models" / text, seed, hidden_size=32) for seed, text in enumerate(texts)}
    _, _, recipe = published(folder, models)
    document = recipe.model_dump(mode="json")
    document["data"] |= {"num_train": 4, "num_heldout": NUM_PROMPTS}
    document["searcher"] |= {"engine": "embedded", "max_prompt_tokens": 12, "max_response_tokens": 6}
    document["eval"]["published"] |= PUBLISHED
    run = RunFolder(folder / "runs" / "demo")
    run.path.mkdir(parents=True)
    run.marker_path.touch()
    for path in (run.recipe_path, run.config_path):
        path.write_text(json.dumps(document))
    run.history_path.write_text(history(evals=list(make_facts(recipe).evals), best=BEST).model_dump_json())
    return folder


@pytest.fixture(autouse=True)
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


def score(item: Item) -> float | str:
    """Some are known, some are not; the tasks differ."""
    value = sum(map(ord, item["response"])) % 5
    if value == 4:
        return "timeout"
    return float(value > 1) if item["task"] == "addition" else value / 4


@pytest.fixture(scope="module")
def rewards() -> Iterator[RewardServer]:
    server = RewardServer()
    server.score = score
    yield server
    server.stop()


@pytest.fixture(scope="module")
def compared(workplace: Path, rewards: RewardServer) -> AnswerComparison:
    """The starting model and the best version side by side, scored by a service that answers already."""
    words = ["evaluate", "demo", "--compare", "start", "best", "--reward-url", rewards.url, "--out", "both", "--json"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(workplace)
        assert main(words) == 0
    return AnswerComparison.model_validate_json(out.getvalue())


@pytest.fixture(scope="module")
def best(workplace: Path, compared: AnswerComparison) -> Path:
    return workplace / "both" / compared.versions[1]


def completions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_a_version_of_a_run_is_evaluated_under_every_task(workplace: Path, best: Path) -> None:
    report, lines = load_report(best / "evaluation.json"), completions(best)
    assert (report.version, report.run, report.num_prompts) == ("1-4", "demo", NUM_PROMPTS)
    manifest = WeightVersions(FileStore(workplace / "store"), "demo").manifest(PolicyVersion(1, 4))
    assert report.params_sha256 == manifest.params_sha256
    assert len(lines) == NUM_PROMPTS * (1 + NUM_SAMPLES)
    for line in lines:
        for task in ("addition", "other"):
            expected = score({"response": line["text"], "task": task})
            found = line["unknown"][task] if line["scores"][task] is None else line["scores"][task]
            assert found == expected
    greedy = [line for line in lines if line["mode"] == "greedy"]
    known = [line["scores"]["addition"] for line in greedy if line["scores"]["addition"] is not None]
    counts, rate = report.modes["greedy"].scores["addition"], report.metrics["greedy.addition.success_rate"]
    assert (counts.num_scored, counts.num_unknown) == (len(known), NUM_PROMPTS - len(known))
    assert rate.value == pytest.approx(sum(known) / len(known))
    assert report.modes["sampled"].scores["other"].success == "> 0.5"
    assert any(report.modes[mode].scores["addition"].unknown.get("timeout") for mode in report.modes)
    (comparison,) = report.references
    assert comparison.difference == pytest.approx((rate.value or 0) - 0.25)


def test_two_versions_are_compared_prompt_by_prompt(workplace: Path, compared: AnswerComparison, best: Path) -> None:
    assert (compared.versions, len(compared.pairs)) == (("0-0", "1-4"), NUM_PROMPTS)
    for number, folder in enumerate((workplace / "both" / "0-0", best)):
        greedy = {line["prompt_id"]: line for line in completions(folder) if line["mode"] == "greedy"}
        for pair in compared.pairs:
            answer, line = (pair.before, pair.after)[number], greedy[pair.prompt_id]
            assert answer is not None
            assert (answer.text, answer.rewards) == (line["text"], line["scores"])
        report = load_report(folder / "evaluation.json")
        rates = {found.task: (found.before, found.after) for found in compared.differences if "rate" in found.what}
        for task in ("addition", "other"):
            assert rates[task][number].value == report.metrics[f"greedy.{task}.success_rate"].value
    assert AnswerComparison.model_validate_json((workplace / "both" / "0-0-and-1-4.json").read_bytes()) == compared


def test_it_leaves_tables_and_no_weights(best: Path) -> None:
    table = (best / "evaluation.md").read_text()
    assert "version 1-4 of run 'demo': 12 held-out prompts" in table
    assert "greedy.perplexity.published" in table
    assert not list(best.rglob("*.safetensors"))


def test_an_exported_folder_under_a_recipe_gives_the_same_and_a_service_is_started_and_ended(workplace, best, capsys):
    assert main(["export", "demo", "--version", "best", "--out", "exported"]) == 0
    Path("recipe.json").write_text((workplace / "runs" / "demo" / "recipe.json").read_text())
    sets = ["--set", "eval.published.tasks=[]", "--set", "eval.published.perplexity=false"]
    sets += ["--set", "eval.published.references=[]"]
    assert main(["evaluate", "recipe.json", "--model", "exported", *sets]) == 0
    out = capsys.readouterr().out
    folder = workplace / "evaluations" / "demo" / "folder-exported"
    report = load_report(folder / "evaluation.json")
    assert "starting a reward service at http://127.0.0.1:" in out
    assert "| greedy.exact.success_rate" in out
    num = NUM_PROMPTS * (1 + NUM_SAMPLES)
    assert f"{num} of {num} completions, " in out
    assert f"{num} of {num} scores\n" in out
    assert report.version is None
    assert [line["text"] for line in completions(folder)] == [line["text"] for line in completions(best)]
    prompts = json.loads((folder / "job.json").read_text())["prompts"]
    answers = {prompt["prompt_id"]: prompt["data"]["answer"] for prompt in prompts}
    for line in completions(folder):
        assert line["scores"] == {"exact": float(line["text"] == answers[line["prompt_id"]])}
    assert (folder / "logs" / "reward.log").exists()
    # the service asked for tokens that no other user of this machine could read
    tokens = folder / "secrets" / "tokens" / "all.json"
    assert json.loads((folder / "config.json").read_text())["auth"]["tokens_file"] == str(tokens)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, tokens)] == [0o700, 0o600]


def test_a_version_that_does_not_verify_in_the_engine_is_not_evaluated(workplace, rewards, capsys):
    versions = WeightVersions(FileStore(workplace / "store"), "demo")
    spoilt = PolicyVersion(2, 1)
    publish_version(versions, workplace / "models" / "1-8", spoilt, parent=START, canary_shift=0.5)
    try:
        assert main(["evaluate", "demo", "--version", "2-1", "--reward-url", rewards.url]) == 1
    finally:
        versions.delete(spoilt)
    error = capsys.readouterr().err
    assert "canary log-probs are off" in error
    assert "evaluations/demo/2-1/logs/evaluator.log" in error
    assert not Path("evaluations/demo/2-1/evaluation.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "--version", "7-7"], "no weight version 7-7"),
        (["demo", "--version", "best", "--model", "models/0-0"], "give one of them"),
        (["demo", "--compare", "1-4", "best"], "both are version 1-4"),
        (["demo", "--compare", "start", "last", "--version", "1-4"], "does not go with a recipe, --model or"),
        (["demo", "--compare", "0-0", "1-9"], "no weight version 1-9"),
        (["demo", "--limit", "5"], "--limit says how many prompts --compare A B shows"),
        (["demo", "--compare", "0-0", "1-8", "--out", "runs/demo"], "is the folder of a run"),
        (["demo", "--set", "searcher.engine=simulated"], "generates random completions"),
        (["demo", "--set", 'eval.published.by=["level"]'], "names 'level', and held-out prompt "),
        (["nobody"], "runs/nobody/config.json; the runs beside it are: demo"),
        (["demo", "--model", "runs"], "holds no model"),
        (["runs/demo/recipe.json", "--version", "1-4"], "names a version of a run"),
        (["demo", "--out", "models"], "is not the folder of an evaluation"),
        (["demo", "--out", "runs/demo"], "is the folder of a run"),
        (["demo", "--reward-url", "http://127.0.0.1:1"], "does not answer"),
        (["demo", "--set", 'eval.published.tasks=["magic"]', "--set", "eval.published.references=[]"], "'magic'"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_a_sentence(words, message, rewards, capsys):
    url = [] if "--reward-url" in words else ["--reward-url", rewards.url]
    assert main(["evaluate", *words, *url]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert Path("runs/demo/history.json").exists()


def test_a_damaged_version_is_not_evaluated(workplace: Path, rewards: RewardServer, capsys) -> None:
    store = FileStore(workplace / "store")
    key = WeightVersions(store, "demo").manifest(PolicyVersion(1, 8)).full[0].key
    whole = store.get(key)
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        assert main(["evaluate", "demo", "--reward-url", rewards.url]) == 2
    finally:
        store.put(key, whole)
    assert "weights/1-8/model.safetensors" in capsys.readouterr().err


def test_an_evaluator_that_says_nothing_is_killed(rewards: RewardServer, capsys, monkeypatch) -> None:
    monkeypatch.setattr(local_evaluate, "SILENCE_S", 0.01)
    assert main(["evaluate", "demo", "--reward-url", rewards.url]) == 2
    assert "wait 'evaluator': it reported nothing for 0.01 s" in capsys.readouterr().err
