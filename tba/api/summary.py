"""GET /v1/summary: where a run stands, in sentences."""

from __future__ import annotations

from tba.fields import StrictModel


class RunSummary(StrictModel):
    """What a run does, how it learns, what waits for what, and what to try; each one sentence or none."""

    doing: str
    learning: str | None
    """None: no step has been made."""
    waiting: str | None
    """None: nothing has waited for longer than a moment."""
    advice: str | None
    """None: nothing calls for it."""

    @property
    def text(self) -> str:
        """The sentences, one after the other."""
        return " ".join(part for part in (self.doing, self.learning, self.waiting, self.advice) if part)
