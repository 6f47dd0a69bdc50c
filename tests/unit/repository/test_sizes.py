"""tools/structure.py and tools/recipe_keys.py: what is counted, and that a number above its budget is named."""

from __future__ import annotations

from pathlib import Path

from tools import recipe_keys, structure


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_lines_are_counted_by_package_and_docs_without_decisions(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "tba/__init__.py": '"""One."""\n\nx = 1  # two\n',
            "tba_cli/main.py": "y = 1\n",
            "services/buffer/tba_buffer/a.py": "z = 1\n\n\n",
            "tests/unit/test_a.py": "a = 1\nb = 2\n",
            "docs/page.md": "one\ntwo\n",
            "docs/adr/0019-rooms.md": "decided\n",
        },
    )
    sizes = structure.sizes(tmp_path)
    lines = {name: sizes[name] for name in ("product_lines", "tba_lines", "tba_cli_lines", "buffer_lines")}
    assert lines == {"product_lines": 7, "tba_lines": 3, "tba_cli_lines": 1, "buffer_lines": 3}
    assert sizes["product_code_lines"] == 3
    assert (sizes["tests_lines"], sizes["studies_lines"], sizes["docs_lines"]) == (2, 0, 2)
    assert sizes["unset_recipe_keys"] == sizes["recipe_keys"], "a checkout without recipes sets nothing"


def test_what_is_above_its_budget_or_has_none_is_named() -> None:
    table, wrong = structure.compare(
        {"a_lines": 1200, "b_lines": 5, "c_lines": 1}, {"a_lines": 1000, "b_lines": 5, "d": 1}
    )
    assert "a_lines                 1,200    1,000" in table.splitlines()
    assert [sentence.partition(";")[0] for sentence in wrong] == [
        "a_lines is 1,200, 200 above its budget of 1,000",
        "c_lines has no budget",
        "d is no number of this tool",
    ]


def test_a_recipe_sets_the_keys_that_it_names_however_they_are_written() -> None:
    document = {
        "trainer": {"learning_rate": 1e-3, "num_steps": 5},
        "objective": {"beta": {"kind": "linear", "value": 0.5, "steps": 10}},
        "prepare": [{"path": "models/a", "kind": "model"}, {"path": "data/b", "manual": "c"}],
        "reward": {"tasks": {"mine": {"scorers": [{"kind": "exact"}]}}},
        "data": {"sets": [{"data": {"answer": "gold", "steps": {"column": "s", "extract": "boxed"}}}]},
        "environments": {"mine": {"environment": "m:C", "settings": {"a": 1}}, "other": {"tools": ["m:f"]}},
    }
    found = recipe_keys.keys_of(document)
    assert found == {
        "trainer.learning_rate.value",
        "trainer.num_steps",
        *(f"objective.beta.{name}" for name in ("kind", "value", "steps")),
        *(f"prepare.{name}" for name in ("path", "kind", "manual")),
        "reward.tasks.scorers.kind",
        "data.sets.data.column",
        "data.sets.data.extract",
        *(f"environments.{name}" for name in ("environment", "settings", "tools")),
    }
    assert found <= recipe_keys.all_keys()


def test_deployments_set_keys_by_their_environment(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "docker-compose.yml": "TBA_BUFFER__REDIS_URL: ${TBA_REDIS_URL:-redis://redis}\n",
            "charts/tba/templates/_env.tpl": "TBA_TRAINER__LEARNING_RATE: {value: 1}\n",
            "recipes/a.toml": "[trainer]\nnum_steps = 1\n",
            "examples/worlds/b/c.toml": "[trainer]\nmax_train_s = 1\n",
            "studies/arms.py": 'ARM = {"sampling.lag_steps": 2, "objective.beta": 0.1, "no.key": 3}',
        },
    )
    is_set = recipe_keys.all_keys() - recipe_keys.unset_keys(tmp_path)
    assert is_set == {
        "buffer.redis_url",
        "trainer.learning_rate.value",
        "trainer.num_steps",
        "trainer.max_train_s",
        "sampling.lag_steps",
        "objective.beta.value",
    }
