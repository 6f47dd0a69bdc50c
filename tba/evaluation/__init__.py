"""The evaluation of one model by `tba evaluate`: the job for the evaluator, its report, and the statistics.

tba evaluate --> EvaluationJob --> tba_searcher.evaluation (a child process) --> EvaluationReport --> table
"""
