"""The stages of the Compose test, in order; each prints what it found and how long it took."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.system.cluster.kube import StageError, until
from tests.system.cluster.stages import Report
from tests.system.compose.engine import ROOT, Project, run

SEARCHERS = ("searcher-cpu-1", "searcher-cpu-2")
KILLED = ("searcher-cpu-1", "buffer", "redis", "trainer-cpu", "reward", "objectstore")
STEPS_AFTER_A_KILL = 3
RECOVERY_DEADLINE_S = 600.0
FIRST_STEP_LIMIT_S = 180.0
MODULES = {
    "buffer": "tba tba_buffer",
    "reward": "tba tba_reward",
    "searcher": "tba_cli tba.clients tba_cli.setup tba.store tba.weights tba_searcher",
    "trainer": "tba_cli tba.clients tba_cli.setup tba.store tba.weights tba_trainer",
}
LEFT_OUT = "tba_cli.local tba.server.app tba_reward.model_server.child tba_searcher.engines.vllm"
"""Modules that need an extra that the image does not have; they are imported only where they are used."""
IMPORT_ALL = """
import importlib, pkgutil, sys
names, left_out = sys.argv[1].split(), tuple(sys.argv[2].split())
for name in names:
    for found in pkgutil.walk_packages(importlib.import_module(name).__path__, name + '.'):
        if not found.name.startswith(left_out) and not found.name.endswith('__main__'):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if not (error.name or '').startswith('tba_cli.local'):  # commands of the launcher say so (tba_cli.main)
                    raise
"""


def images(report: Report, tag: str) -> None:
    """Every image: its user, health check, labels, and that it holds whatever its code imports."""
    for service in (*MODULES, "objectstore"):
        image = f"tba-{service}:{tag}"
        with report.stage(f"image {image}") as found:
            about = json.loads(run("docker", "image", "inspect", image))[0]
            config, version = about["Config"], about["Config"]["Labels"].get("org.opencontainers.image.version")
            if config["User"] != "65532:65532" or not config.get("Healthcheck") or version != tag:
                raise StageError(f"{image}: user {config['User']}, version {version}, {config.get('Healthcheck')}")
            found["mb"] = round(about["Size"] / 1e6)
            if service in MODULES:
                hardened = ["--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none"]
                inside = ["python", "-c", IMPORT_ALL, MODULES[service], LEFT_OUT]
                run("docker", "run", *hardened, "--entrypoint", inside[0], image, *inside[1:], timeout_s=600)
                said = run("docker", "run", *hardened, "--entrypoint", "tba", image, "--version")
                if tag not in said:
                    raise StageError(f"{image}: `tba --version` says {said!r}, not {tag}")


def start(project: Project, report: Report) -> None:
    begun_s = time.monotonic()
    with report.stage("docker compose up"):
        project.compose("up", "--detach", "--no-build")
    with report.stage("to the first optimizer step") as found:
        until("the run is at step 1", lambda: project.step() >= 1, deadline_s=900)
        found["since_up_s"] = round(time.monotonic() - begun_s, 1)
        found["limit_s"] = FIRST_STEP_LIMIT_S


def locked_down(project: Project, report: Report) -> None:
    """Nothing runs as root or writes where it should not; the API wants a token and listens on loopback alone."""
    with report.stage("locked down") as found:
        for service in ("buffer", "reward", "trainer-cpu", "searcher-cpu-1", "objectstore", "redis"):
            about = project.inspect(service)
            host = about["HostConfig"]
            if not host["ReadonlyRootfs"] or host["CapDrop"] != ["ALL"] or host["Memory"] <= 0 or not host["Init"]:
                raise StageError(f"{service}: its root can be written, or it has capabilities or no limit")
            said = run("docker", "exec", about["Id"], "sh", "-c", "id -u; touch /x 2>&1 || true")
            uid, _, touched = said.partition("\n")
            if uid == "0" or "ead-only" not in touched:
                raise StageError(f"{service}: runs as {uid}, `touch /x` says {touched!r}")
            for bindings in (about["NetworkSettings"]["Ports"] or {}).values():
                if any(binding["HostIp"] != "127.0.0.1" for binding in bindings or []):
                    raise StageError(f"{service} listens beyond loopback: {bindings}")
        try:
            urllib.request.urlopen(f"{project.url}/v1/run", timeout=30)
            raise StageError("GET /v1/run without a token is answered")
        except urllib.error.HTTPError as error:
            found["without_token"] = error.code
            if error.code != 401:
                raise StageError(f"GET /v1/run without a token gives {error.code}, not 401") from None


def kill_each(project: Project, report: Report) -> None:
    """kill -9 of one service after the other while training; steps continue and nothing acknowledged is lost."""
    for service in KILLED:
        before = until("the buffer answers", project.info, deadline_s=RECOVERY_DEADLINE_S)
        if before.state == "done":
            raise StageError(f"the run was over before {service} could be killed; give it more steps")
        num_rollouts, begun_s = project.rollouts(), time.monotonic()
        num_restarts = project.inspect(service)["RestartCount"]
        with report.stage(f"kill -9 {service}") as found:
            project.kill(service)

            def is_back(service: str = service, num_restarts: int = num_restarts) -> bool:
                about = project.inspect(service)
                return about["RestartCount"] > num_restarts and about["State"]["Running"]

            until(f"{service} runs again", is_back, deadline_s=RECOVERY_DEADLINE_S)
            found["restarted_s"] = round(time.monotonic() - begun_s, 1)

            def continues(lineage: int = before.lineage, step: int = before.step, service: str = service) -> bool:
                now = project.info()
                if now is None:
                    return False
                if service != "trainer-cpu":
                    return now.step >= step + STEPS_AFTER_A_KILL or now.state == "done"
                # a new trainer begins at its last checkpoint, so its steps count from there
                parent = int((now.parents.get(now.lineage) or "0-0").split("-")[1])
                return now.lineage > lineage and now.step >= parent + STEPS_AFTER_A_KILL

            until("steps continue", continues, deadline_s=RECOVERY_DEADLINE_S)
            lost = num_rollouts - project.rollouts()
            if lost > 0:
                raise StageError(f"{lost} acknowledged rollouts are gone after {service} was killed")
            found |= {"next_step_s": round(time.monotonic() - begun_s, 1), "step": project.step()}


def finish(project: Project, report: Report, *, deadline_s: float, least_accuracy: float) -> None:
    with report.stage("to the end of the run") as found:
        until("the run is done", lambda: (i := project.info()) and i.state == "done", deadline_s=deadline_s, every_s=2)
        info = project.info()
        evals = [item for item in info.evals if item.state == "done"] if info else []
        if info is None or len(evals) < 2:
            raise StageError("the run has no evaluations at its end")
        final = max(evals, key=lambda item: int(item.version.split("-")[1]))
        found |= {"steps": info.step, "lineages": info.lineage, "final": round(final.accuracy or 0.0, 3)}
        found |= {"final_greedy": final.greedy_accuracy, "prompts": final.num_prompts}
        if (final.accuracy or 0.0) < least_accuracy:
            raise StageError(f"the final accuracy {final.accuracy} is below {least_accuracy}")
    with report.stage("tba ledger check") as found:
        words = ("ledger", "check", "--url", project.url, "--token-file", str(project.tokens_file))
        answer = subprocess.run(
            [sys.executable, "-m", "tba_cli.main", *words], capture_output=True, text=True, timeout=300, cwd=ROOT
        )
        if answer.returncode != 0:
            raise StageError(f"tba ledger check: {answer.stdout}{answer.stderr}")
        found["says"] = answer.stdout.strip().splitlines()[-1]
    with report.stage("the trainer ended, searchers wait") as found:
        until("the trainer has ended", lambda: not project.inspect("trainer-cpu")["State"]["Running"], deadline_s=120)
        states = {name: project.inspect(name)["State"] for name in ("trainer-cpu", *SEARCHERS)}
        found["trainer_exit"] = states["trainer-cpu"]["ExitCode"]
        if found["trainer_exit"] != 0 or not all(states[name]["Running"] for name in SEARCHERS):
            raise StageError(f"at the end: {states}")
    with report.stage("set up again: no change") as found:
        for service in ("setup-models", "setup-prompts"):
            project.compose("run", "--rm", "--no-deps", service, timeout_s=900)
        found["state"] = (project.info() or info).state


def stop(project: Project, report: Report) -> None:
    """`down` keeps every volume, since each has a name; after `down --volumes` nothing is left."""
    with report.stage("docker compose down") as found:
        used = project.used_volumes()
        project.compose("down", "--timeout", "60")
        kept = project.volumes()
        if gone := used - kept:
            raise StageError(f"`down` leaves these volumes without a name or removes them: {', '.join(sorted(gone))}")
        found["kept"] = len(kept)
        project.compose("down", "--volumes", "--timeout", "60")
        if left := project.left_over():
            raise StageError(f"still there after `down --volumes`: {', '.join(left)}")
        found["left"] = 0
