"""The hook of `helm uninstall`: delete the trainer's Job and wait until its pods are gone.

The trainer gets SIGTERM while buffer and store still answer, so it finishes its step and writes a checkpoint. Helm
itself deletes everything at once. Exit code 0 whatever happened: a run that cannot be stopped is no reason to keep the
release. The last line says what happened.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_TIMEOUT_S = 10.0
PAUSE_S = 1.0


class Api:
    """The Kubernetes API, as a pod's service account may use it.

    Args:
        account: folder of the service account; it has the token, the namespace and the authorities of the API.
    """

    def __init__(self, account: Path) -> None:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        namespace = (account / "namespace").read_text().strip()
        self._account = account
        self._jobs = f"https://{f'[{host}]' if ':' in host else host}:{port}/apis/batch/v1/namespaces/{namespace}/jobs"
        # no proxy of the environment: the API is in the cluster
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(account / "ca.crt"))),
        )

    def call(self, method: str, job: str) -> int:
        """Return the status of GET or DELETE of a Job, which when deleted stays until its pods are gone.

        Raises:
            OSError, HTTPException: no answer, or one that is not HTTP.
        """
        body = json.dumps({"propagationPolicy": "Foreground"}).encode() if method == "DELETE" else None
        headers = {"authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}
        if body is not None:
            headers["content-type"] = "application/json"
        request = urllib.request.Request(f"{self._jobs}/{job}", data=body, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=CALL_TIMEOUT_S) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code


def stop(api: Api, job: str, wait_s: float) -> str:
    """Delete a Job and wait until it and its pods are gone; returns a sentence on how that went."""
    begun_s, method, last = time.monotonic(), "DELETE", "nothing"
    while time.monotonic() < begun_s + wait_s:
        try:
            status = api.call(method, job)
        except (OSError, http.client.HTTPException) as error:
            last = str(error)
        else:
            if status == 404:
                return f"ok: {job} is gone after {time.monotonic() - begun_s:.0f} s"
            if status in (401, 403):
                return f"warning: {job} was not stopped: this pod may not {method} it ({status}), see rbac.create"
            if status < 300:
                method = "GET"
            last = f"status {status}"
        time.sleep(PAUSE_S)
    return f"warning: {job} is not gone after {wait_s:g} s (last answer to {method}: {last})"


def main(argv: Sequence[str] | None = None, account: Path = ACCOUNT) -> int:
    """Stop the trainer; always 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True, metavar="NAME", help="the trainer's Job")
    parser.add_argument("--wait-s", type=float, required=True, metavar="SECONDS", help="for its pods to be gone")
    args = parser.parse_args(argv)
    print(stop(Api(account), args.job, args.wait_s), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
