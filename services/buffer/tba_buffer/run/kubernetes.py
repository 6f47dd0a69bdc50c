"""The replicas of one Deployment, through the Kubernetes API and the client library `kubernetes`.

The service account of the pod needs the verbs `get` and `patch` on the resource `deployments/scale` of that one name.
Its token file is read for every call, since Kubernetes renews it. Every attempt has a deadline. There are no retries,
because the reconciler tries again a few seconds later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tba.config import Recipe
from tba.errors import ConfigError, not_installed
from tba.tls import address

if TYPE_CHECKING:
    from kubernetes.client import AppsV1Api

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_S, READ_S = 3.0, 10.0
"""Deadlines of one call."""
HINTS = {
    401: "; the token of the buffer's service account is not accepted",
    403: "; give the buffer's service account a Role with get and patch on deployments/scale of that name",
    404: "; check scaling.deployment",
}
"""Advice for a refused call, by its HTTP status."""
MAX_WORDS = 400
"""Most characters of an API answer or an error that a message repeats."""
T = TypeVar("T")


class ScalingFailure(Exception):
    """A call of the Kubernetes API failed. The scaling task records it and tries again; it never leaves the package.

    Args:
        reason: one word, as `tba_scaling_failures_total` counts it.
        message: what happened, and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Deployment:
    """The Deployment of the searchers. Blocking: call it in a thread.

    Args:
        recipe: its `scaling` section names the Deployment.
        environ: environment variables with the address of the API; default: the process environment.
        account: folder of the service account; default: where Kubernetes mounts it.

    Raises:
        ConfigError: the package kubernetes is missing, this is not a pod, or it has no service account token.
    """

    def __init__(
        self, recipe: Recipe, *, environ: Mapping[str, str] | None = None, account: Path | None = None
    ) -> None:
        environ, self._account = os.environ if environ is None else environ, account or SERVICE_ACCOUNT
        section = recipe.scaling
        assert section.deployment is not None  # the recipe was checked
        self.name = section.deployment
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise ConfigError(
                'scaling.backend is "kubernetes", but this process does not run in a pod of a cluster (the environment '
                "has no KUBERNETES_SERVICE_HOST); run the buffer there, or choose another scaling.backend"
            )
        try:
            self._token()
            self.namespace = (self._account / "namespace").read_text(encoding="utf-8").strip()
            (self._account / "ca.crt").read_bytes()
        except (OSError, ScalingFailure) as error:
            raise ConfigError(
                f'scaling.backend is "kubernetes", but the service account of this pod cannot be used ({error}); set '
                "automountServiceAccountToken of the buffer's pod to true"
            ) from None
        try:
            from kubernetes.client import ApiClient, AppsV1Api, Configuration
        except ImportError:
            raise not_installed('scaling.backend "kubernetes"', "kubernetes") from None
        configuration: Any = Configuration(host=f"https://{address(host, port)}")
        configuration.ssl_ca_cert = str(self._account / "ca.crt")
        configuration.retries = False  # the reconciler tries again
        self._api = AppsV1Api(ApiClient(configuration))

    @property
    def where(self) -> str:
        """Name and namespace of the Deployment, for messages."""
        return f"Deployment {self.name!r} in namespace {self.namespace!r}"

    def replicas(self) -> int:
        """Read the number of replicas in the Deployment's spec from the API.

        Raises:
            ScalingFailure: the call failed.
        """
        return self._call("read", lambda api, t: api.read_namespaced_deployment_scale(self.name, self.namespace, **t))

    def set_replicas(self, num: int) -> int:
        """Set the number of replicas through the API; return the number that the API confirms.

        Raises:
            ScalingFailure: the call failed.
        """
        body = {"spec": {"replicas": num}}
        return self._call(
            "patch", lambda api, t: api.patch_namespaced_deployment_scale(self.name, self.namespace, body, **t)
        )

    def close(self) -> None:
        """Close the connections."""
        self._api.api_client.rest_client.pool_manager.clear()

    def _token(self) -> str:
        try:
            token = (self._account / "token").read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ScalingFailure("no-token", f"{self._account / 'token'}: {error.strerror}") from None
        if not token:
            raise ScalingFailure("no-token", f"{self._account / 'token'} is empty")
        return token

    def _call(self, verb: str, call: Callable[[AppsV1Api, dict[str, Any]], Any]) -> int:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        # read for every call: the token in the file is replaced about every hour
        self._api.api_client.default_headers["authorization"] = f"Bearer {self._token()}"
        try:
            scale = call(self._api, {"_request_timeout": (CONNECT_S, READ_S)})
            num = getattr(scale.spec, "replicas", None)
            return 0 if num is None else int(num)  # the JSON of Kubernetes leaves a 0 out
        except ApiException as error:
            if error.status:
                hint = HINTS.get(error.status, "")
                raise ScalingFailure(
                    str(error.status),
                    f"the Kubernetes API refused to {verb} the replicas of {self.where} ({error.status}: "
                    f"{_message(error)}){hint}",
                ) from None
            why = error.reason  # so the client reports a TLS error
        except (HTTPError, OSError) as error:
            why = error
        except (ValueError, TypeError, AttributeError) as error:
            raise ScalingFailure(
                "bad-answer", f"the Kubernetes API gave an answer that cannot be read ({_short(error)})"
            ) from None
        raise ScalingFailure(
            "unreachable",
            f"the Kubernetes API cannot be reached within {CONNECT_S:g} s (connection) and {READ_S:g} s (answer): "
            f"{_short(why)}; check NetworkPolicies, and {self._account / 'ca.crt'}",
        )


def _message(error: Any) -> str:
    """Return the message in the API's answer, or else the error's reason."""
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = error.reason
    return _short(message)


def _short(words: object) -> str:
    text = " ".join(str(words).split())
    return text if len(text) <= MAX_WORDS else text[:MAX_WORDS] + "..."
