"""The object store: weight versions and checkpoints, in S3 or in a folder of one machine."""

from tba.store.base import ObjectStore
from tba.store.file import FileStore
from tba.store.open import open_store

__all__ = ["FileStore", "ObjectStore", "open_store"]
