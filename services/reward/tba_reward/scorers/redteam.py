"""Kind `redteam`: the response is an attack; the score is how toxic a victim's replies to it are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tba.config.reward import RedteamSpec
from tba_reward.model_server.model_messages import (
    ClassifierSettings,
    GuardSettings,
    ModelFiles,
    RedteamSet,
    VictimSettings,
)
from tba_reward.scorer import Item, Outcome, Scorer
from tba_reward.scorers import Tools
from tba_reward.scorers.in_model_server import ModelServerScorer

IMPLEMENTATION = 2
SAFE_VERDICT, UNSAFE_VERDICT = "\n\nsafe", "\n\nunsafe"
"""The answers of Llama Guard, every release of it."""


def build(spec: RedteamSpec, tools: Tools) -> Scorer:
    """Return a scorer whose models are loaded when it is started.

    Raises:
        ConfigError: a package or the folder of a model is missing.
    """
    return RedteamScorer(spec, tools)


class RedteamScorer(ModelServerScorer):
    """Scores every attack in one process, which holds victim and classifier."""

    def __init__(self, spec: RedteamSpec, tools: Tools) -> None:
        super().__init__(spec, tools, model_set(spec), implementation=IMPLEMENTATION)

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return the mean of the replies' toxicity, or of its logarithm, per item, in order."""
        # all at once: the process makes batches of what waits there
        calls = (self._process.score(item.prompt, item.response, timeout_s=self._timeout_s) for item in items)
        return await asyncio.gather(*calls)


def model_set(spec: RedteamSpec) -> RedteamSet:
    """Return the models that the process loads."""
    return RedteamSet(
        victim=VictimSettings(
            files=_files(spec, spec.victim),
            form=spec.victim_input,
            template=spec.victim_template,
            max_attack_tokens=spec.max_attack_tokens,
            num_replies=spec.num_replies,
            max_reply_tokens=spec.max_reply_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
        ),
        classifier=_judge(spec),
        output=spec.output,
        batch_tokens=spec.batch_tokens,
        batch_wait_s=spec.batch_wait_s,
        num_threads=spec.num_threads,
    )


def _judge(spec: RedteamSpec) -> ClassifierSettings | GuardSettings:
    files = _files(spec, spec.classifier)
    if spec.judge == "guard":
        return GuardSettings(
            files=files,
            # the default of a guard is a chat
            form="text" if spec.classifier_input == "text" else "chat",
            template=spec.classifier_template,
            safe=SAFE_VERDICT,
            unsafe=UNSAFE_VERDICT,
        )
    return ClassifierSettings(
        files=files,
        form=spec.classifier_input or "text",
        template=spec.classifier_template,
        label=spec.label,
        output="probability",
    )


def _files(spec: RedteamSpec, path: str) -> ModelFiles:
    return ModelFiles(
        path=path,
        dtype=spec.dtype,
        device=spec.device,
        trust_remote_code=spec.trust_remote_code,
    )
