"""The contract of engines that can keep keys and values at an update, beside that of all (engine_contract.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from tba_searcher.engines.engine import Completion, Request
from transformers import DynamicCache

from tba.versions import START, PolicyVersion
from tba.wire import Sampling
from tests.support.engine_contract import LOGPROB_ATOL, V1, Bench, Model, finish, make_request


def case_keys_and_values_are_kept(bench: Bench) -> None:
    """Each token is drawn by the weights of its span, upon keys and values of the weights that were in use before."""
    # prompts of more than a block of vLLM, which later requests with the same prompts must not find
    prompts = np.random.default_rng(7).integers(3, 33, (3, 40)).tolist()
    prompts.append(prompts[0][:20])
    requests = [
        make_request(str(i), prompts[i % 4], Sampling(temperature=1.0), eos_ids=(), max_response_tokens=length)
        for i, length in enumerate((16, 8, 16, 13, 3, 16, 16, 16))
    ]
    second = PolicyVersion(1, 5)
    models = {START: bench.old, V1: bench.new, second: bench.old}
    engine = bench.fresh(kv_at_update="keep")
    for request in requests[:6]:
        engine.submit(request)
    done = [completion for _ in range(6) for completion in engine.step()]
    for version, late in ((V1, requests[6]), (second, requests[7])):
        model = models[version]
        engine.load_weights([model.tensors], version)
        engine.verify(bench.manifest(model, version))
        engine.verify(bench.manifest(model, version))
        if version == second:
            # its first block was begun by these same weights and ended by others: it must not be found
            (mixed,) = (completion for completion in done if completion.request_id == "3")
            tokens = [*requests[3].prompt_tokens, *mixed.response_tokens.tolist()]
            requests.append(make_request("8", tokens, Sampling(temperature=1.0), eos_ids=(), max_response_tokens=8))
            engine.submit(requests[-1])
        engine.submit(late)
        done += [completion for _ in range(7) for completion in engine.step()]
    done += finish(engine)
    assert len(done) == len(requests)
    shapes, jumps = set(), []
    for completion in done:
        request, spans = requests[int(completion.request_id)], completion.version_spans
        tokens, found = completion.response_tokens, completion.sampler_logprobs
        np.testing.assert_allclose(found, mixed_logprobs(models, request, completion), atol=LOGPROB_ATOL, rtol=0)
        shapes.add(tuple(span.version for span in spans))
        for span in spans[1:]:
            recomputed = models[span.version].trainer_logprobs(request, tokens)
            jumps.append(abs(found[span.start] - recomputed[span.start]))
    assert {(START, V1), (START, V1, second), (V1,), (V1, second), (second,)} <= shapes
    assert min(jumps) > 100 * LOGPROB_ATOL


def mixed_logprobs(models: dict[PolicyVersion, Model], request: Request, completion: Completion) -> np.ndarray:
    """Return the log-probs [R] at temperature 1, by transformers, of a response whose keys and values stayed in use."""
    ids = torch.tensor([[*request.prompt_tokens, *completion.response_tokens.tolist()]])
    num_prompt, num_done, cache, parts = len(request.prompt_tokens), 0, DynamicCache(), []
    with torch.inference_mode():
        for span in completion.version_spans:
            # the newest token has no keys and values yet: they are those of the weights that sample the next one
            end = num_prompt + span.end - 1
            model, num_tokens = models[span.version].in_transformers, span.end - span.start
            logits = model(ids[:, num_done:end], past_key_values=cache, use_cache=True).logits[0, -num_tokens:]
            targets = ids[0, end + 1 - num_tokens : end + 1, None]
            parts.append(torch.log_softmax(logits, -1).gather(1, targets)[:, 0])
            num_done = end
    return torch.cat(parts).numpy()


KEEP_CASES: dict[str, tuple[str, Callable[[Bench], None]]] = {
    "keys_and_values_are_kept[llama tied]": ("llama tied", case_keys_and_values_are_kept)
}
