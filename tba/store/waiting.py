"""Wait for a store that is still starting, and know which of its troubles pass by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

from tba.errors import StoreUnavailableError, WaitTimeoutError
from tba.store.base import ObjectStore

POLL_S = 1.0


def passes_by_itself(error: StoreUnavailableError) -> bool:
    """Whether the store may answer a moment later: it is away, or overloaded. Wrong keys stay wrong."""
    cause = error.__cause__
    if cause is None or isinstance(cause, OSError):
        return False  # the embedded store: a folder does not come by itself
    from tba.store.s3_errors import is_transient

    return isinstance(cause, Exception) and is_transient(cause)


def lacks_bucket(error: StoreUnavailableError) -> bool:
    """Whether the only trouble is that the bucket does not exist."""
    response = getattr(error.__cause__, "response", None)
    return isinstance(response, dict) and response.get("Error", {}).get("Code") == "NoSuchBucket"


def wait_for_store(
    store: ObjectStore, *, wait_s: float, say: Callable[[str], None], create_bucket: bool = False
) -> None:
    """Wait (wait `store-start`) until the store can be written and honours create-only writes.

    Args:
        wait_s: deadline.
        create_bucket: make the bucket where there is none.

    Raises:
        StoreError: access denied, no bucket, create-only writes not honoured: waiting cannot help.
        WaitTimeoutError: the store did not answer in time.
    """
    deadline_s, has_said = time.monotonic() + wait_s, False
    while True:
        try:
            store.check(write=True)
            return
        except StoreUnavailableError as error:
            if create_bucket and lacks_bucket(error):
                store.create_bucket()
                say(f"made the bucket of {store.url}")
                create_bucket = False
                continue
            if lacks_bucket(error):
                raise StoreUnavailableError(f"{error}; `tba setup --create-bucket` makes it") from error.__cause__
            if not passes_by_itself(error):
                raise
            if time.monotonic() > deadline_s:
                raise WaitTimeoutError(
                    f"wait 'store-start': the store was not ready within {wait_s:.0f} s: {error}"
                ) from None
            if not has_said:
                say(f"wait 'store-start' ({wait_s:.0f} s at most): {error}")
                has_said = True
        time.sleep(POLL_S)
