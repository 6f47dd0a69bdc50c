"""`[[sft]]` and `[[reward_training]]` of a recipe: what is refused, and with which sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tba.config import load_recipe, parse_recipe
from tba.config.supervised import HOW_IT_RUNS, SftSection
from tba.errors import ConfigError

NEW = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
COMMON = {"base": "models/base", "dataset": "data/d", "prompt": "{q}", "num_steps": 1}
SFT = {**COMMON, "response": "{a}"}
PAIRS = {**COMMON, "path": "models/judge", "chosen": "{a}", "rejected": "{b}"}
LABELS = {**COMMON, "path": "models/judge", "response": "{a}", "label": "kind", "labels": ["good", "bad"]}


def parse(*sft: dict[str, Any], reward_training: list[dict[str, Any]] | None = None, **changes: Any) -> list[str]:
    """Return the folders that the recipe makes, in their order."""
    part = {"task": "t", "texts": ["x"]}
    document = {
        "run": {"name": "r"},
        "model": {"path": "models/policy"},
        "data": {"train": part, "heldout": part},
        "sft": list(sft),
        "reward_training": reward_training or [],
        **changes,
    }
    return list(parse_recipe(document, where="test").supervised)


def test_items_are_made_in_the_order_of_the_recipe_and_may_start_from_one_another() -> None:
    victim = {**SFT, "base": "models/policy", "path": "models/victim"}
    assert parse(SFT, victim, reward_training=[{**PAIRS, "base": "models/victim"}]) == [
        "models/policy",
        "models/victim",
        "models/judge",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_model": NEW}, "exactly one of `base` .* and `new_model`"),
        ({"base": None}, "exactly one of `base` .* and `new_model`"),
        ({"base": None, "new_model": NEW}, "max_length_tokens is 1024, and the new model takes at most 256"),
        ({"base": None, "new_model": {**NEW, "num_heads": 3}}, "num_heads = 3 does not divide hidden_size = 16"),
        ({"base": None, "new_model": {**NEW, "hidden_size": 18, "num_heads": 6}}, r"num_heads = 3 values, .* of llama"),
        ({"base": "models/policy"}, "models/policy starts from models/policy, which is made at the same time or after"),
    ],
)
def test_a_start_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({**SFT, **changes})


def test_a_base_that_is_made_later_or_a_folder_that_is_made_twice_is_refused() -> None:
    victim = {**SFT, "path": "models/victim"}
    with pytest.raises(ConfigError, match=r"models/policy starts from models/victim, .*: put the base first"):
        parse({**SFT, "base": "models/victim"}, victim)
    with pytest.raises(ConfigError, match="models/victim is made twice"):
        parse(victim, {**victim, "path": "./models/victim/"})
    with pytest.raises(ConfigError, match="models/victim/old lies in models/victim, which is replaced as a whole"):
        parse(victim, {**victim, "path": "models/victim/old"})
    with pytest.raises(ConfigError, match="models/victim is made twice"):
        parse(victim, prepare=[{"path": "models/victim", "kind": "model", "maker": "llama"}])
    with pytest.raises(ConfigError, match="models/policy is made twice"):
        parse(SFT, model={"path": "models/policy", "warm_start": {"task": "add"}})
    with pytest.raises(ConfigError, match=r"models/p-{seed} is made by \[\[sft\]\] .*: write the number instead"):
        parse(SFT, model={"path": "models/p-{seed}"})


@pytest.mark.parametrize(
    "reward",
    [
        {**PAIRS, "rejected": None},
        {**PAIRS, "label": "kind"},
        {**LABELS, "labels": None},
        {**LABELS, "chosen": "{a}"},
    ],
)
def test_examples_that_are_neither_pairs_nor_labels_are_refused(reward: dict[str, Any]) -> None:
    assert parse(reward_training=[PAIRS]) == parse(reward_training=[LABELS]) == ["models/judge"]
    with pytest.raises(ConfigError, match=r"give `chosen` and `rejected` \(pairs\), or `response`"):
        parse(reward_training=[reward])


def test_a_setting_of_one_item_can_be_overridden(tmp_path: Path) -> None:
    part = {"task": "t", "texts": ["x"]}
    document = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"train": part, "heldout": part}}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**document, "sft": [{**SFT, "path": "a"}, {**SFT, "path": "b"}]}))
    recipe = load_recipe(path, sets=["sft.1.seed=3", "sft.1.learning_rate.value=0.5"], environ={})
    assert [item.seed for item in recipe.sft] == [0, 3]
    assert [item.learning_rate.value for item in recipe.sft] == [1e-4, 0.5]
    for key in ("2", "-1", "seed"):
        with pytest.raises(ConfigError, match=f"'{key}' is no item of 'sft', which has 2, numbered from 0"):
            load_recipe(path, sets=[f"sft.{key}.seed=3"], environ={})


def test_a_scorer_that_ends_texts_in_another_way_than_they_were_learned_is_refused() -> None:
    def read(scorer: dict[str, Any], item: dict[str, Any]) -> list[str]:
        return parse(reward_training=[item], reward={"tasks": {"t": {"scorers": [scorer]}}})

    judge: dict[str, Any] = {"kind": "reward_model", "model": "models/judge"}
    attack = {"kind": "redteam", "victim": "models/victim", "classifier": "models/judge"}
    bare = {**LABELS, "append_eos": False}
    assert read({**judge, "append_eos": True}, PAIRS) == read(judge, bare) == read(attack, bare) == ["models/judge"]
    assert read({**judge, "model": "models/other"}, PAIRS) == ["models/judge"]
    with pytest.raises(ConfigError, match="append_eos = true, and read by a reward_model scorer with false"):
        read(judge, PAIRS)
    with pytest.raises(ConfigError, match="append_eos = true, and read by a redteam scorer, which never appends it"):
        read(attack, LABELS)


def test_a_label_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="labels names 'bad' twice"):
        parse(reward_training=[{**LABELS, "labels": ["bad", "good", "bad"]}])


def test_the_settings_that_decide_leave_out_how_it_runs_and_where_things_lie() -> None:
    here = SftSection.model_validate(SFT)
    there = SftSection.model_validate(
        {**SFT, "base": "/x/base", "dataset": "/y/d", "path": "z", "device": "cuda", "eval_every_steps": 7}
    )
    assert there.deciding() == here.deciding()
    assert not here.deciding().keys() & set(HOW_IT_RUNS)
    assert SftSection.model_validate({**SFT, "seed": 1}).deciding() != here.deciding()
