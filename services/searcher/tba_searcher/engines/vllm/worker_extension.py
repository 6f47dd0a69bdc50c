"""What the engine calls where vLLM's model is: `WeightsExtension` is mixed into vLLM's worker."""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

from typing import Any

from tba.logs import get_logger
from tba_searcher.engines.vllm.weights import HostTensors, Loaded, SecondModel, Staging, load_files
from tba_searcher.engines.weight_check import file_stamps

WORKER_EXTENSION = f"{__name__}.WeightsExtension"
log = get_logger("vllm")


class WeightsExtension:
    """Methods for vLLM's worker; `collective_rpc` calls them, so arguments and results are plain values."""

    model_runner: Any
    """vLLM's."""
    _tba_staging: Staging | None = None
    _tba_in_use: Loaded = (None, "")

    def tba_open_staging(self, on_cpu: bool) -> None:
        """Make room for weights that are prepared beside generation; needed once, before any are."""
        try:
            self._tba_staging = SecondModel(self.model_runner) if on_cpu else HostTensors(self.model_runner)
        except RuntimeError as error:
            log.warning("weights_are_not_staged", reason=str(error), effect="updates hold up generation for longer")

    def tba_stage_weights(self, paths: dict[str, str]) -> None:
        """Prepare the tensors of files (name -> file); runs beside the other methods and generation."""
        if self._tba_staging is not None:
            self._tba_staging.stage(paths, file_stamps(paths.values()))

    def tba_load_weights(self, paths: dict[str, str]) -> str:
        """Replace all parameters by the tensors of files (name -> file); return their `params_sha256`.

        Raises:
            Exception: see `load_files`.
        """
        stamps, before = file_stamps(paths.values()), self._tba_in_use
        self._tba_in_use = (None, "")
        runner = self.model_runner
        sha256 = None if self._tba_staging is None else self._tba_staging.use(stamps, before)
        if sha256 is None:
            sha256 = load_files(runner.vllm_config, runner.get_model(), paths)
        # what vLLM derives from weights, as its own reload does
        runner.reset_lora_state()
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        self._tba_in_use = (stamps, sha256)
        return sha256
