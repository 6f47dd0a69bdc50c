// One rollout: what was asked, what came, what it was worth, and what the trainer made of it.

import { get } from "../api.js";
import { emptyText, facts, fill, h, panel, table } from "../dom.js";
import { duration, gold, lastTurn, number, oneLine, stepOf, time } from "../format.js";
import { rewardText, trail } from "./rollouts.js";

const MAX_TOKENS = 4000;
const MAX_PARTS = 500;
const COLOURINGS = [["logprob", "by log-prob"], ["version", "by version"], ["advantage", "by advantage"], ["none", "plain"]];

export function rollout(place, { argument }) {
  let alive = true;
  fill(place, h("p", { class: "empty" }, "Asking for the rollout."));
  const show = async () => {
    try {
      const item = await get(`/v1/rollouts/${encodeURIComponent(argument)}`);
      if (!alive) return;
      const group = h("div", {}, emptyText("Asking for its group.")), links = h("p", { class: "tools" });
      const isListed = trail.ids.includes(item.rollout_id);
      if (isListed) fill(links, steps(item, trail.ids, "in the list", trail.hash));
      fill(place, links, h("h2", {}, "Rollout ", h("code", {}, item.rollout_id)), asked(item), conversation(item), answered(item), h("div", { class: "grid two" }, worth(item), trained(item)),
        panel("Its group", "The rollouts that the newest step compared, those that are still stored: one that is better than the others is made more likely.", group,
          h("p", {}, h("a", { href: `#/rollouts?prompt_id=${encodeURIComponent(item.prompt_id)}` }, "All stored rollouts of this prompt"))));
      // beside the rest, which is there at once
      fillGroup(group, item).then((ids) => { if (alive && ids && !isListed) fill(links, steps(item, ids, "in its group", "#/rollouts")); },
        (error) => { if (alive) fill(group, h("p", { class: "problem", role: "alert" }, error.message)); });
    } catch (error) {
      if (alive) fill(place, h("p", { class: "problem", role: "alert" }, error.message));
    }
  };
  show();
  return () => { alive = false; };
}

/** Links to the previous and the next rollout of a list. */
function steps(item, ids, where, hash) {
  const at = ids.indexOf(item.rollout_id);
  const link = (id, text) => (id ? h("a", { class: "button", href: `#/rollout/${id}` }, text) : h("span", { class: "button off" }, text));
  return [h("a", { href: hash }, "Rollouts"), link(ids[at - 1], "← Previous"), link(ids[at + 1], "Next →"), h("span", { class: "how" }, `${at + 1} of ${ids.length} ${where}`)];
}

/** The last turn of a prompt (of an episode none) and its gold answer; all of it, and of the scorer's data, folded. */
export function question(text, data, isEpisode = false) {
  const more = (title, content) => h("details", {}, h("summary", {}, title), h("pre", { class: "text", tabindex: "0" }, content));
  const turn = isEpisode ? null : lastTurn(text), answer = gold(data);
  return [turn === null ? null : h("pre", { class: "text", tabindex: "0" }, turn),
    answer ? facts([["gold answer", answer]]) : null,
    turn === text ? null : more(isEpisode ? "Its text" : "The whole prompt, as the model reads it", text),
    Object.keys(data ?? {}).length ? more("All data of the scorer", JSON.stringify(data, null, 1)) : null];
}

function asked(item) {
  return panel("Prompt", `${item.episode ? "What the episode began with" : "What the model was asked: of a chat the last turn"}. The scorer knows the gold answer beside it.`,
    item.prompt_text === null ? emptyText("The run no longer has this prompt.") : question(item.prompt_text, item.prompt_data, item.episode !== null),
    facts([["prompt", h("a", { href: `#/prompt/${encodeURIComponent(item.prompt_id)}` }, item.prompt_id)], ["task", item.task],
      ["tokens", number(item.num_prompt_tokens)]]));
}

/** Ids of the rollouts in the slot of the newest step that trained it. The lines of the ledger are in the order of time. */
async function slotOf(item) {
  const lineAt = async (after) => (await get("/v1/ledger", { after, limit: 1 })).entries[0];
  let low = 0, high = (await get("/v1/ledger", { limit: 1 })).num_lines - 1;
  while (low < high) {
    const middle = (low + high) >> 1, line = await lineAt(middle);
    if ((line.acked_at_s ?? line.resumed_at_s) < item.trained.at(-1).at_s) low = middle + 1;
    else high = middle;
  }
  const line = await lineAt(low), at = line.rollout_ids?.indexOf(item.rollout_id) ?? -1;
  if (at < 0) return [];
  const size = line.num_rollouts / line.slots.total, first = at - (at % size);
  return [...new Set(line.rollout_ids.slice(first, first + size))];
}

/** Fill the panel with what a step compared; returns the ids of what is still stored. */
async function fillGroup(place, item) {
  if (!item.trained.length) return fill(place, emptyText("No step has compared it."));
  const version = item.trained.at(-1).version;
  const found = await Promise.allSettled((await slotOf(item)).map((id) => get(`/v1/rollouts/${id}`)));
  const group = found.filter((one) => one.status === "fulfilled").map((one) => one.value);
  fill(place, table("The rollouts of its group", ["reward", `advantage in ${version}`, "completion", "tokens", "ended by"], group.map((one) => [
    rewardText(one), number(one.trained.find((each) => each.version === version)?.advantage),
    one.rollout_id === item.rollout_id ? h("b", {}, "this one") : h("a", { href: `#/rollout/${one.rollout_id}` }, oneLine(one.response_text) || "(empty)"),
    number(one.num_response_tokens), one.episode?.stop_condition ?? one.finish_reason]), "None of it is stored any more."));
  return group.map((one) => one.rollout_id);
}

function answered(item) {
  const text = h("div", {}), legend = h("p", { class: "how" });
  const paint = (how) => {
    const open = [...text.querySelectorAll("details")].map((one) => one.open);
    fill(text, item.episode ? sequences(item, how, open) : completion(item, how));
    legend.textContent = LEGENDS[how];
  };
  const choices = COLOURINGS.map(([how, label], at) => h("label", {},
    h("input", { type: "radio", name: "colouring", value: how, checked: at === 0, onchange: () => paint(how) }), ` ${label} `));
  paint("logprob");
  return panel(item.episode ? "Tokens" : "Completion",
    `${item.episode ? "What the messages are to the model, by origin: only replies are trained, each once" : "What the model wrote"}. Point at a token for its log-prob and version.`,
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
  return [h("pre", { class: "text tokens", tabindex: "0" }, painted(item, how, item.response_tokens, texts, 0)), cut(texts.length)];
}

function cut(num) {
  return num > MAX_TOKENS ? h("p", { class: "how" }, `The first ${number(MAX_TOKENS)} of ${number(num)} tokens.`) : null;
}

/** The texts of tokens, coloured. `first`: number of the first one among the response tokens; null: they are none of them. */
function painted(item, how, tokens, texts, first) {
  // a skipped step has changed no weights, and an abandoned one none that are left
  const advantage = item.trained.filter((step) => !step.skipped && !step.abandoned).at(-1)?.advantage ?? null;
  return texts.slice(0, MAX_TOKENS).map((text, offset) => {
    if (first === null) return h("span", { title: `id ${tokens[offset]}` }, text);
    const at = first + offset;
    const logprob = item.sampler_logprobs[at], span = item.version_spans.findIndex((one) => at < one.end);
    const kind = how === "logprob" ? `lp-${Math.min(5, Math.floor(-logprob))}`
      : how === "version" ? `span-${span % 4}`
        : how === "advantage" && advantage ? (advantage > 0 ? "more" : "less") : null;
    return h("span", { class: kind, title: `token ${at} (id ${tokens[offset]}): log-prob ${number(logprob)}, version ${item.version_spans[span]?.version}` }, text);
  });
}

/** The sequences of an episode, folded; `open` says which are not. Each part has one origin. */
function sequences(item, how, open) {
  const names = item.sequences.length === 1 ? ["All tokens"] : item.sequences.map((_, at) => `Sequence ${at + 1} of ${item.sequences.length}`);
  let sampled = 0;
  return item.sequences.map(({ tokens, segments }, at) => {
    const texts = item.sequence_texts?.[at];
    const sums = ["policy", "environment", "template"].map((origin) =>
      `${origin} ${number(segments.reduce((sum, part) => sum + (part.origin === origin ? part.num_tokens : 0), 0))}`);
    let start = 0;
    const parts = segments.map((part) => {
      const [from, first] = [start, part.is_trained ? sampled : null];
      start += part.num_tokens;
      if (part.is_trained) sampled += part.num_tokens;
      return h("li", { class: part.origin }, h("p", { class: "head" }, h("b", {}, part.origin), h("span", { class: "how" }, `${part.role}${part.origin === "policy" ? `, turn ${part.turn + 1}` : ""}, ${number(part.num_tokens)} tokens`),
        part.origin === "policy" && !part.is_trained ? h("span", { class: "badge", "data-state": "cut-off" }, "not trained again") : null),
      texts ? [h("pre", { class: "text tokens", tabindex: "0" }, painted(item, how, tokens.slice(from, start), texts.slice(from, start), first)), cut(part.num_tokens)] : null);
    });
    return h("details", { open: open[at] ?? false }, h("summary", {}, `${names[at]}: ${number(tokens.length)} (${sums.join(", ")})`),
      at ? h("p", { class: "how" }, "The messages before it were written anew, so it repeats what it still shows.") : null,
      texts ? null : h("p", { class: "how" }, "This service has no tokenizer of the model, so the tokens have no text."),
      h("ol", { class: "talk" }, parts.slice(0, MAX_PARTS)), parts.length > MAX_PARTS ? h("p", { class: "how" }, `The first ${number(MAX_PARTS)} of ${number(parts.length)} parts.`) : null);
  });
}

/** An episode: its messages in order, each reply with its tool call and what its turn was paid, and how it ended. */
function conversation(item) {
  const one = item.episode;
  if (!one) return null;
  const parts = new Map(item.sequences.flatMap(({ segments }) => segments).filter((part) => part.is_trained).map((part) => [part.turn, part]));
  // messages of the prompt may be of an assistant too, and come before the reply of their turn
  const replies = new Map(item.messages.map((message, at) => [message.role === "assistant" ? message.turn : null, at]));
  const said = ({ role, content, turn }, at) => {
    const part = role === "assistant" && replies.get(turn) === at ? parts.get(turn) : null, paid = one.turn_rewards[turn] ?? null;
    return h("li", { class: role }, h("p", { class: "head" }, h("b", {}, ROLES[role]),
      part ? [h("span", { class: "how" }, `turn ${turn + 1} of ${one.num_turns}, ${number(part.num_tokens)} tokens, ${part.finish_reason}`),
        part.parse_status ? h("span", { class: "badge", "data-state": part.parse_status === "ok" ? "scored" : "failed" }, `tool call: ${part.parse_status}`) : null,
        paid === null ? null : h("span", { class: "paid" }, "reward ", h("b", {}, number(paid)))] : null),
    h("pre", { class: "text", tabindex: "0" }, part ? withCalls(content) : content));
  };
  const how = one.failure_boundary ? ["failed", `failed in: ${one.failure_boundary}`] : one.is_truncated ? ["cut-off", `cut off by ${one.stop_condition}`] : ["ended", `ended by ${one.stop_condition}`];
  return panel("Conversation", "What was said, in order. Beside a turn stands what its environment paid for it; the reward of the whole is below.",
    facts([["environment", one.environment], ["version", one.environment_version], ["seed", String(one.seed)], ["seat", one.seat || null],
      ["turns", number(one.num_turns)], ["tool calls", number(one.num_tool_calls)], ["stop condition", one.stop_condition], ["truncated", one.is_truncated ? "yes" : "no"],
      ["failure boundary", one.failure_boundary]]),
    h("ol", { class: "talk" }, item.messages.map(said), h("li", { class: "end" }, h("span", { class: "badge", "data-state": how[0] }, how[1]), one.failure_boundary ? ` ${item.reward_reason}` : null)));
}

const ROLES = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" };

/** A reply with its tool calls as `name(argument: value)`. A call in another form stays as it was written. */
function withCalls(text) {
  return text.split(/(<tool_call>[^]*?<\/tool_call>)/).map((piece) => {
    try {
      const call = JSON.parse(piece.match(/^<tool_call>([^]*)<\/tool_call>$/)[1]);
      return h("code", { class: "call", title: piece }, `${call.name}(${Object.entries(call.arguments).map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join(", ")})`);
    } catch {
      return piece;
    }
  });
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
    stepOf(item.trained_since) > 1 ? h("p", { class: "how" }, `Advantages are kept from step ${item.trained_since} on.`) : null);
}
