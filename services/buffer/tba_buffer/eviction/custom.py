"""Eviction policies from outside: the classes that `buffer.eviction_policies` names by import path or entry point."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tba import plugins
from tba.errors import ConfigError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_buffer.eviction.policies import (
    NO_ROWS,
    DuplicateTokens,
    EvictionPlan,
    EvictionPolicy,
    MaxBytes,
    MaxRollouts,
    NearDuplicate,
    PolicyAge,
    PromptCap,
)
from tba_buffer.index.rollout_index import Rows

WHAT = "buffer.eviction_policies"
_TAKEN = {policy.reason for policy in (DuplicateTokens, MaxBytes, MaxRollouts, NearDuplicate, PolicyAge, PromptCap)}
_REASON = re.compile(r"[a-z][a-z0-9_]{0,62}")
log = get_logger("eviction")


def load_policies(names: Sequence[str]) -> list[EvictionPolicy]:
    """Return the policies that a recipe names: each is made by a call without arguments.

    Raises:
        ConfigError: one cannot be imported, makes no `EvictionPolicy`, or has a reason that it cannot have.
    """
    policies, taken = list[EvictionPolicy](), set(_TAKEN)
    for name in names:
        policy = plugins.build(name, group="tba.eviction_policies", what=WHAT, kind=EvictionPolicy)
        reason = getattr(policy, "reason", None)
        if not isinstance(reason, str) or not _REASON.fullmatch(reason) or reason in taken:
            raise ConfigError(
                f"{WHAT} {name!r} has the reason {reason!r:.60}; it must be a name in lower case that no other policy "
                f"has (taken are {', '.join(sorted(taken))})"
            )
        taken.add(reason)
        policies.append(_Checked(name, policy))
    return policies


class _Checked(EvictionPolicy):
    """A policy from outside whose rows are checked: a wrong row would evict another rollout, or none.

    One that raises drops nothing; the caps still hold.
    """

    def __init__(self, name: str, policy: EvictionPolicy) -> None:
        self._name, self._policy = name, policy
        self.reason = policy.reason  # pyright: ignore[reportAttributeAccessIssue]  # of the instance: one class for all
        self.needs_new_rows = policy.needs_new_rows  # pyright: ignore[reportAttributeAccessIssue]
        self._has_failed = False

    def choose(self, plan: EvictionPlan) -> Rows:
        """Return the live ones of the rows that the policy chooses."""
        try:
            rows = np.asarray(self._policy.choose(plan))
            if not rows.size:
                return NO_ROWS
            if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
                raise TypeError(f"choose returned {rows.dtype} of shape {rows.shape}, not row numbers")
            return np.intersect1d(rows, plan.index.live_rows()).astype(np.int64)
        except Exception:  # foreign code raises anything, and rollouts are stored already: no push may fail for it
            self._log_failure()
            return NO_ROWS

    def is_due(self, now: PolicyVersion) -> bool:
        """Return what the policy says."""
        try:
            return bool(self._policy.is_due(now))
        except Exception:
            self._log_failure()
            return False

    def _log_failure(self) -> None:
        if not self._has_failed:  # one traceback, not one per push
            log.exception("eviction_policy_failed", policy=self._name)
        self._has_failed = True
