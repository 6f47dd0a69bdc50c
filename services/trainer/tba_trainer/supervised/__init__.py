"""Supervised training before a run: a language model learns responses, a reward model learns scores or labels.

    python -m tba_trainer.supervised sft|reward --config FILE --item N --examples FILE [--heldout FILE] --out FOLDER

    training.py    one item from its examples to its folder
    examples.py    rows of a JSONL file -> token ids; what is left out is counted
    new_model.py   a model and a tokenizer from nothing
    models.py      a base model, and the folder that is made
    sft.py         loss of responses; held-out perplexity
    reward.py      loss of pairs or of labels; held-out accuracy
    loop.py        the optimizer steps of both
    checkpoint.py  what a resume needs, beside the folder

stderr has a line `progress: {json}` now and then; the last line of a failure is one sentence for people.
"""
