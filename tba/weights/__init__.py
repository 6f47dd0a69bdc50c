"""Weight versions in the object store: published by the trainer, downloaded by searchers (docs/architecture.md)."""

from tba.weights.repository import (
    WeightVersions,
    delete_incomplete,
    params_sha256_of_files,
    sha256_of_file,
    tensor_header,
    write_index,
)

__all__ = [
    "WeightVersions",
    "delete_incomplete",
    "params_sha256_of_files",
    "sha256_of_file",
    "tensor_header",
    "write_index",
]
