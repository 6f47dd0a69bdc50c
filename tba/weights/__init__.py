"""Weight versions in the object store: published by the trainer, pulled by searchers (design.md, Weight versions)."""

from tba.weights.digest import params_sha256_of_file, sha256_of_file
from tba.weights.incomplete import delete_incomplete
from tba.weights.versions import WeightVersions

__all__ = ["WeightVersions", "delete_incomplete", "params_sha256_of_file", "sha256_of_file"]
