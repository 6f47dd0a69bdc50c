"""Programs that need torch or transformers, each in a process of its own: the quickstart's starting model, small models
and data sets for the tiny recipes, and checks of model folders.
"""
