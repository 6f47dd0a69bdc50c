// Live settings, and everything that people and guards have changed.

import { get } from "../api.js";
import { fill, fillIfChanged, h, panel, table } from "../dom.js";
import { number, time } from "../format.js";
import { askSetting } from "../commands.js";
import { state, subscribe } from "../state.js";

export function settings(place) {
  let alive = true, seen = null;
  const parts = ["live", "audit", "changes", "constants"].map(() => h("div"));
  fill(place, h("p", { class: "empty" }, "Asking for the settings."));
  const load = async () => {
    try {
      const [live, scaling, changes] = await Promise.all([get("/v1/run/settings"), get("/v1/run/searchers"), get("/v1/run/changes")]);
      if (!alive) return;
      // each by itself: a button keeps the focus while another panel has news
      if (!parts[0].isConnected) fill(place, parts);
      fillIfChanged(parts[0], [live.now, live.settings, live.recipe, state.run?.read_only], () => livePanel(live, load));
      fillIfChanged(parts[1], live.changes, () => auditPanel(live));
      fillIfChanged(parts[2], [changes.changes, scaling.changes], () => changePanel(changes, scaling));
      fillIfChanged(parts[3], state.run?.constants, () => constantPanel());
    } catch (error) {
      if (alive) fill(place, h("p", { class: "problem", role: "alert" }, error.message));
    }
  };
  const follow = ({ run }) => {
    const now = run && JSON.stringify([run.lineage, run.step, run.state, run.searchers?.revision, run.rollback]);
    if (now && now !== seen) { seen = now; load(); }
  };
  follow(state);
  const end = subscribe(follow);
  return () => { alive = false; end(); };
}

function text(value) {
  if (value === null || value === undefined) return "as the recipe says";
  if (typeof value !== "object" || value.kind === "constant") return number(value.value ?? value);
  return `${value.kind}, ${number(value.value)} to ${number(value.final)} in ${value.steps} steps`;
}

/** The settings; `changed` is called when one was changed here. */
function livePanel(live, changed) {
  return panel("Live settings", "What may change while the run continues. Each change is in the audit below.",
    table("Live settings", ["setting", "next step", "", "changed to", "recipe"], Object.entries(live.recipe).map(([name, recipe]) => [
      name, number(live.now[name]),
      state.run?.read_only ? "" : h("button", { onclick: () => askSetting(name, number(live.now[name]), text(recipe), changed) }, "Change"),
      live.settings[name] === null ? "" : text(live.settings[name]), text(recipe)]), ""));
}

function auditPanel(live) {
  return panel("Audit of settings", "Who changed what, when, why. The ledger says with which revision each step was made.",
    table("Changes of settings", ["revision", "when", "who", "after step", "what", "why"],
      [...live.changes].reverse().map((one) => [one.revision, time(one.at_s), one.role, `${one.lineage}-${one.step}`,
        Object.entries(one.changes).map(([name, change]) => `${name}: ${text(change.old)} → ${text(change.new)}`).join(", "), one.reason ?? ""]),
      "Nobody has changed a setting."));
}

function changeText({ command, old, new: now, rollback }) {
  if (!rollback) return `${old} → ${now}`;
  const said = { rollback: `to ${rollback}`, lineage: `the rollback to ${rollback} is done` };
  return said[command] ?? `${old} → ${now}, the rollback to ${rollback} is withdrawn`;
}

function changePanel(changes, scaling) {
  const rows = [
    ...changes.changes.map((one) => [one.at_s, one.role, one.command, changeText(one), `${one.lineage}-${one.step}`, one.reason ?? ""]),
    ...scaling.changes.map((one) => [one.at_s, one.role, "scale", `${one.old ?? "recipe"} → ${one.new ?? "recipe"} searchers`, `${one.lineage}-${one.step}`, one.reason ?? ""]),
  ].sort((a, b) => b[0] - a[0]).map(([at, ...rest]) => [time(at), ...rest]);
  return panel("Audit of the run", "Pauses, resumes, ends, restarts of the trainer, rollbacks, accepted losses and changes of the number of searchers.",
    table("Changes of the run", ["when", "who", "what", "change", "after step", "why"], rows, "Nothing has changed since the run began."));
}

function constantPanel() {
  return panel("Constants", "What cannot change within a run.",
    table("Constants", ["setting", "value"], Object.entries(state.run?.constants ?? {}).map(([name, value]) => [name, JSON.stringify(value)]), "None."));
}
