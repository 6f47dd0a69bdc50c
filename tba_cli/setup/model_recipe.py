"""The files of `tba init --model --data`, also for `tba.run(model=...)`: a recipe that fits, and a scorer if needed.

Each number follows from the rows, the model or the machine, and its comment says how.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tba.config import Recipe, parse_recipe
from tba.config.recipe_file import HUB_MODEL
from tba.config.reward import BUILT_IN_TASKS
from tba.errors import ConfigError
from tba_cli.artifacts.huggingface import shape_on_hub
from tba_cli.child_processes import ask_program
from tba_cli.prompts.columns import RowError, column_text, short
from tba_cli.prompts.reader import prompts_of
from tba_cli.prompts.sources import Row, jsonl_rows
from tba_cli.sizing.estimate import DTYPE_BYTES, estimate
from tba_cli.sizing.gpu_layout import GIB, gpu_layout, misfits
from tba_cli.sizing.machine import Machine
from tba_cli.sizing.model_shape import ModelShape, shape_of_folder

CONVERT = "tba_cli.starter_models.convert"
NAME = re.compile("[a-z][a-z0-9_-]{0,40}")
PROMPT_COLUMNS = ("prompt", "question", "messages")
GOLD_COLUMNS = ("answer", "solution", "ground_truth", "completion")
NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:(?<=[0-9])\.[0-9]+|(?<=[0-9])|\.[0-9]+)", re.ASCII)
BARE = re.compile("[A-Za-z0-9_-]+")
LATEX = re.compile(r"(?<!:)\\[A-Za-z]{2,}|^\s*\$[^$]+\$\s*$")
RATES = (
    (0.3e9, 2e-5, "Hugging Face's GRPO course has 2e-5 at 0.135B"),
    (1e9, 5e-6, "prime-rl has 3e-6 at 0.6B, and TRL 5e-5 with LoRA"),
    (4e9, 2e-6, "TRL has 1e-6 at 3B, and 1e-5 with LoRA"),
    (math.inf, 1e-6, "verl has 1e-6 at 7B"),
)
"""Most parameters, learning rate of all weights, and what others have there."""
SCORER = r'''"""A first guess of the reward, for you to change, with examples.jsonl. TRL's functions run here too."""

import re


def score(prompts: list, completions: list, answer: list, **columns: list) -> list[float | None]:
    """Give 1 to a response that ends with the gold answer, 0.5 to one that has it elsewhere, and 0 to others.

    Case and punctuation do not count. The 0.5 is there because nothing is learned while all rewards are the same.
    """
    # messages, as in TRL, where the prompts are
    texts = [turns if isinstance(turns, str) else turns[-1]["content"] for turns in completions]
    pairs = [(_words(text), _words(str(gold))) for text, gold in zip(texts, answer, strict=True)]
    return [1.0 if written.endswith(gold) else 0.5 if gold in written else 0.0 for written, gold in pairs]


def _words(text: str) -> str:
    # numbers with sign and fraction, words, and else single signs but for punctuation
    found = re.findall(r"-?\d+(?:\.\d+)?|\w+|[^\w\s.,;:!?'\"()]", text.casefold())
    return " ".join(["", *(found or text.split()), ""])
'''
EPISODE_TOKENS = 4096
"""Most tokens of an episode, where the model takes as many: those of one pass."""
RATE_FACTOR, MIN_RATED_PARAMS = 10.0, 5e7
"""So many times such a rate broke models within a few steps; far smaller models bear more."""
Scorers = Sequence[Mapping[str, Any]]
quoted = partial(json.dumps, ensure_ascii=False)


def check_task_name(task: str) -> None:
    """Raise ConfigError unless a new task can have this name."""
    if not NAME.fullmatch(task):
        raise ConfigError(
            f"{task!r} is no name of a task; take up to 41 small letters, digits, - and _, and begin with a letter"
        )
    if task in BUILT_IN_TASKS:
        raise ConfigError(f"task {task!r} is scored by tba itself ({', '.join(BUILT_IN_TASKS)}); take another name")


def model_task_files(
    task: str,
    model: str,
    data: Path,
    machine: Machine,
    *,
    scorers: Scorers | None = None,
    lora: bool | None = None,
    episodes: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return name and text of every file of a task for this model and these rows.

    Args:
        model: folder in Hugging Face format, or ORG/NAME on the hub.
        data: JSONL file of rows in TRL's format, with a prompt each. Without `scorers` each has a gold answer too.
        scorers: as a recipe has them. None: one that reads the gold answers, as `answer`. Functions get every other
            column, and as in TRL messages of prompt and response if the prompts are messages.
        lora: whether to train an adapter; None: where training all weights does not fit.
        episodes: keys of [environments.TASK]. With an environment and without `scorers`, it alone pays.

    Raises:
        ConfigError: a row, the model, or the length of a prompt does not fit; or the hub is not reached.
    """
    rows, episodes = list(jsonl_rows(data)), episodes or {}
    scorers = () if scorers is None and "environment" in episodes else scorers
    if not rows:
        raise ConfigError(f"--data {data} holds no rows")
    columns = column, _, golds = _columns(rows, needs_gold=scorers is None)
    with _model_of(model) as (path, folder, shape):
        text = _text(column, [row.values.get(column) for row in rows], folder)
        kind, source = _source(task, text, rows, columns, scorers)
        if episodes:
            keys = (f"{key} = {_toml(value)}\n" for key, value in episodes.items())
            source += f"\n[environments.{task}]\n{''.join(keys)}"
        draft: dict[str, Any] = tomllib.loads(source)
        draft["data"]["sets"][0]["dataset"], draft["data"]["num_heldout"] = str(data), 1
        draft |= {"run": {"name": task}, "model": {"path": str(folder)}}
        prompts = prompts_of(parse_recipe(draft, where=str(data)))
        texts = json.dumps([*(prompt.text for prompt in prompts), *golds])
        measured = ask_program(CONVERT, ["check", str(folder)], texts=texts)
    tokens, room = measured["text_tokens"][: len(prompts)], measured["max_length_tokens"] or 2**31
    longest, longest_gold = max(tokens), max(measured["text_tokens"][len(prompts) :], default=0)
    if longest + 16 > room:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, and {model} takes {room} of a prompt with its response; shorten "
            f"it or leave it out: {short(prompts[tokens.index(longest)].text)}"
        )
    # a short prompt gets a sentence; a long one is a problem that takes working
    response, why = (32, "a sentence") if longest <= 64 and not episodes else (256, "working")
    if kind != "last_number" or longest_gold > 16:
        response, why = response + 2 * longest_gold, f"{why}, and twice the longest gold answer ({longest_gold})"
    most_prompt = min(math.ceil(longest / 16) * 16, room - 16)
    most_response = min(math.ceil(response / 16) * 16, room - most_prompt)
    if episodes:
        whole = min(room, EPISODE_TOKENS)
        most_response = min(most_response, whole // 4)
        most_prompt = max(most_prompt, whole - most_response)
    what = "of a conversation, which begins with up to" if episodes else "the longest prompt has"
    lengths = f"max_prompt_tokens = {most_prompt} # {what} {longest}\n"
    lengths += f"max_response_tokens = {most_response} # room for {why}\n"
    if measured["endless"]:
        lengths += f"tasks.{task}.stop = [{quoted(measured['endless'])}] # ends a turn, and no sequence\n"
    recipe_text = partial(_recipe_text, task, path, shape, machine, len(prompts), source, lengths)
    why = "as asked"
    if lora is None:
        recipe = parse_recipe(tomllib.loads(recipe_text("", has_lora=False)), where="the new recipe")
        fits, why = _fits(recipe, shape, machine)
        lora = not fits
    why = f"{'LoRA' if lora else 'all weights'}: {why}"
    found = {f"{task}.toml": recipe_text(why, has_lora=lora), "rows.jsonl": data.read_bytes().decode()}
    if kind == "python" and scorers is None:
        gold, example = golds[0], {"task": task, "prompt": prompts[0].text, "data": prompts[0].data}
        shown = {gold: 1.0, f"The answer is {gold}.": 1.0, f"{gold} or not": 0.5, "": 0.0}
        examples = [{**example, "response": response, "expected": expected} for response, expected in shown.items()]
        found |= {"scorer.py": SCORER, "examples.jsonl": "".join(f"{json.dumps(row)}\n" for row in examples)}
    return found


def _fits(recipe: Recipe, shape: ModelShape, machine: Machine) -> tuple[bool, str]:
    """Return whether all weights can be trained on this machine, and why."""
    # a trace takes most of the time, and is needed only where memory is scarce
    peak_bytes = _most_bytes(recipe, shape)
    said = f"less than {peak_bytes / GIB:.1f} GiB"
    if not _has_room(recipe, shape, machine, peak_bytes)[0]:
        files = {"config": recipe.model_dump_json(), "model": json.dumps(shape.config)}
        peak_bytes = ask_program("tba_trainer.memory_trace", **files)["peak_bytes"]
        said = f"{peak_bytes / GIB:.1f} GiB (traced)"
    fits, where = _has_room(recipe, shape, machine, peak_bytes)
    return fits, f"to train all takes {said}, of {where}"


def _most_bytes(recipe: Recipe, shape: ModelShape) -> int:
    """Return more than a step can take, by sizes alone: traces of six dense models were 0.1 to 0.6 of it."""
    if any("expert" in name for name in shape.config):
        return 2**62
    longest = recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens
    tokens = max(recipe.trainer.micro_batch_tokens, recipe.sampling.group_size * longest)
    tokens = min(tokens, recipe.sampling.prompts_per_batch * recipe.sampling.group_size * longest)
    num_heads = shape.hidden_size // shape.head_size
    layer = 16 * shape.hidden_size + 6 * shape.inner_size + 3 * num_heads * longest
    layers = DTYPE_BYTES[recipe.trainer.compute_dtype] * shape.num_layers * layer
    # weights, a second model, a published copy, gradients and moments; then six tables of logits
    return 24 * shape.num_params + tokens * (24 * shape.vocab_size + layers)


def _has_room(recipe: Recipe, shape: ModelShape, machine: Machine, peak_bytes: int) -> tuple[bool, str]:
    """Return whether a trainer that takes `peak_bytes` fits beside the searchers, and into what."""
    if machine.gpu_bytes:
        gpu_bytes = min(machine.gpu_bytes)
        layout = gpu_layout(recipe, lambda _: shape, trainer_peak_bytes=peak_bytes)
        return not any(misfits(layout, gpu_bytes)), f"a GPU of {gpu_bytes / GIB:.0f} GiB"
    needs, half = estimate(recipe, shape), machine.memory_bytes // 2
    searchers = recipe.searcher.num_searchers * (needs.weights_bytes + needs.kv_cache_bytes)
    return peak_bytes + searchers <= half, f"half of {machine.memory_bytes / GIB:.0f} GiB"


def rate_warning(recipe: Recipe) -> str | None:
    """Return a warning about a learning rate far above those of others, with the advice after `; `; else None."""
    rate, num_params = recipe.trainer.learning_rate.value, 0
    with suppress(ConfigError):  # it is not there so far, or names its sizes otherwise
        num_params = shape_of_folder(Path(recipe.model.path)).num_params
    usual, others = next((usual, others) for most, usual, others in RATES if num_params <= most)
    if recipe.model.lora is not None or num_params < MIN_RATED_PARAMS or rate <= RATE_FACTOR * usual:
        return None
    return (
        f"trainer.learning_rate is {rate:g}, {rate / usual:.0f} times that of others for all weights of such a model "
        f"({others}), and may break it within a few steps; lower it"
    )


def _columns(rows: Sequence[Row], *, needs_gold: bool) -> tuple[str, str, list[str]]:
    """Return the columns of prompts and gold answers, by the first row, and all gold answers as texts."""
    found, golds = [], []
    for what, known in (("prompt", PROMPT_COLUMNS), ("gold answer", GOLD_COLUMNS)):
        names = [name for name in known if name in rows[0].values]
        if not names and (needs_gold or what == "prompt"):
            has = ", ".join(rows[0].values)
            raise ConfigError(f"{rows[0].where}: no column is a {what} ({', '.join(known)}); rename one of {has}")
        found += names[:1] or [""]
    for row in rows:
        turns = row.values.get(found[0])
        if isinstance(turns, list) and turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant":
            raise ConfigError(f"{row.where}: {found[0]!r} ends with a turn of the assistant; take the answer out of it")
        if not needs_gold:
            # for the length of a response alone: what a gold answer is, the scorers know
            golds += [str(gold)] if isinstance(gold := row.values.get(found[1]), str | int | float) else []
            continue
        try:
            golds.append(column_text(row.values, found[1]))
        except RowError as error:
            raise ConfigError(f"{row.where}: {error}; write the gold answer as one") from None
        if not golds[-1].strip():
            raise ConfigError(f"{row.where}: its {found[1]!r} is empty, and any response would be right; leave it out")
    return found[0], found[1], golds


def _source(
    task: str, text: str, rows: Sequence[Row], columns: tuple[str, str, list[str]], scorers: Scorers | None
) -> tuple[str, str]:
    """Return the kind of scorer that reads the gold answers, and the recipe's lines about rows and scorers."""
    column, gold_column, golds = columns
    num_marked, answer = sum("####" in gold for gold in golds), quoted(gold_column)
    ends = [gold.rpartition("####")[2].strip() for gold in golds]
    if golds and num_marked in (0, len(golds)) and all(map(NUMBER.fullmatch, ends)):
        kind, setting = "last_number", ""
        why = 'every gold answer is a number: the last one of a response counts, as in "7 + 5 = 12."'
        if num_marked:
            answer = f'{{ column = {answer}, extract = "after", marker = "####" }}'
    elif all(NUMBER.fullmatch(gold.strip()) or LATEX.search(gold) for gold in golds):
        kind, setting = "math", ', extract = "anywhere"'
        why = 'gold answers are LaTeX: compared as mathematics, in a box, behind "answer is", or at the end'
    else:
        kind, setting = "python", ', function = "scorer:score"'
        why = "gold answers are free text: scorer.py says what is right; change it, and examples.jsonl with it"
    shown = f'{{ kind = "{kind}"{setting} }}'
    # all that TRL's functions get: the other columns, and messages where the prompts are
    are_given = scorers is not None
    names = [
        name for name in rows[0].values if name != column and (are_given or all(name in row.values for row in rows))
    ]
    keys = {name: quoted(name) for name in names}
    keys |= {"prompt": quoted(column)} if isinstance(rows[0].values[column], list) else {}
    if scorers is None:
        keys["answer"] = answer
    else:
        why, shown = "as given", ", ".join(map(_toml, scorers))
    data = ", ".join(f"{key if BARE.fullmatch(key) else quoted(key)} = {name}" for key, name in keys.items())
    lines = f"""\
[[data.sets]]
task = "{task}"
dataset = "rows.jsonl" # a copy, with {len(rows):,} rows
{text}
data = {{ {data} }}
"""
    if shown:
        lines += f"\n[reward.tasks.{task}]\n# {why}\nscorers = [{shown}]\n"
    return kind, lines


def _toml(value: Any) -> str:
    """Return a JSON value as TOML in one line, without nulls."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{quoted(key)} = {_toml(each)}' for key, each in value.items() if each is not None)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return quoted(value)


@contextmanager
def _model_of(model: str) -> Iterator[tuple[str, Path, ModelShape]]:
    """Yield the model's path for the recipe, a folder with its tokenizer, and its shape."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        yield str(folder.resolve()), folder, shape_of_folder(folder)
    elif folder.exists() or model.endswith(".gguf") or not HUB_MODEL.fullmatch(model):
        raise ConfigError(
            f"--model {model} holds no config.json; give a folder in Hugging Face format, or ORG/NAME on the hub (an "
            "item of [[prepare]] makes a folder of a GGUF file)"
        )
    else:
        with tempfile.TemporaryDirectory(prefix="tba-init-") as place:
            shape = shape_on_hub(model, None, tokenizer=Path(place))
            yield model, Path(place), shape


def _text(column: str, values: Sequence[Any], folder: Path) -> str:
    """Return the lines of the recipe that say what the text of a prompt is."""
    files = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    # thinking would take more tokens than a response has
    thinks = any("enable_thinking" in file.read_text(encoding="utf-8") for file in files if file.is_file())
    texts = [value for value in values if isinstance(value, str)]
    if 0 < len(texts) < len(values):
        raise ConfigError(
            f"column {column!r} holds messages and texts, such as {short(texts[0])}; make all of them one"
        )
    if not texts:
        line = f"column = {quoted(column)} # messages, of which the model's chat template makes text"
        return line + "\nchat_template_kwargs = { enable_thinking = false } # the answer at once" * thinks
    words = ["chat", str(folder), *(["--template-kwargs", '{"enable_thinking": false}'] if thinks else [])]
    chat = json.dumps([{"messages": [{"role": "user", "content": "QUESTION"}]}])
    turns = ask_program(CONVERT, words, texts=chat)[0].get("text", "")
    before, _, after = turns.replace("{", "{{").replace("}", "}}").partition("QUESTION")
    turn_end = next(iter(after.split()), None)
    rendered = [text for text in texts if turn_end is not None and turn_end in text]
    if 0 < len(rendered) < len(texts):
        raise ConfigError(
            f"column {column!r} holds texts with and without {turn_end!r}, the end of a turn, such as "
            f"{short(rendered[0])}; give all of them with the chat template, or none"
        )
    if turn_end is None or rendered:
        return f"column = {quoted(column)} # text, taken as it is"
    template = quoted(f"{before}{{{column}}}{after}")
    return f"# the turns of the model's chat template, around the text\ntemplate = {template}"


def _recipe_text(
    task: str, path: str, shape: ModelShape, machine: Machine, num_prompts: int, *lines: str, has_lora: bool
) -> str:
    """Return the recipe. `lines`: those about rows and scorer, about lengths, and why LoRA, or all weights."""
    source, lengths, why = lines
    why += "\nlora = { rank = 32, alpha = 32 } # TRL: ranks of 1 to 32 are enough for RL" * has_lora
    dtype = shape.config.get("dtype") or shape.config.get("torch_dtype")
    dtype = dtype if dtype in DTYPE_BYTES else "float32"
    is_small, num_heldout = shape.num_params < 1e9, max(1, min(256, num_prompts // 5))
    temperature = "0.7 # below 1B parameters samples at 1.0 ramble" if is_small else "1.0 # as TRL and verl"
    num_train, gpus = num_prompts - num_heldout, len(machine.gpu_bytes)
    prompts, group, where = (32, 8, "a GPU") if gpus else (8, 4, "a CPU")
    prompts = min(prompts, num_train)
    num_steps = max(60, min(400, math.ceil(3 * num_train / prompts)))
    rate, others = next((rate, others) for most, rate, others in RATES if shape.num_params <= most)
    num_searchers, searchers_why = machine.num_searchers, f"half of {machine.num_cores} cores, at most 4"
    searcher = layout = ""
    trainer = "micro_batch_tokens = 4096 # of one pass; more are no faster on a CPU\n"
    trainer += f"torch_num_threads = {machine.num_threads} # half of {machine.num_cores} cores\n"
    if gpus:
        num_searchers, searchers_why = max(1, gpus - 1), "one for each GPU but the trainer's, at least one"
        searcher = 'device = "cuda"\n'
        trainer = 'device = "cuda"\n'
        layout = "\n[local]\nstart_timeout_s = 600 # a large model and vLLM take minutes\n"
        if gpus > 1:
            own = [[number] for number in range(1, gpus)]
            layout += f"\n[local.gpus]\ntrainer = [0] # the first of {gpus}\nsearchers = {own} # each its own\n"
        if machine.has_vllm:
            share = "0.9 # it has a GPU of its own" if gpus > 1 else "0.4 # the trainer is on the same GPU"
            searcher += f'engine = "vllm"\nvllm.gpu_memory_share = {share}\n'
    if not is_small:
        trainer += "gradient_checkpointing = true # above 1B parameters: a third more time, for much less memory\n"
    return f"""\
# {Path(path).name} learns from the rewards of {num_prompts:,} prompts, on {where}. `tba init` wrote why beside each
# number. `tba config check {task}.toml` says what would fail, `tba run {task}.toml` trains.

[run]
name = "{task}"

[model]
path = {quoted(path)}
dtype = "{dtype}" # as its files
policy_temperature = {temperature}
# {why}

[data]
num_heldout = {num_heldout} # a fifth of {num_prompts:,} different prompts, at most 256: never trained on

{source}
[buffer]
port = 0 # any that is free

[reward]
port = 0 # any that is free

[sampling]
prompts_per_batch = {prompts} # with group_size {prompts * group} rollouts a step, for {where}
group_size = {group} # responses to a prompt, which are compared with each other
rollouts_per_visit = {group} # one group
most_on_policy_prob = 1.0 # take the newest rollouts that there are
min_size_to_sample = {prompts * group} # one batch
samples_per_insert = 1.0 # train on each rollout once on average; `max_uses = 1` is never twice
samples_per_insert_error = {prompts * group} # searchers may be one batch ahead

[searcher]
num_searchers = {num_searchers} # {searchers_why}
num_slots = {math.ceil(prompts * group / num_searchers)} # one batch, over all searchers
{lengths}{searcher}
[objective]
preset = "tba_prime_clip"
beta = 0.02 # KL to the model of at most 50 steps ago: a larger one keeps it nearer
aggregation = "sequence_mean" # a short right response counts as much as a long wrong one
mask_tied = true # no pass for groups whose rewards are all equal: at the start they are most

[trainer]
num_steps = {num_steps} # {num_steps * prompts / num_train:.2g} epochs of {num_train:,} prompts; 60 to 400 steps
# {shape.num_params / 1e9:.2g}B parameters, {"LoRA, ten times that of " * has_lora}all weights: {others}
learning_rate = {f"{10 * rate if has_lora else rate:.0e}".replace("e-0", "e-")}
sync_interval = 1 # a version every step, so that rollouts are new
prefetch_batches = 0 # a batch that is drawn ahead is a step older
compute_dtype = "{"bfloat16" if dtype == "bfloat16" else "float32"}" # as model.dtype: both then see the same weights
{trainer}
[eval]
every_steps = {num_steps // 3} # three in a run, and one before
timeout_s = 1800 # for long responses on a small machine
{layout}"""
