"""Folders of models and data sets in the object store: pushed once, pulled by every pod that needs them.

models/NAME/manifest.json      written last: the folder is whole
models/NAME/files/SHA256       the content of each file, by its digest
datasets/NAME/...              the same for data sets
"""

from tba.folders.document import FolderFile, FolderManifest
from tba.folders.needed import NeededFolder, needed_folders
from tba.folders.shelf import Shelf

__all__ = ["FolderFile", "FolderManifest", "NeededFolder", "Shelf", "needed_folders"]
