"""Small byte-pair tokenizers with the special tokens and templates of the real families, in Hugging Face format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tba_trainer.tiny.rows import corpus

VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The special tokens of one family. `begin` and `end` are put around every text by the tokenizer itself."""

    specials: tuple[str, ...]
    eos: str
    pad: str
    begin: str | None = None
    end: str | None = None
    chat_template: str | None = None


FAMILIES = {
    "llama": Family(specials=("<unk>", "<s>", "</s>"), eos="</s>", pad="</s>", begin="<s>"),
    "llama_chat": Family(
        specials=("<s>", "</s>", "<|user|>", "<|assistant|>", "<|eot|>"),
        eos="<|eot|>",
        pad="</s>",
        chat_template="<s>" + CHAT_TEMPLATE,
    ),
    "gpt_neox": Family(specials=("<|endoftext|>", "<|padding|>"), eos="<|endoftext|>", pad="<|padding|>"),
    "gpt2": Family(specials=("<|endoftext|>",), eos="<|endoftext|>", pad="<|endoftext|>"),
    "qwen2": Family(specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), eos="<|endoftext|>", pad="<|endoftext|>"),
    "roberta": Family(specials=("<s>", "<pad>", "</s>", "<unk>"), eos="</s>", pad="<pad>", begin="<s>", end="</s>"),
    "bert": Family(specials=("[PAD]", "[UNK]", "[CLS]", "[SEP]"), eos="[SEP]", pad="[PAD]", begin="[CLS]", end="[SEP]"),
}


def build_tokenizer(family: Family, *, max_length_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer that was trained on the tiny data sets' texts.

    Args:
        max_length_tokens: longest sequence of the model that it belongs to.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(family.specials), initial_alphabet=[], show_progress=False
    )
    core.train_from_iterator(corpus(), trainer)
    around = [(token, core.token_to_id(token)) for token in (family.begin, family.end) if token is not None]
    if around:
        text = " ".join(part for part in (family.begin, "$A", family.end) if part)
        pair = " ".join(part for part in (family.begin, "$A", family.end, family.begin, "$B", family.end) if part)
        core.post_processor = processors.TemplateProcessing(single=text, pair=pair, special_tokens=around)
    names: dict[str, Any] = {"eos_token": family.eos, "pad_token": family.pad}
    if family.begin is not None:
        names["bos_token"] = family.begin
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=max_length_tokens,
        clean_up_tokenization_spaces=False,
        **names,
    )
    tokenizer.chat_template = family.chat_template
    return tokenizer
