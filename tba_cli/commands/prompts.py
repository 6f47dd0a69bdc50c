"""`tba prompts upload`: upload the prompts of a file to a run."""

from __future__ import annotations

import argparse
from contextlib import closing

from tba_cli.console import print_answer
from tba_cli.prompts.reader import DEFAULT_CHUNK_BYTES, prompts_of_file, upload_prompts
from tba_cli.run_target import open_client


def upload_command(args: argparse.Namespace) -> int:
    """Check every row of the file, then upload it in chunks; uploading the same file again changes nothing."""
    prompts = prompts_of_file(args.file)
    with closing(open_client(args)) as client:
        reply = upload_prompts(client, prompts, max_chunk_bytes=DEFAULT_CHUNK_BYTES)
    counts = f"the run now has {reply.num_train} to train on and {reply.num_heldout} held out"
    print_answer(reply, [f"{reply.num_new} new and {reply.num_same} known prompts; {counts}"], as_json=args.json)
    return 0
