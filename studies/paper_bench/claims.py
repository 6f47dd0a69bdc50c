"""The paper's claims: its statement and number, as our notes of the paper have them, and what decides each in small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from studies.paper_bench.arms import WORLDS
from studies.paper_bench.data import Done
from studies.paper_bench.evidence import (
    OVERLAP_TARGET,
    TLDR_KL,
    Evidence,
    mean_success,
)
from studies.paper_bench.verdicts import Pairs, Verdict, judge

KEEPS_UP = 0.05
"""Margin of claims that something costs nothing: what may be lost, in the unit of the figure."""
NUM_ATTACKS = 64
"""Attacks of a version among which families are counted: as many as the samples in which our notes count answers."""
OVERLAP_LINK = "[overlap](../overlap/cells.jsonl), rehearsed at the pace of GPUs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row. `pairs` has the side first that is the greater one if the claim holds."""

    about: str
    paper: str
    figure: str
    """Ours, in words: what is compared, and where."""
    pairs: Callable[[Evidence], Pairs]
    why: str
    """What the comparison can and cannot say."""
    margin: float = 0.0
    is_ratio: bool = False

    def verdict(self, evidence: Evidence) -> Verdict | None:
        """Return what the data says; None: no pair has been run."""
        found = self.pairs(evidence)
        return judge(found, margin=self.margin, is_ratio=self.is_ratio) if found else None


def _metric(done: Done) -> float | None:
    return done.value(WORLDS[done.world].metric)


def _value(metric: str, version: str = "last") -> Callable[[Done], float | None]:
    return lambda done: done.value(metric, version)


def _gap(
    world: str, ours: str, theirs: str, figure: Callable[[Done], float | None] = _metric
) -> Callable[[Evidence], Pairs]:
    return lambda evidence: evidence.pairs(world, ours, theirs, figure)


def _train_s(done: Done) -> float | None:
    # a run that ended early is not a fast one
    return done.result["train_s"] if done.result["state"] == "done" else None


def _speed() -> Iterator[Claim]:
    about, paper = "speed against synchronous training", "GSM8K: 54.6 % after 82 min; TRL's GRPO ends at 49.05 %"
    yield Claim(
        about=about,
        paper=paper,
        figure=f"seconds to {OVERLAP_TARGET:g}, lock-step over asynchronous, 4 searchers; {OVERLAP_LINK}",
        pairs=lambda evidence: evidence.overlap((4, True), (4, False)),
        is_ratio=True,
        why="same system, objective and hardware; most of it is lock-step's own overhead between its phases, on shared "
        "cores ([overlap](../results.md#overlap)); the paper compares with another library",
    )
    for ours, name in (("tba_prime", "`tba_prime`"), ("tb-published-beta", "`tb` with the published beta")):
        yield Claim(
            about=about,
            paper=paper,
            figure=f"gsm8k: accuracy at the end, {name} against GRPO in lock-step, equal steps",
            pairs=_gap("gsm8k", ours, "grpo-lockstep"),
            why="GRPO has the recipe's settings and is not tuned; the paper's GSM8K is `tb`",
        )
    for world, lock_step in (("gsm8k", "grpo-lockstep"), ("math", "tba_prime-lag10")):
        yield Claim(
            about="overlap on the same cores (C11)",
            paper="generation and training at once; no number",
            figure=f"{world}: seconds of training, `{lock_step}` (alternating) over `tba_prime`, equal steps",
            pairs=_gap(world, lock_step, "tba_prime", _train_s),
            is_ratio=True,
            why="both sides fill the same two cores, other work shares them, and nothing is paced"
            + ("; two objectives" if world == "gsm8k" else ""),
        )
    yield Claim(
        about="searchers: speed",
        paper="red-teaming on 4 to 64 GPUs; the published code was slower on 64 than on 4",
        figure=f"seconds to {OVERLAP_TARGET:g}, 1 searcher over 4, both asynchronous; {OVERLAP_LINK}",
        pairs=lambda evidence: evidence.overlap((1, False), (4, False)),
        is_ratio=True,
        why="the quickstart, not red-teaming",
    )


def _frontier() -> Iterator[Claim]:
    paper = "TL;DR, 410M: win rate 0.86; at lag 16 DPO 0.82, RLOO 0.77, PPO 0.76, at lag 1 to 2 all 0.82 to 0.86"
    figure = "tldr: win rate on `tb`'s front against the rival's, at the perplexities of its points; mean of the rivals"
    not_tuned = "`tb` has three betas, a rival one or two KL weights; they have the recipe's rate and are not tuned"
    yield Claim(
        about="reward-KL front (C10), old data",
        paper=paper,
        figure=f"{figure}, lag 15",
        pairs=lambda evidence: evidence.front(15),
        why=f"`tb` streams; {not_tuned}",
    )
    yield Claim(
        about="reward-KL front (C10), fresh data",
        paper=paper,
        figure=f"{figure}, lag 1",
        pairs=lambda evidence: evidence.front(1),
        margin=KEEPS_UP,
        why=f"the claim is that `tb` keeps up, within {KEEPS_UP:g}; {not_tuned}",
    )
    yield Claim(
        about="off-policyness (C3): rivals lose",
        paper=paper,
        figure="tldr: win rate of the rivals at lag 1 against lag 15, mean of the rivals",
        pairs=lambda evidence: evidence.lost_with_lag(),
        why="one KL weight each, the recipe's rate, not tuned",
    )
    yield Claim(
        about="off-policyness (C3): TBA keeps",
        paper="TBA' trains at constant lag 2 and 10 (curves)",
        figure="math: accuracy at the end, `tba_prime` at lag 10 against lag 2",
        pairs=_gap("math", "tba_prime-lag10", "tba_prime-lag2"),
        margin=KEEPS_UP,
        why=f"the claim is that it keeps up, within {KEEPS_UP:g}",
    )
    yield Claim(
        about="age of the data (C4)",
        paper="constant in TBA'",
        figure="share of rollouts at exactly the age of the constant lag, against 0.99; mean of the arms",
        pairs=lambda evidence: evidence.exact_ages(),
        why="what is older than the run is taken from the first version",
    )


def _settings() -> Iterator[Claim]:
    yield Claim(
        about="m (C5)",
        paper="published m 0.95",
        figure="gsm8k: the recipe (`tba_prime`) against `m0.5`, metric at the end",
        pairs=_gap("gsm8k", "tba_prime", "m0.5"),
        why="equal training",
    )
    yield Claim(
        about="buffer prioritisation (C8)",
        paper="replay by reward (inverse temperature 1)",
        figure="redteam: success, replay by reward against uniform, mean of steps 40, 80, 120",
        pairs=_gap("redteam", "tb", "uniform", mean_success),
        why="equal training",
    )
    yield Claim(
        about="beta (C7)",
        paper="beta is the position on the reward-KL front",
        figure="tldr: perplexity under the starting model, beta to 0.0125 against beta to 0.2",
        pairs=_gap("tldr", "tb-beta0.0125", "tb-beta0.2", _value(TLDR_KL)),
        why="80 steps are far from the optimum that beta sets",
    )


def _search() -> Iterator[Claim]:
    paper = "94 to 98 % toxic at a cosine distance of 0.42 to 0.49; diverse where reward maximisers collapse"
    distance = "sampled.diversity.cosine_distance_of_successes"
    collapse = "120 steps may be too few for a maximiser to collapse"
    for about, what, figure, why in (
        ("success", "success at the end", _metric, "one setting each"),
        ("diversity", "distance of the successes at the end", _value(distance), collapse),
        ("diversity", "effective families of attacks among the successes", lambda done: done.attacks("num_effective"),
         f"seven families can succeed; {collapse}"),
    ):  # fmt: skip
        for rival in ("reinforce", "grpo"):
            yield Claim(
                about=f"red-team search: {about}",
                paper=paper,
                figure=f"redteam: {what}, `tb` against `{rival}`",
                pairs=_gap("redteam", "tb", rival, figure),
                why=why,
            )
    yield Claim(
        about="near-duplicate filter",
        paper="in the published code, not in the paper; no number",
        figure="redteam: effective families of attacks among the successes, with the filter against without",
        pairs=_gap("redteam", "tb", "no-filter", lambda done: done.attacks("num_effective")),
        why="120 steps; what is found first fills the buffer only later",
    )
    families = f"families with a success among {NUM_ATTACKS} attacks,"
    for what, figure in (
        ("success at step 40", _value(WORLDS["redteam"].metric, "40")),
        ("distance of the successes at step 40", _value(distance, "40")),
        (f"{families} step 40", lambda done: done.families_among(NUM_ATTACKS, "40")),
        (f"{families} end", lambda done: done.families_among(NUM_ATTACKS)),
    ):
        yield Claim(
            about="searchers: search (C9)",
            paper="more searchers find more, and more diverse, attacks in the same time",
            figure=f"redteam at a pace: {what}, 4 searchers against 1, same seconds per step",
            pairs=_gap("redteam", "paced-4", "paced-1", figure),
            why="rehearsed pace; the buffer begins with what searchers generated while the others started"
            + ("; seven families can succeed" if what.startswith(families) else ""),
        )


def _tba_prime() -> Iterator[Claim]:
    paper = "TBA' at lag 10 is at or above on-policy Dr. GRPO (curves; 70 against 67.3 is of the authors' rebuttal)"
    for ours in ("tba_prime-lag10", "tba_prime_published-lag10"):
        yield Claim(
            about="TBA' at large lag",
            paper=paper,
            figure=f"math: accuracy at the end, `{ours}` against on-policy `dr_grpo`",
            pairs=_gap("math", ours, "dr_grpo-lag0"),
            margin=KEEPS_UP,
            why=f"the claim is that it keeps up, within {KEEPS_UP:g}; neither is tuned",
        )
    yield Claim(
        about="TBA' at large lag",
        paper=paper,
        figure="math: accuracy at the end, `tba_prime` against `dr_grpo`, both at lag 10",
        pairs=_gap("math", "tba_prime-lag10", "dr_grpo-lag10"),
        why="neither is tuned",
    )


def _controls() -> Iterator[Claim]:
    for name, world in WORLDS.items():
        recipe = "tba_prime" if name in ("gsm8k", "math") else "tb"
        yield Claim(
            about="rewards teach (control)",
            paper="none",
            figure=f"{name}: `{world.metric}` at the end, `{recipe}` against shuffled rewards",
            pairs=_gap(name, recipe, "control"),
            why="what is left without a signal is drift",
        )


CLAIMS = (*_speed(), *_frontier(), *_settings(), *_search(), *_tba_prime(), *_controls())
