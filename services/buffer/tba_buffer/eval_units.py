"""The units of an evaluation: one kind (`sample`, `greedy`) of one held-out prompt."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("sample", "greedy")


@dataclass(frozen=True, slots=True)
class Unit:
    """One kind of one held-out prompt of one evaluation."""

    eval_id: str
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.eval_id}|{self.kind}|{self.number}"

    @classmethod
    def parse(cls, text: str) -> Unit:
        """Read what `str` wrote."""
        eval_id, kind, number = text.split("|")
        return cls(eval_id, kind, int(number))
