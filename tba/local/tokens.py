"""The token with which commands and the supervisor talk to the buffer service."""

from __future__ import annotations

import json
from pathlib import Path

from tba.errors import ConfigError


def read_token(path: str | Path) -> str:
    """The operator's (else the viewer's) token of a JSON tokens file, or the only word of a text file.

    Raises:
        ConfigError: the file cannot be read or holds no token.
    """
    try:
        text = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"token file {path} cannot be read: {error.strerror}") from None
    if text.startswith("{"):
        try:
            tokens = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"token file {path} is not JSON: {error}") from None
        text = str(tokens.get("operator") or tokens.get("viewer") or "")
    if not text or len(text.split()) != 1:
        raise ConfigError(f"token file {path} must hold one token, or a JSON map with the role `operator`")
    return text
