// The table of stored rollouts, with filters that the address remembers.

import { address, get, getFile } from "../api.js";
import { download, fill, go, h, table } from "../dom.js";
import { number, oneLine, time } from "../format.js";
import { awaited, runKnown, state } from "../state.js";

const PAGE = 50, TEXT_CHARS = 400;
/** name in the query, label, how it is asked for. */
const FILTERS = [
  ["order", "Order", { choices: [["newest", "newest"], ["best", "best"], ["worst", "worst"], ["oldest", "oldest"]] }],
  ["status", "Reward", { choices: [["", "any"], ["scored", "scored"], ["pending", "pending"], ["failed", "failed"]] }],
  ["finish_reason", "Ended by", { choices: [["", "any"], ["stop", "stop"], ["stop_string", "stop string"], ["length", "length (cut off)"], ["abort", "abort"]] }],
  ["task", "Task", { size: 12 }],
  ["prompt_id", "Prompt", { size: 12 }],
  ["searcher_id", "Searcher", { size: 12 }],
  ["from_version", "From version", { size: 7, placeholder: "1-0", pattern: "\\d+-\\d+", title: "lineage-step, such as 1-250" }],
  ["to_version", "To version", { size: 7, placeholder: "1-250", pattern: "\\d+-\\d+", title: "lineage-step, such as 1-250" }],
  ["min_reward", "Reward from", { size: 6, inputmode: "decimal" }],
  ["max_reward", "Reward to", { size: 6, inputmode: "decimal" }],
  ["contains", "Text contains", { size: 18, maxlength: 200 }],
];
const QUICK = [["Newest", {}], ["Best", { order: "best" }], ["Worst", { order: "worst" }], ["Failed", { status: "failed" }],
  ["Cut off", { finish_reason: "length" }]];

export function rollouts(place, { query }) {
  const chosen = Object.fromEntries(FILTERS.map(([name]) => [name, query.get(name) ?? ""]));
  const result = h("div", {}), shown = [];
  place.append(
    h("h2", {}, "Rollouts"),
    h("p", { class: "how" }, "What the model answered. Sort by worst to find what fails, by best to find what is rewarded for the wrong reason."),
    h("p", { class: "tools" }, QUICK.map(([label, values]) => h("a", { class: "button", href: address("#/rollouts", values) }, label))),
    form(chosen), result,
    h("p", { class: "tools" },
      h("button", { onclick: () => exportShown(shown) }, "Export what is shown (JSON)"),
      h("button", { onclick: (event) => exportAll(event.target, chosen) }, "Export all that match (Parquet)")));
  let cursor = null, alive = true, asking = false;
  const more = async () => {
    if (asking) return;
    asking = true;
    try {
      const page = await get("/v1/rollouts", { ...chosen, limit: PAGE, text_chars: TEXT_CHARS, cursor });
      await runKnown;
      if (!alive) return;
      shown.push(...page.rollouts);
      cursor = page.next;
      const none = cursor && !shown.length;
      fill(result, none ? h("p", { class: "empty" }, "None so far; there is more to look through.") : rolloutTable(shown), h("p", { role: "status" },
        `${shown.length} shown${page.num_read ? `, ${number(page.num_read)} read for the last page` : ""}. `,
        cursor ? h("button", { onclick: more }, "More") : "That is all."));
    } catch (error) {
      if (alive) fill(result, shown.length ? rolloutTable(shown) : null, h("p", { class: "problem", role: "alert" }, error.message, " ",
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
  return h("form", { class: "filters", onsubmit: submit }, inputs, h("button", { class: "primary" }, "Show"));
}

/** The values of a form's fields, whose names begin with `by-`: a field named as a method of the form would hide it. */
export function fieldsOf(form) {
  return Object.fromEntries([...new FormData(form)].map(([name, value]) => [name.replace(/^by-/, ""), value]));
}

/** A table of rollouts, each with a link to all that is known of it. */
export function rolloutTable(items) {
  return table("Rollouts", ["reward", "completion", "prompt", "data", "version", "age", "tokens", "ended by", "batches", "searcher", "finished"],
    items.map((item) => [
      rewardText(item),
      h("a", { href: `#/rollout/${item.rollout_id}` }, oneLine(item.response_text) || "(empty)"),
      h("a", { href: `#/prompt/${encodeURIComponent(item.prompt_id)}` }, item.prompt_text === null ? item.prompt_id : oneLine(item.prompt_text, 60)),
      item.prompt_data === null || !Object.keys(item.prompt_data).length ? "" : oneLine(JSON.stringify(item.prompt_data), 60), item.version, item.policy_age_steps, item.num_response_tokens, item.finish_reason, number(item.num_batches), item.searcher_id,
      time(item.finished_at_s),
    ]),
    state.stats?.num_rollouts !== 0 ? "No stored rollout matches; leave out a filter." : awaited("The first rollout is awaited: searchers generate once the trainer has published its starting model."));
}

/** A reward as text; a failed or pending one is named, never a number. */
export function rewardText(item) {
  return item.reward === null
    ? h("span", { class: "badge", "data-state": item.reward_status, title: item.reward_reason }, item.reward_status)
    : h("b", {}, number(item.reward));
}

function exportShown(items) {
  download("rollouts.json", JSON.stringify(items, null, 1), "application/json");
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
