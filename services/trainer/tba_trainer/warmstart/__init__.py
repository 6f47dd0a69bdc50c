"""Makes the quickstart's small starting model by supervised learning: `python -m tba_trainer.warmstart`."""
