"""Sections of a recipe: objectives, searchers, live settings, the URL of Redis."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, get_args

import pytest

from tba.clients import BufferClient
from tba.config import LIVE_NAMES, LiveSettings, ObjectiveSection, Recipe, Schedule, parse_live, parse_recipe, with_live
from tba.config.live_settings import RECIPE_KEYS
from tba.config.objective import FAMILY, PRESETS, Anchor
from tba.config.sections import StoreSection
from tba.errors import ConfigError
from tba.store import open_store
from tba.tls import with_bare_urls, without_secrets

# ---- The objective's section ----------------------------------------------------------------------------------------


def recipe(objective: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    return recipe_with(objective=objective, **sections)


def recipe_with(**sections: Any) -> Recipe:
    minimal = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
    return parse_recipe({**minimal, **sections}, where="recipe.toml")


MIX = {"temperature_mix": {"low": 0.7, "high": 1.3}}
DISTORTED: list[tuple[dict[str, Any], str]] = [
    (MIX, "temperature_mix"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 20}, "top_k"),
    ({"tasks": {"addition": {"min_response_tokens": 2}}}, r"tasks\.addition\.min_response_tokens"),
]
"""Settings that make the behaviour policy another distribution than softmax(logits / temperature)."""
FALLING = {"kind": "linear", "value": 0.1, "steps": 100}
ONE_ROLLOUT, TEN_ROLLOUTS = {"group_size": 1, "prompts_per_batch": 1}, {"group_size": 5, "prompts_per_batch": 2}
COLD, WARM = {"sampling_temperature": 0.7}, {"sampling_temperature": 1.0}
HOT_MODEL = {"path": "m", "policy_temperature": 2.5}
COLD_MODEL = {"path": "m", "policy_temperature": 0.7}
PUBLISHED = {"preset": "tba_prime_published", "anchor": "fixed"}
SKIPS = {"guards": {"ess_collapse": {"action": "skip"}}}
"""The effective sample size of N rollouts is at least 1, so its share is at least 1 / N."""
SEARCHERS: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.0}, r"searcher\.top_p.* has the value 0\.0"),
    ({"top_p": 1.1}, r"searcher\.top_p.* has the value 1\.1"),
    ({"top_k": -1}, r"searcher\.top_k.* has the value -1"),
    ({"temperature_mix": {"low": 0.0, "high": 1.0}}, r"temperature_mix\.low.* has the value 0\.0"),
    ({"temperature_mix": {"low": 1.0, "high": 101.0}}, r"temperature_mix\.high.* has the value 101"),
    ({"temperature_mix": {"low": 1.0, "high": 1.0}}, r"low 1 must be below high 1"),
    ({"temperature_mix": {"low": 1.0}}, r"'searcher\.temperature_mix\.high' is missing"),
    ({**MIX, "sampling_temperature": 0.9}, "takes the place of sampling_temperature, and both are given"),
    ({"engine": "vllm", "sampling_temperature": 2.5}, "sampling_temperature reaches 2.5, and vLLM samples at most"),
    ({"engine": "vllm", "temperature_mix": {"low": 1.0, "high": 3.0}}, "temperature_mix reaches 3, and vLLM"),
    ({"tasks": {"a": {"min_response_tokens": 65}}}, "is 65, above max_response_tokens 64"),
    ({"tasks": {"a": {"stop": [""]}}}, r"searcher\.tasks\.a\.stop\.0"),
    ({"tasks": {"a": {"stops": ["x"]}}}, r"unknown key 'searcher\.tasks\.a\.stops'"),
]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_possible_as_it_is_and_reads_back_from_its_dump(preset: str) -> None:
    section = recipe({"preset": preset}).objective
    assert ObjectiveSection.model_validate(section.model_dump()) == section
    assert section.beta.at(0) == PRESETS[preset].beta
    assert section.parts == PRESETS[preset]


@pytest.mark.parametrize(
    ("fields", "needs_reference"),
    [
        ({"preset": "tb"}, True),
        ({"preset": "tba_prime"}, True),
        ({"preset": "kimi"}, False),
        ({"preset": "tb_behaviour"}, False),
        ({"preset": "tb_positive"}, False),
        ({"preset": "tb", "anchor": "behaviour"}, False),
        ({"preset": "kimi", "anchor": "reset"}, True),
        ({"preset": "grpo"}, False),
        ({"preset": "grpo", "beta": 0.1}, True),
        ({"preset": "grpo", "beta": {"kind": "linear", "value": 0.0, "final": 0.1, "steps": 9}}, True),
        ({"preset": "online_dpo"}, True),
    ],
)
def test_a_reference_is_needed_where_the_kl_is_to_one(fields: dict[str, Any], needs_reference: bool) -> None:
    assert ObjectiveSection.model_validate(fields).needs_reference is needs_reference


@pytest.mark.parametrize("anchor", get_args(Anchor))
def test_an_anchor_takes_the_place_of_the_presets_and_nothing_else_changes(anchor: Anchor) -> None:
    for preset in FAMILY:
        named = PRESETS[preset]
        is_possible = anchor == "behaviour" or not named.age_scaled
        if is_possible:
            assert recipe({"preset": preset, "anchor": anchor}).objective.parts == replace(named, anchor=anchor)
        assert recipe({"preset": preset}).objective.parts == named


@pytest.mark.parametrize(
    ("objective", "sections", "message"),
    [
        ({"preset": "tb", "beta": 0.0}, {}, r"objective\.beta is 0 .* tb needs it above 0"),
        ({"preset": "kimi", "beta": FALLING}, {"trainer": {"num_steps": 150}}, r"beta is 0 at some step of the run"),
        ({"preset": "online_dpo", "beta": 0.0}, {}, "online_dpo needs it above 0"),
        ({"preset": "tb", "beta": {**FALLING, "value": 0.0, "final": 0.1}}, {}, "tb needs it above 0"),
        ({"preset": "tb"}, {"sampling": {"group_size": 1}}, r"group_size is 1, and tb compares .* \"reinforce\""),
        ({"preset": "rloo"}, {"sampling": {"group_size": 1}}, "group_size is 1, and rloo compares"),
        ({"preset": "m:f", "mask_tied": True}, {"sampling": {"group_size": 1}}, "set it to false, or raise group_size"),
        ({"preset": "reinforce", "mask_tied": True}, {}, "reinforce compares rewards with the batch, .* = false"),
        ({"preset": "tb", "reference_reset_steps": 5}, {}, r"reference_reset_steps = 5 belongs .* the anchor is fixed"),
        ({"preset": "rloo", "reference_reset_steps": 5}, {}, r"rloo has no KL here \(beta is 0\)"),
        ({"preset": "tb_behaviour", "anchor": "fixed"}, {}, "by the age, but the anchor is fixed; set anchor"),
        ({"preset": "tba_prime", "reference_placement": "searcher"}, {}, "searchers know only the starting model"),
        ({"preset": "kimi", "reference_placement": "searcher"}, {}, "the anchor is behaviour"),
        ({"preset": "grpo", "reference_placement": "searcher"}, {}, "grpo has no KL here"),
        ({"preset": "grpo", "anchor": "reset"}, {}, 'anchor = "reset" is not used: grpo has beta 0'),
        ({"preset": "grpo", "anchor": "behaviour", "beta": 0.1}, {}, "the KL of the baseline grpo is to a reference"),
        ({"preset": "dr_grpo", "importance_clamp": 8.0}, {}, "importance_clamp = 8.0 belongs to a clamp"),
        ({"preset": "tb", "old_policy_versions": 3}, {}, "old_policy_versions = 3 belongs to tba_prime_published"),
        ({"preset": "m:f", "aggregation": "tokens"}, {}, "aggregation = tokens belongs to a preset"),
        ({**PUBLISHED, "reference_placement": "searcher"}, {}, "tba_prime_published clamps"),
        ({"preset": "reinforce"}, {"sampling": ONE_ROLLOUT}, "reinforce compares the rollouts of a batch"),
        ({"preset": "kimi"}, {"searcher": COLD}, r"\(preset kimi\).* is 0\.7 and .*temperature is 1,"),
        ({"preset": "tb_behaviour"}, {"model": COLD_MODEL, "searcher": WARM}, "objective.anchor is"),
        ({"preset": "tba_prime"}, {"searcher": COLD}, "objective.centre is"),
        ({"preset": "tb"}, {"model": HOT_MODEL, "searcher": {"engine": "vllm"}}, "policy_temperature is 2.5, and vLLM"),
        *[({"preset": "kimi"}, {"searcher": value}, rf"but searcher\.{name} makes it") for value, name in DISTORTED],
        ({"preset": "tb"}, {"trainer": SKIPS, "sampling": TEN_ROLLOUTS}, "and can never be taken"),
        *[({"preset": "tb"}, {"searcher": searcher}, message) for searcher, message in SEARCHERS],
    ],
)
def test_what_is_impossible_is_refused_in_one_sentence(objective: dict, sections: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(objective, **sections)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "sections"),
    [
        ({"preset": "reinforce"}, {"sampling": {"group_size": 1}}),
        ({"preset": "tb", "beta": FALLING}, {"trainer": {"num_steps": 100}}),
        ({"preset": "grpo", "beta": 0.04, "anchor": "reset", "reference_reset_steps": 20}, {}),
        ({"preset": "tba_prime", "anchor": "fixed", "reference_placement": "searcher"}, {}),
        *[({"preset": preset, "importance_clamp": 4.0}, {}) for preset in ("tba_prime", "dr_grpo_clamp")],
        ({"preset": "dapo", "mask_truncated": True}, {}),
        ({"preset": "reinforce"}, {"sampling": {"group_size": 1, "prompts_per_batch": 2}}),
        *[({"preset": preset}, {"searcher": {"sampling_temperature": 0.7}}) for preset in ("tb", "grpo", "online_dpo")],
        *[({"preset": "tb"}, {"searcher": searcher}) for searcher, _ in DISTORTED],
        ({"preset": "kimi"}, {"searcher": {"tasks": {"addition": {"stop": ["Q"]}}}}),
        ({"preset": "kimi"}, {"searcher": {"sampling_temperature": 0.7, "num_searchers": 0}}),
        ({"preset": "kimi"}, {"model": COLD_MODEL, "searcher": COLD}),
        ({"preset": "tb"}, {"trainer": SKIPS, "sampling": {"prompts_per_batch": 2, "group_size": 6}}),
        ({"preset": "tb"}, {"model": HOT_MODEL}),
    ],
)
def test_what_is_possible_is_taken(objective: dict[str, Any], sections: dict[str, Any]) -> None:
    recipe(objective, **sections)


def test_a_resolved_recipe_with_a_temperature_mix_is_read_again_and_takes_no_live_temperature() -> None:
    recipe = recipe_with(objective={"preset": "tb"}, searcher=MIX)
    assert parse_recipe(recipe.model_dump(mode="json"), where="resolved") == recipe
    with pytest.raises(ConfigError, match="takes the place of sampling_temperature"):
        with_live(recipe, parse_live({"sampling_temperature": 0.5}))


# ---- Live settings --------------------------------------------------------------------------------------------------


def test_every_live_setting_has_its_place_in_the_recipe() -> None:
    assert set(LiveSettings.model_fields) == set(LIVE_NAMES) == set(RECIPE_KEYS)
    of_recipe = LiveSettings.of_recipe(recipe_with(eval={"every_steps": 9}, objective={"beta": 0.3}))
    assert of_recipe.eval_every_steps == 9
    assert of_recipe.beta == Schedule(value=0.3)
    assert len(of_recipe.changed()) == len(LIVE_NAMES)


def test_a_number_or_a_schedule_takes_the_place_of_the_recipes_value_and_nothing_else_changes() -> None:
    before = recipe_with()
    falling = {"kind": "linear", "value": 0.9, "final": 0.1, "steps": 8}
    live = {"learning_rate": falling, "most_on_policy_prob": 0.25, "eval_every_steps": 3}
    after = with_live(before, parse_live(live))
    assert [after.trainer.learning_rate.at(step) for step in (0, 4, 8)] == pytest.approx([0.9, 0.5, 0.1])
    assert after.sampling.most_on_policy_prob == 0.25
    assert after.eval.every_steps == 3
    changed = {"trainer": {"learning_rate"}, "sampling": {"most_on_policy_prob"}, "eval": {"every_steps"}}
    assert after.model_dump(exclude=changed) == before.model_dump(exclude=changed)
    assert with_live(before, LiveSettings()) == before
    assert with_live(before, parse_live({"beta": None})) == before


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("sampling", "most_on_policy_prob", 1.01, "less than or equal to 1"),
        ("sampling", "most_on_policy_prob", -0.1, "greater than or equal to 0"),
        ("searcher", "sampling_temperature", 0.0, "greater than or equal to 0.01"),
        ("searcher", "sampling_temperature", "hot", "'hot'"),
    ],
)
def test_m_is_a_probability_and_the_temperature_above_0(section: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{section}\.{key}' has the value .*{message}"):
        recipe_with(**{section: {key: value}})
    with pytest.raises(ConfigError, match=rf"live settings: key '{key}' has the value .*{message}"):
        parse_live({key: value})


def test_searchers_sample_at_the_policy_temperature_and_a_recipe_that_says_otherwise_is_warned_about() -> None:
    cold = {"path": "m", "policy_temperature": 0.7}
    found = recipe({"preset": "kimi"}, model=cold)
    assert found.searcher.sampling_temperature == 0.7
    assert recipe({"preset": "kimi"}, **found.model_dump(exclude={"objective"})) == found, "a resolved one is the same"
    mix = {"temperature_mix": {"low": 0.5, "high": 1.5}}
    for silent in ({}, mix, {"sampling_temperature": 0.7}, {"sampling_temperature": 1.0, "num_searchers": 0}):
        assert recipe({"preset": "tb"}, model=cold, searcher=silent).temperature_warning is None
    for given, named in ((1.0, "is 1,"), (0.5, "is 0.5,")):
        warning = recipe({"preset": "tb"}, model=cold, searcher={"sampling_temperature": given}).temperature_warning
        assert warning is not None
        assert f"searcher.sampling_temperature {named} and model.policy_temperature is 0.7" in warning


def test_what_cannot_change_is_refused_with_the_names_of_what_can() -> None:
    with pytest.raises(ConfigError, match=r"'num_steps' \(value 9\) cannot change .*learning_rate, beta, most_on"):
        parse_live({"num_steps": 9})


def test_a_live_value_must_go_with_the_whole_recipe() -> None:
    with pytest.raises(ConfigError, match=r"^live settings: beta cannot be 0 at any step of this run, because tb"):
        with_live(recipe_with(objective={"preset": "tb"}), parse_live({"beta": 0}))


def test_a_beta_for_which_the_run_has_no_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"beta above 0 gives grpo a KL to a reference, and this run was started"):
        with_live(recipe_with(objective={"preset": "grpo"}), parse_live({"beta": 0.1}))
    for objective in ({"preset": "grpo", "beta": 0.1}, {"preset": "kimi"}):
        found = with_live(recipe_with(objective=objective), parse_live({"beta": 0.2}))
        assert found.objective.beta == Schedule(value=0.2)
    assert with_live(recipe_with(objective={"preset": "grpo", "beta": 0.1}), parse_live({"beta": 0.0}))
    with pytest.raises(ConfigError, match="kimi needs it above 0"):
        with_live(recipe_with(objective={"preset": "kimi"}), parse_live({"beta": 0.0}))


@pytest.mark.parametrize("preset", ["kimi", "tba_prime"])
def test_a_live_sampling_temperature_that_makes_the_behaviour_no_earlier_theta_is_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match=r"searcher\.sampling_temperature is 0\.7 and model"):
        with_live(recipe_with(objective={"preset": preset}), parse_live({"sampling_temperature": 0.7}))
    assert with_live(recipe_with(objective={"preset": preset}), parse_live({"sampling_temperature": 1.0}))
    assert with_live(recipe_with(objective={"preset": "tb"}), parse_live({"sampling_temperature": 0.7}))


# ---- How the URL of Redis is shown ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("rediss://u:SECRET@h:1/3?x=y", "rediss://h:1/3"),
        ("unix:///run/redis.sock?db=1&password=SECRET", "unix:///run/redis.sock"),
        ("unix://u:SECRET@/run/redis.sock", "unix:///run/redis.sock"),
        ("redis://h:1/0?password=SEC@RET", "redis://..."),
        ("redis://:SECRET/more@h:1/0", "redis://h:1/0"),
        ("redis://:SECRET?more@h:1/0", "redis://..."),
        ("redis://:SECRET#more@h:1/0", "redis://..."),
        ("u:SECRET@h", "h"),
        ("http://u:SECRET@h:1/x?api_key=SECRET&next=http://other", "http://h:1/x"),
        ("http://h/x#SECRET", "http://h/x"),
        ("redis://:SEC@RET?more@h:1/0", "redis://..."),
        ("redis://:SEC@RET/more@h:1/0", "redis://h:1/0"),
        ("http://u:SEC RET@h/x", "http://h/x"),
        ("http://u:SEC RET/more@h/x", "http://h/x"),
        ("file:///home/anna@corp.example/runs/x", "file:///home/anna@corp.example/runs/x"),
        ("s3://b/k@v1/x", "s3://b/k@v1/x"),
        ("s3://KEY@b/k@v1/x", "s3://b/k@v1/x"),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    bare = shown if "://" in url else url
    assert with_bare_urls({"of": [f"GET {url} failed", 1, None]}) == {"of": [f"GET {bare} failed", 1, None]}


def test_what_follows_an_address_is_no_password_and_what_precedes_one_hides_none() -> None:
    for text in ("http://h:80 does not answer; ask a@b", "s3://b: a@b may not", "http://[::1]:80: a@b"):
        assert with_bare_urls(text) == text
    assert with_bare_urls("to ...http://u:SECRET@h") == "to ...http://h"


@pytest.mark.parametrize("part", ["a.", "://", "a://u:x ", "://u:1", "a:// @"])
def test_a_long_text_takes_no_quadratic_time(part: str) -> None:
    """A quadratic search takes some minutes for this."""
    text, begin_s = part * (120_000 // len(part)), time.process_time()
    with_bare_urls(text)
    assert time.process_time() - begin_s < 20


@pytest.mark.parametrize("address", ["http://u:SECRET@h", "http://h/?key=SECRET", "http://h/#SECRET"])
def test_an_address_of_a_service_with_a_secret_in_it_is_refused_without_showing_it(address: str) -> None:
    sections = [{"buffer": {"url": address}}, {"reward": {"url": address}}, {"searcher": {"openai": {"url": address}}}]
    for section in sections:
        with pytest.raises(ConfigError, match=r"\.url.* has a user, a password or options") as caught:
            recipe({}, **section)
        assert "SECRET" not in str(caught.value)
    for store in ({"url": "s3://KEY:SECRET@bucket/x"}, {"url": "s3://bucket", "endpoint_url": address}):
        with pytest.raises(ConfigError, match=r"store\.(endpoint_)?url has a user") as caught:
            open_store(StoreSection.model_validate(store))
        assert "SECRET" not in str(caught.value)
    with pytest.raises(ConfigError, match="has a user") as caught:
        BufferClient(address)
    assert "SECRET" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"drain_s.* has the value 'http://h") as caught:
        recipe({}, searcher={"drain_s": address})
    assert "SECRET" not in str(caught.value)


def test_a_url_without_its_scheme_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        recipe({}, searcher={"openai": {"url": "u:hunter2@h/x?key=k77"}})
    assert "searcher.openai.url" in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("hunter2", "k77"))
