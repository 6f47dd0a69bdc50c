// How the run learns, what its data is like, and where its time goes.

import { align, Chart } from "../charts.js";
import { bars, emptyText, facts, fillIfChanged, h, panel, table } from "../dom.js";
import { duration, number, percent, stepOf, time } from "../format.js";
import { awaited, state, subscribe } from "../state.js";

/** title, unit, how to read it, [[metric, label]], fixed range. */
export const CHARTS = [
  ["Reward", "reward", "Mean reward of each training batch; it should rise. The dots are held-out evaluations: if the curve rises without them, the reward is being gamed.",
    [["reward_mean", "reward, batch"], ["accuracy", "accuracy, batch"]]],
  ["Groups without a difference", "share of groups", "All rewards of such a group are equal: it teaches nothing. Near 1 the prompts are too easy or too hard, or the scorer is broken.",
    [["frac_reward_zero_std", "groups"]], [0, 1]],
  ["Spread of rewards", "reward", "Standard deviation of the rewards within a group, on average. It falls to 0 where nothing is left to compare.",
    [["reward_std", "deviation"]]],
  ["Response length", "tokens", "Mean tokens of a completion. Growth towards the limit, or a fall to almost none, often games the reward.",
    [["completions/mean_length", "mean"]]],
  ["Cut off at the limit", "share of completions", "Completions that reached searcher.max_response_tokens. Much: raise the limit, or the answers never end.",
    [["completions/clipped_ratio", "cut off"]], [0, 1]],
  ["Entropy", "nats per token", "How undecided the policy is. Near 0 it answers always the same, and nothing new is found.",
    [["entropy", "entropy"]]],
  ["KL to the reference", "nats per response", "How far the policy has moved from its reference. A sudden rise often comes before a collapse; a fall to 0 is a reset of the reference.",
    [["kl_to_ref", "KL"]]],
  ["Effective sample size", "share", "1: the data is as good as fresh; towards 0: a few rollouts rule the batch, since the policy has moved away from its data.",
    [["ess", "ESS"], ["clipped_share", "clipped tokens"]], [0, 1]],
  ["Lag", "steps", "Policy age of the trained rollouts. A rising mean means that searchers fall behind.",
    [["policy_age_mean", "mean age"], ["policy_age_max", "oldest"]]],
  ["Gradient norm", "norm", "Before clipping; the dashed line is the limit. A lasting rise is the first sign of divergence: lower the learning rate.",
    [["grad_norm", "norm"], ["grad_norm_limit", "limit"]]],
  ["Loss", "loss", "The value of the objective; its level says little, a jump says that something changed.",
    [["loss", "loss"]]],
  ["Time of a step", "seconds", "How long a step took, and waited for data before. No waiting at all: searchers wait for the trainer.",
    [["step_s", "step"], ["wait_s", "wait"]]],
];

const NUM_FIRST = 3;
const NUM_BARS = 12;
const DECILES = ["lowest", "10 %", "20 %", "30 %", "40 %", "median", "60 %", "70 %", "80 %", "90 %", "highest"];

export function overview(place) {
  const charts = CHARTS.map(([title, unit, howToRead, metrics, range]) => [new Chart({ title, unit, howToRead, range }), metrics]);
  const grid = (some) => h("div", { class: "grid" }, some.map(([chart]) => chart.element));
  const numbers = h("div", { class: "grid two" }), data = h("div", { class: "grid two" }), played = h("div", {});
  place.append(grid(charts.slice(0, NUM_FIRST)), numbers, played, grid(charts.slice(NUM_FIRST)), data);
  const draw = ({ run, stats, curves }) => {
    if (run === null || stats === null) return;
    fillIfChanged(numbers, [run.step, stats, run.components, curves?.steps.length], () => [throughput(run, stats, curves), tokensAndTime(stats)]);
    fillIfChanged(played, run.components.map((item) => item.gauges), () => environments(run));
    fillIfChanged(data, [stats.policy_age_histogram, stats.stored, stats.evicted, stats.refused, stats.batches_skipped,
      stats.rollouts_refused_by_trainer, stats.rescored], () => composition(run, stats));
    if (curves !== null) for (const [chart, metrics] of charts) drawChart(chart, metrics, run, curves);
  };
  draw(state);
  const end = subscribe(draw);
  return () => { end(); for (const [chart] of charts) chart.destroy(); };
}

function drawChart(chart, metrics, run, curves) {
  const own = metrics.map(([name, label]) => ({
    label, steps: curves.steps, values: curves.values[name] ?? [], dash: ["accuracy", "grad_norm_limit"].includes(name) ? [6, 4] : undefined,
  }));
  if (chart.options.title === "Reward") {
    // where an answer is right or wrong, both are one curve
    if (String(own[0].values) === String(own[1].values)) own.splice(0, 2, { ...own[0], label: "reward = accuracy, batch" });
    own.push(...evaluationSeries(run.evals));
  }
  chart.draw(...align(own.filter((one) => one.values.length)),
    curves.steps.length ? "No step of this run has it." : awaited("The first optimizer step is awaited."));
}

function evaluationSeries(evals) {
  const done = evals.filter((item) => item.state === "done" && item.accuracy !== null && !item.abandoned)
    .map((item) => [stepOf(item.version), item]).sort((a, b) => a[0] - b[0]);
  const steps = done.map(([step]) => step);
  return [
    { label: "held out, sampled", steps, values: done.map(([, item]) => item.accuracy), points: true },
    { label: "held out, greedy", steps, values: done.map(([, item]) => item.greedy_accuracy), points: true },
  ];
}

function throughput(run, stats, curves) {
  const searchers = run.components.filter((item) => item.kind === "searcher" && item.alive);
  const tokens = searchers.reduce((sum, item) => sum + (item.gauges.tokens_per_s ?? 0), 0);
  // counters of the run, as in summary.json
  const waited = newest(curves?.values.waited_s_total), trained = newest(curves?.values.train_s);
  const rates = stats.rates;
  return panel("Throughput", "What is made, trained on and lost per second. Generated and trained should be alike, up to samples per insert.",
    facts([
      ["generated", `${number(stats.rollouts_generated)} rollouts${rates ? `, ${number(rates.generated_per_s)}/s` : ""}`],
      ["trained", `${number(stats.rollouts_trained)} rollouts${rates ? `, ${number(rates.trained_per_s)}/s` : ""}`],
      ["stored", `${number(stats.num_rollouts)} rollouts (${number(stats.num_pending)} pending, ${number(stats.num_failed)} failed)`],
      ["tokens", run.read_only ? null : `${number(Math.round(tokens))}/s by ${searchers.length} searcher${searchers.length === 1 ? "" : "s"}`],
      ["samples per insert", number(stats.samples_per_insert)],
      ["realised m", number(stats.realised_most_on_policy)],
      ["trainer idle", trained ? percent(waited / trained) : "-"],
      ["best version", run.best === null ? null : `${run.best.version} (${number(run.best.value)})`],
      ["time of training", trained === null ? null : duration(trained)],
    ]));
}

function tokensAndTime({ tokens, component_seconds: seconds, rates }) {
  const rate = (value) => (value === null || value === undefined ? "" : `, ${number(value)}/s`);
  const total = (name) => (tokens ? `${number(tokens[name])} tokens${rate(rates?.[`${name}_tokens_per_s`])}` : "unknown");
  return panel("Tokens and time", "Tokens of completions since the run began; what is trained on twice counts twice. Time: how long components of a kind were there, added up.",
    facts([
      ["generated", total("generated")],
      ["trained", total("trained")],
      ...["searcher", "trainer"].map((kind) => [`time of ${kind}s`, seconds[kind] ? duration(seconds[kind]) : null]),
    ]));
}

const STATUSES = ["ok", "invalid_json", "unclosed_block", "missing_name", "malformed_structure", "unknown_tool"];

/** Of each environment what all searchers have counted (NAME/TASK), and the means of the newest batch. */
function environments(run) {
  const counts = {}, byAge = [...run.components].sort((a, b) => a.heartbeat_age_s - b.heartbeat_age_s);
  for (const { gauges } of byAge.filter((item) => item.kind === "searcher")) {
    for (const [key, value] of Object.entries(gauges)) {
      const [name, task] = key.split("/");
      if (task) (counts[task] ??= {})[name] = (counts[task][name] ?? 0) + value;
    }
  }
  const batch = byAge.find((item) => item.kind === "trainer")?.gauges ?? {}, failed = "episodes_failed_";
  const mean = (total, num) => (num ? `${number(total / num, 2)} s` : "-");
  const rows = Object.entries(counts).sort().map(([name, one]) => [h("a", { href: `#/rollouts?environment=${encodeURIComponent(name)}` }, name), number(one.episodes ?? 0), percent((one.episodes_truncated ?? 0) / (one.episodes || 1)),
    Object.entries(one).filter(([key]) => key.startsWith(failed)).map(([key, num]) => h("div", {}, `${key.slice(failed.length)} ${number(num)}`)),
    number(batch[`num_turns/${name}/mean`]), number(batch[`decode_len/${name}/mean`]), number(batch[`environment_len/${name}/mean`]),
    mean(one.environment_s, one.environment_answers), mean(one.tool_s, one.tool_s && one.tool_calls), number(batch[`tools/${name}/call_frequency`]),
    STATUSES.map((status) => [status, batch[`tools/${name}/${status}_frequency`]]).filter(([, share]) => share).map(([status, share]) => h("div", {}, `${status} ${percent(share)}`))]);
  return rows.length ? panel("Environments", "Episodes that searchers have played, with every try of those that failed; the means per episode are of the newest batch. For the reasons of failures, filter the rollouts by what they failed in.",
    table("Environments", ["environment", "episodes", "truncated", "failed in", "turns", "policy tokens", "environment tokens", "time of answers", "of tools", "tool calls", "by what they were"], rows)) : null;
}

function newest(values) {
  return (values ?? []).findLast((value) => value !== null) ?? null;
}

function composition(run, stats) {
  const ages = Object.entries(stats.policy_age_histogram).map(([age, number]) => [Number(age), number])
    .sort((a, b) => a[0] - b[0]);
  const limit = run.max_policy_age_steps;
  const dropped = [["evicted", stats.evicted], ["refused at the push", stats.refused],
    ["refused by the trainer", stats.rollouts_refused_by_trainer], ["batches skipped", stats.batches_skipped]]
    .flatMap(([what, counts]) => Object.entries(counts).map(([reason, number]) => [`${what}: ${reason}`, number, "bad"]));
  const stored = stats.stored;
  return [
    panel("Age of what was trained", limit ? `Rollouts by their policy age in steps when a step consumed them; older than ${limit} are evicted (buffer.max_policy_age_steps).`
      : "Rollouts by their policy age in steps when a step consumed them; this run sets no bound.",
      bars("Trained rollouts by policy age", folded(ages, limit), awaited("The first trained batch is awaited."))),
    panel("Buffer by version", "What is stored now, by the oldest version that made a token of it. One long bar at an old version: searchers do not load new weights.",
      bars("Stored rollouts by version", stored ? newestFirst(stored) : [], awaited("The first rollout is awaited."))),
    panel("Buffer by reward", "The rewards that are stored, from the lowest to the highest in ten equal parts. All equal: nothing can be learned.",
      stored?.reward_deciles ? facts(stored.reward_deciles.map((value, at) => [DECILES[at], number(value, 2)]))
        : emptyText(awaited("The first scored rollout is awaited."))),
    panel("Dropped, by reason", "Nothing is dropped without a count. Many of one reason: look it up in docs/operations.md.",
      bars("Dropped rollouts by reason", dropped, "Nothing has been dropped.")),
  ];
}

/** The newest versions one by one, the others together. */
function newestFirst({ by_version, num_of_older_versions }) {
  const found = Object.entries(by_version).sort((a, b) => stepOf(b[0]) - stepOf(a[0]));
  const rest = found.slice(NUM_BARS).reduce((total, [, number]) => total + number, num_of_older_versions);
  return [...found.slice(0, NUM_BARS), ...(rest ? [["older", rest]] : [])];
}

/** Ages 0, 1, 2, and then twice as wide each: 3-4, 5-8, 9-16. What is over the bound is marked. */
function folded(ages, limit) {
  const found = new Map();
  for (const [age, number] of ages) {
    const power = age < 3 ? age : 2 + Math.ceil(Math.log2(age / 2));
    found.set(power, (found.get(power) ?? 0) + number);
  }
  return [...found].map(([power, number]) => {
    const last = power < 3 ? power : 2 ** (power - 1), first = power < 3 ? power : last / 2 + 1;
    return [first === last ? `${first}` : `${first}-${last}`, number, limit && first > limit ? "bad" : null];
  });
}
