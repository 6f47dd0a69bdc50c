// What the page knows of the run, asked for again and again, and who is told when it changes.
//
// A cycle asks for the run, its counts and its sentences, and for the curves if a step was made. The pause after it grows
// with the bytes that it brought: a run with 256 searchers must not cost more of the network than one with two.

import { ApiError, bytesReceived, get } from "./api.js";

const MIN_PAUSE_MS = 2000, HIDDEN_PAUSE_MS = 15000, MAX_BYTES_PER_S = 50_000;
export const CURVE_NAMES = [
  "reward_mean", "accuracy", "kl_to_ref", "entropy", "ess", "clipped_share", "grad_norm", "grad_norm_limit", "loss",
  "policy_age_mean", "policy_age_max", "frac_reward_zero_std", "reward_std", "completions/mean_length",
  "completions/clipped_ratio", "step_s", "wait_s", "waited_s_total", "train_s",
];

export const state = { run: null, stats: null, summary: null, curves: null, problem: null };
const listeners = new Set();
let timer = null, running = false, curvesAt = null, again = false;

let tellKnown;
/** Settled with the first answer about the run: what an empty panel says depends on it. */
export const runKnown = new Promise((resolve) => { tellKnown = resolve; });

/** What an empty panel says that awaits something; files that are shown await nothing. */
export function awaited(text) {
  return state.run?.read_only ? "The files that this view shows hold none." : text;
}

/** Call a function after every answer, until the returned function is called. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Ask now, for example after a command. */
export function refresh() {
  if (running) again = true;
  else cycle();
}

async function cycle() {
  clearTimeout(timer);
  running = true;
  const before = bytesReceived(), began = performance.now();
  let isKnown = true;
  try {
    const [run, stats] = await Promise.all([get("/v1/run", { summary: true }), get("/v1/stats")]);
    Object.assign(state, { run, stats, summary: run.summary, problem: null });
    tellKnown();
    const at = `${run.lineage}-${run.step}`;
    if (at !== curvesAt) {
      state.curves = await get("/v1/curves", { names: CURVE_NAMES.join(","), max_points: 300 });
      curvesAt = at;
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    state.problem = error;
    // without a known token nothing is asked until somebody signs in: the service counts refusals, and delays them
    isKnown = error.status !== 401;
  } finally {
    running = false;
    const fair = 1000 * (bytesReceived() - before) / MAX_BYTES_PER_S - (performance.now() - began);
    const pause = Math.max(document.hidden ? HIDDEN_PAUSE_MS : MIN_PAUSE_MS, fair);
    // before the listeners: one that fails must not end the updates
    if (again || isKnown) timer = setTimeout(cycle, again ? 0 : pause);
    again = false;
  }
  for (const listener of listeners) listener(state);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer !== null && state.problem?.status !== 401) refresh();
});
