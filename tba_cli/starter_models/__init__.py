"""Programs that need torch or transformers: the quickstart's starting model, and checks of model folders."""
