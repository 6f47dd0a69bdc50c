"""The section about where metrics go beside the ledger."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.config.base import StrictModel


class WandbSection(StrictModel):
    """Weights & Biases (`pip install -e './services/trainer[wandb]'`)."""

    project: str = Field(default="tba", min_length=1)
    """Project of the runs."""
    entity: str | None = None
    """User or team; none: the default of the account."""
    mode: Literal["online", "offline"] = "online"
    """`offline`: files in `folder` only; `wandb sync` uploads them later."""
    folder: str = "wandb"
    """Where its files go; `tba run` takes a relative path to be in the run folder."""


class TrackioSection(StrictModel):
    """trackio (`pip install -e './services/trainer[trackio]'`)."""

    project: str = Field(default="tba", min_length=1)
    """Project of the runs; `trackio show --project tba` shows it."""
    space_id: str | None = None
    """Hugging Face Space to log to; none: this machine."""


class TrackingSection(StrictModel):
    """Every step and every finished evaluation go to metrics.jsonl, and to the trackers that are named here."""

    metrics_path: str = Field(default="metrics.jsonl", min_length=1)
    """JSON lines, appended; `tba run` takes a relative path to be in the run folder."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard (`pip install -e './services/trainer[tensorboard]'`); none: off. `tba run` takes a
    relative path to be in the run folder."""
    wandb: WandbSection | None = None
    """Weights & Biases; none: off."""
    trackio: TrackioSection | None = None
    """trackio; none: off."""
    max_pending: int = Field(default=1000, ge=1)
    """Lines that may wait for a slow tracker; more are dropped and counted, training never waits."""
    close_s: float = Field(default=10.0, gt=0)
    """At its end the trainer waits this long for trackers to write what they have."""
