"""Single-player games of TextArena: `settings = {id = "GuessTheNumber-v0"}`. Other settings go to the game.

A game pays once, at its end, and says itself what an invalid move costs. A message is what it has said since the last
reply: wrappers that repeat the whole history are passed by, those of actions are not.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tba.environments.adapters import required, version_of
from tba.environments.protocol import Reply, Reset, Step
from tba.errors import ConfigError

_LOCK = threading.Lock()  # games draw from the random state of the process, and other episodes run in other threads


class TextArena:
    """Implements `Environment` with a game."""

    version = version_of("textarena")

    def __init__(self, id: str, **settings: Any) -> None:
        self._textarena, self._id, self._settings = required("textarena", "textarena"), id, settings

    def reset(self, seed: int, data: Mapping[str, Any]) -> Reset:
        """Begin the game; raise ConfigError if it is none for one player."""
        self._states: Any = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        try:
            with self._own_random_state():
                self._game = self._textarena.make(self._id, **self._settings)
                self._game.reset(num_players=1, seed=seed)
            if not isinstance(self._game.state, self._textarena.SinglePlayerState):
                raise ValueError("it has several players")
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"{self._id} cannot be played by one player ({error}); take another game") from error
        return Reset(self._said())

    def step(self, reply: Reply) -> Step:
        """Make the move of a reply."""
        with self._own_random_state():
            done, _ = self._game.step(reply.content)
        if not done:
            return Step(self._said())
        rewards, players = self._game.close()
        info = {"stop_condition": "invalid_move" if players[0]["invalid_move"] else "done"}
        return Step([*self._said(), str(players[0]["reason"])], rewards[0], True, info)

    def close(self) -> None:
        """Do nothing: a game holds nothing."""

    def _said(self) -> list[str]:
        move, state = self._textarena.ObservationType.PLAYER_ACTION, self._game.state
        # some games swap sender and kind of a move
        texts = [str(text) for who, text, kind in state.get_current_player_observation() if move not in (who, kind)]
        return ["\n".join(texts)] if texts else []

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        with _LOCK:
            kept = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:  # a game that raises must not leave its state to others
                self._states = random.getstate(), np.random.get_state()
                random.setstate(kept[0])
                np.random.set_state(kept[1])
