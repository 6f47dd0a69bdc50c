// The frame of the page: sign-in, header, tabs, and which view the address asks for.

import { decoded, takeToken, withToken } from "./api.js";
import { fill, fillIfChanged, h, withCode } from "./dom.js";
import { number } from "./format.js";
import { endSignIn, signIn } from "./signin.js";
import { refresh, subscribe } from "./state.js";
import { commandButtons } from "./commands.js";
import { overview } from "./views/overview.js";
import { rollouts } from "./views/rollouts.js";
import { rollout } from "./views/rollout.js";
import { prompts } from "./views/prompts.js";
import { prompt } from "./views/prompt.js";
import { fleet } from "./views/fleet.js";
import { settings } from "./views/settings.js";
import { ledger } from "./views/ledger.js";

/** Path -> [name of the tab or null, view]. A view fills the element that it gets, and returns what ends it. */
const VIEWS = [
  ["", "Overview", overview],
  ["rollouts", "Rollouts", rollouts],
  ["rollout", null, rollout],
  ["prompts", "Prompts", prompts],
  ["prompt", null, prompt],
  ["fleet", "Searchers and versions", fleet],
  ["settings", "Settings", settings],
  ["ledger", "Ledger", ledger],
];
const PARENT = { rollout: "rollouts", prompt: "prompts" };
const main = document.getElementById("main");
let leave = null;

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").map(decoded);
  const found = VIEWS.find(([name]) => name === parts[0]) ?? VIEWS[0];
  return { name: found[0], view: found[2], argument: parts.slice(1).join("/"), query: new URLSearchParams(query) };
}

function show() {
  const { name, view, argument, query } = route();
  leave?.();
  const place = h("div", {});
  fill(main, place);
  leave = view(place, { argument, query }) ?? null;
  const current = PARENT[name] ?? name;
  fill(document.getElementById("tabs"), h("ul", {}, VIEWS.filter(([, tab]) => tab).map(([path, tab]) => h("li", {},
    h("a", { href: `#/${path}`, "aria-current": path === current ? "page" : null }, tab)))));
}

function header({ run, summary, problem }) {
  const text = document.getElementById("problem");
  text.hidden = problem === null || problem.status === 401;
  text.textContent = text.hidden ? "" : `${problem.message}. The page shows the last answer and asks again.`;
  if (problem?.status === 401) signIn(() => { refresh(); show(); });
  if (run === null) return;
  // served by the list of runs
  if (/\/runs\/[^/]+\/$/.test(location.pathname)) fillIfChanged(document.getElementById("up"), true, () => h("a", { href: withToken("../../") }, "All runs"));
  document.title = `${run.run}: ${summary.state}, step ${run.step} - tba`;
  document.getElementById("run-name").textContent = run.run;
  const badge = document.getElementById("run-state");
  if (badge.textContent !== summary.state) badge.textContent = summary.state; // a live region: the same text again would be read again
  badge.dataset.state = summary.state;
  document.getElementById("run-facts").textContent =
    `step ${number(run.step)}, lineage ${run.lineage}, weights ${run.latest_version ?? "none yet"}`;
  fillIfChanged(document.getElementById("doing"), [summary, run.note, run.loss, run.rollback], () =>
    withCode(`${[run.loss, run.note, run.rollback && `a rollback to ${run.rollback.version} waits for the trainer`, summary.doing, summary.learning].filter(Boolean).map(sentence).join(" ")} `));
  fillIfChanged(document.getElementById("advice"), [summary.finding, summary.remedy], () => withCode(`${summary.finding} ${summary.remedy ?? ""}`));
  fillIfChanged(document.getElementById("commands"), [run.state, run.read_only, run.latest_version === null, run.rollback], () => commandButtons(run));
}

/** A text as a sentence. */
function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}

/** Ask with the token that is there now. */
function signedIn() {
  endSignIn();
  refresh();
}

takeToken();
subscribe(header);
addEventListener("hashchange", () => { if (takeToken()) signedIn(); show(); main.focus({ preventScroll: true }); scrollTo(0, 0); });
// a link to where the page is already asks again: the newest rollouts are other ones by now
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#/']");
  if (link && link.hash === location.hash) show();
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
show();
refresh();
fill(document.getElementById("foot"), h("p", {}, "charts: uPlot (", h("a", { href: "page/vendor/uPlot.LICENSE", target: "_blank", rel: "noopener" }, "MIT"), ")"));
