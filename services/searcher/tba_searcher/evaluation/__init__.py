"""The evaluator: a process of its own that `tba evaluate` starts for one model.

    prompts --generating--> answers --scoring--> scores ---------.
                               |---- perplexity (starting model) |--> numbers --> evaluation.json
                               `---- diversity (embedding model) '

One step after the other, and each lets go of its model before the next one loads its own.
"""
