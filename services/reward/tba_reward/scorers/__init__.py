"""One kind of scorer per file, found by its name: `tba_reward/scorers/KIND.py` defines `build(spec, tools)`."""
