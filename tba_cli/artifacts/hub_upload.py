"""Uploads the folder of a model to the Hugging Face hub, with errors that say what to do."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.tls import without_secrets
from tba_cli.artifacts.huggingface import first_line, hub_library

REPLACED = ["*.safetensors", "*.safetensors.index.json"]
"""Deleted from the repository where the folder does not have them: an earlier version may have had more shards."""
SILENCE_S = 60.0
"""Longest time that the hub may leave a request without a byte; the library itself has no limit."""


class HubRepository:
    """A repository on the hub; the token is that of HF_TOKEN, or of `hf auth login`.

    Args:
        name: OWNER/NAME.

    Raises:
        ConfigError: huggingface_hub is not installed.
    """

    def __init__(self, name: str) -> None:
        hub = hub_library("uploading to")
        self._name, self._api = name, hub.HfApi()
        # a factory and not this session alone: the library makes another one when a connection breaks
        session = hub.get_session()
        client, hooks = type(session), session.event_hooks
        hub.set_client_factory(lambda: client(event_hooks=hooks, follow_redirects=True, timeout=SILENCE_S))

    def open(self, *, public: bool) -> None:
        """Make the repository where there is none yet; print a line to stderr before.

        Args:
            public: whether everybody may read a new one; one that exists stays as it is.

        Raises:
            ConfigError: it exists and everybody can read it, without `public`; or as `push`.
        """
        print(f"pushing to {self._name} on {without_secrets(self._api.endpoint)}", file=sys.stderr, flush=True)
        with self._explained():
            self._api.create_repo(self._name, private=not public, exist_ok=True)
            is_private = self._api.repo_info(self._name).private
        if not is_private and not public:
            raise ConfigError(
                f"{self._name} exists on the hub and everybody can read it; add --public if that is meant, or name "
                "another repository"
            )

    def push(self, folder: Path, *, message: str) -> str:
        """Upload a folder in one commit; return the address of the commit.

        Raises:
            ConfigError: the hub refuses it, or cannot be reached.
        """
        with self._explained():
            commit: Any = self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message=message, delete_patterns=REPLACED
            )
        return commit.commit_url

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        errors = importlib.import_module("huggingface_hub.errors")
        try:
            yield
        except errors.HFValidationError as error:
            raise ConfigError(f"--push-to-hub {self._name} is not OWNER/NAME: {first_line(error)}") from None
        except Exception as error:  # those of the hub's HTTP library, which this package does not import
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in (401, 403, 404):
                raise ConfigError(
                    f"the hub does not let you write to {self._name} ({first_line(error)}): check the name, and give "
                    "a token that may write there, by HF_TOKEN or `hf auth login`"
                ) from None
            raise ConfigError(
                f"{self._name} could not be pushed to {without_secrets(self._api.endpoint)} ({type(error).__name__}: "
                f"{first_line(error)}); run it again: what was uploaded already is not sent twice"
            ) from None
