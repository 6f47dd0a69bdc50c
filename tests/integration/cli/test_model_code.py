"""Models that come with code of their own: the chat template and the checks follow `model.trust_remote_code`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tba.api import Prompt
from tba.config import Recipe, parse_recipe
from tba.errors import ConfigError
from tba_cli.prompts.reader import prompts_of
from tba_cli.setup.prepare import measure_model, try_model
from tests.support.tiny_reward_models import save_chat_model

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
print("code of the model prints")

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN_CLASSES = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnForCausalLM"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    save_chat_model(folder)
    (folder / "code.py").write_text(CODE)
    own_tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]}}
    own_model = {"model_type": "own", "auto_map": OWN_CLASSES}
    for name, changes in (("config.json", own_model), ("tokenizer_config.json", own_tokenizer)):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(4)]
    (folder.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def recipe(folder: Path, *, trust: bool) -> Recipe:
    rows = str(folder.parent / "rows.jsonl")
    part = {"task": "math", "dataset": rows, "column": "prompt", "data": {"answer": "answer"}}
    data = {"sets": [part], "num_heldout": 1}
    model = {"path": str(folder), "trust_remote_code": trust}
    return parse_recipe({"run": {"name": "r"}, "model": model, "data": data}, where="test")


def test_the_chat_template_and_the_checks_run_code_that_the_recipe_trusts(folder):
    trusted = recipe(folder, trust=True)
    prompts = prompts_of(trusted)
    assert sorted(prompt.text for prompt in prompts)[0] == "<s>user: 0+1=<s>assistant: "
    answer, _ = measure_model(trusted, prompts)
    assert min(answer["text_tokens"]) > 0
    assert try_model(trusted) == {"architecture": "LlamaForCausalLM", "is_decoded": True}


def test_code_that_the_recipe_does_not_trust_is_named_with_the_key(folder):
    untrusted = recipe(folder, trust=False)
    prompt = Prompt(prompt_id="p", task="math", text="1+1=", data={})
    for check in (lambda: prompts_of(untrusted), lambda: measure_model(untrusted, [prompt])):
        with pytest.raises(ConfigError, match=r"model\.trust_remote_code = true"):
            check()
