"""The sections of a recipe about the run, its model, its services and the machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tba.config.schedules import Probability, Temperature
from tba.config.trainer import LoraSection
from tba.fields import BareUrl, StrictModel


class TlsSection(StrictModel):
    """Encrypted connections to the buffer, to the reward service and to Redis. PEM files that are read again when they
    change; docs/security.md says how to renew them."""

    cert_file: str | None = None
    """Certificate (with its chain) that the buffer and the reward service show. With it they speak https alone, and
    `buffer.url` and `reward.url` default to https."""
    key_file: str | None = None
    """Private key of `cert_file`, without a passphrase."""
    ca_file: str | None = None
    """The authorities that clients trust for https URLs of buffer and reward and for a rediss URL of Redis, and no
    others; none: those of the system. The object store has `store.ca_file`."""

    @model_validator(mode="after")
    def _check(self) -> TlsSection:
        if (self.cert_file is None) != (self.key_file is None):
            given, missing = ("cert_file", "key_file") if self.key_file is None else ("key_file", "cert_file")
            raise ValueError(f"tls.{given} is given without tls.{missing}: a server needs both; add it or remove both")
        return self

    @property
    def scheme(self) -> str:
        """The scheme of the buffer and the reward service: http or https."""
        return "http" if self.cert_file is None else "https"


MOST_ROLLOUTS_COMPARED = 20_000
Name = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")


class RunSection(StrictModel):
    """The name of the run, its seed, and where it begins."""

    name: str = Name
    """Name of the run: a folder under `local.runs_dir`, a prefix in the object store and of every Redis key."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of prompts, sampling, batches and the warm start."""
    snapshot: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}/[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
    )
    """RUN/NAME: the run begins with this snapshot of another run's buffer (`tba buffer save`); the store holds it."""
    fork_version: str | None = Field(default=None, pattern=r"^[0-9]{1,9}-[0-9]{1,12}$")
    """The run is a fork: its trainer starts from this weight version of the snapshot's run, and it takes the rollouts
    up to that version's publication. None: from the starting model, with all rollouts."""


class WarmStartSection(StrictModel):
    """How to make a small starting model on this machine (the quickstart); absent when a model is given.

    Its seed is the run's.
    """

    task: Literal["addition"]
    """Built-in task whose warm-start split the model learns from."""


class ModelSection(StrictModel):
    """The starting model: policy and reference begin here."""

    path: str
    """Folder in Hugging Face format (config, tokenizer, safetensors); or, where there is no such folder, ORG/NAME on
    the Hugging Face hub, which `tba run` fetches once, to models/ORG/NAME. With `warm_start` it is the cache folder,
    and `{seed}` in it stands for the run's seed."""
    revision: str | None = None
    """Commit, branch or tag of ORG/NAME on the hub; none: the newest. The commit that was fetched is written down."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of published weights and of the searchers' engines."""
    policy_temperature: Temperature = 1.0
    """Divides the logits of policy and reference: the trained policy is the model at this temperature. Constant within
    a run."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off unless a recipe says otherwise."""
    warm_start: WarmStartSection | None = None
    """Make the model on this machine if `path` does not hold it yet."""
    lora: LoraSection | None = None
    """Train adapters of low rank; none: full fine-tuning."""


class BufferSection(StrictModel):
    """The replay buffer service."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `auth.tokens_file`."""
    port: int = Field(default=8700, ge=0, le=65535)
    """Port to listen on; 0 lets `tba run` pick a free one."""
    url: BareUrl | None = None
    """Where the other services find the buffer; default: http://host:port."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The Redis that holds the truth; `rediss://` is encrypted (`tls.ca_file`). `tba run` starts its own and overrides
    this."""
    redis_password_file: str | None = None
    """File with the password of Redis, read again for every new connection; the URL then holds none. `tba run`, whose
    Redis listens on a socket in the run folder, ignores it."""
    max_rollouts: int = Field(default=200_000, ge=1)
    """Most stored rollouts. Beyond it the oldest are evicted (an event of the log, counted by reason and length). In a
    large buffer, an eviction takes up to a 64th more than it must, so that not every push waits for one."""
    max_bytes: int = Field(default=8 * 1024**3, ge=1024)
    """Most bytes of stored rollouts (as pushed; Redis needs about 1.3 times as much)."""
    max_rollouts_per_prompt: int | None = Field(default=None, ge=2)
    """Most stored rollouts of one prompt; none: no cap of its own."""
    max_policy_age_steps: int | None = Field(default=None, ge=0)
    """Rollouts older than this, in optimizer steps of the active lineage, are evicted; none: any age may be drawn."""
    deduplicate: bool = False
    """Keep only the newest of the rollouts of one prompt with exactly the same response tokens."""
    near_duplicate_share: float | None = Field(default=None, gt=0, le=0.5)
    """Of two scored rollouts of one prompt whose responses differ by an edit distance, in tokens, below this share of
    the sum of their lengths, keep the one with the higher reward; none: no such filter. Every new rollout is compared
    with all of its prompt: for short responses, and at most MOST_ROLLOUTS_COMPARED of `max_rollouts`."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest request body; larger is refused with 413."""
    lease_s: float = Field(default=60.0, gt=0)
    """A (prompt, visit) lease that is not fulfilled in this time is given to another searcher."""
    batch_deadline_s: float = Field(default=120.0, gt=0)
    """A drawn batch that is not acked in this time is void."""
    max_log_events_since_checkpoint: int = Field(default=200_000, ge=100)
    """A restart replays the events of the log since its last checkpoint one by one; beyond this many (and half of the
    stored rollouts) a new checkpoint is written."""
    read_only: str | None = Field(default=None, min_length=1, max_length=1000)
    """Why this buffer only shows what Redis holds; none: it serves the run. With it nothing is scored, evicted, probed
    or scaled, the run is not taken from its buffer, every write is answered with 409 and this text, and GET /v1/run has
    it as its note. `tba view` and the commands that read a run that is over set it, over a copy of its files. With
    `run.snapshot`, over an empty Redis, it loads that snapshot and shows it."""

    @model_validator(mode="after")
    def _check_near_duplicates(self) -> BufferSection:
        if self.near_duplicate_share is not None and self.max_rollouts > MOST_ROLLOUTS_COMPARED:
            raise ValueError(
                f"near_duplicate_share compares every new rollout with all of its prompt, and max_rollouts is "
                f"{self.max_rollouts}: set max_rollouts to {MOST_ROLLOUTS_COMPARED} or less"
            )
        return self


MIN_DISTINCT = 2
"""A group of one rollout, repeated, has nothing to compare."""


class SamplingSection(StrictModel):
    """The composition of a batch, and flow control (docs/algorithm.md: MOP)."""

    prompts_per_batch: int = Field(default=16, ge=1)
    """Slots of a batch: one prompt each."""
    group_size: int = Field(default=8, ge=1)
    """K: rollouts per slot. 1 is allowed only with `objective.preset = "reinforce"` or an objective of your own."""
    rollouts_per_visit: int = Field(default=8, ge=1)
    """S: completions per visit of a prompt."""
    most_on_policy_prob: Probability = 0.5
    """m: probability that a slot draws from rollouts that arrived since the previous publication (with `alternate`:
    since the last one)."""
    reward_inverse_temperature: float = Field(default=0.0, ge=0)
    """Replay slots draw rollouts of a prompt with probability proportional to exp(this * reward); 0 is uniform."""
    uniform_share: float = Field(default=0.0, ge=0, le=1)
    """Share of uniform probability mixed into the reward-softmax."""
    prioritise: Literal["within", "across"] = "within"
    """`within`: a replay slot takes any prompt, and the softmax weighs the rollouts of that prompt. `across`: the
    prompt too is drawn with probability proportional to the sum of exp(reward_inverse_temperature * reward) over its
    rollouts (mixed with `uniform_share` over prompts)."""
    max_uses: int | None = Field(default=None, ge=1, le=65_535)
    """A rollout that was in this many batches is not drawn again; batches that nobody has trained on yet count too,
    void ones do not. A resume over more than 1,024 batches leaves the older ones counted. None: no bound."""
    min_size_to_sample: int = Field(default=64, ge=1)
    """No batch is drawn before this many scored rollouts are stored that may be drawn."""
    samples_per_insert: float | None = Field(default=None, gt=0)
    """Rollouts trained per rollout generated that flow control aims at; none: no flow control."""
    samples_per_insert_error: float = Field(default=512, gt=0)
    """How many trained rollouts the two sides may drift apart before the faster one waits."""
    alternate: bool = False
    """Baseline: generate for one sync interval, then train for one, never both at once."""
    lag_steps: int = Field(default=0, ge=0)
    """L, a constant lag, for studies: searchers sample with the newest version that is at least so many optimizer steps
    older than the newest published one (in the first L steps of a start of the trainer: with the first one). With
    `alternate` and `trainer.sync_interval` 1, rollouts are trained on at the age L exactly (docs/trainer.md,
    Constant lag)."""

    @property
    def min_distinct(self) -> int:
        """How many rollouts a prompt needs to fill a slot; with fewer than K, some are drawn repeatedly."""
        return min(MIN_DISTINCT, self.group_size)


class AuthSection(StrictModel):
    """Bearer tokens by role."""

    tokens_file: str | None = None
    """JSON file {"searcher": "...", "trainer": "...", "operator": "...", "viewer": "..."}, read again when it changes;
    a list of two tokens instead of one while a token is changed (docs/security.md, Tokens)."""


class StoreSection(StrictModel):
    """The object store that holds weight versions and checkpoints."""

    url: str = "file://store"
    """`s3://bucket/prefix` (boto3), or `file://folder`, the embedded store of one machine."""
    endpoint_url: str | None = None
    """S3 endpoint; none: AWS. Credentials come from the environment, as boto3 reads them."""
    region: str = "us-east-1"
    """S3 region."""
    ca_file: str | None = None
    """PEM file of the authorities that are trusted for an https endpoint; none: those that boto3 knows, or
    AWS_CA_BUNDLE."""
    cache_folder: str | None = None
    """A folder that the searchers of one machine share: a version is downloaded and assembled once for all of them.
    Best on the file system where they keep their weights (TMPDIR), where files are linked and not copied. None: no
    cache."""
    cache_bytes: int = Field(default=64 * 1024**3, ge=1)
    """Bound of the cache; the least recently used versions go first."""


class GpuSection(StrictModel):
    """Which GPUs of this machine the children of `tba run` see, by number (CUDA_VISIBLE_DEVICES). None: all."""

    trainer: list[int] | None = Field(default=None, min_length=1)
    """Of the trainer; one for each of `trainer.num_processes`."""
    searchers: list[list[int]] | None = Field(default=None, min_length=1)
    """One list for each searcher; with more searchers than lists, they take turns."""
    reward: list[int] | None = Field(default=None, min_length=1)
    """Of the reward service, for reward models."""


class LocalSection(StrictModel):
    """Only `tba run` reads this section: one machine, child processes."""

    runs_dir: str = "runs"
    """Folder that holds one folder per run."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for a child to become ready."""
    stop_timeout_s: float = Field(default=30.0, gt=0)
    """After SIGTERM, children have this long before SIGKILL."""
    gpus: GpuSection = GpuSection()
    """The GPUs of each child."""
