"""How long the trainer waits for others, and how much may wait for them. Modules read these here, so tests can too."""

RETRY_S = 120.0
"""How long a call to another service, or a transfer to the store, is retried before the trainer gives up."""
MAX_UNPUBLISHED_VERSIONS = 4
"""Training continues while publishing fails, until this many versions wait."""
BACKGROUND_BYTES = 64 * 1024**2
"""Checkpoints of at least so many bytes are copied off the device and uploaded beside training; smaller ones, and the
last one, are uploaded before the next step."""
UPLOAD_S = 3600.0
"""How long training waits for the upload of a checkpoint that memory of a process had no room for."""
