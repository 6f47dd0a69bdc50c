"""The parts that all HTTP services share: problem documents, tokens, body limits, health, metrics, start-up."""

from tba.server.app import MsgpackResponse, create_app, raw_body
from tba.server.auth import Authenticator
from tba.server.openapi import MSGPACK_BODY
from tba.server.serve import not_ready, serve
