"""The history of a run: one file from which summary.json is computed."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from tba.api import LedgerEntry, LedgerLine, RunInfo, RunSummary, SettingsInfo, Stats
from tba.config import StrictModel
from tba.errors import ConfigError
from tba.fields import Number, first_problem
from tba_cli.reports.ledger import batch_entries
from tba_cli.run_folder import RunFolder


class Timing(StrictModel):
    """timing.json: times that only the supervisor knows."""

    starts: tuple[float, ...] = ()
    """When the services were started, in Unix seconds."""
    warm_start_s: float | None = None
    """Seconds that the warm start took; None: it was not needed."""


class Ended(StrictModel):
    """When and why the last start of a run ended."""

    at_s: Number
    reason: str


class History(StrictModel):
    """history.json. Its ledger entries have no rollout ids: those stay in Redis."""

    seed: int
    num_steps: int
    sync_interval_steps: int
    is_offline: bool = False
    info: RunInfo
    ledger: list[LedgerLine]
    settings: SettingsInfo | None = None
    """The live settings at the end, and every change of them."""
    stats: Stats
    summary: RunSummary | None = None
    """The state of the run in sentences, as it was at the end."""
    timing: Timing

    @property
    def batches(self) -> list[LedgerEntry]:
        """The acknowledged batches of the ledger."""
        return batch_entries(self.ledger)


def load_history(path: Path) -> History:
    """Read history.json."""
    try:
        return History.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); it is written when a run ends") from None
    except ValidationError as error:
        raise ConfigError(f"{path} is not a history of this release of tba: {first_problem(error)}") from None


def load_timing(folder: RunFolder) -> Timing:
    """Read timing.json; return an empty Timing if the run never started its services."""
    try:
        return Timing.model_validate_json(folder.timing_path.read_bytes())
    except FileNotFoundError:
        return Timing()
    except (OSError, ValidationError):
        raise ConfigError(f"{folder.timing_path} is damaged; delete it (only timings are lost)") from None


def load_end(folder: RunFolder) -> Ended:
    """Return when and why the last start of a run ended: from ended.json, else from the times of the newest files."""
    try:
        return Ended.model_validate_json(folder.ended_path.read_bytes())
    except (OSError, ValidationError):
        pass
    # a killed supervisor wrote no ended.json: the newest file shows how long it lived
    signs = [folder.recipe_path, *folder.logs_path.glob("*.log"), *folder.redis_path.rglob("*")]
    at_s = max((path.stat().st_mtime for path in signs if path.exists()), default=0.0)
    return Ended(at_s=at_s, reason="killed, or the machine went down: its last sign of life")
