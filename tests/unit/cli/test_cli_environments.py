"""Tasks that are played in environments: known, paid, and tried before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tba.api import Prompt, RewardInfo, RewardsReply
from tba.errors import ConfigError, pip_install
from tba_cli.commands.evaluate import sample_answers
from tba_cli.doctor.checks.recipe import RecipeChecks
from tba_cli.doctor.checks.services import check_rewards
from tba_cli.doctor.target import CheckResult, Target, target_of
from tba_cli.local import reward_trial
from tba_cli.local.evaluate import EvaluationConsole
from tba_cli.local.supervisor import Supervisor
from tba_cli.main import main
from tba_cli.prompts.reader import check_tasks, gold_keys, tasks_of_recipe
from tba_cli.resolve import check_installed
from tba_cli.setup import environment_trial
from tba_cli.setup.environment_trial import try_environment
from tests.support.buffer import make_recipe
from tests.support.local_workplace import wait_until

SHOP = '''
import os
from typing import Annotated
from pydantic import Field

class Shop:
    def __init__(self, goods=1):
        self.goods = goods

    async def reset(self, seed, data):
        os.system("echo noise")
        return ["We sell " + data["good"]] * self.goods, [self.buy]

    async def step(self, reply):
        return (), 1.0, True

    async def close(self):
        pass

    def buy(self, good: Annotated[str, Field(description="its name")]) -> str:
        """Buy a good."""
        return good

class Slow(Shop):
    async def reset(self, seed, data):
        while True:
            pass

class Rude(Shop):
    async def reset(self, seed, data):
        return [{"role": "guest", "content": "x"}]

class Gone(Shop):
    def reset(self, seed, data):
        os._exit(0)

class Killed(Shop):
    def reset(self, seed, data):
        os.kill(os.getpid(), 9)

class Sold(Shop):
    def reset(self, seed, data):
        return data["good"], self.godos

class Open(Shop):
    def close(self):
        raise OSError("no key")

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def untold(a: int) -> int:
    return a
'''
LEAVES = """
import os, subprocess, time
from pathlib import Path

class Shop:
    def reset(self, seed, data):
        Path("started").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        if not (pid := os.fork()):
            time.sleep(600)
        Path("forked").write_text(str(pid))
        return data["no such"]

    step = close = reset
"""
SECTION = {"environment": "shop:Shop"}
SCORED = {"tasks": {"played": {"scorers": [{"kind": "exact"}]}}}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def recipe(section: dict[str, Any] = SECTION, **sections: Any) -> Any:
    return make_recipe(environments={"played": {"turn_timeout_s": 5.0, **section}}, **sections)


def prompts(**fields: Any) -> list[Prompt]:
    row = {"prompt_id": "p", "task": "played", "text": "x", "data": {"good": "tea"}}
    return [Prompt.model_validate({**row, "prompt_id": "other", "task": "gsm8k"}), Prompt.model_validate(row | fields)]


# ---- known and paid -------------------------------------------------------------------------------------------------


def test_a_task_with_an_environment_is_known_and_a_nearly_right_name_is_not() -> None:
    known = tasks_of_recipe(recipe())
    check_tasks(prompts(), known)
    with pytest.raises(ConfigError, match=r"'playd', which no reward .* environments; did you mean 'played'"):
        check_tasks(prompts(task="playd"), known)


def test_an_environment_alone_pays_unless_the_recipe_names_scorers() -> None:
    assert recipe().paid_by_environment == {"played"}
    assert recipe(reward=SCORED).paid_by_environment == set()
    tools = {"environments": {"math": {"tools": ["shop:add"]}, "exact": SECTION}}
    both = make_recipe(**tools)
    assert both.paid_by_environment == {"exact"}, "what the reward service scores anyway pays for tools alone"
    # a prompt that only an environment reads needs no gold answer
    assert "exact" not in gold_keys(both)
    assert gold_keys(both)["math"] == ["answer"]


def supervised(scored: list[str], **sections: Any) -> None:
    """Check as the supervisor does once the reward service is ready."""
    rewards = [RewardInfo(task=task, version="1", health="ok", scorers=[]) for task in scored]
    place = SimpleNamespace(has_begun=False)
    client = SimpleNamespace(rewards=lambda: rewards)
    fake: Any = SimpleNamespace(_rewards=client, recipe=recipe(**sections), prompts=prompts(), folder=place)
    Supervisor._check(fake)


def test_a_run_asks_the_reward_service_for_what_environments_do_not_pay() -> None:
    supervised(["gsm8k"])
    with pytest.raises(ConfigError, match="'played', which no reward scores"):
        supervised(["gsm8k"], reward=SCORED)


def test_scorers_are_not_tried_where_an_environment_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_trial, "ask_scorers", lambda recipe, ask: None)
    assert list(reward_trial.try_scorers(recipe(), prompts(), http=True).tried) == ["gsm8k"]
    assert list(reward_trial.try_scorers(recipe(reward=SCORED), prompts(), http=True).tried) == ["gsm8k", "played"]


def test_an_answer_that_only_an_environment_pays_cannot_be_scored(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.json").write_text(recipe().model_dump_json())
    Path("own.jsonl").write_text(json.dumps({"task": "played", "prompt": "x", "response": "y"}))
    assert main(["score", "own.jsonl", "--recipe", "recipe.json"]) == 2
    assert "line 1: task 'played' is paid by its environment alone" in capsys.readouterr().err


def test_an_evaluation_of_single_answers_refuses_episodes() -> None:
    Path("model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        Path("model", name).write_text("{}")
    of_model = recipe(model={"path": "model"})
    with pytest.raises(ConfigError, match=r"'played' is played with environments\.played, and only a run plays"):
        sample_answers(of_model, prompts(), 2, EvaluationConsole("quiet"))
    assert not Path("evaluations").exists()


# ---- checks ---------------------------------------------------------------------------------------------------------


def found_by(section: dict[str, Any], of: list[Prompt]) -> list[CheckResult]:
    checked = recipe(section)
    checks = RecipeChecks(checked, offline=True, try_scorers=None, file=Path("recipe.json"), prompts=of)
    return list(checks.check_environments(target_of(checked, service=None)))


def test_a_check_says_what_an_episode_begins_with_and_what_fails() -> None:
    (good,) = found_by(SECTION, prompts())
    said = "task 'played': environment 'shop:Shop': an episode begins with 1 message and 1 tool"
    assert (good.level, good.found) == ("ok", said)
    (bad,) = found_by({"environment": "shop:Sohp"}, prompts())
    assert (bad.level, bad.fix) == ("fail", "did you mean 'Shop'?")
    adapter = {"environment": "tba.environments.adapters:required", "settings": {"module": "absent", "package": "a-b"}}
    (lacking,) = found_by(adapter, prompts())
    assert (lacking.level, lacking.fix) == ("fail", pip_install("a-b"))
    (away,) = found_by({"environment": "http://127.0.0.1:9"}, prompts())
    assert (away.level, away.found) == (
        "skip",
        "task 'played': its environment is at http://127.0.0.1:9, and was not tried",
    )


def test_an_environment_without_prompts_is_a_warning_and_one_with_prompts_none() -> None:
    other, played = prompts()
    rows = [other.model_copy(update={"split": "heldout", "data": {"answer": "1"}}), played]
    for names, num in ((["played"], 0), (["played", "plaid"], 1)):
        Path("prompts.jsonl").write_text("\n".join(row.model_dump_json() for row in rows))
        checked = make_recipe(
            data={"path": "prompts.jsonl", "generator": None}, environments=dict.fromkeys(names, SECTION)
        )
        checks = RecipeChecks(checked, offline=True, try_scorers=None, file=Path("recipe.json"))
        results = [
            each for each in checks.check_prompts(target_of(checked, service=None)) if each.code == "environment"
        ]
        assert [each.found for each in results] == [
            "no prompt has the task 'plaid', so environments.plaid is never played"
        ][:num]


def test_the_reward_service_need_not_know_what_an_environment_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [{"task": task, "texts": ["x"]} for task in ("played", "gsm8k")]
    reply = RewardsReply(rewards=[RewardInfo(task="gsm8k", version="1", health="ok", scorers=[])])
    monkeypatch.setattr(Target, "read", lambda *_, **__: reply)
    for sections, level in (({}, "ok"), ({"reward": SCORED}, "fail")):
        checked = recipe(data={"sets": sets, "generator": None}, **sections)
        results = list(check_rewards(target_of(checked, service=None)))
        assert [each.level for each in results] == ["ok", level], results


# ---- the trial ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"environment": "shop:Sohp"}, r"environment 'shop:Sohp' cannot be imported .*; did you mean 'Shop'\?$"),
        (
            {**SECTION, "settings": {"godos": 2}},
            r"\.settings do not fit shop:Shop: got an unexpected keyword argument 'godos'",
        ),
        ({**SECTION, "tools": ["shop:untold"]}, ": loading: tool untold has no docstring"),
        ({"environment": "shop:Slow", "turn_timeout_s": 0.1}, r": reset for prompt 'p' took more than 0\.1 s; make"),
        ({"environment": "shop:Rude"}, r": reset for prompt 'p': \{'role': 'guest', 'content': 'x'\} is no message"),
        ({"environment": "shop:Gone"}, r": the process that tried it ended early \(exit code 0\)"),
        ({"environment": "shop:Killed"}, r"ended early \(exit code -9\)"),
        ({"environment": "shop:Sold"}, r"reset for prompt 'p': reset raised AttributeError: .* \(shop\.py:43\); "),
        ({"environment": "shop:Open"}, r": close: close raised OSError: no key \(shop\.py:47\)"),
    ],
)
def test_what_keeps_an_environment_from_being_played_is_a_sentence(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environments\.played.*{said}") as caught:
        try_environment(recipe(section), "played", prompts())
    assert "\n" not in str(caught.value)


def test_tools_alone_and_an_environment_without_prompts_are_tried_too() -> None:
    tools = recipe({"tools": ["shop:add"]}, reward=SCORED)
    assert try_environment(tools, "played", prompts()) == "tools: a prompt has 1 message and 1 tool"
    chat = prompts(messages=[{"role": "system", "content": "be"}, {"role": "user", "content": "x"}])
    two = recipe({**SECTION, "settings": {"goods": 2}})
    assert try_environment(two, "played", chat).endswith("begins with 4 messages and 1 tool")
    assert try_environment(two, "played", []).endswith("can be loaded; there is no prompt to begin with")


def test_what_an_environment_leaves_behind_is_ended_and_not_waited_for(place: Path) -> None:
    (place / "shop.py").write_text(LEAVES)
    with pytest.raises(ConfigError, match="KeyError: 'no such'"):
        try_environment(recipe(), "played", prompts())
    for name in ("forked", "started"):
        wait_until(f"what was {name} is gone", lambda name=name: is_gone(int(Path(name).read_text())))


def test_a_module_that_is_missing_is_found_without_importing_anything() -> None:
    Path("shop.py").write_text("raise RuntimeError")
    check_installed(recipe({**SECTION, "tools": ["shop:add"]}))
    for section in ({"environment": "shpo:Shop"}, {**SECTION, "tools": ["shpo:add"]}):
        with pytest.raises(ConfigError, match=r"environments\.played\.\w+ 'shpo:\w+': there is no module 'shpo'"):
            check_installed(recipe(section))


def test_checks_wait_as_long_as_the_trials_of_all_environments_may_take() -> None:
    one = environment_trial.most_s(recipe({**SECTION, "turn_timeout_s": 1000.0}))
    assert one > 2000
    checks = RecipeChecks(
        recipe({**SECTION, "turn_timeout_s": 1000.0}), offline=True, try_scorers=None, file=Path("recipe.json")
    )
    assert checks.timeout_s > one
