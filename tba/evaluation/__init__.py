"""The published evaluation of one model: the job for the evaluator, its report, and the statistics.

tba evaluate --> EvaluationJob --> tba_searcher.evaluation (a child process) --> EvaluationReport --> table
"""

from tba.evaluation.evaluation_job import Comparison, Estimate, EvaluationJob, EvaluationReport, ModeReport, ScoreCounts

__all__ = [
    "Comparison",
    "Estimate",
    "EvaluationJob",
    "EvaluationReport",
    "ModeReport",
    "ScoreCounts",
]
