"""What of a recipe would fail after `tba run` has begun: `tba config check` looks at these as well.

Nothing is looked at twice: prompts are read, the model measured and scorers asked by the code of the run itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tba.api import Prompt
from tba.config import Recipe
from tba.config.data import DatasetSection
from tba.doctor.finding import Finding, fail, ok, skip, warn
from tba.doctor.patient import Patient
from tba.doctor.probes.disk import probe_disk
from tba.doctor.probes.gpu import check_devices, devices_of
from tba.doctor.probes.models import probe_models
from tba.doctor.probes.ports import probe_ports
from tba.doctor.probes.store import probe_store
from tba.doctor.probes.tokens import probe_tokens
from tba.errors import ConfigError, TbaError
from tba.local.prepare import measure_model
from tba.local.prepared import check_prepared, is_there
from tba.local.prompts import prompts_of
from tba.local.redis_server import find_redis_server
from tba.local.resolve import check_model
from tba.local.scored_tasks import check_tasks, tasks_of_recipe
from tba.local.trial import Trial, problem_of, try_scorers

MAX_MEASURED_PROMPTS = 2000
"""So many prompts are measured in tokens."""
MEND = "correct what the sentence names"
SLACK_S = 60.0
"""Of the scorers' start and their answers, for everything beside them."""
ELSEWHERE = "its services run elsewhere (buffer.url); `tba doctor` looks at it in their containers"
OFFLINE = "--offline: a network would be needed"
Probe = Callable[[Patient], Iterator[Finding]]


@dataclass
class RecipeProbes:
    """The probes of one recipe.

    Args:
        recipe: with absolute paths.
        offline: nothing that needs a network is looked at.
        full: networks of scorers are loaded, however large they are.
    """

    recipe: Recipe
    offline: bool
    full: bool
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def timeout_s(self) -> float:
        """Deadline of all probes together."""
        return self.recipe.local.start_timeout_s + self.recipe.reward.request_deadline_s + SLACK_S

    def first(self) -> list[tuple[str, Probe]]:
        """What the others need: run these before."""
        return [("prompts", self.probe_prompts)]

    def others(self) -> list[tuple[str, Probe]]:
        """What may run at once."""
        return [
            ("model", self.probe_model),
            ("tokenizer", self.probe_tokenizer),
            ("scorers", self.probe_scorers),
            ("devices", self.probe_devices),
            ("here", self.probe_here),
            ("tokens", probe_tokens),
            ("store", self.probe_store),
        ]

    def probe_prompts(self, patient: Patient) -> Iterator[Finding]:
        """Every prompt is read as the run reads it, and has a task that is scored."""
        hub = self._hub_datasets()
        if self.offline and hub:
            yield skip("prompts", f"{OFFLINE} for {' and '.join(hub)}")
            return
        try:
            check_prepared(self.recipe, at_start=False)
            self.prompts = prompts_of(self.recipe)
        except ConfigError as error:
            yield _failed("prompts", error)
            return
        num = {split: sum(prompt.split == split for prompt in self.prompts) for split in ("train", "heldout")}
        yield ok("prompts", f"{num['train']} to train on, {num['heldout']} held out")
        try:
            check_tasks(self.prompts, tasks_of_recipe(self.recipe))
        except ConfigError as error:
            yield _failed("prompt-tasks", error)
        else:
            yield ok("prompt-tasks", f"scored: {', '.join(sorted({prompt.task for prompt in self.prompts}))}")
        asked = {*self.recipe.eval.published.tasks, *(prompt.task for prompt in self.prompts)}
        for task in self.recipe.reward.tasks:
            if task not in asked:
                yield warn(
                    "reward-task",
                    f"no prompt has the task {task!r}, so reward.tasks.{task} scores nothing",
                    f"correct the name of reward.tasks.{task}, or the task of the prompts, or remove it",
                )

    def probe_model(self, patient: Patient) -> Iterator[Finding]:
        """The folders that the services read, and whether the starting model is the one that the recipe asks for."""
        yield from probe_models(patient)
        if not patient.is_local or self._is_fetched_at_start():
            return
        try:
            check_model(self.recipe)
        except ConfigError as error:
            yield _failed("model", error)

    def probe_tokenizer(self, patient: Patient) -> Iterator[Finding]:
        """The model's config and tokenizer load, and prompts and responses go into its context."""
        if not self.prompts:
            yield skip("tokenizer", "there are no prompts to tokenize")
            return
        try:
            if self._is_fetched_at_start() or check_model(self.recipe):
                yield skip("tokenizer", f"{self.recipe.model.path} is not there yet; `tba run` fetches or makes it")
                return
        except ConfigError:
            yield skip("tokenizer", f"there is no model at {self.recipe.model.path} to tokenize with")
            return
        if importlib.util.find_spec("tba_trainer") is None:
            yield skip("tokenizer", "the trainer service, which has the library, is not installed here")
            return
        measured = self.prompts[:MAX_MEASURED_PROMPTS]
        try:
            answer, lines = measure_model(self.recipe, measured)
        except ConfigError as error:
            yield _failed("tokenizer", error)
            return
        yield ok("tokenizer", f"{answer['architecture']}, vocabulary of {answer['vocab_size']:,}")
        num_over = sum(tokens > self.recipe.searcher.max_prompt_tokens for tokens in answer["text_tokens"])
        if num_over:
            yield warn("prompt-length", lines, "raise searcher.max_prompt_tokens, or leave those prompts out")
        else:
            yield ok("prompt-length", lines)

    def probe_scorers(self, patient: Patient) -> Iterator[Finding]:
        """A reward service of its own imports every scorer and asks it for the reward of a prompt."""
        if not patient.is_local:
            yield skip("scorer", ELSEWHERE)
            return
        try:
            trial = try_scorers(self.recipe, self.prompts, networks=self.full, http=not self.offline)
        except TbaError as error:
            yield _failed("scorer", error)
            return
        yield from _scorer_findings(trial)

    def probe_devices(self, patient: Patient) -> Iterator[Finding]:
        """The devices of the recipe, used once each."""
        devices = devices_of(self.recipe)
        named = ", ".join(f"{key} {device}" for key, device in devices.items())
        if not patient.is_local:
            yield skip("device", ELSEWHERE)
        elif importlib.util.find_spec("torch") is None:
            yield skip("device", f"torch is not installed here, so nobody can try {named}")
        else:
            try:
                check_devices(self.recipe)
            except ConfigError as error:
                yield _failed("device", error)
            else:
                yield ok("device", f"usable: {named}")

    def probe_here(self, patient: Patient) -> Iterator[Finding]:
        """What a local run needs of this machine: ports, disks, redis-server."""
        if not patient.is_local:
            yield skip("port", ELSEWHERE)
            return
        yield from (finding for finding in probe_ports(patient) if finding.level != "skip")  # port 0: any that is free
        yield from probe_disk(patient)
        try:
            yield ok("redis-server", find_redis_server(self.recipe.local.redis_server))
        except ConfigError as error:
            yield _failed("redis-server", error)

    def probe_store(self, patient: Patient) -> Iterator[Finding]:
        """The object store."""
        if self.offline and not self.recipe.store.url.startswith("file://"):
            yield skip("store", f"{OFFLINE} for {self.recipe.store.url}")
        else:
            yield from probe_store(patient)

    def _is_fetched_at_start(self) -> bool:
        """Whether the starting model is not there yet, and `tba run` fetches it."""
        path = self.recipe.model.path
        return any(item.at_start and item.path == path and not is_there(item) for item in self.recipe.prepare)

    def _hub_datasets(self) -> list[str]:
        """Data sets that only a network, or the library's cache, has."""
        data = self.recipe.data
        sections: Mapping[str, DatasetSection | None] = {"data.train": data.train, "data.heldout": data.heldout}
        return [
            f"{key} {section.dataset}"
            for key, section in sections.items()
            if section is not None and section.dataset is not None and not Path(section.dataset).is_dir()
        ]


def _failed(code: str, error: TbaError) -> Finding:
    """Sentences of errors end with what to do."""
    found, _, mend = str(error).rpartition("; ")
    return Finding(code, "fail", found or mend, mend if found else MEND)


def _scorer_findings(trial: Trial) -> Iterator[Finding]:
    for task, why in trial.left_out.items():
        yield skip("scorer", f"task {task!r}: {why}; `tba config check --full` asks it, without --offline")
    for task, results in trial.scored.items():
        errors = [f"{result.error.reason}: {result.error.detail}" for result in results if result.error is not None]
        if (problem := problem_of(results)) is not None:
            yield fail(
                "scorer",
                f"task {task!r} scores nothing: {problem}",
                f"correct reward.tasks.{task}, or the data of the prompts",
            )
        elif errors:
            yield warn(
                "scorer",
                f"task {task!r}: {len(errors)} of {len(results)} made-up responses have no score ({errors[0]})",
                "nothing, if such a response shall have none; else correct the scorer",
            )
        else:
            rewards = ", ".join(f"{result.reward:g}" for result in results)
            yield ok("scorer", f"task {task!r}: made-up responses score {rewards}")
