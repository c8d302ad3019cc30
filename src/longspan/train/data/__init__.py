"""Documents: read from files, said precisely why not, cut to a run's sequence length, and counted."""

from longspan.train.data.corpus import Corpus, read_corpus
from longspan.train.data.report import Report
from longspan.train.data.rows import count_targets

__all__ = ["Corpus", "Report", "count_targets", "read_corpus"]
