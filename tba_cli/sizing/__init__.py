"""The memory and disk that a run needs. The trainer's step is traced; the rest are formulas of docs/recipes.md."""
