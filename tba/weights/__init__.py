"""Weight versions in the object store: published by the trainer, pulled by searchers (docs/tour.md)."""

from tba.weights.digest import params_sha256_of_files, sha256_of_file, tensor_header
from tba.weights.incomplete import delete_incomplete
from tba.weights.versions import WeightVersions, write_index

__all__ = [
    "WeightVersions",
    "delete_incomplete",
    "params_sha256_of_files",
    "sha256_of_file",
    "tensor_header",
    "write_index",
]
