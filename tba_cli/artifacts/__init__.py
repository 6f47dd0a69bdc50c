"""Folders of models and data sets in the object store: pushed once, pulled by every pod that needs them.

models/NAME/manifest.json      written last, so a folder that has one is complete
models/NAME/files/SHA256       the content of each file, by its digest
datasets/NAME/...              the same for data sets
"""

from tba_cli.artifacts.artifact_store import ArtifactStore
from tba_cli.artifacts.manifest import FolderFile, FolderManifest
from tba_cli.artifacts.required import RequiredFolder, required_folders

__all__ = ["ArtifactStore", "FolderFile", "FolderManifest", "RequiredFolder", "required_folders"]
