"""Pure cores of the durable queues: queues, partitions, channels, and their stored form."""
