// The table of stored rollouts, with filters that the address remembers.

import { address, get, getFile } from "../api.js";
import { download, fill, go, h, table } from "../dom.js";
import { gold, lastTurn, number, oneLine, time } from "../format.js";
import { awaited, runKnown, state } from "../state.js";

const PAGE = 50, TEXT_CHARS = 2000;
/** name in the query, label, how it is asked for. */
const FILTERS = [
  ["order", "Order", { choices: [["newest", "newest"], ["best", "best"], ["worst", "worst"], ["oldest", "oldest"]] }],
  ["status", "Reward", { choices: [["", "any"], ["scored", "scored"], ["pending", "pending"], ["failed", "failed"]] }],
  ["finish_reason", "Ended by", { choices: [["", "any"], ["stop", "stop"], ["stop_string", "stop string"], ["length", "length (cut off)"], ["abort", "abort"]] }],
  ["contains", "Text contains", { size: 18, maxlength: 200 }],
  ["task", "Task", { size: 12 }],
  ["environment", "Environment", { size: 12 }],
  ["stop_condition", "Stop condition", { size: 16, placeholder: "max_turns" }],
  ["failure_boundary", "Failed in", { choices: [["", "any"], ...["engine", "environment", "tool", "sandbox", "judge", "limit"].map((name) => [name, name])] }],
  ["prompt_id", "Prompt", { size: 12 }],
  ["searcher_id", "Searcher", { size: 12 }],
  ["from_version", "From version", { size: 7, placeholder: "1-0", pattern: "\\d+-\\d+", title: "lineage-step, such as 1-250" }],
  ["to_version", "To version", { size: 7, placeholder: "1-250", pattern: "\\d+-\\d+", title: "lineage-step, such as 1-250" }],
  ["min_reward", "Reward from", { size: 6, inputmode: "decimal" }],
  ["max_reward", "Reward to", { size: 6, inputmode: "decimal" }],
];
const NUM_FIRST = 4;
/** The rollouts that the last list has shown, and where it is: one rollout has links to the next and the previous one. */
export const trail = { ids: [], hash: "#/rollouts" };

export function rollouts(place, { query }) {
  const chosen = Object.fromEntries(FILTERS.map(([name]) => [name, query.get(name) ?? ""]));
  const result = h("div", {}), shown = [];
  place.append(
    h("h2", {}, "Rollouts"),
    h("p", { class: "how" }, "What the model answered. Sort by worst to find what fails, by best to find what is rewarded for the wrong reason."),
    form(chosen), columnChoice(() => redraw()), result);
  let cursor = null, alive = true, asking = false;
  const list = h("div", { class: "rows" });
  const redraw = () => { if (shown.length || !cursor) fill(list, rolloutTable(shown)); };
  const more = async () => {
    if (asking) return;
    asking = true;
    try {
      const page = await get("/v1/rollouts", { ...chosen, limit: PAGE, text_chars: TEXT_CHARS, cursor });
      await runKnown;
      if (!alive) return;
      shown.push(...page.rollouts);
      cursor = page.next;
      Object.assign(trail, { ids: shown.map((item) => item.rollout_id), hash: location.hash });
      redraw();
      fill(result, shown.length || !cursor ? list : h("p", { class: "empty" }, "None so far; there is more to look through."), h("p", { role: "status" },
        `${shown.length} shown${page.num_read > page.rollouts.length ? `, ${number(page.num_read)} read for the last page` : ""}. `,
        cursor ? h("button", { onclick: more }, "More") : "That is all."));
    } catch (error) {
      if (alive) fill(result, shown.length ? list : null, h("p", { class: "problem", role: "alert" }, error.message, " ",
        h("button", { onclick: more }, "Ask again")));
    } finally {
      asking = false;
    }
  };
  fill(result, h("p", { class: "empty" }, "Asking for rollouts."));
  more();
  return () => { alive = false; };
}

function form(chosen) {
  const inputs = FILTERS.map(([name, label, how]) => {
    const id = `filter-${name}`;
    const input = how.choices
      ? h("select", { id, name: `by-${name}` }, how.choices.map(([value, text]) => h("option", { value, selected: value === chosen[name] }, text)))
      : h("input", { id, name: `by-${name}`, value: chosen[name], ...how });
    return h("span", {}, h("label", { for: id }, label), input);
  });
  const submit = (event) => {
    event.preventDefault();
    const values = fieldsOf(event.target);
    if (values.order === "newest") delete values.order;
    go(address("#/rollouts", values));
  };
  const isFurther = FILTERS.slice(NUM_FIRST).some(([name]) => chosen[name]);
  return h("form", { class: "filters", onsubmit: submit }, inputs.slice(0, NUM_FIRST), h("button", { class: "primary" }, "Show"),
    h("button", { type: "button", onclick: (event) => exportAll(event.target, chosen) }, "Export all that match (Parquet)"),
    h("details", { open: isFurther }, h("summary", {}, "More filters"), h("div", { class: "filters" }, inputs.slice(NUM_FIRST))));
}

/** The values of a form's fields, whose names begin with `by-`: a field named as a method of the form would hide it. */
export function fieldsOf(form) {
  return Object.fromEntries([...new FormData(form)].map(([name, value]) => [name.replace(/^by-/, ""), value]));
}

/** name of the column, its cell, whether it is shown unless somebody chooses. */
const COLUMNS = [
  ["reward", (item) => rewardText(item), true],
  ["completion", (item) => h("a", { href: `#/rollout/${item.rollout_id}` }, oneLine(item.response_text) || "(empty)"), true],
  ["prompt", (item) => h("a", { class: "second", href: `#/prompt/${encodeURIComponent(item.prompt_id)}` }, item.prompt_text === null ? item.prompt_id : oneLine(lastTurn(item.prompt_text, item.prompt_text.length === TEXT_CHARS), 80)), true],
  ["gold", (item) => oneLine(gold(item.prompt_data), 40), true],
  ["ended by", (item) => item.episode?.stop_condition ?? item.finish_reason, true],
  ["tokens", (item) => number(item.num_response_tokens), true],
  ["version", (item) => item.version, true],
  ["age", (item) => number(item.policy_age_steps), true],
  ["batches", (item) => number(item.num_batches)],
  ["task", (item) => item.task],
  ["environment", (item) => item.episode?.environment ?? ""],
  ["turns", (item) => number(item.episode?.num_turns)],
  ["searcher", (item) => item.searcher_id],
  ["finished", (item) => time(item.finished_at_s), true],
  ["data", (item) => (item.prompt_data === null ? "(long)" : oneLine(JSON.stringify(item.prompt_data), 60))],
];
const CHOSEN = "tba-columns";
let columns = COLUMNS.filter(([, , isShown]) => isShown).map(([name]) => name);
try {
  columns = JSON.parse(localStorage.getItem(CHOSEN)) ?? columns;
} catch {
  // no storage in this browser: the choice lasts as long as the page
}

/** Boxes that choose the columns; `changed` is called after each choice. */
function columnChoice(changed) {
  const choose = (name, isShown) => {
    columns = COLUMNS.map(([one]) => one).filter((one) => (one === name ? isShown : columns.includes(one)));
    try { localStorage.setItem(CHOSEN, JSON.stringify(columns)); } catch { /* as above */ }
    changed();
  };
  return h("details", {}, h("summary", {}, "Columns"), h("p", { class: "tools" }, COLUMNS.map(([name]) => h("label", {},
    h("input", { type: "checkbox", name: `column-${name}`, checked: columns.includes(name), onchange: (event) => choose(name, event.target.checked) }), ` ${name}`))));
}

/** A table of rollouts, each with a link to all that is known of it. */
function rolloutTable(items) {
  const shown = COLUMNS.filter(([name]) => columns.includes(name));
  return table("Rollouts", shown.map(([name]) => name), items.map((item) => shown.map(([, cell]) => cell(item))),
    state.stats?.num_rollouts !== 0 ? "No stored rollout matches; leave out a filter." : awaited("The first rollout is awaited: searchers generate once the trainer has published its starting model."));
}

/** A reward as text; a failed or pending one is named, never a number. */
export function rewardText(item) {
  return item.reward === null
    ? h("span", { class: "badge", "data-state": item.reward_status, title: item.reward_reason }, item.reward_status)
    : h("b", {}, number(item.reward));
}

async function exportAll(button, chosen) {
  const { order, ...filters } = chosen;
  button.disabled = true;
  try {
    const file = await getFile("/v1/rollouts.parquet", filters);
    download(`${state.run.run}-rollouts.parquet`, file, file.type);
  } catch (error) {
    button.after(h("span", { class: "problem", role: "alert" }, ` ${error.message}`));
  } finally {
    button.disabled = false;
  }
}
