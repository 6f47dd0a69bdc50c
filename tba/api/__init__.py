"""The JSON bodies of the REST endpoints, shared by services and clients (docs/api.md).

Bulk data is msgpack (`tba.wire`): the request of POST /v1/rollouts, the reply of POST /v1/batches, and the request of
POST /v1/heartbeats. All other bodies are the JSON models of this package. A version is a text, `lineage-step`.
"""

from __future__ import annotations

from tba.api.evaluations import BestVersion, EvalInfo, EvalNumbers, EvalReply, EvalRequest, EvalResult, EvalResults
from tba.api.prompts import (
    MAX_LEASE_IDS,
    MAX_REFUSED_VERSIONS,
    Lease,
    LeaseRenewal,
    LeaseRenewalReply,
    LeaseReply,
    LeaseRequest,
    LeaseReturn,
    Prompt,
    PromptDetail,
    PromptInfo,
    PromptOrder,
    PromptPage,
    PromptUpload,
    PromptUploadReply,
    PromptVersion,
)
from tba.api.rollouts import (
    EVICTED_KEY,
    EpisodeInfo,
    MessageInfo,
    PushReply,
    RefLogprobInfo,
    RewardPart,
    RolloutDetail,
    RolloutInfo,
    RolloutOrder,
    RolloutPage,
    SamplingInfo,
    SegmentInfo,
    SequenceInfo,
    SpanInfo,
    TrainedStep,
)
from tba.api.run import (
    ACKNOWLEDGED_HEADER,
    ENDED,
    MAX_CHANGES_PER_PAGE,
    CommandRequest,
    ComponentInfo,
    ComponentWait,
    RollbackInfo,
    RollbackRequest,
    RunChange,
    RunChanges,
    RunCommand,
    RunInfo,
    ScaleAudit,
    ScaleRequest,
    ScalingInfo,
    SearchersInfo,
    SettingsAudit,
    SettingsInfo,
    SettingsRequest,
    WaitInfo,
)
from tba.api.scores import (
    RescoreInfo,
    RescoreRequest,
    RewardInfo,
    RewardsReply,
    ScoreError,
    ScoreItem,
    ScoreReply,
    ScoreRequest,
    ScoreResult,
)
from tba.api.snapshots import LoadRequest, OriginInfo, SnapshotInfo, SnapshotRequest
from tba.api.stats import (
    Curves,
    FailedReason,
    Rates,
    RunSummary,
    Stats,
    StoredStats,
    TokenTotals,
    WeightVersionInfo,
    WeightVersionList,
)
from tba.api.trainer import (
    AckRequest,
    BatchRequest,
    CheckpointList,
    CheckpointRequest,
    LedgerEntry,
    LedgerLine,
    LedgerReply,
    LineageReply,
    LineageRequest,
    ResumeEntry,
    TrainedRollouts,
    VersionReply,
    VersionRequest,
)
from tba.fields import Name, Problem, RunState, Split, VersionText
