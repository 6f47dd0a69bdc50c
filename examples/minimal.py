"""Trajectory Balance with Asynchrony (TBA, arXiv 2503.18929) in one process: the quickstart's recipe without services.

    pi_theta, pi_ref, pi_searcher <- the starting model;  D <- {}
    for step = 1, 2, ...:
        search   y_1 .. y_K ~ pi_searcher(. | x) for some prompts x;  D <- D + {(x, y_k, r(x, y_k))}
        train    draw a batch from D by MOP (section 3);  theta <- theta - learning rate * grad L_TB(theta)   (Eq. 5)
        sync     every `sync_interval` steps: pi_searcher <- pi_theta

Engine, scorer, index, sampler, learner and objective (here Eq. 5 without the rollouts below the baseline) are those of
the services. The services themselves are missing: no HTTP, no Redis, no object store. So searcher and trainer take
turns.

    .venv/bin/python examples/minimal.py --seed 0
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from tba_buffer.index.log import RECORD_DTYPE, Publication, RolloutsAdded, pack_record
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.sampling.mop import draw_slots, drawn_event
from tba_reward.scorer import Item
from tba_reward.scorers.exact import score
from tba_searcher.engines.engine import Completion, Request
from tba_searcher.engines.factory import build_engine
from tba_searcher.engines.tokenizer import open_codec
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.learner.learner import Learner, trainer_rng
from tba_trainer.model.policy import load_policy

from tba.api import Prompt
from tba.config import Recipe, load_recipe
from tba.versions import START, PolicyVersion
from tba.wire import Batch, Group, Rollout, Sampling, float32_bytes, new_rollout_id, single_turn
from tba_cli.generators.addition import generate
from tba_cli.resolve import check_model
from tba_cli.starter_models.starting_model import make_starting_model

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.toml"
EVAL_EVERY_STEPS = 40  # a multiple of sync_interval: then the searcher has the weights of the step


def train(recipe: Recipe, *, num_steps: int, scratch: Path) -> None:
    """Run the algorithm above; the searcher gets its weights through files in the folder `scratch`."""
    prompts = generate(recipe.data.num_train, recipe.data.num_heldout, recipe.run.seed)
    heldout, to_visit = prompts[: recipe.data.num_heldout], cycle(prompts[recipe.data.num_heldout :])
    policy = load_policy(recipe.model, device="cpu", gradient_checkpointing=False)
    learner = Learner(policy, recipe, trainer_rng(recipe))  # theta, the reference, AdamW, the objective
    snapshots = WeightSnapshotWriter(policy, recipe, folder=scratch)
    searcher, buffer = Searcher(recipe, prompts), Buffer(recipe, prompts)
    sampling, temperature = recipe.sampling, recipe.model.policy_temperature
    start_s = time.monotonic()

    def search(num_rollouts: float) -> None:
        visited = list(islice(to_visit, math.ceil(num_rollouts / sampling.rollouts_per_visit)))
        buffer.add(searcher.sample(visited, num=sampling.rollouts_per_visit, temperature=temperature))

    def report(step: int, text: str = "") -> None:
        answers = [searcher.sample(heldout, num=1, temperature=t) for t in (temperature, 0.0)]
        sampled, greedy = (np.mean([r.reward == 1.0 for r in rollouts]) for rollouts in answers)
        took = f"{time.monotonic() - start_s:.0f} s"
        print(f"step {step:3d}  held-out: sampled {sampled:.3f} greedy {greedy:.3f}  {text}{took}", flush=True)

    report(0)
    buffer.announce(START)
    search(sampling.min_size_to_sample)
    for step in range(1, num_steps + 1):
        # each rollout is trained on `samples_per_insert` times on average
        search(sampling.prompts_per_batch * sampling.group_size / (sampling.samples_per_insert or 1.0))
        batch = buffer.draw(step)
        ages = [step - 1 - rollout.version.step for rollout in batch.rollouts]  # steps since its weights
        metrics = learner.gradients(batch, step=step, policy_ages=ages)
        learner.apply(step=step, lineage=0)
        if step % recipe.trainer.sync_interval == 0 or step == num_steps:
            snapshot = snapshots.take(PolicyVersion(0, step), None)
            snapshot.write()
            searcher.engine.load_weights(snapshot.paths, snapshot.version)
            buffer.announce(snapshot.version)
            snapshot.close()
        if step % EVAL_EVERY_STEPS == 0 or step == num_steps:
            names = ("reward_mean", "policy_age_mean", "ess", "log_ratio_mean", "grad_norm")
            known = {name: math.nan if (value := metrics[name]) is None else value for name in names}
            report(step, "batch: " + "".join(f"{name} {value:.2f}  " for name, value in known.items()))


class Searcher:
    """pi_searcher: samples completions with weights that lag behind theta, and scores them."""

    def __init__(self, recipe: Recipe, prompts: list[Prompt]) -> None:
        self._recipe, folder = recipe, Path(recipe.model.path)
        self.engine = build_engine(recipe, folder, START, None, seed=recipe.run.seed)
        self._codec = open_codec(recipe, folder)
        self._tokens = {prompt.prompt_id: self._codec.prompt_tokens(prompt) for prompt in prompts}

    def sample(self, prompts: list[Prompt], *, num: int, temperature: float) -> list[Rollout]:
        """Complete each prompt `num` times and return the scored rollouts; temperature 0 is greedy."""
        asked = {f"{number}/{k}": prompt for number, prompt in enumerate(prompts) for k in range(num)}
        for request_id, prompt in asked.items():
            request = Request(
                request_id=request_id,
                prompt_tokens=self._tokens[prompt.prompt_id],
                sampling=Sampling.of(temperature),
                max_response_tokens=self._recipe.searcher.max_response_tokens,
                eos_ids=self._codec.eos_ids,
            )
            self.engine.submit(request)
        done: list[Completion] = []
        while len(done) < len(asked):
            done += self.engine.step()  # one more token for every completion that has a slot
        texts = self._codec.decode_responses(done)
        return [self._rollout(asked[c.request_id], c, text) for c, text in zip(done, texts, strict=True)]

    def _rollout(self, prompt: Prompt, completion: Completion, text: str) -> Rollout:
        return Rollout(
            rollout_id=new_rollout_id(),
            run=self._recipe.run.name,
            task=prompt.task,
            prompt_id=prompt.prompt_id,
            visit_id=prompt.prompt_id,
            sequences=single_turn(self._tokens[prompt.prompt_id], completion.response_tokens, completion.finish_reason),
            response_text=text,
            version_spans=completion.version_spans,  # which weights sampled it: its policy age follows
            sampling=completion.sampling,
            logprob_bytes=float32_bytes(
                completion.sampler_logprobs
            ),  # log pi_searcher: TBA' and importance weights read it
            ref_logprob=None,  # log pi_ref: the learner computes it once, when the rollout is first drawn
            reward=score(Item(prompt=prompt.text, response=text, data=prompt.data), {"field": "answer"}),
            reward_status="scored",
            reward_reason=None,
            reward_version=None,
            searcher_id="minimal",
            started_at_s=completion.started_at_s,
            finished_at_s=completion.finished_at_s,
        )


class Buffer:
    """D: the rollouts, and the index that batches are drawn from."""

    def __init__(self, recipe: Recipe, prompts: list[Prompt]) -> None:
        self._recipe = recipe
        self._index = Index(IndexSettings.of(recipe))
        self._rollouts: dict[bytes, Rollout] = {}
        self._numbers = {prompt.prompt_id: number for number, prompt in enumerate(prompts)}

    def add(self, rollouts: list[Rollout]) -> None:
        """Append rollouts to the log that the index follows."""
        self._rollouts |= {r.rollout_id: r for r in rollouts}
        records = [
            pack_record(
                r.rollout_id,
                reward=r.reward,
                version=r.version,
                prompt=self._numbers[r.prompt_id],
                num_bytes=0,
                num_tokens=len(r.response_tokens),
                token_hash=0,
                status=r.reward_status,
            )
            for r in rollouts
        ]
        self._index.apply(RolloutsAdded(self._index.position + 1, np.frombuffer(b"".join(records), RECORD_DTYPE)))

    def announce(self, version: PolicyVersion) -> None:
        """Append a publication to the log. Rollouts count as recent that were added since the publication before it."""
        self._index.apply(Publication(self._index.position + 1, version))

    def draw(self, step: int) -> Batch:
        """Draw a batch by MOP: K recent rollouts of a prompt with probability m, else K of any age."""
        seed, position, groups = self._recipe.run.seed * 1_000_000 + step, self._index.position, []
        slots = draw_slots(self._index, self._recipe.sampling, seed)
        for slot in slots:
            rollouts = tuple(self._rollouts[rollout_id] for rollout_id in self._index.rollout_ids(slot.rows))
            prompt_id = rollouts[0].prompt_id
            groups.append(Group(prompt_id=prompt_id, source=slot.source, fallback=slot.fallback, rollouts=rollouts))
        # prompts take turns across batches, so the log says which had theirs
        self._index.apply(drawn_event(self._index, slots, str(step), PolicyVersion(0, step)))
        return Batch(batch_id=str(step), deadline_s=math.inf, seed=seed, log_position=position, groups=tuple(groups))


def main() -> None:
    """Make or load the starting model, then train."""
    parser = argparse.ArgumentParser(description="Train a small model to add, by TBA in one process.")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the starting model and of the run (default: 0)")
    args = parser.parse_args()
    recipe = load_recipe(RECIPE, sets=[f"run.seed={args.seed}"])
    torch.set_num_threads(num_threads := recipe.trainer.torch_num_threads)
    if check_model(recipe):
        print(f"making the starting model in {recipe.model.path}, once (about 20 s)", flush=True)
        make_starting_model(recipe.model.path, seed=args.seed, num_threads=num_threads)
    with tempfile.TemporaryDirectory() as scratch:
        train(recipe, num_steps=args.steps, scratch=Path(scratch))


if __name__ == "__main__":
    main()
