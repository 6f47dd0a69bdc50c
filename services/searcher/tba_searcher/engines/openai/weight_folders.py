"""Folders from which a server loads weight versions: each holds the files of one version, and nothing else."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tba.config.searcher import OpenAiSection
from tba.errors import ConfigError
from tba.temporary_folders import temporary_folder
from tba.weights import params_sha256_of_files
from tba.weights.digest import FileStamps
from tba_searcher.engines.engine import EngineError
from tba_searcher.engines.weight_check import DtypeAndShape, check_tensors, file_stamps


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """The files of one version."""

    here: Path
    at_server: Path
    """The same folder, as the server sees it."""
    params_sha256: str
    """Digest of the tensors in its files."""


class WeightFolders:
    """Makes a folder per version; deletes all but the newest and the last two that were loaded. Thread-safe."""

    def __init__(self, section: OpenAiSection, expected: dict[str, DtypeAndShape]) -> None:
        self._expected, self._lock = expected, threading.Lock()
        root = section.weights_folder
        self._exit = ExitStack()
        try:
            folder = temporary_folder("tba-weights-", parent=None if root is None else Path(root))
            self._here = self._exit.enter_context(folder)
        except OSError as error:
            raise ConfigError(
                f"searcher.openai.weights_folder {root}: {error.strerror}; it must be a folder that the searcher can "
                "write and the server can read"
            ) from None
        if root is not None:  # the server may be another user; in TMPDIR everybody could read the weights
            self._here.chmod(0o755)
        given = section.weights_folder_at_server
        self._at_server = self._here.resolve() if given is None else Path(given) / self._here.name
        self._known: dict[FileStamps, WeightFolder] = {}
        self._loaded: list[WeightFolder] = []
        self._num_made = 0

    def get(self, tensors_paths: Sequence[Path], *, to_load: bool = False) -> WeightFolder:
        """Return a folder with links to these files, or copies. Make it if there is none; delete old folders.

        Args:
            to_load: the server loads the folder now. The last two such folders stay, as the newest may be refused.
        """
        check_tensors(tensors_paths, self._expected)
        with self._lock:
            stamps = file_stamps(tensors_paths)
            found = self._known.get(stamps) or self._make(tensors_paths)
            if to_load:
                self._loaded = [*self._loaded[-1:], found]
            self._known[stamps] = found
            for key, folder in list(self._known.items()):
                if folder not in (found, *self._loaded):
                    shutil.rmtree(folder.here, ignore_errors=True)
                    del self._known[key]
            return found

    def close(self) -> None:
        """Delete all folders."""
        self._exit.close()

    def _make(self, tensors_paths: Sequence[Path]) -> WeightFolder:
        self._num_made += 1
        name = f"version-{self._num_made}"  # never used twice: the server may have the old files in its cache
        here = self._here / name
        here.mkdir(mode=0o755)
        files = [here / f"model-{number:05d}.safetensors" for number in range(len(set(tensors_paths)))]
        try:
            for source, target in zip(dict.fromkeys(tensors_paths), files, strict=True):
                try:
                    os.link(source.resolve(), target)
                except OSError:  # another file system
                    shutil.copyfile(source, target)
            # of the copies: what the server reads is what is compared with the manifest
            return WeightFolder(here, self._at_server / name, params_sha256_of_files(files))
        except OSError as error:
            shutil.rmtree(here, ignore_errors=True)
            raise EngineError(f"weights: {error}") from None
