"""What the HTTP services share: problem documents, bearer tokens, body limits, health, metrics, start-up."""

from tba.service.app import MsgpackResponse, create_app, raw_body
from tba.service.auth import Authenticator
from tba.service.openapi import MSGPACK_BODY, problems
from tba.service.serve import serve

__all__ = ["MSGPACK_BODY", "Authenticator", "MsgpackResponse", "create_app", "problems", "raw_body", "serve"]
