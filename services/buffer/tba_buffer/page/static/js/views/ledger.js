// The ledger: which step consumed which batch, and where resumes continued.

import { get } from "../api.js";
import { fill, h, panel, table } from "../dom.js";
import { number, percent, time } from "../format.js";
import { awaited, runKnown } from "../state.js";

const PAGE = 20, MAX_LINKS = 3;

export function ledger(place) {
  let alive = true;
  fill(place, h("p", { class: "empty" }, "Asking for the ledger."));
  const show = async (wanted) => {
    try {
      // the ledger counts lines from its beginning: the newest page begins PAGE before its end
      const end = wanted ?? (await get("/v1/ledger", { limit: 1 })).num_lines;
      const after = Math.max(0, end - PAGE);
      const page = await get("/v1/ledger", { after, limit: Math.max(1, Math.min(PAGE, end)) });
      await runKnown;
      if (alive) fill(place, content(page.entries, after, show));
    } catch (error) {
      if (alive) fill(place, h("p", { class: "problem", role: "alert" }, error.message));
    }
  };
  show();
  return () => { alive = false; };
}

function content(entries, after, show) {
  const rows = [...entries].reverse().map((entry) => entry.kind === "resume"
    ? [`lineage ${entry.lineage} begins`, time(entry.resumed_at_s), "", "", "", "", `${entry.trainer_id} continues from ${entry.parent}`]
    : [`${entry.lineage}-${entry.step}`, time(entry.acked_at_s), number(entry.num_rollouts), slots(entry.slots), number(entry.metrics.reward_mean ?? null), number(entry.settings_revision ?? 0),
      [entry.abandoned ? "abandoned: the run went back" : null, entry.skipped ? `skipped: ${entry.skipped}` : null,
        Object.entries(entry.refused).map(([reason, num]) => `refused: ${reason} ${num}`).join(", "), links(entry.rollout_ids)]
        .filter((part) => part && part.length !== 0).map((part, at) => [at ? ", " : "", part])]);
  return panel("Ledger", "Every optimizer step of the run, exactly once, with the batch that it consumed: what a resume continues from. Newest first.",
    table("Ledger", ["step", "acked", "rollouts", "recent slots", "mean reward", "settings", "batch"], rows, awaited("The first optimizer step is awaited.")),
    h("p", { class: "tools" }, h("button", { onclick: () => show() }, "Newest"), after > 0 ? h("button", { onclick: () => show(after) }, "Older") : null));
}

function slots(counts) {
  return counts.total ? `${percent(counts.recent / counts.total)} of ${counts.total}` : "-";
}

function links(ids) {
  return [ids.slice(0, MAX_LINKS).map((id, at) => [at ? " " : "", h("a", { href: `#/rollout/${id}` }, id.slice(-8))]),
    ids.length > MAX_LINKS ? ` + ${ids.length - MAX_LINKS} more` : ""];
}
