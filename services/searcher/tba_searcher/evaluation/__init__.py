"""The evaluator: a process that `tba evaluate` starts for one model.

    prompts --generating--> answers --scoring--> scores ---------.
                               |---- perplexity (starting model) |--> numbers --> evaluation.json
                               `---- diversity (embedding model) '

The steps run one after the other. Each frees its model before the next one loads its own.
"""
