"""The objects that applications hold: queues, producers, push consumers, simple consumers, the transactional outbox."""
