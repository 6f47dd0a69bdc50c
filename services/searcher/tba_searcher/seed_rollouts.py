"""`python -m tba_searcher.seed_rollouts --config FILE --rows FILE`: push responses from a file to a run.

Red-teaming begins with a file of attacks (`load_buffer` of https://github.com/GFNOrg/red-teaming). Their
log-probs under the policy that wrote them are unknown. They get those of the starting model at the policy temperature
and the policy version 0-0, and only an objective that never looks at the behaviour policy takes them: anchor fixed,
reset or ema, centre theta, no importance weight (`tb`). Rows without a reward are scored like any other rollout.
Pushing a row again changes nothing: a rollout's id is a digest of prompt and response.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.api import Prompt
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import ConfigError, WaitTimeoutError
from tba.service_main import service_main
from tba.store import open_store
from tba.temporary_folders import temporary_folder
from tba.tokens import client_token
from tba.versions import START
from tba.weights import WeightVersions
from tba.wire import RefLogprob, Rollout, Sampling, VersionSpan, encode_rollout
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.generation.delivery import split_into_pushes

SEARCHER_ID, REWARD_VERSION = "seed-file", "seed-file"
CLIENT_TIMEOUT_S, CLIENT_RETRY_S = 15.0, 30.0
START_WAIT_S, POLL_S = 120.0, 1.0
CHUNK_ROWS = 64


class SeedRow(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file.

    Attributes:
        response: the text of the response.
        prompt_id: the train prompt that it answers; optional with a single train prompt.
        reward: the reward, if it is known.
    """

    response: str
    prompt_id: str | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class SeedRollout:
    """A row with its prompt and tokens; `response_tokens` int32 [R] ends with end-of-sequence."""

    row: SeedRow
    prompt: Prompt
    prompt_tokens: NDArray[np.int32]
    response_tokens: NDArray[np.int32]


def seed_buffer(recipe: Recipe, path: Path, prompts_file: Path) -> int:
    """Check every row, then push them all; return the exit code: 1 if the buffer refused some.

    Args:
        path: JSON Lines of SeedRow.
        prompts_file: JSON Lines of Prompt, the train prompts of the recipe.

    Raises:
        ConfigError: the objective needs log-probs that a file does not have, or a row is wrong; nothing is pushed then.
        ServiceError: the buffer service does not answer.
        WaitTimeoutError: version 0-0 was not published in time.
    """
    _check_objective(recipe)
    with prompts_file.open(encoding="utf-8") as lines:
        prompts = {prompt.prompt_id: prompt for prompt in map(Prompt.model_validate_json, lines)}
    versions = WeightVersions(open_store(recipe.store), recipe.run.name)
    outcomes: Counter[str] = Counter()
    client = BufferClient(
        recipe.buffer_url,
        token=client_token(recipe.auth.tokens_file, "searcher"),
        retry_s=CLIENT_RETRY_S,
        timeout_s=CLIENT_TIMEOUT_S,
        ca_file=recipe.tls.ca_file,
    )
    try:
        with temporary_folder("tba-seeding-") as folder:
            _wait_for_start(versions)
            versions.download(START, folder / "start")
            payloads = list(_payloads(recipe, folder / "start", _rows(path), path, prompts))
        # half of the limit: the rest is for what the push adds around the payloads
        limits = {"max_rollouts": recipe.searcher.push_max_rollouts, "max_bytes": recipe.buffer.max_body_bytes // 2}
        for part in split_into_pushes(payloads, **limits):
            for item in client.push(part).outcomes:
                # the same response again: in another batch its log-probs, and so its bytes, differ by rounding
                is_known = item.outcome == "refused" and (item.reason or "").startswith("conflict")
                outcomes["duplicate" if is_known else item.outcome] += 1
                if item.outcome == "refused" and not is_known:
                    print(f"refused: {item.reason}", file=sys.stderr)
    finally:
        client.close()
    print(f"{len(payloads)} rollouts: " + ", ".join(f"{num} {name}" for name, num in sorted(outcomes.items())))
    return 1 if outcomes["refused"] else 0


def _check_objective(recipe: Recipe) -> None:
    if recipe.objective.reads_sampler_logprobs:
        raise ConfigError(
            f"objective {recipe.objective.preset!r} uses the log-probs of the policy that wrote a rollout, which a "
            'file does not have; seed a run whose objective does not use them: preset = "tb"'
        )


def _wait_for_start(versions: WeightVersions) -> None:
    """Wait for version 0-0.

    Raises:
        WaitTimeoutError: the trainer has not published it.
    """
    deadline_s = time.monotonic() + START_WAIT_S
    while not versions.exists(START):
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError(
                f"wait 'starting-model': no version 0-0 in the store after {START_WAIT_S:.0f} s; is a trainer running?"
            )
        time.sleep(POLL_S)


def _rows(path: Path) -> list[SeedRow]:
    """Read all rows of a file.

    Raises:
        ConfigError: a line is wrong; it names the file and the line.
    """
    decoder = msgspec.json.Decoder(SeedRow)
    rows = []
    try:
        # bytes: only line feeds and carriage returns end a line, and not U+2028, which a text may hold
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f'{path}, line {number}: {error}; a line is {{"response": ..., "prompt_id": ..., "reward": ...}}'
                ) from None
        else:
            raise ConfigError(f"{path}, line {number} is empty; remove it")
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def _payloads(
    recipe: Recipe, folder: Path, rows: Sequence[SeedRow], path: Path, prompts: dict[str, Prompt]
) -> Iterator[bytes]:
    """Yield encoded rollouts in the order of the file."""
    from tba_searcher.engines.torch.reference_logprobs import StartingModel  # imports torch: after all cheap checks

    codec = TextCodec(folder, trust_remote_code=recipe.model.trust_remote_code)
    # all rows before the model is loaded: a wrong line is found at once, and nothing is pushed then
    seeds = [_seed(recipe, codec, row, f"{path}, line {number}", prompts) for number, row in enumerate(rows, start=1)]
    model = StartingModel(
        folder,
        temperature=recipe.model.policy_temperature,
        dtype=recipe.model.dtype,
        device=recipe.searcher.device,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    for first in range(0, len(seeds), CHUNK_ROWS):
        part = seeds[first : first + CHUNK_ROWS]
        found = model.logprobs([seed.prompt_tokens for seed in part], [seed.response_tokens for seed in part])
        for seed, logprobs in zip(part, found, strict=True):
            yield encode_rollout(_rollout(recipe, seed, logprobs, written_at_s=path.stat().st_mtime))


def _seed(recipe: Recipe, codec: TextCodec, row: SeedRow, where: str, prompts: dict[str, Prompt]) -> SeedRollout:
    """Tokenize a row, within the limits of every other rollout.

    Raises:
        ConfigError: a limit is exceeded or the prompt is unknown; it names the line.
    """
    if row.prompt_id is None and len(prompts) > 1:
        raise ConfigError(f"{where}: prompt_id is missing, and the recipe has {len(prompts)} train prompts")
    prompt_id = next(iter(prompts)) if row.prompt_id is None else row.prompt_id
    if prompt_id not in prompts:
        raise ConfigError(f"{where}: {prompt_id!r} is not a train prompt of the recipe")
    prompt = prompts[prompt_id]
    prompt_tokens, response_tokens = codec.encode_prompt(prompt.text), codec.encode_response(row.response)
    for what, num, limit in (
        ("prompt", len(prompt_tokens), recipe.searcher.max_prompt_tokens),
        ("response", len(response_tokens), recipe.searcher.response_limit(prompt.task)),
    ):
        if num > limit:
            raise ConfigError(f"{where}: its {what} has {num} tokens, and the recipe's searchers take {limit}")
    return SeedRollout(row, prompt, np.array(prompt_tokens, np.int32), np.array(response_tokens, np.int32))


def _rollout(recipe: Recipe, seed: SeedRollout, logprobs: NDArray[np.float32], *, written_at_s: float) -> Rollout:
    row = seed.row
    # without the log-probs, which differ by rounding: the same row must have the same id
    content = msgspec.msgpack.encode((recipe.run.name, seed.prompt.prompt_id, seed.response_tokens.tolist()))
    rollout_id = hashlib.sha256(content).digest()[:16]
    carries_ref = recipe.objective.reference_placement == "searcher"
    return Rollout(
        rollout_id=rollout_id,
        run=recipe.run.name,
        task=seed.prompt.task,
        prompt_id=seed.prompt.prompt_id,
        visit_id=f"seed-{rollout_id.hex()}",
        prompt_tokens=seed.prompt_tokens,
        response_tokens=seed.response_tokens,
        response_text=row.response,
        finish_reason="stop",
        # the log-probs are those of version 0-0, so that the policy age counts from there
        version_spans=(VersionSpan(version=START, start=0, end=len(seed.response_tokens)),),
        sampling=Sampling(temperature=recipe.model.policy_temperature),
        sampler_logprobs=logprobs,
        ref_logprob=RefLogprob(value=float(logprobs.sum(dtype=np.float64)), version=START) if carries_ref else None,
        reward=row.reward,
        reward_status="pending" if row.reward is None else "scored",
        reward_reason=None,
        reward_version=None if row.reward is None else REWARD_VERSION,
        searcher_id=SEARCHER_ID,
        started_at_s=written_at_s,
        finished_at_s=written_at_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Seed the buffer of one run; return the exit code of `tba.service_main.service_main`."""
    parser = argparse.ArgumentParser(prog="python -m tba_searcher.seed_rollouts", add_help=False)
    parser.add_argument("--rows", required=True, type=Path, metavar="FILE", help="JSON Lines")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="the train prompts, JSON Lines")
    # what is left are the options of every service
    args, rest = parser.parse_known_args(argv)
    return service_main("seeding", lambda recipe: seed_buffer(recipe, args.rows, args.prompts), rest)


if __name__ == "__main__":
    sys.exit(main())
