"""One run of TRL's GRPOTrainer, in TRL's own environment: `python -m studies.pretrained_trl_program SETTINGS.json`.

Synchronous: every step generates its rollouts with the newest weights and trains on them once. It ends at the target.
What the settings do not name has TRL's default, but for two. Activations are kept and not computed twice. Weights
are float32, because updates of 1e-5 are lost in the file's bfloat16.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import random
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Train, and write one JSON line for each step to steps.jsonl in the folder of the settings."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(settings["num_threads"])
    rows = [{"prompt": each["text"], "entry": json.dumps(each["data"])} for each in settings["prompts"]]
    random.Random(settings["seed"]).shuffle(rows)
    scored: list[dict[str, float]] = []
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        reward_funcs=reward_of(settings["rule"], scored),
        train_dataset=Dataset.from_list(rows),
        args=_config(settings),
    )
    timed = _time_generation(trainer)
    trainer.add_callback(_clock(settings, scored, timed))
    trainer.train()


def _config(settings: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["num_steps"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["num_rollouts"] // settings["micro_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_response_tokens"],
        temperature=settings["temperature"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=settings["schedule"],
        bf16=settings["bf16"],
        gradient_checkpointing=False,
        use_cpu=True,
        seed=settings["seed"],
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def reward_of(rule: dict[str, Any], scored: list[dict[str, float]]) -> Any:
    """Return the product's own rule as a reward function; every call adds what it saw to `scored`."""
    from tba_reward.scorer import Item
    from tba_reward.scorers.reasoning_gym import score

    def reward(
        prompts: list[str], completions: list[str], completion_ids: Any, entry: list[str], **_: Any
    ) -> list[float]:
        items = zip(prompts, completions, entry, strict=True)
        rewards = [score(Item(prompt=p, response=c, data=json.loads(e)), rule) for p, c, e in items]
        num_tokens = sum(len(ids) for ids in completion_ids)
        scored.append({"reward": sum(rewards) / len(rewards), "num_tokens": num_tokens, "num_rollouts": len(rewards)})
        return rewards

    return reward


def _time_generation(trainer: Any) -> dict[str, float]:
    """Return the seconds of generation so far, kept up to date."""
    timed, generate = {"generate_s": 0.0}, trainer._generate

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        try:
            return generate(*args, **kwargs)
        finally:
            timed["generate_s"] += time.monotonic() - began_s

    trainer._generate = timed_generate
    return timed


def _clock(settings: dict[str, Any], scored: list[dict[str, float]], timed: dict[str, float]) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Runs from the begin of the first step to the one that reaches the target."""

        def __init__(self) -> None:
            self.began_s: float | None = None
            self.extra: dict[str, float] = {}

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self.began_s is None:
                self.began_s, self.extra = time.monotonic(), {"began_at_s": time.time()}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self.began_s is not None
            usage = resource.getrusage(resource.RUSAGE_SELF)
            figures = {
                "step": state.global_step,
                "seconds": time.monotonic() - self.began_s,
                "peak_bytes": usage.ru_maxrss * 1024,
            }
            with (Path(settings["folder"]) / "steps.jsonl").open("a") as file:
                file.write(json.dumps(figures | timed | scored[-1] | self.extra) + "\n")
            self.extra = {}
            last = [each["reward"] for each in scored[-settings["window"] :]]
            # set, and never taken back: transformers sets it at the last step
            if len(last) == settings["window"] and sum(last) / len(last) >= settings["target"]:
                control.should_training_stop = True

    return Clock()


if __name__ == "__main__":
    main()
