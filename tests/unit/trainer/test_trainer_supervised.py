"""Supervised training: losses against other code, what is encoded, what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tba_searcher.engines.tokenizer import TextCodec
from tba_trainer.distributed.process_group import Team
from tba_trainer.learner.forward_backward import Ranks
from tba_trainer.learner.learner import Optimizer
from tba_trainer.model.parameters import trainable
from tba_trainer.supervised.checkpoint import Checkpoints, TrainingState
from tba_trainer.supervised.examples import Answer, Order, encode_answers
from tba_trainer.supervised.loop import Training
from tba_trainer.supervised.models import make_trainee
from tba_trainer.supervised.new_model import train_tokenizer
from tba_trainer.supervised.reward import RewardTask, Texts, auc, encode_texts, logits_of, pair_losses
from tba_trainer.supervised.sft import SftTask
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tba.config.supervised import NewModel, RewardTrainingSection, SftSection
from tba.config.trainer import TrainerSection
from tba.errors import ConfigError, TbaError
from tests.support.tiny_model import make_tiny_model, make_tiny_tokenizer

ROWS = [{"prompt": f"Q{a}+{b}", "response": f"A {a + b}"} for a, b in [(1, 2), (30, 4), (1, 2), (555, 666), (7, 88)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=32)


def sft_section(**changes: Any) -> SftSection:
    section = {"base": "b", "dataset": "d", "prompt": "{p}", "response": "{r}", "num_steps": 5, "batch_size": 3}
    return SftSection.model_validate({**section, "micro_batch_tokens": 30, "max_length_tokens": 64, **changes})


def pairs_section(**changes: Any) -> RewardTrainingSection:
    section = {"path": "p", "base": "b", "dataset": "d", "prompt": "{p}", "chosen": "{c}", "rejected": "{r}"}
    return RewardTrainingSection.model_validate({**section, "num_steps": 3, "max_length_tokens": 64, **changes})


def labels_section(**changes: Any) -> RewardTrainingSection:
    section = {"path": "p", "base": "b", "dataset": "d", "prompt": "{p}", "response": "{r}", "label": "l"}
    given = {"labels": ["no", "yes"], "num_steps": 3, "max_length_tokens": 64, **changes}
    return RewardTrainingSection.model_validate({**section, **given})


def answers() -> list[Answer]:
    return encode_answers(ROWS, make_tiny_tokenizer(), max_tokens=64, path=Path("x")).kept


# ---- Losses ---------------------------------------------------------------------------------------------------------


def hugging_face_loss(model: Any, examples: list[Answer]) -> torch.Tensor:
    """The mean over response tokens, of padded rows with `labels=`, which takes it in float32; here in float64 too."""
    longest = max(each.num_tokens for each in examples)
    ids, labels = torch.zeros(len(examples), longest).long(), torch.full((len(examples), longest), -100)
    for row, each in enumerate(examples):
        ids[row, : each.num_tokens] = torch.tensor(np.concatenate([each.prompt, each.response]))
        labels[row, len(each.prompt) : each.num_tokens] = torch.tensor(each.response)
    mask = (torch.arange(longest)[None] < torch.tensor([each.num_tokens for each in examples])[:, None]).long()
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(outputs.loss.double(), loss.double(), rtol=1e-6, atol=1e-6)
    return loss


def test_loss_and_gradient_are_those_of_hugging_face_in_float64(folder: Path) -> None:
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for _ in range(2)]
    theirs, ours = models
    loss = hugging_face_loss(theirs, answers())
    loss.backward()
    task = SftTask(ours, answers(), [], sft_section(), Ranks())
    rows = list(range(len(ROWS)))
    micro_batches = task.micro_batches(rows)
    assert len(micro_batches) > 1
    assert sorted(row for rows in micro_batches for row in rows) == rows
    total = 0.0
    for each in micro_batches:
        share = task.loss_sum(each) / task.divisor(rows)
        share.backward()
        total += float(share.detach())
    assert math.isclose(total, float(loss.detach()), rel_tol=1e-12)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


def test_heldout_numbers_are_those_of_whole_rows(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    probe = answers()
    # one response that the model itself finds the likeliest, token by token
    ids = torch.tensor(probe[0].prompt)[None].long()
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        greedy = Answer(probe[0].prompt, ids[0, len(probe[0].prompt) :].numpy().astype(np.int32))
        loss = float(hugging_face_loss(model, [*probe, greedy]))
    found = SftTask(model, probe, [*probe, greedy], sft_section(), Ranks()).evaluate()
    assert found["heldout_loss"] == pytest.approx(loss, rel=1e-5)
    assert found["heldout_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert found["heldout_exact"] == 1 / 6


def test_pair_loss_is_the_formula() -> None:
    chosen, rejected = [2.0, -1.0, 0.5], [0.0, 3.0, 0.5]
    found = pair_losses(torch.tensor(chosen).double(), torch.tensor(rejected).double(), centre=0.1)
    for value, c, r in zip(found.tolist(), chosen, rejected, strict=True):
        assert value == pytest.approx(math.log(1 + math.exp(-(c - r))) + 0.1 * (c + r) ** 2, rel=1e-12)


def test_scores_do_not_depend_on_the_batch_and_are_read_at_the_last_token(folder: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float64).eval()
    # the second ends in the model's own padding token
    texts = [[3, 4, 5, 1], [6, 7, model.config.pad_token_id], [8]]
    with torch.no_grad():
        found = logits_of(model, texts)
        for text, score in zip(texts, found, strict=True):
            hidden = model.base_model(torch.tensor([text])).last_hidden_state
            torch.testing.assert_close(score, model.score(hidden)[0, -1], rtol=1e-9, atol=1e-12)
    assert model.config.pad_token_id == 0


def test_reward_losses_add_up_over_micro_batches(folder: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    examples = [Texts(([3] * n, [4] * m)) for n, m in [(9, 2), (1, 4), (3, 3), (8, 8)]]
    small, large = (
        RewardTask(model, examples, examples, pairs_section(micro_batch_tokens=tokens)) for tokens in (20, 1000)
    )
    rows = [3, 1, 0, 2]
    assert len(large.micro_batches(rows)) == 1
    assert [sorted(batch) for batch in small.micro_batches(rows)] == [[0], [3], [1, 2]]
    with torch.no_grad():
        parts = sum(float(small.loss_sum(batch)) for batch in small.micro_batches(rows))
        assert parts == pytest.approx(float(large.loss_sum(rows)), rel=1e-5)
    for name, value in small.evaluate().items():
        assert value == pytest.approx(large.evaluate()[name], rel=1e-4), name


def test_auc_counts_pairs_and_ties_as_half() -> None:
    scores, labels = np.array([3.0, 1.0, 2.0, 2.0, 0.0]), np.array([True, False, True, False, True])
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels] for n in scores[~labels]]
    assert auc(scores, labels) == pytest.approx(np.mean(pairs))


# ---- What is learned from -------------------------------------------------------------------------------------------


def test_every_example_is_seen_once_per_epoch_in_another_order() -> None:
    order = Order(10, 4, seed=1)
    places = [row for step in range(5) for row in order.of_step(step)]
    first, second = places[:10], places[10:]
    assert Counter(first) == Counter(second) == Counter(range(10))
    assert first != second
    assert Order(10, 4, seed=1).of_step(3) == order.of_step(3)
    assert Order(10, 4, seed=2).of_step(0) != order.of_step(0)


def test_tokens_are_those_of_searchers_and_evaluation(folder: Path) -> None:
    codec = TextCodec(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kept = encode_answers(ROWS, tokenizer, max_tokens=64, path=Path("x")).kept
    for row, answer in zip(ROWS, kept, strict=True):
        assert tuple(answer.prompt) == codec.encode_prompt(row["prompt"])
        assert tuple(answer.response) == codec.encode_response(row["response"])


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    rows = [*ROWS, {"prompt": "", "response": "A"}]
    found = encode_answers(rows, make_tiny_tokenizer(), max_tokens=10, path=Path("x"))
    assert (len(found.kept), found.left_out) == (4, {"too_long": 1, "no_tokens": 1})
    with pytest.raises(ConfigError, match=r"no example of x can be used \({'too_long': 5}; the longest has 15 tokens"):
        encode_answers(ROWS, make_tiny_tokenizer(), max_tokens=3, path=Path("x"))


def test_texts_end_once_and_labels_are_known() -> None:
    tokenizer = make_tiny_tokenizer()
    eos = tokenizer.eos_token_id
    rows = [{"prompt": "1", "response": "2<eos>", "label": "yes"}, {"prompt": "1", "response": "2", "label": "no"}]
    kept = encode_texts(rows, tokenizer, labels_section(), path=Path("x")).kept
    assert [(each.texts[0][-1], len(each.texts[0]), each.label) for each in kept] == [(eos, 3, 1), (eos, 3, 0)]
    bare = encode_texts(rows, tokenizer, labels_section(append_eos=False), path=Path("x")).kept
    assert [len(each.texts[0]) for each in bare] == [3, 2]
    with pytest.raises(ConfigError, match=r"line 2: label 'no' is none of labels \(yes, maybe\)"):
        encode_texts(rows, tokenizer, labels_section(labels=["yes", "maybe"]), path=Path("x"))


def test_a_new_tokenizer_writes_any_text_and_keeps_digits_apart() -> None:
    section = NewModel(hidden_size=8, num_layers=1, num_heads=1, vocab_size=300, special_tokens=["<|im_end|>"])
    tokenizer: Any = train_tokenizer(["the apples 1234 the apples"] * 9, section)
    for text in ("the apples", "12 345 é 漢 \n<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234")["input_ids"]) == 4
    assert len(tokenizer(" the apples<|im_end|>")["input_ids"]) < 6
    assert 259 < len(tokenizer) <= 300
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    with pytest.raises(ConfigError, match="vocab_size is 258, and 256 bytes and 3 special tokens need 259"):
        train_tokenizer(["a"], section.model_copy(update={"vocab_size": 258}))


def test_a_very_long_word_does_not_hold_a_tokenizer_up() -> None:
    section, begun_s = NewModel(hidden_size=8, num_layers=1, num_heads=1, vocab_size=300), time.process_time()
    train_tokenizer(["ab" * 1_000_000, "the apples"], section)  # took an hour
    assert time.process_time() - begun_s < 10


# ---- Models ---------------------------------------------------------------------------------------------------------


def test_a_base_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer, team = make_tiny_tokenizer(), Team.alone()
    with pytest.raises(ConfigError, match="holds no model"):
        make_trainee(sft_section(base=str(tmp_path)), tokenizer, team)
    with pytest.raises(ConfigError, match=r"max_length_tokens is 513, and the model .* reads at most 512 tokens"):
        make_trainee(sft_section(base=str(folder), max_length_tokens=513), tokenizer, team)
    classifier = make_trainee(labels_section(base=str(folder)), tokenizer, team, labels=["no", "yes"]).model
    classifier.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ConfigError, match=r"lacks weights of a LlamaForCausalLM: lm_head"):
        make_trainee(sft_section(base=str(tmp_path / "classifier")), tokenizer, team)


def test_a_classifier_keeps_its_head_if_the_labels_are_as_many(folder: Path, tmp_path: Path) -> None:
    tokenizer, team = make_tiny_tokenizer(), Team.alone()

    def trainee(base: Path, labels: list[str]) -> Any:
        return make_trainee(labels_section(base=str(base), labels=labels), tokenizer, team, labels=labels).model

    first = trainee(folder, ["no", "yes"])
    first.save_pretrained(tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "two")
    again, other = trainee(tmp_path / "two", ["a", "b"]), trainee(tmp_path / "two", ["a", "b", "c"])
    torch.testing.assert_close(again.score.weight, first.score.weight)
    assert other.score.weight.shape[0] == 3
    assert again.config.id2label == {0: "a", 1: "b"}


# ---- Steps and checkpoints ------------------------------------------------------------------------------------------


def training(folder: Path, out: Path, stop: threading.Event | None = None, **changes: Any) -> Training:
    section = sft_section(base=str(folder), eval_every_steps=2, checkpoint_interval=2, **changes)
    team = Team.alone()
    model = make_trainee(section, make_tiny_tokenizer(), team).model
    return Training(
        SftTask(model, answers(), answers(), section, Ranks()),
        model,
        section,
        order=Order(len(ROWS), section.batch_size, section.seed),
        checkpoints=Checkpoints(out, max_bytes=20_000, is_leader=True),
        state=TrainingState(settings=section.deciding(), examples_sha256="0" * 64),
        team=team,
        stop=stop or threading.Event(),
    )


def test_a_signal_leaves_a_checkpoint_and_the_rest_ends_in_the_same_bits(folder: Path, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    whole, first = training(folder, tmp_path / "a"), training(folder, tmp_path / "b", stop)
    assert whole.run()
    assert not first.run()
    assert first.state.step == 1
    second = training(folder, tmp_path / "b")
    assert second.state.step == 1
    assert second.run()
    for name, tensor in trainable(whole._model).items():
        assert torch.equal(tensor, trainable(second._model)[name]), name
    assert second.state.curve == whole.state.curve
    assert [point["step"] for point in whole.state.curve] == [2, 4, 5]
    assert [path.name for path in (tmp_path / ".b.checkpoint").iterdir()] == ["000000005"]


def test_a_checkpoint_of_another_training_or_a_damaged_one_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    assert training(folder, out).run()
    with pytest.raises(
        ConfigError, match=r"it was begun with batch_size = 3, and the recipe has 2; undo that to go on"
    ):
        training(folder, out, batch_size=2)
    training(folder, out, micro_batch_tokens=64)  # how it runs, not what is learned
    [state] = tmp_path.glob(".made.checkpoint/*/state.json")
    good = state.read_text()
    state.write_text(good.replace("0" * 64, "1" * 64))
    with pytest.raises(ConfigError, match="it was begun with other examples"):
        training(folder, out)
    state.write_text(json.dumps({**json.loads(good), "base_origin": "2" * 64}))
    with pytest.raises(ConfigError, match="its base has been trained anew since; undo that to go on"):
        training(folder, out)
    state.write_text(json.dumps({"step": 1}))
    with pytest.raises(ConfigError, match=r"is damaged .*; delete .*\.made\.checkpoint to begin anew"):
        training(folder, out)


def test_a_folder_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    ours, theirs = (Checkpoints(tmp_path / "made", max_bytes=1, is_leader=True) for _ in range(2))
    with ours.locked():
        with pytest.raises(ConfigError, match=r"another process makes .*made now"), theirs.locked():
            pass
        assert (tmp_path / ".made.checkpoint").is_dir()
    with theirs.locked():
        pass
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_folder_that_was_deleted_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        (tmp_path / ".made.checkpoint").rmdir()  # the other one has ended since the folder was opened

    monkeypatch.setattr("fcntl.flock", flock)
    late = Checkpoints(tmp_path / "made", max_bytes=1, is_leader=True)
    with pytest.raises(ConfigError, match="another process makes"), late.locked():
        pass


def test_a_folder_on_a_file_system_without_locks_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    made = Checkpoints(tmp_path / "made", max_bytes=1, is_leader=True)
    with pytest.raises(ConfigError, match="does not lock files"), made.locked():
        pass


def test_a_loss_that_is_not_finite_ends_the_training(folder: Path, tmp_path: Path) -> None:
    run = training(folder, tmp_path / "made")
    with torch.no_grad():
        next(iter(trainable(run._model).values()))[:] = math.inf
    with pytest.raises(TbaError, match="the loss of step 1 is nan: lower learning_rate"):
        run.run()


def test_a_gradient_that_is_not_finite_leaves_weights_and_checkpoint_as_they_are(folder: Path, tmp_path: Path) -> None:
    run = training(folder, tmp_path / "made", num_steps=1)
    before = {name: tensor.detach().clone() for name, tensor in trainable(run._model).items()}
    next(iter(trainable(run._model).values())).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TbaError, match=r"the norm of the gradient of step 1 is (nan|inf): lower learning_rate"):
        run.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainable(run._model).items())
    assert not list(tmp_path.glob(".made.checkpoint/*"))


def test_adamw_is_that_of_the_trainer(folder: Path, tmp_path: Path) -> None:
    """Every setting of the section reaches the optimizer."""
    changes: dict[str, Any] = {"adam_beta1": 0.5, "adam_beta2": 0.6, "weight_decay": 0.7, "max_grad_norm": 1e-3}
    run = training(folder, tmp_path / "made", **changes, num_steps=1, learning_rate=0.01)
    section = sft_section(base=str(folder))
    model = make_trainee(section, make_tiny_tokenizer(), Team.alone()).model
    optimizer = Optimizer(model, TrainerSection.model_validate(changes))
    task = SftTask(model, answers(), [], section, Ranks())
    rows = Order(len(ROWS), 3, 0).of_step(0)
    for each in task.micro_batches(rows):
        (task.loss_sum(each) / task.divisor(rows)).backward()
    optimizer.clip(None)
    optimizer.apply(learning_rate=0.01)
    assert run.run()
    for name, tensor in trainable(model).items():
        assert torch.equal(tensor, trainable(run._model)[name]), name
