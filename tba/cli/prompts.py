"""`tba prompts upload`: prompts of a JSONL file to a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from tba.cli.target import open_client
from tba.local.prompts import DEFAULT_CHUNK_BYTES, read_prompts, upload_prompts


def upload_command(args: argparse.Namespace) -> int:
    """Check every line first, then upload in chunks; the same file again changes nothing."""
    prompts = read_prompts(Path(args.file))
    client = open_client(args)
    try:
        reply = upload_prompts(client, prompts, max_chunk_bytes=DEFAULT_CHUNK_BYTES)
    finally:
        client.close()
    print(
        f"{reply.num_new} new and {reply.num_same} known prompts; "
        f"the run now has {reply.num_train} to train on and {reply.num_heldout} held out"
    )
    return 0
