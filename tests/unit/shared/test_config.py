"""Recipes: precedence, refusals that name key and value, schedules."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError, create_model

from tba.config import Recipe, Schedule, load_recipe, parse_recipe
from tba.config.reward import RewardSection
from tba.config.searcher import OpenAiSection, SearcherSection
from tba.errors import ConfigError
from tba.fields import StrictModel

WSD = {"kind": "wsd", "value": 1.0}
KINDS = ["constant", "linear", "cosine", "wsd"]
MINIMAL = {"run": {"name": "demo"}, "model": {"path": "m"}, "data": {"generator": "addition"}}
TOML = """
[run]
name = "demo"
[model]
path = "m"
[data]
generator = "addition"
[buffer]
port = 1111
"""


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(TOML)
    return path


@pytest.mark.parametrize(
    ("url", "is_beside"),
    [
        ("http://localhost:8000", True),
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://[::1]:8000", True),
        ("http://127.evil.example:8000", False),
        ("http://127.0.0.1.example", False),
        ("http://vllm:8000", False),
        ("http://10.0.0.1", False),
    ],
)
def test_a_server_is_beside_its_searcher_only_on_the_loopback(url: str, is_beside: bool) -> None:
    assert OpenAiSection(url=url).is_beside == is_beside


def test_an_engine_behind_a_server_needs_its_address_unless_there_are_no_searchers() -> None:
    assert SearcherSection(engine="openai", num_searchers=0).openai.url is None
    with pytest.raises(ValidationError, match=r"give openai\.url"):
        SearcherSection(engine="openai", num_searchers=1)


def test_the_schema_describes_the_fields_of_every_section() -> None:
    """Each text is the docstring below the field; a class without source has none."""
    schema = Recipe.model_json_schema()
    lacking = [
        f"{name}.{field}"
        for name, section in schema["$defs"].items()
        for field, entry in section.get("properties", {}).items()
        if "description" not in entry
    ]
    assert len(lacking) < 0.1 * sum(len(section.get("properties", {})) for section in schema["$defs"].values()), lacking

    class Nested(StrictModel):
        number: int = 1
        """The text
of a field that begins at the left edge."""

    class Child(Nested):
        number: int = 2

    assert Nested.model_json_schema()["properties"]["number"]["description"].startswith("The text")
    assert "description" not in Child.model_json_schema()["properties"]["number"]
    made = create_model("Made", __base__=StrictModel, number=(int, 1))
    assert made.model_json_schema()["properties"]["number"] == {"default": 1, "title": "Number", "type": "integer"}


def test_file_then_environment_then_set(recipe_path: Path) -> None:
    assert load_recipe(recipe_path, environ={}).buffer.port == 1111
    environ = {"TBA_BUFFER__PORT": "2222", "TBA_RUN__NAME": "from-env", "TBA_HOME": "/ignored", "OTHER__X": "1"}
    assert load_recipe(recipe_path, environ=environ).buffer.port == 2222
    recipe = load_recipe(recipe_path, environ=environ, sets=["buffer.port=3333"])
    assert (recipe.buffer.port, recipe.run.name) == (3333, "from-env")


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("sampling.samples_per_insert=2.5", 2.5),
        ("sampling.alternate=true", True),
        ("eval.pass_at=[1]", [1]),
        ("run.name=plain-text", "plain-text"),
        ('run.name="quoted"', "quoted"),
        ("store.url=s3://bucket/a=b", "s3://bucket/a=b"),
        ("objective.beta.value=0.25", 0.25),
    ],
)
def test_set_takes_toml_values_and_bare_text_at_any_depth(recipe_path: Path, item: str, value: object) -> None:
    recipe = load_recipe(recipe_path, environ={}, sets=[item])
    assert attrgetter(item.partition("=")[0])(recipe) == value


def test_a_path_that_prepare_makes_is_a_folder_and_no_model_of_the_hub(tmp_path: Path) -> None:
    document = {**MINIMAL, "model": {"path": "mine/first"}}
    item = {"path": "mine/first", "kind": "model", "hub": "org/name"}
    for prepare, path in (([item], "mine/first"), ([], "models/mine/first")):
        (tmp_path / "recipe.json").write_text(json.dumps({**document, "prepare": prepare}))
        assert load_recipe(tmp_path / "recipe.json", environ={}).model.path == path


BY_SEARCHERS = {"preset": "tb", "reference_placement": "searcher"}
LAG = {"sampling": {"lag_steps": 10}, "trainer": {"sync_interval": 4}}
TWO = {"backend": "kubernetes", "deployment": "searcher", "num_searchers": 2}
ON_ONE_GPU, RESET = {"device": "cuda:0", "num_processes": 2}, {"preset": "tb", "reference_reset_steps": 5}
SAVED, STEEP = {"name": "new", "snapshot": "old/end"}, {"kind": "linear", "value": 1.0, "final": 1001, "steps": 9}
USES, OLD = {"samples_per_insert": 2.5, "max_uses": 2}, {"preset": "tba_prime_published", "old_policy_versions": 3}
EIGHT_BITS = {"engine": "vllm", "vllm": {"quantization": "fp8_per_block"}}
SERVER = {"engine": "openai", "openai": {"url": "http://vllm:8"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"buffer": {"prot": 1}}, r"unknown key 'buffer\.prot' \(value 1\); did you mean 'port'\?"),
    ({"bufer": {}}, "unknown key 'bufer' .*did you mean 'buffer'"),
    ({"objective": {"beta": {"value": 1.0, "stepz": 3}}}, r"'objective\.beta\.stepz' .*did you mean 'steps'"),
    ({"model": {"path": "m", "warm_start": {"tasks": "addition"}}}, "did you mean 'task'"),
    ({"zzz": 1}, "unknown key 'zzz' .*; remove it or correct its name"),
    ({"searcher": {"tasks": {"gms8k": {"stop": ["x"]}}}}, r"searcher\.tasks\.gms8k .*did you mean 'gsm8k'\?"),
    ({"environments": {"gms8k": {"tools": ["m:f"]}}}, r"environments\.gms8k has tools and .*did you mean 'gsm8k'\?"),
    ({"environments": {"shop": {"max_turns": 3}}}, r"environments\.shop: it has no environment and no tools"),
    ({"trainer": ON_ONE_GPU}, r"trainer\.device is 'cuda:0'.*num_processes is 2; give 'cuda'"),
    ({"buffer": {"redis_password": "hunter2"}}, r"\(value not shown\); did you mean 'redis_password_file'\?$"),
    ({"buffer": {"port": 70000}}, r"key 'buffer\.port' has the value 70000: .*65535"),
    ({"buffer": {"port": "many"}}, r"key 'buffer\.port' has the value 'many'"),
    ({"trainer": {"num_steps": 0, "adam_beta1": 1.0}}, r"'trainer\.num_steps' has the value 0.*and 1 more"),
    ({"run": {}}, r"key 'run\.name' is missing"),
    ({"run": {"name": "../x"}}, r"key 'run\.name' has the value '\.\./x'"),
    ({"eval": {"published": {"greedy": False}}}, "nothing would be generated"),
    ({"eval": {"pass_at": [2]}}, "eval: pass_at holds 2, and there are 1 samples"),
    ({"objective": RESET}, "objective: reference_reset_steps = 5 belongs to anchor"),
    ({"objective": {"beta": {"kind": "linear", "value": 1.0}}}, r"objective\.beta: a linear schedule needs `steps`"),
    ({"searcher": {"num_searchers": 0}, "objective": BY_SEARCHERS}, r"\"searcher\" needs searchers"),
    ({"run": SAVED, "objective": BY_SEARCHERS}, r"run\.snapshot = 'old/end' .*\"trainer\""),
    ({"buffer": {"max_rollouts": 63}}, r"min_size_to_sample 64 is above buffer\.max_rollouts 63"),
    ({"sampling": USES}, r"samples_per_insert is 2\.5.* 2 batches \(sampling\.max_uses\)"),
    ({"sampling": {"lag_steps": 1}, "searcher": {"num_searchers": 0}}, "lag_steps needs searchers"),
    ({**LAG, "buffer": {"max_policy_age_steps": 14}}, "max_policy_age_steps = 14 evicts them; set it to 15 or more"),
    ({**LAG, "objective": OLD}, "keeps 3 .* set it to 4 or more"),
    ({"trainer": {"learning_rate": 1e39}}, r"'trainer\.learning_rate' has the value 1e\+39: .* at most 1000"),
    ({"trainer": {"learning_rate": STEEP}}, "this one reaches 1001"),
    ({"objective": {"beta": 1e7}}, r"a KL coefficient is at most 1e\+06, and this one reaches 1e\+07"),
    ({"searcher": EIGHT_BITS}, r"'fp8_per_block', .*set model\.dtype"),
    ({"searcher": SERVER, "scaling": TWO}, "http://vllm:8.* set it to 1"),
    ({"searcher": {"sampling_temperature": 101}}, "has the value 101: .* less than or equal to 100"),
    ({"model": {"path": "m", "policy_temperature": 1e-3}}, r"'model\.policy_temperature' has the value 0\.001"),
    ({"objective": {"beta": True}}, r"'objective\.beta' has the value True: it takes a number"),
    ({"trainer": {"learning_rate": "banana"}}, r"'trainer\.learning_rate' has the value 'banana': it takes a number"),
    ({"trainer": {"num_processes": 3, "sharding": {"context": 2}}}, r"context is 2, and trainer\.num_processes is 3"),
    ({"scaling": {"backend": "kubernetes"}}, r"the name of the Deployment .*; give scaling\.deployment"),
    ({"scaling": {"deployment": "Demo_Searcher"}}, r"'scaling\.deployment' has the value 'Demo_Searcher'"),
]


@pytest.mark.parametrize(("sections", "message"), WRONG)
def test_a_wrong_recipe_names_key_value_and_remedy(sections: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^recipe\.toml: .*{message}") as caught:
        parse_recipe({**MINIMAL, **sections}, where="recipe.toml")
    assert "Value error" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_number_that_nothing_starts_is_not_held_against_servers_of_pods() -> None:
    """The chart tells the buffer alone that it scales: a trainer reads the same recipe with backend none."""
    sections = {"searcher": {"engine": "openai", "openai": {"url": "http://localhost:8000"}}}
    found = parse_recipe({**MINIMAL, **sections, "scaling": {"num_searchers": 3}}, where="recipe.toml")
    assert found.scaling.backend == "none"


def test_a_misspelt_environment_variable_is_refused(recipe_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'buffer\.capactiy' \(value 5\)"):
        load_recipe(recipe_path, environ={"TBA_BUFFER__CAPACTIY": "5"})


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError):
        parse_recipe(MINIMAL, where="test").run.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


FORM = r"is not of the form section\.key=value"


@pytest.mark.parametrize(
    ("item", "says"),
    [("buffer.port", FORM), ("port=1", FORM), ("=1", FORM), ("buffer.port.x=1", "'port' is a value, not a section")],
)
def test_a_set_that_is_no_assignment_is_refused(recipe_path: Path, item: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_recipe(recipe_path, environ={}, sets=[item])


def test_a_file_that_is_missing_or_broken_is_one_sentence(tmp_path: Path) -> None:
    missing = r"no\.toml does not exist; `tba run quickstart` runs one that ships with tba"
    with pytest.raises(ConfigError, match=missing):
        load_recipe(tmp_path / "no.toml", environ={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path, environ={})
    for name, data in [("a.toml", b"[run"), ("a.json", b"{"), ("b.json", b"[1]"), ("b.toml", b"\xff\xfe")]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=f"{name} is not valid"):
            load_recipe(tmp_path / name, environ={})


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"value": 2.0, "warmup_steps": 4}, {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0, 5: 2.0}),
        ({"kind": "linear", "value": 1.0, "final": 0.5, "steps": 10}, {0: 1.0, 5: 0.75, 10: 0.5, 1000: 0.5}),
        ({"kind": "cosine", "value": 1.0, "final": 0.2, "steps": 12, "warmup_steps": 2}, {2: 1.0, 7: 0.6, 12: 0.2}),
        # a wsd schedule may decay right after its warm-up, and stays at its end
        ({**WSD, "final": 0.2, "steps": 10, "warmup_steps": 4, "decay_steps": 6}, {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.6}),
        ({**WSD, "final": 0.2, "steps": 10, "warmup_steps": 4, "decay_steps": 6}, {10: 0.2, 10_000: 0.2}),
        ({**WSD, "steps": 100, "warmup_steps": 10, "decay_steps": 20}, {0: 0.1, 10: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
    ],
)
def test_a_schedule_has_these_values(fields: dict[str, Any], values: dict[int, float]) -> None:
    schedule = Schedule(**fields)
    assert {step: schedule.at(step) for step in values} == pytest.approx(values)


@given(st.sampled_from(KINDS), st.floats(0, 10), st.floats(0, 10), st.integers(1, 50), st.integers(0, 60), st.data())
def test_after_warm_up_every_schedule_stays_between_value_and_final(
    kind: str, value: float, final: float, steps: int, warmup_steps: int, data: st.DataObject
) -> None:
    decay_steps = data.draw(st.integers(1, steps)) if kind == "wsd" else 0
    if kind == "constant":
        final = 0.0
    else:
        warmup_steps = min(warmup_steps, steps - (decay_steps or 1))
    fields: dict[str, Any] = {"kind": kind, "value": value, "final": final, "steps": steps}
    schedule = Schedule(**fields, warmup_steps=warmup_steps, decay_steps=decay_steps)
    ends = (value, value if kind == "constant" else final)
    values = [schedule.at(step) for step in range(steps + 5)]
    assert all(min(ends) - 1e-9 <= found <= max(ends) + 1e-9 for found in values[warmup_steps:])
    assert max(values) <= schedule.highest + 1e-9
    for num_steps in (1, steps, steps + 5):
        assert schedule.lowest(num_steps) == pytest.approx(min(values[:num_steps]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear", "value": 1.0}, "a linear schedule needs `steps`"),
        ({"kind": "wsd", "value": 1.0, "steps": 10}, "0 < decay_steps <= steps, got 0"),
        ({"kind": "wsd", "value": 1.0, "steps": 10, "decay_steps": 11}, "got 11"),
        ({"value": -1.0}, "greater than or equal to 0"),
        ({"value": 0.05, "final": 0.004}, "a constant schedule has no final value .got 0.004.; name its kind"),
        ({"kind": "cosine", "value": 1.0, "steps": 10, "decay_steps": 2}, "belongs to a wsd schedule"),
        ({"kind": "linear", "value": 1.0, "steps": 10, "warmup_steps": 10}, "warmup_steps is 10"),
        ({"kind": "wsd", "value": 1.0, "steps": 10, "warmup_steps": 6, "decay_steps": 5}, "has room for 5 before"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(fields: dict, message: str) -> None:
    document = {**MINIMAL, "trainer": {"learning_rate": fields}}
    with pytest.raises(ConfigError, match=rf"trainer\.learning_rate.*{message}"):
        parse_recipe(json.loads(json.dumps(document)), where="test")


def test_an_adapter_without_layers_is_refused() -> None:
    lora = {"rank": 8, "target_modules": ["q_proj"]}
    recipe = parse_recipe(MINIMAL | {"model": {"path": "m", "lora": lora}}, where="test")
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha, recipe.model.lora.target_modules) == (8, 32, ["q_proj"])
    assert parse_recipe(recipe.model_dump(mode="json"), where="test") == recipe
    for key, value in (("target_modules", []), ("rank", 0), ("rank", 2**16 + 1), ("alpha", 2**31 + 1)):
        with pytest.raises(ConfigError, match=rf"key 'model\.lora\.{key}' has the value"):
            parse_recipe(MINIMAL | {"model": {"path": "m", "lora": {key: value}}}, where="test")


def test_a_request_for_scores_lasts_as_long_as_its_slowest_scorer_may() -> None:
    slow = {"tasks": {"a": {"scorers": [{"kind": "exact", "timeout_s": 90.0}]}}}
    assert RewardSection().request_deadline_s == 60.0
    assert RewardSection.model_validate(slow).request_deadline_s == 120.0
    batches = {"kind": "python", "function": "m:f", "timeout_s": 20.0}  # a batch, and then each of its items
    section = RewardSection.model_validate({"tasks": {"a": {"scorers": [batches]}}})
    assert section.request_deadline_s == 100.0
