"""The sections of a recipe about the run, its model, its services and the machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tba.config.schedules import Probability, Temperature
from tba.config.trainer import LoraSection
from tba.fields import BareUrl, StrictModel


class TlsSection(StrictModel):
    """Encrypted connections to the buffer, to the reward service and to Redis. The PEM files are read again when they
    change; docs/security.md says how to renew them."""

    cert_file: str | None = None
    """Certificate, with its chain, of the buffer and the reward service. With it they speak https only, and the
    defaults of `buffer.url` and `reward.url` begin with https."""
    key_file: str | None = None
    """Private key of `cert_file`, without a passphrase."""
    ca_file: str | None = None
    """The only certificate authorities that clients trust for https (buffer, reward service) and rediss (Redis) URLs;
    none: those of the system. For the object store, see `store.ca_file`."""

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
    """RUN/NAME of a snapshot in the store (`tba buffer save` makes one): the run begins with its rollouts."""
    fork_version: str | None = Field(default=None, pattern=r"^[0-9]{1,9}-[0-9]{1,12}$")
    """Weight version of the snapshot's run. It makes this run a fork: the trainer starts from this version, with the
    rollouts up to its publication. None: it starts from the starting model, with all rollouts."""


class WarmStartSection(StrictModel):
    """Make a small starting model on this machine, with the run's seed (quickstart); absent if a model is given."""

    task: Literal["addition"]
    """Built-in task; the model learns from the warm-start split of its prompts."""


class ModelSection(StrictModel):
    """The starting model, from which the policy starts and which is the first reference."""

    path: str
    """Folder in Hugging Face format (config, tokenizer, safetensors), or ORG/NAME on the Hugging Face hub. `tba run`
    downloads such a name once, to models/ORG/NAME. With `warm_start`: the folder in which the model is cached; `{seed}`
    in it stands for the run's seed."""
    revision: str | None = None
    """Commit, branch or tag of ORG/NAME on the hub; none: the newest. The downloaded commit is recorded."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of published weights and of the searchers' engines."""
    policy_temperature: Temperature = 1.0
    """Divisor of the logits of policy and reference; the trained policy is the model at it. Constant within a run."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    warm_start: WarmStartSection | None = None
    """Make the model on this machine if `path` does not hold it yet."""
    lora: LoraSection | None = None
    """Train LoRA adapters; none: full fine-tuning."""


class BufferSection(StrictModel):
    """The replay buffer service."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `auth.tokens_file`."""
    port: int = Field(default=8700, ge=0, le=65535)
    """Port to listen on; 0 lets `tba run` pick a free one."""
    url: BareUrl | None = None
    """Address at which the other services reach the buffer; default: http://host:port."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """The Redis that stores the state of the run; `rediss://` is encrypted (`tls.ca_file`). `tba run` starts a Redis of
    its own and overrides this."""
    redis_password_file: str | None = None
    """File with the password of Redis, read again for every new connection; the URL must then hold none. `tba run`
    ignores it, because its Redis listens on a socket in the run folder."""
    max_rollouts: int = Field(default=200_000, ge=1)
    """Most stored rollouts. Beyond it the oldest are evicted (an event of the log, counted by reason and length). In a
    large buffer, an eviction removes up to a 64th more than it must, so that not every push waits for one."""
    max_bytes: int = Field(default=8 * 1024**3, ge=1024)
    """Most bytes of stored rollouts (as pushed; Redis needs about 1.3 times as much)."""
    max_rollouts_per_prompt: int | None = Field(default=None, ge=2)
    """Most stored rollouts of one prompt; none: no limit per prompt."""
    max_policy_age_steps: int | None = Field(default=None, ge=0)
    """Evict rollouts whose policy age is above this many optimizer steps; none: any age may be drawn."""
    deduplicate: bool = False
    """Keep only the newest of the rollouts of one prompt that have exactly the same sampled tokens."""
    near_duplicate_share: float | None = Field(default=None, gt=0, le=0.5)
    """Keep the one with the higher reward of two similar scored rollouts of one prompt. They are similar when the edit
    distance of their responses, in tokens, is below this share of their added lengths. None: no such filter. Every new
    rollout is compared with all of its prompt: use it for short responses, and `max_rollouts` <=
    MOST_ROLLOUTS_COMPARED."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest request body; a larger one is refused with 413."""
    lease_s: float = Field(default=60.0, gt=0)
    """A lease that is neither fulfilled nor renewed in this time may go to another searcher."""
    batch_deadline_s: float = Field(default=120.0, gt=0)
    """A drawn batch that is not acked in this time is void."""
    max_log_events_since_checkpoint: int = Field(default=200_000, ge=100)
    """Write a checkpoint of the log after this many events (and at least half the number of stored rollouts). A restart
    replays the events since the last checkpoint one by one."""
    read_only: str | None = Field(default=None, min_length=1, max_length=1000)
    """Only show what Redis holds, for the reason in this text; none: serve the run. Nothing is scored, evicted, probed
    or scaled, and the buffer that owns the run keeps it. Every write gets 409 with this text, which is also the note of
    GET /v1/run. `tba view` and the commands that read a finished run set it, over a copy of the run's files. Over an
    empty Redis, with `run.snapshot`, that snapshot is loaded and shown."""

    @model_validator(mode="after")
    def _check_near_duplicates(self) -> BufferSection:
        if self.near_duplicate_share is not None and self.max_rollouts > MOST_ROLLOUTS_COMPARED:
            raise ValueError(
                f"near_duplicate_share compares every new rollout with all of its prompt, and max_rollouts is "
                f"{self.max_rollouts}: set max_rollouts to {MOST_ROLLOUTS_COMPARED} or less"
            )
        return self


MIN_DISTINCT = 2
"""Fewest different rollouts in a group: with one rollout, repeated, nothing could be compared."""


class SamplingSection(StrictModel):
    """The composition of a batch, and flow control (docs/algorithm.md: MOP)."""

    prompts_per_batch: int = Field(default=16, ge=1)
    """Number of slots of a batch; each slot draws a group of one prompt."""
    group_size: int = Field(default=8, ge=1)
    """K: rollouts per slot. 1 is allowed only with `objective.preset = "reinforce"` or an objective of your own."""
    rollouts_per_visit: int = Field(default=8, ge=1)
    """S: completions per visit of a prompt."""
    most_on_policy_prob: Probability = 0.5
    """m: probability that a slot draws from recent rollouts. These were stored since the last but one publication (with
    `alternate`: since the last one)."""
    recent_shortage: Literal["wait", "draw"] = "wait"
    """What a batch does where m is 1 and recent data does not fill it. `wait`: until it does. `draw`: take the other
    slots from all data, of any age."""
    reward_inverse_temperature: float = Field(default=0.0, ge=0)
    """Replay slots draw rollouts of a prompt with probability proportional to exp(this * reward); 0 is uniform."""
    uniform_share: float = Field(default=0.0, ge=0, le=1)
    """Share of a uniform distribution that is mixed into the reward softmax."""
    prioritise: Literal["within", "across"] = "within"
    """Where the reward softmax is used. `within`: a replay slot takes any prompt, and draws its rollouts by softmax.
    `across`: the prompt, too, is drawn, with probability proportional to the sum of exp(reward_inverse_temperature *
    reward) over its rollouts (mixed with `uniform_share` over prompts)."""
    max_uses: int | None = Field(default=None, ge=1, le=65_535)
    """Do not draw a rollout that has been in this many batches; None: no limit. Batches that are not trained on yet
    count too, void ones do not. A resume that goes back more than 1,024 batches leaves the older ones counted."""
    min_size_to_sample: int = Field(default=64, ge=1)
    """Draw no batch before this many scored rollouts are stored that may be drawn."""
    samples_per_insert: float | None = Field(default=None, gt=0)
    """Target of flow control: rollouts trained / rollouts generated; none: no flow control. Unset, `tba run` on a CPU
    chooses 1, and one batch of error (docs/recipes.md)."""
    samples_per_insert_error: float = Field(default=512, gt=0)
    """Deviation from `samples_per_insert`, in trained rollouts, beyond which the faster side waits."""
    alternate: bool = False
    """Baseline: generate for one sync interval, then train for one, never both at once."""
    lag_steps: int = Field(default=0, ge=0)
    """L, a constant lag, for studies. Searchers sample with the newest version that is at least L optimizer steps older
    than the newest published one. In the first L steps after a start of the trainer, they sample with its first
    version. With `alternate` and `trainer.sync_interval` 1, every rollout is trained on at policy age L
    (docs/trainer.md, Constant lag)."""

    @property
    def waits_for_recent(self) -> bool:
        """Whether a batch holds recent data alone, and waits for it."""
        return self.most_on_policy_prob >= 1 and self.recent_shortage == "wait"

    @property
    def min_distinct(self) -> int:
        """Fewest rollouts that a prompt needs to fill a slot; if it has fewer than K, some are drawn repeatedly."""
        return min(MIN_DISTINCT, self.group_size)


class AuthSection(StrictModel):
    """Bearer tokens by role."""

    tokens_file: str | None = None
    """JSON file {"searcher": "...", "trainer": "...", "operator": "...", "viewer": "..."}, read again when it changes.
    A role may have a list of two tokens while its token is being changed (docs/security.md, Tokens)."""


class StoreSection(StrictModel):
    """The object store that holds weight versions and checkpoints."""

    url: str = "file://store"
    """`s3://bucket/prefix` (boto3), or `file://folder`, the embedded store of one machine."""
    endpoint_url: str | None = None
    """S3 endpoint; none: AWS. Credentials come from the environment, as boto3 reads them."""
    region: str = "us-east-1"
    """S3 region."""
    ca_file: str | None = None
    """PEM file of the certificate authorities trusted for an https endpoint; none: boto3's, or AWS_CA_BUNDLE."""
    cache_folder: str | None = None
    """Cache folder of the searchers of one machine: each version is downloaded and assembled once for all of them.
    Best on the file system of their weights (TMPDIR), where files are linked and not copied. None: no cache."""
    cache_bytes: int = Field(default=64 * 1024**3, ge=1)
    """Most bytes in the cache; the least recently used files are deleted first."""


class GpuSection(StrictModel):
    """GPUs of this machine, by number, that the child processes of `tba run` see (CUDA_VISIBLE_DEVICES). None: all."""

    trainer: list[int] | None = Field(default=None, min_length=1)
    """GPUs of the trainer, one for each of `trainer.num_processes`."""
    searchers: list[list[int]] | None = Field(default=None, min_length=1)
    """One list of GPUs for each searcher; if there are more searchers than lists, searchers share the lists in turn."""
    reward: list[int] | None = Field(default=None, min_length=1)
    """GPUs of the reward service, for reward models."""


class LocalSection(StrictModel):
    """Settings of `tba run`, which starts all services as child processes on one machine. Only it reads them."""

    runs_dir: str = "runs"
    """Folder that holds one folder per run."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for a child process to become ready."""
    stop_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds between SIGTERM and SIGKILL when child processes are stopped."""
    gpus: GpuSection = GpuSection()
    """GPUs of each child process."""
