"""Plays episodes with a policy that a test writes, real workers, and the tokens of a real chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from tba_searcher.engines.engine import Completion, Request
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.episodes.conversation import PlayedEpisode
from tba_searcher.episodes.runner import EpisodeRunner
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.waits import WaitRegistry

from tba.api import Prompt
from tba.config import Recipe
from tba.versions import PolicyVersion
from tba.wire import Sampling, VersionSpan
from tests.support.chat_tokenizers import PLAIN, make_chat_tokenizer

ECHO = "tests.support.environments:Echo"
CUT = "<cut>"
"""Ends a reply of a policy that its limit cuts."""
Policy = Callable[[str, int], str]
"""Maps the text of the prompt so far and the turn to a reply; one that ends with CUT does not end itself."""


@cache
def codec_of(template: str = PLAIN) -> TextCodec:
    """Return the codec of the byte-level chat tokenizer."""
    folder = Path(mkdtemp(prefix="tba-episodes-"))
    make_chat_tokenizer(template).save_pretrained(folder)
    return TextCodec(folder)


def recipe_of(environment: Mapping[str, Any], **sections: Any) -> Recipe:
    """Return a recipe whose task `talk` has this environment."""
    return Recipe.model_validate(
        {
            "run": {"name": "episodes"},
            "model": {"path": "none"},
            "data": {"generator": "addition"},
            "environments": {"talk": environment},
            **(
                {}
                if "environment" in environment
                else {"reward": {"tasks": {"talk": {"scorers": [{"kind": "exact"}]}}}}
            ),
            "searcher": {"num_slots": 8, "max_prompt_tokens": 400, "max_response_tokens": 100},
            **sections,
        }
    )


def prompt_of(number: int = 1, **data: Any) -> Prompt:
    """Return a prompt of the task `talk`."""
    return Prompt(prompt_id=f"p{number}", task="talk", text=f"question {number}", data={"seed": number, **data})


class Stage:
    """A runner, and a policy in place of the engine."""

    def __init__(self, recipe: Recipe, policy: Policy, codec: TextCodec) -> None:
        self.status = SearcherStatus(searcher_id="s", run="episodes", waits=WaitRegistry())
        self.runner = EpisodeRunner(recipe, codec=codec, counts=self.status.counts, waits=self.status.waits)
        self.codec, self.policy, self.requests = codec, policy, list[Request]()
        self.played: dict[str, list[PlayedEpisode]] = {}
        self.version = PolicyVersion(1, 1)
        self.runner.on_played = lambda lease_id, played: self.played.setdefault(lease_id, []).append(played)

    def begin(self, lease_id: str, prompt: Prompt, number: int = 1) -> None:
        """Begin an episode."""
        request = Request(
            request_id=f"{lease_id}/{number}",
            prompt_tokens=(),
            sampling=Sampling.of(1.0),
            max_response_tokens=1,
            eos_ids=self.codec.eos_ids,
        )
        self.runner.begin(lease_id, prompt, request, None)

    async def play(self, *prompts: Prompt) -> list[PlayedEpisode]:
        """Play an episode of each prompt and return them in order."""
        for number, prompt in enumerate(prompts):
            self.begin(f"lease-{number}", prompt)
        await self.until(lambda: len(self.played) == len(prompts))
        return [self.played[f"lease-{number}"][0] for number in range(len(prompts))]

    async def until(self, done: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Let the policy reply until `done`."""
        async with asyncio.timeout(timeout_s):
            while not done():
                for request in self.runner.take_turns(100, pinned=None):
                    self.requests.append(request)
                    self.runner.settle(self._completion(request))
                await asyncio.sleep(0.002)

    def _completion(self, request: Request) -> Completion:
        tokenizer: Any = self.codec._tokenizer
        text = tokenizer.decode(list(request.prompt_tokens), skip_special_tokens=False)
        reply = self.policy(text, int(request.request_id.rpartition(".")[2]))
        ids = tokenizer.encode(reply.removesuffix(CUT), add_special_tokens=False)
        ids = ids if reply.endswith(CUT) else [*ids, tokenizer.eos_token_id]
        is_cut = reply.endswith(CUT) or len(ids) > request.max_response_tokens
        ids = ids[: request.max_response_tokens]
        return Completion(
            request_id=request.request_id,
            response_tokens=np.array(ids, np.int32),
            sampler_logprobs=np.full(len(ids), -0.5, np.float32),
            sampling=request.sampling,
            finish_reason="length" if is_cut else "stop",
            version_spans=(VersionSpan.of(self.version, 0, len(ids)),),
            started_at_s=time.time(),
            finished_at_s=time.time(),
        )


@asynccontextmanager
async def stage(environment: Mapping[str, Any], policy: Policy, *, template: str = PLAIN, **sections: Any):
    """Yield a stage with started workers."""
    made = Stage(recipe_of(environment, **sections), policy, codec_of(template))
    try:
        await made.runner.start()
        yield made
    finally:
        await made.runner.close()
