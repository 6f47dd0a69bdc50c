"""When a service of a local run can be used."""

from __future__ import annotations

import asyncio
import ssl
import urllib.error
import urllib.request

from tba.errors import ConfigError
from tba.trust import check_ca_file

READY_POLL_S = 0.1


async def wait_until_ready(url: str, ca_file: str | None = None) -> None:
    """Return when GET /readyz answers 200. The caller bounds the wait.

    Args:
        ca_file: the authorities that are trusted for an https URL; none: the system's.

    Raises:
        ConfigError: the URL is https and `ca_file` cannot be used, or the certificate there is not accepted.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https://"):
        check_ca_file(ca_file)
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca_file)))
    opener = urllib.request.build_opener(*handlers)
    while not await asyncio.to_thread(_is_ready, opener, url):
        await asyncio.sleep(READY_POLL_S)


def _is_ready(opener: urllib.request.OpenerDirector, url: str) -> bool:
    try:
        with opener.open(f"{url}/readyz", timeout=2.0):
            return True
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):  # waiting does not make it better
            raise ConfigError(
                f"{url}: its certificate is not accepted ({error.reason.verify_message}); correct tls.cert_file, or "
                "tls.ca_file"
            ) from None
        return False
    except OSError:
        return False
