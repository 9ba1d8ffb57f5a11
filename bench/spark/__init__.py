"""The benchmark of the Spark jobs."""
