"""The rows and panels of the Grafana dashboard, each with its queries and a text that says how to read it.

`BUFFER` and `REWARD` in a query stand for the labels that choose one release.
"""

from __future__ import annotations

from dataclasses import dataclass

STACKED = "stacked"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `queries` are pairs (PromQL, legend), `read` is its hover text, `unit` one of Grafana's."""

    title: str
    read: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    style: str = "lines"


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str, labels: str = "BUFFER") -> tuple[str, str]:
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))", f"{{{{{by}}}}}"


def _per_s(metric: str, legend: str, labels: str = "BUFFER") -> tuple[str, str]:
    return f"sum(rate({metric}{{{labels}}}[$__rate_interval]))", legend


def _trainer(name: str) -> tuple[str, str]:
    return f'max(tba_trainer_gauge{{BUFFER,name="{name}"}})', name


def _searchers(name: str) -> tuple[str, str]:
    return f'max(tba_searcher_gauge{{BUFFER,name="{name}"}})', name


def _quantile(share: float, metric: str, by: str = "", labels: str = "BUFFER") -> tuple[str, str]:
    keys = f"le, {by}" if by else "le"
    legend = f"p{share * 100:.0f}" + (f" {{{{{by}}}}}" if by else "")
    return (
        f"histogram_quantile({share}, sum by ({keys}) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))",
        legend,
    )


NOW = Row(
    "What the run does now",
    (
        Panel(
            "State",
            "running, paused, stopping, done or failed. tba status says why.",
            (("max by (state) (tba_run_state{BUFFER}) == 1", "{{state}}"),),
            kind="name",
            width=4,
        ),
        Panel(
            "Step",
            "Optimizer steps that were acknowledged.",
            (("max(tba_run_step{BUFFER})", "step"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Searchers",
            "Alive beside desired. Fewer for longer than a node needs to start: alert TbaSearchersMissing.",
            (
                ('sum(tba_components_alive{BUFFER,kind="searcher"}) or vector(0)', "alive"),
                ("max(tba_searchers_desired{BUFFER})", "desired"),
            ),
            kind="stat",
            width=4,
        ),
        Panel(
            "Trainer waits",
            "Share of the trainer's time in named waits. High: generation is the bottleneck; near 0: training is.",
            (("sum(rate(tba_trainer_wait_seconds_total{BUFFER}[$__rate_interval]))", "share"),),
            unit="percentunit",
            kind="stat",
            width=4,
        ),
        Panel(
            "Last sign of life",
            "Of each kind of component, the age of its newest heartbeat or answer.",
            (("max by (kind) (tba_component_heartbeat_age_seconds{BUFFER})", "{{kind}}"),),
            unit="s",
            kind="stat",
            width=4,
        ),
        Panel(
            "Redis is durable",
            "durable 1: Redis keeps what is acknowledged; 0: writes are refused, and GET /readyz says why. lost 1: "
            "Redis lacks acknowledged changes; beside it how many losses, and changes in them, were accepted so far.",
            (
                ("min(tba_redis_durable{BUFFER})", "durable"),
                ("max(tba_redis_lost_data{BUFFER})", "lost"),
                ("max(tba_redis_losses_accepted_total{BUFFER})", "losses accepted"),
                ("max(tba_redis_lost_changes_total{BUFFER})", "changes lost"),
            ),
            kind="stat",
            width=4,
        ),
    ),
)

LEARNING = Row(
    "How it learns",
    (
        Panel(
            "Reward",
            "Of the last batch, of what slots draw as recent data, and the share of successes. Rising is learning; "
            "flat from the start is a task too hard or too easy, or a reward that always fails.",
            (
                _trainer("reward_mean"),
                ("max(tba_buffer_mean_reward_recent{BUFFER})", "recent data"),
                _trainer("accuracy"),
            ),
        ),
        Panel(
            "Loss and gradient norm",
            "Of the last step. Spikes that stay: lower the learning rate (tba set), or let a guard skip them.",
            (_trainer("loss"), _trainer("grad_norm")),
        ),
        Panel(
            "How far from where it samples and from where it began",
            "Nats: KL to the reference; trainer minus sampler per token (a gap on policy is a numerical difference of "
            "engines). ess: effective share of the batch; near 0 the data is too old.",
            (
                _trainer("kl_to_ref"),
                _trainer("log_ratio_token_mean"),
                _trainer("logprob_gap_on_policy"),
                _trainer("ess"),
            ),
        ),
        Panel(
            "Steps per minute",
            "Optimizer steps. It drops when the trainer waits (row below) or when responses become long.",
            (("60 * sum(deriv(tba_run_step{BUFFER}[$__rate_interval]))", "steps/min"),),
        ),
        Panel(
            "Learning rate and beta",
            "As the schedules and live changes (tba set) have them now.",
            (_trainer("learning_rate"), _trainer("beta")),
        ),
        Panel(
            "Skipped batches and refused rollouts",
            "Per second, by reason. A guard that skips, or rollouts that the trainer cannot use (docs/trainer.md).",
            (
                ("sum by (reason) (rate(tba_skipped_batches_total{BUFFER}[$__rate_interval]))", "skipped: {{reason}}"),
                ("sum by (reason) (rate(tba_trainer_refused_total{BUFFER}[$__rate_interval]))", "refused: {{reason}}"),
            ),
        ),
    ),
)

FRESH = Row(
    "Fresh, and never idle",
    (
        Panel(
            "Policy age of what was trained on",
            "Optimizer steps between a rollout's weights and the trainer. Rising: training outruns generation, or "
            "searchers load new versions late.",
            (_quantile(0.5, "tba_policy_age_steps"), _quantile(0.95, "tba_policy_age_steps")),
        ),
        Panel(
            "Slots of batches",
            "Share of slots that drew recent data, replay, or replay because there was nothing recent (fallback). The "
            "recipe's m is the share of recent to expect.",
            (
                (
                    "sum by (kind) (rate(tba_buffer_slots_total{BUFFER}[$__rate_interval])) "
                    "/ ignoring (kind) group_left sum(rate(tba_buffer_slots_total{BUFFER}[$__rate_interval]))",
                    "{{kind}}",
                ),
            ),
            unit="percentunit",
            style=STACKED,
        ),
        Panel(
            "Newest version behind the trainer",
            "Steps since the newest announced version. It saws up to sync_interval; above that, publishing is slow.",
            (('max(tba_run_step{BUFFER}) - max(tba_weight_version{BUFFER,role="buffer"})', "steps"),),
        ),
        Panel(
            "What the trainer waits for",
            "Seconds per second, by the name of the wait (docs/operations.md, Waits).",
            (_rate("tba_trainer_wait_seconds_total", "name"),),
            unit="percentunit",
            style=STACKED,
        ),
        Panel(
            "Longest wait now",
            "By kind of component and name of the wait. A wait past its own deadline is a defect (TbaWaitOverdue).",
            (
                ("max by (kind, name) (tba_component_wait_seconds{BUFFER})", "{{kind}}: {{name}}"),
                ("max by (kind) (tba_component_wait_overdue_seconds{BUFFER}) > 0", "overdue: {{kind}}"),
            ),
            unit="s",
        ),
        Panel(
            "Who waits",
            "Components in each wait. trainer-ahead: the trainer is the bottleneck; rollouts: generation is.",
            (("sum by (name) (tba_waits{BUFFER})", "{{name}}"),),
            style=STACKED,
        ),
    ),
)

THROUGHPUT = Row(
    "Throughput",
    (
        Panel(
            "Rollouts per second",
            "Generated (new at the buffer), drawn for batches, and trained on.",
            (
                _per_s("tba_rollouts_total", "generated", 'BUFFER,outcome="new"'),
                _per_s("tba_drawn_rollouts_total", "drawn"),
                _per_s("tba_trained_rollouts_total", "trained"),
            ),
        ),
        Panel(
            "Tokens per second",
            "Of completions: decoded by all engines, generated (stored by the buffer), trained on. Decoded far above "
            "generated: work is lost on the way, by aborts or refusals.",
            (
                ('max(tba_searcher_gauge{BUFFER,name="tokens_per_s"})', "decoded"),
                _per_s("tba_generated_tokens_total", "generated"),
                _per_s("tba_trained_tokens_total", "trained"),
            ),
        ),
        Panel(
            "Work at the searchers",
            "Rollouts of all searchers: being decoded, queued for the engine, finished but not yet acknowledged.",
            (_searchers("active_slots"), _searchers("waiting_requests"), _searchers("unpushed")),
        ),
        Panel(
            "Seconds of a step",
            "Computing and waiting; the slower one of generation and training makes the other wait.",
            (_trainer("step_s"), _trainer("wait_s")),
            unit="s",
        ),
        Panel(
            "Trained per generated rollout",
            "Over the whole run; flow control holds the recipe's sampling.samples_per_insert.",
            (('sum(tba_trained_rollouts_total{BUFFER}) / sum(tba_rollouts_total{BUFFER,outcome="new"})', "ratio"),),
        ),
        Panel(
            "Components alive",
            "By kind, those that fell silent without ending by themselves, and how many searchers are desired.",
            (
                ("sum by (kind) (tba_components_alive{BUFFER})", "{{kind}}"),
                ("sum by (kind) (tba_components_silent{BUFFER}) > 0", "silent: {{kind}}"),
                ("max(tba_searchers_desired{BUFFER})", "searchers desired"),
            ),
        ),
        Panel(
            "Time of components",
            "Time that components of each kind were there, added up since the run began.",
            (("sum by (kind) (tba_component_seconds_total{BUFFER})", "{{kind}}"),),
            unit="s",
            width=12,
        ),
    ),
)

STORED = Row(
    "The buffer",
    (
        Panel(
            "Stored rollouts",
            "scored can be drawn, pending wait for a reward, failed have an error instead of one.",
            (("sum by (status) (tba_buffer_rollouts{BUFFER})", "{{status}}"),),
            style=STACKED,
        ),
        Panel(
            "Bytes",
            "Payload as pushed (Redis needs about 1.3 times as much) and the index in the buffer's memory.",
            (
                ("sum(tba_buffer_payload_bytes{BUFFER})", "payload"),
                ("sum(tba_buffer_index_bytes{BUFFER})", "index"),
            ),
            unit="bytes",
        ),
        Panel(
            "Leases",
            "Visits per second: granted, fulfilled, expired (a searcher died or was too slow), returned, refused.",
            (_rate("tba_buffer_leases_total", "event"),),
        ),
        Panel(
            "Prompts",
            "Uploaded, and those that can fill a slot of a batch now.",
            (
                ("sum by (split) (tba_prompts{BUFFER})", "{{split}}"),
                ("sum(tba_buffer_drawable_prompts{BUFFER})", "drawable"),
            ),
        ),
        Panel(
            "Open leases, and the tail of the log",
            "Visits under way; log positions that a restart of the buffer replays one by one.",
            (
                ("sum(tba_buffer_open_leases{BUFFER})", "open leases"),
                ("sum(tba_buffer_log_events_since_checkpoint{BUFFER})", "log events since its checkpoint"),
            ),
        ),
    ),
)

DROPS = Row(
    "What is dropped, and why",
    (
        Panel(
            "Evicted, by reason",
            "Rollouts per second that left the buffer (docs/operations.md, Bounds).",
            (_rate("tba_buffer_evicted_total", "reason"),),
            style=STACKED,
        ),
        Panel(
            "Refused pushes and void batches",
            "Rollouts per second that were not stored, by reason, and those of batches that became void.",
            (
                _rate("tba_buffer_refused_total", "reason"),
                _per_s("tba_void_rollouts_total", "in void batches"),
            ),
        ),
    ),
)

REWARD = Row(
    "The reward service",
    (
        Panel(
            "Completions, by result",
            "Per second. Everything but scored is an error with a reason, never a reward of 0.",
            (
                (
                    "sum by (task, result) (rate(tba_reward_verifications_total{REWARD}[$__rate_interval]))",
                    "{{task}}: {{result}}",
                ),
            ),
            style=STACKED,
        ),
        Panel(
            "Seconds per request of a task",
            "From taking up a task's items to their results.",
            (
                _quantile(0.5, "tba_reward_seconds", "task", "REWARD"),
                _quantile(0.95, "tba_reward_seconds", "task", "REWARD"),
            ),
            unit="s",
        ),
        Panel(
            "Work and workers",
            "Completions that wait for a process or an answer; scores known already; workers lost, by cause.",
            (
                ("sum(tba_reward_pending{REWARD})", "pending"),
                ("sum(rate(tba_reward_cache_hits_total{REWARD}[$__rate_interval]))", "cache hits/s"),
                (
                    "sum by (cause) (increase(tba_reward_worker_losses_total{REWARD}[$__rate_interval]))",
                    "lost: {{cause}}",
                ),
            ),
        ),
    ),
)

REQUESTS = Row(
    "Requests at the buffer",
    (
        Panel(
            "Requests, by operation and status",
            "Per second. 429 is back-pressure, 503 a Redis that is not durable.",
            (
                (
                    "sum by (operation, status) (rate(tba_requests_total{BUFFER}[$__rate_interval]))",
                    "{{operation}} {{status}}",
                ),
            ),
        ),
        Panel(
            "Time of requests",
            "95th percentile. The time of a draw and of a lease includes its long poll.",
            (_quantile(0.95, "tba_request_seconds", "operation"),),
            unit="s",
        ),
        Panel(
            "In flight",
            "Requests being served.",
            (("sum by (operation) (tba_requests_in_flight{BUFFER})", "{{operation}}"),),
        ),
    ),
)

CLIENTS = Row(
    "Clients that are refused",
    (
        Panel(
            "Requests without a valid token",
            "Per second. Normally none: an old token after a rotation, or somebody who tries.",
            (
                ("sum(rate(tba_unauthorized_total{BUFFER}[$__rate_interval]))", "buffer"),
                ("sum(rate(tba_unauthorized_total{REWARD}[$__rate_interval]))", "reward"),
            ),
        ),
    ),
)

ROWS = (NOW, LEARNING, FRESH, THROUGHPUT, STORED, DROPS, REWARD, REQUESTS, CLIENTS)
