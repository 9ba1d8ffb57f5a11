"""The common part of all benchmarks: processes, environment, comparison, report, servers."""
