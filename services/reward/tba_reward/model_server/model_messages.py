"""The messages between the service and a model process: msgpack, each message after its length in four bytes.

The first frame is the set of models to load; the child replies with `Loaded` or `LoadFailed`. After that the service
sends `ScoreRequest` and `CancelRequest`. The child sends `BatchStarted` before it computes a batch, and one
`ScoreAnswer` for each request.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LENGTH_BYTES = 4

InputForm = Literal["text", "pair", "chat"]
ScoreOutput = Literal["logit", "probability"]
FailureReason = Literal["bad_data", "exception", "not_finite", "out_of_memory", "too_long"]


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files of a model are, and how it is loaded.

    Attributes:
        path: a folder, or the name of a repository on the Hugging Face hub.
        dtype: torch's name of a dtype, or `auto`: the dtype of the checkpoint.
        device: torch's name of a device, or `auto`: the first CUDA device if there is one, else the CPU.
    """

    path: str
    dtype: str = "float32"
    device: str = "auto"
    trust_remote_code: bool = False


class ClassifierSettings(msgspec.Struct, frozen=True, kw_only=True, tag="classifier"):
    """A sequence classification model.

    Attributes:
        form: the input of the model: the template with its fields filled in, (prompt, response) as a pair of texts, or
            a chat of two turns in the tokenizer's chat template.
        append_eos: end the tokens of a finished response with the tokenizer's end-of-sequence token.
        label: number or name of the output that counts; None: the only one.
    """

    files: ModelFiles
    form: InputForm = "text"
    template: str = "{prompt}{response}"
    append_eos: bool = False
    label: int | str | None = None
    output: ScoreOutput = "logit"


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True, tag="guard"):
    """A language model that judges by its next tokens, in the style of Llama Guard.

    The score is the probability of `unsafe` among the two verdicts, at the first token in which they differ.
    """

    files: ModelFiles
    form: Literal["text", "chat"] = "chat"
    template: str = "{prompt}{response}"
    safe: str = "\n\nsafe"
    unsafe: str = "\n\nunsafe"


class VictimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The language model that is attacked.

    Attributes:
        form: `chat` uses the tokenizer's chat template, `text` the template here; None: chat where there is one.
        template: the text around the attack, `{prompt}`.
        temperature: 0 is greedy.
        max_attack_tokens: longer attacks have no score; None: the model's limit.
    """

    files: ModelFiles
    form: Literal["text", "chat"] | None = None
    template: str
    max_attack_tokens: int | None = None
    num_replies: int
    max_reply_tokens: int
    temperature: float
    top_p: float


class RewardModelSet(msgspec.Struct, frozen=True, kw_only=True, tag="reward_model"):
    """A process that scores (prompt, response) by the output of a classifier.

    Attributes:
        batch_tokens: most tokens of one batch, padding included; a longer input is a batch of its own.
        batch_wait_s: how long the first request of a batch waits for others.
        num_threads: threads of torch on the CPU; None: torch's default.
    """

    classifier: ClassifierSettings
    batch_tokens: int
    batch_wait_s: float
    num_threads: int | None = None


class RedteamSet(msgspec.Struct, frozen=True, kw_only=True, tag="redteam"):
    """A process in which a victim replies to attacks and a classifier or guard judges the replies.

    Attributes:
        output: `toxicity`: the score is the mean over the replies; `log_toxicity`: the mean of its logarithm.
    """

    victim: VictimSettings
    classifier: ClassifierSettings | GuardSettings
    output: Literal["toxicity", "log_toxicity"] = "toxicity"
    batch_tokens: int
    batch_wait_s: float
    num_threads: int | None = None


ModelSet = RewardModelSet | RedteamSet


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Score one completion.

    Attributes:
        finished: whether the response ended by itself.
        alone: whether it needs a batch of its own, because a process may have died over it.
    """

    number: int
    prompt: str
    response: str
    finished: bool = True
    alone: bool = False


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Nobody waits for a request any more; it is answered all the same, at once where its batch has not started."""

    number: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The models are ready. `digest`: SHA-256 of all their files."""

    digest: str


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The models cannot be loaded; the process ends."""

    detail: str


class BatchStarted(msgspec.Struct, frozen=True, kw_only=True, tag="batch_started"):
    """These requests are computed from now on, together."""

    numbers: list[int]


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The score of a request, or the reason why it has none."""

    number: int
    value: float | None = None
    reason: FailureReason | None = None
    detail: str = ""


ToChild = ScoreRequest | CancelRequest
FromChild = Loaded | LoadFailed | BatchStarted | ScoreAnswer


def frame(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message with its length in front.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    # no pickle: a child that runs foreign model code must not choose what the service executes
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
