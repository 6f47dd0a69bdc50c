"""Every Redis key of a run: type, content, owner (what writes it), lifetime. All start with `tba:<run>:`.

A key lives as long as the run, unless the content column says otherwise. Only `batch:<id>` and the pieces of a
checkpoint that was never completed expire by themselves.

| key             | type   | content                                                           | owner                 |
|-----------------|--------|-------------------------------------------------------------------|-----------------------|
| payloads        | hash   | rollout id (16 bytes) -> msgpack bytes; until evicted             | push, score, evict    |
| originals       | hash   | rollout id -> SHA-1 (hex) of the bytes as pushed, once they were  | score, evict          |
|                 |        | replaced by re-scored ones; until evicted                         |                       |
| gone,           | hash   | ids of evicted rollouts, so that a late repeat of their push is   | evict                 |
| gone_before     |        | still a duplicate; the newest 50,000 to 100,000                   |                       |
| log             | stream | events since the checkpoint of the log (index/log.py); compaction | push, publish, score, |
|                 |        | trims it                                                          | evict, draw, read_run,|
|                 |        |                                                                   | start_lineage, compact|
| base            | hash   | generation, position, num_pieces, num_draw_pieces, marks (JSON of | index/log_follower,   |
|                 |        | the publications) of the log's checkpoint; attempts, the last     | compact               |
|                 |        | generation that was begun                                         |                       |
| base:<g>:<i>    | string | piece i of checkpoint generation g: of what was drawn (draws.py), | index/log_follower,   |
|                 |        | then packed CHECKPOINT_DTYPE;                                     | compact               |
|                 |        | until the next; expires when the checkpoint was never completed   |                       |
| replica         | string | epoch of the buffer process that owns the run; every start takes  | buffer_epoch.py       |
|                 |        | the next one                                                      |                       |
| format          | string | FORMAT and the version of tba that began the run with it          | buffer_epoch.py       |
| counters        | hash   | name -> whole number (below)                                      | every script          |
| ages            | hash   | policy age in steps -> rollouts, from acks                        | ack                   |
| prompts         | hash   | prompt id -> canonical JSON                                       | upload                |
| prompt_order    | list   | prompt ids in upload order; the index in it is the prompt number  | upload                |
| cursor          | string | "epoch:offset:size", the next visit                               | lease                 |
| visits          | hash   | visit id -> JSON {p: prompt id, l: lease id or "", n: missing,    | lease, push, return   |
|                 |        | h: searchers that it was leased to}; until it is fulfilled        |                       |
| returned        | list   | visit ids that wait to be leased again                            | lease, return         |
| leases          | hash   | lease id -> JSON {k: kind, s: searcher, v: visit or u: eval unit} | lease; ended by push, |
| lease_deadlines | zset   | lease id -> Unix seconds; moved by renew                          | return, eval_results  |
| evals           | hash   | eval id -> JSON of one evaluation                                 | evaluations.py, eval_*|
| eval_order      | list   | eval ids, oldest first                                            | eval_request          |
| eval_todo       | list   | units "eval id|kind|number" that wait for a lease                 | eval_request, lease   |
| eval_units      | hash   | lease id -> "unit searcher", while the evaluation is open         | lease, evaluations.py |
| eval_results    | hash   | unit -> JSON of its result, while the evaluation is open          | eval_results          |
| eval_done       | hash   | eval id -> units with a result, while the evaluation is open      | eval_results          |
| lineages        | hash   | lineage -> JSON {parent, trainer_id, created_at_s}                | start_lineage,        |
|                 |        |                                                                   | load_snapshot         |
| lineage_        | hash   | request id -> "lineage token" that it took                        | start_lineage         |
| requests        |        |                                                                   |                       |
| run             | hash   | state, reason, change (the last line of run_changes), lineage,    | start_lineage, ack,   |
|                 |        | token, step, latest_version, sampling_version (the one that       | publish, command,     |
|                 |        | searchers sample with), checkpoint,                               |                       |
|                 |        | checkpoint_key; lineage_position (log position at the start of    | register_checkpoint,  |
|                 |        | the lineage); origin (JSON of the snapshot that the run began     | load_snapshot         |
|                 |        | with), origin_cursor (how far in the log of the snapshot it is    |                       |
|                 |        | loaded), forked_from; rollbacks (how many lineages began with a   |                       |
|                 |        | rollback of an alarm); rollback (JSON of an operator's pending    | rollback,             |
|                 |        | one), rollback_by (ids of the last requests); checkpoints_kept    | start_lineage,        |
|                 |        | (that the trainer keeps, as of the last one registered);          | register_checkpoint   |
|                 |        | losses_accepted (how many), changes_lost (number in all of them); | accept_loss           |
|                 |        | loss_accepted_by (request id of the last acceptance);             | accept_loss           |
|                 |        | changes_missing (number of lost changes, not accepted yet)        | lost_changes.py,      |
|                 |        |                                                                   | accept_loss           |
| run_changes     | list   | JSON lines, oldest first: who changed the state or accepted a     | command, accept_loss, |
|                 |        | loss, when and why                                                | start_lineage         |
| components      | hash   | component id -> JSON of its last heartbeat; until silent for 1 h  | components.py         |
| component_times | hash   | kind of component -> seconds that components of it were alive     | component_times.py    |
| trainer_waits   | hash   | total:<wait> -> seconds that trainers waited, ever; seen:<id> ->  | count_waits           |
|                 |        | JSON of what that trainer had waited when it was last counted, of |                       |
|                 |        | the 64 trainers that started last                                 |                       |
| announced       | hash   | every announced version -> log position of its publication        | publish               |
| open_batches    | zset   | "batch id|rollouts|lineage|step" -> deadline, Unix seconds        | draw, ack, read_run,  |
|                 |        |                                                                   | start_lineage         |
| open_steps      | hash   | "lineage|step" -> member of open_batches                          | draw, ack, read_run,  |
|                 |        |                                                                   | start_lineage         |
| batches_since_  | set    | members of open_batches drawn since the last publication, acked   | draw, publish,        |
| mark            |        | ones too, void ones not                                           | read_run,             |
|                 |        |                                                                   | start_lineage         |
| batch:<id>      | string | msgpack: what was drawn, until some time after its deadline       | draw                  |
| ledger          | list   | JSON lines in order: acked batches and resumes                    | ack, start_lineage    |
| ledger_steps    | hash   | "lineage-step" -> batch id                                        | ack                   |
| trained         | list   | msgpack, oldest first: a step, with A_j and weight of each rollout| ack                   |
|                 |        | that it consumed (rollouts/trained_steps.py); of the newest       |                       |
|                 |        | MAX_TRAINED_STEPS (rollouts/trained_steps.py)                     |                       |
| settings        | hash   | revision of the live settings; value:<name> -> JSON, of those     | settings              |
|                 |        | that were changed                                                 |                       |
| settings_       | list   | JSON lines, one per revision, oldest first: who changed what      | settings              |
| changes         |        |                                                                   |                       |
| settings_       | hash   | request id -> revision that it made                               | settings              |
| requests        |        |                                                                   |                       |
| scaling         | hash   | revision; wanted, the desired number of searchers (absent: as the | scale                 |
|                 |        | recipe or chart says)                                             |                       |
| scaling_changes | list   | JSON lines, one per revision, oldest first: who asked for how many| scale                 |
| scaling_        | hash   | request id -> revision that it made                               | scale                 |
| requests        |        |                                                                   |                       |
| rescore         | string | JSON of the re-scoring job, running or last                       | rescore.py            |

Counters: acknowledged (changes that somebody was told are stored: lost_changes.py); log_position (of the last event);
draw_position (of the last draw); evicted_number (of the last eviction); generated, loaded (from a snapshot),
scored_total, pushed:<outcome>, refused:<code>, evicted:<reason>, rescored:<outcome> (ever); inflight (rollouts that
open train leases still owe); drawn, void (rollouts drawn; of those, in batches that became void), trained, batches;
skipped:<reason> (batches), trainer_refused:<reason> (rollouts of batches); trained_steps:dropped (records that were
trimmed from `trained`); tokens:generated, tokens:trained (completion tokens); foreign:<what> (writes to what belongs
to another component); scaling_failures:<reason> (calls of the Kubernetes API); slots:<what>; leases:<what>; marks
(publications); scored_at_mark (scored_total at the last publication). The rollouts that are stored now (live, by
status, bytes) are not counted, because the index knows them.
"""

from __future__ import annotations

from tba import __version__

FORMAT = 5
"""The number of the storage format described here; every change of content or meaning increases it. tba 0.1 had none,
0.2 had 2."""
FORMAT_TEXT = f"{FORMAT} {__version__}"


class Keys:
    """The key names of one run that Python uses. Scripts build key names from `prefix` (context.py).

    Args:
        run: the run's name.
    """

    def __init__(self, run: str) -> None:
        self.prefix = f"tba:{run}:"
        self.payloads = self.prefix + "payloads"
        self.originals = self.prefix + "originals"
        self.gone = self.prefix + "gone"
        self.gone_before = self.prefix + "gone_before"
        self.log = self.prefix + "log"
        # names in Redis never change, where the code has better ones by now: runs continue over an upgrade
        self.log_checkpoint = self.prefix + "base"
        self.epoch = self.prefix + "replica"
        self.rescore = self.prefix + "rescore"
        self.format = self.prefix + "format"
        self.counters = self.prefix + "counters"
        self.ages = self.prefix + "ages"
        self.prompts = self.prefix + "prompts"
        self.prompt_order = self.prefix + "prompt_order"
        self.cursor = self.prefix + "cursor"
        self.visits = self.prefix + "visits"
        self.leases = self.prefix + "leases"
        self.evals = self.prefix + "evals"
        self.eval_order = self.prefix + "eval_order"
        self.eval_todo = self.prefix + "eval_todo"
        self.eval_units = self.prefix + "eval_units"
        self.eval_results = self.prefix + "eval_results"
        self.eval_done = self.prefix + "eval_done"
        self.lineages = self.prefix + "lineages"
        self.run = self.prefix + "run"
        self.run_changes = self.prefix + "run_changes"
        self.components = self.prefix + "components"
        self.component_times = self.prefix + "component_times"
        self.trainer_waits = self.prefix + "trainer_waits"
        self.open_steps = self.prefix + "open_steps"
        self.announced = self.prefix + "announced"
        self.ledger = self.prefix + "ledger"
        self.settings = self.prefix + "settings"
        self.settings_changes = self.prefix + "settings_changes"
        self.scaling = self.prefix + "scaling"
        self.scaling_changes = self.prefix + "scaling_changes"
        self.ledger_steps = self.prefix + "ledger_steps"
        self.trained = self.prefix + "trained"

    def batch(self, batch_id: str) -> str:
        """Return the key of the record of one drawn batch."""
        return f"{self.prefix}batch:{batch_id}"

    def checkpoint_piece(self, generation: int, number: int) -> str:
        """Return the key of one piece of a checkpoint of the log."""
        return f"{self.prefix}base:{generation}:{number}"
