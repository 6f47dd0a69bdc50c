"""The JSON bodies of the REST endpoints, shared by services and clients (docs/api.md).

Bulk data is msgpack (`tba.wire`): POST /v1/rollouts takes a push, POST /v1/batches answers a batch, POST
/v1/heartbeats takes a heartbeat. Everything else is one of these models. Versions are `lineage-step` texts.
"""

from __future__ import annotations

from tba.api.base import (
    Name,
    Problem,
    RunState,
    Split,
    VersionText,
)
from tba.api.evals import (
    BestVersion,
    EvalInfo,
    EvalNumbers,
    EvalRequest,
    EvalResult,
    EvalResults,
)
from tba.api.events import EVENT_NAMES, EventName, RunEvent, WaitChange
from tba.api.leases import (
    MAX_LEASE_IDS,
    MAX_REFUSED_VERSIONS,
    Lease,
    LeaseRenewal,
    LeaseRenewalReply,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
)
from tba.api.prompts import (
    Prompt,
    PromptUpload,
    PromptUploadReply,
)
from tba.api.rescoring import (
    RescoreInfo,
    RescoreRequest,
)
from tba.api.rollouts import (
    PushOutcome,
    PushReply,
    RefLogprobInfo,
    RolloutDetail,
    RolloutInfo,
    RolloutOrder,
    RolloutPage,
    SamplingInfo,
    SpanInfo,
)
from tba.api.run import (
    ComponentInfo,
    ComponentWait,
    RunCommand,
    RunInfo,
    WaitInfo,
)
from tba.api.scaling import (
    ScaleAudit,
    ScaleReached,
    ScaleRequest,
    ScalingInfo,
    SearchersInfo,
)
from tba.api.scores import (
    RewardInfo,
    RewardsReply,
    ScoreError,
    ScoreItem,
    ScoreReply,
    ScoreRequest,
    ScoreResult,
)
from tba.api.settings import (
    MAX_CHANGES_PER_PAGE,
    SettingChange,
    SettingEffect,
    SettingsAudit,
    SettingsInfo,
    SettingsRequest,
)
from tba.api.snapshots import (
    LoadRequest,
    OriginInfo,
    SnapshotInfo,
    SnapshotList,
    SnapshotRequest,
)
from tba.api.stats import (
    Rates,
    Stats,
    StoredStats,
)
from tba.api.training import (
    AckRequest,
    BatchRequest,
    CheckpointRequest,
    LedgerEntry,
    LedgerLine,
    LedgerReply,
    LineageReply,
    LineageRequest,
    MarkReply,
    MarkRequest,
    ResumeEntry,
    SampleRequest,
)

__all__ = [
    "EVENT_NAMES",
    "MAX_CHANGES_PER_PAGE",
    "MAX_LEASE_IDS",
    "MAX_REFUSED_VERSIONS",
    "AckRequest",
    "BatchRequest",
    "BestVersion",
    "CheckpointRequest",
    "ComponentInfo",
    "ComponentWait",
    "EvalInfo",
    "EvalNumbers",
    "EvalRequest",
    "EvalResult",
    "EvalResults",
    "EventName",
    "Lease",
    "LeaseRenewal",
    "LeaseRenewalReply",
    "LeaseReply",
    "LeaseRequest",
    "LeaseReturn",
    "LedgerEntry",
    "LedgerLine",
    "LedgerReply",
    "LineageReply",
    "LineageRequest",
    "LoadRequest",
    "MarkReply",
    "MarkRequest",
    "Name",
    "OriginInfo",
    "Problem",
    "Prompt",
    "PromptUpload",
    "PromptUploadReply",
    "PushOutcome",
    "PushReply",
    "Rates",
    "RefLogprobInfo",
    "RescoreInfo",
    "RescoreRequest",
    "ResumeEntry",
    "RewardInfo",
    "RewardsReply",
    "RolloutDetail",
    "RolloutInfo",
    "RolloutOrder",
    "RolloutPage",
    "RunCommand",
    "RunEvent",
    "RunInfo",
    "RunState",
    "SampleRequest",
    "SamplingInfo",
    "ScaleAudit",
    "ScaleReached",
    "ScaleRequest",
    "ScalingInfo",
    "ScoreError",
    "ScoreItem",
    "ScoreReply",
    "ScoreRequest",
    "ScoreResult",
    "SearchersInfo",
    "SettingChange",
    "SettingEffect",
    "SettingsAudit",
    "SettingsInfo",
    "SettingsRequest",
    "SnapshotInfo",
    "SnapshotList",
    "SnapshotRequest",
    "SpanInfo",
    "Split",
    "Stats",
    "StoredStats",
    "VersionText",
    "WaitChange",
    "WaitInfo",
]
