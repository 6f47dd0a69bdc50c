// The list of runs: state and newest numbers of each; of those that are chosen the curves over one another, recipes, logs.

import { ApiError, get, takeToken, withToken } from "./api.js";
import { align, Chart, smooth } from "./charts.js";
import { emptyText, fill, fillIfChanged, h, panel, table } from "./dom.js";
import { number, time } from "./format.js";
import { endSignIn, signIn } from "./signin.js";
import { CHARTS } from "./views/overview.js";

const PAUSE_MS = 3000, HIDDEN_PAUSE_MS = 15000, NUM_FIRST = 3, NUM_COLOURS = 6, LONG_MINUTES = 180;
const query = new URLSearchParams(location.hash.split("?")[1]);
/** What is chosen, as the address remembers it. `runs`: null for the newest ones. */
const choice = { axis: "step", smooth: "0", all: "", log: "", ...Object.fromEntries(query), runs: query.has("runs") ? query.getAll("runs") : null };
/** Name -> what is known of a chosen run, and the row that it was asked for. */
const known = new Map();
/** Name of a chosen run -> its place among the colours, which it keeps while it is chosen. */
const colours = new Map();
const charts = CHARTS.map(([title, unit, , [[metric]], range]) => [new Chart({ title, unit, howToRead: metric, range }), metric]);
const heldOut = new Chart({ title: "Held-out accuracy", unit: "accuracy", howToRead: "of evaluations" });
const places = [h("div"), h("div"), h("div"), h("div")];
let rows = [], timer = null, shownLog = "";

/** Take a choice, remember it in the address, and show it. */
function choose(changes) {
  Object.assign(choice, changes);
  const { runs, ...others } = choice;
  const query = new URLSearchParams([...(runs ?? []).map((name) => ["runs", name]), ...Object.entries(others).filter(([, value]) => value)]);
  history.replaceState(null, "", `#/?${query}`);
  cycle();
}

function chosen() {
  return (choice.runs ?? []).flatMap((name) => rows.filter((row) => row.name === name));
}

function colourOf(name) {
  for (const one of [...colours.keys()]) if (!choice.runs.includes(one)) colours.delete(one);
  const taken = [...colours.values()], free = taken.findIndex((_, at) => !taken.includes(at));
  if (!colours.has(name)) colours.set(name, free < 0 ? taken.length : free);
  return colours.get(name);
}

/** The rows of the runs that are chosen, and of the one whose log is. */
function asked() {
  return rows.filter((row) => choice.runs.includes(row.name) || choice.log.startsWith(`${row.name}/`));
}

async function cycle() {
  clearTimeout(timer);
  const problem = document.getElementById("problem");
  try {
    const found = await get("/v1/runs");
    rows = found.runs;
    document.getElementById("folder").textContent = `${rows.length} in ${found.folder}`;
    choice.runs ??= rows.filter((row) => row.step).slice(0, NUM_FIRST).map((row) => row.name);
    await Promise.all(asked().map(ask));
    problem.hidden = true;
    draw();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) return signIn(cycle);
    problem.hidden = false;
    problem.textContent = `${error.message}. The page shows the last answer and asks again.`;
    if (rows.length) draw(); // the list, where a chosen run cannot be read
  }
  clearTimeout(timer); // a choice meanwhile has begun another cycle
  timer = setTimeout(cycle, document.hidden ? HIDDEN_PAUSE_MS : PAUSE_MS);
}

/** Ask for what is new of a run, and for the log that is shown of it. */
async function ask(row) {
  const path = `/v1/runs/${encodeURIComponent(row.name)}`, stamp = JSON.stringify(row), [name, log] = choice.log.split("/");
  if (known.get(row.name)?.stamp !== stamp) known.set(row.name, { ...await get(path), stamp, row });
  if (log && name === row.name) shownLog = (await get(`${path}/logs/${encodeURIComponent(log)}`)).text;
}

function draw() {
  const [list, curves, recipes, logs] = places, [runs, logged] = [chosen(), asked()].map((some) => some.map((row) => known.get(row.name)).filter(Boolean));
  fillIfChanged(list, [rows, choice.runs], runTable);
  fillIfChanged(curves, [runs.length > 0, choice.axis, choice.smooth], () => curvePanel(runs.length > 0));
  if (runs.length) drawCurves(runs);
  fillIfChanged(recipes, [runs.map((run) => [run.row.name, run.recipe]), choice.all], () => recipePanel(runs));
  const before = logs.dataset.key;
  fillIfChanged(logs, [logged.map((run) => [run.row.name, run.logs]), choice.log, shownLog], () => logPanel(logged));
  if (logs.dataset.key !== before) logs.querySelector("pre")?.scrollTo(0, Number.MAX_SAFE_INTEGER);
}

function runTable() {
  const toggle = (name, isChosen) => choose({ runs: isChosen ? [...choice.runs, name] : choice.runs.filter((one) => one !== name) });
  return panel("All runs", "The newest first. Tick runs to draw them over one another; a name opens the page of its run. Reward: mean of the newest ten steps. Accuracy: of the newest held-out evaluation.",
    table("Runs", ["show", "name", "state", "steps", "reward", "accuracy", "started", "model", "objective"], rows.map((row) => {
      const isChosen = choice.runs.includes(row.name);
      return [h("label", { class: isChosen ? `swatch series-${colourOf(row.name) % NUM_COLOURS + 1}` : null }, h("input", { type: "checkbox", id: `choose-${row.name}`, "aria-label": `show ${row.name}`, checked: isChosen, onchange: (event) => toggle(row.name, event.target.checked) })),
        h("a", { href: withToken(`runs/${encodeURIComponent(row.name)}/`) }, row.name),
        h("span", { class: "badge", "data-state": row.state, title: row.reason }, row.state),
        `${number(row.step)}${row.num_steps ? ` of ${number(row.num_steps)}` : ""}`, number(row.reward), number(row.accuracy), time(row.started_at_s), row.model ?? "", row.objective ?? ""];
    }), "There is no run yet: tba run quickstart starts one."));
}

function select(name, label, choices) {
  return h("span", {}, h("label", { for: `choose-${name}` }, label),
    h("select", { id: `choose-${name}`, onchange: (event) => choose({ [name]: event.target.value }) },
      choices.map(([value, text]) => h("option", { value, selected: value === choice[name] }, text))));
}

function curvePanel(isAny) {
  if (!isAny) return emptyText(rows.length ? "Tick a run to see its curves, recipe and logs." : "");
  return [h("h2", {}, "Curves"), h("div", { class: "filters" }, select("axis", "Horizontal axis", [["step", "step"], ["time", "time since the start"]]),
    select("smooth", "Smoothing", [["0", "none"], ["0.6", "some"], ["0.9", "much"], ["0.97", "very much"]])),
    h("div", { class: "grid" }, charts[0][0].element, heldOut.element, charts.slice(1).map(([chart]) => chart.element))];
}

function drawCurves(runs) {
  const minutes = (run, at) => (at - run.row.started_at_s) / 60;
  const isLong = runs.some((run) => run.steps.at_s.some((at) => minutes(run, at) > LONG_MINUTES));
  const isTime = choice.axis === "time", unit = isLong ? "hours" : "minutes";
  const show = (chart, kind, metric, weight, points) => {
    chart.options.x = isTime ? unit : "step";
    chart.draw(...align(runs.map((run) => ({ label: run.row.name, place: colourOf(run.row.name), points, values: smooth(run[kind].values[metric] ?? [], weight),
      steps: isTime ? run[kind].at_s.map((at) => minutes(run, at) / (isLong ? 60 : 1)) : run[kind].steps }))), "None of these runs has it.");
  };
  for (const [chart, metric] of charts) show(chart, "steps", metric, Number(choice.smooth));
  show(heldOut, "evaluations", "accuracy", 0, true);
}

/** [key, value as text] of each leaf of a recipe. */
function leaves(value, path = "") {
  if (value === null || typeof value !== "object" || !Object.keys(value).length) return [[path, typeof value === "string" ? value : JSON.stringify(value)]];
  return Object.entries(value).flatMap(([key, one]) => leaves(one, path ? `${path}.${key}` : key));
}

function recipePanel(runs) {
  if (!runs.length) return [];
  const recipes = runs.map((run) => new Map(leaves(run.recipe)));
  const rows = [...new Set(recipes.flatMap((one) => [...one.keys()]))].filter((key) => key !== "run.name").map((key) => [key, ...recipes.map((one) => one.get(key) ?? "")]);
  const differs = ([, ...values]) => values.some((value) => value !== values[0]);
  const isOne = runs.length === 1;
  return panel(isOne ? "Recipe" : "Recipes", isOne ? "Every setting, with defaults filled in." : choice.all ? "Every setting, with defaults filled in; what differs is bold." : "The settings that differ.",
    isOne ? null : h("label", {}, h("input", { type: "checkbox", id: "choose-all", checked: Boolean(choice.all), onchange: (event) => choose({ all: event.target.checked ? "1" : "" }) }), " also what is equal"),
    h("div", { class: "low" }, table("Settings", ["setting", ...runs.map((run) => run.row.name)], rows.filter((row) => isOne || choice.all || differs(row))
      .map((row) => (choice.all && differs(row) ? [row[0], ...row.slice(1).map((value) => h("b", {}, value))] : row)), "Their recipes are equal.")));
}

function logPanel(runs) {
  if (!runs.length) return [];
  return panel("Logs", "The end of a log of the services of a run.",
    select("log", "Log ", [["", "none"], ...runs.flatMap((run) => run.logs.map((one) => [`${run.row.name}/${one}`, `${run.row.name}: ${one}`]))]),
    runs.some((run) => choice.log.startsWith(`${run.row.name}/`)) ? h("pre", { class: "text", tabindex: "0" }, shownLog || "It is empty.") : null);
}

takeToken();
addEventListener("hashchange", () => { if (takeToken()) { endSignIn(); cycle(); } });
fill(document.getElementById("main"), places);
cycle();
