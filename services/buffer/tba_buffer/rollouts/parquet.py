"""GET /v1/rollouts.parquet: all rollouts that match, as a stream of Parquet.

    groups of rollouts from Redis (queries.py)  ->  columns (arrow)  ->  one row group  ->  its bytes, sent at once

So an export needs the memory of one row group, however many rollouts there are. The metadata at the end of the file
says how many are missing because they were evicted before they were read (EVICTED_KEY). pyarrow is the extra `parquet`
of the service, and the first export imports it.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from tba.api import EVICTED_KEY, RolloutInfo
from tba.concurrency import in_thread
from tba.errors import BusyError, NotInstalledError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Rollout
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.rollouts.queries import RolloutReader
from tba_buffer.rollouts.selection import RolloutFilter

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_ROLLOUTS = 1000
MAX_EXPORTS = 4
"""Most exports at once: each holds a row group in memory, and decodes in a thread."""
BUSY_RETRY_S = 5.0
READ_S = 60.0
"""A client that reads nothing for this long is disconnected, since it holds one of MAX_EXPORTS and a row group."""
CHUNK_BYTES = 1 << 18
"""Most bytes handed to a connection at once; they stay in memory until the client reads them."""
log = get_logger("exports")


class ExportRequest(RolloutFilter):
    """The query of GET /v1/rollouts.parquet."""

    tokens: bool = True
    """Whether the file has columns of tokens and log-probs."""


class RolloutExports:
    """Writes stored rollouts as Parquet.

    Args:
        reader: reads the stored rollouts.
        catalog: gives the data of prompts.
    """

    def __init__(self, reader: RolloutReader, catalog: Catalog) -> None:
        self._reader = reader
        self._catalog = catalog
        self._num_running = 0

    async def parquet(self, wanted: ExportRequest) -> AsyncGenerator[bytes, None]:
        """Return an iterator over the bytes of a Parquet file. Rollouts evicted meanwhile are left out, and counted.

        Raises:
            BadRequestError, NotFoundError: as in `RolloutReader.page`.
            BusyError: MAX_EXPORTS exports run already.
            NotInstalledError: there is no pyarrow.
            UnavailableError: Redis did not answer; the iterator may raise it too.
        """
        evicted: list[int] = []
        try:
            await in_thread(lambda: import_module("pyarrow.parquet"))  # a second or so with the first export
        except ImportError:
            raise NotInstalledError(
                "an export to Parquet needs pyarrow, which this buffer service does not have; install its extra "
                "`parquet`, or read GET /v1/rollouts page by page"
            ) from None
        groups = await self._reader.groups(wanted, GROUP_ROLLOUTS, on_evicted=evicted.append)
        if self._num_running >= MAX_EXPORTS:
            raise BusyError(f"{MAX_EXPORTS} exports run already", retry_after_s=BUSY_RETRY_S, wait="exports")
        pieces = self._write(groups, evicted, tokens=wanted.tokens)
        # begun here, so that it counts before the next request is looked at: it waits for nothing until then
        return _chained(await anext(pieces), pieces)

    async def _write(
        self, groups: AsyncIterator[list[tuple[Any, Rollout]]], evicted: Sequence[int], *, tokens: bool
    ) -> AsyncGenerator[bytes, None]:
        from pyarrow import parquet

        # counted here and not by the caller: the loop closes an iterator that has begun, however its request ends
        self._num_running += 1
        try:
            sink, layout = _Sink(), schema(tokens=tokens)
            writer = parquet.ParquetWriter(sink, layout, compression="zstd")
            yield sink.take()
            async for group in groups:
                infos = await self._reader.infos(group, text_chars=None)
                rollouts = [rollout for _, rollout in group]
                # in a thread: a group has megabytes, and other requests must not wait for it
                await in_thread(
                    lambda infos=infos, rollouts=rollouts: writer.write_table(
                        self._table(layout, infos, rollouts), row_group_size=len(infos)
                    )
                )
                del group, infos, rollouts  # not held while the reader takes its time
                yield sink.take()
            writer.add_key_value_metadata({EVICTED_KEY: str(sum(evicted))})
            await in_thread(writer.close)
            yield sink.take()
        finally:
            self._num_running -= 1

    def _table(self, layout: pa.Schema, infos: Sequence[RolloutInfo], rollouts: Sequence[Rollout]) -> pa.Table:
        """Return rollouts as an arrow table with the columns of `layout`."""
        import pyarrow as pa

        rows: list[Mapping[str, Any]] = []
        for info, rollout in zip(infos, rollouts, strict=True):
            version, found = PolicyVersion.parse(info.version), self._catalog.find(info.prompt_id)
            rows.append(
                {
                    **info.model_dump(),
                    "lineage": version.lineage,
                    "step": version.step,
                    "messages": rollout.episode and [structs.asdict(each) for each in rollout.episode.messages],
                    "prompt_data": None if found is None else json.dumps(found[1].data, ensure_ascii=False),
                }
            )
        arrays: dict[str, Callable[[Rollout], NDArray[Any]]] = {
            "prompt_tokens": lambda rollout: rollout.prompt_tokens,
            "response_tokens": lambda rollout: rollout.response_tokens,
            "sampler_logprobs": lambda rollout: rollout.sampler_logprobs,
        }
        columns: list[pa.Array[Any]] = []
        for field in layout:
            if field.name == "sequences":
                columns.append(_sequence_lists(rollouts, field.type))
                continue
            if field.name not in arrays:
                columns.append(pa.array([row[field.name] for row in rows], type=field.type))
                continue
            # a column of lists without a Python number for each of their values
            parts = [arrays[field.name](rollout) for rollout in rollouts]
            offsets = pa.array(np.cumsum([0, *map(len, parts)], dtype=np.int32))
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(parts)), type=field.type))
        return pa.Table.from_arrays(columns, schema=layout)


def _sequence_lists(rollouts: Sequence[Rollout], kind: Any) -> pa.Array[Any]:
    """Return the column of sequences: null for rollouts of one turn. Tokens are never Python numbers."""
    import pyarrow as pa

    spoken = [rollout.sequences if rollout.episode else () for rollout in rollouts]
    sequences = [each for part in spoken for each in part]
    segments = [segment for each in sequences for segment in each.segments]
    segment_kind = kind.value_type.field("segments").type.value_type
    fields = [pa.array([getattr(each, one.name) for each in segments], type=one.type) for one in segment_kind]

    def offsets(lengths: Sequence[int]) -> pa.Array[Any]:
        return pa.array(np.cumsum([0, *lengths], dtype=np.int32))

    tokens = np.concatenate([np.zeros(0, np.int32), *(each.tokens for each in sequences)])
    parts = [
        pa.ListArray.from_arrays(offsets([len(each.tokens) for each in sequences]), pa.array(tokens)),
        pa.ListArray.from_arrays(
            offsets([len(each.segments) for each in sequences]),
            pa.StructArray.from_arrays(fields, fields=list(segment_kind)),
        ),
    ]
    is_null = pa.array([rollout.episode is None for rollout in rollouts])
    whole = pa.StructArray.from_arrays(parts, fields=list(kind.value_type))
    return pa.ListArray.from_arrays(offsets(list(map(len, spoken))), whole, type=kind, mask=is_null)


async def _chained(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            for at in range(0, len(piece), CHUNK_BYTES):
                yield piece[at : at + CHUNK_BYTES]


class ExportResponse(StreamingResponse):
    """Streams an export. If the client reads nothing for READ_S, sending stops, and uvicorn closes the connection."""

    media_type = "application/vnd.apache.parquet"

    async def stream_response(self, send: Send) -> None:
        """Send the whole export, or stop when the client stops reading."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(READ_S):
                    await send(message)
            except TimeoutError:
                log.warning("export_cut", reason=f"its reader took nothing for {READ_S:g} s")
                raise ClientDisconnect from None

        content: Any = self.body_iterator
        async with aclosing(content):
            with suppress(ClientDisconnect):
                await super().stream_response(send_in_time)


def schema(*, tokens: bool) -> pa.Schema:
    """Return the arrow schema of an export; docs/api.md describes its columns.

    Args:
        tokens: whether there are columns of tokens and log-probs.
    """
    import pyarrow as pa

    text, whole, number = pa.string(), pa.int64(), pa.float64()
    columns: dict[str, pa.DataType] = {
        "rollout_id": text,
        "task": text,
        "prompt_id": text,
        "visit_id": text,
        "version": text,
        "lineage": whole,
        "step": whole,
        "version_spans": pa.list_(pa.struct({"version": text, "start": whole, "end": whole})),
        "policy_age_steps": whole,
        "prompt_text": text,
        "prompt_data": text,
        "num_prompt_tokens": whole,
        "num_response_tokens": whole,
        "response_text": text,
        "finish_reason": text,
        "reward": number,
        "reward_status": text,
        "reward_reason": text,
        "reward_version": text,
        "reward_parts": pa.list_(pa.struct({"name": text, "score": number, "weight": number})),
        "episode": pa.struct(
            {
                "episode_id": text,
                "environment": text,
                "environment_version": text,
                "seed": whole,
                "seat": whole,
                "stop_condition": text,
                "is_truncated": pa.bool_(),
                "turn_rewards": pa.list_(number),
                "num_turns": whole,
                "num_tool_calls": whole,
                "failure_boundary": text,
            }
        ),
        "messages": pa.list_(pa.struct({"role": text, "content": text, "turn": whole})),
        "num_batches": whole,
        "sampling": pa.struct(
            {"temperature": number, "top_p": number, "top_k": whole, "seed": whole, "stop": pa.list_(text)}
        ),
        "searcher_id": text,
        "started_at_s": number,
        "finished_at_s": number,
    }
    if tokens:
        columns |= {
            "prompt_tokens": pa.list_(pa.int32()),
            "response_tokens": pa.list_(pa.int32()),
            "sampler_logprobs": pa.list_(pa.float32()),
            "sequences": pa.list_(
                pa.struct(
                    {
                        "tokens": pa.list_(pa.int32()),
                        "segments": pa.list_(
                            pa.struct(
                                {
                                    "role": text,
                                    "origin": text,
                                    "num_tokens": whole,
                                    "turn": whole,
                                    "is_trained": pa.bool_(),
                                    "finish_reason": text,
                                    "parse_status": text,
                                }
                            )
                        ),
                    }
                )
            ),
        }
    return pa.schema(columns)


class _Sink(io.RawIOBase):
    """A file in memory for the Parquet writer; `take` removes the bytes written so far, so it stays small."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_written = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Append bytes."""
        self._parts.append(bytes(data))
        self._num_written += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        """Return how many bytes were ever written."""
        return self._num_written

    def take(self) -> bytes:
        """Return the bytes written since the last call, and drop them here."""
        parts, self._parts = self._parts, []
        return b"".join(parts)
