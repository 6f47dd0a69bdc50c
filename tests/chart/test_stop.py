"""`helm uninstall`: a hook ends the trainer, which writes its checkpoint, before anything that it needs is removed."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.certificates import make_certificate
from tests.support.chart import CHART, QUICKSTART, load_script, needs_helm, render_file

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


class Jobs(HTTPServer):
    """The Kubernetes API of one Job: statuses to answer with, in order; the last one stays."""

    def __init__(self, folder: Path, statuses: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.statuses, self.calls = statuses, []
        self.calls: list[tuple[str, str, str, object]]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*make_certificate(folder))
        self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    """One call."""

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        assert isinstance(self.server, Jobs)
        self.server.calls.append((self.command, self.path, self.headers["authorization"], body))
        statuses = self.server.statuses
        if statuses[0] == NO_HTTP:
            statuses.pop(0)
            self.wfile.write(b"nonsense\r\n\r\n")
            return
        self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
        self.send_header("content-length", "0")
        self.end_headers()

    do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The file that the chart puts into the pod."""
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
    server.shutdown()
    server.server_close()


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
def test_the_job_is_deleted_once_and_waited_for(
    jobs: Jobs, script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    statuses: list[int], said: str, methods: list[str],
) -> None:  # fmt: skip
    jobs.statuses = statuses
    assert script.main(["--job", JOB, "--wait-s", "60"], account=tmp_path) == 0
    assert capsys.readouterr().out.startswith(said)
    assert [call[0] for call in jobs.calls] == methods
    path, token, body = jobs.calls[0][1:]
    assert (path, token) == (f"/apis/batch/v1/namespaces/lab/jobs/{JOB}", "Bearer of-the-pod")
    assert body == {"propagationPolicy": "Foreground"}, "else it is gone at once, and its pods are not"


def test_a_trainer_that_stays_and_an_api_that_is_gone_hold_up_nothing(
    jobs: Jobs, script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert script.main(["--job", JOB, "--wait-s", "0.2"], account=tmp_path) == 0
    assert "is not gone after 0.2 s (last answer to GET: status 200)" in capsys.readouterr().out
    jobs.server_close()
    assert script.main(["--job", JOB, "--wait-s", "0.1"], account=tmp_path) == 0
    assert "is not gone after 0.1 s (last answer to DELETE: <urlopen error" in capsys.readouterr().out
