"""Functions that generate prompts. `data.generator` of a recipe names one of them:

    addition            the built-in one, addition.py
    MODULE:FUNCTION     a function of your own; modules in the current folder are found too

`PromptSource` describes such a function.
"""

from __future__ import annotations

from typing import Any, Protocol

from tba import plugins
from tba.api import Prompt
from tba.errors import ConfigError
from tba_cli.generators import addition

GENERATOR = "data.generator"
BUILT_IN = ("addition",)


class PromptSource(Protocol):
    """Makes the prompts of a run.

    `num_train`, `num_heldout` and `seed` are data.num_train, data.num_heldout and run.seed of the recipe. The result
    has prompts of both splits with different ids. It must depend on nothing but the arguments, because a resume makes
    the prompts again; held-out prompts should be the same for every seed. A ConfigError is shown to people as it is.
    """

    def __call__(self, num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
        """Return the prompts of both splits."""
        ...


def load_prompt_source(name: str) -> PromptSource:
    """Return the source that `data.generator` names. The source raises ConfigError if it fails or makes bad prompts."""
    if plugins.check_name(name, what=GENERATOR, builtin=BUILT_IN) in BUILT_IN:
        return addition.generate
    source = plugins.load(name, what=GENERATOR)

    def prompts_of(num_train: int, num_heldout: int, seed: int) -> list[Prompt]:
        # its errors name it, because it is not ours
        with plugins.explain_errors(name, what=GENERATOR, verb="failed"):
            made: Any = source(num_train, num_heldout, seed)
            prompts = list(made)
        seen: set[str] = set()
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise ConfigError(f"data.generator {name!r} made {prompt!r:.60}; every item must be a tba.api.Prompt")
            if prompt.prompt_id in seen:
                raise ConfigError(f"data.generator {name!r} made the prompt_id {prompt.prompt_id!r} twice")
            seen.add(prompt.prompt_id)
        return prompts

    return prompts_of
