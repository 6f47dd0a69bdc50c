"""The end product: any published version as a Hugging Face folder with a model card, made without torch."""

from tba.export.card import RunFacts, render_card
from tba.export.folder import write_export

__all__ = ["RunFacts", "render_card", "write_export"]
