"""`tba env try`: play one episode in a terminal with the runner, and show its tokens by segment."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tba.api import Lease, Prompt
from tba.config import Recipe
from tba.environments import EpisodeError
from tba.service_main import service_main
from tba.versions import START
from tba_searcher.engines.engine import make_completion
from tba_searcher.engines.factory import build_engine
from tba_searcher.engines.tokenizer import TextCodec, load_tokenizer
from tba_searcher.episodes.conversation import PlayedEpisode
from tba_searcher.episodes.runner import EpisodeRunner
from tba_searcher.generation.visits import Visit, WorkQueue
from tba_searcher.waits import WaitRegistry


async def play(recipe: Recipe, prompt: Prompt, *, by: str) -> None:
    """Play an episode by `hand` or by the `model`, and print it; raise EpisodeError if the input ends before."""
    folder, trust = Path(recipe.model.path), recipe.model.trust_remote_code
    codec, tokenizer = TextCodec(folder, trust_remote_code=trust), load_tokenizer(folder, trust_remote_code=trust)
    engine = build_engine(recipe, folder, START, None, seed=recipe.run.seed) if by == "model" else None
    runner = EpisodeRunner(recipe, codec=codec, counts=Counter(), waits=WaitRegistry())
    queue = WorkQueue(recipe.searcher, run_seed=recipe.run.seed, eos_ids=codec.eos_ids, episodes=runner)
    how = {"num_rollouts": 1, "temperature": recipe.model.policy_temperature, "expires_in_s": 0.0}
    lease = Lease(lease_id="try", kind="train", visit_id="try", prompt=prompt, **how)
    queue.add(Visit(lease=lease, prompt_tokens=(), pinned=None))
    played, seen = list[PlayedEpisode](), list[int]()
    runner.on_played, runner.max_attempts = lambda _, episode: played.append(episode), 1
    try:
        await runner.start()
        while not played:
            for request in queue.take_requests(1, pinned=None):
                tokens = list(request.prompt_tokens)
                num_seen = len(seen) if tokens[: len(seen)] == seen else 0
                print(tokenizer.decode(tokens[num_seen:]), end="", flush=True)
                if engine is not None:
                    engine.submit(request)
                    while not (completions := engine.step()):
                        pass
                    print(*codec.decode_responses(completions))
                elif line := sys.stdin.readline():
                    most = request.max_response_tokens
                    ids = [*tokenizer(line.rstrip("\n"), add_special_tokens=False).input_ids, tokenizer.eos_token_id]
                    end, ids = "stop" if len(ids) <= most else "length", ids[:most]
                    reply, none, marks = np.array(ids, np.int32), np.zeros(len(ids), np.float32), [(START, 0)]
                    completions = [make_completion(request, reply, none, end, marks=marks, started_at_s=time.time())]
                else:
                    raise EpisodeError("the input ended before the episode; reply until it ends")
                seen = tokens + completions[0].response_tokens.tolist()
                queue.add_completion(completions[0])
            await asyncio.sleep(0.01)
    finally:
        await runner.close()
    episode, failure = played[0].episode, played[0].failure
    scores = f", and scores of reward.tasks.{prompt.task}, unknown here" * (prompt.task in recipe.reward.tasks)
    print(f"\nstop condition: {episode.stop_condition}{', truncated' * episode.is_truncated}; failure: {failure}")
    print(f"reward: {episode.paid} (turns: {', '.join(map(str, episode.turn_rewards))}){scores}")
    trained = "trained" if failure is None and (scores or episode.paid is not None) else "unknown"
    for sequence in played[0].sequences:
        tokens = sequence.tokens.tolist()
        for each in sequence.segments:
            text, tokens = tokenizer.decode(tokens[: each.num_tokens]), tokens[each.num_tokens :]
            print(f"{each.role:9} {each.origin:11} {('-', trained)[each.is_trained]:7} {each.num_tokens:5}  {text!r}")


if __name__ == "__main__":
    asked, by = Prompt.model_validate_json(sys.argv[1]), sys.argv[2]
    sys.exit(service_main("env try", lambda recipe: asyncio.run(play(recipe, asked, by=by)), sys.argv[3:]))
