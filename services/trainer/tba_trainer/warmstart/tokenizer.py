"""The character-level tokenizer of the quickstart's model, in Hugging Face format."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789+="


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; pad, bos, eos and unk are four different tokens (ids 0 to 3)."""
    vocabulary = {token: index for index, token in enumerate((PAD, BOS, EOS, UNK, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, model_max_length=64
    )
