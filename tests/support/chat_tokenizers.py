"""A small byte-level tokenizer with the special tokens of ChatML, and chat templates that treat earlier turns apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CORPUS = (
    "system\nYou are a helpful assistant.\n",
    "user\nWhat is 1 + 2? Then? Is it so?\n",
    'assistant\nYes. So it is. {"name": "add", "arguments": {"a": 1}}\n\n',
)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Every message in the same way, whatever follows."""
TOOLS_LAST = (
    "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}" + PLAIN.partition("%}")[2]
)
"""The tools stand before the last message."""
WITHOUT_ENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""No special token ends a turn."""


def thinking_template(header: str = "Tools:", footer: str = "") -> str:
    """Return a template as of models that think: earlier reasoning is dropped, tools stand in the system message.

    Args:
        header, footer: text around the tools.
    """
    # text in expressions alone: transformers drops a newline after a tag
    return (
        "{% if tools %}{{ '<|im_start|>system\n' }}"
        "{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
        + header
        + "{% for tool in "
        "tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}" + footer + "{{ '<|im_end|>\n' }}"
        "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
        "{% endif %}{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}"
        "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
        "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% if loop.index0 > ns.last %}{{ m.content }}"
        "{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
        """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
        "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
        "{% elif m.role == 'tool' %}"
        "{{ '<|im_start|>user' if loop.previtem is not defined or loop.previtem.role != 'tool' }}"
        "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{{ '<|im_end|>\n' if loop.nextitem is not defined or loop.nextitem.role != 'tool' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}{% endif %}"
    )


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_CORPUS, trainer)
    raw.add_tokens([*MARKS])
    return raw.to_str()


def make_chat_tokenizer(template: str = PLAIN, *, eos: str = "<|im_end|>") -> Any:
    """Return the tokenizer with this chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer.from_str(_trained())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=eos, pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def make_talking_model(folder: Path, *, end_logit: float = 5.0, hidden_size: int = 64, num_layers: int = 2) -> Path:
    """Write a random model whose replies end after a few tokens; returns the folder.

    Args:
        end_logit: about what the logit of the end of a reply is above those of other tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_chat_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **sizes, **heads, **ends)
    )
    with torch.no_grad():
        # the first of the hidden numbers is nearly the same at every place, so its weight is a bias of the logits
        model.model.embed_tokens.weight[:, 0] = 1.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        head[tokenizer.eos_token_id, 0] = end_logit / hidden_size**0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
