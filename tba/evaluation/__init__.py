"""The published evaluation of one model: what is asked of the evaluator, what it answers, and how that is shown.

tba evaluate --> EvaluationJob --> tba_searcher.evaluation (a child process) --> EvaluationReport --> table
"""

from tba.evaluation.job import EvaluationJob
from tba.evaluation.report import Comparison, Estimate, EvaluationReport, ModeReport, ScoreCounts
from tba.evaluation.table import render_table

__all__ = [
    "Comparison",
    "Estimate",
    "EvaluationJob",
    "EvaluationReport",
    "ModeReport",
    "ScoreCounts",
    "render_table",
]
