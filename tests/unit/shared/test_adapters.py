"""The adapters of tba.environments.adapters, with the real packages where they are installed."""

from __future__ import annotations

import json
import random
import threading
from typing import Any, cast

import pytest

from tba.environments import EpisodeError, Play, Reply, Step, open_play
from tba.errors import ConfigError


def play_of(name: str, **settings: Any) -> Play:
    make, _ = open_play(f"tba.environments.adapters.{name}", (), settings, what="environments.talk")
    return make()


async def steps_of(play: Play, *replies: str) -> list[Step]:
    return [await play.step(Reply(text, None, ())) for text in replies]


async def test_a_game_is_a_function_of_seed_and_replies_whatever_is_played_beside_it():
    textarena: Any = pytest.importorskip("textarena")
    moves = ["[up]", "[left]", "[down]", "[right]"] * 4  # each puts a number at a random place
    plays, kept = {seed: play_of("textarena:TextArena", id="2048-v0") for seed in (1, 2)}, random.getstate()
    for seed, play in plays.items():
        await play.reset(seed, {})
    steps = [step for move in moves for play in plays.values() for step in await steps_of(play, move)]
    assert random.getstate() == kept
    for seed, answer in zip(plays, steps[-2:], strict=True):
        game = textarena.make("2048-v0")
        game.reset(num_players=1, seed=seed)
        for move in moves:
            game.step(move)
        assert game.get_observation()[1].endswith(cast("Any", answer.messages[0])["content"])


async def test_a_game_pays_once_and_says_what_an_invalid_move_costs():
    pytest.importorskip("textarena")
    kept = random.getstate()
    moves = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
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
    assert random.getstate() == kept, "a game that raises leaves its random state to nobody"


async def test_skyrl_gym_gets_the_data_and_pays_each_turn():
    pytest.importorskip("skyrl_gym")
    play = play_of("skyrl_gym:SkyRLGym", id="skyrl_gym.envs:gsm8k_multi_turn", max_turns=4)
    assert await play.reset(1, {"reward_spec": {"ground_truth": "18"}}) == ([], [])
    found = [(step.reward, step.done, len(step.messages)) for step in await steps_of(play, "hm", "#### 17", "#### 18")]
    assert found == [(0.0, False, 1), (pytest.approx(0.05), False, 1), (1.0, True, 0)]


async def test_gymnasium_keeps_a_limit_apart_from_an_end():
    gymnasium: Any = pytest.importorskip("gymnasium")

    class Guess(gymnasium.Env):
        action_space, observation_space = gymnasium.spaces.Text(2, charset="0123456789"), gymnasium.spaces.Text(9)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            self.secret = str(seed)
            return options["hint"], {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "more", float(action == self.secret), action == self.secret, False, {}

    gymnasium.register("TbaGuess-v0", Guess, max_episode_steps=2)
    for guess, pays, condition in (("42", 1.0, "terminated"), ("1", 0.0, "truncated")):
        play = play_of("gymnasium:Gymnasium", id="TbaGuess-v0")
        assert (await play.reset(42, {"hint": "digits"}))[0] == [{"role": "user", "content": "digits"}]
        steps = await steps_of(play, "no number", "1", f" {guess}\n")  # the limit is reached in both
        assert [(each.reward, each.done) for each in steps] == [(None, False), (0.0, False), (pays, True)]
        assert steps[-1].info == {"stop_condition": condition, "truncated": condition == "truncated"}
    with pytest.raises(ConfigError, match="Discrete"):
        play_of("gymnasium:Gymnasium", id="Blackjack-v1")


async def test_each_episode_of_openenv_is_a_session():
    websockets: Any = pytest.importorskip("websockets.sync.server")

    def session(socket: Any) -> None:  # with the messages of OpenEnv 0.10
        seed = json.loads(next(iter(socket)))["data"]["seed"]
        socket.send(json.dumps({"data": {"observation": {"prompt": "Begin"}, "reward": None, "done": False}}))
        for line in socket:
            said = json.loads(line)["data"]["message"]
            found = {"observation": {"prompt": f"{seed} {said}", "info": {}}, "reward": seed, "done": True}
            socket.send(json.dumps({"data": {"code": "VALIDATION_ERROR", "message": ""} if said == "bad" else found}))

    with websockets.serve(session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}/"
        one, two = play_of("openenv:OpenEnv", url=url, text="prompt"), play_of("openenv:OpenEnv", url=url)
        assert "Begin" in str([await play.reset(seed, {}) for seed, play in enumerate((one, two))])
        for play, reward, text in ((one, 0.0, "0 go"), (two, 1.0, '{"prompt": "1 go"}')):
            (answer,) = await steps_of(play, "go")
            assert answer[:3] == ([{"role": "user", "content": text}], reward, True)
            with pytest.raises(EpisodeError, match="VALIDATION_ERROR"):
                await steps_of(play, "bad")
            await play.close()
        server.shutdown()
