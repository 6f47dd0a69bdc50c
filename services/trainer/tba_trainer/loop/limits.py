"""Limits of the trainer's waits and queues. Modules read them as `limits.NAME`, so that tests can change them."""

RETRY_S = 120.0
"""How long a call to another service, or a transfer to the store, is retried before the trainer gives up."""
MAX_UNPUBLISHED_VERSIONS = 4
"""Training continues while publishing fails, until this many versions wait."""
BACKGROUND_BYTES = 64 * 1024**2
"""Checkpoints of this size or more are copied to host memory and uploaded while training goes on. Smaller ones, and the
last one, are uploaded at once, and training waits."""
UPLOAD_S = 3600.0
"""How long training waits for the upload of a checkpoint that did not fit into the memory of some process."""
