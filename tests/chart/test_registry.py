"""Where images come from: the chart takes no guess, and every `helm install` that is written down says it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.chart import CHART, KUBERNETES_API, ROOT, helm, needs_helm, render

pytestmark = needs_helm
QUICKSTART = ("-f", str(CHART / "values-cpu-quickstart.yaml"))
PAGES = ["README.md", "docs/deploy.md", *(str(path.relative_to(ROOT)) for path in sorted(CHART.glob("values-*.yaml")))]
PAGES.append("charts/tba/README.md")


def images(*args: str) -> dict[str, set[str]]:
    """Pull policy -> images of every container."""
    found: dict[str, set[str]] = {}
    for pod in render(*QUICKSTART, *args).pods():
        for container in pod.containers:
            found.setdefault(container["imagePullPolicy"], set()).add(container["image"].rpartition(":")[0])
    return found


OURS = {f"tba-{part}" for part in ("buffer", "reward", "searcher", "trainer", "objectstore")}


def test_no_registry_is_asked_for_images_that_are_present() -> None:
    found = images("--set", "image.registry=,image.present=true")
    assert found == {"Never": OURS, "IfNotPresent": {"redis"}}


def installations(page: str) -> list[list[str]]:
    """The words of each `helm install` of a page, after the name of the release."""
    text = re.sub(r"\\\n#? *", "", (ROOT / page).read_text())
    return [
        shlex.split(line.split(" # ")[0].partition(" charts/tba ")[2])
        for line in text.splitlines()
        if re.match(r"(#  +)?helm (-n \S+ )?install \S+ charts/tba ", line)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_installation_that_is_written_down_is_taken(page: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text((ROOT / "recipes" / "quickstart.toml").read_text())
    for words in installations(page):
        here = [word.replace("mine.toml", str(tmp_path / "mine.toml")) for word in words]
        here = [word.replace("charts/tba/", f"{CHART}/").replace("=...", "=http://s3:9000") for word in here]
        here = [word.replace("endpointUrl=...", "endpointUrl=http://s3:9000") for word in here]
        done = helm("template", "t", str(CHART), *KUBERNETES_API, *here)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
