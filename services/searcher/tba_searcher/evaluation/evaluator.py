"""One evaluation, from its job to evaluation.json and completions.jsonl."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import tba
from tba.config import Recipe
from tba.evaluation.evaluation_job import PROGRESS, Comparison, EvaluationJob, EvaluationReport
from tba.versions import START, PolicyVersion
from tba.wire.weight_manifest import decode_manifest
from tba_searcher.engines.factory import build_engine
from tba_searcher.engines.tokenizer import open_codec
from tba_searcher.evaluation.answers import Answers, answer_all, modes_of
from tba_searcher.evaluation.perplexity import measure_likelihoods
from tba_searcher.evaluation.results import EvaluationMetrics
from tba_searcher.evaluation.scores import score_all
from tba_searcher.service import check_device

PRINT_EVERY_S = 2.0
SEED = 0
"""Seed of the engine, so that an evaluation can be repeated."""


def evaluate(recipe: Recipe, job: EvaluationJob) -> None:
    """Run one evaluation: generate and score completions, and write evaluation.json and completions.jsonl.

    Raises:
        TbaError: a model cannot be used, the engine died, or the reward service did not answer in time. There is then
            no new evaluation.json.
    """
    check_device(recipe.searcher.device)
    on_progress = Progress()
    prompts = job.prompts
    manifest = None if job.manifest is None else decode_manifest(job.manifest.read_bytes())
    on_progress(f"loading {job.subject} into the engine {recipe.searcher.engine}")
    version = START if job.version is None else PolicyVersion.parse(job.version)
    engine = build_engine(recipe, job.model, version, manifest, seed=SEED)
    try:
        if manifest is not None:
            # a table of results must be about these weights, and not about a damaged download
            engine.verify(manifest)
        answers = answer_all(engine, open_codec(recipe, job.model), recipe, prompts, on_progress=on_progress)
    finally:
        engine.close()
    del engine
    on_progress.end_part()
    # one step after the other: each model is freed before the next one is loaded
    if recipe.eval.published.perplexity and job.start is not None:
        measure_likelihoods(recipe, job.start, answers, on_progress=on_progress)
        on_progress.end_part()
    score_all(recipe, answers, on_progress=on_progress)
    on_progress.end_part()
    _write_completions(job.out / "completions.jsonl", answers)
    metrics = EvaluationMetrics(recipe, answers)
    report = EvaluationReport(
        subject=job.subject,
        version=job.version,
        params_sha256=None if manifest is None else manifest.params_sha256,
        run=recipe.run.name,
        engine=recipe.searcher.engine,
        tba_version=tba.__version__,
        finished_at_s=time.time(),
        num_prompts=len(prompts),
        refused_prompts={prompts[index].prompt_id: reason for index, reason in answers.refused.items()},
        modes={mode: metrics.report(mode) for mode in modes_of(recipe.eval.published)},
        metrics=metrics.by_name,
        references=[
            Comparison(reference=item, found=metrics.by_name.get(item.metric))
            for item in recipe.eval.published.references
        ],
        generation_s=answers.seconds,
        num_generated_tokens=sum(len(answer.tokens) for answer in answers.answers),
        settings={
            "eval.published": recipe.eval.published.model_dump(mode="json", exclude={"references"}),
            "eval.success_reward": recipe.eval.success_reward,
            "model.policy_temperature": recipe.model.policy_temperature,
            "data": recipe.data.source_name,
            "searcher.max_prompt_tokens": recipe.searcher.max_prompt_tokens,
            "searcher.max_response_tokens": recipe.searcher.max_response_tokens,
            "searcher.tasks": {name: task.model_dump(mode="json") for name, task in recipe.searcher.tasks.items()},
        },
    )
    # renamed when it is written, so that evaluation.json is always complete
    part = job.out / "evaluation.json.part"
    part.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(part, job.out / "evaluation.json")


class Progress:
    """Prints the progress of the evaluation, at most every `PRINT_EVERY_S` and at the end of each part."""

    def __init__(self) -> None:
        self._printed_s = -PRINT_EVERY_S
        self._unprinted: str | None = None

    def __call__(self, text: str) -> None:
        """Print `text`; if something was printed just now, keep it for `end_part` instead."""
        self._unprinted = text
        if time.monotonic() - self._printed_s >= PRINT_EVERY_S:
            self.end_part()

    def end_part(self) -> None:
        """Print the newest text if it has not been printed."""
        if self._unprinted is not None:
            print(PROGRESS + self._unprinted, flush=True)
            self._unprinted, self._printed_s = None, time.monotonic()


def _write_completions(path: Path, answers: Answers) -> None:
    with path.open("w", encoding="utf-8") as file:
        for answer in answers.answers:
            # texts and scores lie side by side, so that a person can check what was counted
            line = {
                "mode": answer.mode,
                "prompt_id": answers.prompts[answer.prompt].prompt_id,
                "number": answer.number,
                "text": answer.text,
                "num_tokens": len(answer.tokens),
                "finish_reason": answer.finish_reason,
                "scores": {task: score.value for task, score in answer.scores.items()},
                "unknown": {task: score.reason for task, score in answer.scores.items() if score.value is None},
                "start_nll": answer.nll,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
