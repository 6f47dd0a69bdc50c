"""tools/prose.py: what a sentence is, which text is measured, and when the check fails."""

from __future__ import annotations

from tools import prose

PAGE = """\
# A heading is no sentence that anybody counts

tba trains models with old data. pip installs it from a registry
in one call: `tba run quickstart --set a=b` starts it.

| a table | has no sentences at all |
|---|---|

```bash
tba run is code and no sentence.
```

* What is this list item about?
* Too short.
"""


def texts(found: list[prose.Sentence]) -> list[str]:
    return [sentence.text for sentence in found]


def test_a_page_has_the_sentences_of_its_paragraphs_and_items() -> None:
    assert texts(prose.sentences(prose.paragraphs_of_page(PAGE), "page.md")) == [
        "tba trains models with old data.",
        "pip installs it from a registry in one call: CODE starts it.",
        "What is this list item about?",
    ]


def test_the_check_takes_no_long_sentence_in_readme_and_few_in_docs() -> None:
    short, long = prose.Sentence("a.md", "word " * 30), prose.Sentence("a.md", "word " * 31)
    assert list(prose.faults({"README": [short], "docs": [short] * 97 + [long] * 3})) == []
    of_readme, of_docs = prose.faults({"README": [short, long], "docs": [short] * 96 + [long] * 4})
    assert of_readme.startswith("README has a sentence of 31 words, at most 30")
    assert of_docs == "4.0% of the sentences of docs have over 30 words, at most 3% may"
