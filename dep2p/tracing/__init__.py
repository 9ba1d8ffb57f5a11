"""Recording a trace: event log, files, settings, clock readings."""
