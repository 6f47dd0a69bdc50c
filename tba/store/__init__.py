"""The object store of weight versions, checkpoints and snapshots: S3, or a folder of one machine."""

from tba.store.file import FileStore, ObjectStore
from tba.store.open import open_store
