// The buttons that change the run. The service checks the role; what it refuses is shown with its sentence.

import { get, send } from "./api.js";
import { h } from "./dom.js";
import { number, stepOf } from "./format.js";
import { refresh, state } from "./state.js";

/**
 * Ask for what a command needs, run it, and show what came of it: what `run` returns, where that is a text.
 * Fields: [name, label, input attributes], or [name, label, attributes, options of a list as [value, text]].
 */
export function ask(title, sentence, fields, run) {
  const inputs = fields.map(([name, , attributes, options]) => [name, h(options ? "select" : "input",
    { id: `ask-${name}`, ...attributes }, (options ?? []).map(([value, text]) => h("option", { value }, text)))]);
  const message = h("p", { role: "alert" });
  const close = () => { dialog.close(); dialog.remove(); };
  const submit = async (event) => {
    event.preventDefault();
    message.textContent = "";
    doIt.disabled = true;
    let said = null;
    try {
      said = await run(Object.fromEntries(inputs.map(([name, input]) => [name, input.value])));
    } catch (error) {
      message.textContent = error.status === 403 ? `${error.message}. Sign in with an operator's token: open this address in a new tab, which asks for one.` : error.message;
      return;
    } finally {
      doIt.disabled = false;
    }
    refresh();
    if (typeof said !== "string") return close();
    message.textContent = said;
    // what was asked is answered: a second Enter must not ask it again
    questions.remove();
    doIt.remove();
    cancel.textContent = "Close";
    cancel.focus();
  };
  const cancel = h("button", { type: "button", onclick: () => close() }, "Cancel");
  const questions = h("div", {}, inputs.map(([name, input], at) => h("p", {}, h("label", { for: `ask-${name}` }, `${fields[at][1]} `), input)));
  const doIt = h("button", { class: "primary" }, title);
  const dialog = h("dialog", { "aria-labelledby": "ask-title" }, h("h2", { id: "ask-title" }, title), h("p", {}, sentence),
    h("form", { onsubmit: submit },
      questions, message, h("p", {}, doIt, " ", cancel)));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

const REASON = ["reason", "Why (kept in the audit)", { maxlength: 500, size: 40 }];
const reasonOf = (values) => values.reason || null;

const COMMANDS = {
  pause: ["Pause", "Searchers get no new work and the trainer draws no new batch; what is under way is finished."],
  resume: ["Resume", "Searchers and trainer continue where they paused."],
  stop: ["Stop", "The run ends for good after the step in progress, with its last checkpoint and evaluation; `tba run --fork` begins another one from its weights."],
};
const POSSIBLE = { running: ["pause", "stop"], paused: ["resume", "stop"] };

function commandButton(name) {
  const [label, sentence] = COMMANDS[name];
  return h("button", { onclick: () => ask(label, sentence, [REASON], (values) =>
    send("POST", "/v1/run", { command: name, reason: reasonOf(values) })) }, label);
}

/** The buttons that the state of the run allows. */
export function commandButtons(run) {
  if (run.read_only) return [];
  const possible = POSSIBLE[run.state] ?? [];
  return [
    possible.map(commandButton),
    possible.length ? h("button", { onclick: askScale }, "Scale") : null,
    run.latest_version && run.state === "running" ? h("button", { onclick: () => askEvaluation(state.run) }, "Evaluate") : null,
    possible.length && !run.rollback ? h("button", { onclick: askRollback }, "Roll back") : null,
    h("button", { onclick: askSnapshot }, "Snapshot"),
  ];
}

function askScale() {
  ask("Scale", "How many searchers there should be; empty: as many as the recipe or the chart says.",
    [["num", "Searchers", { type: "number", min: 0, step: 1 }], REASON],
    (values) => send("PATCH", "/v1/run/searchers",
      { num_searchers: values.num === "" ? null : Number(values.num), reason: reasonOf(values) }));
}

function askEvaluation(run) {
  ask("Evaluate", `Searchers evaluate a version on held-out prompts before they go on; empty: the latest, ${run.latest_version}.`,
    [["version", "Version", { pattern: "\\d+-\\d+", placeholder: run.latest_version, title: "lineage-step, such as 1-250" }],
      ["prompts", "Held-out prompts (empty: as the recipe says)", { type: "number", min: 1, max: 10000, step: 1 }]],
    async (values) => {
      const found = await send("POST", "/v1/evals",
        { version: values.version || null, num_prompts: values.prompts === "" ? null : Number(values.prompts) });
      return found.existed ? evaluationText(found) : null;
    });
}

/** What is known of an evaluation that existed before it was asked for. */
function evaluationText(found) {
  const on = `The evaluation of ${found.version} on ${number(found.num_prompts)} held-out prompts`;
  if (found.state !== "done") return `${on} is under way: ${number(found.num_done)} are done.`;
  return `${on} exists: accuracy ${number(found.accuracy)} sampled, ${number(found.greedy_accuracy)} greedy, mean reward ${number(found.mean_reward)}.`;
}

async function askRollback() {
  let versions = [], problem = "There is no checkpoint so far (trainer.checkpoint_interval).";
  try {
    ({ versions } = await get("/v1/checkpoints"));
  } catch (error) {
    problem = error.message;
  }
  if (document.querySelector("dialog")) return; // clicked twice before the answer came
  const stays = state.run.state === "paused" ? " The run stays paused." : "";
  ask("Roll back", versions.length ? `The trainer returns to a checkpoint before its next step, in a new lineage. Steps after it stay in the ledger as abandoned; rollouts and live settings stay. Only the newest checkpoints are kept (trainer.keep_checkpoints): pause the run first, so that none goes while you decide.${stays}` : problem,
    [["version", "Checkpoint", { required: true }, versions.map((version) => [version, checkpointText(version)])], REASON],
    (values) => send("POST", "/v1/run", { command: "rollback", step: stepOf(values.version), reason: reasonOf(values) }));
}

function checkpointText(version) {
  const { step, evals } = state.run;
  const known = evals.findLast((item) => item.version === version && item.accuracy !== null);
  return `${version}, ${number(Math.max(0, step - stepOf(version)))} steps back${known ? `, accuracy ${number(known.accuracy)}` : ""}`;
}

function askSnapshot() {
  ask("Snapshot", "Save everything that is stored under a name; other runs can begin with it.",
    [["name", "Name", { required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,62}", title: "letters, digits, dot, dash, underscore" }]],
    (values) => send("POST", "/v1/snapshots", { name: values.name }));
}

/** Ask for a new value of a live setting; `changed` is called once it is stored. */
export function askSetting(name, now, recipe, changed) {
  ask(`Change ${name}`, `Now ${now}; the recipe says ${recipe}. A number, or empty for the recipe's value.`,
    [["value", "New value", { inputmode: "decimal" }], REASON],
    async (values) => {
      const text = values.value.trim(), value = text === "" ? null : Number(text);
      // JSON has no NaN: it would be sent as null, which is the recipe's value
      if (value !== null && !Number.isFinite(value)) throw new Error(`${text} is no number; write it as 0.0001 or 1e-4`);
      await send("PATCH", "/v1/run/settings", { settings: { [name]: value }, reason: reasonOf(values) });
      changed();
    });
}
