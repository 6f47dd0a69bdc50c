"""Where GPUs are short the trainer comes first: a run without a trainer stands, one with fewer searchers does not."""

from __future__ import annotations

from tests.support.chart import CHART, needs_helm, render_file

pytestmark = needs_helm
FOUR_GPUS = CHART / "values-gsm8k-4gpu.yaml"


def test_searchers_are_below_the_trainer_and_take_nothing_from_others() -> None:
    made = render_file(FOUR_GPUS)
    (made_class,) = made.of("PriorityClass")
    assert made.pod("searcher").spec["priorityClassName"] == made_class["metadata"]["name"] == "searcher-1.lab.t"
    assert -10 < made_class["value"] < 0, "pods without a class have 0; from -10 on no autoscaler adds a node for them"
    assert made_class["preemptionPolicy"] == "Never"
    assert "globalDefault" not in made_class
    for pod in made.pods():
        assert pod.component == "searcher" or "priorityClassName" not in pod.spec, pod.name


def test_classes_of_the_cluster_are_named_instead() -> None:
    named = "searcher.pod.priorityClassName=low,trainer.pod.priorityClassName=high"
    made = render_file(FOUR_GPUS, "--set", named)
    assert made.of("PriorityClass") == []
    assert {c: made.pod(c).spec["priorityClassName"] for c in ("searcher", "trainer")} == {
        "searcher": "low",
        "trainer": "high",
    }
    for_all = render_file(FOUR_GPUS, "--set", "pod.priorityClassName=lab")
    assert for_all.of("PriorityClass") == []
    assert for_all.pod("searcher").spec["priorityClassName"] == "lab"
