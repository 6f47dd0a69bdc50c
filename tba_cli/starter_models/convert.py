"""`python -m tba_cli.starter_models.convert`: check a model folder, render chats, or make safetensors of weights.

check     load config and tokenizer; answer sizes, and lengths of texts in tokens
chat      render conversations by the tokenizer's chat template, up to the place where the model answers
convert   make safetensors of pickled weights (pytorch_model.bin, read with `weights_only`) or of a GGUF file (--gguf)

The answer is JSON on stdout; an error is one sentence on stderr, exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.model_folders import TOKENIZER_FILES, check_vocabulary, trust_hint
from tba.no_torch import hide_torch

PICKLED = "pytorch_model*.bin*"
MAX_SHOWN_UNKNOWN = 5
"""Most unknown pieces of text that the answer of `check` names."""
# `tokenizer.ggml.pre` of texts that are split as by GPT-2, and with each digit alone; transformers knows neither
AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"})
DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
OF_SHAPES = frozenset({"attention.key_length", "attention.value_length", "expert_feed_forward_length"})
"""Settings in a GGUF file that transformers does not read, and that the shapes of the tensors fix."""


def check(folder: Path, texts: list[str], *, trust: bool = False) -> dict[str, Any]:
    """Check that config and tokenizer of a model folder load, and measure texts with them.

    Args:
        texts: prompts to measure in tokens, and to search for pieces that the tokenizer does not know.
        trust: run code that comes with the model.

    Returns:
        Architecture, vocabulary size, longest sequence in tokens (or None), tokens of each text, number of texts with
        unknown pieces, the most frequent of these pieces, and whether answers end (`_endless`).
    """
    from transformers import AutoConfig, AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # transformers would invent one
        raise ConfigError(
            f"{folder}: there is no tokenizer; name a repository that has it as `tokenizer` in [[prepare]]"
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except Exception as error:  # files of a model, and code that comes with it, raise anything
        what = "config or tokenizer cannot be loaded"
        raise ConfigError(f"{folder}: {what}: {_reason(error)}{trust_hint(error)}") from None
    vocab_size = config.get_text_config().vocab_size
    check_vocabulary(tokenizer, vocab_size, where=str(folder))
    rows = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    ids = {token for row in rows for token in row}
    if texts and ids <= tokenizer.added_tokens_decoder.keys():  # what transformers makes where files are missing
        raise ConfigError(
            f"{folder}: the tokenizer knows no token of the prompts but special ones, as without {TOKENIZER_FILES[0]}; "
            "fetch the folder again, or save the tokenizer there with tokenizer.save_pretrained(...)"
        )
    if (highest := max(ids, default=0)) >= vocab_size:
        raise ConfigError(
            f"{folder}: prompts hold the token {tokenizer.convert_ids_to_tokens(highest)!r} (id {highest}), and the "
            f"model has {vocab_size} ids; correct the prompts or their chat template, or take the model's own tokenizer"
        )
    unknown: list[set[str]] = []
    # byte-level tokenizers know everything, also those that name an unknown token
    if texts and tokenizer.unk_token_id is not None and tokenizer.is_fast:
        # a text may hold the unknown token by name, as for models whose end of text it is as well
        plain = [text.replace(tokenizer.unk_token, "") for text in texts]
        coded = tokenizer(plain, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text, tokens, offsets in zip(plain, coded["input_ids"], coded["offset_mapping"], strict=True):
            places = zip(tokens, offsets, strict=True)
            unknown.append({text[a:b] for token, (a, b) in places if token == tokenizer.unk_token_id and b > a})
    pieces = Counter(piece for found in unknown for piece in sorted(found))
    return {
        "architecture": (config.architectures or ["unknown"])[0],
        "vocab_size": vocab_size,
        "max_length_tokens": getattr(config.get_text_config(), "max_position_embeddings", None),
        "text_tokens": [len(row) for row in rows],
        "num_unknown_texts": sum(map(bool, unknown)),
        "unknown": [piece for piece, _ in pieces.most_common(MAX_SHOWN_UNKNOWN)],
        "endless": _endless(folder, config, tokenizer, texts),
    }


def _endless(folder: Path, config: Any, tokenizer: Any, texts: list[str]) -> str | None:
    """Return None if answers end. Else return the text after an answer in the chat template, or "" without one."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:  # then models take the one of their config
        ends = getattr(config.get_text_config(), "eos_token_id", None)
    eos_ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    try:
        chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
        asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ANSWER")[2].lstrip()
    except Exception:  # no template, or one that wants other turns
        return None if eos_ids else ""
    opening = asked.rpartition("QUESTION")[2].split()
    if not opening or not any(opening[0] in text for text in texts):  # prompts without the template
        return None if eos_ids else ""
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
    # searchers end an answer at a token that ends a turn, and see no end in plain text
    return None if {*eos_ids, *tokenizer.added_tokens_decoder}.intersection(ids) else tokenizer.decode(ids)


def chat_texts(
    folder: Path, chats: list[Any], arguments: Mapping[str, Any], *, trust: bool = False, count: bool = False
) -> list[dict[str, Any]]:
    """Return for each conversation {"text"} (`count`: and "num_tokens"), or {"error"} if the chat template fails.

    Args:
        chats: each {"messages", "tools"}; tools may be absent.
        arguments: arguments of the chat template.
        trust: run code that comes with the model.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except Exception as error:
        raise ConfigError(f"{folder}: its tokenizer cannot be loaded: {_reason(error)}{trust_hint(error)}") from None
    template = arguments.get("chat_template", tokenizer.chat_template)
    takes = signature(tokenizer.apply_chat_template).parameters
    known = re.findall(r"\w+", template) if isinstance(template, str) else arguments
    options = {"tokenize": False, "add_generation_prompt": True}
    own = {"conversation", *options}
    unknown = [name for name in arguments if name in own or (name not in known and name not in takes)]
    if unknown:  # a template ignores what it does not know
        raise ConfigError(
            f"{folder}: its chat template takes no {unknown[0]!r}; correct or remove it in chat_template_kwargs"
        )
    # a bos in the text would be doubled where the tokenizer itself puts one before every text
    bos = tokenizer.bos_token
    has_own = bos is not None and tokenizer("1")["input_ids"][:1] == [tokenizer.bos_token_id]
    advice = "correct them, or leave them out"
    if template is None:
        advice = "give prompts as text, or a model with a chat template"
    answers = []
    for chat in chats:
        try:
            messages, tools = chat["messages"], chat.get("tools")
            text = tokenizer.apply_chat_template(
                messages, **arguments, **options, **({"tools": tools} if tools else {})
            )
            if tools and text == tokenizer.apply_chat_template(messages, **arguments, **options):
                raise ValueError("it has no place for tools")
            answers.append({"text": text.removeprefix(bos) if has_own else text})
            answers[-1] |= {"num_tokens": len(tokenizer(answers[-1]["text"])["input_ids"])} if count else {}
        except Exception as error:  # a template can raise anything
            why = f"the chat template of {folder} cannot make text of the messages: {_reason(error)}"
            answers.append({"error": f"{why}; {advice}"})
    return answers


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def convert(folder: Path) -> dict[str, Any]:
    """Write safetensors in place of pickled weights, which are deleted; return their number as `num_replaced`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    pickled = sorted(folder.glob(PICKLED))
    try:
        name = json.loads((folder / "config.json").read_bytes())["architectures"][0]
        model_class: Any = getattr(transformers, name)
        model, found = model_class.from_pretrained(
            folder, local_files_only=True, weights_only=True, output_loading_info=True
        )
        if found["missing_keys"]:  # transformers would fill them with random numbers
            raise ValueError(f"{len(found['missing_keys'])} tensors are missing, such as {min(found['missing_keys'])}")
        model.save_pretrained(folder)
    except Exception as error:  # a damaged pickle can raise anything
        raise ConfigError(f"{folder}: its weights cannot be converted: {type(error).__name__}: {error}") from None
    for path in pickled:
        path.unlink()
    return {"num_replaced": len(pickled)}


def convert_gguf(path: Path, folder: Path) -> list[str]:
    """Make a model folder in bf16 from a GGUF file; refuse what transformers would drop or make up; return warnings."""
    try:
        _write_gguf(path, folder)
    except Exception as error:  # a damaged file can raise anything
        said = str(error) if isinstance(error, ConfigError) else _reason(error)
        raise ConfigError(f"{path.name} cannot be converted: {said}") from None
    asked = chat_texts(folder, [{"messages": [{"role": "user", "content": "QUESTION"}]}], {})[0].get("text")
    if asked is None:
        return ["it has no chat template for a plain question; give prompts as text"]
    token = check(folder, [asked])["endless"]
    why = f"after an answer comes {token!r}, no end of sequence; name one in eos_token_id of generation_config.json"
    return [] if token is None else [why]


def _write_gguf(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.reader import read_gguf_metadata
    from transformers.integrations.gguf.utils import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    data, names = read_gguf_metadata(str(path))
    if data.get("split.count", 1) > 1:
        raise ConfigError(f"it is one of {data['split.count']} parts; join them first: llama-gguf-split --merge")
    if not data.get("tokenizer.ggml.tokens"):
        raise ConfigError("it has no tokenizer; take a file that has one")
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    how: dict[str, Any] = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, **options, **how, output_loading_info=True)
    model, found = loaded
    vars(model.config).pop("quantization_config", None)
    with torch.device("meta"):  # a model as if it had never been quantized, which can be saved
        plain = type(model)(model.config)
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    # transformers fills what is missing with random numbers, and compares no shapes
    wrong = [name for name, value in model.state_dict().items() if value.shape != shapes[name]]
    if wrong := [*found["missing_keys"], *wrong]:
        raise ConfigError(f"{len(wrong)} tensors are missing or have another shape, such as {min(wrong)}")
    config, architecture, dropped = model.config, data["general.architecture"], set(found["unexpected_keys"])
    if not is_gguf_arch_supported(architecture):  # the older of the two readers drops what it does not know
        known = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)())
        dropped |= {name for name in names if not known.keys() & {name, name.removesuffix(".weight")}}
        read = {*GGUF_CONFIG_MAPPING[config.model_type.removesuffix("_text")], *OF_SHAPES}
        for key in (key for key in data if key.startswith(f"{architecture}.")):
            name = key.removeprefix(f"{architecture}.")
            if name not in read and data[key] not in (0, "none", getattr(config, name.rpartition(".")[2], None)):
                dropped.add(key)
    if dropped:
        raise ConfigError(f"transformers does not read {min(dropped)}, and would compute something else")
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, **options)
    _correct_tokenizer(tokenizer, data)
    tokenizer.save_pretrained(folder)
    saved = folder / "tokenizer.json"
    document = json.loads(saved.read_bytes())
    # transformers adds the end of text of GPT-2 to every tokenizer
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < config.vocab_size]
    saved.write_text(json.dumps(document), encoding="utf-8")
    if (num := len(AutoTokenizer.from_pretrained(folder, local_files_only=True))) != config.vocab_size:
        raise ConfigError(f"its tokenizer has {num} tokens, and its model {config.vocab_size}")
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)


def _correct_tokenizer(tokenizer: Any, data: Mapping[str, Any]) -> None:
    """Make a tokenizer split text as its GGUF file says; ConfigError if that is unknown here."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

    kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre")
    is_known = pre in {*AS_GPT2, *DIGITS, *SPLITS}
    if kind != "gpt2":
        begins = "\u2581" if data.get("tokenizer.ggml.add_space_prefix", True) else "a"
        is_known = kind == "llama" and tokenizer.tokenize("a")[0].startswith(begins)
    if not is_known:
        raise ConfigError(f"how its tokenizer splits text is unknown here: tokenizer.ggml.model {kind!r}, pre {pre!r}")
    if pre in DIGITS:
        parts = [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    # as in llama.cpp: a word of the vocabulary is a token whatever the merges are, and texts begin with a bos
    is_tiktoken = SPLITS.get(pre or "") in (SPLITS["llama-bpe"], SPLITS["tekken"])
    tokenizer.backend_tokenizer.model.ignore_merges = is_tiktoken
    tokenizer.add_bos_token = data.get("tokenizer.ggml.add_bos_token", is_tiktoken or kind == "llama")


def main() -> int:
    """Run one command; return 0, or 2 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m tba_cli.starter_models.convert", description=__doc__)
    parser.add_argument("command", choices=["chat", "check", "convert"])
    parser.add_argument("folder", type=Path, help="model folder")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="what to convert instead")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="JSON list of texts, or of {messages, tools}")
    parser.add_argument("--trust", action="store_true", help="code that comes with the model may run")
    parser.add_argument("--count", action="store_true", help="with chat: count tokens too")
    parser.add_argument("--template-kwargs", type=json.loads, default={}, help="JSON, arguments of the chat template")
    args = parser.parse_args()
    if args.command != "convert" and not args.trust:  # code that comes with a model may need it
        hide_torch()
    texts = [] if args.texts is None else json.loads(args.texts.read_bytes())
    try:
        # code that comes with a model may print, and stdout is the answer
        with contextlib.redirect_stdout(sys.stderr):
            if args.command == "chat":
                answer: Any = chat_texts(args.folder, texts, args.template_kwargs, trust=args.trust, count=args.count)
            elif args.command == "check":
                answer = check(args.folder, texts, trust=args.trust)
            else:
                answer = convert(args.folder) if args.gguf is None else convert_gguf(args.gguf, args.folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
