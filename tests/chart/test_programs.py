"""The programs that the chart puts into pods: `helm test`, the hook of `helm uninstall`, the start of Redis."""

from __future__ import annotations

import json
import os
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tba_cli.redis_server import START_SCRIPT
from tests.integration.conftest import redis, serve_buffer
from tests.support import loopback
from tests.support.buffer import make_prompts, make_recipe, start_lineage, write_recipe
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.certificates import make_certificate
from tests.support.chart import CHART, QUICKSTART, load_script, needs_helm, render_file
from tests.support.redis_process import free_port
from tests.support.reward_process import reward_of

__all__ = ["redis", "serve_buffer"]
TOKENS = {role: f"{role}-0123456789abcdef" for role in ("searcher", "trainer", "operator", "viewer")}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("helm_test")


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


@pytest.fixture(scope="module")
def reward_url(tmp_path_factory: pytest.TempPathFactory, tokens_file: Path) -> Iterator[str]:
    folder, auth = tmp_path_factory.mktemp("reward"), {"tokens_file": str(tokens_file)}
    recipe = make_recipe(reward={"port": free_port(), "num_workers": 1}, auth=auth)
    url = f"http://127.0.0.1:{recipe.reward.port}"
    with reward_of(write_recipe(folder / "recipe.json", recipe), url):
        yield url


def config(folder: Path, buffer_url: str, reward_url: str, tokens_file: Path) -> list[str]:
    for role in ("searcher", "viewer"):  # the pod sees these two alone
        (folder / f"{role}.json").write_text(json.dumps({role: json.loads(tokens_file.read_text())[role]}))
    auth = {"tokens_file": str(folder / "searcher.json")}
    recipe = make_recipe(buffer={"url": buffer_url}, reward={"url": reward_url}, auth=auth)
    viewer = ["--viewer-tokens", str(folder / "viewer.json")]
    return ["--config", str(write_recipe(folder / "recipe.json", recipe)), *viewer, "--wait-s", "0.2"]


def test_a_release_that_works_passes_and_no_batch_gets_the_rollout(
    script: ModuleType,
    serve_buffer: ServeBuffer,
    reward_url: str,
    tokens_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    buffer = serve_buffer(tokens=TOKENS)
    operator = buffer.client(token=TOKENS["operator"])
    arguments = config(tmp_path, buffer.url, reward_url, tokens_file)
    assert script.main(arguments) == 1  # nothing to answer yet: no prompts
    assert "look at the setup Job" in capsys.readouterr().err
    operator.upload_prompts(make_prompts(2))
    start_lineage(buffer.client(token=TOKENS["trainer"]))
    for count in (1, 2):
        assert script.main(arguments) == 0
        out = capsys.readouterr().out
        assert "without a token gets 401" in out
        assert "as a viewer gets 403" in out
        stats = operator.stats()
        assert (stats.num_failed, stats.num_scored, stats.num_pending) == (count, 0, 0)
    assert operator.list_rollouts(limit=1).rollouts[0].response_text == "pushed by helm test"


def test_services_that_let_everybody_in_fail(script, serve_buffer, reward_url, tokens_file, tmp_path, capsys):
    buffer = serve_buffer()
    assert script.main(config(tmp_path, buffer.url, reward_url, tokens_file)) == 1
    assert "/v1/run without a token got 200, not 401" in capsys.readouterr().err


SCRIPT = CHART / "files" / "stop_trainer.py"
JOB = "t-trainer-0123abcd"
NO_HTTP = 0


@needs_helm
def test_the_hook_ends_the_trainer_of_this_release_and_may_do_nothing_else() -> None:
    made = render_file(QUICKSTART)
    hook, trainer = made.one("Job", "t-stop"), made.one("Job", "t-trainer")["metadata"]["name"]
    annotations = hook["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == "pre-delete"
    assert "hook-failed" in annotations["helm.sh/hook-delete-policy"], "what failed would stay after the release"
    (role,) = (x for x in made.of("Role") if x["metadata"]["name"] == "t-stop")
    job_alone = {"apiGroups": ["batch"], "resources": ["jobs"], "resourceNames": [trainer], "verbs": ["get", "delete"]}
    assert role["rules"] == [job_alone]
    pod = made.pod("stop").spec
    (container,) = pod["containers"]
    words = container["command"]
    assert words[words.index("--job") + 1] == trainer
    wait_s, grace_s = int(words[-1]), made.pod("trainer").spec["terminationGracePeriodSeconds"]
    assert grace_s < wait_s < hook["spec"]["activeDeadlineSeconds"]
    # all that it needs is there before Helm removes the first object, and is no hook that is gone by then
    script = made.one("ConfigMap", "t-stop")
    assert script["data"]["stop_trainer.py"] == SCRIPT.read_text()
    for found in (script, role, made.one("ServiceAccount", "t-stop"), made.one("NetworkPolicy", "t-stop")):
        assert "annotations" not in found["metadata"]
    assert [volume["name"] for volume in pod["volumes"]] == ["script"], "it needs no secret"


@needs_helm
def test_the_hook_can_be_off() -> None:
    made = render_file(QUICKSTART, "--set", "stop.enabled=false")
    assert [x["metadata"]["name"] for x in made.objects if x["metadata"]["name"] == "t-stop"] == []


class Jobs(loopback.Server):
    """The Kubernetes API of one Job: statuses to answer with, in order; the last one stays."""

    def __init__(self, folder: Path, statuses: list[int]) -> None:
        self.statuses, self.calls = statuses, list[tuple[str, str, str, object]]()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*make_certificate(folder))
        super().__init__(Answer, context=context)


class Answer(loopback.Handler):
    def do_GET(self) -> None:
        body = json.loads(self.body() or b"null")
        assert isinstance(self.server, Jobs)
        self.server.calls.append((self.command, self.path, self.headers["authorization"], body))
        statuses = self.server.statuses
        if statuses[0] == NO_HTTP:
            statuses.pop(0)
            self.wfile.write(b"nonsense\r\n\r\n")
            return
        self.answer(statuses.pop(0) if len(statuses) > 1 else statuses[0])

    do_DELETE = do_GET


@pytest.fixture(scope="module")
def stop_script() -> ModuleType:
    module = load_script("stop_trainer")
    vars(module)["PAUSE_S"] = 0.01
    return module


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    server = Jobs(tmp_path, [200])
    (tmp_path / "namespace").write_text("lab")
    (tmp_path / "token").write_text("of-the-pod\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    yield server
    server.close()


@pytest.mark.parametrize(
    ("statuses", "said", "methods"),
    [
        ([200, 200, 200, 404], f"ok: {JOB} is gone", ["DELETE", "GET", "GET", "GET"]),
        ([404], f"ok: {JOB} is gone", ["DELETE"]),
        ([503, 429, 202, 404], f"ok: {JOB} is gone", ["DELETE", "DELETE", "DELETE", "GET"]),
        ([NO_HTTP, 200, 404], f"ok: {JOB} is gone", ["DELETE", "DELETE", "GET"]),
        ([403], "warning: t-trainer-0123abcd was not stopped: this pod may not DELETE it (403)", ["DELETE"]),
    ],
    ids=["stops", "nothing there", "busy", "no HTTP", "forbidden"],
)
def test_the_job_is_deleted_once_and_waited_for(jobs, stop_script, capsys, tmp_path, statuses, said, methods):
    jobs.statuses = statuses
    assert stop_script.main(["--job", JOB, "--wait-s", "60"], account=tmp_path) == 0
    assert capsys.readouterr().out.startswith(said)
    assert [call[0] for call in jobs.calls] == methods
    path, token, body = jobs.calls[0][1:]
    assert (path, token) == (f"/apis/batch/v1/namespaces/lab/jobs/{JOB}", "Bearer of-the-pod")
    assert body == {"propagationPolicy": "Foreground"}, "else it is gone at once, and its pods are not"


def test_a_trainer_that_stays_and_an_api_that_is_gone_hold_up_nothing(jobs, stop_script, capsys, tmp_path):
    assert stop_script.main(["--job", JOB, "--wait-s", "0.2"], account=tmp_path) == 0
    assert "is not gone after 0.2 s (last answer to GET: status 200)" in capsys.readouterr().out
    jobs.server_close()
    assert stop_script.main(["--job", JOB, "--wait-s", "0.1"], account=tmp_path) == 0
    assert "is not gone after 0.1 s (last answer to DELETE: <urlopen error" in capsys.readouterr().out


ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/chart/golden/cpu-quickstart.yaml"


def container() -> dict[str, Any]:
    (pod,) = (
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(GOLDEN.read_text())
        if document and document["kind"] == "StatefulSet" and document["metadata"]["name"].endswith("-redis")
    )
    return pod["containers"][0]


def test_the_chart_has_the_same_script() -> None:
    assert (ROOT / "charts/tba/files/start_redis.sh").read_bytes() == START_SCRIPT.read_bytes()


def test_the_command_of_the_container_checks_the_file_and_becomes_redis(tmp_path: Path) -> None:
    """Programs replace those of Redis: one reports a torn file, the other prints its arguments."""
    data, programs = tmp_path / "data", tmp_path / "bin"
    data.mkdir()
    programs.mkdir()
    (data / "appendonly.aof").write_bytes(b"wholetorn")
    for name, text in {
        "redis-check-aof": 'echo "AOF analyzed: size=9, ok_up_to=5, ok_up_to_line=1, diff=4"; exit 1',
        "redis-server": 'echo "redis-server $*"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "redis-password").write_text('a"word')
    redis, conf = container(), tmp_path / "redis.conf"
    args = [word.replace("/data", str(data)) for word in redis["args"]]
    command = [word.replace("/etc/redis-password", str(tmp_path)) for word in redis["command"]]
    command = [word.replace("/tmp/redis.conf", str(conf)) for word in command]
    done = subprocess.run(
        [*command, *args],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "cut off its last 4 of 9 bytes" in first
    assert last == " ".join(["redis-server", str(conf), *args, "--aof-load-truncated no"])
    assert (data / "appendonly.aof").read_bytes() == b"whole"
    assert conf.read_text() == 'requirepass "a\\"word"\n'
    assert stat.S_IMODE(conf.stat().st_mode) == 0o600
