"""Order by key: the partition of a key, also while partitions are added. Pure."""
