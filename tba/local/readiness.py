"""When a service of a local run can be used, and why it cannot yet."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from tba.clients import RewardClient
from tba.errors import ConfigError, ServiceError
from tba.local.scored_tasks import check_healthy
from tba.trust import check_ca_file

READY_POLL_S = 0.1
SAY_AFTER_S = 2.0
"""A reason that has gone by then is not worth a line."""
MAX_PROBLEM_BYTES = 64 * 1024


async def wait_until_ready(
    url: str,
    ca_file: str | None = None,
    *,
    say: Callable[[str], None] | None = None,
    look: Callable[[], None] | None = None,
) -> None:
    """Return when GET /readyz answers 200. The caller bounds the wait.

    Args:
        ca_file: the authorities that are trusted for an https URL; none: the system's.
        say: is told every new reason why the service is not ready, but for those of its first moments.
        look: called in a thread each time that the service says it is not ready; raises where waiting cannot help.

    Raises:
        ConfigError: the URL is https and `ca_file` cannot be used, or the certificate there is not accepted.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        check_ca_file(ca_file)
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)))
    opener, begun_s, said = urllib.request.build_opener(*handlers), time.monotonic(), ""
    while (reason := await asyncio.to_thread(_why_not, opener, url)) is not None:
        if reason and look is not None:
            await asyncio.to_thread(look)
        if reason not in ("", said) and say is not None and time.monotonic() - begun_s > SAY_AFTER_S:
            say(reason)
            said = reason
        await asyncio.sleep(READY_POLL_S)


async def wait_for_reward(client: RewardClient, ca_file: str | None = None, *, say: Callable[[str], None]) -> None:
    """Return when the reward service is ready; a scorer that did not start ends the wait at once.

    Raises:
        ConfigError: a scorer did not start; says why. Or as `wait_until_ready`.
    """

    def look() -> None:
        try:
            rewards = client.rewards()
        except ServiceError:  # it just goes away, or ready; the next look says more
            return
        check_healthy(rewards)

    await wait_until_ready(client.base_url, ca_file, say=say, look=look)


def _why_not(opener: urllib.request.OpenerDirector, url: str) -> str | None:
    """None: it is ready; a sentence: it says why it is not; an empty text: it says nothing."""
    try:
        with opener.open(f"{url}/readyz", timeout=2.0):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return _detail(error)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):  # waiting does not make it better
            raise ConfigError(
                f"{url}: its certificate is not accepted ({error.reason.verify_message}); correct tls.cert_file, or "
                "tls.ca_file"
            ) from None
        return ""
    except OSError:
        return ""


def _detail(error: urllib.error.HTTPError) -> str:
    """The sentence of a problem document."""
    try:
        return str(json.loads(error.read(MAX_PROBLEM_BYTES))["detail"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"it answers {error.code}"
