"""Between text and tokens: one rule for prompts, one for responses.

Prompt: exactly what the tokenizer of the policy version makes of `prompt.text`, i.e. special tokens only where the
tokenizer's own template adds them (Llama's leading BOS, for example), no chat template.
Response: all sampled tokens except the final end of sequence, decoded on their own, without cleaning up spaces. Other
special tokens stay in the text: a reward must see them, or a policy learns to hide them in right answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba_searcher.engines.base import Completion


class TextCodec:
    """Tokenizes prompts and decodes responses with the tokenizer in a model folder.

    Raises:
        ConfigError: no usable tokenizer, or one whose template ends every prompt with end-of-sequence.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model folder {folder} holds no usable tokenizer: {error}") from None
        eos = self._tokenizer.eos_token_id
        self.eos_ids: tuple[int, ...] = () if eos is None else (int(eos),)
        probe, bare = self._tokenizer("1"), self._tokenizer("1", add_special_tokens=False)
        if self.eos_ids and probe["input_ids"][-1:] == [eos] and bare["input_ids"][-1:] != [eos]:
            raise ConfigError(
                "the tokenizer ends every prompt with end-of-sequence; "
                "set add_eos_token to false in tokenizer_config.json"
            )

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return tuple(self._tokenizer(text, verbose=False)["input_ids"])

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """The text of each response."""
        ids = [c.response_tokens[: -1 if c.finish_reason == "stop" else None].tolist() for c in completions]
        return self._tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
