"""Data sets made by rule, of the same shape as the paper's: small worlds in which small models learn.

The rows of a split are a function of its name and a seed. Splits are by a hash of the content, whatever the seed, so
that nothing held out is trained on; each module says what counts as the same content.
"""

from __future__ import annotations

import hashlib


def bucket_of(content: str) -> int:
    """Return the hash bucket of a content, from 0 to 99."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 100
