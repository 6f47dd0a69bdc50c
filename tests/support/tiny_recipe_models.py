"""Make small random models of the families that the recipes use: policies, reward models, a victim, classifiers.

Their byte-pair tokenizers have the special tokens and templates of the real families, in Hugging Face format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.support.tiny_recipe_data import corpus, lessons

VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The special tokens of one family. The tokenizer itself puts `begin` and `end` around every text."""

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
    """Train a tokenizer on the texts of the tiny data sets.

    Args:
        max_length_tokens: longest sequence of its model.
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


MAX_LENGTH_TOKENS = 256
INITIALIZER_RANGE = 0.1
"""Five times the usual, so that scores and next tokens differ visibly between texts."""
PRETRAIN_STEPS, PRETRAIN_BATCH, PRETRAIN_LEARNING_RATE = 60, 16, 5e-3
_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": MAX_LENGTH_TOKENS,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": MAX_LENGTH_TOKENS}
_ENCODER = {**_DECODER, "num_attention_heads": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of model: its class, the family of its tokenizer, its sizes, and whether it is pretrained a little."""

    model_class: str
    family: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    is_pretrained: bool = False


KINDS = {
    "llama": Kind("LlamaForCausalLM", "llama", {**_GROUPED, "tie_word_embeddings": False}, is_pretrained=True),
    "gpt_neox": Kind("GPTNeoXForCausalLM", "gpt_neox", _DECODER, is_pretrained=True),
    "gpt2": Kind("GPT2LMHeadModel", "gpt2", _GPT2, is_pretrained=True),
    "qwen2": Kind("Qwen2ForCausalLM", "qwen2", {**_GROUPED, "tie_word_embeddings": False}, is_pretrained=True),
    "llama_chat": Kind("LlamaForCausalLM", "llama_chat", {**_GROUPED, "tie_word_embeddings": False}),
    "gpt_neox_reward": Kind("GPTNeoXForSequenceClassification", "gpt_neox", {**_DECODER, "num_labels": 1}),
    "roberta_toxicity": Kind(
        "RobertaForSequenceClassification",
        "roberta",
        {
            **_ENCODER,
            "max_position_embeddings": MAX_LENGTH_TOKENS + 2,  # RoBERTa counts positions from 2
            "type_vocab_size": 1,
            "id2label": {0: "nothate", 1: "hate"},
            "label2id": {"nothate": 0, "hate": 1},
        },
    ),
    "bert_encoder": Kind("BertModel", "bert", _ENCODER),
}


def write_model(folder: Path, kind: Kind, *, seed: int) -> None:
    """Make `folder`, and write model and tokenizer into it.

    Args:
        seed: the weights are a function of it.
    """
    transformers.utils.logging.disable_progress_bar()
    tokenizer = build_tokenizer(FAMILIES[kind.family], max_length_tokens=MAX_LENGTH_TOKENS)
    model_class: Any = getattr(transformers, kind.model_class)
    config = AutoConfig.for_model(
        model_class.config_class.model_type,
        vocab_size=len(tokenizer),
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **kind.sizes,
    )
    # the caller's random numbers must not depend on which models were made
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    if kind.is_pretrained:
        pretrain(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pretrain(model: Any, tokenizer: Any) -> None:
    """Take a few supervised steps, so that a policy writes something like an answer and ends: then rewards differ."""
    texts = lessons()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAIN_LEARNING_RATE)
    for step in range(PRETRAIN_STEPS):
        chosen = [texts[(step * PRETRAIN_BATCH + i) % len(texts)] + tokenizer.eos_token for i in range(PRETRAIN_BATCH)]
        rows = tokenizer(chosen, padding=True, padding_side="right", return_tensors="pt")
        # by length and not by pad token: that may be the end of sequence, which has to be learned
        labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
