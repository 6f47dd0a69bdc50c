"""A stand-in for an SGLang server: its routes, JSON and rules as in SGLang 0.5.23, on a model of transformers. SGLang
itself, several GB, passes the same tests (tools/check_sglang.py).

The rules are SGLang's own, not those of the engine: a sampled token's log-prob is measured before top-k and top-p,
which are taken together; `ignore_eos` ignores stop tokens too; stop strings are looked for in the last tokens alone,
whatever `min_new_tokens` says; an abort is for every id that begins with its own; an update waits
for the requests under way.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

CONTEXT_TOKENS = 16384
"""A response as long as this is never complete before a test cuts it short."""
MASK_MAX_TOKENS = 4096
Answer = tuple[int, Any]
"""Status and document."""


class BadBodyError(Exception):
    """Answered with 400."""


@dataclass
class Running:
    """A request."""

    rid: str
    params: dict[str, Any]
    prompt: list[int]
    cache: Any = field(default_factory=DynamicCache)
    """Keys and values; weights change only while no request is under way."""
    is_aborted: threading.Event = field(default_factory=threading.Event)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    mask_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[Any]] = field(default_factory=list)
    finish: dict[str, Any] | None = None


class SglangStandIn:
    """Serves a model folder on loopback."""

    def __init__(self, folder: Path, *, token: str | None = None, returns_original_logprob: bool = False) -> None:
        self.token = token
        self.returns_original_logprob = returns_original_logprob
        """SGLANG_RETURN_ORIGINAL_LOGPROB."""
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "max_req_input_len": CONTEXT_TOKENS - 6,
            "dp_size": 1,
            "tokenizer_worker_num": 1,
            "speculative_algorithm": None,
            "disaggregation_mode": "null",
            "hicache_storage_backend": None,
            "enable_deterministic_inference": True,
            "sampling_mask_max_tokens": MASK_MAX_TOKENS,
        }
        """What `/server_info` says, as far as the engine reads it."""
        self.weight_version = "default"
        self.num_generated = 0
        self.change: Callable[[str, dict[str, Any], Answer], Answer] = lambda path, body, answer: answer
        """Gets path, body and answer, and returns the answer that is given."""
        self.bodies: list[dict[str, Any]] = []
        """Of `/generate`."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._forward = threading.Lock()
        self._state = threading.Condition()
        self._running: dict[str, Running] = {}
        self._is_updating = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_of": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        """Return the answer to a request."""
        return self.change(path, body, self._answer(path, body))

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        found: Any = {
            "/v1/models": {"data": [{"id": "m", "owned_by": "sglang", "max_model_len": CONTEXT_TOKENS}]},
            "/model_info": {"weight_version": self.weight_version},
            "/server_info": self.info,
        }.get(path)
        try:
            match path:
                case "/generate":
                    self.bodies.append(body)
                    found = self.generate(body)
                case "/abort_request":
                    self.abort(body["rid"], everything=body.get("abort_all", False))
                    found = {}
                case "/update_weight_version":
                    self.weight_version = body["new_version"]
                    found = {"success": True, "new_version": self.weight_version}
                case "/update_weights_from_disk":
                    return self.update(body)
        except BadBodyError as error:
            return 400, {"error": {"message": str(error)}}
        return (404, {"detail": "Not Found"}) if found is None else (200, found)

    def abort(self, rid: str, *, everything: bool) -> None:
        """`/abort_request`: unknown ids are ignored."""
        with self._state:
            for name, request in self._running.items():
                if everything or (rid in self._running and name.startswith(rid)):
                    request.is_aborted.set()

    def update(self, body: dict[str, Any]) -> Answer:
        """`/update_weights_from_disk`."""
        with self._state:
            if body.get("abort_all_requests"):
                self.abort("", everything=True)
            self._is_updating = True  # newer requests wait
            self._state.wait_for(lambda: not self._running)
            try:
                tensors: dict[str, Tensor] = {}
                for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                    tensors |= load_file(file)
                if not tensors:
                    message = f"Failed to update weights: Cannot find any model weights with `{body['model_path']}`."
                    return 400, {"success": False, "message": message, "num_paused_requests": 0}
                with torch.no_grad():
                    for name, parameter in self._model.named_parameters():
                        parameter.copy_(tensors[name])
                self.weight_version = body.get("weight_version", self.weight_version)
            finally:
                self._is_updating = False
                self._state.notify_all()
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> Any:
        """`/generate`."""
        params = body["sampling_params"]
        request = Running(body.get("rid") or f"own-{id(body)}", params, body["input_ids"])
        if len(request.prompt) > self.info["max_req_input_len"]:
            raise BadBodyError(f"The input ({len(request.prompt)} tokens) is longer than the model's context length.")
        is_mask = bool(body.get("return_sampling_mask"))
        if is_mask and not 1 <= params["top_k"] <= MASK_MAX_TOKENS:
            raise BadBodyError("return_sampling_mask requires top_k=1 for greedy sampling or a finite top_k")
        with self._state:
            self._state.wait_for(lambda: not self._is_updating)
            self._running[request.rid] = request
        try:
            logits = self._logits(request)
            rows = self._input_logprobs(request, logits, body.get("logprob_start_len", -1))
            while request.finish is None:
                self._decode(request, logits[-1].clone(), is_mask=is_mask, num_top=body.get("top_logprobs_num", 0))
                if request.finish is None:
                    logits = self._logits(request)
            version = self.weight_version
        finally:
            with self._state:
                del self._running[request.rid]
                self._state.notify_all()
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "weight_version": version,
            "input_token_logprobs": rows,
            "output_token_logprobs": request.logprobs,
        }
        if body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = request.top_logprobs
        if is_mask:
            meta["output_token_sampling_mask"] = request.masks
            meta["output_token_sampling_logprobs"] = request.mask_logprobs
        return {"text": self._tokenizer.decode(request.tokens), "output_ids": request.tokens, "meta_info": meta}

    def _logits(self, request: Running) -> Tensor:
        """Return the logits [T, V] after each token that is not yet in the cache."""
        new = [*request.prompt, *request.tokens][request.cache.get_seq_length() :]
        with self._forward, torch.no_grad():
            return self._model(torch.tensor([new]), past_key_values=request.cache).logits[0]

    def _input_logprobs(self, request: Running, logits: Tensor, start: int) -> list[list[Any]]:
        if start < 0:
            return []
        logprobs = logits.log_softmax(-1)
        before = [None, *(float(logprobs[n, token]) for n, token in enumerate(request.prompt[1:]))]
        return [[one, token, None] for one, token in zip(before, request.prompt, strict=True)][start:]

    def _decode(self, request: Running, logits: Tensor, *, is_mask: bool, num_top: int) -> None:
        """Add a token, and see whether it is the last one."""
        if request.is_aborted.is_set():
            request.finish = {"type": "abort", "message": "Aborted by AbortReq.", "status_code": None}
            return
        params, place = request.params, len(request.tokens)
        if place < params.get("min_new_tokens", 0):
            logits[[*params["stop_token_ids"], self._tokenizer.eos_token_id]] = -torch.inf
        is_greedy = params["temperature"] == 0 or params["top_k"] == 1
        tempered = logits if is_greedy else logits / params["temperature"]
        logprobs = tempered.log_softmax(-1)
        weights = logprobs.exp()
        if is_greedy:
            weights = torch.zeros_like(weights).index_fill_(0, weights.argmax(), 1.0)
        ordered, ids = weights.sort(descending=True, stable=True)
        keeps = ordered.cumsum(-1) - ordered <= params["top_p"]
        keeps &= torch.arange(len(ids)) < (params["top_k"] if params["top_k"] > 0 else len(ids))
        ordered = ordered * keeps
        generator = torch.Generator()
        if params.get("sampling_seed") is None:
            generator.seed()
        else:
            generator.manual_seed(hash((params["sampling_seed"], len(request.prompt) + place)))
        token = int(ids[torch.multinomial(ordered, 1, generator=generator)])
        shown = logits.log_softmax(-1) if self.returns_original_logprob else logprobs
        request.tokens.append(token)
        request.logprobs.append([float(shown[token]), token, None])
        values, ranks = shown.topk(num_top)
        request.top_logprobs.append([[float(v), int(r), None] for v, r in zip(values, ranks, strict=True)])
        if is_mask:
            request.masks.append(ids[ordered > 0].tolist())
            request.mask_logprobs.append(float((weights[token] / ordered.sum()).log()))
        with self._state:
            self.num_generated += 1
        request.finish = self._finish(request)

    def _finish(self, request: Running) -> dict[str, Any] | None:
        params, token = request.params, request.tokens[-1]
        if len(request.tokens) >= params["max_new_tokens"]:
            return {"type": "length", "length": params["max_new_tokens"]}
        ends = {*params.get("stop_token_ids", ()), self._tokenizer.eos_token_id}
        if not params.get("ignore_eos") and token in ends:
            return {"type": "stop", "matched": token}
        for stop in params.get("stop", ()):
            tail = request.tokens[-len(self._tokenizer(stop)["input_ids"]) - 1 :]
            if stop in self._tokenizer.decode(tail):
                return {"type": "stop", "matched": stop}
        return None


@contextmanager
def sglang_stand_in(folder: Path, **options: Any) -> Iterator[SglangStandIn]:
    """Serve a model folder within the block."""
    server = SglangStandIn(folder, **options)
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    server_of: SglangStandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        server = self.server_of
        status, document = 401, {"error": "Unauthorized"}
        if server.token is None or self.headers.get("authorization") == f"Bearer {server.token}":
            status, document = server.answer(self.path, body)
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        with suppress(ConnectionError):  # the client has given up
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
