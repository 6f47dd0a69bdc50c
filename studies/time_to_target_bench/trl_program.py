"""One run of TRL's GRPOTrainer, in TRL's own environment: `python -m ...trl_program SETTINGS.json`.

Synchronous: every step generates its rollouts with the newest weights and trains on them once. All settings of GRPO are
TRL's defaults, but for the learning rate and its schedule, which are tuned. The clock stops while weights are saved.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    """Train, and write steps.jsonl and the weights of every so many steps to the folder of the settings."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    warnings.simplefilter("ignore")
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(settings["num_threads"])
    rows = [{"prompt": prompt["text"], "answer": prompt["answer"]} for prompt in settings["prompts"]]
    random.Random(settings["seed"]).shuffle(rows)
    scored: list[dict[str, float]] = []
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        reward_funcs=_reward(settings["reward"], scored),
        train_dataset=Dataset.from_list(rows),
        args=_config(settings),
    )
    clock = _clock(folder, settings["save_every_steps"])
    trainer.add_callback(clock)
    trainer.train()
    steps = [{**step, **found} for step, found in zip(clock.steps, scored, strict=True)]
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def _config(settings: dict[str, Any]) -> Any:
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    return GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["num_steps"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["num_prompts"] * settings["group_size"] // settings["micro_batch"],
        num_generations=settings["group_size"],
        max_completion_length=settings["max_response_tokens"],
        temperature=1.0,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=settings["schedule"],
        # TRL's defaults are for large models on GPUs: memory is no concern here, and CPUs are slow at bfloat16
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=settings["seed"],
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _reward(name: str, scored: list[dict[str, float]]) -> Any:
    """Return the product's own rule as a reward function; every call adds what it saw to `scored`."""
    from tba_reward.scorer import Item
    from tba_reward.scorers import exact, last_number

    from tba.config.reward import ExactSpec, LastNumberSpec

    if name == "exact":
        rule, params = exact.score_text, ExactSpec(kind="exact").model_dump()
    else:
        rule, params = last_number.score, LastNumberSpec(kind="last_number").model_dump()

    def reward(prompts: list[str], completions: list[str], completion_ids: Any, answer: list[str], **_: Any) -> Any:
        items = zip(prompts, completions, answer, strict=True)
        rewards = [float(rule(Item(prompt=p, response=c, data={"answer": a}), params)) for p, c, a in items]
        lengths = [len(ids) for ids in completion_ids]
        scored.append(
            {
                "reward_mean": sum(rewards) / len(rewards),
                "response_tokens_mean": sum(lengths) / len(lengths),
                "response_tokens_max": max(lengths),
            }
        )
        return rewards

    return reward


def _clock(folder: Path, save_every_steps: int) -> Any:
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Runs from the begin of the first step, and stands still while weights are saved."""

        def __init__(self) -> None:
            self.steps: list[dict[str, Any]] = []
            self._s = self._cpu_s = 0.0
            self._since: tuple[float, float] | None = None

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if self._since is None:
                self._since = time.monotonic(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert self._since is not None
            self._s += time.monotonic() - self._since[0]
            self._cpu_s += time.process_time() - self._since[1]
            self.steps.append({"step": state.global_step, "seconds": self._s, "cpu_s": self._cpu_s})
            if state.global_step % save_every_steps == 0 or state.global_step == state.max_steps:
                # parameters, not the state dict: tied tensors would be in it twice
                tensors = {name: p.detach().clone() for name, p in kwargs["model"].named_parameters()}
                save_file(tensors, folder / f"{state.global_step}.safetensors")
            self._since = time.monotonic(), time.process_time()

    return Clock()


if __name__ == "__main__":
    main()
