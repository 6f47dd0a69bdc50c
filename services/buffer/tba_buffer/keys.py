"""Every Redis key of a run. All start with `tba:<run>:`; only `batch:<id>` ever expires.

| key             | type   | content                                                           | written by            |
|-----------------|--------|-------------------------------------------------------------------|-----------------------|
| payloads        | hash   | rollout id (16 bytes) -> the msgpack bytes as they were pushed    | push.lua (also evicts)|
| log             | stream | rollouts, evictions and marks in order (log.py); trimmed to what  | push.lua, mark.lua    |
|                 |        | the index still needs                                             |                       |
| marks           | list   | the newest marks, "position lineage step", oldest first           | mark.lua              |
| counters        | hash   | name -> whole number (below)                                      | every script          |
| ages            | hash   | policy age in steps -> rollouts, from acks                        | ack.lua               |
| prompts         | hash   | prompt id -> canonical JSON                                       | upload.lua            |
| prompt_order    | list   | prompt ids in upload order; the index in it is the prompt number  | upload.lua            |
| cursor          | string | "epoch:offset:size", the next visit                               | lease.lua             |
| visits          | hash   | visit id -> JSON {p: prompt id, l: lease id or "", n: missing}    | lease.lua, push.lua   |
|                 |        | for every visit that is not fulfilled                             |                       |
| returned        | list   | visit ids that wait to be leased again                            | lease.lua, return.lua |
| leases          | hash   | lease id -> JSON {k: kind, s: searcher, v: visit or u: eval unit} | lease.lua; removed by |
| lease_deadlines | zset   | lease id -> Unix seconds; moved by renew.lua                      | push, return, results |
| evals           | hash   | eval id -> JSON of one evaluation                                 | evals.py, eval_*.lua  |
| eval_order      | list   | eval ids, oldest first                                            | eval_request.lua      |
| eval_todo       | list   | units "eval id|kind|number" that wait for a lease                 | eval_request, lease   |
| eval_units      | hash   | lease id -> unit, while the evaluation is open                    | lease.lua, evals.py   |
| eval_results    | hash   | unit -> JSON of its result, while the evaluation is open          | eval_results.lua      |
| eval_done       | hash   | eval id -> units with a result, while the evaluation is open      | eval_results.lua      |
| lineages        | hash   | lineage -> JSON {parent, trainer_id, created_at_s}                | lineage.lua           |
| run             | hash   | state, reason, lineage, token, step, latest_version, checkpoint,  | run scripts           |
|                 |        | checkpoint_key, marked_version, marked_position                   |                       |
| components      | hash   | component id -> JSON of its last heartbeat                        | components.py         |
| announced       | set    | every version that a mark announced                               | mark.lua              |
| open_batches    | zset   | "batch id|rollouts|lineage|step" -> deadline, Unix seconds        | draw.lua, ack.lua     |
| batches_since_  | set    | members of open_batches as drawn since the last mark, acked ones  | draw.lua, mark.lua,   |
| mark            |        | too, void ones not                                                | void.lua, lineage.lua |
| batch:<id>      | string | msgpack: what was drawn, until some time after its deadline       | draw.lua              |
| ledger          | list   | JSON of acked batches in order                                    | ack.lua               |
| ledger_steps    | hash   | "lineage-step" -> batch id                                        | ack.lua               |

Counters: log_position, first_live, live, scored, pending, failed, payload_bytes (of what is stored now); generated,
scored_total, pushed:<outcome>, refused:<code>, evicted:<reason> (ever); inflight (rollouts that open train leases
still owe); drawn, void (rollouts drawn; of those, in batches that became void), trained, batches; slots:<what>;
leases:<what>; marks; scored_at_mark.
"""

from __future__ import annotations


class Keys:
    """The key names of one run.

    Args:
        run: the run's name.
    """

    def __init__(self, run: str) -> None:
        self._prefix = f"tba:{run}:"
        self.payloads = self._prefix + "payloads"
        self.log = self._prefix + "log"
        self.marks = self._prefix + "marks"
        self.counters = self._prefix + "counters"
        self.ages = self._prefix + "ages"
        self.prompts = self._prefix + "prompts"
        self.prompt_order = self._prefix + "prompt_order"
        self.cursor = self._prefix + "cursor"
        self.visits = self._prefix + "visits"
        self.returned = self._prefix + "returned"
        self.leases = self._prefix + "leases"
        self.lease_deadlines = self._prefix + "lease_deadlines"
        self.evals = self._prefix + "evals"
        self.eval_order = self._prefix + "eval_order"
        self.eval_todo = self._prefix + "eval_todo"
        self.eval_units = self._prefix + "eval_units"
        self.eval_results = self._prefix + "eval_results"
        self.eval_done = self._prefix + "eval_done"
        self.lineages = self._prefix + "lineages"
        self.run = self._prefix + "run"
        self.components = self._prefix + "components"
        self.open_batches = self._prefix + "open_batches"
        self.batches_since_mark = self._prefix + "batches_since_mark"
        self.announced = self._prefix + "announced"
        self.ledger = self._prefix + "ledger"
        self.ledger_steps = self._prefix + "ledger_steps"

    def batch(self, batch_id: str) -> str:
        """The record of one drawn batch."""
        return f"{self._prefix}batch:{batch_id}"
