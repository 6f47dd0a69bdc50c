"""Guards with other constants than the product's, for short runs."""

from __future__ import annotations

from typing import Any, TypeVar

from tba.config.trainer import GuardsSection
from tba.fields import StrictModel

M = TypeVar("M", bound=StrictModel)


def make_guards(**settings: Any) -> GuardsSection:
    """Return a guards section. A setting that is no field overrides the constant of the same name in capitals."""
    usual = GuardsSection()
    alarms = {
        name: _with_constants(type(getattr(usual, name)), value) if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return _with_constants(GuardsSection, alarms)


def _with_constants(model: type[M], values: dict[str, Any]) -> M:
    constants = {name.upper(): value for name, value in values.items() if name not in model.model_fields}
    assert all(hasattr(model, name) for name in constants), constants
    section: Any = type(model.__name__, (model,), {"__module__": __name__, **constants})
    return section(**{name: value for name, value in values.items() if name in model.model_fields})
