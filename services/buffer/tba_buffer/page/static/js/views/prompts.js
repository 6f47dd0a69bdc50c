// The prompts of the run, with what is stored of each.

import { address, get } from "../api.js";
import { fill, go, h, table } from "../dom.js";
import { gold, lastTurn, number, oneLine } from "../format.js";
import { fieldsOf } from "./rollouts.js";

const PAGE = 50;

export function prompts(place, { query }) {
  const names = ["order", "split", "task", "contains"];
  const chosen = Object.fromEntries(names.map((name) => [name, query.get(name) ?? (name === "order" ? "most" : "")]));
  const result = h("div", {}, h("p", { class: "empty" }, "Asking for prompts.")), shown = [];
  const select = (name, label, choices) => h("span", {}, h("label", { for: `filter-${name}` }, label),
    h("select", { id: `filter-${name}`, name: `by-${name}` }, choices.map(([value, text]) => h("option", { value, selected: value === chosen[name] }, text))));
  const field = (name, label) => h("span", {}, h("label", { for: `filter-${name}` }, label),
    h("input", { id: `filter-${name}`, name: `by-${name}`, value: chosen[name], maxlength: 200 }));
  const submit = (event) => {
    event.preventDefault();
    go(address("#/prompts", fieldsOf(event.target)));
  };
  place.append(h("h2", {}, "Prompts"),
    h("p", { class: "how" }, "What the model is asked, and the rewards of the answers that are stored now. Prompts whose lowest and highest reward are equal teach nothing."),
    h("form", { class: "filters", onsubmit: submit },
      select("order", "Order", [["most", "most rollouts"], ["worst", "lowest reward"], ["best", "highest reward"], ["upload", "as uploaded"]]),
      select("split", "Split", [["", "any"], ["train", "train"], ["heldout", "held out"]]),
      field("task", "Task"), field("contains", "Id or text contains"), h("button", { class: "primary" }, "Show")), result);
  let after = 0, alive = true, asking = false;
  const more = async () => {
    if (asking) return;
    asking = true;
    try {
      const page = await get("/v1/prompts", { ...chosen, limit: PAGE, after, text_chars: 2000 });
      if (!alive) return;
      shown.push(...page.prompts);
      after = page.next;
      fill(result, promptTable(shown), h("p", { role: "status" }, `${shown.length} of ${number(page.num_matching)}. `,
        after === null ? "That is all." : h("button", { onclick: more }, "More")));
    } catch (error) {
      if (alive) fill(result, shown.length ? promptTable(shown) : null, h("p", { class: "problem", role: "alert" }, error.message, " ",
        h("button", { onclick: more }, "Ask again")));
    } finally {
      asking = false;
    }
  };
  more();
  return () => { alive = false; };
}

function promptTable(items) {
  return table("Prompts", ["prompt", "gold", "mean reward", "lowest", "highest", "rollouts", "scored", "task", "split"],
    items.map((item) => [
      h("a", { href: `#/prompt/${encodeURIComponent(item.prompt_id)}` }, oneLine(lastTurn(item.text, item.text_cut), 80)),
      oneLine(gold(item.data), 40), number(item.reward_mean), number(item.reward_min), number(item.reward_max), number(item.num_rollouts), number(item.num_scored),
      item.task, item.split,
    ]), "No prompt matches; or none has been uploaded yet (tba prompts upload).");
}
