"""Traces: the events that nodes record, and their files.

:mod:`~dep2p.traces.schema` is the one place where events are defined; writer, simulator, importers and the Spark jobs
share it. :mod:`~dep2p.traces.files` is the format on disk. The specification: ``docs/spec/trace.md``.
"""
