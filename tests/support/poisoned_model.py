"""A reward model that some texts break: it hangs, forks and hangs, dies, runs out of memory, gives no number.

It is the tiny GPT-NeoX with code of its own in its folder (`trust_remote_code`), so that the poison acts where the
bugs of real models do.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_reward_models import save_reward_model

CODE = """
import os, signal, time
from transformers import GPTNeoXConfig, GPTNeoXForSequenceClassification


class PoisonedConfig(GPTNeoXConfig):
    pass


class Poisoned(GPTNeoXForSequenceClassification):
    config_class = PoisonedConfig

    def forward(self, input_ids, **others):
        texts = ["".join(map(chr, row)) for row in input_ids.tolist()]
        def rows(letter):
            return [chr(LETTERS[letter]) * 3 in text for text in texts]
        def found(letter):
            return any(rows(letter))
        if found("H"):
            if os.fork() == 0:
                time.sleep(600)
            time.sleep(600)
        if found("D"):
            if os.fork() == 0:  # out of the process group, with its pipes
                os.setsid()
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSEGV)
        if found("M"):
            raise MemoryError("no memory for this")
        output = super().forward(input_ids, **others)
        output.logits[rows("N")] = float("nan")
        return output
"""
HANG, DIE, MEMORY, NAN = "HHH", "DDD", "MMM", "NNN"


def save_poisoned_model(folder: Path) -> Path:
    """The model; three letters in a row are its poison."""
    save_reward_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    letters = {letter: tokenizer["model"]["vocab"][letter] for letter in "HDMN"}
    (folder / "poisoned.py").write_text(f"LETTERS = {letters}\n{CODE}")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "poisoned.PoisonedConfig",
        "AutoModelForSequenceClassification": "poisoned.Poisoned",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
