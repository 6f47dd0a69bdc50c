"""torch.compile of the decoder layers, one by one; attention (attention.py) stays outside of what is compiled.

All layers of a model share one compiled program, and it holds for any number of tokens: nothing is compiled again when
a micro-batch has another size.
"""

from __future__ import annotations

from typing import Any

from tba.errors import ConfigError
from tba_trainer.parallel.sharding import is_sharded


def compile_layers(model: Any, *, backend: str = "inductor") -> None:
    """Compile the decoder layers at their first pass, in place. Copies of the model are not compiled.

    Args:
        backend: of torch.compile.

    Raises:
        ConfigError: the model is sharded, or transformers does not say which of its modules are decoder layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if is_sharded(model):
        raise ConfigError(
            "trainer.compile = true is for one process: the exchanges of a sharded layer cannot be compiled; set it to "
            "false or trainer.num_processes to 1"
        )
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"trainer.compile = true: {type(model).__name__} has no decoder layers that transformers marks as such; "
            "set it to false"
        )
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
