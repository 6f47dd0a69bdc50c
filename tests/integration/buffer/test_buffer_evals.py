"""Evaluations: leased before visits, with exactly the version asked for, on the same held-out prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tba.api import (
    EvalRequest,
    EvalResult,
    EvalResults,
    Lease,
    LeaseRequest,
    LineageRequest,
    RunCommand,
    VersionRequest,
)
from tba.clients import BufferClient
from tba.errors import BadRequestError, ConflictError, FencedError, NotFoundError
from tba.versions import PolicyVersion
from tests.support.buffer import make_prompts, start_lineage
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.leases import lease, request_eval


def report(
    client: BufferClient, item: Lease, rewards: list[float | None], searcher_id: str = "s1", num_raised: int = 0
) -> None:
    numbers: Any = {"rewards": rewards, "num_response_tokens": [5] * len(rewards), "num_raised": num_raised or None}
    result = EvalResult(lease_id=item.lease_id, **numbers)
    assert item.eval_id is not None
    assert item.version is not None
    client.eval_results(item.eval_id, EvalResults(searcher_id=searcher_id, version=item.version, results=[result]))


def test_an_evaluation_runs_over_the_same_heldout_prompts_before_any_visit(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(5, 6)
    assert request_eval(client, lineage).eval_id == request_eval(client, lineage).eval_id
    leases = lease(client, 8).leases
    evals = [item for item in leases if item.kind != "train"]
    assert [(item.kind, item.prompt.prompt_id, item.num_rollouts) for item in evals] == [
        (kind, f"heldout-{i}", num) for i in range(3) for kind, num in (("sample", 2), ("greedy", 1))
    ]
    assert len(leases) == 8
    for item in evals:
        for _ in range(2):
            report(client, item, [1.0, None] if item.kind == "sample" else [0.0])
    info = client.get_eval(evals[0].eval_id or "")
    assert (info.state, info.num_done, info.accuracy, info.greedy_accuracy) == ("done", 3, 1.0, 0.0)
    assert (info.num_unknown, info.mean_reward, info.mean_response_tokens) == (3, 1.0, 5.0)
    assert client.run().evals == [info]
    assert request_eval(client, lineage).state == "done"
    assert client.stats().num_rollouts == 0


def test_a_greedy_answer_that_a_scorer_raised_for_is_no_success_where_it_works(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    works, broken = make_prompts(1, 3), make_prompts(0, 3)[2]
    client.upload_prompts([*works[:3], broken.model_copy(update={"task": "gsm8k"})])
    request_eval(client, start_lineage(client))
    first, *others = [item for item in lease(client, 8).leases if item.kind != "train"]
    report(client, first, [1.0, 1.0])
    for item in others:
        raised = item.kind == "greedy" and item.prompt.prompt_id != "heldout-0"
        unknown = raised or item.prompt.prompt_id == "heldout-2"
        report(client, item, [None if unknown else 1.0] * item.num_rollouts, num_raised=item.num_rollouts * unknown)
    info = client.get_eval(first.eval_id or "")
    assert (info.state, info.greedy_accuracy, info.accuracy, info.num_unknown) == ("done", 0.5, 1.0, 3)


def test_only_the_active_trainer_evaluates_and_only_versions_that_were_announced(serve_buffer: ServeBuffer) -> None:
    client, old = serve_buffer().begin(1, 3)
    client.announce_version(VersionRequest(version="1-4", token=old.token))
    for unknown in ("1-5", "999999999-1"):
        with pytest.raises(ConflictError, match=f"{unknown} was never announced"):
            request_eval(client, old, unknown)
    new = start_lineage(client, PolicyVersion(1, 4))
    with pytest.raises(FencedError):
        request_eval(client, old, "1-4")
    assert client.run().evals == []
    assert [request_eval(client, new, version).state for version in ("1-4", "0-0")] == ["pending"] * 2


def test_an_operator_has_a_version_evaluated_as_the_recipe_says(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(eval={"num_prompts": 2, "num_samples": 4, "pass_at": [2]}).with_prompts(1, 3)
    with pytest.raises(ConflictError, match="no version was announced so far"):
        client.request_eval(EvalRequest())
    lineage = start_lineage(client)
    client.announce_version(VersionRequest(version="1-4", token=lineage.token))
    latest = client.request_eval(EvalRequest())
    assert (latest.version, latest.num_prompts, latest.state, latest.existed) == ("1-4", 2, "pending", False)
    again = client.request_eval(EvalRequest())
    assert (again.eval_id, again.existed) == (latest.eval_id, True)
    older = client.request_eval(EvalRequest(version="0-0", num_prompts=3))
    assert (older.version, older.num_prompts) == ("0-0", 3)
    assert {(item.kind, item.num_rollouts) for item in lease(client, 1).leases} == {("sample", 4)}
    with pytest.raises(ConflictError, match="1-9 was never announced"):
        client.request_eval(EvalRequest(version="1-9"))


def test_a_searcher_gets_no_evaluation_of_a_version_that_it_refused(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(20, 3)
    client.announce_version(VersionRequest(version="1-4", token=lineage.token))
    refused, usable = request_eval(client, lineage, "1-4"), request_eval(client, lineage, "0-0")

    def kinds(*refused_versions: str) -> list[str | None]:
        request = LeaseRequest(searcher_id="s1", max_leases=8, refused_versions=list(refused_versions))
        return [item.eval_id for item in client.lease(request).leases]

    assert kinds("1-4") == [usable.eval_id] * 6 + [None] * 2
    assert kinds("1-4", "9-9") == [None] * 8
    leases = lease(client, 8, "s2").leases
    assert [item.eval_id for item in leases] == [refused.eval_id] * 6 + [None] * 2
    assert [item.prompt.prompt_id for item in leases[:6:2]] == ["heldout-0", "heldout-1", "heldout-2"]


def test_an_expired_evaluation_lease_goes_to_another_and_a_late_result_counts_once(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer(buffer={"lease_s": 10.0}).begin(1, 3)
    info = request_eval(client, lineage)
    old = lease(client, 6).leases
    later(client, 11.0)
    new = lease(client, 6, "s2").leases
    assert {item.visit_id for item in old} == {item.visit_id for item in new}
    report(client, old[0], [0.0, 0.0])
    for item in new:
        report(client, item, [1.0] * item.num_rollouts, "s2")
    done = client.get_eval(info.eval_id)
    assert (done.state, done.greedy_accuracy, done.accuracy) == ("done", 1.0, pytest.approx(2 / 3))


def test_an_expired_evaluation_gives_no_numbers_and_can_be_asked_for_again(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(1, 3)
    info = request_eval(client, lineage)
    old = lease(client, 2).leases
    report(client, old[0], [1.0, 1.0])
    later(client, 1001.0)
    with pytest.raises(ConflictError, match="has expired, so its results are no longer accepted"):
        report(client, old[1], [1.0])
    expired = client.get_eval(info.eval_id)
    assert (expired.state, expired.accuracy, expired.num_done) == ("expired", None, 0)
    assert all(item.kind == "train" for item in lease(client, 2).leases)
    assert request_eval(client, lineage).state == "pending"
    leases = [item for item in lease(client, 9, "s2").leases if item.kind != "train"]
    assert len(leases) == 5
    for item in leases:
        report(client, item, [1.0] * item.num_rollouts, "s2")
    assert client.get_eval(info.eval_id).accuracy == 1.0


def test_results_that_fit_no_lease_are_refused(serve_buffer: ServeBuffer) -> None:
    lineage = start_lineage(client := serve_buffer().client())
    with pytest.raises(ConflictError, match="held-out"):
        request_eval(client, lineage)
    client.upload_prompts(make_prompts(1, 3))
    info = request_eval(client, lineage)
    (item,) = lease(client, 1).leases
    with pytest.raises(BadRequestError, match="2 completions"):
        report(client, item, [1.0])
    with pytest.raises(BadRequestError, match="version"):
        report(client, item.model_copy(update={"version": "1-1"}), [1.0, 1.0])
    with pytest.raises(NotFoundError):
        report(client, item.model_copy(update={"lease_id": "lease-of-nobody"}), [1.0, 1.0])
    with pytest.raises(NotFoundError):
        client.get_eval("eval-of-nobody")
    assert client.get_eval(info.eval_id).num_done == 0


def test_a_stopping_run_still_evaluates_but_gives_no_visits(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(5, 3)
    client.command("stop", RunCommand())
    request_eval(client, lineage)
    reply = lease(client, 10)
    assert ({item.kind for item in reply.leases}, len(reply.leases)) == ({"sample", "greedy"}, 6)
    client.command("done", RunCommand(token=lineage.token))
    reply = lease(client, 10)
    assert (reply.leases, reply.run_state) == ([], "done")


def test_the_best_version_survives_a_restart_and_is_compared_on_the_prompts_that_all_evaluations_have(
    serve_buffer: ServeBuffer,
) -> None:
    section = {"num_prompts": 1, "num_prompts_final": 3, "num_samples": 2, "pass_at": [2], "best_metric": "pass@2"}
    client, lineage = serve_buffer(eval=section).begin(1, 3)
    assert client.run().best is None

    def evaluate(version: str, rewards: list[float | None]) -> None:
        if version != "0-0":
            client.announce_version(VersionRequest(version=version, token=lineage.token))
        request_eval(client, lineage, version)
        for item in lease(client, 6).leases:
            if item.kind != "train":
                number = int(item.prompt.prompt_id.rpartition("-")[2])
                report(client, item, [rewards[number]] * item.num_rollouts)

    evaluate("0-0", [0.0, 1.0, 1.0])
    assert client.run().best is not None
    evaluate("1-1", [1.0, 1.0, 1.0])
    evaluate("1-2", [1.0, 0.0, 0.0])
    before, client = client.run().best, serve_buffer(eval=section).client()  # another process over the same Redis
    info = client.run()
    assert info.best == before
    assert info.best is not None
    # equal on the one prompt: the newest
    assert (info.best.version, info.best.value, info.best.num_prompts) == ("1-2", 1.0, 1)
    assert [item.pass_at for item in info.evals] == [{2: pytest.approx(2 / 3)}, {2: 1.0}, {2: pytest.approx(1 / 3)}]
    assert not any(item.abandoned for item in info.evals)
    # the run goes back: what comes after the new lineage's start is listed, and no longer the best
    client.new_lineage(LineageRequest(trainer_id="t", parent="1-1"))
    info = client.run()
    assert [(item.version, item.abandoned) for item in info.evals] == [("0-0", False), ("1-1", False), ("1-2", True)]
    assert info.best is not None
    assert (info.best.version, info.best.value) == ("1-1", 1.0)


def test_what_a_searcher_measured_is_in_the_evaluation_and_wrong_counts_are_refused(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(1, 3)
    info = request_eval(client, start_lineage(client))
    leases = lease(client, 6).leases

    def send(item: Lease, **measured: object) -> None:
        lists = {"rewards": [1.0] * item.num_rollouts, "num_response_tokens": [5] * item.num_rollouts}
        result = EvalResult.model_validate({"lease_id": item.lease_id, **lists, **measured})
        client.eval_results(info.eval_id, EvalResults(searcher_id="s1", version="0-0", results=[result]))

    for counts in ({"num_wrong": 2}, {"num_raised": 2}, {"num_wrong": 1, "num_raised": 1}):
        with pytest.raises(BadRequestError, match="num_wrong and num_raised are 2 of 1 unknown"):
            send(leases[0], rewards=[1.0, None], **counts)
    for item in leases:
        send(item, **({"distinct_1": 0.5, "embedding_distance": 0.25} if item.kind == "sample" else {}))
    done = client.get_eval(info.eval_id)
    assert (done.distinct_1, done.distinct_2, done.embedding_distance) == (0.5, None, 0.25)
