"""What the service and a model process say to each other: msgpack, each message after its length in four bytes.

The first frame is the set of models to load; the child answers `Loaded` or `LoadFailed`. From then on the service sends
`Ask` and `Drop`, and the child says which asks a batch is about to compute (`Began`) and one `Answer` for each ask.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LENGTH_BYTES = 4

InputForm = Literal["text", "pair", "chat"]
ScoreOutput = Literal["logit", "probability"]
FailureReason = Literal["bad_data", "exception", "not_finite", "out_of_memory", "too_long"]


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model is and how it is held.

    Attributes:
        path: a folder, or the name of a repository on the Hugging Face hub.
        revision: the commit, tag or branch of such a repository.
        dtype: a name of torch, or `auto`: that of the checkpoint.
        device: a name of torch, or `auto`: the first CUDA device if there is one, else the CPU.
    """

    path: str
    revision: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    trust_remote_code: bool = False


class ClassifierSettings(msgspec.Struct, frozen=True, kw_only=True, tag="classifier"):
    """A sequence classification model.

    Attributes:
        form: what the model reads: the template with its fields filled in, (prompt, response) as a pair of texts, or a
            chat of two turns in the tokenizer's chat template.
        append_eos: end the tokens of a finished response with the tokenizer's end-of-sequence token.
        label: number or name of the output that counts; None: the only one there is.
        max_tokens: longer inputs have no score; None: what the model can take.
    """

    files: ModelFiles
    form: InputForm = "text"
    template: str = "{prompt}{response}"
    append_eos: bool = False
    label: int | str | None = None
    output: ScoreOutput = "logit"
    max_tokens: int | None = None


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True, tag="guard"):
    """A language model that judges by its next words, in the style of Llama Guard.

    The score is the probability of `unsafe` among the two verdicts, at the first token in which they differ.
    """

    files: ModelFiles
    form: Literal["text", "chat"] = "chat"
    template: str = "{prompt}{response}"
    safe: str = "\n\nsafe"
    unsafe: str = "\n\nunsafe"
    max_tokens: int | None = None


class VictimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The language model that is attacked.

    Attributes:
        form: `chat` uses the tokenizer's chat template, `text` the template here; None: chat where there is one.
        template: the text around the attack, `{prompt}`.
        temperature: 0 is greedy.
        seed: a reply depends on it, on the attack and on the reply's number alone.
    """

    files: ModelFiles
    form: Literal["text", "chat"] | None = None
    template: str
    num_replies: int
    max_reply_tokens: int
    temperature: float
    top_p: float
    seed: int


class RewardModelSet(msgspec.Struct, frozen=True, kw_only=True, tag="reward_model"):
    """A process that gives (prompt, response) the output of a classifier.

    Attributes:
        batch_tokens: most tokens of one batch, padding included; a longer input is a batch of its own.
        batch_wait_s: how long the first ask of a batch waits for others.
        num_threads: threads of torch on the CPU; None: as many as torch thinks right.
    """

    classifier: ClassifierSettings
    batch_tokens: int
    batch_wait_s: float
    num_threads: int | None = None


class RedteamSet(msgspec.Struct, frozen=True, kw_only=True, tag="redteam"):
    """A process in which a victim replies to attacks and a classifier or guard judges the replies.

    Attributes:
        output: whether the value is the mean toxicity of the replies, or the mean logarithm of it.
        min_toxicity: the least toxicity that a logarithm is taken of.
    """

    victim: VictimSettings
    classifier: ClassifierSettings | GuardSettings
    output: Literal["toxicity", "log_toxicity"] = "toxicity"
    min_toxicity: float = 1e-6
    batch_tokens: int
    batch_wait_s: float
    num_threads: int | None = None


ModelSet = RewardModelSet | RedteamSet


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Score this. `finished`: the response ended by itself. `alone`: in a batch of its own; it may have killed one."""

    number: int
    prompt: str
    response: str
    finished: bool = True
    alone: bool = False


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """Nobody waits for the answer any more; it comes all the same, at once where nothing was computed yet."""

    number: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The models are ready. `digest`: SHA-256 of all their files."""

    digest: str


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag="load_failed"):
    """The models cannot be loaded; the process ends."""

    detail: str


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """These asks are computed from now on, together."""

    numbers: list[int]


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """A value, or a reason why there is none."""

    number: int
    value: float | None = None
    reason: FailureReason | None = None
    detail: str = ""


ToChild = Ask | Drop
FromChild = Loaded | LoadFailed | Began | Answer


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of a message with its length in front.

    Raises:
        UnicodeEncodeError: a text holds half of a surrogate pair.
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
