"""Model scorers against plain transformers, with real (tiny, random) models in their own processes."""

import asyncio
from statistics import fmean
from typing import Any

import pytest
import torch
from tba_reward.child_messages import ScoreRequest
from tba_reward.model_server.child.classifier import Classifier
from tba_reward.model_server.child.judges import load_judge
from tba_reward.model_server.child.model_loader import digest_folder
from tba_reward.model_server.child.server import TokenizedRequest
from tba_reward.model_server.client import ModelPool
from tba_reward.scorer import Failure, Item
from tba_reward.scorers import Tools, redteam, reward_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2LMHeadModel,
    GPTNeoXForSequenceClassification,
    LlamaForCausalLM,
)

from tba.config.reward import RedteamSpec, RewardModelSpec
from tba.errors import ConfigError
from tests.support.tiny_reward_models import save_chat_model, save_classifier, save_reward_model, save_victim

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-5
TEXTS = ["", "a", "Zwei Sätze. Noch einer!", "abc " * 12, "🙂 x", "b" * 40, "a"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "reward": save_reward_model(root / "reward"),
        "pad_is_eos": save_reward_model(root / "pad_is_eos", pad_is_eos=True, seed=1),
        "classifier": save_classifier(root / "classifier"),
        "victim": save_victim(root / "victim"),
        "chat": save_chat_model(root / "chat"),
    }


@pytest.fixture(scope="module")
def tools():
    return Tools(pool=None, models=ModelPool())  # type: ignore[arg-type]  # no workers are needed


@pytest.fixture(scope="module")
def specs(folders):
    def rm(**settings):
        settings = {"model": str(folders["reward"]), "num_threads": 1, "batch_tokens": 300, **settings}
        return RewardModelSpec(kind="reward_model", **settings)

    def red(**settings):
        settings = {
            "victim": str(folders["victim"]),
            "victim_template": "Q: {prompt}\nA: ",
            "classifier": str(folders["classifier"]),
            "label": "hate",
            "max_reply_tokens": 8,
            "num_replies": 3,
            "num_threads": 1,
            **settings,
        }
        return RedteamSpec(kind="redteam", **settings)

    chat = str(folders["chat"])
    return {
        "plain": rm(),
        "penalty": rm(missing_eos_penalty=-1.0),
        "against": rm(against="reference", missing_eos_penalty=-1.0),
        "eos": rm(model=str(folders["pad_is_eos"]), append_eos=True, template="Q: {prompt} A: {response}"),
        "sampled": red(),
        "greedy": red(temperature=0.0, num_replies=2),
        "guard": red(victim=chat, classifier=chat, judge="guard", temperature=0.0, num_replies=1, max_reply_tokens=6),
    }


@pytest.fixture(scope="module")
async def scorers(specs, tools):
    built = {name: reward_model.build(specs[name], tools) for name in ("plain", "penalty", "against")}
    built["sampled"] = redteam.build(specs["sampled"], tools)
    await asyncio.gather(*(scorer.start() for scorer in built.values()))
    yield built
    await asyncio.gather(*(scorer.close() for scorer in built.values()))


def items(**more):
    return [Item(prompt=f"prompt {n}: ", response=text, **more) for n, text in enumerate(TEXTS)]


def judged(spec, asked):
    """Return the answers of a model process to these items, computed in this process."""
    judge = load_judge(spec)
    jobs = [
        judge.prepare(
            ScoreRequest(number=n, prompt=i.prompt, response=i.response, finished=i.finish_reason != "length")
        )
        for n, i in enumerate(asked)
    ]
    return judge.score([job for job in jobs if isinstance(job, TokenizedRequest)])


async def test_all_models_load_and_equal_settings_share_a_process(scorers):
    assert {name: scorer.health() for name, scorer in scorers.items()} == dict.fromkeys(scorers, "ok")
    pids = {name: scorer._process.pid for name, scorer in scorers.items()}
    assert pids["plain"] == pids["penalty"] == pids["against"] != pids["sampled"]


async def test_a_reward_model_scores_as_transformers_does_one_by_one(scorers, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["reward"])
    model = AutoModelForSequenceClassification.from_pretrained(folders["reward"])
    with torch.inference_mode():
        wanted = [model(**tokenizer(i.prompt + i.response, return_tensors="pt")).logits.item() for i in items()]
    assert await scorers["plain"].score(items()) == pytest.approx(wanted, abs=TOLERANCE)
    assert len({round(value, 4) for value in wanted}) > 4


async def test_what_else_is_in_the_batch_does_not_change_a_score(scorers):
    together = await scorers["plain"].score(items())
    alone = [(await scorers["plain"].score([item]))[0] for item in items()]
    assert together == pytest.approx(alone, abs=TOLERANCE)


async def test_the_end_of_sequence_is_read_though_it_is_the_padding_too(specs, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["pad_is_eos"])
    model = GPTNeoXForSequenceClassification.from_pretrained(folders["pad_is_eos"])
    wanted = []
    for item in items():
        ids = [*tokenizer(f"Q: {item.prompt} A: {item.response}")["input_ids"], tokenizer.eos_token_id]
        with torch.inference_mode():
            hidden = model.gpt_neox(torch.tensor([ids])).last_hidden_state
            wanted.append(model.score(hidden)[0, -1].item())
    assert judged(specs["eos"], items()) == pytest.approx(wanted, abs=TOLERANCE)
    unfinished = judged(specs["eos"], items(finish_reason="length"))
    assert all(abs(a - b) > TOLERANCE for a, b in zip(unfinished, wanted, strict=True))


async def test_a_reward_model_keeps_no_keys_and_values(specs):
    """8,192 tokens of a 6.9B model in bfloat16 would have 4 GiB of them, which `tba sizing` does not count."""
    classifier, kept = Classifier(specs["plain"]), []
    classifier._model.register_forward_hook(lambda _model, _inputs, output: kept.append(output.past_key_values))
    classifier.values([[1, 2, 3]])
    assert kept == [None]


async def test_a_text_longer_than_the_model_reads_has_no_score(scorers):
    long = Item(prompt="", response="x" * 129)
    short, failed = await scorers["plain"].score([items()[1], long])
    assert isinstance(short, float)
    assert failed == Failure("too_long", "the input has 129 tokens, and at most 128 are taken")


async def test_empty_text_and_half_a_surrogate_pair_have_no_score(scorers):
    empty, broken, good = await scorers["plain"].score(
        [Item(prompt="", response=""), Item(prompt="", response="a\ud800b"), Item(prompt="", response="ab")]
    )
    assert (empty.reason, broken.reason) == ("bad_data", "malformed")
    assert isinstance(good, float)


async def test_a_response_without_an_end_gets_the_penalty(scorers):
    finished, cut = items()[3], items(finish_reason="length")[3]
    stopped, aborted = (items(finish_reason=reason)[3] for reason in ("stop_string", "abort"))
    with_penalty = await scorers["penalty"].score([finished, cut, stopped, aborted])
    plain = await scorers["plain"].score([finished, cut])
    assert with_penalty == pytest.approx([plain[0], -1.0, plain[0], -1.0], abs=TOLERANCE)
    assert plain[1] != -1.0


async def test_against_a_reference_the_score_is_who_wins(scorers):
    values = await scorers["plain"].score([Item(prompt="p", response=text) for text in ("aaa", "bbb")])
    better, worse = ("aaa", "bbb") if values[0] > values[1] else ("bbb", "aaa")
    asked = [
        Item(prompt="p", response=better, data={"reference": worse}),
        Item(prompt="p", response=worse, data={"reference": better}),
        Item(prompt="p", response=better, data={"reference": better}),
        Item(prompt="p", response=better, data={}),
        Item(prompt="p", response=better, data={"reference": "x" * 200}),
    ]
    *known, missing, too_long = await scorers["against"].score(asked)
    assert known == [1.0, 0.0, 0.5]
    assert missing.reason == "bad_data"
    assert "`reference`" in missing.detail
    assert too_long.reason == "too_long"


def toxicity(folders, replies):
    """Return the mean probability of `hate` by plain transformers, one reply at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folders["classifier"])
    model = AutoModelForSequenceClassification.from_pretrained(folders["classifier"])
    with torch.inference_mode():
        return fmean(model(**tokenizer(r, return_tensors="pt")).logits.softmax(-1)[0, 1].item() for r in replies)


async def test_greedy_red_teaming_is_what_transformers_generates_and_classifies(specs, folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["victim"])
    victim = GPT2LMHeadModel.from_pretrained(folders["victim"])
    wanted = []
    for item in items():
        prompt = tokenizer(f"Q: {item.response.rstrip()}\nA: ", return_tensors="pt")
        output = victim.generate(**prompt, do_sample=False, max_new_tokens=8, pad_token_id=2)  # type: ignore[attr-defined]
        reply = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        wanted.append(toxicity(folders, [reply]))
    assert judged(specs["greedy"], items()) == pytest.approx(wanted, abs=TOLERANCE)


async def test_sampled_red_teaming_gives_the_same_score_whenever_it_is_asked(scorers, specs):
    first = await scorers["sampled"].score(items())
    alone = [(await scorers["sampled"].score([item]))[0] for item in reversed(items())]
    assert all(isinstance(value, float) and 0 < value < 1 for value in first)
    assert first == pytest.approx(alone[::-1], abs=TOLERANCE)
    assert first[1] == pytest.approx(first[6], abs=TOLERANCE)  # the same attack
    assert first != pytest.approx(judged(specs["greedy"], items()), abs=1e-3)


async def test_a_guard_gives_the_probability_of_its_unsafe_verdict(specs, folders):
    """The victim chats here: its reply is the text that transformers generates after its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folders["chat"])
    model = LlamaForCausalLM.from_pretrained(folders["chat"])
    safe, unsafe = (tokenizer(letter)["input_ids"][0] for letter in "su")
    for item, value in zip(items(), judged(specs["guard"], items()), strict=True):
        attack = {"role": "user", "content": item.response.rstrip()}
        text = tokenizer.apply_chat_template([attack], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=6, pad_token_id=2)  # type: ignore[attr-defined]
        reply = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        text = tokenizer.apply_chat_template([attack, {"role": "assistant", "content": reply}], tokenize=False)
        with torch.inference_mode():
            probs = model(**tokenizer(text + "\n\n", return_tensors="pt")).logits[0, -1].softmax(-1)
        assert value == pytest.approx((probs[unsafe] / (probs[safe] + probs[unsafe])).item(), abs=TOLERANCE)


async def test_the_version_is_that_of_the_files_and_of_what_decides_the_score(scorers, folders, tools):
    def version(**settings):
        spec = RewardModelSpec(kind="reward_model", **{"model": str(folders["reward"]), **settings})
        scorer: Any = reward_model.build(spec, tools)
        scorer._process = scorers["plain"]._process
        return scorer.version

    same = scorers["plain"].version
    assert version() == version(batch_tokens=7, device="cpu", weight=0.5) == same
    assert (
        len({same, version(dtype="bfloat16"), version(missing_eos_penalty=-1.0), version(template="x{response}")}) == 4
    )
    assert version(model=str(folders["pad_is_eos"])) == same  # the digest of the files counts, not their place
    digests = {name: digest_folder(folder) for name, folder in folders.items()}
    assert scorers["plain"]._process.digest == digests["reward"]
    assert len(set(digests.values())) == len(folders)


async def test_a_folder_that_is_not_there_is_a_mistake_in_the_recipe(tools):
    with pytest.raises(ConfigError, match="model = '/nowhere' is not a folder; tba data prepare"):
        reward_model.build(RewardModelSpec(kind="reward_model", model="/nowhere"), tools)
