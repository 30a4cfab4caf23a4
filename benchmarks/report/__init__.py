"""The report of one or more results: an HTML page that needs nothing else, JSON and CSV."""

from benchmarks.report.files import write

__all__ = ["write"]
