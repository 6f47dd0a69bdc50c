"""The objective's section: defaults by preset, overrides, and impossible configurations that fail at start."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from tba.config import ObjectiveSection, Recipe, parse_recipe
from tba.config.objective import BASELINE_BETAS, MEMBERS, PRESETS, Anchor, Centre
from tba.errors import ConfigError


def recipe(objective: dict[str, Any], **sections: dict[str, Any]) -> Recipe:
    document = {
        "run": {"name": "demo"},
        "model": {"path": "m"},
        "data": {"generator": "addition"},
        "objective": objective,
        **sections,
    }
    return parse_recipe(json.loads(json.dumps(document)), where="test")


def test_every_preset_is_a_member_or_a_baseline() -> None:
    assert set(PRESETS) == MEMBERS.keys() | BASELINE_BETAS.keys()
    assert not MEMBERS.keys() & BASELINE_BETAS.keys()


DISTORTED: list[tuple[dict[str, Any], str]] = [
    ({"temperature_mix": {"low": 0.7, "high": 1.3}}, "temperature_mix"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_k": 20}, "top_k"),
    ({"tasks": {"addition": {"min_response_tokens": 2}}}, r"tasks\.addition\.min_response_tokens"),
]
"""Settings that make the behaviour policy another distribution than softmax(logits / temperature)."""


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_possible_as_it_is_and_reads_back_from_its_dump(preset: str) -> None:
    section = recipe({"preset": preset}).objective
    assert ObjectiveSection.model_validate(section.model_dump()) == section
    assert section.beta.at(0) == BASELINE_BETAS.get(preset, 0.05)


@pytest.mark.parametrize(
    ("fields", "needs_reference"),
    [
        ({"preset": "tb"}, True),
        ({"preset": "tba_prime"}, True),
        ({"preset": "kimi"}, False),
        ({"preset": "tb_behaviour"}, False),
        ({"preset": "tb", "anchor": "behaviour"}, False),
        ({"preset": "kimi", "anchor": "ema"}, True),
        ({"preset": "grpo"}, False),
        ({"preset": "grpo", "beta": 0.1}, True),
        ({"preset": "grpo", "beta": {"kind": "linear", "value": 0.0, "final": 0.1, "steps": 9}}, True),
        ({"preset": "online_dpo"}, True),
    ],
)
def test_a_reference_is_needed_where_the_kl_is_to_one(fields: dict[str, Any], needs_reference: bool) -> None:
    assert ObjectiveSection.model_validate(fields).needs_reference is needs_reference


@pytest.mark.parametrize("anchor", get_args(Anchor))
@pytest.mark.parametrize("centre", get_args(Centre))
def test_overrides_name_every_member_of_the_family(anchor: Anchor, centre: Centre) -> None:
    """From any preset: what is not overridden stays as the preset says."""
    for preset, named in MEMBERS.items():
        overrides = {"anchor": anchor, "centre": centre, "age_scaled": named.age_scaled and anchor == "behaviour"}
        member = recipe({"preset": preset, **overrides}).objective.member
        assert member is not None
        assert (member.anchor, member.centre) == (anchor, centre)
        assert member.importance_weight == named.importance_weight
        assert recipe({"preset": preset}).objective.member == named


@pytest.mark.parametrize(
    ("objective", "sections", "message"),
    [
        ({"preset": "tb", "beta": 0.0}, {}, r"objective\.beta is 0 .* tb needs it above 0"),
        (
            {"preset": "kimi", "beta": {"kind": "linear", "value": 0.1, "steps": 100}},
            {"trainer": {"num_steps": 150}},
            r"beta is 0 at some step of the run's 150, and kimi needs it",
        ),
        ({"preset": "online_dpo", "beta": 0.0}, {}, "online_dpo needs it above 0"),
        (
            {"preset": "tb", "beta": {"kind": "linear", "value": 0.0, "final": 0.1, "steps": 100}},
            {},
            "tb needs it above 0",
        ),
        ({"preset": "tb"}, {"sampling": {"group_size": 1}}, r"group_size is 1, and tb compares .* \"reinforce\""),
        ({"preset": "rloo"}, {"sampling": {"group_size": 1}}, "group_size is 1, and rloo compares"),
        ({"preset": "tb"}, {"sampling": {"group_size": 4, "min_distinct": 5}}, "min_distinct is 5, more than the 4"),
        ({"preset": "tb", "reference_reset_steps": 5}, {}, r"reference_reset_steps = 5 belongs .* the anchor is fixed"),
        ({"preset": "tba_prime", "ema_decay": 0.5}, {}, "ema_decay = 0.5 belongs to .* the anchor is reset"),
        ({"preset": "kimi", "ema_every_steps": 5}, {}, "the anchor is behaviour"),
        ({"preset": "rloo", "reference_reset_steps": 5}, {}, r"rloo has no KL here \(beta is 0\)"),
        ({"preset": "tb", "age_scaled": True}, {}, "age_scaled .* but the anchor is fixed"),
        ({"preset": "tb_behaviour", "anchor": "fixed"}, {}, "age_scaled = false"),
        ({"preset": "tba_prime", "reference_placement": "searcher"}, {}, "searchers know only the starting model"),
        ({"preset": "kimi", "reference_placement": "searcher"}, {}, "the anchor is behaviour"),
        ({"preset": "grpo", "reference_placement": "searcher"}, {}, "grpo has no KL here"),
        ({"preset": "grpo", "centre": "theta"}, {}, "centre = 'theta' belongs to the family"),
        ({"preset": "dr_grpo", "length_normalise": False}, {}, "length_normalise = False belongs to the family"),
        ({"preset": "grpo", "anchor": "reset"}, {}, 'anchor = "reset" is not used: grpo has beta 0'),
        ({"preset": "grpo", "anchor": "behaviour", "beta": 0.1}, {}, "the KL of the baseline grpo is to a reference"),
        ({"preset": "tb", "clip_range": 0.3}, {}, r"clip_range = 0\.3 belongs to a clip .* tb has no such thing"),
        ({"preset": "dr_grpo", "clip_range": 0.3}, {}, "clip_range = 0.3 belongs"),
        ({"preset": "tb", "importance_clamp": 4.0}, {}, "importance_clamp = 4 belongs to importance_weight"),
        ({"preset": "grpo", "importance_clamp": 4.0}, {}, "importance_clamp = 4 belongs"),
        ({"preset": "kimi", "log_ratio_clamp": 5.0}, {}, "log_ratio_clamp = 5 belongs to age_scaled = true"),
        ({"preset": "tb", "centre_max_age_steps": 8}, {}, "centre_max_age_steps = 8 belongs to centre"),
        (
            {"preset": "reinforce"},
            {"sampling": {"group_size": 1, "min_distinct": 1, "prompts_per_batch": 1}},
            "reinforce compares the rollouts of a batch",
        ),
        (
            {"preset": "kimi"},
            {"searcher": {"sampling_temperature": 0.7}},
            r'objective\.anchor is "behaviour" \(preset kimi\).* is 0\.7 at some step .*policy_temperature is 1,',
        ),
        ({"preset": "tb_behaviour"}, {"model": {"path": "m", "policy_temperature": 0.7}}, "objective.anchor is"),
        ({"preset": "tba_prime"}, {"searcher": {"sampling_temperature": 0.7}}, "objective.centre is"),
        (
            {"preset": "tba_prime"},
            {"searcher": {"sampling_temperature": {"kind": "linear", "value": 1.0, "final": 0.5, "steps": 100}}},
            r"is 0\.5 at some step",
        ),
        *[
            ({"preset": "kimi"}, {"searcher": searcher}, rf"objective\.anchor .* but searcher\.{name} makes it another")
            for searcher, name in DISTORTED
        ],
        ({"preset": "tbb"}, {}, r"objective\.preset.*'tbb'"),
    ],
)
def test_an_impossible_configuration_is_refused_in_one_sentence(
    objective: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(objective, **sections)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("objective", "sections"),
    [
        ({"preset": "reinforce"}, {"sampling": {"group_size": 1, "min_distinct": 1}}),
        ({"preset": "tb", "beta": {"kind": "linear", "value": 0.1, "steps": 100}}, {"trainer": {"num_steps": 100}}),
        ({"preset": "grpo", "beta": 0.04, "anchor": "reset", "reference_reset_steps": 20}, {}),
        ({"preset": "tba_prime", "anchor": "fixed", "reference_placement": "searcher"}, {}),
        ({"preset": "tba_prime", "anchor": "ema", "ema_decay": 0.99, "ema_every_steps": 1}, {}),
        *[({"preset": preset, "clip_range": 0.3}, {}) for preset in ("grpo", "ppo_clip", "proximal_rloo")],
        *[({"preset": preset, "importance_clamp": 4.0}, {}) for preset in ("tba_prime", "dr_grpo")],
        ({"preset": "tb", "importance_weight": "clamp", "importance_clamp": 4.0}, {}),
        ({"preset": "tb_behaviour", "log_ratio_clamp": 5.0}, {}),
        ({"preset": "tb", "centre": "behaviour", "centre_max_age_steps": 8}, {}),
        ({"preset": "reinforce"}, {"sampling": {"group_size": 1, "min_distinct": 1, "prompts_per_batch": 2}}),
        *[({"preset": preset}, {"searcher": {"sampling_temperature": 0.7}}) for preset in ("tb", "grpo", "online_dpo")],
        ({"preset": "tba_prime", "centre": "theta"}, {"searcher": {"sampling_temperature": 0.7}}),
        *[({"preset": "tb"}, {"searcher": searcher}) for searcher, _ in DISTORTED],
        ({"preset": "kimi"}, {"searcher": {"tasks": {"addition": {"max_response_tokens": 9, "stop": ["Q"]}}}}),
        ({"preset": "kimi"}, {"searcher": {"sampling_temperature": 0.7, "num_searchers": 0}}),
        (
            {"preset": "kimi"},
            {"model": {"path": "m", "policy_temperature": 0.7}, "searcher": {"sampling_temperature": 0.7}},
        ),
    ],
)
def test_what_is_possible_is_taken(objective: dict[str, Any], sections: dict[str, Any]) -> None:
    recipe(objective, **sections)


def test_an_alarm_that_can_never_act_is_refused() -> None:
    """The effective sample size of N rollouts is at least 1, so its share is at least 1 / N."""

    def with_guard(min_ess: float, action: str) -> Recipe:
        guards = {"ess_collapse": {"min_ess": min_ess, "action": action}}
        sampling = {"prompts_per_batch": 2, "group_size": 4, "min_distinct": 1}
        return recipe({"preset": "tb"}, trainer={"guards": guards}, sampling=sampling)

    with pytest.raises(ConfigError, match=r"ess_collapse.action is \"skip\" and can never be taken: min_ess is 0\.125"):
        with_guard(0.125, "skip")
    with_guard(0.126, "skip")
    with_guard(0.1, "none")
