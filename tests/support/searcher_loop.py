"""A searcher's loop in this process: real buffer, reward service over HTTP, and an engine class that a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba_searcher.engines.engine import EngineSettings
from tba_searcher.engines.tokenizer import TextCodec
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_searcher.episodes.runner import EpisodeRunner
from tba_searcher.generation.delivery import Delivery
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.version_pulls import WeightLoader
from tba_searcher.generation.visits import WorkQueue
from tba_searcher.loop import SearcherLoop
from tba_searcher.waits import WaitRegistry

from tba.api import LineageReply, Prompt
from tba.clients import BufferClient, RewardClient
from tba.store import FileStore, ObjectStore
from tba.versions import START
from tba.weights import WeightVersions
from tests.support.buffer import make_prompts, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.reward_server import RewardServer
from tests.support.searcher_world import publish_version

SEARCHER = {"num_slots": 4, "max_prompt_tokens": 24, "max_response_tokens": 12, "drain_s": 30.0}


@dataclass
class LoopWorld:
    """The loop, and everything around it."""

    served: BufferThread
    client: BufferClient
    """A client for the test; the loop has others."""
    lineage: LineageReply
    engine: EmbeddedEngine
    status: SearcherStatus
    loop: SearcherLoop
    stop: asyncio.Event


def start_loop_world(
    folder: Path,
    serve_buffer: ServeBuffer,
    reward: RewardServer,
    model: Path,
    /,
    *,
    engine_class: Callable[..., EmbeddedEngine] = EmbeddedEngine,
    num_train: int = 8,
    prompts: list[Prompt] | None = None,
    dtype: str = "float32",
    store: ObjectStore | None = None,
    start_store: ObjectStore | None = None,
    **sections: Any,
) -> LoopWorld:
    """Publish and announce version 0-0, upload prompts, and build the loop; the caller runs `loop.run()`.

    Args:
        store: the store that the loop pulls from; None: the folder `store` in `folder`.
        start_store: the store that version 0-0 is published to and pulled from; None: `store`.
    """
    searcher = {**SEARCHER, **sections.pop("searcher", {})}
    served = serve_buffer(searcher=searcher, **sections)
    recipe, client = served.recipe, served.client()
    store = store or FileStore(folder / "store")
    starts = WeightVersions(start_store or store, recipe.run.name)
    publish_version(starts, model, START, dtype=dtype)
    client.upload_prompts(make_prompts(num_train, 4) if prompts is None else prompts)
    lineage = start_lineage(client)
    current, engine_folder = WeightLoader(starts, folder / "pulled").download_model(START)
    engine = engine_class(
        engine_folder,
        START,
        EngineSettings(
            num_slots=recipe.searcher.num_slots,
            max_prompt_tokens=recipe.searcher.max_prompt_tokens,
            max_response_tokens=recipe.searcher.max_response_tokens,
            seed=1,
            dtype=dtype,
        ),
    )
    status, stop = SearcherStatus(searcher_id="s", run=recipe.run.name, waits=WaitRegistry()), asyncio.Event()
    codec = TextCodec(engine_folder)
    episodes = None
    if recipe.environments:
        episodes = EpisodeRunner(recipe, codec=codec, counts=status.counts, waits=status.waits)
    delivery = Delivery(
        recipe,
        buffer=served.client(),
        reward=RewardClient(reward.url, retry_s=0, timeout_s=60),
        codec=codec,
        embedder=None,
        reference=None,
        status=status,
    )
    loop = SearcherLoop(
        recipe,
        engine=engine,
        current=current,
        loader=WeightLoader(WeightVersions(store, recipe.run.name), folder / "pulled", counts=status.counts),
        codec=codec,
        queue=WorkQueue(recipe.searcher, run_seed=0, eos_ids=codec.eos_ids, episodes=episodes),
        buffer=served.client(),
        heartbeats=served.client(),
        delivery=delivery,
        status=status,
        stop=stop,
    )
    return LoopWorld(served, client, lineage, engine, status, loop, stop)
