"""Weight versions in the object store: published by the trainer, downloaded by searchers (docs/architecture.md)."""

from tba.weights.repository import (
    WeightVersions,
    checkpoint_prefix,
    complete_versions,
    delete_incomplete,
    params_sha256_of_files,
    sha256_of_file,
    tensor_header,
    write_index,
)

__all__ = [
    "WeightVersions",
    "checkpoint_prefix",
    "complete_versions",
    "delete_incomplete",
    "params_sha256_of_files",
    "sha256_of_file",
    "tensor_header",
    "write_index",
]
