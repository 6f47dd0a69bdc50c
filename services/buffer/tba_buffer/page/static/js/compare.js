// Other runs in the same charts: files that this page has exported, or a run folder's metrics.jsonl.

import { h } from "./dom.js";

const others = [];

export function comparedRuns() {
  return others;
}

/** The control that takes files, the list of what was taken, and another button beside them. */
export function compareControls(onChange, beside) {
  const message = h("span", { role: "status" });
  const input = h("input", { type: "file", id: "compare", multiple: true, accept: ".json,.jsonl", class: "hidden",
    onchange: async () => {
      message.textContent = "";
      for (const file of input.files) {
        try {
          others.push(parseCurves(file.name, await file.text()));
        } catch (error) {
          message.textContent += `${file.name} cannot be read: ${error.message}. `;
        }
      }
      input.value = "";
      onChange();
      list();
    } });
  const names = h("span", {});
  const list = () => names.replaceChildren(...others.map((other, at) => h("button", { onclick: () => {
    others.splice(at, 1);
    onChange();
    list();
  } }, `${other.name} ✕`)));
  list();
  return h("span", { class: "tools" }, h("label", { for: "compare", class: "button", tabindex: "0",
    onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); input.click(); } } },
  "Compare with a file (exported curves, or metrics.jsonl)"), input, beside, names, message);
}

/** Read exported curves (JSON), or the lines of metrics.jsonl. Throws an Error that says what is wrong. */
export function parseCurves(name, text) {
  const lines = text.trim().split("\n");
  const first = JSON.parse(lines.length === 1 ? text : lines[0]);
  if (Array.isArray(first.steps) && first.values) {
    const fits = (values) => Array.isArray(values) && values.length === first.steps.length;
    if (!Object.values(first.values).every(fits)) throw new Error("its curves are not as long as its steps");
    return { name: first.run ?? name, steps: first.steps, values: first.values };
  }
  if (first.kind === undefined) throw new Error("it holds neither exported curves nor lines of metrics.jsonl");
  const byStep = new Map();
  for (const line of lines) {
    const entry = JSON.parse(line);
    if (entry.kind === "step") byStep.set(entry.step, entry.metrics);
    // a resume abandons the steps after the one that it continues from
    if (entry.kind === "start") for (const step of byStep.keys()) if (step > entry.step) byStep.delete(step);
  }
  const steps = [...byStep.keys()].sort((a, b) => a - b);
  const names = new Set([...byStep.values()].flatMap((metrics) => Object.keys(metrics)));
  const values = Object.fromEntries([...names].map((one) => [one, steps.map((step) => byStep.get(step)[one] ?? null)]));
  return { name: first.run ?? name, steps, values };
}
