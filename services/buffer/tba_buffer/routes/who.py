"""Who changes the run: an operator, or the trainer with the living token."""

from __future__ import annotations

from fastapi import Request

from tba.api.settings import Role
from tba.service import Authenticator
from tba.service.auth import ForbiddenError


def operator_or_trainer(auth: Authenticator, request: Request, *, token: str | None, what: str) -> Role:
    """Who asks; where tokens are not checked, whoever sends a fencing token is the trainer.

    Args:
        token: the fencing token that came with the request, if any; whether it is the living one is checked where the
            change is written.
        what: what a trainer does so ("changes settings").

    Raises:
        ForbiddenError: a trainer without a fencing token: it may have been replaced.
    """
    role = auth.role_of(request.headers.get("authorization", ""))
    if role == "trainer" and token is None:
        raise ForbiddenError(f"the role 'trainer' {what} with its fencing token only; send `token`")
    return "trainer" if role == "trainer" or (role is None and token is not None) else "operator"
