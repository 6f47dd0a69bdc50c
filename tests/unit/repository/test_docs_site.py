"""The documentation's site (tools/docs_site.py): its menu, its search, and its page of recipe keys."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import docs_site, keys_docs, recipe_keys

DOCS = Path(__file__).parents[3] / "docs"
CONFIG = yaml.load((DOCS / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)  # the tags in it are mkdocs' own
SCHEDULES = {"objective.beta", "trainer.learning_rate"}


def leaves(menu: Any) -> list[str]:
    if isinstance(menu, str):
        return [menu]
    return [leaf for part in (menu.values() if isinstance(menu, dict) else menu) for leaf in leaves(part)]


def test_the_menu_has_pages_that_there_are_and_the_search_shows_decisions_below_them(tmp_path: Path) -> None:
    docs_site.main(tmp_path)
    assert [page for page in leaves(CONFIG["nav"]) if not (tmp_path / page).is_file()] == []
    decisions = [path.read_text() for path in (tmp_path / "docs" / "adr").iterdir()]
    assert len(decisions) > 40
    assert {yaml.safe_load(text.split("---\n")[1])["search"]["boost"] * 1000 < 1 for text in decisions} == {True}
    assert [page for page in leaves(CONFIG["nav"]) if (tmp_path / page).read_text().startswith("---")] == []


def test_a_person_finds_how_do_i_by_the_words_of_trl(tmp_path: Path) -> None:
    separator = next(it["search"]["separator"] for it in CONFIG["plugins"] if "search" in it)
    titles = re.findall(r"^## (.+)$", (DOCS / "how-do-i.md").read_text(), re.MULTILINE)
    index = tmp_path / "search" / "search_index.json"
    index.parent.mkdir()

    def repair(titles: list[str]) -> None:
        docs = [{"location": "docs/how-do-i/#a", "title": html.escape(title, quote=False)} for title in titles]
        index.write_text(json.dumps({"config": {"separator": separator}, "docs": docs}))
        docs_site.repair_search(tmp_path)

    repair(titles)
    assert "W&B (wandb, Weights & Biases)" in index.read_text()
    with pytest.raises(SystemExit, match="w&b"):
        repair([title for title in titles if "W&B" not in title])


def test_every_key_of_a_recipe_has_its_row() -> None:
    found, section = set[str](), ""
    for line in keys_docs.page().splitlines():
        if heading := re.match(r"## (?:`kind = .* in )?`\[+([\w.]+)\]+`", line):
            section = heading[1].replace(".NAME", "")
        elif line.startswith("## "):
            break  # a schedule
        elif row := re.match(r"\| `(\w+)` \| \S.* \| \S", line):
            found.add(f"{section}.{row[1]}")
    keys = {key for key in recipe_keys.all_keys() if key.rpartition(".")[0] not in SCHEDULES}
    assert found - SCHEDULES == keys - {"reward.tasks.scorers.kind"}
