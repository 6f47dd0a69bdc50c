"""LoRA: a version as an adapter, as a delta of the merged tensors, and whole, from publication to verified tensors.

    python -m benchmarks.weights_bench.adapters [--layers 24] [--apart 1] [--json FILE]

The starting model has the shapes of Qwen2.5-0.5B (494 million parameters with 24 layers) and random weights in bfloat16
(standard deviation 0.02). Every linear layer has an adapter of rank 16, alpha 32, which torch's AdamW has moved at
`--learning-rate` by gradients of noise: 40 steps for the version that the searcher holds, `--apart` more for the new
one. The store is a real S3 server over loopback, which trainer and searcher share the machine with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.weights_bench.transfer import s3_store  # noqa: E402
from tba.store import open_store  # noqa: E402
from tba.versions import START, PolicyVersion  # noqa: E402
from tba.weights import DeltaSettings, LocalVersion, WeightVersions  # noqa: E402
from tba.weights.adapter import A_SUFFIX, B_SUFFIX, PEFT_PREFIX, AdapterFile  # noqa: E402
from tba.wire.weight_manifest import Canary, Manifest  # noqa: E402

RANK, ALPHA, NUM_STEPS = 16, 32, 40
HIDDEN, INNER, KEYS, VOCAB = 896, 4864, 128, 151_936
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
OLD, NEW = PolicyVersion(1, NUM_STEPS), PolicyVersion(1, NUM_STEPS + 1)
"""By name: NEW may be more than a step later."""
KINDS = ("full", "delta", "adapter")


def layers(num_layers: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield name and [out, in] of every linear layer."""
    for number in range(num_layers):
        yield from ((f"model.layers.{number}.{name}", shape) for name, shape in LINEAR.items())


class Files:
    """The files of the starting model, and of both versions as adapters and merged, in a folder."""

    def __init__(self, folder: Path, num_layers: int, learning_rate: float, steps_apart: int) -> None:
        self.folder = folder
        torch.manual_seed(0)
        start = {f"{name}.weight": _weight(*shape) for name, shape in layers(num_layers)}
        start["model.embed_tokens.weight"] = _weight(VOCAB, HIDDEN)
        self.num_parameters = sum(map(Tensor.numel, start.values()))
        self.start = self._write("start", start)
        adapter: dict[str, Tensor] = {}
        for name, (rows, columns) in layers(num_layers):
            adapter[f"{PEFT_PREFIX}{name}{A_SUFFIX}"] = (torch.rand(RANK, columns) * 2 - 1) / columns**0.5
            adapter[f"{PEFT_PREFIX}{name}{B_SUFFIX}"] = torch.zeros(rows, RANK)
        optimizer = torch.optim.AdamW(adapter.values(), lr=learning_rate, weight_decay=0.0)
        self.adapters, self.merged = {}, {}
        for step in range(1, NUM_STEPS + steps_apart + 1):
            for tensor in adapter.values():
                tensor.grad = torch.randn_like(tensor)
            optimizer.step()
            if step in (NUM_STEPS, NUM_STEPS + steps_apart):
                version = OLD if step == NUM_STEPS else NEW
                path = self._write(f"adapter-{step}", adapter)
                self.adapters[version] = AdapterFile(path=path, rank=RANK, alpha=ALPHA, fan_in_fan_out=False)
                self.merged[version] = self._write(f"merged-{step}", _merged(start, adapter))

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        path = self.folder / name / "model.safetensors"
        path.parent.mkdir()
        save_file(dict(tensors), path)
        return path


def _weight(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * 0.02).bfloat16()


def _merged(start: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict(start)
    for name in start:
        layer = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
        if layer + A_SUFFIX in adapter:
            product = adapter[layer + B_SUFFIX] @ adapter[layer + A_SUFFIX]
            found[name] = (start[name].float() + ALPHA / RANK * product).bfloat16()
    return found


def measure(files: Files, versions: WeightVersions, kind: str) -> dict[str, Any]:
    """Return seconds and bytes of the new version as one kind, for a searcher that holds what it needs for that."""
    config = files.folder / "config.json"
    config.write_text("{}")

    def publish(version: PolicyVersion, what: Any, base: LocalVersion | None) -> Manifest:
        return versions.publish(
            version=version,
            parent=None,
            dtype="bfloat16",
            tensors_paths=what,
            files={"config.json": config},
            canary=Canary(prompt_tokens=[1], response_tokens=[1], logprobs=[-1.0], tolerance=1.0),
            torch_version="bench",
            transformers_version="bench",
            base=base,
            deltas=DeltaSettings(min_bytes=1, max_share=1.0),
        )

    first, path = (START, files.start) if kind == "adapter" else (OLD, files.merged[OLD])
    held = LocalVersion(first, (path,), publish(first, [path], None))
    begin = time.perf_counter()
    what = files.adapters[NEW] if kind == "adapter" else [files.merged[NEW]]
    manifest = publish(NEW, what, None if kind == "full" else held)
    middle = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="searcher-", dir=files.folder) as folder:
        local = versions.download_tensors(NEW, Path(folder), held=() if kind == "full" else (held,))
    if local.route != kind:
        raise SystemExit(f"the searcher took the route {local.route} for {kind}")
    end = time.perf_counter()
    return {
        "publish_s": middle - begin,
        "download_s": end - middle,
        "ready_s": end - begin,
        "bytes": sum(each.size_bytes for each in manifest.changes) or manifest.full_bytes,
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[1e-5, 1e-4])
    parser.add_argument("--apart", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    heads = ("learning rate", "kind", "MB", "times smaller", "publish s", "download s", "until ready s")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for rate in args.learning_rate:
        with s3_store() as section, tempfile.TemporaryDirectory(prefix="tba-bench-") as name:
            files = Files(Path(name), args.layers, rate, args.apart)
            for kind in KINDS:
                versions = WeightVersions(open_store(section), kind)
                row = found[f"{rate:g} {kind}"] = measure(files, versions, kind)
                smaller = 2 * files.num_parameters / row["bytes"]
                cells = [f"{rate:g}", kind, f"{row['bytes'] / 1e6:,.1f}", f"{smaller:.1f}"]
                cells += [f"{row[key]:.1f}" for key in ("publish_s", "download_s", "ready_s")]
                print(f"| {' | '.join(cells)} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
