"""The recipe as one pydantic model: every section, and the rules between sections. `recipe_file` reads it."""

from __future__ import annotations

import math

from pydantic import Field, JsonValue, model_validator

from tba.config.data import DataSection, PrepareItem
from tba.config.environments import EnvironmentSection
from tba.config.evaluation import EvalSection
from tba.config.objective import ObjectiveSection
from tba.config.reward import BUILT_IN_TASKS, RewardSection, TaskName
from tba.config.searcher import VLLM_ENGINES, VLLM_MAX_TEMPERATURE, ScalingSection, SearcherSection
from tba.config.sections import (
    AuthSection,
    BufferSection,
    LocalSection,
    ModelSection,
    RunSection,
    SamplingSection,
    StoreSection,
    TlsSection,
)
from tba.config.trainer import TrackingSection, TrainerSection
from tba.errors import did_you_mean
from tba.fields import StrictModel
from tba.tls import address

CONSTANT_SETTINGS = (
    "run.name",
    "run.snapshot",
    "run.fork_version",
    "model.path",
    "model.dtype",
    "model.policy_temperature",
    "model.lora",
    "store.url",
)
"""Settings that no live setting and no resume of a run may change."""


class Recipe(StrictModel):
    """The configuration of a whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    buffer: BufferSection = BufferSection()
    sampling: SamplingSection = SamplingSection()
    reward: RewardSection = RewardSection()
    environments: dict[TaskName, EnvironmentSection] = Field(default_factory=dict)
    """Task -> its environment. The episodes of other tasks have one turn."""
    searcher: SearcherSection = SearcherSection()
    objective: ObjectiveSection = ObjectiveSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    tracking: TrackingSection = TrackingSection()
    prepare: list[PrepareItem] = Field(default_factory=list)
    """Models and data sets that must be on the disk before a run; `tba data prepare` downloads or makes them."""
    store: StoreSection = StoreSection()
    auth: AuthSection = AuthSection()
    tls: TlsSection = TlsSection()
    scaling: ScalingSection = ScalingSection()
    local: LocalSection = LocalSection()

    @model_validator(mode="after")
    def _sample_from_the_policy(self) -> Recipe:
        """Set the searchers' sampling temperature to the policy temperature, if the recipe names none."""
        given = self.searcher.model_fields_set
        if "sampling_temperature" not in given and self.searcher.temperature_mix is None:
            default = self.model.policy_temperature
            # the only way into a frozen model
            object.__setattr__(self, "searcher", self.searcher.model_copy(update={"sampling_temperature": default}))
        return self

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if sum(map(bool, (self.data.generator, self.data.path, self.data.sets))) != 1:
            raise ValueError(
                "data: give exactly one of `generator` (a built-in task), `path` (JSONL) and [[data.sets]] (data sets)"
            )
        if self.run.fork_version is not None and self.run.snapshot is None:
            raise ValueError("run.fork_version names a version of the run in run.snapshot: give that too")
        # these rules are between sections: a section alone cannot know them
        # a view of the snapshot draws nothing
        is_drawn = self.run.snapshot is not None and self.buffer.read_only is None
        if is_drawn and self.objective.reference_placement == "searcher":
            raise ValueError(
                f'objective.reference_placement = "searcher" leaves ref log-probs to searchers, and the rollouts of '
                f"run.snapshot = {self.run.snapshot!r} have none of this run's starting model, so each of them would "
                'be refused at every draw; choose "trainer"'
            )
        needs = {
            "sampling.alternate": self.sampling.alternate,
            "sampling.lag_steps": self.sampling.lag_steps,
            'objective.reference_placement = "searcher"': self.objective.reference_placement == "searcher",
        }
        if self.is_offline and (named := [name for name, is_set in needs.items() if is_set]):
            raise ValueError(f"{named[0]} needs searchers, and searcher.num_searchers is 0; remove it")
        num = self.scaling.num_searchers
        # of other backends nothing starts that number: pods, or machines, may have servers of their own
        if self.scaling.backend == "kubernetes" and self.shared_server is not None and num is not None and num > 1:
            raise ValueError(
                f"scaling.num_searchers is {num}, and all would load weights into the server {self.shared_server}, "
                "which one searcher updates; set it to 1, or give each pod a server at localhost"
            )
        if self.searcher.engine == "vllm" and self.searcher.vllm.quantization and self.model.dtype == "float32":
            raise ValueError(
                f"searcher.vllm.quantization is {self.searcher.vllm.quantization!r}, and vLLM rounds weights of 16 "
                "bits only; set model.dtype to bfloat16 or float16, or remove it"
            )
        if self.environments and self.searcher.engine == "simulated":
            raise ValueError(
                'environments need a model with a chat template, and searcher.engine = "simulated" has none; choose '
                "another engine"
            )
        self._check_lag()
        self._check_unused()
        num_processes, context = self.trainer.num_processes, self.trainer.sharding.context
        if num_processes > 1 and num_processes % context:
            raise ValueError(
                f"trainer.sharding.context is {context}, and trainer.num_processes is {num_processes}, which is no "
                "multiple of it: they are dealt to groups of that size"
            )
        if self.trainer.num_processes > 1 and ":" in self.trainer.device:
            raise ValueError(
                f"trainer.device is {self.trainer.device!r}, a single device, and trainer.num_processes is "
                f"{self.trainer.num_processes}; give {self.trainer.device.partition(':')[0]!r}: every process then "
                "uses a device of its own (local.gpus.trainer says which)"
            )
        gpus = self.local.gpus.trainer
        if gpus is not None and len(gpus) < self.trainer.num_processes:
            raise ValueError(
                f"local.gpus.trainer names {len(gpus)} GPUs, and trainer.num_processes is "
                f"{self.trainer.num_processes}: every process needs a GPU of its own"
            )
        shortest = min(map(len, self.local.gpus.searchers or ()), default=None)
        if shortest is not None and shortest < self.searcher.tensor_parallel_size:
            raise ValueError(
                f"local.gpus.searchers has a list of {shortest} GPUs, and searcher.tensor_parallel_size is "
                f"{self.searcher.tensor_parallel_size}: a searcher needs that many; name them in every list"
            )
        self._check_objective()
        return self

    def _check_lag(self) -> None:
        """Refuse settings that, with a constant lag, evict every rollout or drop the weights that sampled it."""
        lag_steps, interval = self.sampling.lag_steps, self.trainer.sync_interval
        if not lag_steps:
            return
        most_steps = self.num_lag_versions * interval + interval - 1
        max_age_steps = self.buffer.max_policy_age_steps
        if max_age_steps is not None and max_age_steps < most_steps:
            raise ValueError(
                f"with sampling.lag_steps = {lag_steps} and trainer.sync_interval = {interval} rollouts are up to "
                f"{most_steps} steps old, and buffer.max_policy_age_steps = {max_age_steps} evicts them; set it to "
                f"{most_steps} or more"
            )
        parts, num_kept = self.objective.parts, self.objective.old_policy_versions
        if parts is not None and parts.old_policy == "trainer" and num_kept <= self.num_lag_versions:
            raise ValueError(
                f"with sampling.lag_steps = {lag_steps} and trainer.sync_interval = {interval} searchers are "
                f"{self.num_lag_versions} versions behind, and the trainer keeps {num_kept} for the old policy "
                f"(objective.old_policy_versions); set it to {self.num_lag_versions + 1} or more"
            )

    def _check_unused(self) -> None:
        """Refuse settings without any effect."""
        if self.sampling.min_size_to_sample > self.buffer.max_rollouts:
            raise ValueError(
                f"sampling.min_size_to_sample {self.sampling.min_size_to_sample} is above buffer.max_rollouts "
                f"{self.buffer.max_rollouts}: no batch could ever be drawn"
            )
        ratio, max_uses = self.sampling.samples_per_insert, self.sampling.max_uses
        if ratio is not None and max_uses is not None and ratio > max_uses:
            raise ValueError(
                f"sampling.samples_per_insert is {ratio:g}, and no rollout is in more than {max_uses} batches "
                "(sampling.max_uses): the trainer would always wait; lower the first or raise the second"
            )
        scored = [*self.reward.tasks, *BUILT_IN_TASKS]
        for task, section in self.environments.items():
            if section.environment is None and task not in scored:
                raise ValueError(
                    f"environments.{task} has tools and no environment, and nothing scores the task, so no episode of "
                    f"it would be paid; give the task an entry in reward.tasks, or name an environment"
                    f"{did_you_mean(task, scored)}"
                )
        tasks = sorted({*scored, *self.environments})
        for task in self.searcher.tasks:
            if task not in tasks:
                # a misspelt task would silently keep the defaults of every other task
                raise ValueError(
                    f"searcher.tasks.{task} is for a task that nothing scores, so no prompt can have it; known are "
                    f"{', '.join(tasks)} (reward.tasks, environments and the built-in ones){did_you_mean(task, tasks)}"
                )
        temperature = self.model.policy_temperature
        if self.searcher.engine in VLLM_ENGINES and temperature > VLLM_MAX_TEMPERATURE:
            raise ValueError(
                f"model.policy_temperature is {temperature:g}, and vLLM samples at most at {VLLM_MAX_TEMPERATURE:g}: "
                "no evaluation would be possible; lower it"
            )

    def _check_objective(self) -> None:
        num_steps = self.trainer.num_steps
        if self.objective.needs_beta and self.objective.beta.lowest(num_steps) <= 0:
            raise ValueError(
                f"objective.beta is 0 at some step of the run's {num_steps}, and {self.objective.preset} needs it "
                "above 0 at every step (its optimum is pi_ref exp(r / beta)); raise beta, or its `final`, or choose a "
                "baseline without KL such as dr_grpo"
            )
        num_group, sampling = self.sampling.group_size, self.sampling
        if num_group == 1 and self.objective.preset != "reinforce" and not self.objective.is_custom:
            raise ValueError(
                f"sampling.group_size is 1, and {self.objective.preset} compares the rollouts of a group; raise it to "
                'at least 2, or choose objective.preset = "reinforce"'
            )
        if self.objective.mask_tied and num_group == 1:
            raise ValueError(
                "objective.mask_tied leaves groups out whose rewards are all equal, as those of every group are with "
                "sampling.group_size 1, and nothing would be learnt: set it to false, or raise group_size"
            )
        num_rollouts = sampling.prompts_per_batch * num_group
        if num_rollouts == 1:
            raise ValueError(
                "sampling.prompts_per_batch and sampling.group_size are 1, and reinforce compares the rollouts of a "
                "batch; raise one of them to at least 2"
            )
        self.trainer.guards.check_batch(num_rollouts)
        # the part that takes the behaviour policy for an earlier theta, right only at the policy temperature
        parts, wanted = self.objective.parts, self.model.policy_temperature
        if parts is None or self.is_offline or "behaviour" not in (parts.anchor, parts.centre):
            return  # offline nothing is sampled
        part = "anchor" if parts.anchor == "behaviour" else "centre"
        if self.searcher.distortions:
            raise ValueError(
                f'objective.{part} is "behaviour" (preset {self.objective.preset}), which takes the policy that '
                f"sampled for an earlier theta, but searcher.{self.searcher.distortions[0]} makes it another "
                f"distribution; remove that setting or choose another {part}"
            )
        if (value := self.searcher.sampling_temperature) != wanted:
            raise ValueError(
                f'objective.{part} is "behaviour" (preset {self.objective.preset}), which takes the policy that '
                f"sampled for an earlier theta, but searcher.sampling_temperature is {value:g} and "
                f"model.policy_temperature is {wanted:g}, so theta would be pulled towards a distorted copy of "
                f"itself; make the temperatures equal or choose another {part}"
            )

    @property
    def paid_by_environment(self) -> set[str]:
        """Tasks whose environment alone pays: the reward service is not asked for a score."""
        of_classes = {task for task, section in self.environments.items() if section.environment is not None}
        return of_classes - self.reward.tasks.keys()

    @property
    def samples_at_other_temperatures(self) -> bool:
        """Whether searchers sample at another temperature than the policy's: then even new rollouts are off-policy."""
        is_mixed = self.searcher.temperature_mix is not None
        return is_mixed or self.searcher.sampling_temperature != self.model.policy_temperature

    @property
    def temperature_warning(self) -> str | None:
        """Warning, with the remedy, if searchers sample at another temperature without a `temperature_mix`; or None."""
        if self.searcher.temperature_mix is not None or self.is_offline or not self.samples_at_other_temperatures:
            return None
        return (
            f"searcher.sampling_temperature is {self.searcher.sampling_temperature:g}, and "
            f"model.policy_temperature is {self.model.policy_temperature:g}: searchers sample from another policy than "
            "the one that is trained, so even new rollouts are off-policy; remove searcher.sampling_temperature, "
            "whose default is the policy temperature, unless you mean it"
        )

    @property
    def searchers_hold_start(self) -> bool:
        """Whether every searcher also holds the starting model, to compute ref log-probs."""
        return self.objective.reference_placement == "searcher"

    @property
    def num_lag_versions(self) -> int:
        """Number of publications by which searchers lag behind the newest version on purpose (`sampling.lag_steps`)."""
        return math.ceil(self.sampling.lag_steps / self.trainer.sync_interval)

    @property
    def is_offline(self) -> bool:
        """Whether the run has no searchers, and only trains on the snapshot that it begins with."""
        return self.searcher.num_searchers == 0

    @property
    def shared_server(self) -> str | None:
        """Address of the one server that all searchers started by tba would load weights into. None: each searcher has
        an engine of its own, or on Kubernetes a server in its pod."""
        openai = self.searcher.openai
        if self.searcher.engine != "openai" or (self.scaling.backend == "kubernetes" and openai.is_beside):
            return None
        return openai.url

    @property
    def constants(self) -> dict[str, JsonValue]:
        """Dotted name -> value, as JSON, of every setting in CONSTANT_SETTINGS."""
        document = self.model_dump(mode="json")
        return {name: document[name.partition(".")[0]][name.partition(".")[2]] for name in CONSTANT_SETTINGS}

    @property
    def buffer_url(self) -> str:
        """Base URL of the buffer service."""
        return (self.buffer.url or f"{self.tls.scheme}://{address(self.buffer.host, self.buffer.port)}").rstrip("/")

    @property
    def reward_url(self) -> str:
        """Base URL of the reward service."""
        return (self.reward.url or f"{self.tls.scheme}://{address(self.reward.host, self.reward.port)}").rstrip("/")
