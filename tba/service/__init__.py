"""What the HTTP services share: problem documents, bearer tokens, body limits, health, metrics, start-up."""

from tba.service.app import MsgpackResponse, create_app, raw_body
from tba.service.auth import Authenticator
from tba.service.serve import serve

__all__ = ["Authenticator", "MsgpackResponse", "create_app", "raw_body", "serve"]
