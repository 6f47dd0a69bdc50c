"""What people read of a run: rollouts, prompts, curves, counts, the ledger, weight versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack
from urllib.parse import quote, urlencode

from tba.api import (
    Curves,
    LedgerReply,
    PromptDetail,
    PromptOrder,
    PromptPage,
    RolloutDetail,
    RolloutOrder,
    RolloutPage,
    RunInfo,
    RunSummary,
    Stats,
    WeightVersionList,
)
from tba.api.rollouts import RewardStatus
from tba.clients.service_client import ServiceClient, parse_reply
from tba.errors import BadReplyError, UnavailableError
from tba.fields import Split
from tba.wire.rollout import FinishReason

EXPORT_CHUNK_BYTES = 1 << 20
EXPORT_SILENCE_S = 120.0
"""The service may read many rollouts before the next that matches."""
PARQUET_END = b"PAR1"


class RolloutFilters(TypedDict, total=False):
    """Filters of stored rollouts; None: any. Bounds are inclusive."""

    prompt_id: str | None
    task: str | None
    version: str | None
    """The policy version that made it."""
    from_version: str | None
    to_version: str | None
    status: RewardStatus | None
    min_reward: float | None
    """Of scored rollouts."""
    max_reward: float | None
    searcher_id: str | None
    finish_reason: FinishReason | None
    contains: str | None
    """Looked for in the response and in the prompt, whatever the case."""


class RunReader(ServiceClient):
    """One method per endpoint that a viewer may ask; docs/api.md describes them. Every method raises ServiceError
    subclasses."""

    def stats(self) -> Stats:
        """Return the counts of the buffer."""
        return parse_reply(self._call("GET", "/v1/stats"), Stats)

    def ledger(self, *, after: int = 0, limit: int = 1000) -> LedgerReply:
        """Return the acked batches in order, from position `after`."""
        reply = self._call("GET", "/v1/ledger", params={"after": after, "limit": limit})
        return parse_reply(reply, LedgerReply)

    def curves(
        self,
        *,
        names: Sequence[str] | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 500,
    ) -> Curves:
        """Return the metrics of the steps, thinned to `max_points`; a metric that no step has is None everywhere.

        Args:
            names: of the metrics; None: all.
        """
        listed = None if names is None else ",".join(names)
        query = _known(names=listed, from_step=from_step, to_step=to_step, max_points=max_points)
        return parse_reply(self._call("GET", "/v1/curves", params=query), Curves)

    def summary(self) -> RunSummary:
        """Return in sentences what the run does, how it learns, what waits for what, and what to try."""
        info = parse_reply(self._call("GET", "/v1/run", params={"summary": "true"}), RunInfo)
        if info.summary is None:
            raise BadReplyError(f"{self.base_url}/v1/run sent no summary; run the same tba release on every service")
        return info.summary

    def list_versions(self) -> WeightVersionList:
        """Return the newest weight versions that the object store has."""
        return parse_reply(self._call("GET", "/v1/versions"), WeightVersionList)

    def list_rollouts(
        self,
        *,
        order: RolloutOrder = "newest",
        limit: int = 20,
        cursor: str | None = None,
        text_chars: int = 1000,
        **filters: Unpack[RolloutFilters],
    ) -> RolloutPage:
        """Return a page of stored rollouts; the `next` of a page is the `cursor` of the one after it."""
        query = _known(order=order, limit=limit, cursor=cursor, text_chars=text_chars, **filters)
        return parse_reply(self._call("GET", "/v1/rollouts", params=query), RolloutPage)

    def get_rollout(self, rollout_id: str) -> RolloutDetail:
        """Return everything that is stored of one rollout."""
        return parse_reply(self._call("GET", f"/v1/rollouts/{rollout_id}"), RolloutDetail)

    def export_rollouts(self, path: str | Path, *, tokens: bool = True, **filters: Unpack[RolloutFilters]) -> int:
        """Write all stored rollouts that match to a Parquet file, oldest first. Return its size in bytes.

        The bytes go to `path` + ".part" first, so an export that is cut leaves no file that looks whole.

        Args:
            path: the file; one that exists is replaced.
            tokens: whether it has columns of tokens and log-probs.

        Raises:
            NotInstalledError: the service has no pyarrow.
            BusyError: too many exports run.
            UnavailableError: no connection, or it was cut.
            OSError: the file cannot be written.
        """
        part, query = Path(f"{path}.part"), urlencode(_known(tokens=str(tokens).lower(), **filters))
        try:
            with (
                part.open("w+b") as file,
                self._stream(f"/v1/rollouts.parquet?{query}", headers={}, silence_s=EXPORT_SILENCE_S) as answer,
            ):
                for piece in answer.stream(EXPORT_CHUNK_BYTES):
                    file.write(piece)
                num_bytes = file.tell()
                # a proxy may end a stream that was cut as if it were whole; the last bytes of Parquet are these
                file.seek(max(0, num_bytes - len(PARQUET_END)))
                if file.read() != PARQUET_END:
                    raise UnavailableError(f"{self.base_url} cut the export after {num_bytes} bytes; try again")
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return num_bytes

    def list_prompts(
        self,
        *,
        split: Split | None = None,
        task: str | None = None,
        contains: str | None = None,
        order: PromptOrder = "upload",
        limit: int = 20,
        after: int = 0,
        text_chars: int = 1000,
    ) -> PromptPage:
        """Return a page of prompts that match; the `next` of a page is the `after` of the one behind it.

        Args:
            contains: looked for in ids and texts, whatever the case.
        """
        query = _known(
            split=split, task=task, contains=contains, order=order, limit=limit, after=after, text_chars=text_chars
        )
        return parse_reply(self._call("GET", "/v1/prompts", params=query), PromptPage)

    def get_prompt(self, prompt_id: str) -> PromptDetail:
        """Return one prompt, and its stored rollouts by policy version.

        Raises:
            NotFoundError: no prompt has this id.
        """
        return parse_reply(self._call("GET", f"/v1/prompts/{quote(prompt_id, safe='')}"), PromptDetail)


def _known(**query: Any) -> dict[str, Any]:
    # a query without a value would be read as an empty text
    return {name: value for name, value in query.items() if value is not None}
