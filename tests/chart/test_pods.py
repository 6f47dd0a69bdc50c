"""Every pod: fenced in, bounded, probed, its images pinned, and it says why it fails; the trainer comes first."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tba_trainer.loop.status import ALIVE_FILE_VARIABLE

from tests.support.chart import (
    CHART,
    NODES,
    QUICKSTART,
    each_file,
    environment,
    needs_helm,
    quickstart,
    render,
    render_file,
)

pytestmark = needs_helm
PODS = ("buffer", "reward", "searcher", "trainer")


@each_file()
def test_pods_are_fenced_in(path: Path) -> None:
    pods = list(render_file(path).pods())
    assert {*PODS} <= {pod.component for pod in pods}
    for pod in pods:
        spec = pod.spec
        fence = spec["securityContext"]
        assert fence["runAsNonRoot"] is True
        assert fence["runAsUser"] >= 999
        assert fence["fsGroup"] >= 999
        assert fence["seccompProfile"] == {"type": "RuntimeDefault"}
        for field in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            assert not spec.get(field), f"{pod.name}: {field}"
        assert not any("hostPath" in volume for volume in spec.get("volumes", []))
        for container in pod.containers:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not own.get("privileged")


@each_file()
def test_pods_are_bounded_and_say_why_they_fail(path: Path) -> None:
    for pod in render_file(path).pods():
        assert pod.spec["terminationGracePeriodSeconds"] >= 1 or pod.component == "test"
        for container in pod.containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), f"{pod.name}: {container['name']}"
            assert "memory" in resources["limits"], f"{pod.name}: {container['name']}"
            # server-side apply (Helm 4) refuses a number, as `nvidia.com/gpu: 1`
            for quantity in (*resources["requests"].values(), *resources["limits"].values()):
                assert isinstance(quantity, str), f"{pod.name}: {container['name']}: {resources}"
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_trainer_is_restarted_that_was_alive_five_minutes_ago_and_not_since(tmp_path: Path) -> None:
    container = render_file(QUICKSTART).pod("trainer").spec["containers"][0]
    (file,) = (entry["value"] for entry in container["env"] if entry["name"] == ALIVE_FILE_VARIABLE)
    command = container["livenessProbe"]["exec"]["command"]
    assert file.startswith("/tmp/"), "the root of the container cannot be written"
    alive = tmp_path / "alive"
    here = [word.replace(file, str(alive)) for word in command]
    assert here != command

    def code() -> int:
        return subprocess.run(here, timeout=60).returncode

    assert code() == 0, "it has not begun"
    for age_s, expected in ((0, 0), (200, 0), (400, 1)):
        alive.touch()
        then_s = time.time() - age_s
        os.utime(alive, (then_s, then_s))
        assert code() == expected, age_s


@each_file()
def test_every_mount_has_its_volume_and_every_volume_its_mount(path: Path) -> None:
    for pod in render_file(path).pods():
        volumes = Counter(volume["name"] for volume in pod.spec.get("volumes", []))
        if pod.kind == "StatefulSet":
            volumes["data"] += 1  # of a claim template
        assert set(volumes.values()) <= {1}, pod.name
        mounted = set()
        for container in pod.containers:
            mounts = container.get("volumeMounts", [])
            paths = Counter(mount["mountPath"] for mount in mounts)
            assert set(paths.values()) <= {1}, f"{pod.name}: {paths}"
            mounted |= {mount["name"] for mount in mounts}
        assert mounted == set(volumes), pod.name


def test_gpus_and_shared_memory_are_asked_for(tmp_path: Path) -> None:
    made = render_file(NODES)
    limits = {c: made.pod(c).spec["containers"][0]["resources"]["limits"] for c in PODS}
    assert str(limits["trainer"]["nvidia.com/gpu"]) == "8"
    assert str(limits["searcher"]["amd.com/gpu"]) == "1"
    assert str(limits["reward"]["nvidia.com/gpu"]) == "1"
    assert not [key for key in limits["buffer"] if key.endswith("/gpu")]
    shm = [volume for volume in made.pod("trainer").spec["volumes"] if volume["name"] == "shm"]
    assert shm == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}]
    init = made.pod("searcher").spec["initContainers"][0]
    assert not [key for key in init["resources"].get("limits", {}) if key.endswith("/gpu")]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('# tensor_parallel_size = 4\n[searcher]\nengine = "vllm"\ntensor_parallel_size = 2  # ranks\n')
    sets = ("--set", "recipeName=,searcher.gpu.count=2,searcher.shm.sizeLimit=1Gi", "--set-file", f"recipe={recipe}")
    ranks = render("-f", str(QUICKSTART), *sets).pod("searcher").spec
    assert str(ranks["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == "2"


def test_several_processes_are_started_by_torchrun() -> None:
    one = render_file(QUICKSTART).pod("trainer").spec["containers"][0]
    assert "command" not in one
    several = quickstart("trainer.gpu.count=4")
    command = several.pod("trainer").spec["containers"][0]["command"]
    assert command[:4] == ["python", "-m", "tba_trainer.distributed.launch", "4"]
    nodes = render_file(NODES)
    command = nodes.pod("trainer").spec["containers"][0]["command"]
    assert command[:6] == ["python", "-m", "tba_trainer.distributed.launch", "8", "--nodes", "2"]
    rendezvous = command[command.index("--rendezvous") + 1]
    job = nodes.one("Job", "t-trainer")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    service = nodes.one("Service", "t-trainer")
    assert service["spec"]["clusterIP"] == "None"
    assert nodes.pod("trainer").spec["subdomain"] == service["metadata"]["name"]
    assert rendezvous == f"$(TRAINER_JOB)-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


@pytest.mark.parametrize(("file", "num_gpus"), [("values-gsm8k-4gpu.yaml", 4), ("values-math-7b-8gpu.yaml", 8)])
def test_the_promised_number_of_gpus_is_used(file: str, num_gpus: int) -> None:
    made = render_file(CHART / file)
    gpus = {c: int(made.pod(c).spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)) for c in PODS}
    num_searchers = int(environment(made.pod("buffer"))["TBA_SCALING__NUM_SEARCHERS"])
    assert gpus["buffer"] == gpus["reward"] == 0
    assert gpus["trainer"] + num_searchers * gpus["searcher"] == num_gpus
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    for component in ("trainer", "setup", "searcher"):  # the recipe's engine is vLLM, which the images for a CPU lack
        images = {container["image"].rpartition(":")[2] for container in made.pod(component).containers}
        assert images == {f"{version}-gpu"}
    tolerated = [toleration["key"] for toleration in made.pod("trainer").spec["tolerations"]]
    assert tolerated == ["nvidia.com/gpu"]


@each_file()
def test_redis_refuses_writes_before_the_kernel_kills_it(path: Path) -> None:
    for pod in render_file(path).pods():
        if pod.component == "redis":
            (container,) = pod.containers
            limit, args = container["resources"]["limits"]["memory"], container["args"]
            bound = args[args.index("--maxmemory") + 1]
            assert int(bound.removesuffix("mb")) * 2 == int(limit[:-2]) * {"Mi": 1, "Gi": 1024}[limit[-2:]]
            assert args[args.index("--maxmemory-policy") + 1] == "noeviction"


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
