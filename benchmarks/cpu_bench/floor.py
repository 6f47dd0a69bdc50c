"""What the model alone costs: bare loops that make the same tokens and train on the same number of rollouts.

Nothing is stored, sent, checked or reported. One thread, one process, the starting model of the recipe.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from tba.config import Recipe
from tba_cli.generators.addition import generate


class Floor:
    """The bare loops with the model, prompts and sizes of a recipe of the addition task.

    Args:
        model_folder: the starting model.
    """

    def __init__(self, recipe: Recipe, model_folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_folder)
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        ids = self._model.generation_config.eos_token_id
        self._eos_ids = torch.tensor([ids] if isinstance(ids, int) else ids)
        self._max_response_tokens = recipe.searcher.max_response_tokens
        self._group_size = recipe.sampling.group_size
        prompts = [tokenizer.encode(prompt.text) for prompt in generate(512, 1, 0) if prompt.split == "train"]
        # two-digit sums all have one length, so that no loop pads a prompt
        self._prompts = torch.tensor([each for each in prompts if len(each) == len(prompts[0])])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-9)  # all of its work, no change

    def generation_s(self, num_rollouts: int, rounds: int) -> float:
        """Return CPU seconds per rollout, `num_rollouts` at a time: median over the rounds."""
        return _median_s(lambda: self._generate(num_rollouts), rounds) / num_rollouts

    def step_s(self, num_rollouts: int, rounds: int) -> float:
        """Return CPU seconds of forward, backward, clip and AdamW on one batch: median over the rounds."""
        tokens, is_response = self._generate(num_rollouts)
        return _median_s(lambda: self._step(tokens, is_response), rounds)

    @torch.inference_mode()
    def _generate(self, num_rollouts: int) -> tuple[Tensor, Tensor]:
        """Sample responses; return all tokens [N, P + R] and whether each is of a response, up to end of sequence."""
        prompts = self._prompts[: num_rollouts // self._group_size].repeat_interleave(self._group_size, dim=0)
        tokens, cache, new = [prompts], DynamicCache(config=self._model.config), prompts
        alive = torch.ones(len(prompts), dtype=torch.bool)
        shown = [torch.zeros_like(prompts, dtype=torch.bool)]
        for _ in range(self._max_response_tokens):
            logits = self._model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            new = torch.multinomial(torch.softmax(logits, dim=-1), 1)
            tokens.append(new)
            shown.append(alive[:, None].clone())
            alive &= ~torch.isin(new[:, 0], self._eos_ids)
            if not alive.any():
                break
        return torch.cat(tokens, dim=1), torch.cat(shown, dim=1)

    def _step(self, tokens: Tensor, is_response: Tensor) -> None:
        tokens, is_response = tokens.clone(), is_response.clone()  # no inference tensors in autograd
        logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:, None])[:, :, 0]
        loss = -(logprobs * is_response[:, 1:]).sum() / is_response.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _median_s(work: Callable[[], object], rounds: int) -> float:
    work()  # to warm up
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)
