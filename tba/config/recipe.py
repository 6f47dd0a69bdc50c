"""The recipe: one TOML file that describes a whole run, read by every service.

Precedence: defaults < file < environment (`TBA_BUFFER__PORT=8700`) < `--set buffer.port=8700`. Unknown keys are
refused everywhere; the message names the key, the value and the place.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from tba.config.data import DataSection, PrepareItem
from tba.config.evaluation import EvalSection
from tba.config.objective import ObjectiveSection
from tba.config.renamed_keys import new_name, new_value, with_new_names
from tba.config.reward import BUILT_IN_TASKS, RewardSection
from tba.config.schedules import Schedule
from tba.config.searcher import VLLM_MAX_TEMPERATURE, ScalingSection, SearcherSection
from tba.config.sections import (
    AuthSection,
    BufferSection,
    CostSection,
    LocalSection,
    ModelSection,
    RunSection,
    SamplingSection,
    StoreSection,
    TlsSection,
)
from tba.config.supervised import RewardTrainingSection, SftSection, SupervisedItem, check_scorers
from tba.config.trainer import TrackingSection, TrainerSection
from tba.errors import ConfigError
from tba.fields import StrictModel

ENV_PREFIX = "TBA_"
MAX_LATE_SHARE = 0.03
"""Of a rehearsal: where real engines or the trainer are behind their pace for more of the time, it says nothing about
the rehearsed GPUs."""
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
"""Settings that are constant within a run."""
HUB_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""ORG/NAME."""


class Recipe(StrictModel):
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    buffer: BufferSection = BufferSection()
    sampling: SamplingSection = SamplingSection()
    reward: RewardSection = RewardSection()
    searcher: SearcherSection = SearcherSection()
    objective: ObjectiveSection = ObjectiveSection()
    trainer: TrainerSection = TrainerSection()
    eval: EvalSection = EvalSection()
    tracking: TrackingSection = TrackingSection()
    prepare: list[PrepareItem] = Field(default_factory=list)
    """Models and data sets that must lie on the disk before a run: `tba data prepare` fetches or makes them."""
    sft: list[SftSection] = Field(default_factory=list)
    """Language models that are fine-tuned before a run, the starting model or a victim (`tba sft`)."""
    reward_training: list[RewardTrainingSection] = Field(default_factory=list)
    """Reward models and classifiers that are trained before a run (`tba train-reward`)."""
    store: StoreSection = StoreSection()
    auth: AuthSection = AuthSection()
    tls: TlsSection = TlsSection()
    scaling: ScalingSection = ScalingSection()
    cost: CostSection = CostSection()
    local: LocalSection = LocalSection()
    log_format: Literal["auto", "console", "json"] = "auto"
    """Log lines: JSON, console, or console on a terminal and JSON otherwise."""

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        self.data.check_source()
        if self.run.fork_version is not None and self.run.snapshot is None:
            raise ValueError("run.fork_version names a version of the run in run.snapshot: give that too")
        # these rules are between sections: a section alone cannot know them
        self._check_snapshot()
        self._check_offline()
        self._check_unused()
        self._check_supervised()
        if self.trainer.compile and self.trainer.num_processes > 1:
            raise ValueError(
                f"trainer.compile = true is for one process, and trainer.num_processes is "
                f"{self.trainer.num_processes}; set trainer.compile to false or trainer.num_processes to 1"
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
        self._check_objective()
        return self

    def _check_supervised(self) -> None:
        check_scorers(self.reward_training, [spec for task in self.reward.tasks.values() for spec in task.scorers])
        items = [*self.sft, *self.reward_training]
        # "./a" and "a/" are "a"
        made = [PurePath(item.path or self.model.path) for item in items]
        others = {PurePath(item.path) for item in self.prepare}
        others |= {PurePath(self.model.path)} if self.model.warm_start else set()
        for index, (item, path) in enumerate(zip(items, made, strict=True)):
            if path in others or path in made[:index]:
                raise ValueError(
                    f"{path} is made twice: by an item of [[sft]] or [[reward_training]], and by another one, "
                    "[[prepare]] or [model.warm_start]; give each a path of its own"
                )
            inside = next((other for other in (*made, *others) if path in other.parents), None)
            if inside is not None:
                raise ValueError(
                    f"{inside} lies in {path}, which is replaced as a whole when it is trained anew; give it a path "
                    "elsewhere"
                )
            if item.base is not None and PurePath(item.base) in made[index:]:
                raise ValueError(
                    f"{path} starts from {item.base}, which is made at the same time or after it; items are made in "
                    "the order of the recipe, [[sft]] before [[reward_training]]: put the base first"
                )

    def _check_snapshot(self) -> None:
        # a view of the snapshot draws nothing
        is_drawn = self.run.snapshot is not None and self.buffer.read_only is None
        if is_drawn and self.objective.reference_placement == "searcher":
            raise ValueError(
                f'objective.reference_placement = "searcher" leaves ref log-probs to searchers, and the rollouts of '
                f"run.snapshot = {self.run.snapshot!r} have none of this run's starting model, so each of them would "
                'be refused at every draw; choose "trainer"'
            )

    def _check_offline(self) -> None:
        if not self.is_offline:
            return
        if self.sampling.alternate:
            raise ValueError("sampling.alternate takes turns with searchers, and searcher.num_searchers is 0")
        if self.objective.reference_placement == "searcher":
            raise ValueError(
                'objective.reference_placement = "searcher" leaves ref log-probs to searchers, and '
                'searcher.num_searchers is 0; choose "trainer"'
            )
        if self.trainer.export_version == "best":
            raise ValueError(
                'trainer.export_version = "best" needs evaluations, which searchers make, and searcher.num_searchers '
                'is 0; choose "last"'
            )

    def _check_unused(self) -> None:
        """Refuse settings without any effect."""
        if self.searcher.abort_stale_requests and self.buffer.max_policy_age_steps is None:
            raise ValueError(
                "searcher.abort_stale_requests aborts what would be older than buffer.max_policy_age_steps, which is "
                "not set; set it, or remove abort_stale_requests"
            )
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
        tasks = sorted({*self.reward.tasks, *BUILT_IN_TASKS})
        for task in self.searcher.tasks:
            if task not in tasks:
                # a misspelt task would silently keep the defaults of every other task
                near = difflib.get_close_matches(task, tasks, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"searcher.tasks.{task} is for a task that nothing scores, so no prompt can have it; known are "
                    f"{', '.join(tasks)} (reward.tasks and the built-in ones){hint}"
                )
        temperature = self.model.policy_temperature
        if self.searcher.engine == "vllm" and temperature > VLLM_MAX_TEMPERATURE:
            raise ValueError(
                f"model.policy_temperature is {temperature:g}, and vLLM samples at most at {VLLM_MAX_TEMPERATURE:g}: "
                "no evaluation would be possible; lower it"
            )
        if self.trainer.export_version == "best" and not self.trainer.export:
            raise ValueError(
                'trainer.export_version = "best" says which version is exported, and trainer.export is false; remove '
                "one of them"
            )

    def _check_objective(self) -> None:
        self.objective.check_steps(self.trainer.num_steps)
        num_group, sampling = self.sampling.group_size, self.sampling
        if num_group == 1 and self.objective.preset != "reinforce" and not self.objective.is_custom:
            raise ValueError(
                f"sampling.group_size is 1, and {self.objective.preset} compares the rollouts of a group; raise it to "
                'at least 2, or choose objective.preset = "reinforce"'
            )
        if sampling.min_distinct > num_group:
            raise ValueError(
                f"sampling.min_distinct is {sampling.min_distinct}, more than the {num_group} rollouts of a group "
                "(sampling.group_size); lower it"
            )
        if sampling.skip_tied_groups and num_group == 1:
            raise ValueError(
                "sampling.skip_tied_groups leaves groups out whose rewards are all equal, as those of every group are "
                "with sampling.group_size 1: set it to false, or raise group_size"
            )
        num_rollouts = sampling.prompts_per_batch * num_group
        if num_rollouts == 1:
            raise ValueError(
                "sampling.prompts_per_batch and sampling.group_size are 1, and reinforce compares the rollouts of a "
                "batch; raise one of them to at least 2"
            )
        self.trainer.guards.check_batch(num_rollouts)
        self._check_temperatures()

    def _check_temperatures(self) -> None:
        """Refuse a distorted behaviour policy where the objective takes it for theta."""
        part, wanted = self.objective.takes_behaviour_for_theta, self.model.policy_temperature
        if part is None or self.is_offline:  # offline nothing is sampled
            return
        value_of = "trainer" if part == "old_policy" else "behaviour"
        if self.searcher.distortions:
            raise ValueError(
                f'objective.{part} is "{value_of}" (preset {self.objective.preset}), which takes the policy that '
                f"sampled for an earlier theta, but searcher.{self.searcher.distortions[0]} makes it another "
                f"distribution; remove that setting or choose another {part}"
            )
        found = self.searcher.sampling_temperature
        for value in (found.lowest(self.trainer.num_steps), found.highest):
            if value != wanted:
                raise ValueError(
                    f'objective.{part} is "{value_of}" (preset {self.objective.preset}), which takes the policy that '
                    f"sampled for an earlier theta, but searcher.sampling_temperature is {value:g} at some step and "
                    f"model.policy_temperature is {wanted:g}, so theta would be pulled towards a distorted copy of "
                    f"itself; make the temperatures equal or choose another {part}"
                )

    @property
    def searchers_hold_start(self) -> bool:
        """Whether every searcher holds the starting model."""
        return bool(self.why_searchers_hold_start)

    @property
    def why_searchers_hold_start(self) -> list[str]:
        """The settings that ask for the starting model in every searcher: ref log-probs, the KL of evaluations."""
        asking = {
            'objective.reference_placement = "searcher"': self.objective.reference_placement == "searcher",
            "eval.kl_to_reference = true": self.eval.kl_to_reference,
        }
        return [setting for setting, asks in asking.items() if asks]

    @property
    def rehearsal(self) -> str | None:
        """What is paced, in words, for every place that shows the run; None where it runs as fast as it can."""
        found = []
        if (pace := self.searcher.pace_tokens_per_s) is not None:
            found.append(f"searchers paced at {pace:g} tokens/s each")
        if (step_s := self.trainer.pace_step_s) is not None:
            found.append(f"trainer paced at {step_s:g} s per step")
        return f"rehearsal: {', '.join(found)}; its times are those of the rehearsed GPUs" if found else None

    @property
    def is_offline(self) -> bool:
        """Whether nothing is generated, and the run only trains on the snapshot that it begins with."""
        return self.searcher.num_searchers == 0

    @property
    def supervised(self) -> dict[str, SupervisedItem]:
        """The folders that `[[sft]]` and `[[reward_training]]` make, in the order in which they are made."""
        sft = {item.path or self.model.path: item for item in self.sft}
        return {**sft, **{item.path: item for item in self.reward_training}}

    @property
    def warm_start_seed(self) -> int:
        """The seed of a starting model made on this machine: its own, or the run's."""
        section = self.model.warm_start
        return self.run.seed if section is None or section.seed is None else section.seed

    @property
    def constants(self) -> dict[str, JsonValue]:
        """The settings that are constant within a run, as JSON: another value makes another run."""
        document = self.model_dump(mode="json")
        return {name: document[name.partition(".")[0]][name.partition(".")[2]] for name in CONSTANT_SETTINGS}

    @property
    def buffer_url(self) -> str:
        """Base URL of the buffer service."""
        return (self.buffer.url or f"{self.tls.scheme}://{self.buffer.host}:{self.buffer.port}").rstrip("/")

    @property
    def reward_url(self) -> str:
        """Base URL of the reward service."""
        return (self.reward.url or f"{self.tls.scheme}://{self.reward.host}:{self.reward.port}").rstrip("/")


def load_recipe(
    path: str | Path,
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    stand_ins: Mapping[str, Any] | None = None,
) -> Recipe:
    """Read a recipe from TOML, or a resolved config from JSON.

    Args:
        path: the file; `.json` is read as JSON, anything else as TOML.
        sets: `section.key=value` overrides, `section.N.key=value` of item N of an array; the value is TOML, or a bare
            string.
        environ: defaults to the process environment.
        stand_ins: sections that the caller does not use, for a file without them.

    Raises:
        ConfigError: the file is missing or unreadable, or a key or value is wrong.
    """
    document = read_document(Path(path))
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            # two underscores part section and key, since keys have single ones
            _set(document, keys, parse_toml_value(text), where=f"environment variable {name}")
    for item in sets:
        dotted, sep, text = item.partition("=")
        if not sep or "." not in dotted:
            raise ConfigError(f"--set {item!r} is not of the form section.key=value")
        _set(document, dotted.strip().split("."), parse_toml_value(text), where=f"--set {item}")
    return _with_hub_model(parse_recipe({**(stand_ins or {}), **document}, where=str(path)))


def _with_hub_model(recipe: Recipe) -> Recipe:
    """Turn `model.path = "org/name"` into an item of `[[prepare]]` that `tba run` fetches, unless it is a folder here.

    Raises:
        ConfigError: a revision is given, and model.path is a folder.
    """
    section = recipe.model
    is_folder = (
        section.warm_start is not None
        # `tba data prepare` makes the folders below models/, which need not be there yet
        or section.path.startswith("models/")
        or Path(section.path).is_dir()
        or any(item.path == section.path for item in recipe.prepare)
        or section.path in recipe.supervised
    )
    if is_folder or not HUB_MODEL.fullmatch(section.path):
        if section.revision is not None:
            raise ConfigError(
                f"model.revision is {section.revision!r}, and model.path {section.path!r} is a folder, which has none; "
                "remove the revision, or give ORG/NAME on the hub as model.path"
            )
        return recipe
    item = PrepareItem(
        path=f"models/{section.path}", kind="model", hub=section.path, revision=section.revision, at_start=True
    )
    model = section.model_copy(update={"path": item.path, "revision": None})
    others = [other for other in recipe.prepare if other.path != item.path]
    return recipe.model_copy(update={"model": model, "prepare": [item, *others]})


def parse_recipe(document: Mapping[str, Any], *, where: str) -> Recipe:
    """Validate a recipe that is already a map.

    Raises:
        ConfigError: naming the first key that is wrong, its value and what to do.
    """
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain_validation_error(error, Recipe)}") from None
    if recipe.model.warm_start is None:
        return recipe
    # the starting model is cached per seed
    path = recipe.model.path.replace("{seed}", str(recipe.warm_start_seed))
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path})})


def read_document(path: Path) -> dict[str, Any]:
    """Read a recipe file without validation.

    Raises:
        ConfigError: it is missing, or is neither TOML nor (`.json`) JSON.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; `tba run quickstart` runs one that ships with tba") from None
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}") from None
    try:
        text = raw.decode()
        if path.suffix != ".json":
            return tomllib.loads(text)
        document = json.loads(text)
        # a resolved config: one that an older release has stored must stay readable, or its run could not resume
        return with_new_names(document) if isinstance(document, dict) else document
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid: {error}") from None


def parse_toml_value(text: str) -> Any:
    """Parse a value as people type it: TOML, or else a bare string."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _set(document: dict[str, Any], keys: Sequence[str], value: Any, *, where: str) -> None:
    if (renamed := new_name(keys)) is not None:
        raise ConfigError(f"{where}: {_renamed_text('.'.join(keys), renamed)}")
    at: Any = document
    for place, key in enumerate(keys):
        if isinstance(at, list) and not (key.isdecimal() and int(key) < len(at)):
            raise ConfigError(
                f"{where}: {key!r} is no item of {keys[place - 1]!r}, which has {len(at)}, numbered from 0"
            )
        if not isinstance(at, list | dict):
            raise ConfigError(f"{where}: {keys[place - 1]!r} is a value, not a section")
        index: Any = int(key) if isinstance(at, list) else key
        if place == len(keys) - 1:
            at[index] = value
        else:
            at = at[index] if isinstance(at, list) else at.setdefault(index, {})


def explain_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Return what is wrong with a document of this model: the first key, its value and what to do."""
    first = error.errors()[0]
    loc = [str(part) for part in first["loc"]]
    key = ".".join(loc)
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    message = first["msg"].removeprefix("Value error, ")
    if not loc:  # a rule between sections names its keys and values itself
        return f"{message}{more}"
    if first["type"] == "extra_forbidden":
        # only the recipe has names of older releases
        if model is Recipe and (renamed := new_name(loc)) is not None:
            return f"{_renamed_text(key, renamed)}{more}"
        near = difflib.get_close_matches(loc[-1], _known_keys(loc[:-1], model), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; remove it or correct its name"
        # the message goes to logs, and a misspelt key may hold a secret
        is_secret = isinstance(first["input"], str) and re.search(r"password|secret|token|credential", loc[-1], re.I)
        return f"unknown key {key!r} (value {'not shown' if is_secret else repr(first['input'])}){hint}{more}"
    if first["type"] == "missing":
        return f"key {key!r} is missing{more}"
    if (
        model is Recipe
        and isinstance(first["input"], str)
        and (now := new_value(loc, first["input"])) != first["input"]
    ):
        return f"value {first['input']!r} of {key!r} is now {now!r}: write the new name{more}"
    if first["type"] == "value_error" and _model_at(loc, model) not in (
        None,
        Schedule,
    ):  # so does the rule of a section
        return f"{key}: {message}{more}"
    return f"key {key!r} has the value {first['input']!r}: {message}{more}"


def _renamed_text(old: str, new: str) -> str:
    return f"key {old!r} is now {new!r}: write the new name"


def _known_keys(path: Sequence[str], model: type[BaseModel]) -> list[str]:
    at = _model_at(path, model)
    return [] if at is None else list(at.model_fields)


def _model_at(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model of a section; None for a plain value."""
    for part in path:
        field = model.model_fields.get(part)
        inner = None if field is None else _model_of(field.annotation)
        if inner is None:
            return None
        model = inner
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for m in map(_model_of, getattr(annotation, "__args__", ())) if m), None)
