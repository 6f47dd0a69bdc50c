// One prompt: its answers under two versions, side by side.

import { get } from "../api.js";
import { emptyText, facts, fill, h, panel } from "../dom.js";
import { number } from "../format.js";
import { awaited, runKnown } from "../state.js";
import { question } from "./rollout.js";
import { rewardText } from "./rollouts.js";

const NUM_SHOWN = 8;

export function prompt(place, { argument }) {
  let alive = true;
  fill(place, h("p", { class: "empty" }, "Asking for the prompt."));
  const show = async () => {
    try {
      const item = await get(`/v1/prompts/${encodeURIComponent(argument)}`);
      await runKnown;
      if (alive) fill(place, ...content(item, () => alive));
    } catch (error) {
      if (alive) fill(place, h("p", { class: "problem", role: "alert" }, error.message));
    }
  };
  show();
  return () => { alive = false; };
}

function content(item, isAlive) {
  const versions = item.by_version;
  return [
    h("h2", {}, "Prompt ", h("code", {}, item.prompt_id)),
    panel("Text", "What the model is asked: of a chat the last turn. The scorer knows the gold answer beside it.",
      question(item.text, item.data),
      facts([["task", item.task], ["split", item.split], ["stored rollouts", number(item.num_rollouts)], ["mean reward", number(item.reward_mean)],
        ["lowest", number(item.reward_min)], ["highest", number(item.reward_max)]])),
    panel("Side by side", "Answers to this prompt by an older and a newer version: what has the training changed?",
      versions.length === 1 ? h("p", { class: "how" }, `Only version ${versions[0].version} has answered this prompt so far; order the prompts by most rollouts to find others.`) : null,
      versions.length ? h("div", { class: "grid two" }, side(item, versions[0].version, isAlive, "older"), versions.length > 1 ? side(item, versions.at(-1).version, isAlive, "newer") : null)
        : emptyText(item.split === "heldout" ? "Held-out prompts are only evaluated, and their answers are not stored; `tba evaluate RUN --compare start best` asks both versions and shows their answers side by side." : awaited("The first rollout of this prompt is awaited."))),
    h("p", {}, h("a", { href: `#/rollouts?prompt_id=${encodeURIComponent(item.prompt_id)}` }, "All stored rollouts of this prompt")),
  ];
}

function side(item, first, isAlive, name) {
  const list = h("div", {}), id = `version-${name}`;
  let wanted = first;
  const load = async (version) => {
    wanted = version;
    let page;
    try {
      page = await get("/v1/rollouts", { prompt_id: item.prompt_id, version, limit: NUM_SHOWN, text_chars: 2000 });
    } catch (error) {
      if (isAlive() && wanted === version) fill(list, h("p", { class: "problem", role: "alert" }, error.message));
      return;
    }
    // of two choices in a row the answer to the first may come last
    if (isAlive() && wanted === version) fill(list, page.rollouts.map((one) => h("div", { class: "answer" }, "reward ", rewardText(one), " ",
      h("a", { href: `#/rollout/${one.rollout_id}` }, "details"), h("pre", { class: "text", tabindex: "0" }, one.response_text))));
  };
  const select = h("select", { id, onchange: (event) => load(event.target.value) },
    item.by_version.map((one) => h("option", { value: one.version, selected: one.version === first }, `${one.version}: ${number(one.num_scored)} scored, mean ${number(one.reward_mean)}`)));
  load(first);
  return h("div", {}, h("p", {}, h("label", { for: id }, `The ${name} version `), select), list);
}
