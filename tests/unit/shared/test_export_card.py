"""The model card: read by Hugging Face, complete, and without addresses or secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from tba.config.data import DataSection, PrepareItem
from tba.weights.export import RunFacts, render_card
from tba.wire import Manifest
from tests.support.exports import make_eval, make_facts
from tests.support.trainer_values import make_recipe
from tests.support.wire_values import manifest


def make_manifest(version: str = "1-8", dtype: str = "bfloat16") -> Manifest:
    return manifest().model_copy(update={"version": version, "dtype": dtype, "parent": "1-4", "delta": None})


def test_the_front_matter_is_what_hugging_face_reads() -> None:
    facts = make_facts(make_recipe("models/tiny: a 'base'"))
    data: Any = ModelCard(render_card(make_manifest("1-4"), facts), ignore_metadata_errors=False).data
    assert data.base_model == "tiny: a 'base'"
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert {"tba", "tb"} <= set(data.tags or ())


def test_the_card_names_the_version_its_results_and_the_recipe() -> None:
    facts = make_facts(make_recipe(Path("models/tiny"), trainer={"num_steps": 8}))
    text = render_card(make_manifest(), facts)
    assert "# demo, version 1-8" in text
    assert "| start of the run | 0-0 | 128 | 0.250 |" in text
    assert "This version itself was not evaluated." in text
    assert "| this version | 1-4 | 128 | 0.750 | 0.625 | 0.875 |" in render_card(make_manifest("1-4"), facts)
    assert '"num_steps": 8' in text
    assert "bfloat16" in text
    assert "trained: all weights; seed 3" in text
    adapted = make_facts(make_recipe("models/tiny", model={"lora": {"rank": 4}}))
    assert "a LoRA adapter of rank 4, merged into the weights" in render_card(make_manifest(), adapted)


def test_the_card_says_what_the_chat_template_was_called_with() -> None:
    recipe = make_recipe("models/tiny")
    assert "without a chat template" in render_card(make_manifest(), make_facts(recipe))
    rows = {"task": "t", "dataset": "d", "column": "prompt", "chat_template_kwargs": {"enable_thinking": False}}
    data = DataSection.model_validate({"sets": [rows]})
    text = render_card(make_manifest(), make_facts(recipe.model_copy(update={"data": data})))
    assert "without a chat template" not in text
    assert 'chat template, called with `{"enable_thinking": false}`' in text


def test_without_evaluations_the_card_says_so_and_invents_no_number() -> None:
    recipe = make_recipe("models/tiny")
    text = render_card(make_manifest(), RunFacts(recipe=recipe, evals=[make_eval("1-8", state="expired")]))
    assert "No evaluation of this run is known." in text
    unknown = make_eval("1-8", accuracy=None, greedy_accuracy=None, mean_reward=None)
    text = render_card(make_manifest(), RunFacts(recipe=recipe, evals=[unknown]))
    assert "| this version | 1-8 | 128 | unknown | unknown |" in text


def test_addresses_folders_and_secrets_stay_at_home() -> None:
    recipe = make_recipe(
        "/home/SECRET/models/tiny",
        data={"generator": None, "path": "/home/SECRET/prompts.jsonl"},
        eval={"embedding_model": "/home/SECRET/encoder", "num_samples": 2},
        buffer={"redis_url": "redis://:SECRET@cache.internal:6379/0", "host": "10.0.0.7", "max_rollouts": 777},
        store={"url": "s3://private-bucket/x", "endpoint_url": "https://store.internal"},
        auth={"tokens_file": "/etc/tokens.json"},
        reward={
            "url": "http://reward.internal",
            "tasks": {"judged": {"scorers": [{"kind": "http", "url": "https://u:SECRET@judge/v1?api_key=SECRET"}]}},
        },
        searcher={"openai": {"url": "http://vllm.internal:8000"}},
        tracking={"wandb": {"project": "SECRET"}},
    )
    item = PrepareItem(path="/home/SECRET/victim", kind="model", trl_sft="/home/SECRET/sft.yaml")
    recipe = recipe.model_copy(update={"prepare": [item]})
    text = render_card(make_manifest(), make_facts(recipe))
    for private in ("SECRET", "internal", "10.0.0.7", "private-bucket", "tokens.json"):
        assert private not in text
    assert '"max_rollouts": 777' in text
    assert '"url": "https://judge/v1"' in text
    trained = ('"path": "victim"', '"trl_sft": "sft.yaml"')
    for named in ('"path": "tiny"', '"path": "prompts.jsonl"', '"embedding_model": "encoder"', *trained):
        assert named in text
