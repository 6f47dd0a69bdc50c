"""Chooses the chat renderer of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tba_searcher.conversations.chat import ChatRenderer, RenderError
from tba_searcher.conversations.known_families import known_renderer
from tba_searcher.conversations.template import TemplateRenderer


def open_renderer(tokenizer: Any, template_kwargs: Mapping[str, Any], end_ids: Collection[int] = ()) -> ChatRenderer:
    """Return the renderer of the package `renderers` for a family that it knows, else one for the chat template.

    Args:
        tokenizer: one of transformers.
        template_kwargs: arguments of the chat template.
        end_ids: more tokens that end a reply, as generation_config.json names them.

    Raises:
        RenderError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None and "chat_template" not in template_kwargs:
        raise RenderError("prompts are messages, and the tokenizer has no chat template; give prompts as text")
    own = TemplateRenderer(tokenizer, template_kwargs, end_ids)
    return known_renderer(tokenizer, own, template_kwargs, end_ids) or own
