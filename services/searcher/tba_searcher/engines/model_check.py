"""`python -m tba_searcher.engines.model_check --config FILE`: check whether tba can use the starting model.

A small model is loaded, and the embedded engine decodes a few tokens with it if the recipe names that engine. For a
larger model only its files are read. The answer is JSON on stdout; an error is one sentence on stderr, exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, TbaError
from tba.model_folders import check_vocabulary
from tba.versions import START
from tba_searcher.engines.engine import EngineSettings
from tba_searcher.engines.tokenizer import load_tokenizer
from tba_searcher.engines.torch.model import load_model

MAX_COST = 2**40
"""A model is loaded if (bytes of its weights) x (most tokens of a sequence) is at most this."""


def check(recipe: Recipe) -> dict[str, Any]:
    """Check the config, the tokenizer and the output head in the files; then load a model that is small.

    Returns:
        `architecture`, and `is_decoded`: whether the embedded engine has decoded with the model.
    """
    from transformers import AutoConfig

    from tba_searcher.engines.torch.engine import EmbeddedEngine
    from tba_searcher.engines.torch.exactness import attention_windows, check_positions

    folder, searcher, trust = Path(recipe.model.path), recipe.searcher, recipe.model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model folder {folder} holds no usable config.json: {error}") from None
    text_config, max_len = config.get_text_config(), searcher.max_prompt_tokens + searcher.max_response_tokens
    architecture = (config.architectures or ["model"])[0]
    check_positions(text_config, max_len)
    check_vocabulary(load_tokenizer(folder, trust_remote_code=trust), text_config.vocab_size, where=str(folder))
    if searcher.engine == "embedded":
        attention_windows(text_config, max_len)
    # embedding and output head have one row for each token
    num_vocabulary_tensors = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 (no mapping)
        num_vocabulary_tensors += sum(len(shape) == 2 and shape[0] == text_config.vocab_size for shape in shapes)
    if text_config.tie_word_embeddings is False and num_vocabulary_tensors < 2:
        raise ConfigError(
            f"model folder {folder} lacks weights of a {architecture}: lm_head.weight, or another output head with a "
            "row for each token; take the whole model"
        )
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    settings = EngineSettings(
        num_slots=2,
        seed=0,
        trust_remote_code=trust,
        max_prompt_tokens=searcher.max_prompt_tokens,
        max_response_tokens=searcher.max_response_tokens,
    )
    is_embedded, is_small = searcher.engine == "embedded", size_bytes * max_len <= MAX_COST
    if is_embedded and is_small:
        EmbeddedEngine(folder, START, settings)
    elif is_small:
        load_model(folder, dtype="float32", device="cpu", trust_remote_code=trust)
    return {"architecture": architecture, "is_decoded": is_embedded and is_small}


def main(argv: list[str] | None = None) -> int:
    """Check the recipe's starting model, print the answer, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tba_searcher.engines.model_check", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        # code that comes with a model may print, and stdout is the answer
        with contextlib.redirect_stdout(sys.stderr):
            answer = check(load_recipe(args.config, environ={}))
    except TbaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
