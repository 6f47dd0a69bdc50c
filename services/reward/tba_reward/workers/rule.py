"""Which rule a worker process applies."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from tba_reward.scorers.base import Params

RuleKey = tuple[str, str, str | None, bool, int | None]


@dataclass(frozen=True, kw_only=True)
class WorkerRule:
    """A rule that worker processes can find.

    Attributes:
        function: `module:name` of a Rule, or of a BatchRule where `batch_items` is given.
        params: given to it with every item; made of what JSON can say.
        prepare: `module:name` of a function (params) -> None that is called once before the first item, under a
            deadline of its own (`reward.worker_start_s`): slow imports belong here.
        shared: the module and `prepare` are our own and safe to run once in the nursery that all workers are forked
            from (no threads, no foreign code): a worker that replaces a killed one is then ready at once.
        batch_items: most items of one call of a BatchRule; None: the function is a Rule.
    """

    function: str
    params: Params = field(default_factory=dict)
    prepare: str | None = None
    shared: bool = False
    batch_items: int | None = None

    @property
    def key(self) -> RuleKey:
        """What makes two rules the same one."""
        return self.function, self.params_json, self.prepare, self.shared, self.batch_items

    @property
    def params_json(self) -> str:
        """The params as text."""
        return json.dumps(dict(self.params), sort_keys=True)
