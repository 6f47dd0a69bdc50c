// One rollout: what was asked, what came, what it was worth, and what the trainer made of it.

import { get } from "../api.js";
import { download, facts, fill, h, panel, table } from "../dom.js";
import { duration, number, time } from "../format.js";
import { rewardText, rolloutTable } from "./rollouts.js";

const MAX_TOKENS = 4000;
const COLOURINGS = [["logprob", "by log-prob"], ["version", "by version"], ["advantage", "by advantage"], ["none", "plain"]];

export function rollout(place, { argument }) {
  let alive = true;
  fill(place, h("p", { class: "empty" }, "Asking for the rollout."));
  const show = async () => {
    try {
      const item = await get(`/v1/rollouts/${encodeURIComponent(argument)}`);
      if (!alive) return;
      const group = h("div", {}, h("p", { class: "empty" }, "Asking for the other rollouts of its prompt."));
      fill(place, h("h2", {}, "Rollout ", h("code", {}, item.rollout_id)), asked(item), answered(item), worth(item), trained(item),
        panel("Its group", "The stored rollouts of the same prompt, newest first. The trainer compares them: one that is better than its group is made more likely.", group),
        h("p", { class: "tools" }, h("button", { onclick: () => download(`${item.rollout_id}.json`, JSON.stringify(item, null, 1), "application/json") }, "Export this rollout (JSON)")));
      // beside the rest: a run that no longer has the prompt knows no group, and still has the rollout
      get("/v1/rollouts", { prompt_id: item.prompt_id, limit: 30, text_chars: 400 }).then(
        (page) => { if (alive) fill(group, rolloutTable(page.rollouts)); },
        (error) => { if (alive) fill(group, h("p", { class: "problem", role: "alert" }, error.message)); });
    } catch (error) {
      if (alive) fill(place, h("p", { class: "problem", role: "alert" }, error.message));
    }
  };
  show();
  return () => { alive = false; };
}

function asked(item) {
  return panel("Prompt", "What the model was asked, and what the scorer knows beside it (such as the right answer).",
    h("pre", { class: "text", tabindex: "0" }, item.prompt_text ?? "The run no longer has this prompt."),
    item.prompt_data && Object.keys(item.prompt_data).length ? h("pre", { class: "data", tabindex: "0" }, JSON.stringify(item.prompt_data, null, 1)) : null,
    facts([["prompt", h("a", { href: `#/prompt/${encodeURIComponent(item.prompt_id)}` }, item.prompt_id)], ["task", item.task],
      ["tokens", number(item.num_prompt_tokens)]]));
}

function answered(item) {
  const text = h("div", {}), legend = h("p", { class: "how" });
  const paint = (how) => {
    fill(text, completion(item, how));
    legend.textContent = LEGENDS[how];
  };
  const choices = COLOURINGS.map(([how, label], at) => h("label", {},
    h("input", { type: "radio", name: "colouring", value: how, checked: at === 0, onchange: () => paint(how) }), ` ${label} `));
  paint("logprob");
  return panel("Completion", "What the model wrote. Point at a token for its log-prob and version.",
    h("fieldset", { class: "tools" }, h("legend", {}, "Coloured"), choices), text, legend,
    facts([["ended by", item.finish_reason], ["tokens", number(item.num_response_tokens)], ["searcher", item.searcher_id],
      ["generated in", duration(item.finished_at_s - item.started_at_s)], ["finished", time(item.finished_at_s)],
      ["temperature", number(item.sampling.temperature)], ["top-p", number(item.sampling.top_p)], ["top-k", number(item.sampling.top_k)],
      ["versions", item.version_spans.map((span) => `${span.version} (tokens ${span.start} to ${span.end})`).join(", ")],
      ["policy age now", `${number(item.policy_age_steps)} steps`]]));
}

const LEGENDS = {
  logprob: "From plain over blue and orange to red: the redder a token, the less likely it was to the policy that sampled it.",
  version: "One colour per weight version: a swap in the middle of a completion starts a new colour.",
  advantage: "Green: the newest step that trained it made it more likely; red: less likely. The objective weighs a completion as a whole.",
  none: "",
};

function completion(item, how) {
  const texts = item.token_texts;
  if (texts === null) {
    return [h("pre", { class: "text", tabindex: "0" }, item.response_text),
      h("p", { class: "how" }, "This service has no tokenizer of the model, so the text is shown without its tokens.")];
  }
  const shown = Math.min(texts.length, MAX_TOKENS);
  // a skipped step has changed no weights, and an abandoned one none that are left
  const advantage = item.trained.filter((step) => !step.skipped && !step.abandoned).at(-1)?.advantage ?? null;
  const nodes = [];
  for (let at = 0; at < shown; at++) {
    const logprob = item.sampler_logprobs[at], span = item.version_spans.findIndex((one) => at < one.end);
    const kind = how === "logprob" ? `lp-${Math.min(5, Math.floor(-logprob))}`
      : how === "version" ? `span-${span % 4}`
        : how === "advantage" && advantage ? (advantage > 0 ? "more" : "less") : null;
    nodes.push(h("span", { class: kind, title: `token ${at} (id ${item.response_tokens[at]}): log-prob ${number(logprob)}, version ${item.version_spans[span]?.version}` },
      texts[at]));
  }
  return [h("pre", { class: "text tokens", tabindex: "0" }, nodes),
    shown < texts.length ? h("p", { class: "how" }, `The first ${number(shown)} of ${number(texts.length)} tokens; the export has all.`) : null];
}

function worth(item) {
  const parts = item.reward_parts ?? [];
  return panel("Reward", "What the scorers said. A score that failed is unknown, and such a rollout is in no batch.",
    h("p", {}, rewardText(item), item.reward_reason ? ` ${item.reward_reason}` : ""),
    table("Parts of the reward", ["scorer", "score", "weight"], parts.map((part) => [part.name, number(part.score), number(part.weight)]),
      item.reward === null ? "No score is known." : "One scorer made it."),
    facts([["reward version", item.reward_version]]));
}

function trained(item) {
  return panel("Trained by", "The optimizer steps that consumed it. Advantage: above 0 the step made it more likely. Weight: how much of its gradient the objective kept.",
    table("Steps that consumed it", ["step", "advantage", "weight", "at", ""],
      item.trained.map((step) => [step.version, number(step.advantage), number(step.weight), time(step.at_s),
        [step.skipped ? `skipped: ${step.skipped}` : "", step.abandoned ? "abandoned: the run went back" : ""].filter(Boolean).join(", ")]),
      item.num_batches ? `It was drawn by ${item.num_batches} batch${item.num_batches === 1 ? "" : "es"}, of steps under way or whose advantages are not kept (any more).`
        : "No step has trained on it."),
    item.trained_since ? h("p", { class: "how" }, `Advantages are kept from step ${item.trained_since} on.`) : null);
}
