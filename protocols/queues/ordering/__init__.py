"""Order by key: where a key goes, also while partitions are added. Pure."""
