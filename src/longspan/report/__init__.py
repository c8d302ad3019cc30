"""The page that tells of a run: report.html, made of metrics.jsonl and run.json."""

from longspan.report.facts import REPORT, RUN, End, Facts, PlanFacts, read_facts, write_facts
from longspan.report.write import conclude, end_of, write_report

__all__ = [
    "REPORT",
    "RUN",
    "End",
    "Facts",
    "PlanFacts",
    "conclude",
    "end_of",
    "read_facts",
    "write_facts",
    "write_report",
]
