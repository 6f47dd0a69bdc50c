"""`tba init --model --data`: the recipe fits rows, model and machine; the programs that measure run in this process."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from tba_trainer.memory_trace import __main__ as memory_trace

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli import child_processes
from tba_cli.commands import init
from tba_cli.main import main
from tba_cli.prompts.reader import prompts_of
from tba_cli.scripting import inputs
from tba_cli.setup import model_recipe
from tba_cli.setup.model_recipe import SCORER, Machine, model_task_files
from tba_cli.sizing.gpu_layout import GIB
from tba_cli.starter_models.convert import chat_texts, check
from tests.support.hub_server import HubServer
from tests.support.tiny_reward_models import save_chat_model

CHAT = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<s>assistant: {% endif %}"
LAPTOP = Machine(2, 16 * GIB)
NUM_ROWS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with one token per byte and room for 256."""
    return str(save_chat_model(tmp_path_factory.mktemp("chat") / "tiny", chat=CHAT))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def run_here(module: str, words: list[str]) -> str:
        if module == "tba_trainer.memory_trace":
            with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
                patch.setattr("sys.argv", [module, *words])
                assert memory_trace.main() == 0
            return out.getvalue()
        texts = json.loads(Path(words[-1]).read_bytes())
        is_chat = words[0] == "chat"
        return json.dumps(chat_texts(Path(words[1]), texts, {}) if is_chat else check(Path(words[1]), texts))

    monkeypatch.setattr(child_processes, "run_program", run_here)
    monkeypatch.setattr(init, "this_machine", lambda: LAPTOP)
    monkeypatch.setattr(inputs, "this_machine", lambda: LAPTOP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*rows: dict[str, Any]) -> Path:
    path = Path("given.jsonl").absolute()
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


SUMS = [{"prompt": user(f"What is {n} + {n}?"), "answer": str(2 * n)} for n in range(NUM_ROWS)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "numbers": SUMS,
    "marked": [{"question": f"Add {n} and 1.", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(NUM_ROWS)],
    "latex": [{"question": f"What is {{1}} / {n}?", "solution": f"$\\boxed{{\\frac1{n}}}$"} for n in range(2, 42)],
    "text": [{"prompt": f"Who has {n}?", "completion": f"Player {n}", "other": None} for n in range(NUM_ROWS)],
}
SCORERS = {"numbers": "last_number", "marked": "last_number", "latex": "math", "text": "python"}


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_fits_rows_and_model_and_passes_every_check(name: str, model: str, monkeypatch, capsys) -> None:
    rows = ROWS[name]
    assert main(["init", "mine", "--model", model, "--data", str(write(*rows)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    monkeypatch.chdir("mine")
    recipe = load_recipe("mine.toml")
    assert [spec.kind for spec in recipe.reward.tasks["mine"].scorers] == [SCORERS[name]]
    prompts = prompts_of(recipe)
    assert sum(prompt.split == "heldout" for prompt in prompts) == NUM_ROWS // 5
    # also for rows of plain text
    assert all(re.fullmatch(r"<s>user: .+</s><s>assistant: ", prompt.text) for prompt in prompts)
    longest = max(len(re.sub("</?s>", "x", prompt.text)) for prompt in prompts)
    assert recipe.searcher.max_prompt_tokens == math.ceil(longest / 16) * 16
    gold = max(len(str(row.get("answer") or row.get("solution") or row["completion"]).encode()) for row in rows)
    room = 32 if name == "numbers" else 32 + 2 * gold
    assert recipe.searcher.max_response_tokens == math.ceil(room / 16) * 16
    assert recipe.trainer.num_steps * recipe.sampling.prompts_per_batch >= 3 * NUM_ROWS * 4 // 5
    assert (recipe.model.lora, recipe.trainer.learning_rate.value) == (None, 2e-5)
    assert main(["config", "check", "mine.toml"]) == 0
    assert "WARN" not in capsys.readouterr().out
    if name == "text":
        assert main(shown := ["score", "examples.jsonl", "--recipe", "mine.toml"]) == 0
        assert document["next"][0] == f"tba {' '.join(shown)}"
    assert len(document["next"]) == 2 + (name == "text")


def from_python(model: str, rows: Any, **given: Any) -> Recipe:
    """Return the recipe that `tba.run(model=..., prompts=rows, name="Mine", ...)` runs."""
    return load_recipe(inputs.prepare(None, model=model, prompts=rows, name="Mine", **given).recipe)


@pytest.mark.parametrize("name", ["numbers", "text"])
def test_a_run_from_python_has_the_recipe_of_tba_init(name: str, model: str) -> None:
    recipe = fitted(model, ROWS[name])[1].model_dump(mode="json")
    found = from_python(model, datasets.Dataset.from_list(ROWS[name])).model_dump(mode="json")
    place = Path("runs/.python/mine").absolute()
    assert found["data"]["sets"][0].pop("dataset") == str(place / "rows.jsonl")
    assert recipe["data"]["sets"][0].pop("dataset") == "rows.jsonl"
    assert found == recipe
    assert (place / "scorer.py").exists() == (name == "text")


class Shop:
    """An environment, by name alone."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_an_environment_pays_without_gold_answers_and_its_prompts_are_messages(model: str) -> None:
    rows = [{"prompt": f"Sell {n}", "good": f"tea {n}"} for n in range(NUM_ROWS)]
    recipe = from_python(model, rows, environment=Shop, tools=[add])
    section = recipe.environments["mine"]
    assert (section.environment, section.tools) == (f"{__name__}:Shop", [f"{__name__}:add"])
    assert (recipe.reward.tasks, recipe.paid_by_environment) == ({}, {"mine"})
    first = prompts_of(recipe)[0]
    assert (first.messages, first.data["good"]) == (user("Sell 0"), "tea 0")
    # of 256 that the model takes: a conversation grows
    assert (recipe.searcher.max_prompt_tokens, recipe.searcher.max_response_tokens) == (192, 64)
    assert (
        "mine" in from_python(model, rows, environment=Shop, rewards=[{"kind": "format", "pattern": "x"}]).reward.tasks
    )
    # tools alone: the gold answers decide
    (scorer,) = from_python(model, SUMS, tools=[add]).reward.tasks["mine"].scorers
    assert scorer.kind == "last_number"
    with pytest.raises(ConfigError, match="no column is a gold answer"):
        from_python(model, rows, tools=[add])


CAPITALS = """
def capitals(prompts, completions, solution, hint=None, **columns):
    assert all(turns[-1]["role"] == "user" for turns in prompts) and hint[0] == "a city"
    return [float(gold in turns[0]["content"]) for turns, gold in zip(completions, solution)]
"""


def test_a_conversational_function_of_trl_runs_on_both_recipes(model: str, monkeypatch, capsys) -> None:
    rows = [{"prompt": user(f"Q{n}?"), "solution": f"City {n}", "hint": "a city"} for n in range(NUM_ROWS)]
    inputs.prepare(
        None, model=model, prompts=rows, name="mine", rewards=[{"kind": "python", "function": "own:capitals"}]
    )
    ours = Path("runs/.python/mine/recipe.json").absolute()
    assert main(["init", "mine", "--model", model, "--data", str(write(*rows))]) == 0
    monkeypatch.chdir("mine")
    Path("own.py").write_text(CAPITALS)
    data = [sorted((one.data for one in prompts_of(load_recipe(path))), key=str) for path in ("mine.toml", ours)]
    assert data[0] == [{**one, "answer": one["solution"]} for one in data[1]]
    for path in ("mine.toml", str(ours)):
        own = 'reward.tasks.mine.scorers=[{kind = "python", function = "own:capitals"}]'
        assert main(["config", "check", path, "--set", own]) == 0
        assert "task 'mine': made-up responses score: '1' 0, data.solution 'City" in capsys.readouterr().out, path
    # what init writes runs on messages too
    assert main(["score", "examples.jsonl", "--recipe", "mine.toml"]) == 0


def test_memory_is_traced_only_where_it_is_scarce(model: str) -> None:
    text = fitted(model, SUMS)[0]
    assert re.search(r"# all weights: to train all takes less than [\d.]+ GiB, of half of 16 GiB", text)
    assert "GiB (traced), of half" in fitted(model, SUMS, Machine(2, 2**20))[0]


def test_a_rate_far_above_those_of_others_is_warned_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"run": {"name": "x"}, "model": {"path": str(place)}, "data": {"generator": "addition"}}
    monkeypatch.setattr(model_recipe, "shape_of_folder", lambda _: SimpleNamespace(num_params=135_000_000))
    for rate, is_far in ((1e-3, True), (1e-4, False)):
        warning = model_recipe.rate_warning(Recipe.model_validate({**document, "trainer": {"learning_rate": rate}}))
        assert (warning is not None and "0.001, 50 times" in warning) == is_far


def test_rewards_from_python_get_every_column_and_messages_as_in_trl(model: str) -> None:
    def near(prompts, completions, answer, **columns):
        return [float(answer)]

    form = {"kind": "format", "pattern": 'a "b"', "unreadable": 0.0, "gate": 1.0}
    rows = [{**row, "hard one": number, "answer": [row["answer"]]} for number, row in enumerate(SUMS)]
    recipe = from_python(model, rows, rewards=[near, form], lora=True)
    written = recipe.reward.tasks["mine"].scorers
    assert [spec.part for spec in written] == ["near", "format"]
    assert written[1].model_dump(mode="json", include=set(form)) == form
    prompt, row = next((one, row) for one in prompts_of(recipe) for row in rows if row["answer"] == one.data["answer"])
    assert prompt.data == row
    assert (recipe.model.lora is not None, recipe.trainer.learning_rate.value) == (True, 2e-4)
    # without gold answers nothing is compared with them, and plain text stays text
    recipe = from_python(model, [{"prompt": f"Say {n}"} for n in range(8)], rewards=[near], lora=False, fresh=True)
    assert (recipe.model.lora, prompts_of(recipe)[0].data) == (None, {})


def test_what_does_not_fit_is_named_by_its_place_in_the_list(model: str) -> None:
    with pytest.raises(ConfigError, match=rf"^prompts\[{NUM_ROWS}\]: column 'answer' is missing"):
        from_python(model, [*SUMS, {"prompt": user("a")}])
    assert not Path("runs").exists()


def fitted(model: str, rows: list[dict[str, Any]], machine: Machine = LAPTOP) -> tuple[str, Recipe]:
    text = model_task_files("mine", model, write(*rows), machine)["mine.toml"]
    Path("mine.toml").write_text(text)
    return text, load_recipe("mine.toml")


@pytest.mark.parametrize("machine", [LAPTOP, Machine(8, 64 * GIB, [80 * GIB] * 3, True), Machine(2, 2**20)], ids=str)
def test_every_number_has_its_reason_and_little_memory_trains_an_adapter(model: str, machine: Machine) -> None:
    text, recipe = fitted(model, SUMS, machine)
    # neither beside it nor in the line above
    assert re.findall(r"(?m)^(?!#).*\n(?!path|name)[\w.]+ = [^#\n]*\d[^#\n]*$", text) == []
    has_lora = machine.memory_bytes < GIB
    assert (recipe.model.lora is not None) == has_lora
    assert recipe.trainer.learning_rate.value == (2e-4 if has_lora else 2e-5)


@pytest.mark.parametrize("num_gpus", [1, 3])
def test_gpus_are_used_and_the_trainer_has_its_own_where_there_are_several(model: str, num_gpus: int) -> None:
    _, recipe = fitted(model, SUMS, Machine(8, 64 * GIB, [80 * GIB] * num_gpus, True))
    assert (recipe.trainer.device, recipe.trainer.compute_dtype) == ("cuda", recipe.model.dtype)
    assert (recipe.searcher.device, recipe.searcher.engine) == ("cuda", "vllm")
    assert recipe.searcher.num_searchers == max(1, num_gpus - 1)
    assert recipe.local.gpus.searchers == (None if num_gpus == 1 else [[1], [2]])
    assert recipe.model.lora is None
    # a card that the weights alone fill
    assert fitted(model, SUMS, Machine(8, 64 * GIB, [2**20] * num_gpus, True))[1].model.lora is not None


def test_a_model_of_the_hub_is_measured_without_its_weights(model: str, place: Path, monkeypatch) -> None:
    hub = HubServer({"models/org/chat": Path(model)})
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "cache"))
    text, recipe = fitted("org/chat", SUMS)
    assert recipe.model.path == "models/org/chat"
    assert 'path = "org/chat"' in text
    assert recipe.searcher.max_prompt_tokens == fitted(model, SUMS)[1].searcher.max_prompt_tokens
    assert not any(name.endswith(".safetensors") for name in hub.downloads)
    hub.close()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="without a network"):
        fitted("org/chat", SUMS)


@pytest.mark.parametrize(
    ("rows", "model_path", "said"),
    [
        ([], None, "holds no rows"),
        ([{"text": "a", "label": 1}], None, r"line 1: .*prompt, question, messages.*text, label"),
        ([{"prompt": "a", "label": 1}], None, r"line 1: .*answer, solution, ground_truth, completion.*prompt, label"),
        ([SUMS[0], {"prompt": user("a")}], None, r"line 2: column 'answer' is missing"),
        (
            [{"messages": [*user("a"), {"role": "assistant", "content": "b"}], "answer": "b"}],
            None,
            "line 1: 'messages'",
        ),
        ([*SUMS, {"prompt": user("x" * 230), "answer": "1"}], None, r"has 250 tokens, and .* takes 256 .*x{40}"),
        ([*SUMS, {"prompt": user("x"), "answer": " "}], None, rf"line {NUM_ROWS + 1}: its 'answer' is empty"),
        ([*SUMS, {"prompt": "x", "answer": "1"}], None, "holds messages and texts, such as 'x'"),
        (
            [{"prompt": text, "answer": "1"} for text in ("x", "y</s><s>assistant:")],
            None,
            "with and without .* such as 'y<",
        ),
        (SUMS, "model.gguf", r"model\.gguf holds no config\.json.*\[\[prepare\]\]"),
    ],
)
def test_what_does_not_fit_is_named(rows: list[dict[str, Any]], model_path: str | None, said: str, model: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fitted(model_path or model, rows)


def test_one_flag_alone_and_an_existing_folder_are_refused(model: str, place: Path, capsys) -> None:
    data = str(write(*SUMS))
    for words in (["--model", model], ["--data", data]):
        assert main(["init", "mine", *words]) == 2
        assert "--model and --data belong together" in capsys.readouterr().err
    (place / "mine").mkdir()
    (place / "mine" / "notes").touch()
    assert main(["init", "mine", "--model", model, "--data", data]) == 2
    assert "mine exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("golds", "kind"),
    [
        (("1,234", "-5", ".5"), "last_number"),
        (("3,4", "5"), "python"),
        (("It costs $5 in all", "C:\\Users"), "python"),
        ((r"2\pi", "$x$", "3"), "math"),
    ],
)
def test_the_gold_answers_decide_the_scorer(golds: tuple[str, ...], kind: str, model: str) -> None:
    rows = [{"prompt": user(f"q {number}"), "answer": gold} for number, gold in enumerate(golds)]
    assert fitted(model, rows)[1].reward.tasks["mine"].scorers[0].kind == kind


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        ("?", "", 0.0),
        ("?", "?", 1.0),
        ("<", "", 0.0),
        ("<", "it is <", 1.0),
        ("5", "-5", 0.0),
        ("1.5", "it is 1.5.", 1.0),
    ],
)
def test_the_first_guess_of_a_scorer_pays_no_empty_answer(gold: str, response: str, reward: float) -> None:
    names: dict[str, Any] = {}
    exec(SCORER, names)
    assert names["score"]([""], [response], [gold]) == [reward]
