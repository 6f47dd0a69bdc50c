"""The adapters of tba.environments.adapters, with the real packages where they are installed."""

from __future__ import annotations

import json
import random
import sys
import threading
from typing import Any

import pytest

from tba.environments import EpisodeError, Play, Reply, Step, open_play
from tba.errors import ConfigError


def play_of(name: str, **settings: Any) -> Play:
    make, _ = open_play(f"tba.environments.adapters.{name}", (), settings, what="environments.talk")
    return make()


async def steps_of(play: Play, *replies: str) -> list[Step]:
    return [await play.step(Reply(text, None, ())) for text in replies]


@pytest.mark.parametrize(
    "name", ["textarena:TextArena", "skyrl_gym:SkyRLGym", "gymnasium:Gymnasium", "openenv:OpenEnv"]
)
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    for module in ("textarena", "skyrl_gym", "gymnasium", "websockets.sync.client"):
        monkeypatch.setitem(sys.modules, module, None)
    module, _, _ = name.partition(":")
    package = "websockets" if module == "openenv" else module.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"pip install {package}$"):
        play_of(name, **{"url" if module == "openenv" else "id": "http://x"})


async def test_a_game_is_a_function_of_seed_and_replies_whatever_is_played_beside_it():
    pytest.importorskip("textarena")

    async def games(*seeds: int) -> list[list[Any]]:
        plays = [play_of("textarena:TextArena", id="2048-v0") for _ in seeds]
        found: list[list[Any]] = [[await play.reset(seed, {})] for seed, play in zip(seeds, plays, strict=True)]
        for move in ["[up]", "[left]", "[down]", "[right]"] * 4:  # each puts a number at a random place
            for play, steps in zip(plays, found, strict=True):
                steps += await steps_of(play, move)
        return found

    kept = random.getstate()
    (first,), (second,) = await games(1), await games(2)
    assert first != second
    assert await games(1, 2) == [first, second]
    assert random.getstate() == kept


async def test_a_game_pays_once_and_says_what_an_invalid_move_costs():
    pytest.importorskip("textarena")
    moves = "A C,A B,C B,A C,B A,B C,A C".split(",")
    for played, pays, condition in ((moves, 1.0, "done"), ([*moves[:4], "x", "y"], 1 / 3, "invalid_move")):
        play = play_of("textarena:TextArena", id="TowerOfHanoi-v0")
        await play.reset(3, {})
        *steps, last = await steps_of(play, *played)
        assert [(each.done, each.reward) for each in steps] == [(False, None)] * len(steps)
        assert "A C" not in str(steps[0].messages)  # the policy's own move
        assert (last.done, last.reward, last.info["stop_condition"]) == (True, pytest.approx(pays), condition)
    for id in ("TicTacToe-v0", "QuantumTicTacToe-v0", "NoSuchGame-v0"):
        with pytest.raises(ConfigError, match=id):
            await play_of("textarena:TextArena", id=id).reset(1, {})


async def test_skyrl_gym_gets_the_data_and_pays_each_turn():
    pytest.importorskip("skyrl_gym")
    play = play_of("skyrl_gym:SkyRLGym", id="skyrl_gym.envs:gsm8k_multi_turn", max_turns=4)
    assert await play.reset(1, {"reward_spec": {"ground_truth": "18"}}) == ([], [])
    steps = await steps_of(play, "hm", "#### 17", "#### 18")
    assert [each.reward for each in steps] == [0.0, pytest.approx(0.05), 1.0]
    assert [(each.done, len(each.messages)) for each in steps] == [(False, 1), (False, 1), (True, 0)]
    await play.close()


async def test_gymnasium_keeps_a_limit_apart_from_an_end():
    gymnasium: Any = pytest.importorskip("gymnasium")

    class Guess(gymnasium.Env):
        action_space = gymnasium.spaces.Text(2, charset="0123456789")
        observation_space = gymnasium.spaces.Text(9)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            self.secret = str(self.np_random.integers(10, 99))
            return options["hint"], {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "more", float(action == self.secret), action == self.secret, False, {}

    gymnasium.register("TbaGuess-v0", Guess, max_episode_steps=2)
    (secret := Guess()).reset(seed=7, options={"hint": ""})
    for guess, pays, condition in ((secret.secret, 1.0, "terminated"), ("1", 0.0, "truncated")):
        play = play_of("gymnasium:Gymnasium", id="TbaGuess-v0")
        assert (await play.reset(7, {"hint": "digits"}))[0] == [{"role": "user", "content": "digits"}]
        *steps, last = await steps_of(play, "no number", "1", f" {guess}\n")  # the limit is reached in both
        assert [(each.reward, each.done) for each in (*steps, last)] == [(None, False), (0.0, False), (pays, True)]
        assert last.info == {"stop_condition": condition, "truncated": condition == "truncated"}
    with pytest.raises(ConfigError, match="Discrete"):
        play_of("gymnasium:Gymnasium", id="Blackjack-v1")


async def test_each_episode_of_openenv_is_a_session():
    websockets: Any = pytest.importorskip("websockets.sync.server")

    def session(socket: Any) -> None:  # with the messages of OpenEnv 0.10
        assert socket.request.path == "/ws"
        seed = None
        for line in socket:
            data = json.loads(line)["data"]
            seed = data.get("seed", seed)
            found = {"observation": {"prompt": data.get("hint") or f"{seed} {data.get('message')}", "info": {}}}
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}
            is_bad = data.get("message") == "bad"
            answer = error if is_bad else {**found, "reward": seed, "done": "message" in data}
            socket.send(json.dumps({"type": "error" if is_bad else "observation", "data": answer}))

    with websockets.serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}/"
        plays = [play_of("openenv:OpenEnv", url=url, **more) for more in ({"text": "prompt"}, {})]
        begun = [await play.reset(seed, {"hint": "Begin"}) for seed, play in enumerate(plays)]
        assert [messages[0]["content"] for messages, _ in begun] == ["Begin", '{"prompt": "Begin"}']
        for play, reward, text in zip(plays, (0.0, 1.0), ("0 go", '{"prompt": "1 go"}'), strict=True):
            (answer,) = await steps_of(play, "go")
            assert answer[:3] == ([{"role": "user", "content": text}], reward, True)
            with pytest.raises(EpisodeError, match="VALIDATION_ERROR"):
                await steps_of(play, "bad")
            await play.close()
        server.shutdown()
