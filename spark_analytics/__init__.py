"""PySpark jobs over the traces that nodes write."""
