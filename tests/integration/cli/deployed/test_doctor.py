"""`tba doctor` on a deployment that is well, and on one fault after the other."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tba.config import Recipe
from tba.tokens import token_digest
from tba_cli.doctor import CheckResult, run_checks
from tba_cli.doctor.checks import CHECKS
from tba_cli.doctor.checks import store as store_check
from tba_cli.doctor.checks.machine import check_disk, check_gpu
from tba_cli.doctor.target import Target, ok, target_of
from tba_cli.main import main
from tests.support.buffer import make_recipe
from tests.support.deployment import TOKENS, Deployment
from tests.support.model_folder import make_model_folder
from tests.support.redis_process import free_port
from tests.support.s3_server import READ_ONLY, FaultyProxy


def look(recipe: Recipe, *names: str, service: str | None = None) -> list[CheckResult]:
    return run_checks(target_of(recipe, service=service), checks=[(name, CHECKS[name]) for name in names])


def one(results: list[CheckResult], code: str) -> CheckResult:
    found = [result for result in results if result.code == code]
    assert len(found) == 1, results
    return found[0]


def assert_finding(result: CheckResult, level: str, text: str) -> None:
    assert result.level == level, result
    assert text in result.found
    assert result.fix


@pytest.mark.usefixtures("ready")
def test_a_deployment_that_is_well(deployment: Deployment, capsys: pytest.CaptureFixture) -> None:
    recipe = deployment.write("well")
    code = main(["doctor", "--config", str(recipe), "--json"])
    document = json.loads(capsys.readouterr().out)
    results = document["results"]
    assert [it for it in results if it["level"] in ("warn", "fail") and it["code"] != "disk"] == []
    assert code == 0
    levels = {found["code"]: found["level"] for found in results}
    wanted = (
        *("release", "release-services", "tokens", "tokens-accepted", "tokens-refused"),
        *("store", "store-write", "store-parts"),
        *("model", "service", "run", "reward-tasks"),
    )
    assert {code: levels.get(code) for code in wanted} == dict.fromkeys(wanted, "ok")


def test_without_services_nothing_hangs_and_nothing_is_wrong(deployment: Deployment, tmp_path: Path) -> None:
    recipe = deployment.recipe(
        buffer={"url": f"http://127.0.0.1:{free_port()}", "port": free_port()},
        reward={"url": f"http://127.0.0.1:{free_port()}", "port": free_port()},
    )
    results = look(recipe, "tokens", "services", "rewards")
    services = [result for result in results if result.code == "service"]
    assert [result.level for result in services] == ["warn", "warn"]
    assert all("does not answer" in result.found for result in services)
    assert not [result for result in results if result.level == "fail"]
    local = look(make_recipe(local={"runs_dir": str(tmp_path)}), "services", "store")
    assert {result.level for result in local} <= {"ok", "skip"}


def test_tokens(ready: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"

    def with_file(content: Any, **sections: dict[str, Any]) -> list[CheckResult]:
        path.write_text(json.dumps(content))
        return look(ready.recipe(auth={"tokens_file": str(path)}, **sections), "tokens")

    found = with_file({**TOKENS, "trainer": "another-trainer-token"})
    refused = [result for result in found if result.code == "tokens-accepted" and result.level == "fail"]
    assert_finding(refused[0], "fail", "the buffer service refuses the tokens of trainer")
    assert_finding(one(with_file({"searcher": "short"}), "tokens"), "fail", "16 characters or more")
    only = {role: TOKENS[role] for role in ("searcher", "trainer")}
    assert_finding(with_file(only)[0], "warn", "there is none for operator, viewer")
    path.chmod(0o666)
    assert_finding(one(with_file(TOKENS), "tokens-mode"), "fail", "anybody may change")
    # that of pytest is closed to others
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        path = Path(name) / "tokens.json"
        with_file(TOKENS)
        path.chmod(0o644)
        assert [each.code for each in with_file(TOKENS) if each.code == "tokens-mode"] == []
        path.parent.chmod(0o711)
        assert_finding(one(with_file(TOKENS), "tokens-mode"), "warn", "anybody here may read")
    missing = look(ready.recipe(auth={"tokens_file": str(tmp_path / "none.json")}), "tokens")
    assert_finding(missing[0], "fail", "cannot be read: No such file or directory")
    without = look(ready.recipe(auth={"tokens_file": None}), "tokens")
    assert_finding(without[-1], "fail", "asks for a token, and the recipe here names no auth.tokens_file")
    open_ = look(ready.recipe(auth={"tokens_file": None}, buffer={"host": "0.0.0.0"}), "tokens")
    assert_finding(open_[0], "fail", "services listen beyond loopback")


def test_a_store_that_ignores_create_only_writes(ready: Deployment) -> None:
    proxy = FaultyProxy(ready.store_server.port)
    proxy.drop_headers = {"if-none-match"}
    with proxy:
        found = look(ready.recipe(store={"endpoint_url": proxy.url}), "store")
    assert_finding(one(found, "store-write"), "fail", "ignores `If-None-Match: *`")


def test_a_searcher_may_have_keys_that_only_read(ready: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in READ_ONLY.items():
        monkeypatch.setenv(name, value)
    found = look(ready.recipe(), "store", service="searcher")
    assert {(result.code, result.level) for result in found} == {("store", "ok"), ("store-write", "skip")}
    trainer = look(ready.recipe(), "store", service="trainer")
    assert_finding(one(trainer, "store-write"), "fail", "AccessDenied")


def test_the_files_of_one_role_and_of_a_service(ready: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"

    def with_file(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
        path.write_text(json.dumps(document))
        results = look(ready.recipe(auth={"tokens_file": str(path)}), "tokens", "services")
        return {result.code: (result.level, result.found) for result in results}

    alone = with_file({"searcher": TOKENS["searcher"]})
    assert alone["tokens"][0] == alone["tokens-accepted"][0] == alone["run"][0] == "ok"
    digests = {role: token_digest(token) for role, token in TOKENS.items()}
    of_reward = with_file(digests)
    assert of_reward["tokens"] == ("ok", f"{path}: 4 of 4 roles")
    assert of_reward["tokens-accepted"][0] == "skip"
    of_buffer = with_file({**digests, "searcher": TOKENS["searcher"]})
    assert of_buffer["tokens-accepted"] == ("ok", "the reward service accepts the tokens of searcher")
    assert of_buffer["run"][0] == "ok"


def test_a_store_that_cannot_be_used(ready: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = {"endpoint_url": f"http://127.0.0.1:{free_port()}"}
    with monkeypatch.context() as patch:
        patch.setattr(store_check, "TIMEOUT_S", 0.2)
        gone = look(ready.recipe(store=nowhere), "store")
        assert_finding(one(gone, "store"), "fail", "check that the server runs and that store.endpoint_url is right")
        assert one(look(ready.recipe(store=nowhere), "store", service="reward"), "store").level == "skip"
    bucket = look(ready.recipe(store={"url": "s3://not-there"}), "store")
    assert_finding(one(bucket, "store"), "fail", "bucket 'not-there' does not exist")
    folder = look(ready.recipe(store={"url": "file://store"}, buffer={"host": "0.0.0.0"}), "store")
    assert_finding(one(folder, "store"), "warn", "a folder of one machine")


def test_models(ready: Deployment, tmp_path: Path) -> None:
    def models(path: Path) -> CheckResult:
        results = look(ready.recipe(model={"path": str(path)}), "models", service="trainer")
        assert len(results) == 1
        return results[0]

    good = make_model_folder(tmp_path / "models" / "good")
    assert models(good).level == "ok"
    weights = good / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    assert_finding(models(good), "fail", "is not a whole safetensors file")
    weights.write_bytes(whole)
    index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors", "lm_head.weight": "other.safetensors"}}
    (good / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_finding(models(good), "fail", "1 tensors of its model.safetensors.index.json are in no file: lm_head.weight")
    (good / "model.safetensors.index.json").write_text('{"weight')
    assert_finding(models(good), "fail", "model.safetensors.index.json is damaged")
    (good / "model.safetensors.index.json").unlink()
    (good / "tokenizer.json").unlink()
    assert_finding(models(good), "fail", "holds no tokenizer")
    assert "has a complete copy to pull" in models(tmp_path / "models" / "tiny").found
    assert_finding(models(tmp_path / "models" / "nowhere"), "fail", "neither here nor in the store")


def test_a_run_of_another_name_and_a_task_without_a_reward(ready: Deployment) -> None:
    found = look(ready.recipe(run={"name": "other"}), "releases")
    assert [result.level for result in found] == ["ok", "fail", "fail"]
    assert "belongs to run 'test', but this recipe is for run 'other'" in found[1].found
    data = {"generator": None, "sets": [{"task": "juggling", "texts": ["x"]}]}
    found = look(ready.recipe(data=data), "rewards")
    assert_finding(one(found, "reward-tasks"), "fail", "no reward scores the task 'juggling'")


def test_a_gpu_that_is_not_there(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = list(check_gpu(target_of(deployment.recipe(trainer={"device": "cuda"}), service="trainer")))
    assert_finding(one(found, "gpu"), "fail", "trainer want a GPU, but torch sees none")


def fake_torch(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, int, int]]) -> None:
    answer = {"torch": "2.13", "cuda": "13.0", "usable": True, "gpus": gpus}
    monkeypatch.setattr("tba_cli.doctor.checks.machine.ask_torch", lambda: answer)


def test_too_few_gpus(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = deployment.recipe(trainer={"device": "cuda", "num_processes": 2})
    fake_torch(monkeypatch, [("small", 1, 2**30)])
    found = list(check_gpu(target_of(recipe, service="trainer")))
    assert_finding(one(found, "gpu-count"), "fail", "trainer.num_processes is 2, and 1 GPU(s) are seen here")
    fake_torch(monkeypatch, [("large", 79 * 2**30, 80 * 2**30)] * 2)
    assert {result.level for result in check_gpu(target_of(recipe, service="trainer"))} == {"ok"}
    found = list(check_gpu(target_of(recipe, service="trainer", num_gpus=1)))
    assert_finding(one(found, "gpu-count"), "fail", "2 GPU(s) are visible here, but --gpus asks for 1")
    assert {result.level for result in check_gpu(target_of(recipe, service="trainer", num_gpus=2))} == {"ok"}


def test_little_shared_memory(deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tba_cli.doctor.checks.machine.MIN_SHM_BYTES", 2**60)
    recipe = deployment.recipe(trainer={"num_processes": 2})
    found = list(check_disk(target_of(recipe, service="trainer")))
    assert_finding(one(found, "shared-memory"), "warn", "little for a trainer of several processes")
    monkeypatch.setattr("tba_cli.doctor.checks.machine.MIN_FREE_BYTES", 2**60)
    found = list(check_disk(target_of(recipe, service="buffer")))
    assert_finding(one(found, "disk"), "warn", "are free at")
    with_cache = deployment.recipe(store={"cache_folder": str(tmp_path / "weights")})
    found_cache = list(check_disk(target_of(with_cache, service="searcher")))
    assert [result.found for result in found_cache if "(the cache of weights)" in result.found]
    (tmp_path / ".cache").mkdir()  # where a container keeps compiled kernels
    found = list(check_disk(target_of(recipe, service="buffer")))
    assert [result.found for result in found if f"{tmp_path}/.cache (caches)" in result.found]
    assert one(found, "shared-memory").level == "ok"


def test_a_check_that_hangs_or_breaks_hides_nothing(deployment: Deployment) -> None:
    release = threading.Event()

    def hangs(_: Target) -> Iterator[CheckResult]:
        yield ok("before", "this was found")
        release.wait()

    def breaks(_: Target) -> Iterator[CheckResult]:
        raise ValueError("what")
        yield

    def works(_: Target) -> Iterator[CheckResult]:
        yield ok("works", "fine")

    target = target_of(deployment.recipe(), service="buffer")
    try:
        found = run_checks(target, checks=[("hangs", hangs), ("breaks", breaks), ("works", works)], timeout_s=2.0)
    finally:
        release.set()
    assert [(result.code, result.level) for result in found] == [
        ("before", "ok"),
        ("check-timeout", "fail"),
        ("check-error", "fail"),
        ("works", "ok"),
    ]


def test_a_reward_service_that_is_frozen_costs_only_its_deadline(ready: Deployment) -> None:
    with socket.socket() as sock:  # connections are queued, and none is accepted
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        found = look(ready.recipe(reward={"url": url}), "services", "rewards")
    service = [result for result in found if result.code == "service"]
    assert [result.level for result in service] == ["ok", "warn"]
    assert "Timeout" in service[1].found
    assert one(found, "reward-tasks").level == "skip"
