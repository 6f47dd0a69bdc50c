"""The children of a local run: which program, which environment, which priority."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tba.config import Recipe
from tba.local.children import ChildSpec
from tba.local.redis_server import redis_command
from tba.local.resolve import child_environ
from tba.local.run_folder import RunFolder


class Services:
    """Makes the start command of every child.

    Args:
        environ: the environment that children inherit, mostly.
        redis_binary: path of redis-server.
    """

    def __init__(
        self, recipe: Recipe, folder: RunFolder, *, environ: Mapping[str, str], redis_binary: str, redis_port: int
    ) -> None:
        self._recipe = recipe
        self._folder = folder
        self._environ = environ
        self._redis_binary = redis_binary
        self._redis_port = redis_port

    def redis(self) -> ChildSpec:
        """The run's own Redis."""
        folder: Path = self._folder.redis_path
        conf = self._folder.redis_conf_path
        command = redis_command(self._redis_binary, port=self._redis_port, folder=folder, conf=conf)
        return ChildSpec(
            name="redis", command=command, environ=child_environ(self._environ, num_threads=1), is_chatty=True
        )

    def warm_start(self) -> ChildSpec:
        """The program that makes the starting model."""
        return self._python("warm-start", "tba_trainer.warmstart", self._recipe.trainer.torch_num_threads)

    def buffer(self) -> ChildSpec:
        """The buffer service."""
        return self._python("buffer", "tba_buffer", 1)

    def reward(self) -> ChildSpec:
        """The reward service."""
        return self._python("reward", "tba_reward", 1, gpus=self._recipe.local.gpus.reward)

    def trainer(self) -> ChildSpec:
        """The trainer; torchrun starts it where it has several processes."""
        section, gpus = self._recipe.trainer, self._recipe.local.gpus.trainer
        if section.num_processes == 1:
            return self._python("trainer", "tba_trainer", section.torch_num_threads, gpus=gpus)
        return self._python(
            "trainer", "tba_trainer.parallel.launch", section.torch_num_threads, str(section.num_processes), gpus=gpus
        )

    def searcher(self, index: int) -> ChildSpec:
        """Searcher number `index`, from 0."""
        searcher_id, gpus = f"searcher-{index}", self._recipe.local.gpus.searchers
        return ChildSpec(
            name=searcher_id,
            command=self._command("tba_searcher"),
            environ=child_environ(
                self._environ,
                num_threads=self._recipe.searcher.torch_num_threads,
                searcher_id=searcher_id,
                tokens_file=self._tokens_file("searcher"),
                gpus=None if gpus is None else gpus[index % len(gpus)],
            ),
            niceness=self._recipe.local.nice_searchers,
        )

    def _python(
        self, name: str, module: str, num_threads: int, *arguments: str, gpus: Sequence[int] | None = None
    ) -> ChildSpec:
        return ChildSpec(
            name=name,
            command=self._command(module, *arguments),
            environ=child_environ(
                self._environ, num_threads=num_threads, gpus=gpus, tokens_file=self._tokens_file(name)
            ),
        )

    def _tokens_file(self, name: str) -> Path | None:
        """The child's own of those that this run made; None where the recipe brings its tokens, or it needs none."""
        own = self._recipe.auth.tokens_file == str(self._folder.tokens_path("all"))
        return self._folder.tokens_path(name) if own and name in ("buffer", "reward", "searcher", "trainer") else None

    def _command(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", module, *arguments, "--config", str(self._folder.config_path)]
