"""The client flows: producer, push consumer with its process queues. Pure."""
