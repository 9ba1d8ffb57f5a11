"""Pure cores of the durable queues: queues, partitions, channels, and what a store keeps of them."""
