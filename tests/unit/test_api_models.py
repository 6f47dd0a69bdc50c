"""REST bodies refuse what could not be stored or sent on."""

import pytest
from pydantic import ValidationError

from tba.api import Prompt


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", ["\ud800"], {"x": float("nan")}])
def test_prompt_data_is_plain_json(value: object):
    with pytest.raises(ValidationError):
        Prompt(prompt_id="p", task="exact", text="t", data={"answer": value})


def test_prompt_data_may_be_nested_and_of_any_language():
    data = {"answer": "zwölf", "parts": [1, 2.5, None, {"a": True}]}
    assert Prompt(prompt_id="p", task="exact", text="t", data=data).data == data
