// Who takes part: searchers and the other components, weight versions, evaluations.

import { get } from "../api.js";
import { fill, fillIfChanged, h, panel, table } from "../dom.js";
import { bytes, duration, lag, number, time } from "../format.js";
import { awaited, state, subscribe } from "../state.js";

export function fleet(place) {
  const searchers = h("div"), others = h("div"), versions = h("div"), evaluations = h("div");
  place.append(searchers, others, evaluations, versions);
  let versionsAt, published = null, alive = true;
  const draw = ({ run }) => {
    if (run === null) return;
    fillIfChanged(searchers, [run.components, run.searchers, run.latest_version], () => searcherPanel(run));
    fillIfChanged(others, run.components.filter((item) => item.kind !== "searcher"), () => otherPanel(run));
    fillIfChanged(evaluations, [run.evals, run.best], () => evaluationPanel(run));
    if (versionsAt !== run.latest_version) {
      versionsAt = run.latest_version;
      get("/v1/versions").then((found) => { published = found; if (alive) draw(state); }, (error) => {
        versionsAt = undefined; // with the next update once more
        if (alive && published === null) fill(versions, h("p", { class: "problem" }, error.message));
      });
    }
    if (published !== null) {
      const users = adoption(run);
      fillIfChanged(versions, [published, [...users]], () => versionPanel(published, users));
    }
  };
  draw(state);
  const end = subscribe(draw);
  return () => { alive = false; end(); };
}

function searcherPanel(run) {
  const found = run.components.filter((item) => item.kind === "searcher");
  const info = run.searchers;
  const desired = info === null || info.desired === null ? "" : ` ${info.alive} of ${info.desired} desired are alive.`;
  return panel("Searchers", `Lag: steps between the newest version and the one that a searcher samples with. Silent ones are replaced without loss.${desired}`,
    table("Searchers", ["searcher", "state", "version", "lag", "tokens/s", "active", "queued", "unpushed", "heartbeat", "waits for"],
      found.map((item) => [item.component_id, stateText(item), item.version ?? "none",
        lag(item.version, run.latest_version),
        number(Math.round(item.gauges.tokens_per_s ?? 0)), number(item.gauges.active_slots ?? null), number(item.gauges.queued_rollouts ?? null),
        number(item.gauges.unpushed ?? null), `${duration(item.heartbeat_age_s)} ago`, waitText(item)]),
      awaited("The first searcher is awaited: it sends a heartbeat once its engine is ready.")));
}

function stateText(item) {
  return [h("span", { class: "badge", "data-state": item.alive ? "running" : state.run.read_only ? null : "failed" }, item.alive ? item.state : "silent"),
    item.note ? ` ${item.note}` : ""];
}

function waitText(item) {
  return item.wait ? `${item.wait.name}, ${duration(item.wait.for_s)}, at most ${duration(Math.max(0, item.wait.deadline_in_s))} more` : "";
}

function otherPanel(run) {
  return panel("Trainer and services", "Who else takes part. The trainer's alarms say what to do in their own words.",
    table("Components", ["component", "kind", "state", "version", "heartbeat", "waits for", "alarms"],
      run.components.filter((item) => item.kind !== "searcher").map((item) => [item.component_id, item.kind, stateText(item),
        item.version ?? "", `${duration(item.heartbeat_age_s)} ago`, waitText(item), alarms(item)]),
      awaited("The trainer is awaited: it sends a heartbeat once it has its model.")));
}

function alarms(item) {
  return Object.entries(item.gauges).filter(([name, count]) => name.startsWith("alarms_") && count)
    .map(([name, count]) => `${name.slice("alarms_".length)}: ${count}`).join(", ");
}

/** Version -> living searchers that sample with it. */
function adoption(run) {
  const users = new Map();
  for (const item of run.components) {
    if (item.kind === "searcher" && item.alive && item.version) users.set(item.version, (users.get(item.version) ?? 0) + 1);
  }
  return users;
}

function versionPanel({ versions, num_older }, users) {
  return panel("Weight versions", "What the trainer has published and the store still has, and the searchers that sample with each now: all should be at the newest or the one before.",
    table("Weight versions", ["version", "published", "size", "dtype", "searchers"], versions.map((one) => [one.version, time(one.published_at_s),
        bytes(one.num_bytes), one.dtype ?? "-", number(users.get(one.version) ?? 0)]), awaited("The first version is awaited: the trainer publishes its starting model as 0-0.")),
    num_older ? h("p", { class: "how" }, `The store has ${number(num_older)} older ones.`) : null);
}

function evaluationPanel(run) {
  return panel("Evaluations", `On held-out prompts that training never sees.${run.best === null ? "" : ` Best: version ${run.best.version} (${run.best.metric} ${number(run.best.value)}).`}`,
    table("Evaluations", ["version", "state", "accuracy, sampled", "greedy", "pass@k", "mean reward", "tokens", "unknown scores"],
      [...run.evals].reverse().map((item) => [item.version, `${item.state === "done" ? "done" : `${item.state}, ${item.num_done} of ${item.num_prompts}`}${item.abandoned ? ", abandoned: the run went back" : ""}`,
        number(item.accuracy), number(item.greedy_accuracy), Object.entries(item.pass_at).map(([k, value]) => `@${k} ${number(value)}`).join(", "),
        number(item.mean_reward), number(item.mean_response_tokens), number(item.num_unknown)]),
      awaited("The first evaluation is awaited (eval.every_steps).")));
}
