"""Weight versions in the object store: published by the trainer, downloaded by searchers (docs/architecture.md)."""

from tba.weights.digest import params_sha256, params_sha256_of_files, sha256_of_file, tensor_header
from tba.weights.node_cache import NodeCache
from tba.weights.publishing import DeltaSettings
from tba.weights.pulling import LocalVersion
from tba.weights.repository import (
    WeightVersions,
    check_redis_is_newest,
    checkpoint_prefix,
    complete_versions,
    delete_incomplete,
    incomplete_versions,
    write_index,
)
